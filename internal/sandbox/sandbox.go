// Package sandbox owns the life of sandboxes: what each is made of, which phase it
// is in, and the one table of transitions between phases.
//
// Every transition has one owner, records its intent before it acts, and leaves, at
// whatever instant it is cut off, a record and files that Recover explains and
// mends. It must not know of sockets and clients (host), of how a machine is made
// (vm) or how an image is (image).
package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
)

// recordSchema is the schema of doz.json.
const recordSchema = 1

// record is doz.json: what a sandbox is made of, fixed at creation, and its state.
type record struct {
	Schema int `json:"schema"`

	Name      string    `json:"name"`
	Created   time.Time `json:"created"`
	Image     string    `json:"image"`
	ImageKey  string    `json:"imageKey"`
	CPUs      int       `json:"cpus"`
	MemoryMiB int       `json:"memoryMiB"`
	DiskGiB   int       `json:"diskGiB"`
	Network   string    `json:"network"`
	Audio     bool      `json:"audio,omitempty"`
	// Kernel and MachineType are what it boots and is built as, for life, so that
	// what was saved in one machine can be loaded in the next.
	Kernel      string `json:"kernel"`
	MachineType string `json:"machineType"`
	Token       string `json:"token"` // of the guest channel
	MachineID   string `json:"machineId"`
	// Disks are the files of the root disk in the sandbox's folder: the one that is
	// written to, then those under it, down to the image's own disk.
	Disks []string `json:"disks"`
	// Tools is the tools disk of the machine that runs or is saved.
	Tools string `json:"tools,omitempty"`
	// Fresh says that the guest still has the identity of what this is a copy of.
	Fresh bool `json:"fresh,omitempty"`
	// Check says that the root disk was copied from under a running system, and is to
	// be checked before it is mounted.
	Check bool `json:"check,omitempty"`
	// Snapshot is the seal of the saved machine: there exactly while the memory, state
	// and disks in the folder are one machine that stands still. Writing a record
	// without it is what discards it.
	Snapshot *snapshot `json:"snapshot,omitempty"`

	Phase   api.Phase `json:"phase"`
	Since   time.Time `json:"since"`
	Died    bool      `json:"died,omitempty"`
	Problem string    `json:"problem,omitempty"`
	// Boots counts boots, the current one included; it numbers their logs.
	Boots int `json:"boots"`
}

// Limits of a sandbox.
const (
	minCPUs, maxCPUs           = 1, 64
	minMemoryMiB, maxMemoryMiB = 256, 256 << 10
	minDiskGiB, maxDiskGiB     = 1, 2048

	defaultCPUs      = 2
	defaultMemoryMiB = 1024
	defaultDiskGiB   = 64
)

// transitions says from which phases an operation may be asked for.
var transitions = map[string][]api.Phase{
	"start":     {api.Off, api.Failed, api.Booting, api.Running, api.Paused, api.Asleep, api.Hibernated},
	"wake":      {api.Running, api.Asleep, api.Hibernated},
	"resume":    {api.Paused},
	"exec":      {api.Running},
	"attach":    {api.Running},
	"pause":     {api.Running},
	"sleep":     {api.Running, api.Paused},
	"hibernate": {api.Running, api.Paused, api.Asleep},
	"fork":      {api.Running, api.Paused, api.Asleep, api.Hibernated},
	"duplicate": anyPhase,
	"point":     anyPhase,
	"shutdown":  {api.Booting, api.Running, api.Paused, api.Asleep, api.Hibernated, api.Failed},
	"reset":     anyPhase,
	"tidy":      {api.Off, api.Failed, api.Hibernated},
	"rm":        append([]api.Phase{api.Damaged}, anyPhase...),
}

// anyPhase is every phase of a sandbox whose record can be read.
var anyPhase = []api.Phase{api.Off, api.Failed, api.Booting, api.Running, api.Paused, api.Asleep, api.Hibernated}

// allowed is nil when op may be asked for in phase.
func allowed(op, name string, phase api.Phase) error {
	if slices.Contains(transitions[op], phase) {
		return nil
	}
	e := &api.Error{Kind: api.KindPhase, Message: fmt.Sprintf("cannot %s sandbox %q: it is %s", op, name, phase)}
	switch phase {
	case api.Off, api.Failed:
		e.Hint = fmt.Sprintf("start it with: doz start %s", name)
	case api.Paused:
		e.Hint = fmt.Sprintf("let it go on with: doz resume %s", name)
	case api.Asleep, api.Hibernated:
		e.Hint = fmt.Sprintf("wake it with: doz wake %s", name)
	case api.Running:
		if op == "resume" {
			e.Hint = "nothing is to be done: it goes on"
		}
	case api.Damaged:
		e.Hint = fmt.Sprintf("look at it with: doz inspect %s", name)
	}
	return e
}

