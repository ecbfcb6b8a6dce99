package parts

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// carried is a small doz's parts, as pack lays them out.
var carried = []struct{ role, file, content string }{
	{KernelPlain, "kernels/vmlinux-plain", "a plain kernel"},
	{KernelSound, "kernels/vmlinux-sound", "a kernel with sound"},
	{Initrd, "guest/initrd.cpio", "an initramfs"},
	{Tools, "guest/tools.squashfs", "a tools layer"},
}

// layOut writes the parts and their manifest, and points DOZ_PARTS at them.
func layOut(t *testing.T) *Set {
	t.Helper()
	dir := t.TempDir()
	m := Manifest{Schema: Schema, Arch: "x86_64", Version: "1.2.3", Release: "source"}
	for _, c := range carried {
		sum := sha256.Sum256([]byte(c.content))
		digits := hex.EncodeToString(sum[:])
		m.Parts = append(m.Parts, Part{
			Role: c.role, File: c.file, Name: filepath.Base(c.file) + "-" + digits[:12],
			SHA256: digits, Size: int64(len(c.content)),
		})
		write(t, filepath.Join(dir, c.file), c.content)
	}
	manifest, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, ManifestFile), string(manifest))
	t.Setenv("DOZ_PARTS", dir)
	set, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m, set.Manifest); diff != "" {
		t.Fatalf("the manifest read is not the one written (-want +got):\n%s", diff)
	}
	return set
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// notes collects what a user is told.
type notes struct {
	mu   sync.Mutex
	list []string
}

func (n *notes) add(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.list = append(n.list, text)
}

// installed is a store that has been started once.
func installed(t *testing.T) (*Set, *Store, *notes, map[string]string) {
	t.Helper()
	set, told := layOut(t), &notes{}
	s := NewStore(set, filepath.Join(t.TempDir(), "store"), told.add)
	return set, s, told, paths(t, s, KernelPlain)
}

// paths boots, as it were: it gives each role's path once Paths has checked it.
func paths(t *testing.T, s *Store, kernelRole string) map[string]string {
	t.Helper()
	p, _ := s.set.Current(kernelRole)
	kernel, initrd, tools, err := s.Paths(p.Name, "")
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{kernelRole: kernel, Initrd: initrd, Tools: tools}
	for _, c := range carried {
		path, asked := got[c.role]
		if !asked {
			continue
		}
		if data, err := os.ReadFile(path); err != nil || string(data) != c.content {
			t.Errorf("the store's %s holds %q, %v; want %q", c.role, data, err, c.content)
		}
	}
	return got
}

