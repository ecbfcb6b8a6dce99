package sandbox

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/vm"
	"dozable.com/doz/internal/vm/vmfake"
)

// TestLeftAlone: a machine that does not answer a new host is said not to, and is
// taken over as soon as it answers again.
func TestLeftAlone(t *testing.T) {
	var deaf atomic.Bool
	w := newWorld(t, vmfake.Options{Fail: func(point string) error {
		if point == "adopt" && deaf.Load() {
			return vm.ErrUnresponsive
		}
		return nil
	}})
	dead := make(chan struct{})
	m := w.mortal(dead, nil)
	create(t, m, "a1")
	if _, err := m.Start(t.Context(), "a1", nil); err != nil {
		t.Fatal(err)
	}
	close(dead)
	deaf.Store(true)
	m = w.manager(nil)
	if v, _ := m.Inspect("a1"); v.Phase != api.Running || !v.Unresponsive {
		t.Errorf("left alone: %+v", v)
	}
	_, _, err := m.Exec(t.Context(), api.ExecRequest{Name: "a1", Argv: []string{"true"}}, nil)
	wantKind(t, err, api.KindFailed)
	if v, _ := m.Inspect("a1"); v.Phase != api.Running || !v.Unresponsive {
		t.Errorf("asked in vain: %+v", v)
	}
	deaf.Store(false)
	if code := run(t, m, "a1", "true"); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if v, _ := m.Inspect("a1"); v.Unresponsive || v.PID == 0 {
		t.Errorf("taken back: %+v", v)
	}
}

// TestEndNobodyCanRecord: where the record cannot be written, a machine that is gone
// is known to be gone all the same.
func TestEndNobodyCanRecord(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	create(t, m, "a1")
	if _, err := m.Start(t.Context(), "a1", nil); err != nil {
		t.Fatal(err)
	}
	// Nothing can be renamed over a folder, which is what a full disk amounts to.
	path := w.store.Sandbox("a1").Record()
	if err := errors.Join(os.Remove(path), os.MkdirAll(path+"/full", 0o700)); err != nil {
		t.Fatal(err)
	}
	_, err := m.Shutdown(t.Context(), "a1")
	wantKind(t, err, api.KindFailed)
	if got := phase(t, m, "a1"); got != api.Off {
		t.Errorf("it is %s", got)
	}
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if r, err := m.Start(t.Context(), "a1", nil); err != nil || !r.Started {
		t.Errorf("the next start: %+v, %v", r, err)
	}
}

func TestListInParts(t *testing.T) {
	w := newWorld(t, vmfake.Options{})
	m := w.manager(nil)
	for i := range 5 {
		create(t, m, fmt.Sprint("a", i))
	}
	var names []string
	for _, v := range m.ListAfter("a1", 2) {
		names = append(names, v.Name)
	}
	if fmt.Sprint(names) != "[a2 a3]" || len(m.ListAfter("a4", 2)) != 0 || len(m.List()) != 5 {
		t.Errorf("after a1: %v", names)
	}
}