// load reads a sandbox's record. A missing sandbox is KindNotFound; a folder whose
// record cannot be read gives a record in phase damaged that says why.
func load(s *store.Store, name string) (record, error) {
	if !api.ValidName(name) {
		return record{}, badName(name)
	}
	dir := s.Sandbox(name)
	var r record
	err := store.ReadRecord(dir.Record(), recordSchema, &r)
	if err == nil && r.Name != name {
		err = fmt.Errorf("the record is of sandbox %q", r.Name)
	}
	if len(r.Disks) == 0 {
		r.Disks = []string{store.FirstDisk} // before there could be several
	}
	for _, file := range r.Disks {
		if err == nil && filepath.Base(file) != file {
			err = fmt.Errorf("the record names a disk outside its folder: %q", file)
		}
	}
	if err == nil {
		return r, nil
	}
	info, statErr := os.Stat(dir.Dir())
	if errors.Is(statErr, fs.ErrNotExist) || errors.Is(statErr, syscall.ENOTDIR) {
		return record{}, notFound(name)
	}
	r = record{Name: name, Phase: api.Damaged, Problem: err.Error()}
	if errors.Is(err, fs.ErrNotExist) {
		r.Problem = "its record doz.json is missing"
	}
	if info != nil {
		r.Since = info.ModTime()
	}
	return r, nil
}

// view is the record as people and programs see it. Sizes are measured now.
func (r record) view(dir store.Sandbox) api.Sandbox {
	v := api.Sandbox{
		Name: r.Name, Phase: r.Phase, Since: r.Since, Created: r.Created,
		Image: r.Image, ImageKey: r.ImageKey, CPUs: r.CPUs, MemoryMiB: r.MemoryMiB, DiskGiB: r.DiskGiB,
		Network: r.Network, Isolated: true, Audio: r.Audio,
		DiedWithHost: r.Died, Problem: r.Problem,
		Machine: r.MachineType, Kernel: r.Kernel, Dir: dir.Dir(),
	}
	for _, file := range r.Disks {
		v.DiskBytes += blocks(dir.File(file))
	}
	if live(r.Phase) {
		v.MemoryBytes = blocks(dir.Memory())
	}
	if s := r.Snapshot; s != nil {
		v.Snapshot = &api.Snapshot{
			At: s.At, Bytes: blocks(dir.Memory()) + blocks(dir.State()),
			Engine: s.Engine, EngineVersion: s.EngineVersion, Accelerator: s.Accelerator,
			Machine: r.MachineType, Kernel: r.Kernel, Tools: r.Tools,
		}
	}
	return v
}

// live says whether a machine process belongs to the phase.
func live(p api.Phase) bool {
	return p == api.Booting || p == api.Running || p == api.Paused || p == api.Asleep
}

// blocks is what a file takes of the disk; 0 when there is none.
func blocks(path string) int64 {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}

// List reads every sandbox of a store, with no host.
func List(s *store.Store) ([]api.Sandbox, error) {
	names, err := s.Names()
	if err != nil {
		return nil, err
	}
	list := make([]api.Sandbox, 0, len(names))
	for _, name := range names {
		v, err := Inspect(s, name)
		if err != nil {
			if !api.ValidName(name) {
				v = api.Sandbox{Name: name, Phase: api.Damaged, Dir: s.Sandbox(name).Dir(), Problem: "its folder's name is no sandbox name"}
			} else {
				continue // removed meanwhile
			}
		}
		list = append(list, v)
	}
	return list, nil
}

// Inspect reads one sandbox of a store, with no host.
func Inspect(s *store.Store, name string) (api.Sandbox, error) {
	r, err := load(s, name)
	if err != nil {
		return api.Sandbox{}, err
	}
	return r.view(s.Sandbox(name)), nil
}

func notFound(name string) error {
	return &api.Error{Kind: api.KindNotFound, Message: fmt.Sprintf("no sandbox is named %q", name), Hint: "see which there are with: doz ls"}
}

func badName(name string) error {
	return &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("%q is no sandbox name: 1 to 40 of a-z, 0-9 and -", name)}
}
