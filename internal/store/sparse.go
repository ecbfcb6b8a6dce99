package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Clone makes dst a copy of src that takes no more of the disk: it shares the blocks
// where the file system can (btrfs, XFS, bcachefs), and copies what is not a hole
// elsewhere. dst must not exist. The copy is not durable before it is synced.
func Clone(dst, src string) (err error) {
	in, err := os.Open(src)
	if err != nil {
		return fmt.Errorf("cannot copy %s: %w", filepath.Base(src), plain(err))
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("cannot copy %s: %w", filepath.Base(src), plain(err))
	}
	defer func() {
		if closed := out.Close(); err == nil {
			err = closed
		}
		if err != nil {
			os.Remove(dst)
			err = fmt.Errorf("cannot copy %s: %w", filepath.Base(src), plain(err))
		}
	}()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		return nil
	}
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if err := out.Truncate(info.Size()); err != nil {
		return err
	}
	return extents(in, info.Size(), func(from, to int64) error {
		if _, err := in.Seek(from, io.SeekStart); err != nil {
			return err
		}
		if _, err := out.Seek(from, io.SeekStart); err != nil {
			return err
		}
		_, err := io.CopyN(out, in, to-from) // within the kernel, where it can
		return err
	})
}

// extents calls each with the parts of a file that are not holes.
func extents(f *os.File, size int64, each func(from, to int64) error) error {
	for at := int64(0); at < size; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // nothing but a hole
		}
		if err != nil {
			return err
		}
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if err := each(from, to); err != nil {
			return err
		}
		at = to
	}
	return nil
}

// sumBlock is what Sum looks at at once, in bytes. Holes and zeroes count the same, so
// that a copy has the sum of what it was copied from.
const sumBlock = 64 << 10

var (
	sumTable = crc32.MakeTable(crc32.Castagnoli)
	noBytes  = make([]byte, sumBlock)
)

// Sum is a checksum of what a sparse file holds: it finds what a disk or a careless
// hand has done to it, and is no defence against malice.
func Sum(path string) (uint32, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	var sum uint32
	buf := make([]byte, sumBlock)
	next := int64(0) // the first block that has not been looked at
	err = extents(f, info.Size(), func(from, to int64) error {
		for at := max(next, from/sumBlock*sumBlock); at < to; at += sumBlock {
			n, err := f.ReadAt(buf, at)
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			next = at + sumBlock
			if block := buf[:n]; !bytes.Equal(block, noBytes[:n]) {
				var where [8]byte
				binary.BigEndian.PutUint64(where[:], uint64(at))
				sum = crc32.Update(crc32.Update(sum, sumTable, where[:]), sumTable, block)
			}
		}
		return nil
	})
	return sum, err
}
