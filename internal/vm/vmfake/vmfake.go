// Package vmfake is an engine whose machines live in this process, for tests of what
// stands on the engine boundary. It passes the same conformance suite as the others.
//
// Its machines outlive whoever holds them, as real ones outlive a host: a second
// user of the same Engine adopts them. It must not be used outside tests.
package vmfake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dozable.com/doz/internal/vm"
)

// Options of the fake.
type Options struct {
	// Fail is asked at each point ("disk", "start", "restore", "adopt", "dial", "pause",
	// "resume", "save", "switch") whether to fail
	// there; nil never does.
	Fail func(point string) error
	// Deaf machines boot and never answer on the guest channel.
	Deaf bool
}

// Engine implements vm.Engine.
type Engine struct {
	options  Options
	mu       sync.Mutex
	machines map[string]*machine
	next     int
}

// New gives an engine with no machines.
func New(o Options) *Engine {
	if o.Fail == nil {
		o.Fail = func(string) error { return nil }
	}
	return &Engine{options: o, machines: map[string]*machine{}, next: 1000}
}

func (e *Engine) Probe(context.Context) (vm.Features, error) {
	return vm.Features{Engine: "fake", Version: "1.0", Arch: "x86_64", Accelerator: "none", AcceleratorWhy: "nothing runs", MachineType: "fake-1"}, nil
}

func (e *Engine) CreateDisk(_ context.Context, path string, size int64) error {
	if err := e.options.Fail("disk"); err != nil {
		return err
	}
	if size <= 0 {
		return errors.New("a disk needs a size")
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Truncate(size)
}

func (e *Engine) Start(_ context.Context, c vm.Config) (vm.Machine, error) {
	if err := e.options.Fail("start"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if m := e.machines[c.Dir]; m != nil {
		return nil, errors.New("a machine runs there already")
	}
	if c.CPUs < 1 || c.MemoryMiB < 1 {
		return nil, errors.New("a machine needs processors and memory")
	}
	for _, d := range c.Disks {
		for _, path := range append([]string{d.Path}, d.Layers...) {
			if _, err := os.Stat(path); err != nil {
				return nil, err
			}
		}
	}
	saved, err := e.memory(c)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(c.Dir, "fake"), nil, 0o600); err != nil {
		return nil, err
	}
	if c.ConsoleFile != "" {
		text := "fake kernel booted\n"
		if limit := c.ConsoleLimit; limit > 0 && limit < int64(len(text)) {
			text = fmt.Sprintf("%s\n[doz: the console printed more than %d bytes; the rest was dropped]\n", text[:limit], limit)
		}
		if err := os.WriteFile(c.ConsoleFile, []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	e.next++
	m := &machine{engine: e, config: c, state: saved, pid: e.next, line: newLine()}
	m.line.pause(c.Restore != "")
	m.paused = c.Restore != ""
	e.machines[c.Dir] = m
	if !e.options.Deaf {
		go m.serve(c)
	}
	return m, nil
}

// state is what a machine saves: enough to tell one machine from another.
type state struct {
	BootID string // drawn when it is first asked for, as Linux does
	CPUs   int
}

// memory makes a new machine's memory, or reads a saved machine's state.
func (e *Engine) memory(c vm.Config) (state, error) {
	if c.Restore == "" {
		return state{CPUs: c.CPUs}, os.WriteFile(c.MemoryFile, []byte("memory"), 0o600)
	}
	if err := e.options.Fail("restore"); err != nil {
		return state{}, fmt.Errorf("%w: %w", vm.ErrNoState, err)
	}
	var s state
	data, err := os.ReadFile(c.Restore)
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	if err == nil && s.CPUs != c.CPUs {
		err = errors.New("it is another machine's")
	}
	if err == nil {
		_, err = os.Stat(c.MemoryFile)
	}
	if err != nil {
		return s, fmt.Errorf("%w: %w", vm.ErrNoState, err)
	}
	return s, nil
}

func (e *Engine) Adopt(_ context.Context, c vm.Config) (vm.Machine, error) {
	if err := e.options.Fail("adopt"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if m := e.machines[c.Dir]; m != nil {
		return m, nil
	}
	return nil, vm.ErrNoMachine
}

func (e *Engine) KillLeftover(dir string) error {
	e.mu.Lock()
	m := e.machines[dir]
	e.mu.Unlock()
	if m == nil {
		return vm.ErrNoMachine
	}
	return m.Kill()
}

// Machines counts the machines that run.
func (e *Engine) Machines() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.machines)
}

// machine implements vm.Machine.
type machine struct {
	engine *Engine
	config vm.Config
	state  state
	pid    int
	line   *line

	mu      sync.Mutex
	paused  bool
	exit    *vm.Exit
	waiters []chan vm.Exit
}

func (m *machine) end(exit vm.Exit) {
	m.engine.mu.Lock()
	if m.engine.machines[m.config.Dir] == m {
		delete(m.engine.machines, m.config.Dir)
	}
	m.engine.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.exit != nil {
		return
	}
	exit.At = time.Now()
	m.exit = &exit
	os.Remove(filepath.Join(m.config.Dir, "fake"))
	m.line.close()
	for _, ch := range m.waiters {
		ch <- exit
		close(ch)
	}
	m.waiters = nil
}

// bootID tells one boot from another.
func (m *machine) bootID() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.state.BootID == "" {
		m.state.BootID = fmt.Sprintf("boot-%d", m.pid)
	}
	return m.state.BootID
}

// ended is vm.ErrEnded once the machine has.
func (m *machine) ended() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.exit != nil {
		return vm.ErrEnded
	}
	return nil
}

func (m *machine) Pause(context.Context) error  { return m.stand("pause", true) }
func (m *machine) Resume(context.Context) error { return m.stand("resume", false) }

func (m *machine) stand(point string, still bool) error {
	if err := m.engine.options.Fail(point); err != nil {
		return err
	}
	if err := m.ended(); err != nil {
		return err
	}
	m.line.pause(still)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = still
	return nil
}

func (m *machine) Save(_ context.Context, path string) error {
	if err := m.still("save"); err != nil {
		return err
	}
	m.mu.Lock()
	data, err := json.Marshal(m.state)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.Write(data)
	return err
}

func (m *machine) SwitchDisk(_ context.Context, i int, overlay string) error {
	if err := m.still("switch"); err != nil {
		return err
	}
	if i >= len(m.config.Disks) {
		return errors.New("there is no such disk")
	}
	_, err := os.Stat(overlay)
	return err
}

// still refuses what only a paused machine can do.
func (m *machine) still(point string) error {
	if err := m.engine.options.Fail(point); err != nil {
		return err
	}
	if err := m.ended(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.paused {
		return errors.New("its processors run")
	}
	return nil
}

func (m *machine) DialGuest(context.Context) (net.Conn, error) {
	if err := m.engine.options.Fail("dial"); err != nil {
		return nil, err
	}
	if err := m.ended(); err != nil {
		return nil, err
	}
	ours, theirs := net.Pipe()
	m.line.connect(theirs)
	return ours, nil
}

func (m *machine) PowerOff(context.Context) error {
	if err := m.ended(); err != nil {
		return err
	}
	if !m.engine.options.Deaf {
		go m.end(vm.Exit{Clean: true})
	}
	return nil
}

func (m *machine) Kill() error {
	m.end(vm.Exit{Text: "killed"})
	return nil
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

func (m *machine) Usage() (vm.Usage, error) {
	return vm.Usage{MemoryBytes: 1 << 20}, m.ended()
}

func (m *machine) PID() int { return m.pid }
