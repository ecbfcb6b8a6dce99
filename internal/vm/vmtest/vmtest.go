// Package vmtest is the conformance suite of the engine boundary: what every engine
// must do, the fake one too. It must not know which engine it tests.
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

// token is of the guest channel in every machine of the suite.
const token = "00112233445566778899aabbccddeeff"

// patience is when a test gives up; an emulated boot on a busy computer takes a
// tenth of it.
const patience = 90 * time.Second

// Setup gives the engine under test and what its machines boot: a kernel, and an
// initramfs whose init is deckhold.
type Setup struct {
	Engine         vm.Engine
	Kernel, Initrd string
}

// Run runs the suite. The machines of one engine are started one after another.
func Run(t *testing.T, setup Setup) {
	s := suite{setup}
	t.Run("probe says what it is", s.probe)
	t.Run("a machine lives and powers off", s.life)
	t.Run("a machine is adopted and killed", s.adoption)
	t.Run("the power button ends a machine", s.powerButton)
	t.Run("a second dial takes the guest channel", s.oneChannel)
	t.Run("a folder has one machine at a time", s.again)
	t.Run("a failed start leaves nothing", s.failedStart)
	t.Run("a wrong config starts nothing", s.wrongConfig)
	t.Run("a saved machine carries on", s.save)
	t.Run("what is no saved state is refused", s.badState)
	t.Run("a disk is switched", s.switches)
	t.Run("the console is limited", s.consoleLimit)
	t.Run("nothing to adopt", s.nothing)
	t.Run("disks", s.disks)
}

type suite struct{ Setup }

// config is a small machine in a folder whose path is too long for a socket.
func (s suite) config(t *testing.T) vm.Config {
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	if err := os.MkdirAll(filepath.Join(dir, "machine"), 0o700); err != nil {
		t.Fatal(err)
	}
	return vm.Config{
		Dir: filepath.Join(dir, "machine"), Name: "conformance", CPUs: 1, MemoryMiB: 256,
		MemoryFile: filepath.Join(dir, "memory"), Kernel: s.Kernel, Initrd: s.Initrd,
		Cmdline:     []string{guest.TokenParam + "=" + token},
		ConsoleFile: filepath.Join(dir, "console"), ConsoleLimit: 1 << 20,
	}
}

