package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"dozable.com/doz/internal/guest"
)

func TestWithHosts(t *testing.T) {
	const localhost = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	for name, test := range map[string]struct{ current, want string }{
		"nothing":             {"", localhost + "127.0.1.1\ta1\n"},
		"all of it":           {"127.0.0.1 localhost a1\n", "127.0.0.1 localhost a1\n"},
		"localhost only":      {"127.0.0.1 localhost\n", "127.0.0.1 localhost\n127.0.1.1\ta1\n"},
		"no newline at last":  {"127.0.0.1 localhost", "127.0.0.1 localhost\n127.0.1.1\ta1\n"},
		"only in a comment":   {"127.0.0.1 localhost # a1\n#127.0.1.1 a1\n", "127.0.0.1 localhost # a1\n#127.0.1.1 a1\n127.0.1.1\ta1\n"},
		"another's beginning": {"127.0.0.1 localhost\n10.0.0.1 a11\n", "127.0.0.1 localhost\n10.0.0.1 a11\n127.0.1.1\ta1\n"},
		"the user's own":      {"10.0.0.1 db\n", "10.0.0.1 db\n" + localhost + "127.0.1.1\ta1\n"},
	} {
		if diff := cmp.Diff(test.want, string(withHosts([]byte(test.current), "a1"))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func FuzzWithHosts(f *testing.F) {
	for _, seed := range []string{"", "127.0.0.1 localhost", "#", "a1 a1\n\x00", " \t\n"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, current string) {
		once := string(withHosts([]byte(current), "a1"))
		if !strings.HasPrefix(once, current) {
			t.Fatalf("%q became %q", current, once)
		}
		if twice := string(withHosts([]byte(once), "a1")); twice != once {
			t.Fatalf("the next start makes %q of %q", twice, once)
		}
	})
}

func wantCode(t *testing.T, err error, code string) {
	t.Helper()
	var e *guest.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("got error %v, want one of code %s", err, code)
	}
}

func TestLookupProgram(t *testing.T) {
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{"first/tool": 0o644, "second/tool": 0o755, "second/plain": 0o644, "work/script": 0o700} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, mode)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "first", "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	path := dir + "/none:" + dir + "/first:" + dir + "/second"
	for _, test := range []struct{ name, path, want string }{
		{"tool", path, "second/tool"}, // the one that is not executable is passed over
		{"./script", path, "work/script"},
		{"../second/tool", path, "second/tool"},
		{dir + "/second/tool", "", "second/tool"},
		{"script", ":" + path, "work/script"}, // an empty entry is the folder it runs in
		{"tool", "../second", "second/tool"},
	} {
		got, err := lookupProgram(test.name, test.path, filepath.Join(dir, "work"))
		if err != nil || got != filepath.Join(dir, test.want) {
			t.Errorf("%s on %s is %s, %v; want %s", test.name, test.path, got, err, test.want)
		}
	}
	for name, code := range map[string]string{
		"none": guest.CodeNotFound, "": guest.CodeNotFound, "./none": guest.CodeNotFound, dir: guest.CodeNotFound,
		"folder": guest.CodeNotFound, "plain": guest.CodeNotAllowed, dir + "/second/plain": guest.CodeNotAllowed, "script": guest.CodeNotFound,
	} {
		_, err := lookupProgram(name, path, filepath.Join(dir, "work"))
		wantCode(t, err, code)
	}
}

func TestLookupUser(t *testing.T) {
	for range 2 { // the second time from memory
		root, err := lookupUser("")
		if err != nil || root.uid != 0 || root.name != "root" {
			t.Errorf("nobody in particular is %+v, %v", root, err)
		}
		for spec, want := range map[string][2]uint32{"0": {0, 0}, "root": {0, 0}, "4000000:4000001": {4000000, 4000001}, ":12": {0, 12}, "4000000": {4000000, 0}} {
			if u, err := lookupUser(spec); err != nil || u.uid != want[0] || u.gid != want[1] {
				t.Errorf("%q is %+v, %v", spec, u, err)
			}
		}
		for _, spec := range []string{"no such user", "root:no such group", "-1", "4294967296"} {
			_, err := lookupUser(spec)
			wantCode(t, err, guest.CodeNotFound)
		}
	}
	stranger := user{name: "4000000", uid: 4000000, home: "/nonexistent"}
	if stranger.workdir() != "/" || stranger.credential() == nil {
		t.Errorf("%+v works in %s with %+v", stranger, stranger.workdir(), stranger.credential())
	}
}

func TestFind(t *testing.T) {
	file := filepath.Join(t.TempDir(), "group")
	if err := os.WriteFile(file, []byte("\nbroken\nmany:x:5:"+strings.Repeat("member,", 20_000)+"\nlast:x:6:me"), 0o644); err != nil {
		t.Fatal(err)
	}
	var id uint32
	last := func(f []string) bool { return len(f) >= 3 && f[0] == "last" }
	if !find(file, last, func(f []string) { id = number(f[2]) }) || id != 6 {
		t.Errorf("the line after a long one has number %d", id)
	}
	if find(file+"none", last, nil) || number("-1") != 0 || number("x") != 0 {
		t.Error("what is not there was found")
	}
}

func TestEnvironment(t *testing.T) {
	m := &machine{}
	zone := "Europe/Berlin"
	m.zone.Store(&zone)
	got, path := m.environment(guest.ExecRequest{Env: map[string]string{
		"PATH": "/opt", "A": "1", "EMPTY": "", "": "x", "B=C": "x", "NUL": "a\x00b", "N\x00": "x",
	}}, user{name: "me", home: "/home/me"})
	want := []string{"A=1", "EMPTY=", "HOME=/home/me", "LANG=C.UTF-8", "LOGNAME=me", "PATH=/opt", "TERM=dumb", "TZ=Europe/Berlin", "USER=me"}
	if diff := cmp.Diff(want, got); diff != "" || path != "/opt" {
		t.Errorf("path %s (-want +got):\n%s", path, diff)
	}
}

func TestExitStatus(t *testing.T) {
	for status, want := range map[syscall.WaitStatus]guest.ExitStatus{
		0: {}, 3 << 8: {Code: 3}, 255 << 8: {Code: 255},
		9: {Code: 137, Signal: "KILL"}, 15: {Code: 143, Signal: "TERM"}, 11 | 0x80: {Code: 139, Signal: "SEGV"}, 40: {Code: 168},
	} {
		if diff := cmp.Diff(want, exitStatus(status, false)); diff != "" {
			t.Errorf("status %#x (-want +got):\n%s", int(status), diff)
		}
	}
}
