//go:build linux

package qemu

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"dozable.com/doz/internal/vm"
)

func TestLastWords(t *testing.T) {
	w := &lastWords{}
	w.Write([]byte(strings.Repeat("a flood of warnings\n", 1000)))
	w.Write([]byte("/usr/bin/qemu-system-x86_64: -kernel x: could not load\n"))
	if got := w.String(); got != "-kernel x: could not load" {
		t.Errorf("the last words are %q", got)
	}
	if len(w.text) > maxWords {
		t.Errorf("%d bytes are kept", len(w.text))
	}
}

// TestSameConfigSameMachine holds what waking a saved machine will need.
func TestSameConfigSameMachine(t *testing.T) {
	p := &probed{Features: vm.Features{Version: "10.0.2", Arch: "x86_64", MachineType: "pc-q35-10.0+qboot", Emulated: true}, TSCKHz: 2100000}
	c := vm.Config{Dir: "/d", Name: "a,b", CPUs: 1, MemoryMiB: 512, MemoryFile: "/a,b", Disks: []vm.Disk{{Path: "/1,2", Base: "/3", Format: vm.Overlay}, {Path: "/4", Format: vm.Raw, ReadOnly: true}}}
	first, second := strings.Join(p.arguments(c), "\n"), strings.Join(p.arguments(c), "\n")
	if first != second {
		t.Errorf("the same Config makes two machines:\n%s\n%s", first, second)
	}
	for _, device := range strings.Split(first, "\n") {
		if strings.Contains(device, "-pci,") && !strings.Contains(device, "addr=") {
			t.Errorf("a device stands where QEMU likes: %s", device)
		}
	}
	c.MachineType = "pc-q35-9.2"
	if older := strings.Join(p.arguments(c), "\n"); strings.Contains(older, "qboot") || !strings.Contains(older, "pc-q35-9.2,") {
		t.Errorf("an older machine type is not kept to: %s", older)
	}
}

func TestCheckedConfig(t *testing.T) {
	good := vm.Config{Dir: "d", CPUs: 1, MemoryMiB: 256, MemoryFile: "m", Kernel: "k", Initrd: "i", Disks: []vm.Disk{{Path: "p"}}}
	c, err := checked(good)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{c.Dir, c.MemoryFile, c.Kernel, c.Initrd, c.Disks[0].Path} {
		if !filepath.IsAbs(path) {
			t.Errorf("%s is not absolute", path)
		}
	}
	if c.Disks[0].Base != "" || good.Disks[0].Path != "p" {
		t.Errorf("too much was changed: %+v, %+v", c.Disks, good.Disks)
	}
	for name, spoil := range map[string]func(*vm.Config){
		"no processors":  func(c *vm.Config) { c.CPUs = 0 },
		"65 processors":  func(c *vm.Config) { c.CPUs = 65 },
		"little memory":  func(c *vm.Config) { c.MemoryMiB = 255 },
		"no memory file": func(c *vm.Config) { c.MemoryFile = "" },
		"odd type":       func(c *vm.Config) { c.MachineType = "pc-q35-10.0,accel=kvm" },
		"17 disks":       func(c *vm.Config) { c.Disks = make([]vm.Disk, 17) },
	} {
		bad := good
		spoil(&bad)
		if _, err := checked(bad); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestProbeWithoutQEMU(t *testing.T) {
	e := New(Options{StateDir: t.TempDir(), Binary: filepath.Join(t.TempDir(), "qemu")})
	if _, err := e.Probe(context.Background()); err == nil {
		t.Error("a QEMU that is not there was found")
	}
}

// TestProbeIsRemembered also looks at what happens when the memory is no good.
func TestProbeIsRemembered(t *testing.T) {
	dir := t.TempDir()
	fake := filepath.Join(dir, "qemu-system-fake")
	script := "#!/bin/sh\necho run >>" + filepath.Join(dir, "runs") + "\necho QEMU emulator version 7.2.1\n"
	if err := os.WriteFile(fake, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	runs := func() int {
		text, _ := os.ReadFile(filepath.Join(dir, "runs"))
		return strings.Count(string(text), "run")
	}
	state := t.TempDir()
	probe := func() vm.Features {
		t.Helper()
		f, err := New(Options{StateDir: state, Binary: fake}).Probe(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	first := probe()
	if first.Version != "7.2.1" || first.Audio || first.AudioWhy == "" {
		t.Errorf("features are %+v", first)
	}
	after := runs()
	if second := probe(); second != first || runs() != after {
		t.Errorf("a second probe ran QEMU again, or differs: %+v", second)
	}
	for _, spoilt := range []string{"", "{", `{"key":"another boot"}`} {
		if err := os.WriteFile(filepath.Join(state, "qemu.json"), []byte(spoilt), 0o600); err != nil {
			t.Fatal(err)
		}
		before := runs()
		if again := probe(); again != first || runs() == before {
			t.Errorf("a spoilt memory %q was believed: %+v", spoilt, again)
		}
	}
}

// TestQEMUThatEndsEarly: why it ended is told.
func TestQEMUThatEndsEarly(t *testing.T) {
	for script, want := range map[string]string{
		"exit 3":                         "cannot start the machine: its process ended with exit status 3",
		"kill -SYS $$":                   "cannot start the machine: its process was ended by signal 31 (SIGSYS)",
		"kill -BUS $$":                   "cannot start the machine: its process was ended by signal 7 (SIGBUS): there is no room for its memory on the store's disk",
		"echo no such thing >&2; exit 1": "cannot start the machine: QEMU says: no such thing",
	} {
		dir := t.TempDir()
		fake := filepath.Join(dir, "qemu-system-fake")
		if err := os.WriteFile(fake, []byte("#!/bin/sh\ncase \"$*\" in *version*) echo QEMU emulator version 7.2.1;; *) "+script+";; esac\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		machine := filepath.Join(dir, "machine")
		if err := os.Mkdir(machine, 0o700); err != nil {
			t.Fatal(err)
		}
		_, err := New(Options{Binary: fake}).Start(t.Context(), vm.Config{
			Dir: machine, CPUs: 1, MemoryMiB: 256, MemoryFile: filepath.Join(dir, "memory"), Kernel: fake, Initrd: fake,
		})
		if err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", script, err, want)
		}
	}
}
