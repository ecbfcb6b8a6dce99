package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/api"
)

// Limits of what describes an image.
const (
	maxDocument = 4 << 20 // bytes of an index, a manifest or a config
	maxNesting  = 4       // indexes in indexes
	maxDescribe = 1000    // manifests looked at
	maxDefaults = 128 << 10
)

var errNotThere = errors.New("it is not there")

// files are the files of a layout, in a folder or an archive. Names have slashes.
// errNotThere when there is none of that name.
type files interface {
	open(name string) (io.ReadCloser, int64, error)
}

// layoutDir is a layout in a folder. Links that lead out of it are not followed.
type layoutDir struct{ root *os.Root }

func (d layoutDir) open(name string) (io.ReadCloser, int64, error) {
	f, err := d.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, errNotThere
	}
	if err != nil {
		return nil, 0, bare(err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is no file")
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

// openLayout reads the image of an OCI layout folder.
func openLayout(path string, o OpenOptions) (*Source, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, refuse(api.KindFailed, "", "%s cannot be read: %v", path, bare(err))
	}
	dir := layoutDir{root}
	if f, _, err := dir.open("oci-layout"); err != nil {
		root.Close()
		return nil, refuse(api.KindUsage, kindsHint, "%s is a folder and no OCI layout", path)
	} else {
		f.Close()
	}
	s, err := readOCI(dir, OCILayout, path, o)
	if err != nil {
		root.Close()
		return nil, err
	}
	s.closers = append(s.closers, root)
	return s, nil
}

// found is an image that an index leads to.
type found struct {
	descriptor v1.Descriptor
	platform   string // "linux/amd64"
}

// reader reads one layout.
type reader struct {
	files files
	seen  int
}

// readOCI reads the image for this computer in a layout.
func readOCI(fs files, kind Kind, path string, o OpenOptions) (*Source, error) {
	r := &reader{files: fs}
	var index v1.IndexManifest
	if err := readJSON(fs, "index.json", &index); err != nil {
		return nil, refuse(api.KindFailed, damagedHint, "%s is damaged: index.json: %v", path, err)
	}
	all, err := r.images(index, 0)
	if err != nil {
		return nil, refuse(api.KindFailed, damagedHint, "%s is damaged: %v", path, err)
	}
	chosen, err := choose(all, o.Arch, path)
	if err != nil {
		return nil, err
	}
	s, err := r.image(chosen.descriptor)
	if err != nil {
		return nil, refuse(api.KindFailed, damagedHint, "%s is damaged: %v", path, err)
	}
	s.Kind = kind
	return s, nil
}

// images are all images an index leads to.
func (r *reader) images(index v1.IndexManifest, depth int) ([]found, error) {
	if depth > maxNesting {
		return nil, fmt.Errorf("its indexes are nested more than %d deep", maxNesting)
	}
	var all []found
	for _, d := range index.Manifests {
		if r.seen++; r.seen > maxDescribe {
			return nil, fmt.Errorf("it lists more than %d images", maxDescribe)
		}
		switch {
		case d.MediaType.IsIndex():
			var inner v1.IndexManifest
			if err := r.document(d, &inner); err != nil {
				return nil, err
			}
			nested, err := r.images(inner, depth+1)
			if err != nil {
				return nil, err
			}
			all = append(all, nested...)
		case d.MediaType.IsImage():
			platform, err := r.platform(d)
			if err != nil {
				return nil, err
			}
			all = append(all, found{d, platform})
		}
	}
	return all, nil
}

// platform of an image, which its config knows when its descriptor does not say.
func (r *reader) platform(d v1.Descriptor) (string, error) {
	if d.Platform != nil && d.Platform.OS != "" {
		return d.Platform.OS + "/" + d.Platform.Architecture, nil
	}
	var manifest v1.Manifest
	if err := r.document(d, &manifest); err != nil {
		return "", err
	}
	var config v1.ConfigFile
	if err := r.document(manifest.Config, &config); err != nil {
		return "", err
	}
	return config.OS + "/" + config.Architecture, nil
}

// choose picks the one image for arch.
func choose(all []found, arch, path string) (found, error) {
	var fit []found
	var others []string
	for _, f := range all {
		same := func(g found) bool { return g.descriptor.Digest == f.descriptor.Digest }
		switch {
		case f.platform != "linux/"+arch:
			// Attestations are listed as images of no platform.
			if !slices.Contains(others, f.platform) && f.platform != "unknown/unknown" && f.platform != "/" {
				others = append(others, f.platform)
			}
		case !slices.ContainsFunc(fit, same):
			fit = append(fit, f)
		}
	}
	switch {
	case len(fit) == 1:
		return fit[0], nil
	case len(fit) > 1:
		return found{}, refuse(api.KindUsage, "copy the one you want out of it first, with skopeo copy for instance",
			"%s holds %d images for linux/%s", path, len(fit), arch)
	case len(others) == 0:
		return found{}, refuse(api.KindUsage, kindsHint, "%s holds no image", path)
	}
	slices.Sort(others)
	return found{}, refuse(api.KindUsage, "bring one made for linux/"+arch,
		"%s has no image for linux/%s: it has %s", path, arch, clip(strings.Join(others, ", ")))
}

// image reads an image's manifest and config.
func (r *reader) image(d v1.Descriptor) (*Source, error) {
	var manifest v1.Manifest
	if err := r.document(d, &manifest); err != nil {
		return nil, err
	}
	var config v1.ConfigFile
	if err := r.document(manifest.Config, &config); err != nil {
		return nil, err
	}
	diffs := config.RootFS.DiffIDs
	if len(diffs) != len(manifest.Layers) || len(diffs) > maxLayers {
		return nil, fmt.Errorf("its manifest lists %d layers, its config %d, and %d is the most", len(manifest.Layers), len(diffs), maxLayers)
	}
	s := &Source{Digest: manifest.Config.Digest.String()}
	var err error
	if s.Defaults, err = defaults(config); err != nil {
		return nil, err
	}
	for i, l := range manifest.Layers {
		if l.Digest.Algorithm != "sha256" || diffs[i].Algorithm != "sha256" {
			return nil, fmt.Errorf("layer %d has a digest that is no sha256", i+1)
		}
		size, err := r.size(l.Digest)
		if err != nil {
			return nil, fmt.Errorf("layer %d: %w", i+1, err)
		}
		if size != l.Size {
			return nil, fmt.Errorf("layer %d has %d bytes and should have %d", i+1, size, l.Size)
		}
		s.Layers = append(s.Layers, Layer{
			Digest: l.Digest.String(), DiffID: diffs[i].String(), Stored: size, Whiteouts: true,
			open: func() (io.ReadCloser, error) { f, _, err := r.files.open(blobName(l.Digest)); return f, err },
		})
	}
	return s, nil
}

func blobName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

// size of a blob.
func (r *reader) size(h v1.Hash) (int64, error) {
	f, size, err := r.files.open(blobName(h))
	if err != nil {
		return 0, err
	}
	return size, f.Close()
}

// document reads the blob a descriptor names, checks its digest, and reads it into v.
func (r *reader) document(d v1.Descriptor, v any) error {
	data, err := readSmall(r.files, blobName(d.Digest))
	if err == nil && fmt.Sprintf("sha256:%x", sha256.Sum256(data)) != d.Digest.String() {
		err = errors.New("its content does not match its digest")
	}
	if err == nil {
		err = parse(data, v)
	}
	if err != nil {
		return fmt.Errorf("blob %s: %w", d.Digest, err)
	}
	return nil
}

// dockerManifest is one image in the manifest.json that docker save writes.
type dockerManifest struct {
	Config string
	Layers []string
}

// readDocker reads the image in what docker save wrote before it wrote OCI layouts.
func readDocker(a *archive, path string, o OpenOptions) (*Source, error) {
	broken := func(err error) error {
		return refuse(api.KindFailed, damagedHint, "%s is damaged: %v", path, err)
	}
	var list []dockerManifest
	if err := readJSON(a, "manifest.json", &list); err != nil {
		return nil, broken(fmt.Errorf("manifest.json: %w", err))
	}
	if len(list) != 1 {
		return nil, refuse(api.KindUsage, "save one image alone", "%s holds %d images", path, len(list))
	}
	data, err := readSmall(a, list[0].Config)
	var config v1.ConfigFile
	if err == nil {
		err = parse(data, &config)
	}
	if err != nil {
		return nil, broken(fmt.Errorf("config: %w", err))
	}
	descriptor := found{platform: config.OS + "/" + config.Architecture}
	if _, err := choose([]found{descriptor}, o.Arch, path); err != nil {
		return nil, err
	}
	diffs := config.RootFS.DiffIDs
	if len(diffs) != len(list[0].Layers) || len(diffs) > maxLayers {
		return nil, broken(fmt.Errorf("its manifest lists %d layers, its config %d, and %d is the most", len(list[0].Layers), len(diffs), maxLayers))
	}
	s := &Source{Kind: DockerArchive, Digest: fmt.Sprintf("sha256:%x", sha256.Sum256(data))}
	if s.Defaults, err = defaults(config); err != nil {
		return nil, broken(err)
	}
	for i, name := range list[0].Layers {
		_, size, err := a.open(name)
		if err == nil && diffs[i].Algorithm != "sha256" {
			err = errors.New("its digest is no sha256")
		}
		if err != nil {
			return nil, broken(fmt.Errorf("layer %d: %w", i+1, err))
		}
		s.Layers = append(s.Layers, Layer{DiffID: diffs[i].String(), Stored: size, Whiteouts: true, open: func() (io.ReadCloser, error) {
			f, _, err := a.open(name)
			return f, err
		}})
	}
	return s, nil
}

// defaults are what an OCI config says about programs.
func defaults(c v1.ConfigFile) (Defaults, error) {
	d := Defaults{Env: c.Config.Env, User: c.Config.User, Workdir: c.Config.WorkingDir}
	size := len(d.User) + len(d.Workdir)
	for _, e := range d.Env {
		size += len(e)
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" {
			return d, fmt.Errorf("its config has the variable %q, which is no NAME=value", clip(e))
		}
	}
	if size > maxDefaults || strings.Contains(d.User+d.Workdir+strings.Join(d.Env, ""), "\x00") {
		return d, errors.New("its config sets variables, a user or a folder that no program can have")
	}
	return d, nil
}

func readJSON(fs files, name string, v any) error {
	data, err := readSmall(fs, name)
	if err != nil {
		return err
	}
	return parse(data, v)
}

func parse(data []byte, v any) error {
	// Only the first value counts, as in every other reader of these documents.
	if err := json.NewDecoder(bytes.NewReader(data)).Decode(v); err != nil {
		return fmt.Errorf("it is not the JSON it should be: %s", clip(err.Error()))
	}
	return nil
}

func readSmall(fs files, name string) ([]byte, error) {
	f, size, err := fs.open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if size > maxDocument {
		return nil, fmt.Errorf("it has more than %d MiB", maxDocument>>20)
	}
	return io.ReadAll(io.LimitReader(f, maxDocument))
}

// clip bounds what an archive has us say.
func clip(s string) string {
	if len(s) > 200 {
		s = s[:200] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}
