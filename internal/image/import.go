package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
)

// Import makes an image of what stands at path, an absolute path, and gives it that
// name. When the name means an image of the same content already, that one is given,
// with UpToDate set, and nothing is made. When it means another, the name moves; the
// earlier version stays until Prune. A failed or cancelled import leaves nothing.
func (c *Catalog) Import(ctx context.Context, name, path string, progress func(api.Progress)) (api.Image, error) {
	if !api.ValidName(name) {
		return api.Image{}, badName(name)
	}
	if !filepath.IsAbs(path) {
		return api.Image{}, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("cannot import image %q: %s is no absolute path", name, clip(path))}
	}
	release, err := c.hold(ctx, name)
	if err != nil {
		return api.Image{}, importFailed(name, err)
	}
	defer release()
	v, err := c.importHeld(ctx, name, path, progress)
	if err != nil {
		return api.Image{}, importFailed(name, err)
	}
	return v, nil
}

// importHeld imports while nobody else changes the image of that name. Its errors
// are clauses.
func (c *Catalog) importHeld(ctx context.Context, name, path string, progress progressFunc) (api.Image, error) {
	s, err := Open(ctx, path, OpenOptions{Arch: c.options.Arch, Scratch: c.store.ImagesDir(), Progress: progress})
	if err != nil {
		return api.Image{}, err
	}
	defer s.Close()
	k := key(s)
	if known, err := c.have(name, k); err != nil || known {
		if err == nil {
			err = c.point(name, k)
		}
		if err != nil {
			return api.Image{}, err
		}
		v, err := Inspect(c.store, name)
		v.UpToDate = true
		return v, err
	}
	if err := c.room(s); err != nil {
		return api.Image{}, err
	}
	if err := c.make(ctx, name, k, path, s, progress); err != nil {
		return api.Image{}, err
	}
	return Inspect(c.store, name)
}

// have says whether that version of the image is there. A damaged one is an error:
// sandboxes may still stand on it, so it is not replaced.
func (c *Catalog) have(name, k string) (bool, error) {
	dir := folderOf(c.store, name).key(k)
	if _, err := os.Lstat(string(dir)); err != nil {
		return false, nil
	}
	if _, err := load(dir, name, k); err != nil {
		return false, refuse(api.KindFailed, "remove it first with: doz image rm "+name, "this version of it is there and is damaged: %v", err)
	}
	return true, nil
}

// point makes the name mean a key.
func (c *Catalog) point(name, k string) error {
	f := folderOf(c.store, name)
	if p, err := f.current(); err == nil && p.Key == k {
		return nil
	}
	return store.WriteRecord(f.pointer(), pointer{recordSchema, k})
}

// spare is room on the store's disk that an import leaves, in bytes.
const spare = 128 << 20

// room refuses what cannot fit before anything is made.
func (c *Catalog) room(s *Source) error {
	free, err := c.store.FreeBytes()
	if err != nil {
		return err
	}
	var need int64 = spare
	for _, l := range s.Layers {
		need += 2 * max(l.Plain, l.Stored) // decompressed, and unpacked
	}
	if free < need {
		return refuse(api.KindFailed, "make room on that disk, or name another store with --store",
			"it needs %d MiB, and the store's disk has %d MiB left", need>>20, free>>20)
	}
	return nil
}

// make builds the image in a workshop and moves it to its place.
func (c *Catalog) make(ctx context.Context, name, k, path string, s *Source, progress progressFunc) (err error) {
	boot, err := c.options.Boot()
	if err != nil {
		return err
	}
	w := workshop(filepath.Join(c.store.ImagesDir(), buildingPrefix+randomHex(6)))
	f := w.folder(name)
	d := f.key(k)
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return bare(err)
	}
	defer func() {
		if err != nil {
			c.logConsole(w, name)
		}
		if rmErr := os.RemoveAll(string(w)); rmErr != nil {
			c.log.Warn("what is left of an import stays until the next host start", "folder", string(w), "error", rmErr)
		}
	}()
	layers, err := spool(ctx, s, w.layers(), progress)
	if err != nil {
		return describe(path, err)
	}
	b := &builder{engine: c.options.Engine, boot: boot, dir: w, progress: progress}
	sum, err := b.build(ctx, layers, d.disk())
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := seal(d, f, name, k, s, sum); err != nil {
		return err
	}
	return c.place(f, d, name, k)
}

// seal makes the disk read-only and writes the records of a made image.
func seal(d sealed, f folder, name, k string, s *Source, sum built) error {
	info, err := os.Stat(d.disk())
	if err != nil {
		return bare(err)
	}
	r := record{
		Schema: recordSchema, Name: name, Key: k, Created: time.Now().UTC(), Source: s.Kind, Digest: s.Digest,
		SizeBytes: info.Size(), Entries: sum.Entries, Bytes: sum.Bytes, Defaults: s.Defaults,
	}
	if r.Head, err = head(d.disk(), r.SizeBytes); err != nil {
		return fmt.Errorf("the builder machine's work cannot be used: %w", bare(err))
	}
	if err := os.Chmod(d.disk(), 0o444); err != nil {
		return bare(err)
	}
	if err := store.WriteRecord(d.record(), r); err != nil {
		return err
	}
	return store.WriteRecord(f.pointer(), pointer{recordSchema, k})
}

// place moves a made image to its place: a new one with its folder, in one step, a
// new version into the folder there is, and then the name.
func (c *Catalog) place(made folder, d sealed, name, k string) error {
	at := folderOf(c.store, name)
	if _, err := os.Lstat(string(at)); err != nil {
		if err := os.Rename(string(made), string(at)); err != nil {
			return err
		}
		return store.SyncDir(c.store.ImagesDir())
	}
	if err := os.Rename(string(d), string(at.key(k))); err != nil {
		return err
	}
	if err := store.SyncDir(string(at)); err != nil {
		return err
	}
	return c.point(name, k)
}

// logConsole keeps the end of what a failed builder printed where people look for it.
func (c *Catalog) logConsole(w workshop, name string) {
	data, err := os.ReadFile(w.console())
	if err != nil || len(data) == 0 {
		return
	}
	const kept = 4 << 10
	c.log.Warn("an import failed", "image", name, "console", string(data[max(0, len(data)-kept):]))
}

// importFailed makes a clause the sentence that people read.
func importFailed(name string, err error) error {
	e := &api.Error{Kind: api.KindFailed}
	var known *api.Error
	switch {
	case errors.As(err, &known):
		*e = *known
	case errors.Is(err, context.Canceled):
		err = errors.New("it was cancelled")
	}
	e.Message = fmt.Sprintf("cannot import image %q: %v", name, err)
	return e
}
