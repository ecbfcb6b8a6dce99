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

	// CreateDisk makes a writable disk at path, at least size bytes large, whose
	// content is that of the read-only disk base (raw) until it is written to. An
	// empty base makes a blank disk. It fails when path exists. The file is
	// durable when CreateDisk returns.
	CreateDisk(ctx context.Context, path, base string, size int64) error

	// Start boots a machine. When it returns without error the machine's
	// processors run. When it fails nothing is left running, and no file of the
	// machine's is left in Config.Dir. The machine outlives ctx and this process.
	Start(ctx context.Context, c Config) (Machine, error)

	// Adopt takes up a machine that another process started from the same
	// Config.Dir and that still runs. ErrNoMachine when there is none (what is
	// left of it has been cleaned up then).
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
	// MemoryFile is the file that is the machine's memory: a shared mapping,
	// emptied and made sparse by Start. It stays when the machine has ended; the
	// caller removes it.
	MemoryFile string
	Kernel     string   // path of the kernel in the form the engine boots (Features.Arch)
	Initrd     string   // path of the initramfs
	Cmdline    []string // the guest's own words; the engine adds what its devices need
	Disks      []Disk   // in order: /dev/vda, /dev/vdb, …
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
	Path     string
	Base     string // the read-only raw disk under an overlay made by CreateDisk; "" when there is none
	Format   Format
	ReadOnly bool
	// Scratch disks may lose what was written when this computer loses power; for
	// builders, which start over.
	Scratch bool
}

// Format is how a disk's file is laid out.
type Format string

const (
	Raw     Format = "raw"
	Overlay Format = "overlay" // as CreateDisk writes it
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
}

var (
	// ErrNoMachine means that no machine runs from that folder.
	ErrNoMachine = errors.New("no machine runs there")
	// ErrEnded means that the machine has ended meanwhile.
	ErrEnded = errors.New("the machine has ended")
	// ErrUnresponsive means that the machine did not answer in time.
	ErrUnresponsive = errors.New("the machine does not answer")
)