func TestFirstStartCopies(t *testing.T) {
	set, s, told, got := installed(t)
	for role, path := range got {
		p, _ := set.Current(role)
		if want := p.SHA256[:12]; !strings.Contains(filepath.Base(path), want) {
			t.Errorf("%s is kept as %s, without %s in its name", role, path, want)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o444 {
			t.Errorf("%s has mode %v, want 0444", path, info.Mode().Perm())
		}
	}
	if again := paths(t, s, KernelPlain); !cmp.Equal(got, again) {
		t.Errorf("the second start boots %v, the first %v", again, got)
	}
	if len(told.list) != 0 {
		t.Errorf("a first start told %q; there is nothing to tell", told.list)
	}
	leftovers, err := filepath.Glob(filepath.Join(s.root, "*", ".tmp-*"))
	if err != nil || len(leftovers) != 0 {
		t.Errorf("temporary files stayed: %v, %v", leftovers, err)
	}
}

func TestSoundKernelIsCopiedWhenAsked(t *testing.T) {
	_, s, _, got := installed(t)
	folder := filepath.Dir(got[KernelPlain])
	if sound, _ := filepath.Glob(folder + "/vmlinux-sound*"); len(sound) != 0 {
		t.Errorf("nobody asked for the sound kernel, and %v is there", sound)
	}
	name, err := s.CurrentKernel(true)
	if err != nil {
		t.Fatal(err)
	}
	if got := paths(t, s, KernelSound)[KernelSound]; filepath.Base(got) != name {
		t.Errorf("the sound kernel is %s, want %s", got, name)
	}
}

func TestDamagedCopyIsReplacedAndSaid(t *testing.T) {
	damage := map[string]func(t *testing.T, path string){
		"truncated": func(t *testing.T, path string) {
			must(t, os.Chmod(path, 0o600))
			must(t, os.Truncate(path, 3))
		},
		"empty": func(t *testing.T, path string) {
			must(t, os.Chmod(path, 0o600))
			must(t, os.Truncate(path, 0))
		},
		"one bit flipped": func(t *testing.T, path string) {
			data, err := os.ReadFile(path)
			must(t, err)
			data[len(data)/2] ^= 1
			must(t, os.Remove(path))
			must(t, os.WriteFile(path, data, 0o444))
		},
		"longer": func(t *testing.T, path string) {
			data, err := os.ReadFile(path)
			must(t, err)
			must(t, os.Remove(path))
			must(t, os.WriteFile(path, append(data, 0), 0o444))
		},
		"a link to nowhere that loops": func(t *testing.T, path string) {
			must(t, os.Remove(path))
			must(t, os.Symlink(path, path))
		},
	}
	for name, harm := range damage {
		for _, role := range []string{KernelPlain, Initrd, Tools} {
			t.Run(name+" "+role, func(t *testing.T) {
				set, s, told, got := installed(t)
				harm(t, got[role])
				paths(t, s, KernelPlain)
				p, _ := set.Current(role)
				want := []string{"the store's copy of " + p.Name + " was damaged; it was replaced from doz's own"}
				if diff := cmp.Diff(want, told.list); diff != "" {
					t.Errorf("what was told (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// A program that runs as root reads a file of mode 0000, one that does not replaces it.
func TestUnreadableCopyBootsWhole(t *testing.T) {
	_, s, _, got := installed(t)
	must(t, os.Chmod(got[KernelPlain], 0))
	paths(t, s, KernelPlain)
}

func TestMissingCopyIsMadeAgain(t *testing.T) {
	_, s, told, got := installed(t)
	must(t, os.RemoveAll(filepath.Dir(got[Tools])))
	paths(t, s, KernelPlain)
	if len(told.list) != 0 {
		t.Errorf("told %q; a missing copy is not a damaged one", told.list)
	}
}

// Nothing is remembered: damage between two starts of one host is found.
func TestEveryStartChecks(t *testing.T) {
	_, s, told, got := installed(t)
	for range 3 {
		must(t, os.Remove(got[KernelPlain]))
		must(t, os.WriteFile(got[KernelPlain], []byte("no kernel"), 0o444))
		paths(t, s, KernelPlain)
	}
	if len(told.list) != 3 {
		t.Errorf("told %d times, want 3: %q", len(told.list), told.list)
	}
}

func TestOwnPartDamaged(t *testing.T) {
	tests := map[string]struct {
		harm func(t *testing.T, path string)
		want string
	}{
		"missing":   {func(t *testing.T, path string) { must(t, os.Remove(path)) }, "is missing: install doz again, or run make build"},
		"truncated": {func(t *testing.T, path string) { must(t, os.Truncate(path, 1)) }, "is damaged: install doz again, or run make build"},
		"changed":   {func(t *testing.T, path string) { write(t, path, "A plain kernel") }, "is damaged: install doz again, or run make build"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			set := layOut(t)
			p, _ := set.Current(KernelPlain)
			test.harm(t, set.Path(p))
			s := NewStore(set, t.TempDir(), func(string) {})
			_, _, _, err := s.Paths(p.Name, "")
			if err == nil || err.Error() != "doz's own "+p.File+" "+test.want {
				t.Errorf("got error %v, want doz's own %s %s", err, p.File, test.want)
			}
			if list, _ := filepath.Glob(s.root + "/kernels/vmlinux*"); len(list) != 0 {
				t.Errorf("the damaged part left %v in the store", list)
			}
		})
	}
}

// A whole copy in the store is enough, whatever became of doz's own.
func TestWholeCopyNeedsNoOwnPart(t *testing.T) {
	set, s, _, _ := installed(t)
	for _, p := range set.Parts {
		must(t, os.Remove(set.Path(p)))
	}
	paths(t, s, KernelPlain)
}

// In a store that cannot be written, whole copies are enough; a missing one is one
// sentence. A file where the folder should be stops root too.
func TestReadOnlyStore(t *testing.T) {
	_, s, _, got := installed(t)
	for _, folder := range []string{"kernels", "tools"} {
		must(t, os.Chmod(filepath.Join(s.root, folder), 0o500))
	}
	must(t, os.Chmod(s.root, 0o500))
	paths(t, s, KernelPlain)

	must(t, os.Chmod(s.root, 0o700))
	must(t, os.Chmod(filepath.Dir(got[Tools]), 0o700))
	must(t, os.RemoveAll(filepath.Dir(got[Tools])))
	write(t, filepath.Dir(got[Tools]), "not a folder")
	name, err := s.CurrentKernel(false)
	must(t, err)
	if _, _, _, err = s.Paths(name, ""); err == nil || !strings.HasPrefix(err.Error(), "cannot copy tools.squashfs-") || strings.Contains(err.Error(), "\n") {
		t.Errorf("got error %v, want one line that begins with: cannot copy tools.squashfs-", err)
	}
}

func TestKernelOfAnEarlierDoz(t *testing.T) {
	_, s, _, got := installed(t)
	sum := sha256.Sum256([]byte("last year's kernel"))
	name := "vmlinux-plain-" + hex.EncodeToString(sum[:])[:12]
	path := filepath.Join(filepath.Dir(got[KernelPlain]), name)

	for content, whole := range map[string]bool{"": false, "last year's kernel": true, "last year's kernel, damaged": false} {
		if content != "" {
			write(t, path, content)
		}
		kernel, _, _, err := s.Paths(name, "")
		if whole && (err != nil || kernel != path) {
			t.Errorf("a whole kernel: got %q, %v", kernel, err)
		}
		if !whole && (err == nil || !strings.Contains(err.Error(), "use the doz that made the sandbox")) {
			t.Errorf("kernel of content %q: got error %v", content, err)
		}
		os.Remove(path)
	}
	if _, _, _, err := s.Paths("../../etc/passwd", ""); err == nil {
		t.Error("a name that leads out of the store was taken")
	}
}

func TestWhatIsNotCarried(t *testing.T) {
	set := layOut(t)
	set.Parts = slices.DeleteFunc(set.Parts, func(p Part) bool { return p.Role != KernelPlain })
	s := NewStore(set, t.TempDir(), func(string) {})
	if _, err := s.CurrentKernel(true); err == nil || err.Error() != "this doz carries no kernel-sound" {
		t.Errorf("asked for a sound kernel, got %v", err)
	}
	name, err := s.CurrentKernel(false)
	must(t, err)
	if _, _, _, err := s.Paths(name, ""); err == nil || !strings.Contains(err.Error(), "carries no initrd") {
		t.Errorf("asked for an initrd, got %v", err)
	}
}

func TestManyStartsAtOnce(t *testing.T) {
	set := layOut(t)
	s := NewStore(set, t.TempDir(), func(string) {})
	p, _ := set.Current(KernelPlain)
	var wait sync.WaitGroup
	for range 20 {
		wait.Go(func() {
			if _, _, _, err := s.Paths(p.Name, ""); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
}

func TestFindWithoutParts(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("DOZ_PARTS", dir)
	for name, content := range map[string]string{"missing": "", "no JSON": "{", "another schema": `{"schema":99}`} {
		if content != "" {
			write(t, filepath.Join(dir, ManifestFile), content)
		}
		_, err := Find()
		if err == nil || !strings.Contains(err.Error(), "install it again, or run make build") {
			t.Errorf("%s manifest: got error %v", name, err)
		}
	}
	// Without DOZ_PARTS they are looked for beside the program, here the test's.
	t.Setenv("DOZ_PARTS", "")
	exe, err := os.Executable()
	must(t, err)
	if _, err := Find(); err == nil || !strings.Contains(err.Error(), filepath.Dir(exe)) {
		t.Errorf("got error %v, want one that names %s", err, filepath.Dir(exe))
	}
}

// The name comes from a sandbox's record; no name may lead out of the store.
func FuzzKernelName(f *testing.F) {
	for _, seed := range []string{"", ".", "..", "/", "vmlinux-plain-", "a/b", strings.Repeat("x", 300), "\x00"} {
		f.Add(seed)
	}
	root := f.TempDir()
	content := "a file whose name vouches for it"
	sum := sha256.Sum256([]byte(content))
	outside := "outside-" + hex.EncodeToString(sum[:])[:12]
	if err := os.WriteFile(filepath.Join(root, outside), []byte(content), 0o600); err != nil {
		f.Fatal(err)
	}
	f.Add("../../" + outside)
	s := NewStore(&Set{Dir: root}, filepath.Join(root, "store"), func(string) {})
	f.Fuzz(func(t *testing.T, name string) {
		if path, err := s.named("kernels", name); err == nil {
			t.Fatalf("%q gives %s, and the store is empty", name, path)
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
