//go:build linux

package qemu

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
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
	fdDisks // the first of two for each disk that is written to, in order
)

// fdSet is the set of descriptors that QEMU opens writable disk number i through.
// Pushing an overlay over a disk has QEMU open it again, only to be read, and it can
// open no files by then.
func fdSet(i int) int { return i + 1 }

func fdSetPath(set int) string { return fmt.Sprintf("/dev/fdset/%d", set) }

// Slots on the root bus. A machine's devices stand at fixed places, so that the same
// Config makes the same machine.
const (
	slotSerial  = 3
	slotBalloon = 4
	slotRandom  = 5
	slotHotplug = 6
	slotDisks   = 8
)

// A machine's type names QEMU's versioned machine and, after a plus sign, the
// firmware where it is not QEMU's default.
var machineTypeText = regexp.MustCompile(`^(pc-q35|virt)-[0-9]+\.[0-9]+(\+qboot)?$`)

// qboot is a firmware that only starts a kernel: 0.15 s faster than SeaBIOS under
// emulation. It comes with QEMU. With it there is no vmgenid device: its ACPI table
// needs a firmware that tells QEMU where it put it, and the machine hangs otherwise.
const qboot = "qboot"

// arguments is the command line of a machine.
func (p *probed) arguments(c vm.Config) []string {
	if c.MachineType == "" {
		c.MachineType = p.Features.MachineType
	}
	args := []string{
		"-name", "doz " + strings.ReplaceAll(c.Name, ",", ",,"),
		"-object", toJSON(map[string]any{"qom-type": "memory-backend-file", "id": "memory", "size": int64(c.MemoryMiB) << 20, "mem-path": c.MemoryFile, "share": true}),
		"-m", fmt.Sprintf("%dM", c.MemoryMiB),
		"-smp", fmt.Sprint(c.CPUs),
		"-nodefaults", "-no-user-config", "-no-reboot", "-S",
		"-display", "none",
		"-kernel", c.Kernel, "-initrd", c.Initrd,
		"-append", strings.Join(append(kernelWords(p.Features, c.CPUs, p.TSCKHz), c.Cmdline...), " "),
		"-chardev", fmt.Sprintf("socket,id=monitor,server=on,wait=off,fd=%d", fdMonitor),
		"-mon", "chardev=monitor,mode=control",
		"-chardev", fmt.Sprintf("socket,id=console,server=on,wait=off,fd=%d", fdConsole),
		"-serial", "chardev:console",
		"-chardev", fmt.Sprintf("socket,id=guest,server=on,wait=off,fd=%d", fdGuest),
		"-device", fmt.Sprintf("virtio-serial-pci,id=ports,max_ports=2,addr=%#x", slotSerial),
		"-device", "virtserialport,bus=ports.0,nr=1,chardev=guest,name=" + guest.PortName,
		"-device", fmt.Sprintf("virtio-balloon-pci,id=balloon,free-page-reporting=on,addr=%#x", slotBalloon),
		"-device", fmt.Sprintf("virtio-rng-pci,id=random,addr=%#x", slotRandom),
		// Nothing is plugged into the root bus itself while a machine runs.
		"-device", fmt.Sprintf("pcie-root-port,id=port1,chassis=1,slot=1,addr=%#x", slotHotplug),
	}
	args = append(args, board(c.MachineType, ",memory-backend=memory")...)
	args = append(args, processor(p.Features)...)
	fd := fdDisks
	for i, d := range c.Disks {
		if !d.ReadOnly {
			for range openModes {
				args = append(args, "-add-fd", fmt.Sprintf("fd=%d,set=%d", fd, fdSet(i)))
				fd++
			}
			d.Path = fdSetPath(fdSet(i))
		}
		args = append(args, "-blockdev", toJSON(blockdev(d, fmt.Sprintf("disk%d", i))),
			"-device", fmt.Sprintf("virtio-blk-pci,id=%s,drive=disk%d,addr=%#x", diskID(i), i, slotDisks+i))
	}
	if c.Restore != "" {
		args = append(args, "-incoming", "defer")
	}
	return append(args, confinement(p.Features)...)
}

// board is the machine's type and firmware.
func board(machineType, options string) []string {
	name, firmware, _ := strings.Cut(machineType, "+")
	args := []string{"-machine", name + options}
	if firmware == qboot {
		args = append(args, "-bios", "qboot.rom")
	}
	return args
}

// processor is the accelerator and the processor it shows.
func processor(f vm.Features) []string {
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
func kernelWords(f vm.Features, cpus int, tscKHz int64) []string {
	console := map[string]string{"x86_64": "ttyS0", "arm64": "ttyAMA0"}[f.Arch]
	words := []string{"console=" + console, "quiet", "loglevel=4", "panic=-1", "random.trust_cpu=1", "cryptomgr.notests", "rcupdate.rcu_expedited=1"}
	if f.Arch != "x86_64" {
		return words
	}
	words = append(words, "reboot=t")
	if !f.Emulated {
		return words
	}
	words = append(words, "no_timer_check")
	if tscKHz > 0 {
		// The emulator passes this computer's own time stamp counter through. Its
		// rate as the guest measures it depends on how busy this computer is.
		words = append(words, "tsc=reliable", fmt.Sprintf("tsc_early_khz=%d", tscKHz))
	}
	if cpus == 1 {
		// The HPET ticks as well as the local APIC's timer, which takes 0.1 s to
		// calibrate; patching the kernel for one processor makes the emulator
		// translate much of it twice, 0.15 s.
		words = append(words, "noapictimer", "noreplace-smp")
	}
	return words
}

// diskID names disk number i as the guest does.
func diskID(i int) string { return fmt.Sprintf("vd%c", 'a'+i) }

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
		under := dev
		for _, layer := range d.Layers {
			next := map[string]any{"driver": "qcow2", "read-only": true, "file": file(layer, true), "backing": nil}
			under["backing"], under = next, next
		}
		if d.Base != "" {
			under["backing"] = map[string]any{"driver": "raw", "read-only": true, "file": file(d.Base, true)}
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
	// Root's machines run as nobody, with the machine's folder, which nobody may not
	// even look into, as their root; all files are open by then. Changing to nobody
	// is itself what elevateprivileges forbids, so that part has to stay off.
	const nobody = "65534:65534"
	if newer(f.Version, 9, 1) {
		return []string{"-sandbox", sandbox, "-run-with", "chroot=.,user=" + nobody}
	}
	return []string{"-sandbox", sandbox, "-runas", nobody}
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
