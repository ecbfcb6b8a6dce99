package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/vm"
	"dozable.com/doz/internal/vm/vmfake"
)

// TestLeftAtRest: a machine that stood still and did not answer a new host is taken over
// by the first command that needs it, or, when it is gone by then, counts as what it was.
func TestLeftAtRest(t *testing.T) {
	for _, c := range []struct {
		phase  api.Phase
		killed bool
		same   bool
	}{
		{api.Paused, false, true}, {api.Asleep, false, true},
		{api.Paused, true, false}, {api.Asleep, true, true},
	} {
		name := string(c.phase)
		if c.killed {
			name += " and killed"
		}
		t.Run(name, func(t *testing.T) {
			var deaf atomic.Bool
			w := newWorld(t, vmfake.Options{Fail: func(point string) error {
				if point == "adopt" && deaf.Load() {
					return vm.ErrUnresponsive
				}
				return nil
			}})
			dead := make(chan struct{})
			m := w.mortal(dead, nil)
			take(t, m, "a1", api.Running)
			boot := bootOf(t, m, "a1")
			if err := move(m, "a1", map[api.Phase]string{api.Paused: "pause", api.Asleep: "sleep"}[c.phase]); err != nil {
				t.Fatal(err)
			}
			close(dead)
			deaf.Store(true)
			m = w.manager(nil)
			_, err := m.Start(t.Context(), "a1", nil)
			wantKind(t, err, api.KindFailed)
			if kept := strings.Contains(hintOf(err), "what was saved is kept"); kept != (c.phase == api.Asleep) {
				t.Errorf("of one that is %s: %v", c.phase, err)
			}
			if v, _ := m.Inspect("a1"); v.Phase != c.phase || !v.Unresponsive {
				t.Errorf("left alone: %+v", v)
			}
			deaf.Store(false)
			if c.killed {
				w.engine.KillLeftover(w.store.Sandbox("a1").Machine())
				if _, err := m.Start(t.Context(), "a1", nil); err == nil {
					t.Error("a machine that is gone went on")
				}
			}
			if again := bootOf(t, m, "a1"); (again == boot) != c.same {
				t.Errorf("of boot %s it went on as %s", boot, again)
			}
		})
	}
}

func hintOf(err error) string {
	var e *api.Error
	if errors.As(err, &e) {
		return e.Hint
	}
	return ""
}

// TestAMachineThatEndsUnderACommand: nothing of it is left once the command has failed.
func TestAMachineThatEndsUnderACommand(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	var m *Manager
	armed := false
	m = w.manager(func(name, step string) {
		if armed && step == "cover/recorded" {
			w.engine.KillLeftover(w.store.Sandbox("a1").Machine())
		}
	})
	take(t, m, "a1", api.Running)
	events, cancel := m.Subscribe("a1")
	defer cancel()
	armed = true
	_, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1"})
	wantKind(t, err, api.KindFailed)
	for e := range events {
		if e.Event == "step" && e.Step == "tidied" {
			break
		}
	}
	if v, _ := m.Inspect("a1"); v.Phase != api.Off || !v.DiedWithHost {
		t.Errorf("%+v", v)
	}
	for _, path := range []string{w.store.Sandbox("a1").Memory(), w.store.Sandbox("a1").Machine()} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s was left", filepath.Base(path))
		}
	}
}

// TestSleeperWhoseMachineIsGone: the next host finds it hibernated, and leaves nothing of
// the machine.
func TestSleeperWhoseMachineIsGone(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	dead := make(chan struct{})
	m := w.mortal(dead, nil)
	take(t, m, "a1", api.Asleep)
	close(dead)
	w.engine.KillLeftover(w.store.Sandbox("a1").Machine())
	m = w.manager(nil)
	if got := phase(t, m, "a1"); got != api.Hibernated {
		t.Errorf("it is %s", got)
	}
	if _, err := os.Stat(w.store.Sandbox("a1").Machine()); err == nil {
		t.Error("the machine's folder was left")
	}
}

