package host

import (
	"context"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/image"
	"dozable.com/doz/internal/sandbox"
	"dozable.com/doz/internal/store"
)

// disks shows the catalog to sandboxes.
type disks struct{ catalog *image.Catalog }

func (d disks) Current(name string) (sandbox.Base, error) { return base(d.catalog.Current(name)) }

func (d disks) Key(name, key string) (sandbox.Base, error) { return base(d.catalog.Key(name, key)) }

func base(i image.Image, err error) (sandbox.Base, error) {
	return sandbox.Base{
		Name: i.Name, Key: i.Key, Disk: i.Disk, Layers: i.Layers, Check: i.Check,
		SizeBytes: i.SizeBytes, MemoryMiB: i.Defaults.MemoryMiB,
	}, err
}

// usedBy names the sandboxes made from any version of an image.
func (h *Host) usedBy(name string) []string {
	var names []string
	for _, v := range h.manager.List() {
		if v.Image == name {
			names = append(names, v.Name)
		}
	}
	return names
}

func importImage(h *Host, ctx context.Context, r api.ImageImportRequest, p progress) (api.Image, error) {
	v, err := h.images.Import(ctx, r.Name, r.Path, p)
	h.prune()
	v.UsedBy = append([]string{}, h.usedBy(r.Name)...)
	return v, err
}

func removeImage(h *Host, ctx context.Context, r api.NameRequest, _ progress) (struct{}, error) {
	return struct{}{}, h.images.Remove(ctx, r.Name, h.usedBy)
}

// makeTemplate makes an image of a sandbox's disk, or of a restore point's.
func makeTemplate(h *Host, ctx context.Context, r api.TemplateRequest, _ progress) (v api.Image, err error) {
	err = h.manager.KeepDisk(ctx, r.Name, r.Point, func(d sandbox.Disk) error {
		base, err := h.images.Key(d.Image, d.ImageKey)
		if err == nil {
			v, err = h.images.Template(ctx, r.As, base, d.Files, d.Bytes, d.Check)
		}
		return err
	})
	return v, err
}

// prune drops versions of images that no name means and no sandbox stands on. Who
// stands on one is asked as late as can be: sandboxes are made meanwhile.
func (h *Host) prune() {
	h.images.Prune(context.Background(), h.manager.UsesImage)
}

func removeSandbox(h *Host, ctx context.Context, r api.NameRequest, _ progress) (struct{}, error) {
	err := h.manager.Remove(ctx, r.Name)
	if err == nil {
		h.prune()
	}
	return struct{}{}, err
}

// Images lists a store's images and who is made from them, with no host.
func Images(s *store.Store) ([]api.Image, error) {
	list, err := image.List(s)
	if err != nil {
		return nil, err
	}
	sandboxes, err := sandbox.List(s)
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].UsedBy = []string{}
		for _, v := range sandboxes {
			if v.Image == list[i].Name {
				list[i].UsedBy = append(list[i].UsedBy, v.Name)
			}
		}
	}
	return list, nil
}

func (h *Host) listImages() ([]api.Image, error) { return Images(h.store) }
