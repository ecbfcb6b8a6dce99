//go:build linux

package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"dozable.com/doz/internal/vm"
)

// Options of the engine.
type Options struct {
	StateDir string // existing folder in which the engine remembers this computer; "" remembers nothing
	Binary   string // "" finds QEMU on PATH
	Kernel   string // an ordinary kernel, to try hardware virtualization with
}

// Engine implements vm.Engine.
type Engine struct {
	options Options
	probing sync.Mutex // guards probed, and lets one probe run at a time
	probed  *probed

	mu   sync.Mutex // guards what follows
	held map[string]*machine
}

// New gives the engine; it does nothing yet.
func New(o Options) *Engine { return &Engine{options: o, held: map[string]*machine{}} }

// hold notes who has the machine of a folder, until it ends, and makes whoever had it
// before let go: QEMU answers one at a time.
func (e *Engine) hold(m *machine) {
	e.mu.Lock()
	before := e.held[m.config.Dir]
	e.held[m.config.Dir] = m
	e.mu.Unlock()
	if before != nil {
		before.Detach()
	}
	go func() {
		<-m.gone
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.held[m.config.Dir] == m {
			delete(e.held, m.config.Dir)
		}
	}()
}

const (
	startDeadline = 20 * time.Second // from the process's start until its processors run
	adoptDeadline = time.Second      // for a machine to answer one that wants to adopt it
)

// Start implements vm.Engine.
func (e *Engine) Start(ctx context.Context, c vm.Config) (vm.Machine, error) {
	m, err := e.start(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("cannot start the machine: %w", err)
	}
	return m, nil
}

func (e *Engine) start(ctx context.Context, c vm.Config) (_ *machine, failed error) {
	ctx, cancel := context.WithTimeout(ctx, startDeadline)
	defer cancel()
	p, err := e.probe(ctx)
	if err != nil {
		return nil, err
	}
	if c, err = checked(c); err != nil {
		return nil, err
	}
	if running, err := findProcess(c.Dir); err != nil {
		return nil, err
	} else if running != nil {
		running.close()
		return nil, fmt.Errorf("process %d already runs it", running.pid)
	}
	if c.Restore == "" {
		undo, err := freshMemory(c)
		if err != nil {
			return nil, err
		}
		defer func() {
			if failed != nil {
				undo()
			}
		}()
	} else if err := savedMemory(c); err != nil {
		return nil, err
	}
	console, err := openConsole(c, true)
	if err != nil {
		return nil, err
	}
	m, words, err := e.launch(p, c)
	if err != nil {
		console.close()
		return nil, err
	}
	if err := m.begin(ctx, console); err != nil {
		why := m.endedItself()
		console.close()
		m.Kill()
		if text := words.String(); why == "" && text != "" && !errors.Is(ctx.Err(), context.Canceled) {
			why = "QEMU says: " + text
		}
		if why != "" {
			err = errors.New(why)
		}
		if c.Restore != "" && ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", vm.ErrNoState, err)
		}
		return nil, err
	}
	return m, nil
}

// launch starts the machine's process, its processors stopped.
func (e *Engine) launch(p *probed, c vm.Config) (*machine, *lastWords, error) {
	files, err := listenAll(c.Dir)
	if err != nil {
		return nil, nil, err
	}
	defer func() { closeAll(files) }()
	disks, err := openDisks(c)
	if files = append(files, disks...); err != nil {
		removeSockets(c.Dir)
		return nil, nil, err
	}
	words := &lastWords{}
	cmd := exec.Command(p.Binary, p.arguments(c)...)
	cmd.Dir, cmd.ExtraFiles = c.Dir, files
	// QEMU ignores SIGPIPE, so that it does not end when this process does.
	cmd.Stderr = words
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	// Its own session: what ends this process or its terminal does not end it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		removeSockets(c.Dir)
		return nil, nil, err
	}
	// It is our child and not reaped yet, so the number is still its own.
	proc, err := openProcess(cmd.Process.Pid)
	if err != nil {
		cmd.Process.Kill()
		cmd.Wait()
		removeSockets(c.Dir)
		return nil, nil, err
	}
	m := newMachine(c, proc)
	e.hold(m)
	go func() {
		err := cmd.Wait()
		m.ended(err, words.String())
	}()
	return m, words, nil
}

// endWait is how long after its last word a process may take to be gone.
const endWait = 500 * time.Millisecond

// endedItself is why the machine's process has ended without our doing, "" when it
// has not.
func (m *machine) endedItself() string {
	select {
	case <-m.gone:
		return m.exit.Text
	case <-time.After(endWait):
		return ""
	}
}

// openModes are the ways a disk that is written to is opened in, one descriptor each.
var openModes = []int{os.O_RDWR, os.O_RDONLY}

// openDisks opens the disks that are written to, for the machine's process to inherit.
func openDisks(c vm.Config) (files []*os.File, err error) {
	for _, d := range c.Disks {
		if d.ReadOnly {
			continue
		}
		for _, mode := range openModes {
			f, err := os.OpenFile(d.Path, mode, 0)
			if err != nil {
				return files, fmt.Errorf("its disk cannot be opened: %w", err)
			}
			files = append(files, f)
		}
	}
	return files, nil
}

// begin connects to a machine that was started stopped, and lets it run or loads its
// state. The guest channel is connected before the guest can write to it.
func (m *machine) begin(ctx context.Context, console *consoleFile) error {
	if err := m.connect(ctx, console); err != nil {
		return err
	}
	conn, err := dialSocket(ctx, m.config.Dir, guestSocket)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.guest, m.guestUnused = conn, true
	m.mu.Unlock()
	if m.config.Restore != "" {
		m.stands = true
		return m.load(ctx, m.config.Restore)
	}
	return m.Resume(ctx)
}

