// Package store knows every name that doz keeps on disk and how a record gets
// there whole. It must not know what the records mean.
//
// A store is one folder, 0700, with one host:
//
//	store.json              its schema
//	host.lock               flock held by the host for its whole life
//	host.sock               the host's socket, 0600
//	host.log                what the host has to say
//	engine/                 what the engine remembers of this computer
//	kernels/ tools/         copies of doz's own parts, named by their sha256
//	images/<name>/          one folder an image
//	sandboxes/<name>/       one folder a sandbox
//	sandboxes/.trash-*      removed sandboxes on their way out
package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Schema of a store's layout. A store with a newer one is refused.
const Schema = 1

// maxSocketPath is the longest path a Unix socket can be bound to on every platform.
const maxSocketPath = 103

// Store is a store's folder. Its methods only name things and make folders.
type Store struct{ root string }

// Default is where a store is when nobody says otherwise.
func Default() (string, error) {
	if dir := os.Getenv("DOZ_STORE"); dir != "" {
		return dir, nil
	}
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "doz"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("cannot tell where the store is: %w", err)
	}
	return filepath.Join(home, ".local", "share", "doz"), nil
}

// Open names the store at dir, which need not exist yet, and checks what can be
// checked without changing anything: the path's length, what stands there, and the
// schema.
func Open(dir string) (*Store, error) {
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("cannot use store %q: %w", dir, err)
	}
	s := &Store{root: root}
	if n := len(s.Socket()); n > maxSocketPath {
		return nil, fmt.Errorf("store path %s is too long: its socket's path has %d bytes, and %d is the most", root, n, maxSocketPath)
	}
	info, err := os.Stat(root)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s, nil
	case err != nil:
		return nil, fmt.Errorf("cannot use store %s: %w", root, plain(err))
	case !info.IsDir():
		return nil, fmt.Errorf("cannot use store %s: it is not a folder", root)
	}
	var r storeRecord
	switch err := ReadRecord(s.recordFile(), Schema, &r); {
	case err == nil, errors.Is(err, fs.ErrNotExist):
		return s, nil
	default:
		return nil, fmt.Errorf("cannot use store %s: %w", root, err)
	}
}

type storeRecord struct {
	Schema int `json:"schema"`
}

// Make creates the store's folders. It is idempotent, and refuses a non-empty
// folder that is no store.
func (s *Store) Make() error {
	if _, err := os.Stat(s.recordFile()); errors.Is(err, fs.ErrNotExist) {
		if others := s.strangers(); len(others) > 0 {
			return fmt.Errorf("cannot use %s as a store: it holds other things (%s)", s.root, others[0])
		}
	}
	for _, dir := range []string{s.root, s.EngineDir(), s.ImagesDir(), s.SandboxesDir(), s.TemplatesDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("cannot make store %s: %w", s.root, plain(err))
		}
	}
	if _, err := os.Stat(s.recordFile()); err == nil {
		return nil
	}
	if err := WriteRecord(s.recordFile(), storeRecord{Schema}); err != nil {
		return fmt.Errorf("cannot make store %s: %w", s.root, plain(err))
	}
	return nil
}

// strangers are entries of the folder that a store does not have.
func (s *Store) strangers() []string {
	entries, _ := os.ReadDir(s.root)
	var names []string
	for _, e := range entries {
		switch e.Name() {
		case "host.lock", "host.sock", "host.log", "engine", "kernels", "tools", "images", "sandboxes", "templates":
		default:
			if !strings.HasPrefix(e.Name(), ".") {
				names = append(names, e.Name())
			}
		}
	}
	return names
}

// The store's own names.

func (s *Store) Root() string         { return s.root }
func (s *Store) recordFile() string   { return filepath.Join(s.root, "store.json") }
func (s *Store) Lock() string         { return filepath.Join(s.root, "host.lock") }
func (s *Store) Socket() string       { return filepath.Join(s.root, "host.sock") }
func (s *Store) Log() string          { return filepath.Join(s.root, "host.log") }
func (s *Store) EngineDir() string    { return filepath.Join(s.root, "engine") }
func (s *Store) ImagesDir() string    { return filepath.Join(s.root, "images") }
func (s *Store) SandboxesDir() string { return filepath.Join(s.root, "sandboxes") }
func (s *Store) TemplatesDir() string { return filepath.Join(s.root, "templates") }

