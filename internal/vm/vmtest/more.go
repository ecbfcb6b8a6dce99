package vmtest

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"dozable.com/doz/internal/vm"
)

// powerButton ends a machine the way its owner does when the guest channel is no help.
func (s suite) powerButton(t *testing.T) {
	c := s.config(t)
	m := s.start(t, c)
	ask(t, open(t, m))
	wait := m.Wait()
	if err := m.PowerOff(deadline(t)); err != nil {
		t.Fatalf("PowerOff: %v", err)
	}
	if e := end(t, wait); !e.Clean || e.Text != "" || e.At.IsZero() {
		t.Errorf("a machine that was powered off ended %+v", e)
	}
	if err := m.Resume(deadline(t)); !errors.Is(err, vm.ErrEnded) {
		t.Errorf("Resume of a machine that has ended: %v", err)
	}
	if err := m.PowerOff(deadline(t)); !errors.Is(err, vm.ErrEnded) {
		t.Errorf("PowerOff of a machine that has ended: %v", err)
	}
	if _, err := m.Usage(); !errors.Is(err, vm.ErrEnded) {
		t.Errorf("Usage of a machine that has ended: %v", err)
	}
	s.empty(t, c)
}

// oneChannel checks that a second dial closes the first connection, also when nobody
// reads what the guest had sent there.
func (s suite) oneChannel(t *testing.T) {
	m := s.start(t, s.config(t))
	ask(t, open(t, m))
	first, err := m.DialGuest(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	ask(t, open(t, m))
	first.SetReadDeadline(time.Now().Add(patience))
	for err == nil {
		_, err = first.Read(make([]byte, 4096))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the first connection stays open after a second dial")
	}
}

// again checks that a folder holds one machine at a time, and another one after it.
func (s suite) again(t *testing.T) {
	c := s.config(t)
	m := s.start(t, c)
	if second, err := s.Engine.Start(deadline(t), c); err == nil {
		second.Kill()
		t.Fatal("a second machine started in the same folder")
	}
	ask(t, open(t, m))
	wait := m.Wait()
	if err := s.Engine.KillLeftover(c.Dir); err != nil {
		t.Fatalf("KillLeftover: %v", err)
	}
	if e := end(t, wait); e.Clean || e.Text == "" {
		t.Errorf("a machine that was killed ended %+v", e)
	}
	s.empty(t, c)
	ask(t, open(t, s.start(t, c)))
}

func (s suite) wrongConfig(t *testing.T) {
	c := s.config(t)
	c.CPUs = 0
	if m, err := s.Engine.Start(deadline(t), c); err == nil {
		m.Kill()
		t.Error("a machine without processors started")
	}
	s.empty(t, c)
	if _, err := os.Stat(c.MemoryFile); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a start that failed left a memory file (%v)", err)
	}
}

// consoleLimit keeps a little of what the kernel prints.
func (s suite) consoleLimit(t *testing.T) {
	c := s.config(t)
	c.ConsoleLimit = 5
	c.Cmdline = append(c.Cmdline, "loglevel=7")
	m := s.start(t, c)
	ask(t, open(t, m))
	if err := m.Kill(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(c.ConsoleFile)
	if err != nil {
		t.Fatal(err)
	}
	kept, said, found := strings.Cut(string(text), "\n[doz: ")
	if len(kept) != 5 || !found || !strings.Contains(said, "dropped") || strings.Count(said, "\n") != 1 {
		t.Errorf("a console limited to 5 bytes is %q", text)
	}
}
