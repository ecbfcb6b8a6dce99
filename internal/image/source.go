package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/api"
)

// Kind is what an image was made of, in words.
type Kind string

const (
	RootfsTar     Kind = "rootfs tar"
	OCILayout     Kind = "OCI layout"
	OCIArchive    Kind = "OCI archive"
	DockerArchive Kind = "docker archive"
)

// Limits of a source. What is inside a layer is bounded where it is unpacked.
const (
	maxBytes   = 64 << 30 // uncompressed, all layers together
	maxEntries = 2_000_000
	maxLayers  = 512
)

// Source is something an image can be made of. Close it when done.
type Source struct {
	Kind     Kind
	Digest   string // "sha256:…" of the uncompressed tar, or of the OCI config
	Layers   []Layer
	Defaults Defaults

	closers []io.Closer
}

// Layer is one tar of a source, the lowest first.
type Layer struct {
	Digest string // "sha256:…" of what is stored; "" when nobody said
	DiffID string // "sha256:…" of the uncompressed tar
	Stored int64  // bytes stored
	Plain  int64  // bytes uncompressed; 0 when not known
	// Whiteouts says that .wh. names remove what lower layers have.
	Whiteouts bool

	open func() (io.ReadCloser, error)
}

// Close lets go of the source's files.
func (s *Source) Close() error {
	var err error
	for _, c := range s.closers {
		err = errors.Join(err, c.Close())
	}
	return err
}

// stored is how many bytes reading all of the source takes.
func (s *Source) stored() (n int64) {
	for _, l := range s.Layers {
		n += l.Stored
	}
	return n
}

// OpenOptions of Open.
type OpenOptions struct {
	Arch     string // as OCI names it; "" is this computer's
	Scratch  string // folder for an archive that has to be decompressed first
	Progress func(api.Progress)
}

// Open recognises what stands at path by its content, never by its name. The errors
// it gives are *api.Error, a clause about the path.
func Open(ctx context.Context, path string, o OpenOptions) (*Source, error) {
	if o.Arch == "" {
		o.Arch = runtime.GOARCH
	}
	// Looked at before it is opened: opening a FIFO waits, and a device may act.
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, refuse(api.KindNotFound, "", "there is no file %s", path)
	}
	if err == nil && info.IsDir() {
		return openLayout(path, o)
	}
	if err == nil && !info.Mode().IsRegular() {
		return nil, refuse(api.KindUsage, kindsHint, "%s is neither a file nor a folder", path)
	}
	var f *os.File
	if err == nil {
		f, err = os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	}
	if err == nil {
		info, err = f.Stat()
	}
	if err != nil {
		return nil, refuse(api.KindFailed, "", "%s cannot be read: %v", path, bare(err))
	}
	s, err := openFile(ctx, f, info, path, o)
	if err != nil {
		f.Close()
		return nil, err
	}
	s.closers = append(s.closers, f)
	return s, nil
}

const kindsHint = "bring a root file system as a tar (plain, gzip, zstd or bzip2), an OCI layout folder, an OCI archive, or what docker save writes"

func openFile(ctx context.Context, f *os.File, info fs.FileInfo, path string, o OpenOptions) (*Source, error) {
	switch {
	case !info.Mode().IsRegular():
		return nil, refuse(api.KindUsage, kindsHint, "%s is neither a file nor a folder", path)
	case info.Size() == 0:
		return nil, refuse(api.KindUsage, kindsHint, "%s is empty", path)
	}
	whole := io.NewSectionReader(f, 0, info.Size())
	packing, err := packingOf(whole)
	if err != nil {
		return nil, refuse(api.KindFailed, "", "%s cannot be read: %v", path, bare(err))
	}
	if packing == packedXZ {
		return nil, refuse(api.KindUsage, "decompress it first with: unxz "+path, "%s is compressed with xz, which doz does not read", path)
	}
	var contents *archive
	if packing == packedNot {
		contents, err = indexArchive(whole)
		if errors.Is(err, errShort) && whole.Size() < tarBlock {
			err = errNoArchive
		}
	} else {
		contents, err = peekPacked(whole)
	}
	if err != nil {
		return nil, describe(path, err)
	}
	if contents.kind == RootfsTar {
		return openTar(ctx, whole, path, o)
	}
	if packing != packedNot {
		return openPackedArchive(ctx, whole, path, o)
	}
	return contents.source(path, o)
}

// peekPacked tells what a compressed archive is by its first entries.
func peekPacked(whole *io.SectionReader) (*archive, error) {
	r, err := unpack(rewound(whole))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	watched := &endWatch{r: r}
	a, err := indexArchive(io.LimitReader(watched, maxBytes))
	if errors.Is(err, errShort) && watched.ended && watched.n < tarBlock {
		err = errNoArchive
	}
	return a, err
}

