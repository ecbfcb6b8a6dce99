package vm

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"dozable.com/doz/internal/api"
)

// shared is the store all tests use; each has sandboxes of its own.
var shared doz

func TestMain(m *testing.M) {
	os.Exit(func() int {
		program, lab, err := built()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		dir, err := os.MkdirTemp("", "doz-vm-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		shared = doz{program: program, store: filepath.Join(dir, "store")}
		if out, err := shared.command(context.Background(), "image", "import", "lab", lab).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "the lab image cannot be made: %s\n", out)
			return 1
		}
		defer func() {
			shared.command(context.Background(), "host", "stop").Run()
			if n := shared.machines(); n > 0 {
				fmt.Fprintln(os.Stderr, n, "machines were left behind")
			}
		}()
		return m.Run()
	}())
}

func TestWholeLife(t *testing.T) {
	d := shared
	d.ok(t, "create", "life")
	if v := d.inspect(t, "life"); v.Phase != api.Off || v.Image != "lab" || !v.Isolated {
		t.Errorf("created: %+v", v)
	}
	if r := d.run(t, "", "create", "life"); r.code != 4 {
		t.Errorf("created twice: %+v", r)
	}
	if r := d.run(t, "", "exec", "--no-start", "life", "--", "true"); r.code != 3 {
		t.Errorf("exec --no-start of one that is off: %+v", r)
	}
	if out := d.ok(t, "exec", "life", "--", "hostname"); out != "life\n" {
		t.Errorf("hostname: %q", out)
	}
	d.ok(t, "exec", "life", "--", "sh", "-c", "echo kept >/root/file && sync")
	if out := d.ok(t, "ls"); !strings.Contains(out, "life") || !strings.Contains(out, "running") {
		t.Errorf("ls:\n%s", out)
	}
	if r := d.run(t, "", "shutdown", "life"); r.code != 5 {
		t.Errorf("shutdown without a yes: %+v", r)
	}
	d.ok(t, "shutdown", "--yes", "life")
	if v := d.inspect(t, "life"); v.Phase != api.Off || v.Problem != "" || v.DiedWithHost {
		t.Errorf("shut down: %+v", v)
	}
	if out := d.ok(t, "exec", "life", "--", "cat", "/root/file"); out != "kept\n" {
		t.Errorf("the file: %q", out)
	}
	var boots []api.Boot
	if err := json.Unmarshal([]byte(d.ok(t, "console", "--list", "--json", "life")), &boots); err != nil || len(boots) != 2 || !boots[0].OK {
		t.Errorf("boots: %+v, %v", boots, err)
	}
	if r := d.run(t, "", "rm", "life"); r.code != 5 || !strings.Contains(r.err, "life") {
		t.Errorf("rm without a yes: %+v", r)
	}
	d.ok(t, "rm", "--yes", "life")
	if r := d.run(t, "", "inspect", "life"); r.code != 2 {
		t.Errorf("inspect of a removed one: %+v", r)
	}
}

