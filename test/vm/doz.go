// Package vm tests doz as a user runs it: the built program, a store of its own, the
// lab image, real machines. It must not reach behind the program's back except to
// break things.
package vm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dozable.com/doz/internal/api"
)

// patience is when a command is given up; an emulated boot on a busy computer takes
// a tenth of it.
const patience = 3 * time.Minute

// doz is the program with one store.
type doz struct {
	program string
	store   string
}

// built gives the program make build has left, and the lab's root.
func built() (program, lab string, err error) {
	parts := os.Getenv("DOZ_PARTS")
	lab = os.Getenv("DOZ_LAB_TAR")
	if parts == "" || lab == "" {
		return "", "", errors.New("DOZ_PARTS and DOZ_LAB_TAR must name libexec/doz and the lab's tar, as make test sees to")
	}
	return filepath.Join(parts, "doz"), lab, nil
}

// result is what a command did.
type result struct {
	code     int
	out, err string
}

// run runs a command with input and gives what it did.
func (d doz) run(t *testing.T, input string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := d.command(ctx, args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("doz %s: %v", strings.Join(args, " "), err)
	}
	if ctx.Err() != nil {
		t.Fatalf("doz %s did not end", strings.Join(args, " "))
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

func (d doz) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, d.program, args...)
	cmd.Env = append(os.Environ(), "DOZ_STORE="+d.store, "DOZ_PARTS=")
	return cmd
}

// ok runs a command that must succeed and gives its output.
func (d doz) ok(t *testing.T, args ...string) string {
	t.Helper()
	r := d.run(t, "", args...)
	if r.code != 0 {
		t.Fatalf("doz %s: exit code %d\n%s%s", strings.Join(args, " "), r.code, r.out, r.err)
	}
	return r.out
}

// inspect gives a sandbox as doz sees it.
func (d doz) inspect(t *testing.T, name string) api.Sandbox {
	t.Helper()
	var v api.Sandbox
	if err := json.Unmarshal([]byte(d.ok(t, "inspect", name)), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// host gives the pid of the store's host, started if need be.
func (d doz) host(t *testing.T) int {
	t.Helper()
	var s api.Status
	if err := json.Unmarshal([]byte(d.ok(t, "host", "start", "--json")), &s); err != nil {
		t.Fatal(err)
	}
	return s.PID
}

// sandbox makes a sandbox that is gone when the test is.
func (d doz) sandbox(t *testing.T, name string) {
	t.Helper()
	d.ok(t, "create", name)
	t.Cleanup(func() { d.ok(t, "rm", "--yes", name) })
}

// kill ends a process as nothing else does, and waits until it is gone.
func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatalf("cannot kill process %d: %v", pid, err)
	}
	for end := time.Now().Add(patience); alive(pid); {
		if time.Now().After(end) {
			t.Fatalf("process %d does not die", pid)
		}
		time.Sleep(time.Millisecond)
	}
}

// alive says whether a process runs; a dead one that nobody has waited for does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(state, "Z")
}

// machines counts the machine processes that work in the store.
func (d doz) machines() int {
	n := 0
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		if cwd, err := os.Readlink(link); err == nil && strings.HasPrefix(cwd, d.store+"/sandboxes/") {
			n++
		}
	}
	return n
}
