// Package layer unpacks one tar archive over the root of the running process, as a
// layer of an image.
//
// It trusts nothing in the archive, and relies on the process having made the target
// its root (chroot): every name and link then leads inside. It must never be called
// elsewhere.
package layer

import (
	"archive/tar"
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of one archive.
type Limits struct {
	Entries   int64
	Bytes     int64 // of file content
	Whiteouts bool  // honour .wh. names, as OCI layers use them
}

// Summary is what an archive held.
type Summary struct {
	Entries int64
	Bytes   int64
}

const xattrPrefix = "SCHILY.xattr."

// Apply unpacks the uncompressed tar r over "/". Later entries replace earlier ones.
func Apply(r io.Reader, limits Limits) (Summary, error) {
	a := applier{limits: limits, buf: make([]byte, 1<<20), dirTimes: map[string]time.Time{}, made: map[string]bool{}}
	archive := tar.NewReader(bufio.NewReaderSize(r, 1<<20))
	for {
		h, err := archive.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return a.sum, fmt.Errorf("the archive is damaged after %d entries: %w", a.sum.Entries, err)
		}
		if err := a.count(h); err != nil {
			return a.sum, err
		}
		if err := a.entry(h, archive); err != nil {
			return a.sum, fmt.Errorf("cannot unpack %q: %w", clip(h.Name), bare(err))
		}
	}
	// What follows the end marker is padding; reading it lets the sender finish.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return a.sum, err
	}
	for dir, t := range a.dirTimes {
		setTime(dir, t)
	}
	return a.sum, nil
}

type applier struct {
	limits   Limits
	sum      Summary
	buf      []byte
	dirTimes map[string]time.Time // folders' times are set last: filling them changes them
	made     map[string]bool      // paths this layer has, which its whiteouts spare
}

func (a *applier) count(h *tar.Header) error {
	a.sum.Entries++
	a.sum.Bytes += max(h.Size, 0)
	if a.sum.Entries > a.limits.Entries {
		return fmt.Errorf("the archive has more than %d entries", a.limits.Entries)
	}
	if a.sum.Bytes > a.limits.Bytes || h.Size < 0 {
		return fmt.Errorf("the archive holds more than %d bytes", a.limits.Bytes)
	}
	return nil
}

// entry applies one entry of the archive.
func (a *applier) entry(h *tar.Header, content io.Reader) error {
	name := path.Clean("/" + h.Name)
	if len(name) > unix.PathMax {
		return errors.New("the name is too long")
	}
	dir, base := path.Split(name)
	if a.limits.Whiteouts && strings.HasPrefix(base, ".wh.") {
		return a.whiteout(path.Clean(dir), base)
	}
	if name == "/" {
		return a.finish(name, h)
	}
	if err := os.MkdirAll(path.Clean(dir), 0o755); err != nil {
		return err
	}
	if err := makeRoom(name, h.Typeflag); err != nil {
		return err
	}
	if a.limits.Whiteouts {
		a.keep(name)
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		if err := a.file(name, content); err != nil {
			return err
		}
	case tar.TypeDir:
		if err := os.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	case tar.TypeSymlink:
		if err := os.Symlink(h.Linkname, name); err != nil {
			return err
		}
	case tar.TypeLink:
		return os.Link(path.Clean("/"+h.Linkname), name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		if err := unix.Mknod(name, nodeType[h.Typeflag]|0o600, int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))); err != nil {
			return err
		}
	default:
		return nil // global headers and kinds no system unpacks
	}
	return a.finish(name, h)
}

var nodeType = map[byte]uint32{tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK, tar.TypeFifo: unix.S_IFIFO}

// makeRoom removes what stands at name, unless both are folders.
func makeRoom(name string, kind byte) error {
	info, err := os.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir() && kind == tar.TypeDir:
		return nil
	}
	return os.RemoveAll(name)
}

func (a *applier) file(name string, content io.Reader) error {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(a.fill(f, content), f.Close())
}

// holeSize is the least run of zeroes that becomes a hole: a block of the file system.
const holeSize = 4096

var zeroes [holeSize]byte

// fill writes content to a new file and leaves holes where there are only zeroes: that
// is how the holes of a sparse file arrive here.
func (a *applier) fill(f *os.File, content io.Reader) error {
	var size int64
	for {
		n, readErr := content.Read(a.buf)
		if err := writeParts(f, a.buf[:n], size); err != nil {
			return err
		}
		size += int64(n)
		if readErr == io.EOF {
			return f.Truncate(size)
		}
		if readErr != nil {
			return readErr
		}
	}
}

// writeParts writes to f, at an offset, what of data is no hole.
func writeParts(f *os.File, data []byte, offset int64) error {
	for at := 0; at < len(data); {
		end := at
		for end < len(data) && !isHole(data[end:]) {
			end = min(end+holeSize, len(data))
		}
		if at < end {
			if _, err := f.WriteAt(data[at:end], offset+int64(at)); err != nil {
				return err
			}
		}
		at = end + holeSize
	}
	return nil
}

// isHole says whether data begins with a block of zeroes.
func isHole(data []byte) bool {
	block := data[:min(holeSize, len(data))]
	return bytes.Equal(block, zeroes[:len(block)])
}

// finish gives a made entry its owner, attributes, mode and time, in the order in
// which none undoes another.
func (a *applier) finish(name string, h *tar.Header) error {
	if err := os.Lchown(name, h.Uid, h.Gid); err != nil {
		return err
	}
	for key, value := range h.PAXRecords {
		attr, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok {
			continue
		}
		if err := unix.Lsetxattr(name, attr, []byte(value), 0); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("attribute %s: %w", clip(attr), err)
		}
	}
	if h.Typeflag != tar.TypeSymlink {
		if err := unix.Fchmodat(unix.AT_FDCWD, name, uint32(h.Mode)&0o7777, 0); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeDir {
		a.dirTimes[name] = h.ModTime
		return nil
	}
	return setTime(name, h.ModTime)
}

func setTime(name string, t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return nil // a time no file can have
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

// keep notes that this layer has name and the folders it is in.
func (a *applier) keep(name string) {
	for ; !a.made[name] && name != "/"; name = path.Dir(name) {
		a.made[name] = true
	}
}

// whiteout removes what lower layers have: one name, or all of a folder. What this
// layer has stays, also when the whiteout comes after it (OCI image specification,
// layer.md, Whiteouts).
func (a *applier) whiteout(dir, base string) error {
	if base == ".wh..wh..opq" {
		return a.hideIn(dir)
	}
	name := strings.TrimPrefix(base, ".wh.")
	if name == "" || name == "." || name == ".." {
		return errors.New("a whiteout names nothing")
	}
	return a.hide(path.Join(dir, name))
}

// hide removes what lower layers have at name.
func (a *applier) hide(name string) error {
	if !a.made[name] {
		return os.RemoveAll(name)
	}
	if info, err := os.Lstat(name); err != nil || !info.IsDir() {
		return nil
	}
	return a.hideIn(name)
}

func (a *applier) hideIn(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := a.hide(path.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// bare drops the path that the sentence has named already.
func bare(err error) error {
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

func clip(s string) string {
	if len(s) > 120 {
		return s[:120] + "…"
	}
	return s
}