func TestExec(t *testing.T) {
	d := shared
	d.sandbox(t, "exec")
	d.ok(t, "start", "exec")
	for _, c := range []struct {
		what, input string
		args        []string
		want        result
	}{
		{"streams apart", "", []string{"sh", "-c", "echo out; echo err >&2; exit 7"}, result{7, "out\n", "err\n"}},
		{"a script on standard input", "echo from $0\necho line\n", []string{"sh"}, result{0, "from sh\nline\n", ""}},
		{"no such program", "", []string{"nosuch"}, result{125, "", "doz: cannot run a program in sandbox \"exec\": nosuch is not on the guest's PATH\n"}},
		{"ended by a signal", "", []string{"sh", "-c", "kill -9 $$"}, result{137, "", ""}},
		{"a background child holds nothing up", "", []string{"sh", "-c", "sleep 1000 & echo started"}, result{0, "started\n", ""}},
		{"default environment", "", []string{"sh", "-c", "echo $HOME $USER $LANG; pwd; id -u"}, result{0, "/root root C.UTF-8\n/root\n0\n", ""}},
	} {
		if got := d.run(t, c.input, append([]string{"exec", "exec", "--"}, c.args...)...); got != c.want {
			t.Errorf("%s: got %+v, want %+v", c.what, got, c.want)
		}
	}
	got := d.run(t, "", "exec", "-e", "A=1 2", "--workdir", "/tmp", "exec", "--user", "nobody", "--", "sh", "-c", "echo $A; pwd; id -un")
	if want := (result{0, "1 2\n/tmp\nnobody\n", ""}); got != want {
		t.Errorf("options: got %+v, want %+v", got, want)
	}
	if r := d.run(t, "", "exec", "exec", "--user", "nosuch", "--", "true"); r.code != 125 {
		t.Errorf("no such user: %+v", r)
	}
	if r := d.run(t, "", "exec", "exec", "--timeout", "0.5", "--", "sh", "-c", "sleep 777 & sleep 778"); r.code != 137 || !strings.Contains(r.err, "time ran out") {
		t.Errorf("time-out: %+v", r)
	}
	if r := d.run(t, "", "exec", "exec", "--", "sh", "-c", "ls /proc/[0-9]*/cmdline | xargs -n1 cat 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 77[78]'"); strings.TrimSpace(r.out) != "0" {
		t.Errorf("the time-out left programs: %q", r.out)
	}
	var j struct {
		ExitCode       int
		Stdout, Stderr string
	}
	r := d.run(t, "", "exec", "--json", "exec", "--", "sh", "-c", "echo o; echo e >&2; exit 3")
	if err := json.Unmarshal([]byte(r.out), &j); err != nil || r.code != 3 || j.ExitCode != 3 || j.Stdout != "o\n" || j.Stderr != "e\n" {
		t.Errorf("--json: %+v", r)
	}
}

// TestBytes sends 256 MiB of random bytes through a pipe inside and back.
func TestBytes(t *testing.T) {
	const size = 256 << 20
	d := shared
	d.sandbox(t, "bytes")
	d.ok(t, "start", "bytes")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := d.command(ctx, "exec", "--timeout", "0", "bytes", "--", "cat")
	sent, came := sha256.New(), sha256.New()
	cmd.Stdin, cmd.Stdout = io.TeeReader(io.LimitReader(rand.Reader, size), sent), came
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(came.Sum(nil), sent.Sum(nil)) {
		t.Error("what came back is not what was sent")
	}
}

// TestRefusedDisk: a file system that the kernel refuses is mended as it boots.
func TestRefusedDisk(t *testing.T) {
	d := shared
	d.sandbox(t, "mended")
	// The group descriptors: behind the kernel's back, and without the time to put
	// them right.
	d.ok(t, "exec", "mended", "--", "sh", "-c", "echo kept >/root/file && sync && dd if=/dev/zero of=/dev/vda bs=4096 seek=1 count=1 conv=fsync,notrunc")
	kill(t, d.inspect(t, "mended").PID)
	for end := time.Now().Add(patience); d.inspect(t, "mended").Phase != api.Off; {
		if time.Now().After(end) {
			t.Fatal("nobody noticed")
		}
	}
	if out := d.ok(t, "exec", "mended", "--", "cat", "/root/file"); out != "kept\n" {
		t.Errorf("the file: %q", out)
	}
	if out := d.ok(t, "console", "--steps", "mended"); !strings.Contains(out, "e2fsck mended it") {
		t.Errorf("nobody says so:\n%s", out)
	}
}

func TestCtrlC(t *testing.T) {
	d := shared
	d.sandbox(t, "ctrlc")
	d.ok(t, "start", "ctrlc")
	cmd := d.command(t.Context(), "exec", "ctrlc", "--", "sh", "-c", "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if lines.Text() == "ready" {
			cmd.Process.Signal(syscall.SIGINT)
		}
		if lines.Text() == "caught" {
			break
		}
	}
	if cmd.Wait(); cmd.ProcessState.ExitCode() != 9 {
		t.Errorf("exit code %d", cmd.ProcessState.ExitCode())
	}
}

