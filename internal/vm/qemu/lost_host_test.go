//go:build linux

package qemu

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"dozable.com/doz/internal/parts"
	"dozable.com/doz/internal/vm"
)

// patience is when a test gives up.
const patience = 90 * time.Second

// hostFolder makes the test program, run again, a host that starts a machine below
// that folder and then waits to be killed.
const hostFolder = "DOZ_TEST_QEMU_HOST"

func TestMain(m *testing.M) {
	if dir := os.Getenv(hostFolder); dir != "" {
		engine, c := testMachine(dir)
		if _, err := engine.Start(context.Background(), c); err != nil {
			os.Stdout.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Stdout.WriteString("started\n")
		select {}
	}
	os.Exit(m.Run())
}

// testMachine is an engine and a machine below dir.
func testMachine(dir string) (*Engine, vm.Config) {
	var kernel, initrd string
	if set, err := parts.Find(); err == nil {
		k, _ := set.Current(parts.KernelPlain)
		i, _ := set.Current(parts.Initrd)
		kernel, initrd = set.Path(k), set.Path(i)
	}
	return New(Options{StateDir: dir, Kernel: kernel}), vm.Config{
		Dir: filepath.Join(dir, "machine"), Name: "a, b", CPUs: 1, MemoryMiB: 256,
		MemoryFile: filepath.Join(dir, "memory"), Kernel: kernel, Initrd: initrd,
		ConsoleFile: filepath.Join(dir, "console"),
	}
}

// machineFolder is a folder for testMachine.
func machineFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "machine"), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// lostHost starts a machine from another process and kills that.
func lostHost(t *testing.T) (*Engine, vm.Config) {
	t.Helper()
	dir := machineFolder(t)
	host := exec.Command(os.Args[0])
	host.Env = append(os.Environ(), hostFolder+"="+dir)
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	engine, c := testMachine(dir)
	t.Cleanup(func() { engine.KillLeftover(c.Dir) })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "started\n" {
		t.Fatalf("the other process says %q (%v)", line, err)
	}
	if err := host.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	host.Wait()
	return engine, c
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestAdoptAfterHostWasKilled(t *testing.T) {
	engine, c := lostHost(t)
	m, err := engine.Adopt(deadline(t), c)
	if err != nil {
		t.Fatal(err)
	}
	if u, err := m.Usage(); err != nil || u.CPU <= 0 {
		t.Errorf("Usage: %+v, %v", u, err)
	}
	// What it says to a host that is gone must not end it.
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
	if err != nil {
		t.Fatal(err)
	}
	_, ignored, _ := strings.Cut(string(status), "SigIgn:\t")
	var mask uint64
	if fmt.Sscanf(ignored, "%x", &mask); mask>>(syscall.SIGPIPE-1)&1 == 0 {
		t.Errorf("QEMU does not ignore SIGPIPE (%x)", mask)
	}
	if err := m.Pause(deadline(t)); err != nil {
		t.Error(err)
	}
	if err := m.Kill(); err != nil {
		t.Error(err)
	}
	if exit := <-m.Wait(); exit.Clean {
		t.Errorf("a killed machine ended %+v", exit)
	}
	if _, err := engine.Adopt(deadline(t), c); !errors.Is(err, vm.ErrNoMachine) {
		t.Errorf("Adopt after that: %v", err)
	}
}

func TestStoppedMachineIsUnresponsive(t *testing.T) {
	engine, c := lostHost(t)
	proc, err := findProcess(c.Dir)
	if err != nil || proc == nil {
		t.Fatalf("the machine is not found (%v)", err)
	}
	defer proc.close()
	if err := syscall.Kill(proc.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for range 3 { // each try leaves a connection nobody takes
		if _, err := engine.Adopt(deadline(t), c); !errors.Is(err, vm.ErrUnresponsive) {
			t.Fatalf("Adopt of a stopped machine: %v", err)
		}
	}
	if err := engine.KillLeftover(c.Dir); err != nil {
		t.Fatal(err)
	}
	if !proc.wait(0) {
		t.Error("the process is still there")
	}
	entries, err := os.ReadDir(c.Dir)
	if err != nil || len(entries) != 0 {
		t.Errorf("files were left behind: %v (%v)", entries, err)
	}
	if err := engine.KillLeftover(c.Dir); !errors.Is(err, vm.ErrNoMachine) {
		t.Errorf("KillLeftover twice: %v", err)
	}
}

func TestAdoptWithoutSockets(t *testing.T) {
	engine, c := lostHost(t)
	removeSockets(c.Dir)
	if _, err := engine.Adopt(deadline(t), c); !errors.Is(err, vm.ErrUnresponsive) {
		t.Errorf("Adopt of a machine without sockets: %v", err)
	}
	if err := engine.KillLeftover(c.Dir); err != nil {
		t.Error(err)
	}
}

// TestOverlay writes to a disk from the machine's side.
func TestOverlay(t *testing.T) {
	dir := machineFolder(t)
	engine, c := testMachine(dir)
	base, disk := filepath.Join(dir, "base, raw"), filepath.Join(dir, "disk, overlay")
	content := strings.Repeat("base of a disk. ", 1<<16)
	if err := os.WriteFile(base, []byte(content), 0o400); err != nil {
		t.Fatal(err)
	}
	if err := engine.CreateDisk(deadline(t), disk, 64<<20); err != nil {
		t.Fatal(err)
	}
	c.Disks = []vm.Disk{{Path: disk, Base: base, Format: vm.Overlay, Scratch: true}}
	started, err := engine.Start(deadline(t), c)
	if err != nil {
		t.Fatal(err)
	}
	m := started.(*machine)
	defer m.Kill()
	io := func(command string) string {
		t.Helper()
		var out string
		if err := m.monitor.run(deadline(t), "human-monitor-command", map[string]string{"command-line": `qemu-io disk0 "` + command + `"`}, &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	if out := io("read -P 0x62 0 1"); strings.Contains(out, "failed") || strings.Contains(out, "rror") {
		t.Errorf("the base does not show through: %s", out)
	}
	if out := io("write -P 0xab 0 64k"); strings.Contains(out, "rror") {
		t.Errorf("the disk cannot be written: %s", out)
	}
	io("flush")
	if out := io("read -P 0xab 0 64k"); strings.Contains(out, "failed") || strings.Contains(out, "rror") {
		t.Errorf("what was written is not there: %s", out)
	}
	if out := io("read -P 0 63M 64k"); strings.Contains(out, "failed") || strings.Contains(out, "rror") {
		t.Errorf("beyond the base there is something: %s", out)
	}
	if now, err := os.ReadFile(base); err != nil || string(now) != content {
		t.Errorf("writing to a disk changed its base (%v)", err)
	}

	over := filepath.Join(dir, "over")
	if err := engine.CreateDisk(deadline(t), over, 64<<20); err != nil {
		t.Fatal(err)
	}
	if err := m.Pause(deadline(t)); err != nil {
		t.Fatal(err)
	}
	if err := m.SwitchDisk(deadline(t), 0, over); err != nil {
		t.Fatal(err)
	}
	under, err := os.ReadFile(disk)
	if err != nil {
		t.Fatal(err)
	}
	top, err := m.topNode(deadline(t), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"read -P 0xab 0 64k", "write -P 0xcd 0 64k", "flush", "read -P 0xcd 0 64k"} {
		var out string
		if err := m.monitor.run(deadline(t), "human-monitor-command", map[string]string{"command-line": `qemu-io ` + top + ` "` + command + `"`}, &out); err != nil || strings.Contains(out, "rror") || strings.Contains(out, "failed") {
			t.Errorf("%s after the switch: %s (%v)", command, out, err)
		}
	}
	if now, err := os.ReadFile(disk); err != nil || !bytes.Equal(now, under) {
		t.Errorf("writing after a switch changed the disk under it (%v)", err)
	}
}

// TestKernelTrial tells a kernel that runs from one that does not, under emulation.
func TestKernelTrial(t *testing.T) {
	engine, c := testMachine(machineFolder(t))
	p, err := engine.probe(deadline(t))
	if err != nil {
		t.Fatal(err)
	}
	f := p.Features
	f.Accelerator, f.Emulated = "tcg", true
	if err := tryKernel(deadline(t), p.Binary, c.Kernel, f); err != nil {
		t.Errorf("an ordinary kernel: %v", err)
	}
	short, cancel := context.WithTimeout(deadline(t), 50*time.Millisecond)
	defer cancel()
	if err := tryKernel(short, p.Binary, c.Kernel, f); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a kernel that takes too long: %v", err)
	}
	if err := tryKernel(deadline(t), p.Binary, c.Kernel+"-missing", f); err == nil || !strings.Contains(err.Error(), "QEMU says") {
		t.Errorf("a kernel that is not there: %v", err)
	}
}