// Adopt implements vm.Engine.
func (e *Engine) Adopt(ctx context.Context, c vm.Config) (vm.Machine, error) {
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, err
	}
	c.Dir = dir
	proc, err := findProcess(c.Dir)
	if err != nil {
		return nil, err
	}
	if proc == nil {
		removeSockets(c.Dir)
		return nil, vm.ErrNoMachine
	}
	console, err := openConsole(c, false)
	if err != nil {
		proc.close()
		return nil, err
	}
	m := newMachine(c, proc)
	e.hold(m)
	go func() {
		proc.wait(-1)
		m.ended(nil, "")
	}()
	ctx, cancel := context.WithTimeout(ctx, adoptDeadline)
	defer cancel()
	if err := m.takeUp(ctx, console); err != nil {
		console.close()
		m.Detach()
		if errors.Is(err, vm.ErrEnded) && proc.wait(0) {
			removeSockets(c.Dir)
			return nil, vm.ErrNoMachine
		}
		return nil, vm.ErrUnresponsive
	}
	return m, nil
}

// takeUp connects to a machine that another process started.
func (m *machine) takeUp(ctx context.Context, console *consoleFile) error {
	if err := m.connect(ctx, console); err != nil {
		return err
	}
	var status struct{ Running bool }
	err := m.monitor.run(ctx, "query-status", nil, &status)
	m.mu.Lock()
	m.stands = !status.Running
	m.mu.Unlock()
	return err
}

// KillLeftover implements vm.Engine.
func (e *Engine) KillLeftover(dir string) error {
	proc, err := findProcess(dir)
	if err != nil {
		return err
	}
	if proc == nil {
		removeSockets(dir)
		return vm.ErrNoMachine
	}
	defer proc.close()
	if err := proc.kill(); err != nil {
		return fmt.Errorf("cannot end process %d: %w", proc.pid, err)
	}
	if !proc.wait(killDeadline) {
		return fmt.Errorf("cannot end process %d: it is still there after %s", proc.pid, killDeadline)
	}
	removeSockets(dir)
	return nil
}

const maxDisks = 16

// checked is c with absolute paths, or why it makes no machine.
func checked(c vm.Config) (vm.Config, error) {
	switch {
	case c.CPUs < 1 || c.CPUs > 64:
		return c, fmt.Errorf("it may have 1 to 64 processors, not %d", c.CPUs)
	case c.MemoryMiB < 256 || c.MemoryMiB > 256<<10:
		return c, fmt.Errorf("it may have 256 MiB to 256 GiB of memory, not %d MiB", c.MemoryMiB)
	case c.MemoryFile == "" || c.Kernel == "" || c.Initrd == "":
		return c, errors.New("it needs a memory file, a kernel and an initramfs")
	case len(c.Disks) > maxDisks:
		return c, fmt.Errorf("it may have %d disks, not %d", maxDisks, len(c.Disks))
	case c.MachineType != "" && !machineTypeText.MatchString(c.MachineType):
		return c, fmt.Errorf("%q is no type of machine", c.MachineType)
	case c.Audio:
		return c, errors.New("it cannot have sound yet")
	}
	c.Disks = append([]vm.Disk(nil), c.Disks...)
	paths := []*string{&c.Dir, &c.MemoryFile, &c.Kernel, &c.Initrd}
	for i := range c.Disks {
		c.Disks[i].Layers = append([]string(nil), c.Disks[i].Layers...)
		if paths = append(paths, &c.Disks[i].Path); c.Disks[i].Base != "" {
			paths = append(paths, &c.Disks[i].Base)
		}
		for k := range c.Disks[i].Layers {
			paths = append(paths, &c.Disks[i].Layers[k])
		}
	}
	for _, p := range paths {
		// QEMU works in the machine's folder, not in this process's.
		abs, err := filepath.Abs(*p)
		if err != nil {
			return c, err
		}
		*p = abs
	}
	return c, nil
}

// freshMemory makes the memory file: all zeroes, without a block on disk. undo
// removes it if it was not there before.
func freshMemory(c vm.Config) (undo func(), err error) {
	_, before := os.Lstat(c.MemoryFile)
	f, err := os.OpenFile(c.MemoryFile, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("its memory file cannot be made: %w", err)
	}
	defer f.Close()
	undo = func() {
		if before != nil {
			os.Remove(c.MemoryFile)
		}
	}
	if err := f.Truncate(int64(c.MemoryMiB) << 20); err != nil {
		undo()
		return nil, fmt.Errorf("its memory file cannot be made: %w", err)
	}
	return undo, nil
}

// savedMemory refuses memory that cannot be what was saved.
func savedMemory(c vm.Config) error {
	info, err := os.Stat(c.MemoryFile)
	switch {
	case err != nil:
		return fmt.Errorf("%w: its memory file cannot be read: %w", vm.ErrNoState, err)
	case info.Size() != int64(c.MemoryMiB)<<20:
		return fmt.Errorf("%w: its memory file has %d bytes and not %d MiB", vm.ErrNoState, info.Size(), c.MemoryMiB)
	}
	return nil
}

// lastWords keeps the end of what a process says.
type lastWords struct {
	mu   sync.Mutex
	text []byte
}

const maxWords = 4096

func (w *lastWords) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, b...)
	if extra := len(w.text) - maxWords; extra > 0 {
		w.text = append(w.text[:0], w.text[extra:]...)
	}
	return len(b), nil
}

// String is the last line, without the program's name before it.
func (w *lastWords) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(string(w.text)), "\n")
	line := lines[len(lines)-1]
	if program, rest, found := strings.Cut(line, ": "); found && strings.HasPrefix(filepath.Base(program), "qemu-system-") {
		line = rest
	}
	return line
}
