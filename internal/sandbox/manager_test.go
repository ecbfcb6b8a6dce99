package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
	"dozable.com/doz/internal/vm/vmfake"
)

// world is a store, a fake engine that outlives managers, and one image.
type world struct {
	t      *testing.T
	store  *store.Store
	engine *vmfake.Engine
	disk   string
}

func newWorld(t *testing.T, o vmfake.Options) *world {
	dir := t.TempDir()
	s, err := store.Open(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Make(); err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(dir, "base")
	if err := os.WriteFile(disk, make([]byte, 4096), 0o444); err != nil {
		t.Fatal(err)
	}
	return &world{t: t, store: s, engine: vmfake.New(o), disk: disk}
}

func (w *world) Current(name string) (Base, error) {
	if name != "lab" {
		return Base{}, &api.Error{Kind: api.KindNotFound, Message: "no image is named " + name}
	}
	return Base{Name: "lab", Key: "abc", Disk: w.disk, SizeBytes: 8 << 30}, nil
}

func (w *world) Key(name, key string) (Base, error) { return w.Current(name) }

func (w *world) CurrentKernel(bool) (string, error) { return "kernel", nil }

func (w *world) Boot(kernel string) (BootFiles, error) { return w.Saved(kernel, "tools-1") }

func (w *world) Saved(_, tools string) (BootFiles, error) {
	return BootFiles{Kernel: w.disk, Initrd: w.disk, Tools: w.disk, ToolsName: tools}, nil
}

// manager is a new host's, after it has recovered.
func (w *world) manager(reached func(name, step string)) *Manager {
	return w.mortal(make(chan struct{}), reached)
}

// mortal is the manager of a host that hears nothing more once dead is closed.
func (w *world) mortal(dead chan struct{}, reached func(name, step string)) *Manager {
	w.t.Helper()
	m, err := New(Options{Store: w.store, Engine: mortal{w.engine, dead}, Images: w, Parts: w, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Reached: reached})
	if err != nil {
		w.t.Fatal(err)
	}
	m.Recover(context.Background())
	return m
}

// mortal is an engine as a host sees it that may be killed.
type mortal struct {
	vm.Engine
	dead chan struct{}
}

func (e mortal) Start(ctx context.Context, c vm.Config) (vm.Machine, error) {
	m, err := e.Engine.Start(ctx, c)
	return mortalMachine{m, e.dead}, err
}

type mortalMachine struct {
	vm.Machine
	dead chan struct{}
}

func (m mortalMachine) Wait() <-chan vm.Exit {
	ch := make(chan vm.Exit, 1)
	exit := m.Machine.Wait()
	go func() {
		e := <-exit
		select {
		case <-m.dead:
		default:
			ch <- e
			close(ch)
		}
	}()
	return ch
}

func create(t *testing.T, m *Manager, name string) {
	t.Helper()
	if _, err := m.Create(t.Context(), api.CreateRequest{Name: name, Image: "lab"}); err != nil {
		t.Fatalf("Create: %v", err)
	}
}

func wantKind(t *testing.T, err error, kind api.Kind) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) || e.Kind != kind {
		t.Errorf("got %v, want a %s error", err, kind)
	} else if strings.Contains(e.Message, "\n") {
		t.Errorf("not one sentence: %q", e.Message)
	}
}

func phase(t *testing.T, m *Manager, name string) api.Phase {
	t.Helper()
	v, err := m.Inspect(name)
	if err != nil {
		t.Fatal(err)
	}
	return v.Phase
}

func TestLife(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	create(t, m, "a1")
	if p := phase(t, m, "a1"); p != api.Off {
		t.Fatalf("a new sandbox is %s", p)
	}
	r, err := m.Start(t.Context(), "a1", nil)
	if err != nil || !r.Started || r.Sandbox.Phase != api.Running {
		t.Fatalf("Start: %+v, %v", r, err)
	}
	if again, err := m.Start(t.Context(), "a1", nil); err != nil || again.Started {
		t.Errorf("a second start: %+v, %v", again, err)
	}
	if code := run(t, m, "a1", "false"); code != 1 {
		t.Errorf("false ended with %d", code)
	}
	v, err := m.Shutdown(t.Context(), "a1")
	if err != nil || v.Phase != api.Off || v.Problem != "" {
		t.Errorf("Shutdown: %+v, %v", v, err)
	}
	_, err = m.Shutdown(t.Context(), "a1")
	wantKind(t, err, api.KindPhase)
	boots, err := Boots(w.store, "a1")
	if err != nil || len(boots) != 1 || !boots[0].OK || len(boots[0].Steps) == 0 {
		t.Errorf("boots: %+v, %v", boots, err)
	}
	if err := m.Remove(t.Context(), "a1"); err != nil {
		t.Fatal(err)
	}
	_, err = m.Inspect("a1")
	wantKind(t, err, api.KindNotFound)
	w.clean(m)
}

