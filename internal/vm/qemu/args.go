package qemu

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/vm"
)

// Descriptors a machine inherits, after the standard three: the listening sockets of
// its monitor, console and guest channel.
const (
	fdMonitor = 3 + iota
	fdConsole
	fdGuest
)

// Slots on the root bus. A machine's devices stand at fixed places, so that the same
// Config makes the same machine.
const (
	slotSerial  = 3
	slotBalloon = 4
	slotRandom  = 5
	slotDisks   = 8
)

// arguments is the command line of a machine.
func (e *Engine) arguments(c vm.Config, f vm.Features, tscKHz int64) []string {
	machine := c.MachineType
	if machine == "" {
		machine = f.MachineType
	}
	args := []string{
		"-name", "doz " + c.Name,
		"-machine", machine + ",memory-backend=memory",
		"-object", toJSON(map[string]any{"qom-type": "memory-backend-file", "id": "memory", "size": int64(c.MemoryMiB) << 20, "mem-path": c.MemoryFile, "share": true}),
		"-m", fmt.Sprintf("%dM", c.MemoryMiB),
		"-smp", fmt.Sprint(c.CPUs),
		"-nodefaults", "-no-user-config", "-no-reboot", "-S",
		"-display", "none",
		"-kernel", c.Kernel, "-initrd", c.Initrd,
		"-append", strings.Join(append(e.kernelWords(f, tscKHz), c.Cmdline...), " "),
		"-chardev", fmt.Sprintf("socket,id=monitor,server=on,wait=off,fd=%d", fdMonitor),
		"-mon", "chardev=monitor,mode=control",
		"-chardev", fmt.Sprintf("socket,id=console,server=on,wait=off,fd=%d", fdConsole),
		"-serial", "chardev:console",
		"-chardev", fmt.Sprintf("socket,id=guest,server=on,wait=off,fd=%d", fdGuest),
		"-device", fmt.Sprintf("virtio-serial-pci,id=ports,max_ports=2,addr=%#x", slotSerial),
		"-device", "virtserialport,bus=ports.0,nr=1,chardev=guest,name=" + guest.PortName,
		"-device", fmt.Sprintf("virtio-balloon-pci,id=balloon,free-page-reporting=on,addr=%#x", slotBalloon),
		"-device", fmt.Sprintf("virtio-rng-pci,id=random,addr=%#x", slotRandom),
	}
	args = append(args, e.processor(f)...)
	for i, d := range c.Disks {
		args = append(args, "-blockdev", toJSON(blockdev(d, fmt.Sprintf("disk%d", i))),
			"-device", fmt.Sprintf("virtio-blk-pci,id=vd%c,drive=disk%d,addr=%#x", 'a'+i, i, slotDisks+i))
	}
	return append(args, confinement(f)...)
}

// processor is the accelerator and the processor it shows.
func (e *Engine) processor(f vm.Features) []string {
	if !f.Emulated {
		return []string{"-accel", f.Accelerator, "-cpu", "host"}
	}
	cpu := "max"
	if f.Arch == "x86_64" {
		// What costs the emulator dearly and gains a guest nothing.
		cpu = "max,-smap,-smep,-pku,-pcid,-umip,-la57"
	}
	return []string{"-accel", "tcg,thread=multi,tb-size=256", "-cpu", cpu}
}

// kernelWords are the kernel's parameters that the engine's devices need.
func (e *Engine) kernelWords(f vm.Features, tscKHz int64) []string {
	console := map[string]string{"x86_64": "ttyS0", "arm64": "ttyAMA0"}[f.Arch]
	words := []string{"console=" + console, "quiet", "loglevel=4", "panic=-1", "random.trust_cpu=1", "cryptomgr.notests", "rcupdate.rcu_expedited=1"}
	if f.Arch == "x86_64" {
		words = append(words, "reboot=t")
		if f.Emulated {
			// The emulator passes this computer's own time stamp counter through:
			// telling its rate saves the guest a fifth of a second of measuring it.
			words = append(words, "no_timer_check", "tsc=reliable", fmt.Sprintf("tsc_early_khz=%d", tscKHz))
		}
	}
	return words
}

// blockdev is a disk's files. The chain under an overlay is spelt out, so that
// nothing a guest could have written into it names other files.
func blockdev(d vm.Disk, node string) map[string]any {
	file := func(path string, readOnly bool) map[string]any {
		return map[string]any{"driver": "file", "filename": path, "read-only": readOnly, "discard": "unmap",
			"cache": map[string]any{"direct": false, "no-flush": d.Scratch}}
	}
	dev := map[string]any{"node-name": node, "driver": "raw", "read-only": d.ReadOnly, "discard": "unmap",
		"cache": map[string]any{"direct": false, "no-flush": d.Scratch}, "file": file(d.Path, d.ReadOnly)}
	if d.Format == vm.Overlay {
		dev["driver"] = "qcow2"
		dev["backing"] = nil
		if d.Base != "" {
			dev["backing"] = map[string]any{"driver": "raw", "read-only": true, "file": file(d.Base, true)}
		}
	}
	return dev
}

// confinement is what keeps a guest that breaks out of its machine from getting far.
func confinement(f vm.Features) []string {
	sandbox := "on,obsolete=deny,spawn=deny,resourcecontrol=deny"
	if os.Geteuid() != 0 {
		return []string{"-sandbox", sandbox + ",elevateprivileges=deny"}
	}
	// Root's machines run as nobody. Changing to it is itself what
	// elevateprivileges forbids, so that part has to stay off.
	if newer(f.Version, 9, 1) {
		return []string{"-sandbox", sandbox, "-run-with", "user=nobody"}
	}
	return []string{"-sandbox", sandbox, "-runas", "nobody"}
}

// newer says whether version is at least major.minor.
func newer(version string, major, minor int) bool {
	var a, b int
	fmt.Sscanf(version, "%d.%d", &a, &b)
	return a > major || (a == major && b >= minor)
}

func toJSON(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // only maps of plain values come here
	}
	return string(data)
}
