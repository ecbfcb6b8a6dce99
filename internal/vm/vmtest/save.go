package vmtest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/vm"
)

// save checks that a saved machine carries on in another process, and that the one
// that was saved does too.
func (s suite) save(t *testing.T) {
	c := s.withDisk(t)
	m := s.start(t, c)
	boot := bootID(t, open(t, m))
	dir := t.TempDir()
	first := filepath.Join(dir, "first")
	pause(t, m)
	if err := m.Save(deadline(t), first); err != nil {
		t.Fatalf("Save: %v", err)
	}
	if err := m.Save(deadline(t), first); err == nil {
		t.Error("a saved state was written over")
	} else if strings.Contains(err.Error(), "\n") {
		t.Errorf("not one sentence: %q", err)
	}
	resume(t, m)
	ask(t, open(t, m))

	second := filepath.Join(dir, "second")
	pause(t, m)
	if err := m.Save(deadline(t), second); err != nil {
		t.Fatalf("a second Save: %v", err)
	}
	if err := m.Kill(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // what was restored can be saved again
		c.Restore = second
		m = s.start(t, c)
		s.stands(t, m)
		resume(t, m)
		if again := bootID(t, open(t, m)); again != boot {
			t.Errorf("the machine that was restored is of boot %q, not %q", again, boot)
		}
		pause(t, m)
		second += "-again"
		if err := m.Save(deadline(t), second); err != nil {
			t.Fatalf("Save of a restored machine: %v", err)
		}
		if err := m.Kill(); err != nil {
			t.Fatal(err)
		}
		s.empty(t, c)
	}
}

// stands checks that a machine's processors do not run, and that it is adopted so.
func (s suite) stands(t *testing.T, m vm.Machine) {
	t.Helper()
	conn, err := m.DialGuest(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(deadline(t), 300*time.Millisecond)
	defer cancel()
	if session, err := guest.Open(short, conn, token); err == nil {
		session.Close()
		t.Error("a restored machine runs before it is resumed")
	}
}

// badState offers what is no state of the machine.
func (s suite) badState(t *testing.T) {
	c := s.withDisk(t)
	m := s.start(t, c)
	ask(t, open(t, m))
	dir := t.TempDir()
	good := filepath.Join(dir, "good")
	pause(t, m)
	if err := m.Save(deadline(t), good); err != nil {
		t.Fatal(err)
	}
	if err := m.Kill(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, c vm.Config) {
		t.Helper()
		m, err := s.Engine.Start(deadline(t), c)
		if err == nil {
			m.Kill()
			t.Errorf("%s was loaded", what)
		} else if !errors.Is(err, vm.ErrNoState) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %q", what, err)
		}
		s.empty(t, c)
	}
	for what, bytes := range map[string][]byte{"half a state": data[:len(data)/2], "garbage": []byte("garbage"), "nothing": {}} {
		bad := c
		bad.Restore = filepath.Join(dir, "bad")
		if err := os.WriteFile(bad.Restore, bytes, 0o600); err != nil {
			t.Fatal(err)
		}
		refused(what, bad)
	}
	other := c
	other.Restore, other.CPUs = good, c.CPUs+1
	refused("another machine's state", other)
	lost := c
	lost.Restore, lost.MemoryFile = good, filepath.Join(dir, "missing")
	refused("a state without its memory", lost)

	c.Restore = good
	m = s.start(t, c)
	resume(t, m)
	ask(t, open(t, m))
}

// switches puts an overlay over a running machine's disk.
func (s suite) switches(t *testing.T) {
	c := s.withDisk(t)
	m := s.start(t, c)
	ask(t, open(t, m))
	state := filepath.Join(t.TempDir(), "state")
	pause(t, m)
	for _, name := range []string{"second", "third"} {
		d := &c.Disks[0]
		over := filepath.Join(filepath.Dir(d.Path), name)
		if err := s.Engine.CreateDisk(deadline(t), over, 64<<30); err != nil {
			t.Fatal(err)
		}
		if err := m.SwitchDisk(deadline(t), 0, over); err != nil {
			t.Fatalf("SwitchDisk: %v", err)
		}
		d.Path, d.Layers = over, append([]string{d.Path}, d.Layers...)
	}
	if err := m.SwitchDisk(deadline(t), 1, c.Disks[0].Path); err == nil {
		t.Error("a disk that is not there was switched")
	}
	resume(t, m)
	ask(t, open(t, m))
	pause(t, m)
	if err := m.Save(deadline(t), state); err != nil {
		t.Fatal(err)
	}
	if err := m.Kill(); err != nil {
		t.Fatal(err)
	}
	c.Restore = state
	m = s.start(t, c)
	resume(t, m)
	ask(t, open(t, m))
}

// withDisk is a machine with an overlay over a raw disk.
func (s suite) withDisk(t *testing.T) vm.Config {
	t.Helper()
	dir := t.TempDir()
	base, disk := filepath.Join(dir, "base"), filepath.Join(dir, "disk")
	if err := os.WriteFile(base, make([]byte, 1<<20), 0o444); err != nil {
		t.Fatal(err)
	}
	if err := s.Engine.CreateDisk(deadline(t), disk, 64<<30); err != nil {
		t.Fatal(err)
	}
	c := s.config(t)
	c.Disks = []vm.Disk{{Path: disk, Base: base, Format: vm.Overlay}}
	return c
}

func pause(t *testing.T, m vm.Machine) {
	t.Helper()
	if err := m.Pause(deadline(t)); err != nil {
		t.Fatalf("Pause: %v", err)
	}
}

func resume(t *testing.T, m vm.Machine) {
	t.Helper()
	if err := m.Resume(deadline(t)); err != nil {
		t.Fatalf("Resume: %v", err)
	}
}

// bootID tells one boot from another.
func bootID(t *testing.T, session *guest.Session) string {
	t.Helper()
	var setup guest.SetupResponse
	if err := session.Call(deadline(t), guest.OpSetup, guest.SetupRequest{}, &setup); err != nil {
		t.Fatalf("the guest did not answer: %v", err)
	}
	if setup.BootID == "" {
		t.Fatal("the guest names no boot")
	}
	return setup.BootID
}
