package store

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestCloneAndSum(t *testing.T) {
	dir := t.TempDir()
	src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
	f, err := os.Create(src)
	if err != nil {
		t.Fatal(err)
	}
	const size = 64<<20 + 100
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{0, 70_000, 5 << 20, 40<<20 + 1, size - 3} {
		if _, err := f.WriteAt([]byte("abc"), at); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.WriteAt(make([]byte, 1<<20), 20<<20); err != nil { // zeroes, and no hole
		t.Fatal(err)
	}
	f.Close()
	if err := Clone(dst, src); err != nil {
		t.Fatal(err)
	}
	if err := Clone(dst, src); err == nil {
		t.Error("a copy was written over")
	}
	a, _ := os.ReadFile(src)
	b, err := os.ReadFile(dst)
	if err != nil || !bytes.Equal(a, b) {
		t.Fatalf("the copy differs (%v)", err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(dst, &st); err != nil || st.Blocks*512 > 8<<20 {
		t.Errorf("the copy of a sparse file takes %d bytes (%v)", st.Blocks*512, err)
	}
	want, err := Sum(src)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Sum(dst); err != nil || got != want {
		t.Errorf("the copy's sum is %x and not %x (%v)", got, want, err)
	}
	// The zeroes as a hole are the same content.
	g, err := os.OpenFile(dst, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := syscall.Fallocate(int(g.Fd()), 3, 20<<20, 1<<20); err != nil {
		t.Fatal(err)
	}
	if got, err := Sum(dst); err != nil || got != want {
		t.Errorf("with a hole for zeroes the sum is %x and not %x (%v)", got, want, err)
	}
	for _, at := range []int64{1, 30 << 20, size - 1} {
		one := []byte{0}
		g.ReadAt(one, at)
		one[0] ^= 0x10
		g.WriteAt(one, at)
		if got, _ := Sum(dst); got == want {
			t.Errorf("a flipped bit at %d does not change the sum", at)
		}
		one[0] ^= 0x10
		g.WriteAt(one, at)
	}
	if _, err := Sum(filepath.Join(dir, "missing")); err == nil {
		t.Error("a missing file has a sum")
	}
}
