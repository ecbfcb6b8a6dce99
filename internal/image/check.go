package image

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/store"
)

// headBytes is how much of a disk is hashed before each use: the superblock, the
// group descriptors and the first tables, in about a millisecond. What is damaged
// further in is found by the file system's own checksums.
const headBytes = 1 << 20

// Where an ext4 superblock keeps what is looked at.
const (
	superblock    = 1024
	superMagic    = superblock + 0x38
	superBlocksLo = superblock + 0x04
	superBlocksHi = superblock + 0x150
	superLogBlock = superblock + 0x18
	superState    = superblock + 0x3a
	ext4Magic     = 0xef53
)

// head reads and hashes a disk's first bytes and checks that they are those of a
// cleanly unmounted ext4 of exactly size bytes.
func head(path string, size int64) (string, error) {
	// Opening a FIFO would wait.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", errors.New("its disk is no file")
	}
	if info.Size() != size {
		return "", fmt.Errorf("its disk has %d bytes and should have %d", info.Size(), size)
	}
	b := make([]byte, headBytes)
	if _, err := io.ReadFull(f, b); err != nil {
		return "", err
	}
	le := binary.LittleEndian
	blocks := uint64(le.Uint32(b[superBlocksLo:])) | uint64(le.Uint32(b[superBlocksHi:]))<<32
	logBlock := le.Uint32(b[superLogBlock:])
	switch {
	case le.Uint16(b[superMagic:]) != ext4Magic:
		return "", errors.New("its disk holds no ext4 file system")
	case logBlock > 6 || blocks != uint64(size)>>(10+logBlock):
		return "", errors.New("its file system is not of its disk's size")
	case le.Uint16(b[superState:])&1 == 0:
		return "", errors.New("its file system was not unmounted")
	}
	return fmt.Sprintf("%x", sha256.Sum256(b)), nil
}

// load reads the image in a folder and checks it well enough to boot from. The
// errors are clauses about the image.
func load(d sealed, name, key string) (record, error) {
	var r record
	if err := store.ReadRecord(d.record(), recordSchema, &r); err != nil {
		return r, missing(err, "its record image.json is missing")
	}
	if r.Name != name || shortKey(r.Key) != shortKey(key) || r.SizeBytes < headBytes {
		return r, errors.New("its record is of another image")
	}
	got, err := head(d.disk(), r.SizeBytes)
	if err != nil {
		return r, missing(err, "its disk root.ext4 is missing")
	}
	if got != r.Head {
		return r, errors.New("its disk is not the one that was made")
	}
	for i := range r.Layers {
		if _, err := os.Stat(d.layer(i)); err != nil {
			return r, missing(err, "one of its disks is missing")
		}
	}
	return r, nil
}

// missing says in words that a file is not there, and the rest without its path.
func missing(err error, words string) error {
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New(words)
	}
	return bare(err)
}

func (r record) image(d sealed) Image {
	i := Image{
		Name: r.Name, Key: r.Key, Disk: d.disk(), SizeBytes: max(r.SizeBytes, r.LayerBytes), Check: r.Check,
		Source: r.Source, Created: r.Created, Defaults: r.Defaults,
	}
	for n := range r.Layers {
		i.Layers = append(i.Layers, d.layer(n))
	}
	return i
}
