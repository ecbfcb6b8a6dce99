package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
)

// Prefixes of folders among the sandboxes that are none: one being made, one on its
// way out. Recover removes both.
const (
	newPrefix   = ".new-"
	trashPrefix = ".trash-"
)

// Create makes a sandbox, off. Its folder appears under its name complete or not at
// all.
func (m *Manager) Create(ctx context.Context, req api.CreateRequest) (api.Sandbox, error) {
	if !api.ValidName(req.Name) {
		return api.Sandbox{}, badName(req.Name)
	}
	base, err := m.images.Current(req.Image)
	if err != nil {
		return api.Sandbox{}, err
	}
	r, err := m.newRecord(ctx, req, base)
	if err != nil {
		return api.Sandbox{}, err
	}

	return m.make(r, func(tmp store.Sandbox, r *record) (err error) {
		r.Disks, err = m.fromBase(ctx, tmp, base, store.FirstDisk, r.diskBytes())
		return err
	})
}

// make makes a sandbox of a record: fill puts its disks, and what else it begins with,
// into its folder, and may add to the record.
func (m *Manager) make(r record, fill func(tmp store.Sandbox, r *record) error) (api.Sandbox, error) {
	if err := m.room(saveRoom); err != nil {
		return api.Sandbox{}, cannot("create", r.Name, err)
	}
	// The box holds the name from here on, so that of two creates one wins.
	b := &box{name: r.Name, dir: m.store.Sandbox(r.Name), record: r, op: &operation{name: "create", done: make(chan struct{})}}
	m.mu.Lock()
	taken := m.boxes[r.Name] != nil
	if !taken {
		m.boxes[r.Name] = b
	}
	m.mu.Unlock()
	if taken {
		return api.Sandbox{}, nameTaken(r.Name)
	}
	err := m.makeFolder(b, fill)
	b.mu.Lock()
	close(b.op.done)
	b.op = nil
	b.mu.Unlock()
	if err != nil {
		m.mu.Lock()
		delete(m.boxes, r.Name)
		m.mu.Unlock()
		return api.Sandbox{}, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot create sandbox %q: %v", r.Name, err)}
	}
	m.tell(api.Event{Event: "phase", Name: b.name, Phase: r.Phase})
	return b.view(), nil
}

func nameTaken(name string) error {
	return &api.Error{Kind: api.KindExists, Message: fmt.Sprintf("a sandbox is already named %q", name), Hint: "choose another name, or see it with: doz inspect " + name}
}

func (r *record) diskBytes() int64 { return int64(r.DiskGiB) << 30 }

// newRecord is the record of the sandbox asked for, with every default filled in.
func (m *Manager) newRecord(ctx context.Context, req api.CreateRequest, base Base) (record, error) {
	features, err := m.probe(ctx)
	if err != nil {
		return record{}, err
	}
	kernel, err := m.parts.CurrentKernel(false)
	if err != nil {
		return record{}, &api.Error{Kind: api.KindFailed, Message: err.Error()}
	}
	now := time.Now()
	r := record{
		Schema: recordSchema, Name: req.Name, Created: now, Image: base.Name, ImageKey: base.Key,
		CPUs: cmp.Or(req.CPUs, defaultCPUs), MemoryMiB: cmp.Or(req.MemoryMiB, base.MemoryMiB, defaultMemoryMiB),
		DiskGiB: cmp.Or(req.DiskGiB, max(defaultDiskGiB, int((base.SizeBytes+1<<30-1)>>30))), Network: "none",
		Kernel: kernel, MachineType: features.MachineType, Token: randomHex(16), MachineID: randomHex(16),
		Disks: []string{store.FirstDisk}, Fresh: true, Check: base.Check,
		Phase: api.Off, Since: now,
	}
	return r, r.check(base)
}

