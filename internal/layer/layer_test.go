package layer

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// jobVariable makes the test's program unpack its input over the root named in it.
const jobVariable = "DOZ_TEST_LAYER"

type job struct {
	Root   string
	Limits Limits
}

type outcome struct {
	Sum   Summary
	Error string
}

func TestMain(m *testing.M) {
	if text := os.Getenv(jobVariable); text != "" {
		json.NewEncoder(os.Stdout).Encode(work(text))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// work is what a process that may change its root does.
func work(text string) (o outcome) {
	var j job
	err := json.Unmarshal([]byte(text), &j)
	if err == nil {
		err = errors.Join(unix.Chroot(j.Root), unix.Chdir("/"))
	}
	if err == nil {
		unix.Umask(0)
		o.Sum, err = Apply(os.Stdin, j.Limits)
	}
	if err != nil {
		o.Error = err.Error()
	}
	return o
}

// apply unpacks an archive over root in a process of its own, which has that root.
func apply(t *testing.T, root string, archive []byte, limits Limits) outcome {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text, _ := json.Marshal(job{root, limits})
	cmd := exec.Command(exe)
	// The race detector would have every process wait a second before it ends.
	cmd.Env = append(os.Environ(), jobVariable+"="+string(text), "GORACE=atexit_sleep_ms=0")
	cmd.Stdin = bytes.NewReader(archive)
	cmd.Stderr = os.Stderr
	if !isRoot() {
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		}
	}
	out, err := cmd.Output()
	var o outcome
	if err == nil {
		err = json.Unmarshal(out, &o)
	}
	if err != nil {
		t.Fatalf("the unpacking process failed: %v", err)
	}
	return o
}

func isRoot() bool { return os.Geteuid() == 0 }

var roomy = Limits{Entries: 1000, Bytes: 1 << 20, Whiteouts: true}

// An entry of an archive: its header, and what a file holds.
type entry struct {
	tar.Header
	content string
}

var noon = time.Unix(1_700_000_000, 0)

func file(name, content string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(content)), ModTime: noon}, content}
}

func dir(name string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, ModTime: noon}}
}

func symlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, ModTime: noon}}
}

func hardlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}}
}

