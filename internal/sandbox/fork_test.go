package sandbox

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm/vmfake"
)

// TestFork copies a sandbox from every phase in which its programs can carry on.
func TestFork(t *testing.T) {
	after := map[api.Phase]api.Phase{api.Running: api.Running, api.Paused: api.Paused, api.Asleep: api.Hibernated, api.Hibernated: api.Hibernated}
	for _, from := range []api.Phase{api.Off, api.Running, api.Paused, api.Asleep, api.Hibernated} {
		t.Run(string(from), func(t *testing.T) {
			w := newWorld(t, vmfake.Options{})
			m := w.manager(nil)
			take(t, m, "a1", from)
			r, err := m.Fork(t.Context(), api.ForkRequest{Name: "a1", New: "b", Count: 3}, nil)
			if from == api.Off {
				wantKind(t, err, api.KindPhase)
				return
			}
			if err != nil || len(r.Sandboxes) != 3 || len(r.Notes) != 0 {
				t.Fatalf("%+v, %v", r, err)
			}
			if p := phase(t, m, "a1"); p != after[from] {
				t.Errorf("the original is %s and not %s", p, after[from])
			}
			boot, ids := bootOf(t, m, "a1"), map[string]bool{}
			for _, v := range r.Sandboxes {
				if v.Phase != api.Running || bootOf(t, m, v.Name) != boot {
					t.Errorf("%s is %s, of boot %s and not %s", v.Name, v.Phase, bootOf(t, m, v.Name), boot)
				}
				b, _ := m.get(v.Name)
				if ids[b.get().MachineID] = true; b.get().Fresh {
					t.Errorf("%s was not told to become itself", v.Name)
				}
			}
			if a, _ := m.get("a1"); len(ids) != 3 || ids[a.get().MachineID] {
				t.Error("two have one machine id")
			}
			// The copies need nobody but themselves.
			if err := m.Remove(t.Context(), "a1"); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"b-1", "b-2", "b-3"} {
				if err := move(m, name, "hibernate"); err != nil {
					t.Fatal(err)
				}
				if bootOf(t, m, name) != boot {
					t.Errorf("%s woke as something else", name)
				}
				if err := m.Remove(t.Context(), name); err != nil {
					t.Error(err)
				}
			}
			w.clean(m)
		})
	}
}

