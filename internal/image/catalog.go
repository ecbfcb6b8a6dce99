package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// Options of a Catalog.
type Options struct {
	Store  *store.Store
	Engine vm.Engine
	// Boot gives the files a builder machine boots from, checked.
	Boot func() (BootFiles, error)
	Log  *slog.Logger
	Arch string // of images, as OCI names it; "" is this computer's
}

// Catalog is the images of one store. There is one in a host, and one host a store.
// All methods may be called concurrently.
type Catalog struct {
	options Options
	store   *store.Store
	log     *slog.Logger

	mu      sync.Mutex // above names
	changes map[string]chan struct{}
}

// New gives the catalog of a store. Call CleanLeftovers before anything else.
func New(o Options) *Catalog {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Catalog{options: o, store: o.Store, log: o.Log, changes: map[string]chan struct{}{}}
}

// hold waits until nobody else changes the image of that name, and gives the means
// to let go of it.
func (c *Catalog) hold(ctx context.Context, name string) (release func(), err error) {
	c.mu.Lock()
	turn := c.changes[name]
	if turn == nil {
		turn = make(chan struct{}, 1)
		c.changes[name] = turn
	}
	c.mu.Unlock()
	select {
	case turn <- struct{}{}:
		return func() { <-turn }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Current is what the name means now, checked well enough to boot from.
func (c *Catalog) Current(name string) (Image, error) {
	f, err := find(c.store, name)
	if err != nil {
		return Image{}, err
	}
	p, err := f.current()
	if err != nil {
		return Image{}, damaged(name, err)
	}
	return c.Key(name, p.Key)
}

// Key is the image of that name and key, which a sandbox was made from, checked well
// enough to boot from.
func (c *Catalog) Key(name, key string) (Image, error) {
	f, err := find(c.store, name)
	if err != nil {
		return Image{}, err
	}
	if len(key) < keyDigits || !isHex(key) {
		return Image{}, damaged(name, errors.New("what names its version is no key"))
	}
	r, err := load(f.key(key), name, key)
	if err != nil {
		return Image{}, damaged(name, err)
	}
	return r.image(f.key(key)), nil
}

// find gives an image's folder, or KindNotFound.
func find(s *store.Store, name string) (folder, error) {
	if !api.ValidName(name) {
		return "", badName(name)
	}
	f := folderOf(s, name)
	if _, err := os.Lstat(string(f)); err != nil {
		return "", &api.Error{Kind: api.KindNotFound, Message: fmt.Sprintf("no image is named %q", name), Hint: "see which there are with: doz image ls"}
	}
	return f, nil
}

func (f folder) current() (pointer, error) {
	var p pointer
	if err := store.ReadRecord(f.pointer(), recordSchema, &p); err != nil {
		return p, missing(err, "its record current.json is missing")
	}
	if len(p.Key) < keyDigits || !isHex(p.Key) {
		return p, errors.New("its record current.json names no key")
	}
	return p, nil
}

// keys are the names of the folders of keys there are.
func (f folder) keys() []string {
	entries, _ := os.ReadDir(string(f))
	var keys []string
	for _, e := range entries {
		if f.isKey(e.Name()) {
			keys = append(keys, e.Name())
		}
	}
	return keys
}

// List reads every image of a store, with no host; UsedBy is left to the caller.
func List(s *store.Store) ([]api.Image, error) {
	entries, err := os.ReadDir(s.ImagesDir())
	if errors.Is(err, fs.ErrNotExist) {
		return []api.Image{}, nil
	}
	if err != nil {
		return nil, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot list images: %v", bare(err))}
	}
	list := []api.Image{}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		if v, err := Inspect(s, e.Name()); err == nil {
			list = append(list, v)
		} else if !api.ValidName(e.Name()) {
			list = append(list, api.Image{Name: e.Name(), UsedBy: []string{}, Problem: "its folder's name is no image name"})
		} // else removed meanwhile
	}
	return list, nil
}

// Inspect reads one image of a store, with no host. A damaged one says why.
func Inspect(s *store.Store, name string) (api.Image, error) {
	f, err := find(s, name)
	if err != nil {
		return api.Image{}, err
	}
	v := api.Image{Name: name, UsedBy: []string{}}
	for _, k := range f.keys() {
		v.DiskBytes += allocated(f.key(k).disk())
		for i := 0; allocated(f.key(k).layer(i)) > 0; i++ {
			v.DiskBytes += allocated(f.key(k).layer(i))
		}
	}
	p, err := f.current()
	if err != nil {
		v.Problem = err.Error()
		return v, nil
	}
	v.Key = p.Key
	r, err := load(f.key(p.Key), name, p.Key)
	if err != nil {
		v.Problem = err.Error()
	}
	v.Created, v.Source, v.SizeBytes, v.MemoryMiB = r.Created, string(r.Source), max(r.SizeBytes, r.LayerBytes), r.Defaults.MemoryMiB
	return v, nil
}

// List is the function List of the catalog's store.
func (c *Catalog) List() ([]api.Image, error) { return List(c.store) }

// Remove removes an image with all its versions. usedBy gives the names of the
// sandboxes made from it; while there is one, Remove refuses. It is asked again once
// the image can no longer be found, so that a sandbox being made either keeps the
// image or is not made.
func (c *Catalog) Remove(ctx context.Context, name string, usedBy func(name string) []string) error {
	if _, err := find(c.store, name); err != nil {
		return err
	}
	release, err := c.hold(ctx, name)
	if err != nil {
		return err
	}
	defer release()
	f, err := find(c.store, name)
	if err != nil {
		return err
	}
	if users := usedBy(name); len(users) > 0 {
		return inUse(name, users)
	}
	trash, err := c.discard(string(f))
	if err != nil {
		return &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot remove image %q: %v", name, err)}
	}
	if users := usedBy(name); len(users) > 0 {
		if err := os.Rename(trash, string(f)); err != nil {
			c.log.Error("an image in use cannot be put back", "image", name, "folder", trash, "error", err)
		}
		return inUse(name, users)
	}
	c.empty(trash)
	return nil
}

// Prune removes the versions of images that are not current and not in use.
func (c *Catalog) Prune(ctx context.Context, inUse func(name, key12 string) bool) {
	entries, _ := os.ReadDir(c.store.ImagesDir())
	for _, e := range entries {
		if !api.ValidName(e.Name()) {
			continue
		}
		release, err := c.hold(ctx, e.Name())
		if err != nil {
			return
		}
		c.pruneOne(e.Name(), inUse)
		release()
	}
}

func (c *Catalog) pruneOne(name string, inUse func(name, key12 string) bool) {
	f := folderOf(c.store, name)
	p, err := f.current()
	if err != nil {
		return // damaged: nobody can tell what matters
	}
	for _, k := range f.keys() {
		if k == shortKey(p.Key) || inUse(name, k) {
			continue
		}
		trash, err := c.discard(string(f.key(k)))
		if err != nil {
			c.log.Warn("an old version of an image cannot be removed", "image", name, "key", k, "error", err)
			continue
		}
		c.empty(trash)
	}
}

// discard gives a folder a name under which nobody finds it.
func (c *Catalog) discard(dir string) (trash string, err error) {
	trash = filepath.Join(c.store.ImagesDir(), trashPrefix+randomHex(6))
	if err := os.Rename(dir, trash); err != nil {
		var le *os.LinkError
		if errors.As(err, &le) {
			err = le.Err
		}
		return "", err
	}
	return trash, store.SyncDir(filepath.Dir(dir))
}

// empty removes what was discarded; what stays is removed at the next host start.
func (c *Catalog) empty(trash string) {
	if err := os.RemoveAll(trash); err != nil {
		c.log.Warn("what is left of a removed image stays until the next host start", "folder", trash, "error", err)
	}
}

// CleanLeftovers removes what imports and removals that were cut off left, their
// builder machines included. Nobody else may use the store meanwhile.
func (c *Catalog) CleanLeftovers(ctx context.Context) {
	entries, _ := os.ReadDir(c.store.ImagesDir())
	for _, e := range entries {
		if ctx.Err() != nil {
			return
		}
		dir := filepath.Join(c.store.ImagesDir(), e.Name())
		if strings.HasPrefix(e.Name(), buildingPrefix) {
			err := c.options.Engine.KillLeftover(workshop(dir).machine())
			if err != nil && !errors.Is(err, vm.ErrNoMachine) {
				c.log.Warn("a leftover builder machine cannot be ended", "folder", dir, "error", err)
				continue
			}
		} else if !strings.HasPrefix(e.Name(), trashPrefix) && !strings.HasPrefix(e.Name(), tmpPrefix) {
			continue
		}
		if err := os.RemoveAll(dir); err != nil {
			c.log.Warn("a leftover of an import cannot be removed", "folder", dir, "error", err)
		}
	}
}

func badName(name string) error {
	return &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("%q is no image name: 1 to 40 of a-z, 0-9 and -", clip(name))}
}

func damaged(name string, err error) error {
	return &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("image %q is damaged: %v", name, err), Hint: "remove it with: doz image rm " + name + ", and import it again"}
}

func inUse(name string, users []string) error {
	const shown = 5
	list := strings.Join(users[:min(len(users), shown)], ", ")
	if more := len(users) - shown; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	one := "sandboxes use"
	if len(users) == 1 {
		one = "a sandbox uses"
	}
	return &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot remove image %q: %s it (%s)", name, one, list), Hint: "remove those first with: doz rm"}
}

// allocated is what a file takes of the disk; 0 when there is none.
func allocated(path string) int64 {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}
