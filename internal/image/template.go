package image

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
)

// KindTemplate is the source of an image that was a sandbox's root disk.
const KindTemplate Kind = "template"

// Template makes an image of a root disk: base is the image it stands on, layers the
// overlays over that, the uppermost first, which do not change any more and give it
// diskBytes. The files are shared, so it takes no room and no time, and stays whole
// when base and the sandbox are gone. check says that it was kept from under a running
// system.
func (c *Catalog) Template(ctx context.Context, name string, base Image, layers []string, diskBytes int64, check bool) (api.Image, error) {
	if !api.ValidName(name) {
		return api.Image{}, badName(name)
	}
	release, err := c.hold(ctx, name)
	if err != nil {
		return api.Image{}, err
	}
	defer release()
	if _, err := os.Lstat(string(folderOf(c.store, name))); err == nil {
		return api.Image{}, &api.Error{Kind: api.KindExists, Message: fmt.Sprintf("an image is already named %q", name), Hint: "choose another name, or remove it with: doz image rm " + name}
	}
	if err := c.makeTemplate(name, base, layers, diskBytes, check); err != nil {
		return api.Image{}, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot make template %q: %v", name, err)}
	}
	return Inspect(c.store, name)
}

func (c *Catalog) makeTemplate(name string, base Image, layers []string, diskBytes int64, check bool) error {
	w := workshop(filepath.Join(c.store.ImagesDir(), buildingPrefix+randomHex(6)))
	defer os.RemoveAll(string(w))
	f, k := w.folder(name), randomHex(32)
	d := f.key(k)
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return bare(err)
	}
	from, err := load(sealed(filepath.Dir(base.Disk)), base.Name, base.Key)
	if err != nil {
		return err
	}
	if err := os.Link(base.Disk, d.disk()); err != nil {
		return bare(err)
	}
	for i, layer := range layers {
		if err := os.Link(layer, d.layer(i)); err != nil {
			return bare(err)
		}
	}
	r := from
	r.Name, r.Key, r.Created, r.Source = name, k, time.Now().UTC(), KindTemplate
	r.Layers, r.LayerBytes, r.Check = len(layers), diskBytes, check
	if err := store.WriteRecord(d.record(), r); err != nil {
		return err
	}
	if err := store.WriteRecord(f.pointer(), pointer{recordSchema, k}); err != nil {
		return err
	}
	return c.place(f, d, name, k)
}
