package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
)

var (
	errNoArchive = errors.New("it is no archive")
	errNothing   = errors.New("it holds nothing")
	// errShort is the end of the input within the first header.
	errShort = fmt.Errorf("no archive, or: %w", io.ErrUnexpectedEOF)
)

// maxIndexed bounds the entries of an archive of images; one of 512 layers has less
// than 2,000.
const maxIndexed = 10_000

// archive is a tar that holds images, known by where its parts stand. Nothing of it
// is ever written under the names it has.
type archive struct {
	kind  Kind
	whole *io.SectionReader // nil when only the kind was to be told
	parts map[string]part
}

// part is one file of an archive, or a link to another.
type part struct {
	offset, size int64
	link         string
}

// indexArchive tells what the uncompressed tar r is, and where the parts of an
// archive of images stand when r can seek. A root file system is known as one by its
// first entry that no archive of images has, and not read further.
func indexArchive(r io.Reader) (*archive, error) {
	a := &archive{kind: RootfsTar, parts: map[string]part{}}
	a.whole, _ = r.(*io.SectionReader)
	t := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := t.Next()
		switch {
		case err == io.EOF && n == 0:
			return nil, errNothing
		case err == io.EOF:
			a.kind = a.judge()
			return a, nil
		case err != nil && n == 0 && errors.Is(err, tar.ErrHeader):
			return nil, errNoArchive
		case err != nil && n == 0 && errors.Is(err, io.ErrUnexpectedEOF):
			return nil, errShort
		case err != nil:
			return nil, err
		}
		name := path.Clean(h.Name)
		if n == maxIndexed || !archiveName(name) {
			return a, nil
		}
		p := part{size: h.Size}
		if a.whole != nil {
			// The tar reader reads whole blocks and no further, so the content starts here.
			p.offset, _ = a.whole.Seek(0, io.SeekCurrent)
		}
		switch h.Typeflag {
		case tar.TypeReg:
			a.parts[name] = p
		case tar.TypeSymlink: // docker save links a layer that it has already written
			a.parts[name] = part{link: path.Join(path.Dir(name), h.Linkname)}
		case tar.TypeLink:
			a.parts[name] = part{link: path.Clean(h.Linkname)}
		}
	}
}

// archiveName says whether an archive of images may have an entry of that name.
func archiveName(name string) bool {
	first, _, _ := strings.Cut(name, "/")
	switch first {
	case ".", "oci-layout", "index.json", "manifest.json", "repositories", "blobs":
		return true
	}
	first = strings.TrimPrefix(first, "sha256:")
	for _, suffix := range []string{".json", ".gz", ".tar"} {
		first = strings.TrimSuffix(first, suffix)
	}
	return len(first) == 64 && isHex(first)
}

func (a *archive) judge() Kind {
	has := func(name string) bool { _, ok := a.parts[name]; return ok }
	switch {
	case has("oci-layout") && has("index.json"):
		return OCIArchive
	case has("manifest.json"):
		return DockerArchive
	}
	return RootfsTar
}

// source reads the archive's image.
func (a *archive) source(path string, o OpenOptions) (*Source, error) {
	if a.kind == DockerArchive {
		return readDocker(a, path, o)
	}
	return readOCI(a, a.kind, path, o)
}

// open gives one file of the archive, read in place.
func (a *archive) open(name string) (io.ReadCloser, int64, error) {
	p, ok := a.parts[path.Clean(name)]
	if ok && p.link != "" {
		p, ok = a.parts[p.link]
	}
	if !ok || p.link != "" {
		return nil, 0, errNotThere
	}
	return io.NopCloser(io.NewSectionReader(a.whole, p.offset, p.size)), p.size, nil
}
