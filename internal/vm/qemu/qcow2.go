//go:build linux

package qemu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// A qcow2 image of version 3 with nothing allocated
// (https://www.qemu.org/docs/master/interop/qcow2.html): four parts, a cluster or
// more each.
const (
	clusterBits = 16
	cluster     = 1 << clusterBits
	// One L2 table covers this much of the disk.
	l2Covers = cluster / 8 * cluster
	sector   = 512
	maxDisk  = 64 << 40
)

// CreateDisk implements vm.Engine.
func (e *Engine) CreateDisk(_ context.Context, path string, size int64) (err error) {
	if size <= 0 || size > maxDisk {
		return fmt.Errorf("cannot make disk %s: its size must be between 1 byte and 64 TiB, not %d bytes", filepath.Base(path), size)
	}
	size = (size + sector - 1) / sector * sector
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("cannot make disk %s: %w", filepath.Base(path), err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(path)
			var known *fs.PathError // which names the disk again, by its path
			if errors.As(err, &known) {
				err = known.Err
			}
			err = fmt.Errorf("cannot make disk %s: %w", filepath.Base(path), err)
		}
	}()
	if err := writeEmpty(f, size); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// writeEmpty writes header, refcount table, one refcount block and L1 table.
func writeEmpty(f *os.File, size int64) error {
	l1Entries := (size + l2Covers - 1) / l2Covers
	l1Clusters := (l1Entries*8 + cluster - 1) / cluster
	const refTable, refBlock, l1 = 1 * cluster, 2 * cluster, 3 * cluster
	used := 3 + l1Clusters

	header := make([]byte, 104)
	put32 := func(at int, v uint32) { binary.BigEndian.PutUint32(header[at:], v) }
	put64 := func(at int, v int64) { binary.BigEndian.PutUint64(header[at:], uint64(v)) }
	put32(0, 0x514649fb) // "QFI\xfb"
	put32(4, 3)
	put32(20, clusterBits)
	put64(24, size)
	put32(36, uint32(l1Entries))
	put64(40, l1)
	put64(48, refTable)
	put32(56, 1)    // clusters of the refcount table
	put32(96, 4)    // refcounts of 16 bits
	put32(100, 104) // the header's length
	// No extensions, and no name of what lies under it: QEMU is told the chain when it
	// opens the disk, and files move.
	header = append(header, make([]byte, 8)...)
	refs := make([]byte, used*2)
	for i := range used {
		binary.BigEndian.PutUint16(refs[i*2:], 1)
	}
	table := make([]byte, 8)
	binary.BigEndian.PutUint64(table, refBlock)
	for _, part := range []struct {
		at   int64
		data []byte
	}{{0, header}, {refTable, table}, {refBlock, refs}} {
		if _, err := f.WriteAt(part.data, part.at); err != nil {
			return err
		}
	}
	return f.Truncate(used * cluster)
}
