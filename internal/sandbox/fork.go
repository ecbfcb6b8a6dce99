package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
)

const maxForks = 100

// Fork makes copies of a sandbox whose programs run or stand still, memory and disk
// included: in each copy they carry on from that instant. The sandbox itself goes on as
// it was, but for one that was asleep, which is hibernated after it.
func (m *Manager) Fork(ctx context.Context, req api.ForkRequest, progress func(api.Progress)) (api.ForkResult, error) {
	if progress == nil {
		progress = func(api.Progress) {}
	}
	names, err := m.forkNames(req)
	if err != nil {
		return api.ForkResult{}, err
	}
	b, err := m.get(req.Name)
	if err != nil {
		return api.ForkResult{}, err
	}
	end, err := m.begin(ctx, b, "fork", false)
	if err != nil {
		return api.ForkResult{}, err
	}
	ctx = context.WithoutCancel(ctx)
	began := time.Now()
	copies, notes, err := m.fork(ctx, b, names, req.NoWake)
	end()
	if err != nil {
		return api.ForkResult{}, cannot("fork", b.name, err)
	}
	result := api.ForkResult{Sandboxes: copies, Notes: notes}
	if !req.NoWake {
		progress(api.Progress{Step: "wake", Total: int64(len(names))})
		err = m.wakeAll(ctx, &result)
	}
	result.Millis = millis(began)
	return result, err
}

// forkNames are the names of the copies: the one asked for, or it with numbers.
func (m *Manager) forkNames(req api.ForkRequest) ([]string, error) {
	if req.Count < 0 || req.Count > maxForks {
		return nil, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("cannot fork sandbox %q %d times: 1 to %d", req.Name, req.Count, maxForks)}
	}
	names := []string{req.New}
	if req.Count > 1 {
		names = nil
		for i := range req.Count {
			names = append(names, fmt.Sprintf("%s-%d", req.New, i+1))
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range names {
		if !api.ValidName(name) {
			return nil, badName(name)
		}
		if m.boxes[name] != nil {
			return nil, nameTaken(name)
		}
	}
	return names, nil
}

// fork makes the copies, hibernated.
func (m *Manager) fork(ctx context.Context, b *box, names []string, durable bool) (copies []api.Sandbox, notes []string, err error) {
	if err := m.room(blocks(b.dir.Memory())*int64(len(names)) + saveRoom); err != nil {
		return nil, nil, err
	}
	dir := store.Point(filepath.Join(m.store.SandboxesDir(), newPrefix+"fork-"+randomHex(4)))
	if err := os.Mkdir(dir.Dir(), 0o700); err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir.Dir())
	var taken captured
	notes, err = m.standStill(ctx, b, false, func() error {
		taken, err = m.capture(ctx, b, dir)
		return err
	})
	if err != nil {
		return nil, notes, err
	}
	m.step(b, "fork/captured")
	for i, name := range names {
		place := store.Clone
		if i == len(names)-1 {
			place = func(dst, src string) error { return os.Rename(src, dst) }
		}
		v, err := m.make(b.get().copyAs(name), func(tmp store.Sandbox, r *record) error {
			return m.fill(ctx, tmp, r, b.dir, dir, taken, place, durable)
		})
		if err != nil {
			for _, made := range copies { // all of them or none
				if err := m.Remove(ctx, made.Name); err != nil {
					m.log.Warn("a copy of a fork that failed stays", "sandbox", made.Name, "error", err)
				}
			}
			return nil, notes, err
		}
		copies = append(copies, v)
	}
	m.step(b, "fork/made")
	return copies, notes, nil
}

// captured is a machine that stands still, as something else can be made of it: its
// seal, and the files of its root disk. Its state and memory are in a folder.
type captured struct {
	Snapshot *snapshot `json:"snapshot"`
	Disks    []string  `json:"disks"`
	Tools    string    `json:"tools"`
	Token    string    `json:"token"`
}

// capture copies the state and memory of a sandbox that stands still into dir, and
// keeps its disk.
func (m *Manager) capture(ctx context.Context, b *box, dir store.Point) (captured, error) {
	c := captured{Tools: b.get().Tools, Token: b.get().Token}
	var err error
	if b.get().Snapshot != nil {
		// What cannot be woken is not worth a copy.
		if err := m.wholeSnapshot(ctx, b); err != nil {
			return c, err
		}
	}
	// The disk first: once its state is saved a machine has let go of its disks.
	if c.Disks, err = m.cover(ctx, b); err != nil {
		return c, err
	}
	if c.Snapshot = b.get().Snapshot; c.Snapshot == nil {
		machine, err := m.held(ctx, b)
		if err != nil {
			return c, err
		}
		if c.Snapshot, err = m.seal(ctx, b, machine, dir.State()); err != nil {
			return c, err
		}
	} else if err := store.Clone(dir.State(), b.dir.State()); err != nil {
		return c, err
	}
	return c, store.Clone(dir.Memory(), b.dir.Memory())
}

