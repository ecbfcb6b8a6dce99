package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/api"
)

func open(t testing.TB, path string) (*Source, error) {
	t.Helper()
	s, err := Open(context.Background(), path, OpenOptions{Arch: "amd64", Scratch: t.TempDir()})
	if err == nil {
		t.Cleanup(func() { s.Close() })
	}
	return s, err
}

// readLayers gives what every layer unpacks to.
func readLayers(s *Source) ([][]byte, error) {
	var all [][]byte
	for _, l := range s.Layers {
		r, err := l.Open(maxBytes, nil)
		if err != nil {
			return nil, err
		}
		data, err := io.ReadAll(r)
		r.Close()
		if err != nil {
			return nil, err
		}
		all = append(all, data)
	}
	return all, nil
}

func TestOpenRootfsTar(t *testing.T) {
	plain := rootfs(t)
	bz, err := os.ReadFile("testdata/rootfs.tar.bz2")
	if err != nil {
		t.Fatal(err)
	}
	keys := map[string]string{}
	for kind, data := range map[string][]byte{"plain": plain, "gzip": gzipped(t, plain), "zstd": zstded(t, plain), "bzip2": bz} {
		t.Run(kind, func(t *testing.T) {
			// The name says nothing, and must not.
			s, err := open(t, put(t, "image.zip", data))
			if err != nil {
				t.Fatal(err)
			}
			layers, err := readLayers(s)
			if err != nil {
				t.Fatal(err)
			}
			if s.Kind != RootfsTar || len(layers) != 1 || s.Layers[0].Whiteouts {
				t.Errorf("got a %s of %d layers", s.Kind, len(layers))
			}
			if kind != "bzip2" && !cmp.Equal(layers[0], plain) {
				t.Error("the layer is not the tar that went in")
			}
			if kind != "bzip2" && s.Digest != fmt.Sprintf("sha256:%x", sha256.Sum256(plain)) {
				t.Errorf("digest is %s", s.Digest)
			}
			keys[kind] = key(s)
		})
	}
	if keys["plain"] != keys["gzip"] || keys["plain"] != keys["zstd"] {
		t.Error("how a tar is compressed changes the image's key")
	}
}

func TestOpenOCI(t *testing.T) {
	image := ociImage(t, "amd64")
	dir := ociLayout(t, image, ociImage(t, "arm64"))
	packed := tarFolder(t, dir)
	tag, err := name.NewTag("lab:latest")
	if err != nil {
		t.Fatal(err)
	}
	docker := filepath.Join(t.TempDir(), "docker.tar")
	if err := tarball.WriteToFile(docker, tag, image); err != nil {
		t.Fatal(err)
	}
	nested := t.TempDir()
	// As a build for several platforms writes it: an index in the index.
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: ociImage(t, "arm64"), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64"}}},
		mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
	p, err := layout.Write(nested, empty.Index)
	if err == nil {
		err = p.AppendIndex(index)
	}
	if err != nil {
		t.Fatal(err)
	}

	upper := tarOf(t, entry{name: "etc/.wh.hostname"}, entry{name: "etc/motd", content: "hi amd64"})
	defaults := Defaults{Env: []string{"PATH=/bin", "A=b=c"}, User: "agent:users", Workdir: "/work"}
	var first string
	for _, c := range []struct {
		name, path string
		kind       Kind
	}{
		{"layout", dir, OCILayout},
		{"layout with an index in the index", nested, OCILayout},
		{"archive", put(t, "a", packed), OCIArchive},
		{"compressed archive", put(t, "a", gzipped(t, packed)), OCIArchive},
		{"docker archive", docker, DockerArchive},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := open(t, c.path)
			if err != nil {
				t.Fatal(err)
			}
			layers, err := readLayers(s)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([][]byte{rootfs(t), upper}, layers); diff != "" {
				t.Errorf("layers (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(defaults, s.Defaults); diff != "" {
				t.Errorf("defaults (-want +got):\n%s", diff)
			}
			if s.Kind != c.kind || !s.Layers[0].Whiteouts {
				t.Errorf("got a %s", s.Kind)
			}
			if first == "" {
				first = key(s)
			} else if first != key(s) {
				t.Error("how an image is packed changes its key")
			}
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	plain := rootfs(t)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	text := []byte("this is a letter, and no archive at all.\n")
	for _, c := range []struct {
		name, path string
		kind       api.Kind
		says       string
	}{
		{"missing", filepath.Join(dir, "none"), api.KindNotFound, "there is no file"},
		{"FIFO", fifo, api.KindUsage, "is neither a file nor a folder"},
		{"device", "/dev/null", api.KindUsage, "is neither a file nor a folder"},
		{"empty file", put(t, "x", nil), api.KindUsage, "is empty"},
		{"short text", put(t, "x", text), api.KindUsage, "is no archive"},
		{"long text", put(t, "x", []byte(strings.Repeat(string(text), 500))), api.KindUsage, "is no archive"},
		{"compressed text", put(t, "x", gzipped(t, text)), api.KindUsage, "is no archive"},
		{"xz", put(t, "x", []byte("\xfd7zXZ\x00 and more")), api.KindUsage, "is compressed with xz"},
		{"empty tar", put(t, "x", make([]byte, 10240)), api.KindUsage, "holds nothing"},
		{"truncated gzip", put(t, "x", gzipped(t, plain)[:60]), api.KindFailed, "is damaged: it ends too early"},
		{"truncated zstd", put(t, "x", zstded(t, plain)[:60]), api.KindFailed, "is damaged: it ends too early"},
		{"gzip with a wrong byte", put(t, "x", flip(gzipped(t, plain), -6)), api.KindFailed, "is damaged: gzip"},
		{"folder", dir, api.KindUsage, "is a folder and no OCI layout"},
		{"no image for here", ociLayout(t, ociImage(t, "arm64"), ociImage(t, "s390x")), api.KindUsage, "has no image for linux/amd64: it has linux/arm64, linux/s390x"},
		{"no image at all", ociLayout(t), api.KindUsage, "holds no image"},
		{"two images", ociLayout(t, ociImage(t, "amd64"), relabelled(t)), api.KindUsage, "holds 2 images for linux/amd64"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := open(t, c.path)
			checkError(t, err, c.kind, c.path, c.says)
		})
	}
}

// checkError checks that err is one sentence of that kind that says what it should.
func checkError(t *testing.T, err error, kind api.Kind, says ...string) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v, not one of our errors", err)
	}
	if e.Kind != kind {
		t.Errorf("kind is %q, want %q: %s", e.Kind, kind, e.Message)
	}
	for _, s := range says {
		if !strings.Contains(e.Message, s) {
			t.Errorf("%q does not say %q", e.Message, s)
		}
	}
	if strings.Contains(e.Message, "\n") {
		t.Errorf("%q is more than a sentence", e.Message)
	}
}

