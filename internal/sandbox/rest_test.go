package sandbox

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/vm/vmfake"
)

// bootOf gives the boot a sandbox is of, after having it run.
func bootOf(t *testing.T, m *Manager, name string) string {
	t.Helper()
	if _, err := m.Start(t.Context(), name, nil); err != nil {
		t.Fatalf("Start: %v", err)
	}
	b, err := m.get(name)
	if err != nil {
		t.Fatal(err)
	}
	session, err := m.talk(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	var setup guest.SetupResponse
	if err := session.Call(t.Context(), guest.OpSetup, guest.SetupRequest{}, &setup); err != nil {
		t.Fatal(err)
	}
	return setup.BootID
}

// move is one transition by its operation's name.
func move(m *Manager, name, op string) error {
	ctx := context.Background()
	var err error
	switch op {
	case "start":
		_, err = m.Start(ctx, name, nil)
	case "wake":
		_, err = m.Wake(ctx, name, nil)
	case "pause":
		_, err = m.Pause(ctx, name)
	case "resume":
		_, err = m.Resume(ctx, name)
	case "sleep":
		_, err = m.Sleep(ctx, name)
	case "hibernate":
		_, err = m.Hibernate(ctx, name)
	case "shutdown":
		_, err = m.Shutdown(ctx, name)
	default:
		panic(op)
	}
	return err
}

// take takes a new sandbox to a phase.
func take(t *testing.T, m *Manager, name string, phase api.Phase) {
	t.Helper()
	create(t, m, name)
	for _, op := range map[api.Phase][]string{
		api.Off: {}, api.Running: {"start"}, api.Paused: {"start", "pause"}, api.Asleep: {"start", "sleep"}, api.Hibernated: {"start", "hibernate"},
	}[phase] {
		if err := move(m, name, op); err != nil {
			t.Fatalf("%s: %v", op, err)
		}
	}
}

// TestTransitions goes through the whole table: from every phase, every operation.
func TestTransitions(t *testing.T) {
	const no = api.Phase("")
	ops := []string{"start", "wake", "pause", "resume", "sleep", "hibernate", "shutdown"}
	table := map[api.Phase][]api.Phase{
		api.Off:        {api.Running, no, no, no, no, no, no},
		api.Running:    {api.Running, api.Running, api.Paused, no, api.Asleep, api.Hibernated, api.Off},
		api.Paused:     {api.Running, no, no, api.Running, api.Asleep, api.Hibernated, api.Off},
		api.Asleep:     {api.Running, api.Running, no, no, no, api.Hibernated, api.Off},
		api.Hibernated: {api.Running, api.Running, no, no, no, no, api.Off},
	}
	for from, row := range table {
		for i, op := range ops {
			t.Run(string(from)+" "+op, func(t *testing.T) {
				w := newWorld(t, vmfake.Options{})
				m := w.manager(nil)
				take(t, m, "a1", from)
				err := move(m, "a1", op)
				want := row[i]
				if want == no {
					wantKind(t, err, api.KindPhase)
					want = from
				} else if err != nil {
					t.Fatal(err)
				}
				if got := phase(t, m, "a1"); got != want {
					t.Errorf("it is %s and not %s", got, want)
				}
				v, _ := m.Inspect("a1")
				if sealed := want == api.Asleep || want == api.Hibernated; sealed != (v.Snapshot != nil) {
					t.Errorf("%s, with a snapshot: %v", want, v.Snapshot != nil)
				}
				if machine := live(want); machine != (w.engine.Machines() == 1) {
					t.Errorf("%s, with %d machines", want, w.engine.Machines())
				}
				if code := run(t, m, "a1", "true"); code != 0 {
					t.Errorf("true ended with %d", code)
				}
				if err := m.Remove(t.Context(), "a1"); err != nil {
					t.Error(err)
				}
				w.clean(m)
			})
		}
	}
}

// TestExecAsksFirst checks the two options that keep exec from having a sandbox run.
func TestExecAsksFirst(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	for _, from := range []api.Phase{api.Off, api.Paused, api.Asleep, api.Hibernated} {
		for i, req := range []api.ExecRequest{{NoStart: true}, {NoWake: true}} {
			req.Name, req.Argv = fmt.Sprintf("%s-%d", from, i), []string{"true"}
			take(t, m, req.Name, from)
			stream, result, err := m.Exec(t.Context(), req, nil)
			if refused := req.NoStart == (from == api.Off); refused {
				wantKind(t, err, api.KindPhase)
				continue
			}
			if err != nil || result.Started == result.Woke {
				t.Errorf("%s, %+v: %+v, %v", from, req, result, err)
				continue
			}
			stream.Close()
		}
	}
}

// restLives are lives through every recorded step of coming to rest and going on. With
// sealed the steps at which what runs is saved, whatever is killed.
var restLives = []struct {
	ops    string
	steps  string
	sealed string
}{
	{"pause resume", "pause/paused pause/recorded resume/recorded resume/resumed", ""},
	{"sleep wake", "sleep/begun sleep/paused sleep/saved sleep/recorded resume/recorded resume/resumed", "sleep/recorded"},
	{"hibernate wake",
		"hibernate/begun hibernate/paused hibernate/saved hibernate/recorded hibernate/ended wake/checked wake/loaded wake/recorded wake/resumed wake/running",
		"hibernate/recorded hibernate/ended wake/checked wake/loaded"},
	{"sleep hibernate", "hibernate/recorded hibernate/ended", "hibernate/recorded hibernate/ended"},
	{"pause hibernate", "hibernate/paused hibernate/recorded", "hibernate/recorded"},
}

// TestKilledAtEveryStepOfRest kills the host, or the host and the machine, at each
// recorded step. A host alone costs nothing; with the machine goes what was not sealed.
func TestKilledAtEveryStepOfRest(t *testing.T) {
	for _, life := range restLives {
		for _, step := range strings.Fields(life.steps) {
			for _, both := range []bool{false, true} {
				what := life.ops + " " + strings.ReplaceAll(step, "/", " ")
				if both {
					what += " and the machine"
				}
				t.Run(what, func(t *testing.T) {
					w := newWorld(t, vmfake.Options{})
					boot := w.dieAt(t, strings.Fields(life.ops), step)
					if both {
						w.engine.KillLeftover(w.store.Sandbox("a1").Machine())
					}
					m := w.manager(nil)
					sealed := strings.Contains(life.sealed+" ", step+" ")
					v, err := m.Inspect("a1")
					if err != nil {
						t.Fatal(err)
					}
					died := both && !sealed
					if v.DiedWithHost != died || died != (v.Phase == api.Off) {
						t.Errorf("killed at %s, it is %s (%s)", step, v.Phase, v.Problem)
					}
					if again := bootOf(t, m, "a1"); (again == boot) == died {
						t.Errorf("killed at %s, of boot %s it went on as %s", step, boot, again)
					}
					if err := m.Remove(t.Context(), "a1"); err != nil {
						t.Error(err)
					}
					w.clean(m)
				})
			}
		}
	}
}

// dieAt starts a sandbox, runs ops, and kills the host at a step of theirs. It gives the
// boot the sandbox was of.
func (w *world) dieAt(t *testing.T, ops []string, step string) string {
	t.Helper()
	reached, armed := make(chan struct{}), false
	m := w.mortal(reached, func(_, s string) {
		if armed && s == step {
			close(reached)
			select {} // a killed host does nothing more
		}
	})
	create(t, m, "a1")
	boot := bootOf(t, m, "a1")
	armed = true
	go func() {
		for _, op := range ops {
			move(m, "a1", op)
		}
	}()
	select {
	case <-reached:
	case <-time.After(30 * time.Second):
		t.Fatal("the step was not reached")
	}
	return boot
}

// TestWhatCannotBeWoken damages what a wake needs, one thing at a time: the wake is
// refused with a sentence, and what is whole again can be woken.
func TestWhatCannotBeWoken(t *testing.T) {
	for what, file := range map[string]func(w *world) string{
		"memory": func(w *world) string { return w.store.Sandbox("a1").Memory() },
		"state":  func(w *world) string { return w.store.Sandbox("a1").State() },
		"disk":   func(w *world) string { return w.store.Sandbox("a1").File("root.qcow2") },
	} {
		for how, instead := range map[string]string{"truncated": "m", "changed": "other", "missing": ""} {
			t.Run(what+" "+how, func(t *testing.T) {
				w := newWorld(t, vmfake.Options{})
				m := w.manager(nil)
				create(t, m, "a1")
				boot := bootOf(t, m, "a1")
				if err := move(m, "a1", "hibernate"); err != nil {
					t.Fatal(err)
				}
				path := file(w)
				if err := os.Rename(path, path+".whole"); err != nil {
					t.Fatal(err)
				}
				if instead != "" {
					if err := os.WriteFile(path, []byte(instead), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				_, err := m.Wake(t.Context(), "a1", nil)
				wantKind(t, err, api.KindFailed)
				if p := phase(t, m, "a1"); p != api.Hibernated || w.engine.Machines() != 0 {
					t.Errorf("after a failed wake it is %s, with %d machines", p, w.engine.Machines())
				}
				if err := os.Rename(path+".whole", path); err != nil {
					t.Fatal(err)
				}
				if again := bootOf(t, w.manager(nil), "a1"); again != boot {
					t.Errorf("mended, it is of boot %s and not %s", again, boot)
				}
			})
		}
	}
}

// TestFailuresAtRest has the engine fail at each thing it is asked for: the sandbox is
// as it was, and the next try works.
func TestFailuresAtRest(t *testing.T) {
	for _, c := range []struct {
		from  api.Phase
		op    string
		point string
	}{
		{api.Running, "pause", "pause"}, {api.Paused, "resume", "resume"},
		{api.Running, "sleep", "pause"}, {api.Running, "sleep", "save"}, {api.Running, "hibernate", "save"},
		{api.Paused, "hibernate", "save"}, {api.Asleep, "wake", "resume"},
		{api.Hibernated, "wake", "restore"}, {api.Hibernated, "wake", "start"}, {api.Hibernated, "wake", "resume"},
	} {
		t.Run(string(c.from)+" "+c.op+" "+c.point, func(t *testing.T) {
			failing := ""
			w := newWorld(t, vmfake.Options{Fail: func(point string) error { return failAt(failing)(point) }})
			m := w.manager(nil)
			take(t, m, "a1", c.from)
			failing = c.point
			wantKind(t, move(m, "a1", c.op), api.KindFailed)
			failing = ""
			if p := phase(t, m, "a1"); p != c.from {
				t.Errorf("it is %s and not %s", p, c.from)
			}
			if err := move(m, "a1", c.op); err != nil {
				t.Errorf("the next try: %v", err)
			}
		})
	}
}

// TestShutdownOfWhatCannotBeWoken gives the snapshot up, and says so.
func TestShutdownOfWhatCannotBeWoken(t *testing.T) {
	w := newWorld(t, vmfake.Options{Fail: failAt("restore")})
	m := w.manager(nil)
	take(t, m, "a1", api.Hibernated)
	v, err := m.Shutdown(t.Context(), "a1")
	if err != nil || v.Phase != api.Off || v.Snapshot != nil || !strings.Contains(v.Problem, "woken") {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := os.Stat(w.store.Sandbox("a1").Memory()); err == nil {
		t.Error("the memory was left")
	}
}

// TestRest brings a host's sandboxes to rest, each in its phase.
func TestRest(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	for _, p := range []api.Phase{api.Off, api.Running, api.Paused, api.Asleep, api.Hibernated} {
		take(t, m, string(p), p)
	}
	rows := m.Rest(t.Context())
	if len(rows) != 3 {
		t.Errorf("%d rows: %+v", len(rows), rows)
	}
	for _, row := range rows {
		if row.Phase != api.Hibernated || row.Problem != "" || row.Bytes == 0 {
			t.Errorf("%+v", row)
		}
	}
	if n := w.engine.Machines(); n != 0 {
		t.Errorf("%d machines are left", n)
	}

	w = newWorld(t, vmfake.Options{Fail: failAt("save")})
	m = w.manager(nil)
	take(t, m, "a1", api.Running)
	rows = m.Rest(t.Context())
	if len(rows) != 1 || rows[0].Phase != api.Off || !strings.Contains(rows[0].Problem, "save") || !strings.Contains(rows[0].Problem, "shut down") {
		t.Errorf("%+v", rows)
	}
}
