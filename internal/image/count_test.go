package image

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"dozable.com/doz/internal/api"
)

func counted(data []byte, most int64, piece int) (*entryCounter, error) {
	c := &entryCounter{most: most}
	_, err := io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{bytes.NewReader(data)}, make([]byte, piece))
	return c, err
}

func TestEntryCounter(t *testing.T) {
	long := strings.Repeat("long/", 60)
	data := tarOf(t, entry{name: "dir/", kind: tar.TypeDir}, entry{name: "dir/a", content: strings.Repeat("x", 1500)},
		entry{name: long + "b", content: "b"}, entry{name: "l", kind: tar.TypeSymlink, link: long}, entry{name: "empty"})
	for _, piece := range []int{1, 511, 512, 4096, 1 << 20} {
		if c, err := counted(data, 5, piece); err != nil || c.entries != 5 {
			t.Errorf("in pieces of %d: %d entries, %v", piece, c.entries, err)
		}
		if _, err := counted(data, 4, piece); err != errTooMany {
			t.Errorf("in pieces of %d: got %v", piece, err)
		}
	}
	if c, err := counted(bytes.Repeat([]byte("junk"), 1000), 5, 4096); err != nil || c.entries != 0 {
		t.Errorf("of junk: %d entries, %v", c.entries, err)
	}
}

// TestTooManyEntries: ten million entries are refused before a machine is started.
func TestTooManyEntries(t *testing.T) {
	one := tarOf(t, entry{name: "same/", kind: tar.TypeDir})[:tarBlock]
	thousands := bytes.Repeat(one, 10_000)
	packed := zstded(t, thousands)
	// Frames of zstd follow one another: a small file, and ten million entries.
	path := put(t, "bomb", bytes.Repeat(packed, 1000))
	c, e := catalog(t)
	e.job = func(*builderMachine, []string) (answer, bool) { t.Error("a machine was used"); return answer{}, false }
	_, err := c.Import(context.Background(), "bomb", path, nil)
	checkError(t, err, api.KindFailed, filepath.Base(path), "is too much for an image: it has more than 2000000 entries")
	nothingLeft(t, c)
}

func FuzzEntryCounter(f *testing.F) {
	f.Add(rootfs(f), 512)
	f.Add([]byte("junk"), 3)
	f.Fuzz(func(t *testing.T, data []byte, piece int) {
		if piece < 1 || piece > 4096 {
			return
		}
		whole, err := counted(data, 1000, len(data)+1)
		cut, cutErr := counted(data, 1000, piece)
		if whole.entries != cut.entries || err != cutErr || whole.entries > int64(len(data)/tarBlock) {
			t.Errorf("%d bytes give %d entries, and %d in pieces of %d", len(data), whole.entries, cut.entries, piece)
		}
	})
}