func TestForkRefusals(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	take(t, m, "a1", api.Running)
	create(t, m, "b-2")
	for _, c := range []struct {
		req  api.ForkRequest
		kind api.Kind
	}{
		{api.ForkRequest{Name: "a1", New: "a1"}, api.KindExists},
		{api.ForkRequest{Name: "a1", New: "b", Count: 2}, api.KindExists},
		{api.ForkRequest{Name: "a1", New: "B"}, api.KindUsage},
		{api.ForkRequest{Name: "a1", New: "c", Count: 101}, api.KindUsage},
		{api.ForkRequest{Name: "a1", New: "c", Count: -1}, api.KindUsage},
		{api.ForkRequest{Name: "none", New: "c"}, api.KindNotFound},
	} {
		_, err := m.Fork(t.Context(), c.req, nil)
		wantKind(t, err, c.kind)
	}
	if _, err := m.Inspect("b-1"); err == nil {
		t.Error("a fork that was refused made a copy")
	}
	r, err := m.Fork(t.Context(), api.ForkRequest{Name: "a1", New: "c", NoWake: true}, nil)
	if err != nil || r.Sandboxes[0].Phase != api.Hibernated {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestDuplicate makes a sandbox of another's disk, whatever it does.
func TestDuplicate(t *testing.T) {
	for _, from := range []api.Phase{api.Off, api.Running, api.Paused, api.Asleep, api.Hibernated} {
		w := newWorld(t, vmfake.Options{})
		m := w.manager(nil)
		take(t, m, "a1", from)
		r, err := m.Duplicate(t.Context(), api.DuplicateRequest{Name: "a1", New: "b1", CPUs: 3})
		if err != nil || r.Sandbox.Phase != api.Off || r.Sandbox.CPUs != 3 || r.Sandbox.MemoryMiB != 1024 {
			t.Fatalf("%s: %+v, %v", from, r, err)
		}
		b, _ := m.get("b1")
		if checks := from != api.Off; b.get().Check != checks {
			t.Errorf("%s: the copy's disk is checked: %v", from, b.get().Check)
		}
		if bootOf(t, m, "b1") == bootOf(t, m, "a1") {
			t.Error("a duplicate is of the same boot")
		}
	}
}

// TestPoints keeps a sandbox's disk, goes back to it, and removes the points in any
// order.
func TestPoints(t *testing.T) {
	for _, from := range []api.Phase{api.Off, api.Running, api.Paused, api.Asleep, api.Hibernated} {
		for _, memory := range []bool{false, true} {
			what := string(from)
			if memory {
				what += " with memory"
			}
			t.Run(what, func(t *testing.T) {
				w := newWorld(t, vmfake.Options{})
				m := w.manager(nil)
				take(t, m, "a1", from)
				r, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1", Point: "first", Note: "a note", Memory: memory})
				if memory && from == api.Off {
					wantKind(t, err, api.KindPhase)
					return
				}
				if err != nil || r.Point.Memory != memory {
					t.Fatalf("%+v, %v", r, err)
				}
				boot := bootOf(t, m, "a1")
				reverted, err := m.Revert(t.Context(), api.PointRequest{Name: "a1", Point: "fir"})
				if err != nil || reverted.Point.Name != beforeRevert {
					t.Fatalf("Revert: %+v, %v", reverted, err)
				}
				if want := map[bool]api.Phase{false: api.Off, true: api.Hibernated}[memory]; reverted.Sandbox.Phase != want {
					t.Errorf("after the revert it is %s and not %s", reverted.Sandbox.Phase, want)
				}
				if same := bootOf(t, m, "a1") == boot; same != memory {
					t.Errorf("after the revert it is of the same boot: %v", same)
				}
				made, err := m.ForkPoint(t.Context(), api.PointForkRequest{Name: "a1", Point: r.Point.ID, New: "b1"})
				if err != nil {
					t.Fatal(err)
				}
				if same := bootOf(t, m, "b1") == boot; same != memory || made.Name != "b1" {
					t.Errorf("the point's fork %s is of the same boot: %v", made.Name, same)
				}
				if _, err := m.RemovePoint(t.Context(), api.PointRequest{Name: "a1", Point: "first"}); err != nil {
					t.Fatal(err)
				}
				points, err := Points(w.store, "a1")
				if err != nil || len(points) != 1 {
					t.Errorf("%+v, %v", points, err)
				}
				for _, name := range []string{"a1", "b1"} {
					if code := run(t, m, name, "true"); code != 0 {
						t.Errorf("true ended with %d", code)
					}
					if err := m.Remove(t.Context(), name); err != nil {
						t.Error(err)
					}
				}
				w.clean(m)
			})
		}
	}
}

func TestPointNames(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	create(t, m, "a1")
	for _, name := range []string{"one", "one more", "", "ünï code/../x"} {
		if _, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1", Point: name}); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for name, kind := range map[string]api.Kind{"one": api.KindExists, strings.Repeat("ä", 65): api.KindUsage, "a\nb": api.KindUsage} {
		_, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1", Point: name})
		wantKind(t, err, kind)
	}
	for text, kind := range map[string]api.Kind{"on": api.KindUsage, "rp-": api.KindUsage, "two": api.KindNotFound, "": api.KindNotFound} {
		_, err := m.FindPoint("a1", text)
		wantKind(t, err, kind)
	}
	if p, err := m.FindPoint("a1", "one"); err != nil || p.Name != "one" {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := m.FindPoint("a1", "one m"); err != nil || p.Name != "one more" {
		t.Errorf("%+v, %v", p, err)
	}
}

// TestDisksAreSwept counts the files of a root disk as points come and go.
func TestDisksAreSwept(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	create(t, m, "a1")
	disks := func() (n int) {
		entries, _ := os.ReadDir(w.store.Sandbox("a1").Dir())
		for _, e := range entries {
			if store.IsDisk(e.Name()) {
				n++
			}
		}
		return n
	}
	point := func() string {
		r, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1"})
		if err != nil {
			t.Fatal(err)
		}
		return r.Point.ID
	}
	first, second := point(), point()
	if n := disks(); n != 3 {
		t.Errorf("with two points there are %d disks", n)
	}
	if _, err := m.Reset(t.Context(), "a1"); err != nil {
		t.Fatal(err)
	}
	if n := disks(); n != 3 { // the two that were kept, and the new one
		t.Errorf("after a reset there are %d disks", n)
	}
	for i, id := range []string{second, first} {
		if _, err := m.RemovePoint(t.Context(), api.PointRequest{Name: "a1", Point: id}); err != nil {
			t.Fatal(err)
		}
		if n := disks(); n != 2-i {
			t.Errorf("after %d points were removed there are %d disks", i+1, n)
		}
	}
	for range maxDisks - 1 {
		point()
	}
	_, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1"})
	wantKind(t, err, api.KindFailed)
	if code := run(t, m, "a1", "true"); code != 0 {
		t.Errorf("true ended with %d", code)
	}
}

// copySteps are the recorded steps of copying and keeping a running sandbox.
var copySteps = map[string][]string{
	"fork":   {"cover/recorded", "cover/switched", "fork/captured", "create/folder", "create/disk", "create/record", "create/named", "fork/made"},
	"point":  {"cover/recorded", "cover/switched", "point/kept", "point/recorded"},
	"revert": {"shutdown/begun", "shutdown/recorded", "cover/recorded", "point/recorded", "revert/made", "revert/recorded"},
	"rm":     {"point/unnamed"},
	"reset":  {"shutdown/ended", "reset/off", "reset/recorded"},
}

// TestKilledAtEveryStepOfCopying kills the host at each: the next one finds the
// sandbox, runs it, and nothing is left over.
func TestKilledAtEveryStepOfCopying(t *testing.T) {
	for op, steps := range copySteps {
		for _, step := range steps {
			t.Run(op+" "+strings.ReplaceAll(step, "/", " "), func(t *testing.T) {
				w := newWorld(t, vmfake.Options{})
				reached, armed := make(chan struct{}), false
				m := w.mortal(reached, func(_, s string) {
					if armed && s == step {
						close(reached)
						select {}
					}
				})
				take(t, m, "a1", api.Running)
				if _, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1", Point: "p", Memory: true}); err != nil {
					t.Fatal(err)
				}
				armed = true
				go copying(m, op)
				select {
				case <-reached:
				case <-time.After(30 * time.Second):
					t.Fatal("the step was not reached")
				}
				m = w.manager(nil)
				if code := run(t, m, "a1", "true"); code != 0 {
					t.Errorf("true ended with %d", code)
				}
				if _, err := m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1"}); err != nil {
					t.Error(err)
				}
				for _, v := range m.List() {
					if code := run(t, m, v.Name, "true"); code != 0 {
						t.Errorf("%s: true ended with %d", v.Name, code)
					}
					if err := m.Remove(t.Context(), v.Name); err != nil {
						t.Error(err)
					}
				}
				w.clean(m)
			})
		}
	}
}

func copying(m *Manager, op string) {
	ctx, p := context.Background(), api.PointRequest{Name: "a1", Point: "p"}
	switch op {
	case "fork":
		m.Fork(ctx, api.ForkRequest{Name: "a1", New: "b1"}, nil)
	case "point":
		m.TakePoint(ctx, api.PointTakeRequest{Name: "a1", Memory: true})
	case "revert":
		m.Revert(ctx, p)
	case "rm":
		m.RemovePoint(ctx, p)
	case "reset":
		m.Reset(ctx, "a1")
	}
}

// TestFailuresOfCopying has the engine fail under a copy: the sandbox goes on as it did.
func TestFailuresOfCopying(t *testing.T) {
	for _, point := range []string{"disk", "switch", "save", "pause"} {
		for _, op := range []string{"fork", "point"} {
			failing := ""
			w := newWorld(t, vmfake.Options{Fail: func(p string) error { return failAt(failing)(p) }})
			m := w.manager(nil)
			take(t, m, "a1", api.Running)
			boot := bootOf(t, m, "a1")
			failing = point
			var err error
			if op == "fork" {
				_, err = m.Fork(t.Context(), api.ForkRequest{Name: "a1", New: "b1"}, nil)
			} else {
				_, err = m.TakePoint(t.Context(), api.PointTakeRequest{Name: "a1", Memory: true})
			}
			wantKind(t, err, api.KindFailed)
			failing = ""
			if phase(t, m, "a1") != api.Running || bootOf(t, m, "a1") != boot {
				t.Errorf("%s, %s: the sandbox did not go on", op, point)
			}
			if err := m.Remove(t.Context(), "a1"); err != nil {
				t.Error(err)
			}
			w.clean(m)
		}
	}
}
