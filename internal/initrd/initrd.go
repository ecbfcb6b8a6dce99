// Package initrd writes the initramfs that every machine boots: deckhold, and the
// few nodes and folders that exist before it runs.
//
// It must not depend on what time it is or who builds: the same programs give the
// same bytes.
package initrd

import (
	"fmt"
	"io"
	"maps"
	"slices"
)

// Write writes an uncompressed newc cpio archive. Programs are put into /doz/bin by
// name; "deckhold" must be among them and is the init.
//
// /dev/console and /dev/null must be in the archive: the kernel mounts no devtmpfs
// for an initramfs, and a Go program without them ends before main (its runtime
// opens /dev/null for missing standard descriptors).
func Write(w io.Writer, programs map[string][]byte) error {
	if programs["deckhold"] == nil {
		return fmt.Errorf("an initramfs needs deckhold")
	}
	a := &archive{w: w}
	for _, dir := range []string{"dev", "proc", "sys", "run", "newroot", "mnt", "tmp", "doz", "doz/bin"} {
		a.add(dir, 0o040755, 0, 0, nil)
	}
	a.add("dev/console", 0o020600, 5, 1, nil)
	a.add("dev/null", 0o020666, 1, 3, nil)
	for _, name := range slices.Sorted(maps.Keys(programs)) {
		a.add("doz/bin/"+name, 0o100755, 0, 0, programs[name])
	}
	a.add("init", 0o120777, 0, 0, []byte("doz/bin/deckhold"))
	a.add("TRAILER!!!", 0, 0, 0, nil)
	return a.err
}

// archive writes entries in the kernel's newc format
// (Documentation/driver-api/early-userspace/buffer-format.rst).
type archive struct {
	w   io.Writer
	ino int
	err error
}

func (a *archive) add(name string, mode, major, minor int, data []byte) {
	a.ino++
	head := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0, name)
	a.write([]byte(head))
	a.write(data)
}

// write pads to four bytes.
func (a *archive) write(b []byte) {
	for _, part := range [][]byte{b, make([]byte, (4-len(b)%4)%4)} {
		if a.err == nil {
			_, a.err = a.w.Write(part)
		}
	}
}