// Sandbox names what one sandbox keeps.
func (s *Store) Sandbox(name string) Sandbox { return Sandbox(filepath.Join(s.SandboxesDir(), name)) }

// Sandbox is a sandbox's folder.
type Sandbox string

func (d Sandbox) Dir() string      { return string(d) }
func (d Sandbox) Record() string   { return filepath.Join(string(d), "doz.json") }
func (d Sandbox) Memory() string   { return filepath.Join(string(d), "memory") }
func (d Sandbox) State() string    { return filepath.Join(string(d), "state") }   // of a saved machine's devices
func (d Sandbox) Machine() string  { return filepath.Join(string(d), "machine") } // sockets of the running machine
func (d Sandbox) BootsDir() string { return filepath.Join(string(d), "boots") }

// FirstDisk is the file of a new sandbox's root disk; LaterDisk names one that was put
// over others, id being hex digits.
const FirstDisk = "root.qcow2"

func LaterDisk(id string) string { return "root-" + id + ".qcow2" }

// IsDisk says whether a file's name is one of those.
func IsDisk(name string) bool {
	return name == FirstDisk || strings.HasPrefix(name, "root-") && strings.HasSuffix(name, ".qcow2")
}

// File is a file of the folder.
func (d Sandbox) File(name string) string { return filepath.Join(string(d), filepath.Base(name)) }

// ScreensDir holds what sessions showed when the sandbox came to rest.
func (d Sandbox) ScreensDir() string { return filepath.Join(string(d), "screens") }
func (d Sandbox) Screen(session string) string {
	return filepath.Join(d.ScreensDir(), filepath.Base(session)+".json")
}

// PointsDir holds the restore points; Point is the folder of one.
func (d Sandbox) PointsDir() string { return filepath.Join(string(d), "points") }
func (d Sandbox) Point(id string) Point {
	return Point(filepath.Join(d.PointsDir(), filepath.Base(id)))
}

// Point is a restore point's folder. Its disks are the sandbox's.
type Point string

func (p Point) Dir() string    { return string(p) }
func (p Point) Record() string { return filepath.Join(string(p), "point.json") }
func (p Point) Memory() string { return filepath.Join(string(p), "memory") }
func (p Point) State() string  { return filepath.Join(string(p), "state") }

// Template names what one boot template keeps.
func (s *Store) Template(key string) Template {
	return Template(filepath.Join(s.TemplatesDir(), filepath.Base(key)))
}

// Template is a boot template's folder.
type Template string

func (t Template) Dir() string     { return string(t) }
func (t Template) Record() string  { return filepath.Join(string(t), "template.json") }
func (t Template) Memory() string  { return filepath.Join(string(t), "memory") }
func (t Template) State() string   { return filepath.Join(string(t), "state") }
func (t Template) Machine() string { return filepath.Join(string(t), "machine") } // while it is made
func (t Template) Disk() string    { return filepath.Join(string(t), "disk") }    // likewise

// BootLog and BootRecord are of the boot with that running number.
func (d Sandbox) BootLog(n int) string {
	return filepath.Join(d.BootsDir(), fmt.Sprintf("%06d.log", n))
}
func (d Sandbox) BootRecord(n int) string {
	return filepath.Join(d.BootsDir(), fmt.Sprintf("%06d.json", n))
}

// Names lists the sandboxes' folders, sorted, the unreadable ones too.
func (s *Store) Names() ([]string, error) {
	entries, err := os.ReadDir(s.SandboxesDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot list sandboxes: %w", plain(err))
	}
	var names []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// FreeBytes is the room left on the store's disk for this user.
func (s *Store) FreeBytes() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(s.root, &st); err != nil {
		return 0, fmt.Errorf("cannot measure the disk of store %s: %w", s.root, err)
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// plain drops the operation and path that *fs.PathError repeats: our sentence has
// already named the object.
func plain(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	var le *os.LinkError
	if errors.As(err, &le) {
		return le.Err
	}
	return err
}
