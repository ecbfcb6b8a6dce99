// Package vm is the engine boundary: it describes a Linux machine on this
// computer and what can be done with it.
//
// It must not know of sandboxes, stores or policy, and nothing above it may know
// which engine runs. Configuration is plain data that compiles everywhere; only
// the engines below (vm/qemu, vm/vz, vm/vmfake) touch the platform. Every engine
// passes the conformance suite in vm/vmtest.
package vm

import (
	"context"
	"errors"
	"net"
	"time"
)

// Engine starts machines. All methods may be called concurrently.
type Engine interface {
	// Probe says what this computer can do with this engine. It is quick when the
	// answer is remembered for this boot of the computer, and otherwise ends by its
	// own deadline (2 s). An error means that no machine can be started at all; it
	// says what is missing.
	Probe(ctx context.Context) (Features, error)

	// CreateDisk makes an empty overlay at path: a disk of size bytes that reads as
	// what lies under it (Disk.Layers, Disk.Base), or zeroes beyond that, until it is
	// written to. It fails when path exists. The file is durable when CreateDisk
	// returns.
	CreateDisk(ctx context.Context, path string, size int64) error

	// Start boots a machine, or loads one when Config.Restore names a saved state.
	// When it returns without error a booted machine's processors run, and a loaded
	// one's stand where they were saved until Resume. When it fails nothing is left
	// running, no file of the machine's is left in Config.Dir, and what was saved is
	// as it was. The machine outlives ctx and this process.
	Start(ctx context.Context, c Config) (Machine, error)

	// Adopt takes up a machine that another process started from the same
	// Config.Dir and that still runs; its processors run or stand as they did.
	// ErrNoMachine when there is none (what is left of it has been cleaned up then).
	Adopt(ctx context.Context, c Config) (Machine, error)

	// KillLeftover ends the machine that runs from dir, even one that does not
	// answer (Adopt gave ErrUnresponsive), and removes its files. ErrNoMachine when
	// there is none.
	KillLeftover(dir string) error
}

// Machine is one running machine. All methods may be called concurrently.
type Machine interface {
	// Pause stops the processors; Resume lets them go on. Both are idempotent.
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error

	// Save writes the state of a paused machine's devices to a new file at path. With
	// the memory file and the disks as they are now it is all of the machine: one
	// started from the same Config with Restore carries on from this instant. All of
	// it is durable when Save returns. The machine stays, paused; once it is resumed
	// what was saved is worth nothing, unless memory and disks were copied before.
	// When Save fails there is no file, and the machine can be resumed.
	Save(ctx context.Context, path string) error

	// SwitchDisk has the machine write what it writes to disk number i from now on to
	// overlay, an empty disk CreateDisk made, of the same size. The file written to
	// until now lies under it and is not changed any more. The machine is paused.
	SwitchDisk(ctx context.Context, i int, overlay string) error

	// DialGuest opens the guest channel: the byte stream to the guest's end. On an
	// engine with a single stream (QEMU's serial port) a second dial closes the
	// first connection.
	DialGuest(ctx context.Context) (net.Conn, error)

	// PowerOff presses the power button. It returns at once; Wait tells when the
	// machine has ended.
	PowerOff(ctx context.Context) error

	// Kill ends the machine at once, as a power cut would. It is idempotent and
	// returns when the process is gone and its files in Config.Dir are removed.
	Kill() error

	// Wait gives a channel that receives one Exit, and is then closed, when the
	// machine has ended. Each call gives its own channel.
	Wait() <-chan Exit

	// Usage is what the machine holds of this computer now.
	Usage() (Usage, error)

	// PID is the machine's process on this computer, for people to look at. It is
	// never to be trusted as an identity.
	PID() int
}

// Config is everything a machine is made of. The same Config must make the same
// machine, device for device.
type Config struct {
	Dir       string // existing folder for the machine's sockets and files; may have any length
	Name      string // shown in process lists
	CPUs      int    // 1-64
	MemoryMiB int    // 256-262144
	// MemoryFile is the file that is the machine's memory: a shared mapping. Start
	// empties it and makes it sparse, unless it restores: then it is the memory that
	// was saved. It stays when the machine has ended; the caller removes it.
	MemoryFile string
	// Restore is a file that Save wrote; "" boots.
	Restore string
	Kernel  string   // path of the kernel in the form the engine boots (Features.Arch)
	Initrd  string   // path of the initramfs
	Cmdline []string // the guest's own words; the engine adds what its devices need
	Disks   []Disk   // in order: /dev/vda, /dev/vdb, …
	// ConsoleFile receives what the guest prints on its console, at most
	// ConsoleLimit bytes of it (0: 1 MiB); a line in the file says when more was
	// dropped. Start empties it, Adopt appends. "" keeps nothing.
	ConsoleFile  string
	ConsoleLimit int64
	// MachineType is the versioned machine to build, as an earlier Features.MachineType
	// gave it; empty means the current one.
	MachineType string
	Audio       bool
}

// Disk is one block device.
type Disk struct {
	Path   string
	Format Format
	// Under an overlay lie, unchanged, other overlays, the uppermost first, and then a
	// raw disk; "" when there is none.
	Layers   []string
	Base     string
	ReadOnly bool
	// Scratch disks may lose what was written when this computer loses power; for
	// builders, which start over.
	Scratch bool
}

// Format is how a disk's file is laid out.
type Format string

const (
	Raw     Format = "raw"
	Overlay Format = "overlay" // as CreateDisk makes it
)

// Features is what an engine can do on this computer.
type Features struct {
	Engine      string `json:"engine"`  // "qemu", "fake"
	Version     string `json:"version"` // the engine's own, "10.0.2"
	Arch        string `json:"arch"`    // "x86_64", "arm64"
	Accelerator string `json:"accelerator"`
	// AcceleratorWhy is one sentence: why this accelerator and not a faster one.
	AcceleratorWhy string `json:"acceleratorWhy"`
	Emulated       bool   `json:"emulated"` // no hardware virtualization: correct, and 5 to 30 times slower
	MachineType    string `json:"machineType"`
	Audio          bool   `json:"audio"`
	AudioWhy       string `json:"audioWhy,omitempty"` // why not, when Audio is false
}

// Exit is how a machine ended.
type Exit struct {
	At    time.Time
	Clean bool   // the guest powered itself off
	Text  string // one clause when not: "killed by signal 9", "guest reset"
}

// Usage of this computer by a machine.
type Usage struct {
	MemoryBytes int64         // guest memory held by this computer
	CPU         time.Duration // processor time used so far
	Stopped     bool          // its process is stopped (SIGSTOP), so it answers nothing
}

var (
	// ErrNoMachine means that no machine runs from that folder.
	ErrNoMachine = errors.New("no machine runs there")
	// ErrEnded means that the machine has ended meanwhile.
	ErrEnded = errors.New("the machine has ended")
	// ErrNoState means that what was to be restored is not whole, or is another
	// machine's.
	ErrNoState = errors.New("the saved state cannot be loaded")
	// ErrUnresponsive means that the machine did not answer in time.
	ErrUnresponsive = errors.New("the machine does not answer")
)
