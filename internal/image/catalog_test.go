package image

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// catalog is one in a store of the test's own, over fake machines.
func catalog(t *testing.T) (*Catalog, *builderEngine) {
	t.Helper()
	s, err := store.Open(t.TempDir())
	if err == nil {
		err = s.Make()
	}
	if err != nil {
		t.Fatal(err)
	}
	part := put(t, "part", []byte("a kernel, an initramfs or tools"))
	e := newBuilderEngine()
	return New(Options{Store: s, Engine: e, Arch: "amd64", Boot: func() (BootFiles, error) {
		return BootFiles{Kernel: part, Initrd: part, Tools: part}, nil
	}}), e
}

func imported(t *testing.T, c *Catalog, name, path string) api.Image {
	t.Helper()
	v, err := c.Import(context.Background(), name, path, nil)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// nothingLeft checks that the store has only these images, and nothing half made.
func nothingLeft(t *testing.T, c *Catalog, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(c.store.ImagesDir())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("in the images' folder (-want +got):\n%s", diff)
	}
}

func nobody(string) []string { return nil }

func TestImportRootfs(t *testing.T) {
	c, e := catalog(t)
	path := put(t, "lab.tar", gzipped(t, rootfs(t)))
	var steps []string
	v, err := c.Import(context.Background(), "lab", path, func(p api.Progress) {
		if len(steps) == 0 || steps[len(steps)-1] != p.Step {
			steps = append(steps, p.Step)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	e.noMachines(t)
	nothingLeft(t, c, "lab")
	if diff := cmp.Diff([]string{"etc/", "etc/hostname", "bin"}, e.unpacked); diff != "" {
		t.Errorf("unpacked (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"read archive", "check layers", "boot builder", "unpack image", "seal image"}, steps); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"whiteouts=false limits=true"}, e.layers); diff != "" {
		t.Errorf("layers (-want +got):\n%s", diff)
	}
	image, err := c.Current("lab")
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(image.Disk)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o444 || info.Size() != minDisk || image.SizeBytes != minDisk {
		t.Errorf("the disk is %v, %d bytes, and said to have %d", info.Mode(), info.Size(), image.SizeBytes)
	}
	if same, err := c.Key("lab", v.Key); err != nil || same.Disk != image.Disk {
		t.Errorf("by its key the image is %+v, %v", same, err)
	}
	list, err := c.List()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]api.Image{v}, list); diff != "" || v.Source != "rootfs tar" || v.Problem != "" || v.UpToDate {
		t.Errorf("imported %+v and listed (-want +got):\n%s", v, diff)
	}
}

func TestImportOCI(t *testing.T) {
	c, e := catalog(t)
	v := imported(t, c, "web", ociLayout(t, ociImage(t, "amd64")))
	if diff := cmp.Diff([]string{"whiteouts=true limits=true", "whiteouts=true limits=true"}, e.layers); diff != "" {
		t.Errorf("layers (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"etc/", "etc/hostname", "bin", "etc/.wh.hostname", "etc/motd"}, e.unpacked); diff != "" {
		t.Errorf("unpacked (-want +got):\n%s", diff)
	}
	image, err := c.Current("web")
	if err != nil {
		t.Fatal(err)
	}
	if image.Defaults.User != "agent:users" || v.Source != "OCI layout" {
		t.Errorf("got %+v", image)
	}
}

func TestImportAgain(t *testing.T) {
	c, e := catalog(t)
	first := imported(t, c, "lab", put(t, "a", rootfs(t)))
	again := imported(t, c, "lab", put(t, "b", zstded(t, rootfs(t))))
	if !again.UpToDate || again.Key != first.Key || len(e.layers) != 1 {
		t.Errorf("importing the same again gave %+v after %d builds", again, len(e.layers))
	}
	second := imported(t, c, "lab", put(t, "c", tarOf(t, entry{name: "other"})))
	if second.UpToDate || second.Key == first.Key {
		t.Errorf("importing another gave %+v", second)
	}
	for _, key := range []string{first.Key, second.Key} {
		if _, err := c.Key("lab", key); err != nil {
			t.Error(err)
		}
	}
	if now, err := c.Current("lab"); err != nil || now.Key != second.Key {
		t.Errorf("the name means %s, %v", now.Key, err)
	}
	// Back to the first: it is still there.
	if back := imported(t, c, "lab", put(t, "d", rootfs(t))); !back.UpToDate || back.Key != first.Key {
		t.Errorf("going back gave %+v", back)
	}

	c.Prune(context.Background(), func(name, key12 string) bool { return name == "lab" && key12 == shortKey(second.Key) })
	if _, err := c.Key("lab", second.Key); err != nil {
		t.Errorf("a version in use was pruned: %v", err)
	}
	c.Prune(context.Background(), func(string, string) bool { return false })
	_, err := c.Key("lab", second.Key)
	checkError(t, err, api.KindFailed, `image "lab" is damaged`)
	if _, err := c.Current("lab"); err != nil {
		t.Errorf("the current version was pruned: %v", err)
	}
	nothingLeft(t, c, "lab")
}

func TestImportFails(t *testing.T) {
	plain := rootfs(t)
	text := func(s string) func(*builderMachine, []string) (answer, bool) {
		return func(_ *builderMachine, args []string) (answer, bool) {
			return answer{err: s, code: 65}, args[0] == "unpack"
		}
	}
	says := func(s string) func(*builderMachine, []string) (answer, bool) {
		return func(_ *builderMachine, args []string) (answer, bool) { return answer{out: s}, args[0] == "unpack" }
	}
	for _, c := range []struct {
		name string
		data []byte
		job  func(*builderMachine, []string) (answer, bool)
		says string
	}{
		{"corrupt tar", append(tarOf(t, entry{name: "a"})[:512], []byte(strings.Repeat("junk", 500))...), nil, "the archive is damaged after 1 entries"},
		{"refused entry", plain, text("deckhold: noise\ncannot unpack \"../x\": not a directory\n"), `cannot unpack "../x": not a directory`},
		{"steered terminal", plain, text("\x1b[2Jyou \u202eare\x07 pwned"), "?[2Jyou ?are? pwned"},
		{"silent failure", plain, text(""), "ended with code 65"},
		{"garbage answer", plain, says("all is well\n"), "answers garbage"},
		{"no answer", plain, says(""), "answers garbage"},
		{"impossible answer", plain, says(`{"entries":-1,"bytes":99999999999999}` + "\n"), "answers garbage"},
		{"endless line", plain, says(strings.Repeat("x", maxSaid+1)), "answers garbage"},
		{"flood", plain, says(strings.Repeat("{\"read\":1}\n", maxLines/10)), "answers garbage"},
		{"machine dies", plain, func(m *builderMachine, args []string) (answer, bool) {
			if args[0] == "unpack" {
				m.Kill()
			}
			return answer{never: args[0] == "unpack"}, true
		}, "the builder machine ended: killed"},
		{"machine leaves", plain, func(m *builderMachine, args []string) (answer, bool) {
			if args[0] == "unpack" {
				m.PowerOff(context.Background())
			}
			return answer{never: args[0] == "unpack"}, true
		}, "powered off too early"},
		{"no file system", plain, func(_ *builderMachine, args []string) (answer, bool) { return answer{}, args[0] == "seal" }, "holds no ext4 file system"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cat, e := catalog(t)
			e.job = c.job
			path := put(t, "x", c.data)
			_, err := cat.Import(context.Background(), "lab", path, nil)
			checkError(t, err, api.KindFailed, `cannot import image "lab": `, c.says)
			e.noMachines(t)
			nothingLeft(t, cat)
		})
	}
}

// TestImportRefusesEarly: what is wrong with the source is found before a machine
// is started.
func TestImportRefusesEarly(t *testing.T) {
	image := ociImage(t, "amd64")
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[1].Digest()
	if err != nil {
		t.Fatal(err)
	}
	broken := ociLayout(t, image)
	blob := filepath.Join(broken, blobName(digest))
	data, err := os.ReadFile(blob)
	if err == nil {
		err = os.WriteFile(blob, flip(data, 5), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what, name, path string
		kind             api.Kind
		says             string
	}{
		{"layer with a wrong digest", "lab", broken, api.KindFailed, "is damaged: layer 2 of 2: its digest is"},
		{"truncated", "lab", put(t, "x", gzipped(t, rootfs(t))[:70]), api.KindFailed, "it ends too early"},
		{"missing", "lab", filepath.Join(broken, "none"), api.KindNotFound, "there is no file"},
		{"relative path", "lab", "lab.tar", api.KindUsage, "is no absolute path"},
		{"bad name", "../lab", broken, api.KindUsage, "is no image name"},
	} {
		t.Run(c.what, func(t *testing.T) {
			cat, e := catalog(t)
			e.job = func(*builderMachine, []string) (answer, bool) { t.Error("a machine was used"); return answer{}, false }
			_, err := cat.Import(context.Background(), c.name, c.path, nil)
			checkError(t, err, c.kind, c.says)
			nothingLeft(t, cat)
		})
	}
}

func TestImportCancelled(t *testing.T) {
	c, e := catalog(t)
	ctx, cancel := context.WithCancel(context.Background())
	e.job = func(m *builderMachine, args []string) (answer, bool) {
		if args[0] == "unpack" {
			cancel()
		}
		return answer{never: args[0] == "unpack"}, true
	}
	_, err := c.Import(ctx, "lab", put(t, "x", rootfs(t)), nil)
	checkError(t, err, api.KindFailed, `cannot import image "lab": it was cancelled`)
	e.noMachines(t)
	nothingLeft(t, c)
}

// TestImportTogether: of two imports of one name at once, one waits for the other.
func TestImportTogether(t *testing.T) {
	c, e := catalog(t)
	path := put(t, "x", rootfs(t))
	results := make(chan api.Image, 2)
	for range 2 {
		go func() {
			v, err := c.Import(context.Background(), "lab", path, nil)
			if err != nil {
				t.Error(err)
			}
			results <- v
		}()
	}
	a, b := <-results, <-results
	if a.UpToDate == b.UpToDate || a.Key != b.Key || len(e.layers) != 1 {
		t.Errorf("got %+v and %+v after %d builds", a, b, len(e.layers))
	}
}

func TestRemove(t *testing.T) {
	c, _ := catalog(t)
	imported(t, c, "lab", put(t, "x", rootfs(t)))
	ctx := context.Background()

	err := c.Remove(ctx, "lab", func(string) []string { return []string{"a1"} })
	checkError(t, err, api.KindFailed, `cannot remove image "lab": a sandbox uses it (a1)`)
	err = c.Remove(ctx, "lab", func(string) []string { return strings.Split("a b c d e f g", " ") })
	checkError(t, err, api.KindFailed, `sandboxes use it (a, b, c, d, e and 2 more)`)

	// A sandbox that is made just when its image goes keeps it.
	asked := 0
	err = c.Remove(ctx, "lab", func(string) []string {
		if asked++; asked == 1 {
			return nil
		}
		return []string{"new"}
	})
	checkError(t, err, api.KindFailed, "a sandbox uses it (new)")
	if _, err := c.Current("lab"); err != nil {
		t.Errorf("the image is gone although it was not removed: %v", err)
	}

	if err := c.Remove(ctx, "lab", nobody); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, c)
	checkError(t, c.Remove(ctx, "lab", nobody), api.KindNotFound, `no image is named "lab"`)
	_, err = c.Current("lab")
	checkError(t, err, api.KindNotFound, `no image is named "lab"`)
	checkError(t, c.Remove(ctx, "../lab", nobody), api.KindUsage, "is no image name")
}

// TestDamagedImages: each kind of damage is refused in one sentence and listed.
func TestDamagedImages(t *testing.T) {
	disk := func(f folder, k string) string { return f.key(k).disk() }
	for _, c := range []struct {
		name   string
		damage func(f folder, key string) error
		says   string
	}{
		{"disk gone", func(f folder, k string) error { return os.Remove(disk(f, k)) }, "its disk root.ext4 is missing"},
		{"disk cut", func(f folder, k string) error {
			return errors.Join(os.Chmod(disk(f, k), 0o600), os.Truncate(disk(f, k), minDisk-4096))
		}, "bytes and should have"},
		{"disk zeroed", func(f folder, k string) error {
			return errors.Join(os.Remove(disk(f, k)), blankDisk(disk(f, k), minDisk))
		}, "holds no ext4 file system"},
		{"disk written to", func(f folder, k string) error {
			d, err := os.OpenFile(disk(f, k), os.O_WRONLY, 0)
			if errors.Is(err, fs.ErrPermission) {
				err = os.Chmod(disk(f, k), 0o600)
			}
			if err != nil {
				return err
			}
			defer d.Close()
			_, err = d.WriteAt([]byte("scribble"), 5000)
			return err
		}, "is not the one that was made"},
		{"disk is a FIFO", func(f folder, k string) error {
			return errors.Join(os.Remove(disk(f, k)), unix.Mkfifo(disk(f, k), 0o600))
		}, "is no file"},
		{"record gone", func(f folder, k string) error { return os.Remove(f.key(k).record()) }, "image.json is missing"},
		{"record garbage", func(f folder, k string) error { return os.WriteFile(f.key(k).record(), []byte("{"), 0o600) }, "damaged"},
		{"record newer", func(f folder, k string) error {
			return os.WriteFile(f.key(k).record(), []byte(`{"schema":99}`), 0o600)
		}, "a newer doz wrote it"},
		{"record of another", func(f folder, k string) error {
			return os.WriteFile(f.key(k).record(), []byte(`{"schema":1,"name":"other"}`), 0o600)
		}, "is of another image"},
		{"pointer gone", func(f folder, k string) error { return os.Remove(f.pointer()) }, "current.json is missing"},
		{"pointer leads out", func(f folder, k string) error {
			return os.WriteFile(f.pointer(), []byte(`{"schema":1,"key":"../../../../etc"}`), 0o600)
		}, "names no key"},
		{"a file in its place", func(f folder, k string) error {
			return errors.Join(os.RemoveAll(string(f)), os.WriteFile(string(f), nil, 0o600))
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			cat, _ := catalog(t)
			v := imported(t, cat, "lab", put(t, "x", rootfs(t)))
			if err := c.damage(folderOf(cat.store, "lab"), v.Key); err != nil {
				t.Fatal(err)
			}
			_, err := cat.Current("lab")
			checkError(t, err, api.KindFailed, `image "lab" is damaged: `, c.says)
			list, err := cat.List()
			if err != nil || len(list) != 1 || !strings.Contains(list[0].Problem, c.says) || list[0].Problem == "" {
				t.Errorf("listed %+v, %v", list, err)
			}
			if err := cat.Remove(context.Background(), "lab", nobody); err != nil {
				t.Error(err)
			}
			nothingLeft(t, cat)
		})
	}
}

// TestImportOverDamaged: a damaged version is not replaced under those who use it.
func TestImportOverDamaged(t *testing.T) {
	c, _ := catalog(t)
	path := put(t, "x", rootfs(t))
	v := imported(t, c, "lab", path)
	if err := os.Remove(folderOf(c.store, "lab").key(v.Key).disk()); err != nil {
		t.Fatal(err)
	}
	_, err := c.Import(context.Background(), "lab", path, nil)
	checkError(t, err, api.KindFailed, `cannot import image "lab": this version of it is there and is damaged`)
}

func TestStrangers(t *testing.T) {
	c, _ := catalog(t)
	if err := os.Mkdir(filepath.Join(c.store.ImagesDir(), "No Image"), 0o700); err != nil {
		t.Fatal(err)
	}
	list, err := c.List()
	if err != nil || len(list) != 1 || list[0].Problem != "its folder's name is no image name" {
		t.Errorf("listed %+v, %v", list, err)
	}
}

// TestCleanLeftovers: a host that died while it imported leaves a machine and files.
func TestCleanLeftovers(t *testing.T) {
	c, e := catalog(t)
	imported(t, c, "lab", put(t, "x", rootfs(t)))
	w := workshop(filepath.Join(c.store.ImagesDir(), buildingPrefix+"dead"))
	if err := os.MkdirAll(w.machine(), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Start(context.Background(), vm.Config{Dir: w.machine(), Name: "image-builder", CPUs: 1, MemoryMiB: 256, MemoryFile: w.memory()}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{trashPrefix + "x", buildingPrefix + "no-machine"} {
		if err := os.Mkdir(filepath.Join(c.store.ImagesDir(), name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	c.CleanLeftovers(context.Background())
	e.noMachines(t)
	nothingLeft(t, c, "lab")
}

// FuzzSuperblock feeds disks that nobody made.
func FuzzSuperblock(f *testing.F) {
	path := put(f, "disk", make([]byte, 2*headBytes))
	if err := writeSuperblock(path); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good[:4096])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		disk := make([]byte, headBytes)
		copy(disk, data)
		path := put(t, "disk", disk)
		if sum, err := head(path, headBytes); err == nil && len(sum) != 64 {
			t.Errorf("the sum is %q", sum)
		}
		if _, err := head(path, headBytes+1); err == nil {
			t.Error("a disk of another size passed")
		}
	})
}