// TestHostKilled: what runs goes on, and the next host takes it over.
func TestHostKilled(t *testing.T) {
	d := shared
	d.sandbox(t, "adopted")
	pid := strings.TrimSpace(d.ok(t, "exec", "adopted", "--", "sh", "-c", "sleep 100000 >/dev/null 2>&1 & echo $!"))
	before := d.inspect(t, "adopted")
	kill(t, d.host(t))
	d.ok(t, "exec", "adopted", "--", "kill", "-0", pid)
	after := d.inspect(t, "adopted")
	if after.PID != before.PID || after.Phase != api.Running || after.DiedWithHost {
		t.Errorf("before %+v\nafter %+v", before, after)
	}
}

// TestMachineKilled: it is marked, and starts again with its disk.
func TestMachineKilled(t *testing.T) {
	d := shared
	d.sandbox(t, "killed")
	d.ok(t, "exec", "killed", "--", "sh", "-c", "echo kept >/root/file && sync")
	kill(t, d.inspect(t, "killed").PID)
	for end := time.Now().Add(patience); d.inspect(t, "killed").Phase != api.Off; {
		if time.Now().After(end) {
			t.Fatal("nobody noticed")
		}
	}
	if v := d.inspect(t, "killed"); !v.DiedWithHost || v.Problem == "" {
		t.Errorf("%+v", v)
	}
	if out := d.ok(t, "exec", "killed", "--", "cat", "/root/file"); out != "kept\n" {
		t.Errorf("the file: %q", out)
	}
	// Both at once.
	host := d.host(t)
	syscall.Kill(host, syscall.SIGSTOP)
	machine := machineOf(t, d, "killed")
	kill(t, machine)
	kill(t, host)
	if v := d.inspect(t, "killed"); v.Phase != api.Off || !v.DiedWithHost {
		t.Errorf("%+v", v)
	}
	if out := d.ok(t, "exec", "killed", "--", "cat", "/root/file"); out != "kept\n" {
		t.Errorf("the file: %q", out)
	}
}

// machineOf finds a sandbox's machine without a host's help.
func machineOf(t *testing.T, d doz, name string) int {
	t.Helper()
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		if cwd, err := os.Readlink(link); err == nil && cwd == filepath.Join(d.store, "sandboxes", name, "machine") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(link)))
			return pid
		}
	}
	t.Fatalf("sandbox %s has no machine", name)
	return 0
}

// TestHostKilledInABoot kills the host at each step of a start that it tells of.
func TestHostKilledInABoot(t *testing.T) {
	d := shared
	d.sandbox(t, "boot")
	for _, step := range []string{"start/recorded", "start/machine", "start/guest", "start/running"} {
		host := d.host(t)
		follow := d.command(t.Context(), "events", "--json", "boot")
		out, err := follow.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := follow.Start(); err != nil {
			t.Fatal(err)
		}
		start := d.command(t.Context(), "start", "boot")
		started := make(chan error, 1)
		go func() { time.Sleep(300 * time.Millisecond); started <- start.Run() }() // once the events are followed
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var e api.Event
			if json.Unmarshal(lines.Bytes(), &e) == nil && e.Step == step {
				syscall.Kill(host, syscall.SIGKILL)
				break
			}
		}
		follow.Wait()
		<-started
		if r := d.run(t, "", "exec", "boot", "--", "true"); r.code != 0 {
			t.Errorf("killed at %s, the next command: %+v", step, r)
		}
		if n := d.machines(); n != 1 {
			t.Errorf("killed at %s, %d machines run", step, n)
		}
		d.ok(t, "shutdown", "--yes", "boot")
	}
}