// fill makes the folder of a sandbox that carries on as what was captured did: from is
// the folder of its disks, dir that of state and memory, which place puts there.
func (m *Manager) fill(ctx context.Context, tmp store.Sandbox, r *record, from store.Sandbox, dir store.Point, c captured, place func(dst, src string) error, durable bool) error {
	r.Phase, r.Tools, r.Token = api.Hibernated, c.Tools, c.Token
	if err := m.putOver(ctx, tmp, from, r, c.Disks); err != nil {
		return err
	}
	r.Snapshot = c.Snapshot.over(tmp.File(r.Disks[0]))
	for to, from := range map[string]string{tmp.State(): dir.State(), tmp.Memory(): dir.Memory()} {
		if err := place(to, from); err != nil {
			return err
		}
		if durable {
			if err := store.SyncFile(to); err != nil {
				return err
			}
		}
	}
	return nil
}

// putOver makes a new root disk in tmp over disks of another folder.
func (m *Manager) putOver(ctx context.Context, tmp, from store.Sandbox, r *record, disks []string) error {
	top := store.LaterDisk(randomHex(4))
	r.Disks = append([]string{top}, disks...)
	if err := linkDisks(tmp, from, disks); err != nil {
		return err
	}
	return m.engine.CreateDisk(ctx, tmp.File(top), r.diskBytes())
}

// copyAs is the record of a new sandbox of the same make-up.
func (r record) copyAs(name string) record {
	now := time.Now()
	r.Name, r.Created, r.Since = name, now, now
	r.MachineID, r.Fresh = randomHex(16), true
	r.Phase, r.Problem, r.Died, r.Boots, r.Snapshot = api.Off, "", false, 0, nil
	return r
}

// Duplicate makes a new sandbox, off, of another's root disk as it is now.
func (m *Manager) Duplicate(ctx context.Context, req api.DuplicateRequest) (api.DuplicateResult, error) {
	if !api.ValidName(req.New) {
		return api.DuplicateResult{}, badName(req.New)
	}
	b, err := m.get(req.Name)
	if err != nil {
		return api.DuplicateResult{}, err
	}
	m.mu.Lock()
	taken := m.boxes[req.New] != nil
	m.mu.Unlock()
	if taken {
		return api.DuplicateResult{}, nameTaken(req.New)
	}
	end, err := m.begin(ctx, b, "duplicate", false)
	if err != nil {
		return api.DuplicateResult{}, err
	}
	defer end()
	ctx = context.WithoutCancel(ctx)
	r := b.get().copyAs(req.New)
	r.CPUs, r.MemoryMiB = cmp.Or(req.CPUs, r.CPUs), cmp.Or(req.MemoryMiB, r.MemoryMiB)
	if err := r.check(Base{}); err != nil {
		return api.DuplicateResult{}, err
	}
	phase := b.phase()
	r.Check = r.Check || phase != api.Off && phase != api.Failed
	var disks []string
	notes, err := m.standStill(ctx, b, true, func() (err error) {
		disks, err = m.cover(ctx, b)
		return err
	})
	if err != nil {
		return api.DuplicateResult{}, cannot("duplicate", b.name, err)
	}
	v, err := m.make(r, func(tmp store.Sandbox, r *record) error { return m.putOver(ctx, tmp, b.dir, r, disks) })
	return api.DuplicateResult{Sandbox: v, Notes: notes}, err
}

// wakeAll wakes the copies, all at once.
func (m *Manager) wakeAll(ctx context.Context, result *api.ForkResult) error {
	var wait sync.WaitGroup
	errs := make([]error, len(result.Sandboxes))
	notes := make([][]string, len(result.Sandboxes))
	for i := range result.Sandboxes {
		wait.Go(func() {
			woken, err := m.Wake(ctx, result.Sandboxes[i].Name, nil)
			if errs[i] = err; err == nil {
				result.Sandboxes[i], notes[i] = woken.Sandbox, woken.Notes
			}
		})
	}
	wait.Wait()
	for i := range notes {
		result.Notes = append(result.Notes, notes[i]...)
	}
	return errors.Join(errs...)
}