// TestRevertThatCannotBe is refused before anything is lost.
func TestRevertThatCannotBe(t *testing.T) {
	for what, spoil := range map[string]func(w *world, b *box, p api.Point) error{
		"the memory is truncated": func(w *world, b *box, p api.Point) error { return os.Truncate(b.dir.Point(p.ID).Memory(), 1) },
		"the state is missing":    func(w *world, b *box, p api.Point) error { return os.Remove(b.dir.Point(p.ID).State()) },
		"a disk is missing":       func(w *world, b *box, p api.Point) error { return os.Remove(b.dir.File("root.qcow2")) },
		"the pile is full": func(w *world, b *box, p api.Point) error {
			for len(b.record.Disks) < maxDisks {
				b.record.Disks = append(b.record.Disks, "root.qcow2")
			}
			return nil
		},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, vmfake.Options{})
			m := w.manager(nil)
			take(t, m, "a1", api.Running)
			taken, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1", Point: "p", Memory: true})
			if err != nil {
				t.Fatal(err)
			}
			boot := bootOf(t, m, "a1")
			if err := spoil(w, m.boxes["a1"], taken.Point); err != nil {
				t.Fatal(err)
			}
			_, err = m.Revert(t.Context(), api.PointRequest{Name: "a1", Point: "p"})
			wantKind(t, err, api.KindFailed)
			if phase(t, m, "a1") != api.Running || bootOf(t, m, "a1") != boot {
				t.Error("it did not go on")
			}
			if what == "the pile is full" {
				return
			}
			_, err = m.ForkPoint(t.Context(), api.PointForkRequest{Name: "a1", Point: "p", New: "b1"})
			wantKind(t, err, api.KindFailed)
		})
	}
}

// TestRevertThatFails leaves no memory and no disk that belong to nothing.
func TestRevertThatFails(t *testing.T) {
	var disks atomic.Int32
	w := newWorld(t, vmfake.Options{Fail: func(point string) error {
		if point == "disk" && disks.Add(-1) == 0 {
			return errors.New("disk is full")
		}
		return nil
	}})
	m := w.manager(nil)
	take(t, m, "a1", api.Running)
	if _, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1", Point: "p", Memory: true}); err != nil {
		t.Fatal(err)
	}
	disks.Store(2) // the first is of the point "before revert"
	_, err := m.Revert(t.Context(), api.PointRequest{Name: "a1", Point: "p"})
	wantKind(t, err, api.KindFailed)
	dir := w.store.Sandbox("a1")
	for _, path := range []string{dir.Memory(), dir.State()} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s was left", filepath.Base(path))
		}
	}
	if _, err := m.Revert(t.Context(), api.PointRequest{Name: "a1", Point: "p"}); err != nil {
		t.Errorf("the next try: %v", err)
	}
}

// TestStateGoesWithItsSeal: one that was asleep and went on has no saved state any more.
func TestStateGoesWithItsSeal(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	take(t, m, "a1", api.Asleep)
	if err := move(m, "a1", "wake"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(w.store.Sandbox("a1").State()); err == nil {
		t.Error("the state was left")
	}
}

// TestCopyOfADamagedSnapshot: what could not be woken is not copied.
func TestCopyOfADamagedSnapshot(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	take(t, m, "a1", api.Hibernated)
	if err := os.Truncate(w.store.Sandbox("a1").Memory(), 1); err != nil {
		t.Fatal(err)
	}
	_, err := m.Fork(t.Context(), api.ForkRequest{Name: "a1", New: "b1", NoWake: true}, nil)
	wantKind(t, err, api.KindFailed)
	_, err = m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1", Memory: true})
	wantKind(t, err, api.KindFailed)
	if n := len(m.boxes["a1"].get().Disks); n != 1 {
		t.Errorf("its disk is of %d files", n)
	}
}
