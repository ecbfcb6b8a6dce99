//go:build linux

package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/vm"
)

// machine implements vm.Machine.
type machine struct {
	config  vm.Config
	process *process

	monitor *qmp          // set by connect, before the machine is handed out
	console net.Conn      // likewise
	drained chan struct{} // closed when nothing more comes from the console

	mu          sync.Mutex // guards what follows
	guest       net.Conn   // the guest channel that was dialled last
	guestUnused bool       // nobody has been given guest yet
	stands      bool       // the processors do, as far as we have had to do with it
	detached    bool       // the folder is no longer ours
	shutdown    *shutdownEvent
	waiters     []chan vm.Exit
	exit        *vm.Exit
	gone        chan struct{} // closed when the process has ended
}

func newMachine(c vm.Config, p *process) *machine {
	return &machine{config: c, process: p, gone: make(chan struct{})}
}

// connect opens monitor and console. The console's file is the machine's from then
// on, unless it fails.
func (m *machine) connect(ctx context.Context, file *consoleFile) error {
	conn, err := dialSocket(ctx, m.config.Dir, monitorSocket)
	if err != nil {
		return err
	}
	monitor, err := greet(ctx, conn, m.event)
	if err != nil {
		return err
	}
	console, err := dialSocket(ctx, m.config.Dir, consoleSocket)
	if err != nil {
		monitor.close()
		return err
	}
	m.mu.Lock()
	m.monitor, m.console, m.drained = monitor, console, make(chan struct{})
	m.mu.Unlock()
	go func() {
		defer close(m.drained)
		file.drain(console)
	}()
	return nil
}

// shutdownEvent is the data of QEMU's SHUTDOWN event.
type shutdownEvent struct {
	Guest  bool   `json:"guest"`
	Reason string `json:"reason"`
}

// event takes in what QEMU tells by itself.
func (m *machine) event(name string, data json.RawMessage) {
	var e shutdownEvent
	if name != "SHUTDOWN" || json.Unmarshal(data, &e) != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shutdown = &e
}

// ended records the end of the process and tells everybody who waits. err and words
// are those of a process that was our child.
func (m *machine) ended(err error, words string) {
	m.mu.Lock()
	monitor, drained := m.monitor, m.drained
	m.mu.Unlock()
	if monitor != nil {
		// The last event and the last words may still be under way.
		<-monitor.done
		<-drained
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.detached {
		removeSockets(m.config.Dir)
	}
	m.exit = &vm.Exit{At: time.Now()}
	switch s := m.shutdown; {
	case s != nil && s.Reason == "guest-shutdown":
		m.exit.Clean = true
	case s != nil && s.Guest:
		m.exit.Text = "the guest's kernel crashed or restarted"
	default:
		m.exit.Text = exitText(err, words)
	}
	for _, ch := range m.waiters {
		ch <- *m.exit
		close(ch)
	}
	m.waiters = nil
	if m.guest != nil {
		m.guest.Close()
	}
	m.process.close()
	close(m.gone)
}

// exitText is one clause on how a process ended.
func exitText(err error, words string) string {
	var failed *exec.ExitError
	if !errors.As(err, &failed) {
		return "its process ended"
	}
	if status, ok := failed.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		text := fmt.Sprintf("its process was ended by signal %d (%s)", status.Signal(), unix.SignalName(status.Signal()))
		if status.Signal() == unix.SIGBUS {
			text += ": there is no room for its memory on the store's disk" // the memory is a file
		}
		return text
	}
	if words != "" {
		return "QEMU says: " + words
	}
	return "its process ended with " + failed.Error()
}

func (m *machine) Pause(ctx context.Context) error {
	err := m.monitor.run(ctx, "stop", nil, nil)
	m.mu.Lock()
	stood := m.stands
	m.stands = stood || err == nil
	m.mu.Unlock()
	if errors.Is(err, vm.ErrUnresponsive) && !stood {
		// It takes the command once it answers again, and nobody waits for that: it is
		// told to go on as well.
		m.tell("cont")
	}
	return err
}

func (m *machine) Resume(ctx context.Context) error {
	err := m.monitor.run(ctx, "cont", nil, nil)
	if err == nil {
		m.mu.Lock()
		m.stands = false
		m.mu.Unlock()
	}
	return err
}

// tell sends a command and does not wait for what becomes of it.
func (m *machine) tell(command string) {
	ctx, cancel := context.WithTimeout(context.Background(), tellDeadline)
	defer cancel()
	m.monitor.run(ctx, command, nil, nil)
}

const tellDeadline = 50 * time.Millisecond

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
	if m.guestUnused {
		m.guestUnused = false
		return m.guest, nil
	}
	if m.guest != nil {
		m.guest.Close()
		m.guest = nil
	}
	conn, err := dialSocket(ctx, m.config.Dir, guestSocket)
	if err != nil {
		return nil, err
	}
	m.guest = conn
	return conn, nil
}

// killDeadline is how long a killed process may take to go: one in the middle of
// writing to a slow disk is not gone at once.
const killDeadline = 10 * time.Second

func (m *machine) Kill() error {
	m.mu.Lock()
	var err error
	if m.exit == nil { // the descriptor is closed after that
		err = m.process.kill()
	}
	m.mu.Unlock()
	if err != nil {
		return fmt.Errorf("cannot end process %d: %w", m.process.pid, err)
	}
	select {
	case <-m.gone:
		return nil
	case <-time.After(killDeadline):
		return fmt.Errorf("cannot end process %d: it is still there after %s", m.process.pid, killDeadline)
	}
}

// Detach lets go of the machine, as the end of this process would: it runs on, and
// can be adopted.
func (m *machine) Detach() {
	m.mu.Lock()
	m.detached = true
	monitor, console, guest := m.monitor, m.console, m.guest
	m.mu.Unlock()
	if console != nil {
		console.Close()
	}
	if guest != nil {
		guest.Close()
	}
	if monitor != nil {
		monitor.close()
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

func (m *machine) PID() int { return m.process.pid }

func (m *machine) Usage() (vm.Usage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.exit != nil {
		return vm.Usage{}, vm.ErrEnded
	}
	var st unix.Stat_t
	if err := unix.Stat(m.config.MemoryFile, &st); err != nil {
		return vm.Usage{}, fmt.Errorf("cannot measure the machine's memory: %w", err)
	}
	cpu, stopped, err := m.process.usage()
	if err != nil {
		return vm.Usage{}, fmt.Errorf("cannot measure the machine's processor time: %w", err)
	}
	return vm.Usage{MemoryBytes: st.Blocks * 512, CPU: cpu, Stopped: stopped}, nil
}
