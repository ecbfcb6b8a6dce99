package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
)

// A root disk is a pile of files over the image's own: only the uppermost is written
// to. To keep the disk as it is, for a restore point or a copy, an empty file is put on
// top, which takes no time at any size. Copies have the files under that by hard links,
// so nobody needs anybody else's folder, and a file is gone with its last user.

// maxDisks bounds the pile: a read goes through all of it.
const maxDisks = 100

// cover puts an empty disk over a sandbox's root disk and gives the files that do not
// change from then on, uppermost first. Its machine, if it has one, stands still.
func (m *Manager) cover(ctx context.Context, b *box) (under []string, err error) {
	if err := b.coverable(); err != nil {
		return nil, err
	}
	r := b.get()
	name := store.LaterDisk(randomHex(4))
	if err := m.engine.CreateDisk(ctx, b.dir.File(name), r.diskBytes()); err != nil {
		return nil, err
	}
	// Recorded first: an empty disk that the machine does not know of changes nothing,
	// one that it writes to and the record does not know of would be lost.
	err = m.update(b, func(r *record) {
		r.Disks = append([]string{name}, r.Disks...)
		if r.Snapshot != nil {
			r.Snapshot = r.Snapshot.over(b.dir.File(name))
		}
	})
	if err != nil {
		os.Remove(b.dir.File(name))
		return nil, err
	}
	m.step(b, "cover/recorded")
	if machine, held := b.held(); held == nil {
		if err := machine.SwitchDisk(ctx, 0, b.dir.File(name)); err != nil {
			if m.update(b, func(now *record) { now.Disks = r.Disks }) == nil {
				os.Remove(b.dir.File(name))
			}
			return nil, err
		}
		m.step(b, "cover/switched")
	}
	return r.Disks, nil
}

// coverable refuses what would make the pile of disks too high.
func (b *box) coverable() error {
	if len(b.get().Disks) >= maxDisks {
		return fmt.Errorf("its disk has been copied or kept %d times, which is the most; doz reset begins a new one", maxDisks)
	}
	return nil
}

// over is the seal of the same machine once the disk at path is its uppermost.
func (s *snapshot) over(path string) *snapshot {
	next := *s
	if info, err := os.Stat(path); err == nil {
		next.DiskBytes, next.DiskTime = info.Size(), info.ModTime()
	}
	return &next
}

// linkDisks gives one folder the disks of another.
func linkDisks(to, from store.Sandbox, files []string) error {
	for _, file := range files {
		if err := os.Link(from.File(file), to.File(file)); err != nil {
			return fmt.Errorf("its disk cannot be shared: %w", errors.Unwrap(err))
		}
	}
	return nil
}

// fromBase puts a new root disk of an image into a folder, and gives its files.
func (m *Manager) fromBase(ctx context.Context, dir store.Sandbox, base Base, top string, bytes int64) ([]string, error) {
	files := []string{top}
	for _, layer := range base.Layers {
		file := store.LaterDisk(randomHex(4))
		if err := os.Link(layer, dir.File(file)); err != nil {
			return nil, fmt.Errorf("its image's disk cannot be shared: %w", errors.Unwrap(err))
		}
		files = append(files, file)
	}
	return files, m.engine.CreateDisk(ctx, dir.File(top), bytes)
}

// Disk is a root disk that does not change any more.
type Disk struct {
	Image, ImageKey string
	Files           []string // paths, over the image's own disk, the uppermost first
	Bytes           int64    // as the guest sees it
	Check           bool     // it was kept from under a running system
}

// KeepDisk keeps a sandbox's root disk as it is now, or takes that of a restore point,
// and has use share its files while they are certainly there.
func (m *Manager) KeepDisk(ctx context.Context, name, pointText string, use func(Disk) error) error {
	return m.atPoints(ctx, name, func(ctx context.Context, b *box) error {
		r, phase := b.get(), b.phase()
		d := Disk{Image: r.Image, ImageKey: r.ImageKey, Bytes: r.diskBytes(), Check: r.Check || phase != api.Off && phase != api.Failed}
		var files []string
		var err error
		if pointText != "" {
			var p point
			if p, err = m.find(b, pointText); err == nil {
				d = Disk{Image: p.Image, ImageKey: p.ImageKey, Bytes: int64(p.DiskGiB) << 30, Check: p.Check}
				files = p.Disks
			}
		} else {
			_, err = m.standStill(ctx, b, true, func() (err error) {
				files, err = m.cover(ctx, b)
				return err
			})
		}
		if err != nil {
			return cannot("keep the disk of", name, err)
		}
		for _, file := range files {
			d.Files = append(d.Files, b.dir.File(file))
		}
		return use(d)
	})
}

// standStill has a sandbox's programs stand while do copies what they could change, and
// go on after it if they did. With flush the guest first writes its file systems out,
// as far as it can be asked.
func (m *Manager) standStill(ctx context.Context, b *box, flush bool, do func() error) (notes []string, err error) {
	switch b.phase() {
	case api.Running:
		machine, err := m.held(ctx, b)
		if err != nil {
			return nil, err
		}
		if flush {
			notes = m.syncGuest(ctx, b)
		}
		if err := machine.Pause(ctx); err != nil {
			return notes, err
		}
		err = do()
		return notes, first(err, machine.Resume(ctx))
	case api.Asleep:
		// Its machine has let go of its disks. All of it is saved, so it need not stay.
		if _, err := m.hibernate(ctx, b); err != nil {
			return nil, err
		}
	}
	return nil, do()
}

// sweepDisks removes the files of the root disk that neither the sandbox nor a restore
// point of it has any more.
func (m *Manager) sweepDisks(b *box) {
	used := map[string]bool{}
	for _, file := range b.get().Disks {
		used[file] = true
	}
	points, err := m.points(b)
	if err != nil {
		m.log.Warn("cannot tell which disks are used, so all stay", "sandbox", b.name, "error", err)
		return
	}
	for _, p := range points {
		for _, file := range p.Disks {
			used[file] = true
		}
	}
	entries, _ := os.ReadDir(b.dir.Dir())
	for _, e := range entries {
		if store.IsDisk(e.Name()) && !used[e.Name()] {
			if err := os.Remove(b.dir.File(e.Name())); err != nil {
				m.log.Warn("cannot remove a disk nobody uses", "sandbox", b.name, "file", e.Name(), "error", err)
			}
		}
	}
}