// tarBlock is the least that a tar has, in bytes.
const tarBlock = 512

// endWatch notes whether a stream ended as it should.
type endWatch struct {
	r     io.Reader
	n     int64
	ended bool
}

func (w *endWatch) Read(b []byte) (int, error) {
	n, err := w.r.Read(b)
	w.n += int64(n)
	w.ended = err == io.EOF
	return n, err
}

// openPackedArchive decompresses an archive whose parts have to be read in another
// order than they stand.
func openPackedArchive(ctx context.Context, whole *io.SectionReader, path string, o OpenOptions) (*Source, error) {
	f, err := os.CreateTemp(o.Scratch, tmpPrefix+"*")
	if err != nil {
		return nil, refuse(api.KindFailed, "", "%s cannot be decompressed: %v", path, bare(err))
	}
	os.Remove(f.Name()) // it lives as long as it is open
	m := &meter{progress: o.Progress, step: "decompress archive", total: whole.Size()}
	n, err := copyPlain(ctx, f, whole, m)
	var contents *archive
	if err == nil {
		contents, err = indexArchive(io.NewSectionReader(f, 0, n))
	}
	if err != nil {
		f.Close()
		return nil, describe(path, err)
	}
	s, err := contents.source(path, o)
	if err != nil {
		f.Close()
		return nil, err
	}
	s.closers = append(s.closers, f)
	return s, nil
}

// openTar takes a tar as one layer. All of it is read once, for its digest, before
// anything is made of it.
func openTar(ctx context.Context, whole *io.SectionReader, path string, o OpenOptions) (*Source, error) {
	sum := sha256.New()
	m := &meter{progress: o.Progress, step: "read archive", total: whole.Size()}
	n, err := copyPlain(ctx, io.MultiWriter(sum, &entryCounter{most: maxEntries}), whole, m)
	if err != nil {
		return nil, describe(path, err)
	}
	digest := digestOf(sum)
	return &Source{
		Kind: RootfsTar, Digest: digest,
		Layers: []Layer{{DiffID: digest, Stored: whole.Size(), Plain: n, open: func() (io.ReadCloser, error) {
			return io.NopCloser(rewound(whole)), nil
		}}},
	}, nil
}

// copyPlain writes the decompressed whole to w.
func copyPlain(ctx context.Context, w io.Writer, whole *io.SectionReader, m *meter) (int64, error) {
	r, err := unpack(metered{rewound(whole), m})
	if err != nil {
		return 0, err
	}
	defer r.Close()
	n, err := io.CopyBuffer(w, &bounded{r: struct{ io.Reader }{ending{ctx, r}}, left: maxBytes}, make([]byte, 1<<20))
	return n, err
}

// ending ends reads when ctx is done.
type ending struct {
	ctx context.Context
	r   io.Reader
}

func (e ending) Read(b []byte) (int, error) {
	if err := e.ctx.Err(); err != nil {
		return 0, err
	}
	return e.r.Read(b)
}

var errTooLarge = fmt.Errorf("it unpacks to more than %d GiB", maxBytes>>30)

// bounded fails, rather than ends, when there is more than it may give.
type bounded struct {
	r    io.Reader
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, errTooLarge
	}
	return n, err
}

func rewound(s *io.SectionReader) *io.SectionReader { return io.NewSectionReader(s, 0, s.Size()) }

func digestOf(h hash.Hash) string { return fmt.Sprintf("sha256:%x", h.Sum(nil)) }

// describe says in a clause about path what is wrong with it.
func describe(path string, err error) error {
	var known *api.Error
	switch {
	case errors.As(err, &known), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, errTooLarge), errors.Is(err, errTooMany):
		return refuse(api.KindFailed, "", "%s is too much for an image: %v", path, err)
	case errors.Is(err, errNoArchive):
		return refuse(api.KindUsage, kindsHint, "%s is no archive", path)
	case errors.Is(err, errNothing):
		return refuse(api.KindUsage, kindsHint, "%s holds nothing", path)
	}
	return refuse(api.KindFailed, damagedHint, "%s is damaged: %v", path, plainWords(err))
}

const damagedHint = "fetch or write it again"

// plainWords says what the decompressors' and the tar reader's errors mean.
func plainWords(err error) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return errors.New("it ends too early")
	case errors.Is(err, tar.ErrHeader):
		return errors.New("what should be a tar header is none")
	}
	return bare(err)
}

// bare drops the operation and path that the sentence has named already.
func bare(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}
