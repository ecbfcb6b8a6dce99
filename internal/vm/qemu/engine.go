// Package qemu is the engine that runs machines in QEMU, one process each.
//
// A machine's process has the machine's folder (vm.Config.Dir) as its working
// directory and answers on three sockets there, which outlive the process that
// started it. The package must not know of sandboxes, stores or policy.
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
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"dozable.com/doz/internal/vm"
)

// Sockets in a machine's folder.
const (
	monitorSocket = "monitor.sock"
	consoleSocket = "console.sock"
	guestSocket   = "guest.sock"
)

var sockets = []string{monitorSocket, consoleSocket, guestSocket}

// Options of the engine.
type Options struct {
	StateDir string // existing folder in which the engine remembers this computer
	Binary   string // "" finds QEMU on PATH
	Kernel   string // an ordinary kernel, to try hardware virtualization with
}

// Engine implements vm.Engine.
type Engine struct {
	options Options
	mu      sync.Mutex
	probed  *probed
}

// New gives the engine; it does nothing yet.
func New(o Options) *Engine { return &Engine{options: o} }

// Start implements vm.Engine.
func (e *Engine) Start(ctx context.Context, c vm.Config) (vm.Machine, error) {
	p, err := e.probe(ctx)
	if err != nil {
		return nil, err
	}
	files, err := listenAll(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("cannot start a machine: %w", err)
	}
	cmd := exec.Command(p.Binary, e.arguments(c, p.Features, p.TSCKHz)...)
	cmd.Dir, cmd.ExtraFiles = c.Dir, files
	// Its own session: what ends this process or its terminal does not end it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	words := &lastWords{}
	cmd.Stderr = words
	err = cmd.Start()
	for _, f := range files {
		f.Close()
	}
	if err != nil {
		removeSockets(c.Dir)
		return nil, fmt.Errorf("cannot start QEMU: %w", err)
	}
	m := newMachine(c, cmd.Process.Pid)
	go func() {
		err := cmd.Wait()
		m.exited(err, words.String())
	}()
	if err := m.begin(ctx); err != nil {
		m.Kill()
		if text := words.String(); text != "" {
			err = fmt.Errorf("QEMU: %s", text)
		}
		return nil, err
	}
	return m, nil
}

// begin connects to a machine that was started stopped, and lets it run.
func (m *machine) begin(ctx context.Context) error {
	if err := m.connect(ctx); err != nil {
		return err
	}
	return m.monitor.run(ctx, "cont", nil, nil)
}

// Adopt implements vm.Engine.
func (e *Engine) Adopt(ctx context.Context, c vm.Config) (vm.Machine, error) {
	pid := findProcess(c.Dir)
	if pid == 0 {
		removeSockets(c.Dir)
		return nil, vm.ErrNoMachine
	}
	m := newMachine(c, pid)
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := m.connect(ctx); err != nil {
		return nil, vm.ErrUnresponsive
	}
	// A host that died between starting a machine and letting it run left it so.
	var status struct{ Status string }
	if err := m.monitor.run(ctx, "query-status", nil, &status); err != nil {
		return nil, vm.ErrUnresponsive
	}
	if status.Status == "prelaunch" {
		if err := m.monitor.run(ctx, "cont", nil, nil); err != nil {
			return nil, err
		}
	}
	go m.watch()
	return m, nil
}

// KillLeftover implements vm.Engine.
func (e *Engine) KillLeftover(dir string) error {
	pid := findProcess(dir)
	if pid == 0 {
		return vm.ErrNoMachine
	}
	for deadline := time.Now().Add(5 * time.Second); findProcess(dir) == pid; {
		syscall.Kill(pid, syscall.SIGKILL)
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d cannot be ended", pid)
		}
		time.Sleep(5 * time.Millisecond)
	}
	removeSockets(dir)
	return nil
}

// findProcess finds the live process whose machine dir is: the QEMU that works
// there. A recorded process number would not do: numbers are reused.
func findProcess(dir string) int {
	want, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return 0
	}
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		if cwd, err := os.Readlink(link); err != nil || cwd != want {
			continue
		}
		proc := filepath.Dir(link)
		line, _ := os.ReadFile(proc + "/cmdline")
		stat, _ := os.ReadFile(proc + "/stat")
		_, state, _ := bytes.Cut(stat, []byte(") "))
		if bytes.Contains(line, []byte("-name\x00doz ")) && !bytes.HasPrefix(state, []byte("Z")) {
			var pid int
			fmt.Sscan(filepath.Base(proc), &pid)
			return pid
		}
	}
	return 0
}

// listenAll opens a machine's sockets, for its process to inherit: whoever connects
// from then on waits for the process rather than misses it.
func listenAll(dir string) (files []*os.File, err error) {
	removeSockets(dir)
	defer func() {
		if err != nil {
			for _, f := range files {
				f.Close()
			}
			removeSockets(dir)
		}
	}()
	for _, name := range sockets {
		path, done, err := shortPath(dir, name)
		if err != nil {
			return files, err
		}
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		done()
		if err != nil {
			return files, err
		}
		l.SetUnlinkOnClose(false)
		f, err := l.File()
		l.Close()
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}

// shortPath names a socket through an open descriptor of its folder, because a
// socket's address has room for a path of 107 bytes only.
func shortPath(dir, name string) (path string, done func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name), func() { d.Close() }, nil
}

func removeSockets(dir string) {
	for _, name := range sockets {
		os.Remove(filepath.Join(dir, name))
	}
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
	if len(w.text) > maxWords {
		w.text = w.text[len(w.text)-maxWords:]
	}
	return len(b), nil
}

// String is the last line.
func (w *lastWords) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(string(w.text)), "\n")
	line := lines[len(lines)-1]
	if _, rest, found := strings.Cut(line, "qemu-system-"); found {
		if _, rest, found = strings.Cut(rest, ": "); found {
			line = rest
		}
	}
	return line
}

// arch is this computer's, as the kernels are named.
func arch() string {
	if runtime.GOARCH == "arm64" {
		return "arm64"
	}
	return "x86_64"
}

var errNoBinary = errors.New("QEMU is not installed")

// shutdownEvent is the data of QEMU's SHUTDOWN event.
type shutdownEvent struct {
	Guest  bool   `json:"guest"`
	Reason string `json:"reason"`
}

func decode[T any](data json.RawMessage) (v T) {
	json.Unmarshal(data, &v)
	return v
}