// check refuses what no machine can have.
func (r record) check(base Base) error {
	wrong := func(what string, lo, hi int) error {
		return &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("cannot create sandbox %q: %s must be %d to %d", r.Name, what, lo, hi)}
	}
	switch {
	case r.CPUs < minCPUs || r.CPUs > maxCPUs:
		return wrong("CPUs", minCPUs, maxCPUs)
	case r.MemoryMiB < minMemoryMiB || r.MemoryMiB > maxMemoryMiB:
		return wrong("memory in MiB", minMemoryMiB, maxMemoryMiB)
	case r.DiskGiB < minDiskGiB || r.DiskGiB > maxDiskGiB:
		return wrong("the disk in GiB", minDiskGiB, maxDiskGiB)
	case int64(r.DiskGiB)<<30 < base.SizeBytes:
		return wrong("the disk in GiB (the image's own is the least)", int((base.SizeBytes+1<<30-1)>>30), maxDiskGiB)
	}
	return nil
}

// makeFolder makes the sandbox's folder under a name that is none, and renames it.
func (m *Manager) makeFolder(b *box, fill func(tmp store.Sandbox, r *record) error) (err error) {
	tmp := store.Sandbox(filepath.Join(m.store.SandboxesDir(), newPrefix+b.name+"-"+randomHex(4)))
	if err := os.Mkdir(tmp.Dir(), 0o700); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(tmp.Dir())
		}
	}()
	m.step(b, "create/folder")
	r := b.get()
	if err := fill(tmp, &r); err != nil {
		return err
	}
	m.step(b, "create/disk")
	if err := os.Mkdir(tmp.BootsDir(), 0o700); err != nil {
		return err
	}
	if err := store.WriteRecord(tmp.Record(), r); err != nil {
		return err
	}
	m.step(b, "create/record")
	if err := os.Rename(tmp.Dir(), b.dir.Dir()); err != nil {
		return err
	}
	b.mu.Lock()
	b.record = r
	b.mu.Unlock()
	defer m.step(b, "create/named")
	return store.SyncDir(m.store.SandboxesDir())
}

// Remove ends a sandbox's machine and takes everything of it off the disk.
func (m *Manager) Remove(ctx context.Context, name string) error {
	b, err := m.get(name)
	if err != nil {
		return err
	}
	end, err := m.begin(ctx, b, "rm", false)
	if err != nil {
		return err
	}
	defer end()
	if err := m.kill(b); err != nil {
		return &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot remove sandbox %q: %v", name, err)}
	}
	m.step(b, "rm/ended")
	trash := filepath.Join(m.store.SandboxesDir(), trashPrefix+name+"-"+randomHex(4))
	if err := os.Rename(b.dir.Dir(), trash); err != nil {
		return &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot remove sandbox %q: %v", name, err)}
	}
	m.mu.Lock()
	delete(m.boxes, name)
	m.mu.Unlock()
	m.step(b, "rm/unnamed")
	if err := store.SyncDir(m.store.SandboxesDir()); err != nil {
		m.log.Warn("a removal may come back after a power cut", "sandbox", name, "error", err)
	}
	if err := os.RemoveAll(trash); err != nil {
		m.log.Warn("what is left of a removed sandbox stays until the next host start", "sandbox", name, "error", err)
	}
	m.tell(api.Event{Event: "removed", Name: name})
	return nil
}

// sweep removes what cut-off creates, writes and removals left, of sandboxes and of the
// restore points of each.
func (m *Manager) sweep() {
	m.sweepTemplates(maxTemplates)
	m.sweepFolder(m.store.SandboxesDir())
	for _, b := range m.boxes {
		if b.record.Phase != api.Damaged {
			m.sweepFolder(b.dir.Dir())
			m.sweepFolder(b.dir.PointsDir())
			m.sweepDisks(b)
		}
	}
}

func (m *Manager) sweepFolder(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), newPrefix) || strings.HasPrefix(e.Name(), trashPrefix) || strings.HasPrefix(e.Name(), store.TempPrefix) {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				m.log.Warn("cannot remove a leftover", "folder", e.Name(), "error", err)
			}
		}
	}
}

// randomHex is n random bytes in hex.
func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}
