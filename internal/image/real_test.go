package image

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/parts"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm/qemu"
)

// realCatalog makes images in real machines, which boot from what make build built.
func realCatalog(t *testing.T) *Catalog {
	t.Helper()
	if os.Getenv("DOZ_PARTS") == "" {
		dir, err := filepath.Abs("../../libexec/doz")
		if err != nil {
			t.Fatal(err)
		}
		t.Setenv("DOZ_PARTS", dir)
	}
	set, err := parts.Find()
	if err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(t.TempDir())
	if err == nil {
		err = s.Make()
	}
	if err != nil {
		t.Fatal(err)
	}
	copies := parts.NewStore(set, s.Root(), func(text string) { t.Log(text) })
	boot := func() (BootFiles, error) {
		name, err := copies.CurrentKernel(false)
		if err != nil {
			return BootFiles{}, err
		}
		kernel, initrd, tools, err := copies.Paths(name, "")
		return BootFiles{Kernel: kernel, Initrd: initrd, Tools: tools}, err
	}
	files, err := boot()
	if err != nil {
		t.Fatal(err)
	}
	engine := qemu.New(qemu.Options{StateDir: s.EngineDir(), Kernel: files.Kernel})
	return New(Options{Store: s, Engine: engine, Boot: boot})
}

// debugfs asks a disk's file system without mounting it.
func debugfs(t *testing.T, disk, request string) string {
	t.Helper()
	out, err := exec.Command("/sbin/debugfs", "-R", request, disk).Output()
	if err != nil {
		t.Fatalf("debugfs %s: %v", request, err)
	}
	return string(out)
}

// hostileTar tries to reach out of the root it is unpacked in, and has one of each
// thing that an unpacking program can get wrong.
func hostileTar(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []*tar.Header{
		{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "etc/hostname", Size: 4, Mode: 0o640, Uid: 12, Gid: 34, ModTime: time.Unix(1_000_000_000, 0)},
		{Name: "/absolute", Size: 4, Mode: 0o644},
		{Name: "../../climbed", Size: 4, Mode: 0o644},
		{Name: "proc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "doz/bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "/proc"},
		{Name: "out/through", Size: 4, Mode: 0o644},
		{Name: "up", Typeflag: tar.TypeSymlink, Linkname: "../../../../doz/bin"},
		{Name: "up/deckhold", Size: 4, Mode: 0o755},
		{Name: "hard", Typeflag: tar.TypeLink, Linkname: "../../etc/hostname"},
		{Name: "disk", Typeflag: tar.TypeBlock, Devmajor: 254, Devminor: 0, Mode: 0o600},
		{Name: "suid", Size: 4, Mode: 0o4755},
		{Name: "capable", Size: 4, Mode: 0o755, Format: tar.FormatPAX, PAXRecords: map[string]string{
			xattrRecord + "security.capability": "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte("lab\n")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

const xattrRecord = "SCHILY.xattr."

// TestRealImport makes images in a real machine, one of a hostile archive, and looks
// at the disks.
func TestRealImport(t *testing.T) {
	c := realCatalog(t)
	v, err := c.Import(context.Background(), "hostile", put(t, "x", gzipped(t, hostileTar(t))), nil)
	if err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, c, "hostile")
	image, err := c.Current("hostile")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("/sbin/e2fsck", "-fn", image.Disk).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	for _, path := range []string{"/absolute", "/climbed", "/proc/through", "/doz/bin/deckhold", "/hard", "/capable"} {
		if got := debugfs(t, image.Disk, "cat "+path); got != "lab\n" {
			t.Errorf("%s holds %q", path, got)
		}
	}
	for path, wants := range map[string][]string{
		"/etc/hostname": {"Mode:  0640", "User:    12", "Group:    34", "Links: 2"},
		"/disk":         {"Type: block special", "Mode:  0600"},
		"/suid":         {"Mode:  04755"},
		"/out":          {`Fast link dest: "/proc"`},
		"/proc":         {"Type: directory"},
		"/sys":          {"Type: directory"},
		"/tmp":          {"Mode:  01777"},
	} {
		got := debugfs(t, image.Disk, "stat "+path)
		for _, want := range wants {
			if !strings.Contains(got, want) {
				t.Errorf("%s is not %q:\n%s", path, want, got)
			}
		}
	}
	if got := debugfs(t, image.Disk, "ea_list /capable"); !strings.Contains(got, "security.capability") {
		t.Errorf("/capable has the attributes %q", got)
	}
	t.Logf("the image takes %d KiB", v.DiskBytes>>10)

	t.Run("layers", func(t *testing.T) {
		v := imported(t, c, "web", ociLayout(t, ociImage(t, runtime.GOARCH)))
		image, err := c.Key("web", v.Key)
		if err != nil {
			t.Fatal(err)
		}
		if got := debugfs(t, image.Disk, "cat /etc/motd"); got != "hi "+runtime.GOARCH {
			t.Errorf("/etc/motd holds %q", got)
		}
		if got := debugfs(t, image.Disk, "ls -p /etc"); strings.Contains(got, "hostname") {
			t.Errorf("what the upper layer removed is there: %s", got)
		}
	})
	t.Run("corrupt", func(t *testing.T) {
		// Well formed at first, so that only the machine finds out.
		data := append(tarOf(t, entry{name: "a", content: "a"})[:1024], []byte(strings.Repeat("junk", 500))...)
		_, err := c.Import(context.Background(), "corrupt", put(t, "x", data), nil)
		checkError(t, err, api.KindFailed, "the archive is damaged after 1 entries")
		nothingLeft(t, c, "hostile", "web")
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		_, err := c.Import(ctx, "cancelled", put(t, "x", tarOf(t, entry{name: "other"})), func(p api.Progress) {
			if p.Step == "unpack image" {
				cancel()
			}
		})
		checkError(t, err, api.KindFailed, "it was cancelled")
		nothingLeft(t, c, "hostile", "web")
	})
}