func (e entry) mode(mode int64) entry { e.Mode = mode; return e }

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range entries {
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, e.content)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// tree describes everything below a folder.
func tree(t *testing.T, root string) map[string]string {
	t.Helper()
	got := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		name, _ := filepath.Rel(root, path)
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		text := fmt.Sprintf("%o", st.Mode)
		switch info.Mode().Type() {
		case 0:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += " " + string(data)
		case fs.ModeSymlink:
			target, _ := os.Readlink(path)
			text += " " + target
		case fs.ModeDevice, fs.ModeDevice | fs.ModeCharDevice:
			text += fmt.Sprintf(" %d,%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		got[name] = text
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestApply(t *testing.T) {
	tests := map[string]struct {
		layers [][]entry
		want   map[string]string
	}{
		"a plain tree": {
			[][]entry{{dir("./"), dir("etc/").mode(0o750), file("etc/passwd", "root").mode(0o600), file("empty", "")}},
			map[string]string{"etc": "40750", "etc/passwd": "100600 root", "empty": "100644 "},
		},
		"links": {
			[][]entry{{file("a", "A"), hardlink("b", "a"), hardlink("c", "/b"), symlink("s", "a"), symlink("dangling", "nowhere")}},
			map[string]string{"a": "100644 A", "b": "100644 A", "c": "100644 A", "s": "120777 a", "dangling": "120777 nowhere"},
		},
		"a hard link to a link is one too": {
			[][]entry{{symlink("s", "nowhere"), hardlink("h", "s")}},
			map[string]string{"s": "120777 nowhere", "h": "120777 nowhere"},
		},
		"absolute names and dots lead inside": {
			[][]entry{{file("/abs", "1"), file("../../up", "2"), file("a/../../b/../c", "3"), file("./././d", "4")}},
			map[string]string{"abs": "100644 1", "up": "100644 2", "c": "100644 3", "d": "100644 4"},
		},
		"parents that are not in the archive": {
			[][]entry{{file("a/b/c", "x")}},
			map[string]string{"a": "40755", "a/b": "40755", "a/b/c": "100644 x"},
		},
		"set-user-id and sticky": {
			[][]entry{{file("su", "").mode(0o4755), file("sg", "").mode(0o2755), dir("tmp").mode(0o1777)}},
			map[string]string{"su": "104755 ", "sg": "102755 ", "tmp": "41777"},
		},
		"a pipe": {
			[][]entry{{{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o622}}}},
			map[string]string{"fifo": "10622"},
		},
		"later entries replace earlier ones": {
			[][]entry{
				{file("file", "old"), dir("dir"), file("dir/in", ""), symlink("link", "file"), dir("kept"), file("kept/in", "")},
				{file("file", "new"), file("dir", "now a file"), file("link", "no link"), dir("kept").mode(0o700)},
				{dir("file")},
			},
			map[string]string{"file": "40755", "dir": "100644 now a file", "link": "100644 no link", "kept": "40700", "kept/in": "100644 "},
		},
		"a folder does not replace the link's target": {
			[][]entry{{dir("usr/bin"), file("usr/bin/sh", "sh"), symlink("bin", "usr/bin")}, {file("bin/ls", "ls")}, {dir("bin")}},
			map[string]string{"usr": "40755", "usr/bin": "40755", "usr/bin/sh": "100644 sh", "usr/bin/ls": "100644 ls", "bin": "40755"},
		},
		"whiteouts": {
			[][]entry{
				{file("a", ""), dir("d"), file("d/x", ""), file("d/y", ""), symlink("l", "d")},
				{file(".wh.a", ""), file("d/.wh.x", ""), file(".wh.l", ""), file("d/.wh.none", ""), file("none/.wh.x", "")},
			},
			map[string]string{"d": "40755", "d/y": "100644 "},
		},
		"a whiteout spares its own layer": {
			[][]entry{{file("a", "old"), file("d/old", "")}, {file("a", "new"), file(".wh.a", ""), file("d/new", ""), file(".wh.d", "")}},
			map[string]string{"a": "100644 new", "d": "40755", "d/new": "100644 "},
		},
		"opaque": {
			[][]entry{{file("d/old", ""), file("d/sub/old", "")}, {dir("d"), file("d/.wh..wh..opq", ""), file("d/new", "")}},
			map[string]string{"d": "40755", "d/new": "100644 "},
		},
		"opaque, after what it spares": {
			[][]entry{{file("d/old", ""), file("d/sub/old", "")}, {file("d/sub/new", ""), file("d/.wh..wh..opq", ""), file("e/.wh..wh..opq", "")}},
			map[string]string{"d": "40755", "d/sub": "40755", "d/sub/new": "100644 "},
		},
		"kinds nobody unpacks": {
			[][]entry{{{Header: tar.Header{Typeflag: 'V', Name: "volume"}}, file("a", "")}},
			map[string]string{"a": "100644 "},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for _, entries := range test.layers {
				if o := apply(t, root, archive(t, entries...), roomy); o.Error != "" {
					t.Fatal(o.Error)
				}
			}
			if diff := cmp.Diff(test.want, tree(t, root)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A root file system's own tar has no whiteouts: the names are names.
func TestWhiteoutsAreOnlyHonouredWhenAsked(t *testing.T) {
	root := t.TempDir()
	o := apply(t, root, archive(t, file("a", "A"), file(".wh.a", "W")), Limits{Entries: 2, Bytes: 2})
	if o.Error != "" || o.Sum != (Summary{Entries: 2, Bytes: 2}) {
		t.Errorf("got %+v", o)
	}
	if diff := cmp.Diff(map[string]string{"a": "100644 A", ".wh.a": "100644 W"}, tree(t, root)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestHolesStayHoles: what is only zeroes takes no room, and reads as it was.
func TestHolesStayHoles(t *testing.T) {
	const size = 3 << 20
	content := make([]byte, size)
	for at := size / 3; at < size; at += 700_001 {
		copy(content[at:], "something")
	}
	root := t.TempDir()
	limits := Limits{Entries: 9, Bytes: 4 * size}
	if o := apply(t, root, archive(t, file("a", string(content)), file("zeroes", string(make([]byte, size)))), limits); o.Error != "" {
		t.Fatal(o.Error)
	}
	for name, want := range map[string][]byte{"a": content, "zeroes": make([]byte, size)} {
		got, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s does not read as it was (%v)", name, err)
		}
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(root, name), &st); err != nil || st.Blocks*512 > size/8 {
			t.Errorf("%s takes %d bytes of the disk (%v)", name, st.Blocks*512, err)
		}
	}
}

func TestHardLinksShareOneFile(t *testing.T) {
	root := t.TempDir()
	apply(t, root, archive(t, file("a", "A"), hardlink("b", "a")), roomy)
	a, errA := os.Stat(filepath.Join(root, "a"))
	b, errB := os.Stat(filepath.Join(root, "b"))
	if errA != nil || errB != nil || !os.SameFile(a, b) {
		t.Errorf("a and b are two files (%v, %v)", errA, errB)
	}
}

func TestTimesOfFoldersOutliveTheirFilling(t *testing.T) {
	root := t.TempDir()
	apply(t, root, archive(t, dir("d"), file("d/f", "x"), symlink("d/s", "f")), roomy)
	for _, name := range []string{"d", "d/f", "d/s"} {
		info, err := os.Lstat(filepath.Join(root, name))
		if err != nil || !info.ModTime().Equal(noon) {
			t.Errorf("%s: %v, time %v, want %v", name, err, info.ModTime(), noon)
		}
	}
}

// Owners and devices need root. Anyone else is refused: an image without them would
// be another image.
func TestOwnersAndDevices(t *testing.T) {
	null := entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "dev/null", Mode: 0o666, Devmajor: 1, Devminor: 3}}
	disk := entry{Header: tar.Header{Typeflag: tar.TypeBlock, Name: "dev/vda", Mode: 0o660, Devmajor: 254, Devminor: 300}}
	owned := file("owned", "").mode(0o4711)
	owned.Uid, owned.Gid = 1234, 70000
	link := symlink("link", "nowhere")
	link.Uid = 99
	root := t.TempDir()
	if !isRoot() {
		for _, e := range []entry{null, disk, owned} {
			if o := apply(t, root, archive(t, e), roomy); !strings.HasPrefix(o.Error, "cannot unpack ") {
				t.Errorf("%s: got error %q", e.Name, o.Error)
			}
		}
		return
	}
	if o := apply(t, root, archive(t, null, disk, owned, link), roomy); o.Error != "" {
		t.Fatal(o.Error)
	}
	want := map[string]string{"dev": "40755", "dev/null": "20666 1,3", "dev/vda": "60660 254,300", "owned": "104711 ", "link": "120777 nowhere"}
	if diff := cmp.Diff(want, tree(t, root)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for name, want := range map[string][2]uint32{"owned": {1234, 70000}, "link": {99, 0}} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(root, name), &st); err != nil || st.Uid != want[0] || st.Gid != want[1] {
			t.Errorf("%s is %d:%d's, %v; want %v", name, st.Uid, st.Gid, err, want)
		}
	}
}

func TestAttributes(t *testing.T) {
	root := t.TempDir()
	// What this file system keeps, a file of the archive has too.
	keeps := unix.Setxattr(root, "user.doz", []byte("x"), 0)
	e := file("f", "").mode(0o400)
	e.PAXRecords = map[string]string{xattrPrefix + "user.doz": "a\x01b", "SCHILY.fflags": "ignored"}
	if o := apply(t, root, archive(t, e), roomy); o.Error != "" {
		t.Fatal(o.Error)
	}
	value := make([]byte, 16)
	n, err := unix.Lgetxattr(filepath.Join(root, "f"), "user.doz", value)
	if keeps == nil && (err != nil || string(value[:n]) != "a\x01b") {
		t.Errorf("got %q, %v", value[:max(n, 0)], err)
	}
	bad := file("g", "")
	bad.PAXRecords = map[string]string{xattrPrefix + "no such kind": "x"}
	if o := apply(t, root, archive(t, bad), roomy); keeps == nil && o.Error != "" && !strings.Contains(o.Error, "attribute no such kind") {
		t.Errorf("got error %q", o.Error)
	}
}

func TestRefusals(t *testing.T) {
	whole := archive(t, file("a", strings.Repeat("x", 600)), file("b", ""))
	for name, test := range map[string]struct {
		archive []byte
		limits  Limits
		want    string
	}{
		"too many entries":       {whole, Limits{Entries: 1, Bytes: 1000}, "more than 1 entries"},
		"too many bytes":         {whole, Limits{Entries: 10, Bytes: 599}, "more than 599 bytes"},
		"cut in a file":          {whole[:1000], roomy, `cannot unpack "a": unexpected EOF`},
		"cut in a header":        {whole[:1600], roomy, "damaged after 1 entries"},
		"no archive":             {bytes.Repeat([]byte("junk"), 1000), roomy, "damaged after 0 entries"},
		"a link to nothing":      {archive(t, hardlink("a", "none")), roomy, `cannot unpack "a": no such file`},
		"a link to itself":       {archive(t, file("a", ""), hardlink("a", "a")), roomy, `cannot unpack "a": no such file`},
		"a file as folder":       {archive(t, file("a", ""), file("a/b", "")), roomy, `cannot unpack "a/b": not a directory`},
		"a loop of links":        {archive(t, symlink("a", "b"), symlink("b", "a"), file("a/c", "")), roomy, `cannot unpack "a/c": `},
		"a name that's too long": {archive(t, file(strings.Repeat("x", 300), "")), roomy, "file name too long"},
		"a path that's too long": {archive(t, file(strings.Repeat("x/", 3000)+"y", "")), roomy, "the name is too long"},
		"a whiteout of nothing":  {archive(t, file("d/.wh.", "")), roomy, "names nothing"},
		"a whiteout of ..":       {archive(t, file("d/.wh...", "")), roomy, "names nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			o := apply(t, t.TempDir(), test.archive, test.limits)
			if !strings.Contains(o.Error, test.want) || strings.Contains(o.Error, "\n") {
				t.Errorf("got error %q, want %q", o.Error, test.want)
			}
		})
	}
}

// outside is a folder with a root in it and things an archive may want to reach.
func outside(t *testing.T) (base, root string) {
	t.Helper()
	base = t.TempDir()
	root = filepath.Join(base, "root")
	for _, err := range []error{
		os.Mkdir(root, 0o755), os.Mkdir(filepath.Join(base, "etc"), 0o700),
		os.WriteFile(filepath.Join(base, "etc", "secret"), []byte("untouched"), 0o600),
		os.WriteFile(filepath.Join(base, "file"), []byte("untouched"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return base, root
}

// untouched fails when anything but the root has changed.
func untouched(t *testing.T, base string) {
	t.Helper()
	got := tree(t, base)
	for name := range got {
		if name == "root" || strings.HasPrefix(name, "root/") {
			delete(got, name)
		}
	}
	want := map[string]string{"etc": "40700", "etc/secret": "100600 untouched", "file": "100600 untouched"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the archive reached what is outside (-want +got):\n%s", diff)
	}
}

// escapes are archives that want to change what is outside. base is their root's
// parent.
func escapes(base string) [][]entry {
	return [][]entry{
		{symlink("out", ".."), file("out/file", "reached")},
		{symlink("out", "../etc"), file("out/secret", "reached"), file("out/more", "reached")},
		{symlink("out", base), file("out/file", "reached")},
		{symlink("out", filepath.Join(base, "file")), file("out", "reached")},
		{symlink("a", ".."), symlink("b", "a/.."), dir("b/etc"), file("b/etc/secret", "reached")},
		{hardlink("h", "../file"), file("h", "reached")},
		{hardlink("h", filepath.Join(base, "file"))},
		{symlink("out", "../file"), hardlink("h", "out"), file("h", "reached")},
		{symlink("out", ".."), file("out/.wh.file", ""), file("out/etc/.wh..wh..opq", "")},
		{file("../.wh.file", ""), file("../etc/.wh..wh..opq", "")},
		{symlink("out", "../etc"), dir("out").mode(0o777)},
		{symlink("out", "../etc").mode(0o777), dir("./").mode(0o700)},
	}
}

func TestNothingOutsideIsReached(t *testing.T) {
	for i := range escapes("") {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			base, root := outside(t)
			// Many fail, for what they want to reach does not exist inside.
			apply(t, root, archive(t, escapes(base)[i]...), roomy)
			untouched(t, base)
		})
	}
}

func FuzzApply(f *testing.F) {
	for _, entries := range escapes("/tmp") {
		f.Add(archive(f, entries...))
	}
	f.Add(archive(f, entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3}}, hardlink("b", "null")))
	f.Add(archive(f, dir("d"), file("d/f", "x"), file("d/.wh.f", ""))[:1700])
	f.Fuzz(func(t *testing.T, data []byte) {
		base, root := outside(t)
		apply(t, root, data, roomy)
		untouched(t, base)
	})
}