func (s suite) start(t *testing.T, c vm.Config) vm.Machine {
	t.Helper()
	m, err := s.Engine.Start(deadline(t), c)
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	t.Cleanup(func() { m.Kill() })
	return m
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// open opens a session with the machine's guest.
func open(t *testing.T, m vm.Machine) *guest.Session {
	t.Helper()
	conn, err := m.DialGuest(deadline(t))
	if err != nil {
		t.Fatalf("DialGuest: %v", err)
	}
	session, err := guest.Open(deadline(t), conn, token)
	if err != nil {
		t.Fatalf("the guest did not answer: %v", err)
	}
	t.Cleanup(func() { session.Close() })
	return session
}

func ask(t *testing.T, session *guest.Session) {
	t.Helper()
	if err := session.Call(deadline(t), guest.OpClock, guest.ClockRequest{}, nil); err != nil {
		t.Fatalf("the guest did not answer: %v", err)
	}
}

// end gives the machine's end, or fails the test.
func end(t *testing.T, wait <-chan vm.Exit) vm.Exit {
	t.Helper()
	select {
	case e, ok := <-wait:
		if !ok {
			t.Fatal("Wait's channel was closed without an Exit")
		}
		return e
	case <-deadline(t).Done():
		t.Fatal("the machine did not end")
		return vm.Exit{}
	}
}

func (s suite) probe(t *testing.T) {
	f, err := s.Engine.Probe(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	if f.Engine == "" || f.Version == "" || f.Arch == "" || f.Accelerator == "" || f.AcceleratorWhy == "" || f.MachineType == "" {
		t.Errorf("something is missing in %+v", f)
	}
	if !f.Audio && f.AudioWhy == "" && f.Engine != "fake" {
		t.Error("no sound, and no reason why")
	}
}

func (s suite) life(t *testing.T) {
	c := s.config(t)
	m := s.start(t, c)
	first := m.Wait()
	if m.PID() <= 0 {
		t.Errorf("PID is %d", m.PID())
	}
	session := open(t, m)
	ask(t, session)

	for range 2 { // both are idempotent
		if err := m.Pause(deadline(t)); err != nil {
			t.Fatalf("Pause: %v", err)
		}
	}
	short, cancel := context.WithTimeout(deadline(t), 300*time.Millisecond)
	defer cancel()
	if err := session.Call(short, guest.OpClock, guest.ClockRequest{}, nil); err == nil {
		t.Error("a paused guest answered")
	}
	for range 2 {
		if err := m.Resume(deadline(t)); err != nil {
			t.Fatalf("Resume: %v", err)
		}
	}
	// A second channel takes over from the first, in the middle of its session.
	session = open(t, m)
	ask(t, session)
	if u, err := m.Usage(); err != nil || u.MemoryBytes <= 0 {
		t.Errorf("Usage: %+v, %v", u, err)
	}

	second := m.Wait()
	if err := session.Call(deadline(t), guest.OpPowerOff, struct{}{}, nil); err != nil {
		t.Logf("powering off: %v", err) // it may be gone before it has answered
	}
	for _, wait := range []<-chan vm.Exit{first, second, m.Wait()} {
		if e := end(t, wait); !e.Clean {
			t.Errorf("a machine that powered off ended %+v", e)
		}
	}
	if _, err := m.DialGuest(deadline(t)); err == nil {
		t.Error("a machine that has ended took a call")
	}
	if err := m.Kill(); err != nil {
		t.Errorf("Kill of a machine that has ended: %v", err)
	}
	s.empty(t, c)
	if text, err := os.ReadFile(c.ConsoleFile); err != nil || len(text) == 0 {
		t.Errorf("the console is empty (%v)", err)
	}
}

func (s suite) adoption(t *testing.T) {
	c := s.config(t)
	m := s.start(t, c)
	ask(t, open(t, m))
	again, err := s.Engine.Adopt(deadline(t), c)
	if err != nil {
		t.Fatalf("Adopt: %v", err)
	}
	ask(t, open(t, again))
	wait := again.Wait()
	if err := again.Kill(); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	if e := end(t, wait); e.Clean {
		t.Errorf("a killed machine ended %+v", e)
	}
	if err := again.Kill(); err != nil {
		t.Errorf("Kill twice: %v", err)
	}
	s.empty(t, c)
}

// empty fails the test when something of a machine is left.
func (s suite) empty(t *testing.T, c vm.Config) {
	t.Helper()
	if err := s.Engine.KillLeftover(c.Dir); !errors.Is(err, vm.ErrNoMachine) {
		t.Errorf("a machine was left behind (%v)", err)
	}
	entries, err := os.ReadDir(c.Dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("files were left behind: %v (%v)", entries, err)
	}
}

func (s suite) failedStart(t *testing.T) {
	c := s.config(t)
	c.Disks = []vm.Disk{{Path: filepath.Join(t.TempDir(), "missing"), Format: vm.Raw}}
	if m, err := s.Engine.Start(deadline(t), c); err == nil {
		m.Kill()
		t.Fatal("a machine with a missing disk started")
	} else if strings.Contains(err.Error(), "\n") || err.Error() == "" {
		t.Errorf("not one sentence: %q", err)
	}
	s.empty(t, c)
}

func (s suite) nothing(t *testing.T) {
	c := s.config(t)
	if _, err := s.Engine.Adopt(deadline(t), c); !errors.Is(err, vm.ErrNoMachine) {
		t.Errorf("Adopt of nothing: %v", err)
	}
}

func (s suite) disks(t *testing.T) {
	dir := t.TempDir()
	base := filepath.Join(dir, "base")
	if err := os.WriteFile(base, make([]byte, 1<<20), 0o444); err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(dir, "disk")
	if err := s.Engine.CreateDisk(deadline(t), disk, 64<<30); err != nil {
		t.Fatal(err)
	}
	if err := s.Engine.CreateDisk(deadline(t), disk, 64<<30); err == nil {
		t.Error("an existing disk was made again")
	}
	if err := s.Engine.CreateDisk(deadline(t), filepath.Join(dir, "none"), 0); err == nil {
		t.Error("a disk of no size was made")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("disks that could not be made left something: %v (%v)", entries, err)
	}
	c := s.config(t)
	c.Disks = []vm.Disk{{Path: disk, Base: base, Format: vm.Overlay}}
	m := s.start(t, c)
	ask(t, open(t, m))
}
