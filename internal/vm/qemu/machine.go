package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/vm"
)

// machine implements vm.Machine.
type machine struct {
	config  vm.Config
	pid     int
	monitor *qmp

	mu       sync.Mutex
	guest    net.Conn // the guest channel that was dialled last
	shutdown *shutdownEvent
	waiters  []chan vm.Exit
	exit     *vm.Exit
	gone     chan struct{} // closed when the process has ended
}

func newMachine(c vm.Config, pid int) *machine {
	return &machine{config: c, pid: pid, gone: make(chan struct{})}
}

// connect opens monitor and console.
func (m *machine) connect(ctx context.Context) error {
	conn, err := m.dial(ctx, monitorSocket)
	if err != nil {
		return err
	}
	if m.monitor, err = greet(ctx, conn, m.event); err != nil {
		return err
	}
	console, err := m.dial(ctx, consoleSocket)
	if err != nil {
		return err
	}
	go keepConsole(console, m.config.ConsoleFile, m.config.ConsoleLimit)
	return nil
}

// dial connects to one of the machine's sockets.
func (m *machine) dial(ctx context.Context, name string) (net.Conn, error) {
	path, done, err := shortPath(m.config.Dir, name)
	if err != nil {
		return nil, err
	}
	defer done()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, vm.ErrEnded
	}
	return conn, nil
}

// event takes in what QEMU tells by itself.
func (m *machine) event(name string, data json.RawMessage) {
	if name == "SHUTDOWN" {
		e := decode[shutdownEvent](data)
		m.mu.Lock()
		m.shutdown = &e
		m.mu.Unlock()
	}
}

// watch waits for the end of a process that is not our child.
func (m *machine) watch() {
	fd, err := unix.PidfdOpen(m.pid, 0)
	if err == nil {
		defer unix.Close(fd)
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
	}
	m.exited(nil, "")
}

// exited records the end of the process and tells everybody who waits.
func (m *machine) exited(err error, words string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.exit = &vm.Exit{At: time.Now()}
	switch s := m.shutdown; {
	case s != nil && s.Reason == "guest-shutdown":
		m.exit.Clean = true
	case s != nil && s.Guest:
		m.exit.Text = "the guest's kernel stopped or restarted"
	default:
		m.exit.Text = exitText(err, words)
	}
	removeSockets(m.config.Dir)
	for _, ch := range m.waiters {
		ch <- *m.exit
		close(ch)
	}
	m.waiters = nil
	if m.guest != nil {
		m.guest.Close()
	}
	if m.monitor != nil {
		m.monitor.close()
	}
	close(m.gone)
}

// exitText is one clause on how a process ended.
func exitText(err error, words string) string {
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		if status, ok := failed.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			return fmt.Sprintf("its process was ended by signal %d (%s)", status.Signal(), unix.SignalName(status.Signal()))
		}
		if words != "" {
			return "QEMU: " + words
		}
		return failed.Error()
	}
	return "its process ended"
}

func (m *machine) Pause(ctx context.Context) error  { return m.monitor.run(ctx, "stop", nil, nil) }
func (m *machine) Resume(ctx context.Context) error { return m.monitor.run(ctx, "cont", nil, nil) }

func (m *machine) PowerOff(ctx context.Context) error {
	return m.monitor.run(ctx, "system_powerdown", nil, nil)
}

// DialGuest implements vm.Machine. QEMU serves one connection and lets others wait,
// so the one before is closed first.
func (m *machine) DialGuest(ctx context.Context) (net.Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.exit != nil {
		return nil, vm.ErrEnded
	}
	if m.guest != nil {
		m.guest.Close()
	}
	conn, err := m.dial(ctx, guestSocket)
	m.guest = conn
	return conn, err
}

// killWait is how long a killed process may take to go: a process in the middle of
// writing to a slow disk is not gone at once.
const killWait = 10 * time.Second

func (m *machine) Kill() error {
	fd, err := unix.PidfdOpen(m.pid, 0)
	if err == nil {
		// Between opening and now the process cannot have become another one
		// unless it was gone before, which m.gone then says.
		select {
		case <-m.gone:
		default:
			unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
		unix.Close(fd)
	}
	select {
	case <-m.gone:
		return nil
	case <-time.After(killWait):
		return fmt.Errorf("its process %d cannot be ended", m.pid)
	}
}

func (m *machine) Wait() <-chan vm.Exit {
	ch := make(chan vm.Exit, 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.exit != nil {
		ch <- *m.exit
		close(ch)
	} else {
		m.waiters = append(m.waiters, ch)
	}
	return ch
}

func (m *machine) PID() int { return m.pid }

// ticksPerSecond is the unit of processor time in /proc, the same on every Linux
// that doz knows.
const ticksPerSecond = 100

func (m *machine) Usage() (vm.Usage, error) {
	var u vm.Usage
	var st unix.Stat_t
	if err := unix.Stat(m.config.MemoryFile, &st); err != nil {
		return u, fmt.Errorf("cannot measure the machine's memory: %w", err)
	}
	u.MemoryBytes = st.Blocks * 512
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", m.pid))
	if err != nil {
		return u, vm.ErrEnded
	}
	// The fields after the name, which may hold anything but ends with the last ")".
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	var user, system int64
	if len(fields) > 12 {
		fmt.Sscan(fields[11], &user)
		fmt.Sscan(fields[12], &system)
	}
	u.CPU = time.Duration(user+system) * time.Second / ticksPerSecond
	return u, nil
}

// keepConsole copies what the guest prints to a file, as much as it may have, and
// goes on reading when that is full, so that the guest never waits for it.
func keepConsole(conn net.Conn, file string, limit int64) {
	defer conn.Close()
	var out *os.File
	var size int64
	if file != "" {
		f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err == nil {
			defer f.Close()
			out = f
			if info, err := f.Stat(); err == nil {
				size = info.Size()
			}
		}
	}
	buf := make([]byte, 16<<10)
	for {
		n, err := conn.Read(buf)
		if out != nil && n > 0 {
			keep := min(int64(n), max(0, limit-size))
			out.Write(buf[:keep])
			if size += keep; keep < int64(n) {
				fmt.Fprintf(out, "\n[doz: the guest printed more than %d bytes; the rest was dropped]\n", limit)
				out = nil
			}
		}
		if err != nil {
			return
		}
	}
}
