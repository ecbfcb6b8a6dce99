package image

import (
	"context"
	"errors"
	"io"
	"os"
)

// layerDisk is a disk on which a builder finds the layers, decompressed, one behind
// the other. A guest reads a disk many times faster than the guest channel, and all
// of a source has been read and checked before a machine is started.
type layerDisk struct {
	path    string
	extents []extent
	plain   int64 // bytes of all layers
	entries int64 // of all layers
}

// extent is where a layer stands.
type extent struct {
	offset, size int64
	before       int64 // bytes of the layers before it
	whiteouts    bool
}

// diskBlock is what layers on the disk, and the disk itself, are aligned to.
const diskBlock = 4096

// spool writes the layers of a source to a new disk, checking their digests.
func spool(ctx context.Context, s *Source, path string, progress progressFunc) (*layerDisk, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, bare(err)
	}
	defer f.Close()
	d := &layerDisk{path: path}
	m := &meter{progress: progress, step: "check layers", total: s.stored()}
	var offset int64
	for i, l := range s.Layers {
		count := &entryCounter{most: maxEntries - d.entries}
		n, err := spoolLayer(ctx, io.MultiWriter(io.NewOffsetWriter(f, offset), count), l, maxBytes-d.plain, m)
		if err != nil {
			return nil, ofLayers(i, len(s.Layers), err)
		}
		d.entries += count.entries
		d.extents = append(d.extents, extent{offset: offset, size: n, before: d.plain, whiteouts: l.Whiteouts})
		d.plain += n
		offset = (offset + n + diskBlock - 1) / diskBlock * diskBlock
	}
	// A disk is never empty.
	if err := f.Truncate(max(offset, diskBlock)); err != nil {
		return nil, bare(err)
	}
	return d, f.Close()
}

func spoolLayer(ctx context.Context, w io.Writer, l Layer, limit int64, m *meter) (int64, error) {
	r, err := l.Open(limit, m)
	if err != nil {
		return 0, err
	}
	defer r.Close()
	n, err := io.CopyBuffer(w, struct{ io.Reader }{ending{ctx, r}}, make([]byte, 1<<20))
	if errors.Is(err, context.Canceled) {
		err = context.Cause(ctx)
	}
	return n, bare(err)
}