// relabelled is another image for the same platform.
func relabelled(t *testing.T) v1.Image {
	t.Helper()
	image, err := mutate.Config(ociImage(t, "amd64"), v1.Config{User: "other"})
	if err != nil {
		t.Fatal(err)
	}
	return image
}

// flip changes one byte, counted from the end when at is negative.
func flip(data []byte, at int) []byte {
	if at < 0 {
		at += len(data)
	}
	data = append([]byte{}, data...)
	data[at] ^= 0xff
	return data
}

// TestDamagedLayouts breaks one file of a good layout at a time.
func TestDamagedLayouts(t *testing.T) {
	image := ociImage(t, "amd64")
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	layer, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	secret := put(t, "secret", []byte("not of the layout"))
	rewrite := func(change func([]byte) []byte) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			data, err := os.ReadFile(path)
			if err == nil {
				err = os.WriteFile(path, change(data), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	replace := func(make func(path string) error) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			if err := errors.Join(os.Remove(path), make(path)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name, file string
		damage     func(*testing.T, string)
		says       string
	}{
		{"layer missing", blobName(layer), replace(func(string) error { return nil }), "layer 2: it is not there"},
		{"layer leads out", blobName(layer), replace(func(p string) error { return os.Symlink(secret, p) }), "layer 2"},
		{"layer is a FIFO", blobName(layer), replace(func(p string) error { return unix.Mkfifo(p, 0o600) }), "layer 2: it is no file"},
		{"layer cut", blobName(layer), rewrite(func(b []byte) []byte { return b[:len(b)-9] }), "layer 2 has"},
		{"layer changed", blobName(layer), rewrite(func(b []byte) []byte { return flip(b, -2) }), "gzip"},
		{"layer's header changed", blobName(layer), rewrite(func(b []byte) []byte { return flip(b, 5) }), "its digest is"},
		{"config changed", blobName(config), rewrite(func(b []byte) []byte { return flip(b, 40) }), "does not match its digest"},
		{"config leads out", blobName(config), replace(func(p string) error { return os.Symlink("/etc/passwd", p) }), "is damaged"},
		{"index is no JSON", "index.json", rewrite(func([]byte) []byte { return []byte("{") }), "index.json: it is not the JSON it should be"},
		{"index is huge", "index.json", rewrite(func(b []byte) []byte { return make([]byte, maxDocument+1) }), "more than 4 MiB"},
		{"index leads out", "index.json", replace(func(p string) error { return os.Symlink("../../../etc/passwd", p) }), "index.json"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := ociLayout(t, image)
			c.damage(t, filepath.Join(dir, c.file))
			s, err := open(t, dir)
			if err != nil {
				checkError(t, err, api.KindFailed, dir, c.says)
				return
			}
			if _, err := readLayers(s); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("reading the layers gave %v, want %q", err, c.says)
			}
		})
	}
}