// run runs a program and gives its exit code.
func run(t *testing.T, m *Manager, name string, argv ...string) int {
	t.Helper()
	stream, _, err := m.Exec(t.Context(), api.ExecRequest{Name: name, Argv: argv}, nil)
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	defer stream.Close()
	frames := guest.NewFrameReader(stream)
	for {
		typ, payload, err := frames.Read()
		if err != nil {
			t.Fatalf("the program's stream broke: %v", err)
		}
		if typ == guest.Exit {
			var status guest.ExitStatus
			if err := json.Unmarshal(payload, &status); err != nil {
				t.Fatal(err)
			}
			return status.Code
		}
	}
}

// clean fails the test when a store with no sandboxes holds or runs anything.
func (w *world) clean(m *Manager) {
	w.t.Helper()
	if n := w.engine.Machines(); n != 0 {
		w.t.Errorf("%d machines are left", n)
	}
	entries, err := os.ReadDir(w.store.SandboxesDir())
	if err != nil || len(entries) != 0 {
		w.t.Errorf("left among the sandboxes: %v (%v)", entries, err)
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	for _, name := range []string{"", "A", "a_b", "a/b", "..", strings.Repeat("a", 41), "ä"} {
		_, err := m.Create(t.Context(), api.CreateRequest{Name: name, Image: "lab"})
		wantKind(t, err, api.KindUsage)
	}
	for what, r := range map[string]api.CreateRequest{
		"cpus": {CPUs: 65}, "less": {CPUs: -1}, "memory": {MemoryMiB: 255}, "disk": {DiskGiB: 7}, "more": {DiskGiB: 5000},
	} {
		r.Name, r.Image = what, "lab"
		_, err := m.Create(t.Context(), r)
		wantKind(t, err, api.KindUsage)
	}
	_, err := m.Create(t.Context(), api.CreateRequest{Name: "a1", Image: "nosuch"})
	wantKind(t, err, api.KindNotFound)
	_, err = m.Start(t.Context(), "nosuch", nil)
	wantKind(t, err, api.KindNotFound)
	create(t, m, "a1")
	_, err = m.Create(t.Context(), api.CreateRequest{Name: "a1", Image: "lab"})
	wantKind(t, err, api.KindExists)
	_, _, err = m.Exec(t.Context(), api.ExecRequest{Name: "a1", Argv: []string{"true"}, NoStart: true}, nil)
	wantKind(t, err, api.KindPhase)
	_, _, err = m.Exec(t.Context(), api.ExecRequest{Name: "a1"}, nil)
	wantKind(t, err, api.KindUsage)
	_, _, err = m.Exec(t.Context(), api.ExecRequest{Name: "a1", Argv: []string{"nosuch"}}, nil)
	wantKind(t, err, api.KindExec)
}

func TestTwoCreatesOfOneName(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	errs := make(chan error)
	for range 8 {
		go func() {
			_, err := m.Create(context.Background(), api.CreateRequest{Name: "same", Image: "lab"})
			errs <- err
		}()
	}
	won := 0
	for range 8 {
		if err := <-errs; err == nil {
			won++
		} else {
			wantKind(t, err, api.KindExists)
		}
	}
	if won != 1 {
		t.Errorf("%d of 8 creates of one name won", won)
	}
}

func TestStartsAreJoinedAndOthersRefused(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	inside, proceed := make(chan struct{}), make(chan struct{})
	m := w.manager(func(_, step string) {
		if step == "start/recorded" {
			close(inside)
			<-proceed
		}
	})
	create(t, m, "a1")
	results := make(chan error, 2)
	start := func() {
		_, err := m.Start(context.Background(), "a1", nil)
		results <- err
	}
	go start()
	<-inside
	_, err := m.Shutdown(t.Context(), "a1")
	wantKind(t, err, api.KindPhase)
	wantKind(t, m.Remove(t.Context(), "a1"), api.KindPhase)
	go start()
	close(proceed)
	for range 2 {
		if err := <-results; err != nil {
			t.Errorf("a joined start: %v", err)
		}
	}
	if n := w.engine.Machines(); n != 1 {
		t.Errorf("%d machines run", n)
	}
}

func TestFailures(t *testing.T) {
	t.Run("the disk cannot be made", func(t *testing.T) {
		w := newWorld(t, vmfake.Options{Fail: failAt("disk")})
		m := w.manager(nil)
		_, err := m.Create(t.Context(), api.CreateRequest{Name: "a1", Image: "lab"})
		wantKind(t, err, api.KindFailed)
		w.clean(m)
	})
	t.Run("the machine does not start", func(t *testing.T) {
		w := newWorld(t, vmfake.Options{Fail: failAt("start")})
		m := w.manager(nil)
		create(t, m, "a1")
		_, err := m.Start(t.Context(), "a1", nil)
		wantKind(t, err, api.KindFailed)
		v, _ := m.Inspect("a1")
		if v.Phase != api.Failed || v.Problem == "" {
			t.Errorf("%+v", v)
		}
		if boots, _ := Boots(w.store, "a1"); len(boots) != 1 || boots[0].OK || boots[0].Problem == "" {
			t.Errorf("boots: %+v", boots)
		}
	})
	t.Run("the guest channel cannot be dialled", func(t *testing.T) {
		w := newWorld(t, vmfake.Options{Fail: failAt("dial")})
		m := w.manager(nil)
		create(t, m, "a1")
		_, err := m.Start(t.Context(), "a1", nil)
		wantKind(t, err, api.KindFailed)
		if n := w.engine.Machines(); n != 0 {
			t.Errorf("%d machines are left", n)
		}
	})
}

func failAt(point string) func(string) error {
	return func(p string) error {
		if p == point {
			return fmt.Errorf("no %s today", point)
		}
		return nil
	}
}

func TestAMachineThatEndsByItself(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	create(t, m, "a1")
	if _, err := m.Start(t.Context(), "a1", nil); err != nil {
		t.Fatal(err)
	}
	events, cancel := m.Subscribe("a1")
	defer cancel()
	w.engine.KillLeftover(w.store.Sandbox("a1").Machine())
	for e := range events {
		if e.Event == "phase" && e.Phase == api.Off {
			break
		}
	}
	v, _ := m.Inspect("a1")
	if !v.DiedWithHost || v.Problem == "" {
		t.Errorf("%+v", v)
	}
	if r, err := m.Start(t.Context(), "a1", nil); err != nil || r.Sandbox.DiedWithHost {
		t.Errorf("the next start: %+v, %v", r, err)
	}
}

func TestDamagedRecord(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	create(t, m, "a1")
	if err := os.WriteFile(w.store.Sandbox("a1").Record(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	m = w.manager(nil)
	v, err := m.Inspect("a1")
	if err != nil || v.Phase != api.Damaged || v.Problem == "" {
		t.Fatalf("%+v, %v", v, err)
	}
	_, err = m.Start(t.Context(), "a1", nil)
	wantKind(t, err, api.KindPhase)
	_, err = m.Create(t.Context(), api.CreateRequest{Name: "a1", Image: "lab"})
	wantKind(t, err, api.KindExists)
	if list, err := List(w.store); err != nil || len(list) != 1 || list[0].Phase != api.Damaged {
		t.Errorf("List: %+v, %v", list, err)
	}
	if err := m.Remove(t.Context(), "a1"); err != nil {
		t.Errorf("a damaged sandbox cannot be removed: %v", err)
	}
}

// steps are all the recorded steps of a whole life, in order.
var lifeSteps = []string{
	"create/folder", "create/disk", "create/record", "create/named",
	"start/recorded", "start/machine", "start/guest", "start/running",
	"shutdown/begun", "shutdown/ended", "shutdown/recorded",
	"rm/ended", "rm/unnamed",
}

// TestHostKilledAtEveryStep kills the host at each recorded step of a life, which is
// to say that nothing it does from there on happens, and has the next host explain
// what is there and carry on.
func TestHostKilledAtEveryStep(t *testing.T) {
	for _, step := range lifeSteps {
		t.Run(strings.ReplaceAll(step, "/", " "), func(t *testing.T) {
			w := newWorld(t, vmfake.Options{})
			reached := make(chan struct{})
			m := w.mortal(reached, func(_, s string) {
				if s == step {
					close(reached)
					select {} // a killed host does nothing more
				}
			})
			go wholeLife(m)
			select {
			case <-reached:
			case <-time.After(30 * time.Second):
				t.Fatal("the step was not reached")
			}
			w.aftermath(t, step)
		})
	}
}

// wholeLife is what it says; the host is killed somewhere in it.
func wholeLife(m *Manager) {
	ctx := context.Background()
	m.Create(ctx, api.CreateRequest{Name: "a1", Image: "lab"})
	m.Start(ctx, "a1", nil)
	m.Shutdown(ctx, "a1")
	m.Remove(ctx, "a1")
}

// aftermath is the next host's view: the state is explained, the next command works,
// nothing is left over.
func (w *world) aftermath(t *testing.T, step string) {
	m := w.manager(nil)
	v, err := m.Inspect("a1")
	exists := err == nil
	named := step != "create/folder" && step != "create/disk" && step != "create/record"
	if exists != (named && step != "rm/unnamed") {
		t.Fatalf("killed at %s, the sandbox exists: %v", step, exists)
	}
	if !exists {
		w.clean(m)
		create(t, m, "a1")
	} else if strings.HasPrefix(step, "start/") && v.Phase != api.Running {
		if step != "start/recorded" || v.Phase != api.Off || !v.DiedWithHost {
			t.Errorf("killed at %s, it is %s (%s)", step, v.Phase, v.Problem)
		}
	}
	if code := run(t, m, "a1", "true"); code != 0 {
		t.Errorf("true ended with %d", code)
	}
	if err := m.Remove(t.Context(), "a1"); err != nil {
		t.Errorf("Remove: %v", err)
	}
	w.clean(m)
}
