package store

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestOpenChangesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "store")
	s := open(t, dir)
	if names, err := s.Names(); err != nil || len(names) != 0 {
		t.Errorf("a store that is not there has sandboxes %q, %v", names, err)
	}
	if _, err := os.Stat(filepath.Dir(dir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open made %s: %v", filepath.Dir(dir), err)
	}
}

func TestMake(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "store")
	s := open(t, dir)
	for range 2 {
		if err := s.Make(); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{s.Root(), s.EngineDir(), s.ImagesDir(), s.SandboxesDir()} {
		info, err := os.Stat(path)
		if err != nil || !info.IsDir() || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v; want a folder of mode 0700", path, info, err)
		}
	}
	open(t, dir)
	if n, err := s.FreeBytes(); err != nil || n <= 0 {
		t.Errorf("FreeBytes = %d, %v", n, err)
	}
}

func TestMakeAcceptsAnEmptyFolderAndItsOwnRemains(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"host.log", ".hidden"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := open(t, dir).Make(); err != nil {
		t.Error(err)
	}
}

func TestRefusals(t *testing.T) {
	tests := map[string]struct {
		prepare func(t *testing.T, dir string) string // gives the store's path
		want    string
	}{
		"a path that is too long": {func(t *testing.T, dir string) string { return filepath.Join(dir, strings.Repeat("x", 103)) }, "too long"},
		"a file":                  {func(t *testing.T, dir string) string { return write(t, filepath.Join(dir, "file"), "") }, "not a folder"},
		"below a file":            {func(t *testing.T, dir string) string { return write(t, filepath.Join(dir, "file"), "") + "/store" }, "not a directory"},
		"another's folder": {func(t *testing.T, dir string) string {
			return filepath.Dir(write(t, filepath.Join(dir, "thesis.tex"), ""))
		}, "other things (thesis.tex)"},
		"a newer store": {func(t *testing.T, dir string) string {
			return filepath.Dir(write(t, filepath.Join(dir, "store.json"), `{"schema":2}`))
		}, "a newer doz wrote it"},
		"a damaged store": {func(t *testing.T, dir string) string {
			return filepath.Dir(write(t, filepath.Join(dir, "store.json"), `{"sche`))
		}, "damaged"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			dir := test.prepare(t, t.TempDir())
			s, err := Open(dir)
			if err == nil {
				err = s.Make()
			}
			if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got error %v, want one line with: %s", err, test.want)
			}
			if strings.Count(err.Error(), dir) > 1 {
				t.Errorf("the error names the store twice: %v", err)
			}
		})
	}
}

// A store whose folders cannot be made. A file in the way stops root too.
func TestMakeFails(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "images"), "a file")
	err := open(t, dir).Make()
	if err == nil || !strings.HasPrefix(err.Error(), "cannot make store "+dir+": ") {
		t.Errorf("got error %v", err)
	}
	if os.Geteuid() != 0 {
		closed := t.TempDir()
		if err := os.Chmod(closed, 0o500); err != nil {
			t.Fatal(err)
		}
		if err := open(t, closed).Make(); !errors.Is(err, os.ErrPermission) {
			t.Errorf("a read-only folder: got error %v", err)
		}
	}
}

// The longest path is one a socket can be bound to, and not a byte less.
func TestLongestPath(t *testing.T) {
	longest := "/" + strings.Repeat("x", maxSocketPath-len("//host.sock"))
	if _, err := Open(longest); err == nil || strings.Contains(err.Error(), "too long") {
		if err != nil {
			t.Errorf("a path of %d bytes: %v", len(longest), err)
		}
	}
	if _, err := Open(longest + "x"); err == nil || !strings.Contains(err.Error(), "104 bytes") {
		t.Errorf("a path of %d bytes: got error %v", len(longest)+1, err)
	}
}

func TestNames(t *testing.T) {
	s := open(t, t.TempDir())
	if err := s.Make(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"b", "a", ".trash-c"} {
		if err := os.Mkdir(s.Sandbox(name).Dir(), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	got, err := s.Names()
	if diff := cmp.Diff([]string{"a", "b"}, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if got := s.Sandbox("a").BootLog(7); filepath.Base(got) != "000007.log" {
		t.Errorf("BootLog(7) = %s", got)
	}
}

func TestDefault(t *testing.T) {
	for _, test := range []struct{ store, data, home, want string }{
		{"/mine", "/data", "/home/me", "/mine"},
		{"", "/data", "/home/me", "/data/doz"},
		{"", "relative", "/home/me", "/home/me/.local/share/doz"},
		{"", "", "/home/me", "/home/me/.local/share/doz"},
	} {
		t.Setenv("DOZ_STORE", test.store)
		t.Setenv("XDG_DATA_HOME", test.data)
		t.Setenv("HOME", test.home)
		if got, err := Default(); err != nil || got != test.want {
			t.Errorf("Default() = %s, %v; want %s", got, err, test.want)
		}
	}
}

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