func TestHostileConfigs(t *testing.T) {
	for name, config := range map[string]v1.Config{
		"too much":  {Env: []string{"A=" + strings.Repeat("x", maxDefaults)}},
		"no name":   {Env: []string{"=x"}},
		"no value":  {Env: []string{"PATH"}},
		"with NULs": {User: "a\x00b"},
	} {
		t.Run(name, func(t *testing.T) {
			image, err := mutate.Config(ociImage(t, "amd64"), config)
			if err != nil {
				t.Fatal(err)
			}
			dir := ociLayout(t, image)
			_, err = open(t, dir)
			checkError(t, err, api.KindFailed, dir, "config")
		})
	}
}

func TestNestedForEver(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, data []byte) {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, data, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	index := []byte(`{"schemaVersion":2,"manifests":[]}`)
	for range maxNesting + 2 {
		sum := fmt.Sprintf("%x", sha256.Sum256(index))
		write("blobs/sha256/"+sum, index)
		index = fmt.Appendf(nil, `{"schemaVersion":2,"manifests":[{"mediaType":%q,"size":%d,"digest":"sha256:%s"}]}`, types.OCIImageIndex, len(index), sum)
	}
	write("index.json", index)
	_, err := open(t, dir)
	checkError(t, err, api.KindFailed, dir, "nested more than")
}

func TestTooLarge(t *testing.T) {
	_, err := open(t, put(t, "x", gzipped(t, make([]byte, 1<<20))))
	checkError(t, err, api.KindUsage, "holds nothing")
	s, err := open(t, put(t, "x", gzipped(t, tarOf(t, entry{name: "zeros", content: string(make([]byte, 1<<20))}))))
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Layers[0].Open(1<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	n, err := io.Copy(io.Discard, r)
	if err != errTooLarge || n > 1<<20 {
		t.Errorf("read %d bytes and got %v", n, err)
	}
}

// TestDockerLinks: older docker archives link a layer that they have already.
func TestDockerLinks(t *testing.T) {
	layer := rootfs(t)
	id := strings.Repeat("ab", 32)
	other := strings.Repeat("cd", 32)
	diff := v1.Hash{Algorithm: "sha256", Hex: fmt.Sprintf("%x", sha256.Sum256(layer))}
	config, err := json.Marshal(v1.ConfigFile{OS: "linux", Architecture: "amd64", RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{diff, diff}}})
	if err != nil {
		t.Fatal(err)
	}
	manifest := fmt.Sprintf(`[{"Config":"%s.json","Layers":["%s/layer.tar","%s/layer.tar"]}]`, id, id, other)
	path := put(t, "x", tarOf(t,
		entry{name: id + "/", kind: tar.TypeDir}, entry{name: id + "/layer.tar", content: string(layer)},
		entry{name: other + "/layer.tar", kind: tar.TypeSymlink, link: "../" + id + "/layer.tar"},
		entry{name: id + ".json", content: string(config)}, entry{name: "manifest.json", content: manifest}))
	s, err := open(t, path)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := readLayers(s)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([][]byte{layer, layer}, layers); diff != "" || s.Kind != DockerArchive {
		t.Errorf("a %s, layers (-want +got):\n%s", s.Kind, diff)
	}
}

// FuzzOpen feeds archives that nobody has seen. Whatever it is, it is recognised or
// refused in one sentence, and never gives more than it may.
func FuzzOpen(f *testing.F) {
	plain := rootfs(f)
	f.Add(plain)
	f.Add(gzipped(f, plain))
	f.Add(zstded(f, plain))
	f.Add(tarFolder(f, ociLayout(f, ociImage(f, "amd64"))))
	f.Add([]byte("BZh9"))
	f.Add([]byte("\x1f\x8b\x08"))
	f.Add([]byte("\x28\xb5\x2f\xfd\x24\x00\x01\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := open(t, put(t, "x", data))
		if err != nil {
			var e *api.Error
			if !errors.As(err, &e) || strings.Contains(e.Message, "\n") {
				t.Errorf("%q is no sentence of ours", err)
			}
			return
		}
		for _, l := range s.Layers {
			r, err := l.Open(1<<20, nil)
			if err != nil {
				continue
			}
			if n, _ := io.Copy(io.Discard, r); n > 1<<20 {
				t.Errorf("a layer gave %d bytes", n)
			}
			r.Close()
		}
	})
}
