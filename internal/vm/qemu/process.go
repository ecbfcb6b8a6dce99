//go:build linux

package qemu

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A process is one running QEMU, held by a descriptor so that a reused process id
// is never mistaken for it.
type process struct {
	pid int
	fd  int // pidfd
}

// openProcess takes hold of the process with this id. The caller makes sure, after
// it returns, that this is the process it meant.
func openProcess(pid int) (*process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	return &process{pid: pid, fd: fd}, nil
}

func (p *process) kill() error {
	err := unix.PidfdSendSignal(p.fd, unix.SIGKILL, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// wait returns true when the process has ended, false when the time is over.
// Negative is for ever.
func (p *process) wait(limit time.Duration) bool {
	millis := -1
	if limit >= 0 {
		millis = int(limit.Milliseconds())
	}
	for {
		fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, millis)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err == nil && n > 0
	}
}

func (p *process) close() { unix.Close(p.fd) }

// usage is the processor time the process has used, and whether a signal has stopped it.
func (p *process) usage() (cpu time.Duration, stopped bool, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	if err != nil {
		return 0, false, err
	}
	// The name, in parentheses, may hold anything; the state is the first field after
	// it, utime and stime are the 12th and 13th, in ticks of 1/100 s on every Linux
	// that Go runs on.
	i := bytes.LastIndexByte(b, ')')
	fields := strings.Fields(string(b[i+1:]))
	if i < 0 || len(fields) < 13 {
		return 0, false, fmt.Errorf("cannot read the processor time of process %d", p.pid)
	}
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	system, err2 := strconv.ParseInt(fields[12], 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return 0, false, err
	}
	return time.Duration(user+system) * 10 * time.Millisecond, fields[0] == "T", nil
}

// findProcess looks for the QEMU that works in dir: its working directory is the
// machine's folder, which holds even when it is stopped or its sockets are gone.
// It returns nil when there is none.
func findProcess(dir string) (*process, error) {
	want, err := os.Stat(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !worksIn(pid, want) {
			continue
		}
		p, err := openProcess(pid)
		if err != nil {
			continue // ended meanwhile
		}
		if worksIn(pid, want) { // still, and the descriptor is its
			return p, nil
		}
		p.close()
	}
	return nil, nil
}

func worksIn(pid int, dir os.FileInfo) bool {
	proc := "/proc/" + strconv.Itoa(pid)
	cwd, err := os.Stat(proc + "/cwd")
	if err != nil || !os.SameFile(cwd, dir) {
		return false
	}
	args, err := os.ReadFile(proc + "/cmdline")
	if err != nil {
		return false
	}
	name, _, _ := bytes.Cut(args, []byte{0})
	return strings.HasPrefix(filepath.Base(string(name)), "qemu-system-")
}