// TestStoppedMachine: a machine that does not answer is said not to, and disturbs
// nobody.
func TestStoppedMachine(t *testing.T) {
	d := shared
	d.sandbox(t, "stopped")
	d.ok(t, "start", "stopped")
	pid := d.inspect(t, "stopped").PID
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if out := d.ok(t, "ls"); !strings.Contains(out, "unresponsive") {
		t.Errorf("ls:\n%s", out)
	}
	r := d.run(t, "", "exec", "stopped", "--", "true")
	if r.code != 125 || !strings.Contains(r.err, "does not answer") {
		t.Errorf("exec: %+v", r)
	}
	for _, op := range []string{"hibernate", "pause"} {
		if r := d.run(t, "", op, "stopped"); r.code != 1 || !strings.Contains(r.err, "does not answer") {
			t.Errorf("%s: %+v", op, r)
		}
	}
	syscall.Kill(pid, syscall.SIGCONT)
	if v := d.inspect(t, "stopped"); v.Phase != api.Running {
		t.Errorf("after all that: %+v", v)
	}
	d.ok(t, "exec", "stopped", "--", "true")
	syscall.Kill(pid, syscall.SIGSTOP)
	// rm, at the test's end, must be able to end it as it is.
}

// TestStartsAtOnce: many commands need the host and the machine at the same time.
func TestStartsAtOnce(t *testing.T) {
	d := shared
	d.sandbox(t, "once")
	d.ok(t, "host", "stop")
	results := make(chan result)
	for range 4 {
		go func() { results <- d.run(t, "", "exec", "once", "--", "echo", "hi") }()
	}
	for range 4 {
		if r := <-results; r.code != 0 || r.out != "hi\n" {
			t.Errorf("%+v", r)
		}
	}
	if n := d.machines(); n != 1 {
		t.Errorf("%d machines run", n)
	}
}

// TestDamagedKernel: the store's copy is checked on every start and replaced.
func TestDamagedKernel(t *testing.T) {
	d := shared
	d.sandbox(t, "kernel")
	kernels, _ := filepath.Glob(filepath.Join(d.store, "kernels", "vmlinux-*"))
	if len(kernels) == 0 {
		t.Fatal("the store has no kernel")
	}
	os.Chmod(kernels[0], 0o600)
	f, err := os.OpenFile(kernels[0], os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.WriteAt([]byte("damage"), 1<<20)
	f.Close()
	if r := d.run(t, "", "start", "kernel"); r.code != 0 || !strings.Contains(r.err, "was damaged") {
		t.Errorf("nobody said so: %+v", r)
	}
}

// TestDamagedDisk: it is refused with a sentence, and nothing is left running.
func TestDamagedDisk(t *testing.T) {
	d := shared
	d.sandbox(t, "disk")
	disk := filepath.Join(d.store, "sandboxes", "disk", "root.qcow2")
	if err := os.WriteFile(disk, []byte("this is no disk"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := d.run(t, "", "start", "disk")
	if r.code != 1 || strings.Count(r.err, "\n") > 2 {
		t.Errorf("%+v", r)
	}
	if v := d.inspect(t, "disk"); v.Phase != api.Failed || v.Problem == "" {
		t.Errorf("%+v", v)
	}
}

// TestExampleClient runs the client of docs/protocol.md.
func TestExampleClient(t *testing.T) {
	d := shared
	d.sandbox(t, "client")
	d.ok(t, "start", "client")
	cmd := exec.Command("python3", "../../docs/example_client.py", d.store, "client", "sh", "-c", "echo out; exit 4")
	out, err := cmd.Output()
	if code := cmd.ProcessState.ExitCode(); code != 4 || string(out) != "out\n" {
		t.Errorf("exit code %d, %q, %v", code, out, err)
	}
}

func TestDoctor(t *testing.T) {
	var checks []struct {
		Name string
		OK   bool
		Text string
	}
	if err := json.Unmarshal([]byte(shared.ok(t, "doctor", "--json")), &checks); err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		if c.Name == "processor" && c.Text != "" {
			return
		}
	}
	t.Errorf("doctor does not say how the processor is run: %+v", checks)
}
