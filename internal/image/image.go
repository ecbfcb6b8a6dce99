// Package image makes images of what people bring (a rootfs tar, an OCI layout or
// archive, a docker archive) and keeps them: an image is a sealed, read-only disk
// with an ext4 file system that sandboxes are copy-on-write children of.
//
// The disk is written by Linux itself, in a throw-away machine, so that owners,
// attributes, links and devices come out right and a hostile archive meets nothing
// of this computer. The host only decompresses and hashes. This package must not
// mount or write file systems itself, must not unpack an archive's entries on the
// host, and must not know what sandboxes are: callers tell it which images are in
// use.
package image

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"time"

	"dozable.com/doz/internal/api"
)

// formatVersion is part of every image's key. Raise it when the same source would
// become another disk: other options of the file system, another way to unpack.
const formatVersion = 1

// Image is an image ready to be used.
type Image struct {
	Name      string
	Key       string   // 64 hex digits: what it was made of
	Disk      string   // path of the read-only raw disk
	Layers    []string // overlays over it that do not change, the uppermost first: a template's
	Check     bool     // they were kept from under a running system
	SizeBytes int64    // of the disk, as a guest sees it
	Source    Kind
	Created   time.Time
	Defaults  Defaults
}

// Defaults are what an image says about how programs in it are to be run.
type Defaults struct {
	Env       []string `json:"env,omitempty"` // "NAME=value"
	User      string   `json:"user,omitempty"`
	Workdir   string   `json:"workdir,omitempty"`
	MemoryMiB int      `json:"memoryMiB,omitempty"` // 0 is the program's own default
}

// recordSchema is the schema of image.json and current.json.
const recordSchema = 1

// record is image.json, beside the disk.
type record struct {
	Schema    int       `json:"schema"`
	Name      string    `json:"name"`
	Key       string    `json:"key"`
	Created   time.Time `json:"created"`
	Source    Kind      `json:"source"`
	Digest    string    `json:"digest"`    // of the source
	SizeBytes int64     `json:"sizeBytes"` // of the disk
	Head      string    `json:"head"`      // sha256 of the disk's first headBytes
	Entries   int64     `json:"entries"`   // of all layers
	Bytes     int64     `json:"bytes"`     // of file content, of all layers
	Defaults  Defaults  `json:"defaults"`
	// A template's, over the disk.
	Layers     int   `json:"layers,omitempty"`
	LayerBytes int64 `json:"layerBytes,omitempty"` // the size they give the disk
	Check      bool  `json:"check,omitempty"`
}

// pointer is current.json: which key an image's name means now.
type pointer struct {
	Schema int    `json:"schema"`
	Key    string `json:"key"`
}

// key names an image by everything that goes into it.
func key(s *Source) string {
	h := sha256.New()
	fmt.Fprintf(h, "doz image %d\n%s\n", formatVersion, s.Digest)
	for _, l := range s.Layers {
		fmt.Fprintln(h, l.DiffID)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// refuse is an error whose message is a clause about the object that its caller
// names; see named.
func refuse(kind api.Kind, hint, format string, args ...any) *api.Error {
	return &api.Error{Kind: kind, Hint: hint, Message: fmt.Sprintf(format, args...)}
}

// progressFunc hears of a long operation's steps; a nil one hears nothing.
type progressFunc func(api.Progress)

func (p progressFunc) step(name string, done, total int64, unit string) {
	if p != nil {
		p(api.Progress{Event: "progress", Step: name, Done: done, Total: total, Unit: unit})
	}
}

// meter reports bytes in steps of a 200th of the total, at least one MiB.
type meter struct {
	progress    progressFunc
	step        string
	done, total int64
	told        int64
}

func (m *meter) add(n int) {
	m.done += int64(n)
	if m.done-m.told >= max(1<<20, m.total/200) || m.done == m.total {
		m.told = m.done
		m.progress.step(m.step, m.done, m.total, "bytes")
	}
}

// metered counts what is read from r.
type metered struct {
	io.Reader
	meter *meter
}

func (m metered) Read(b []byte) (int, error) {
	n, err := m.Reader.Read(b)
	if n > 0 && m.meter != nil {
		m.meter.add(n)
	}
	return n, err
}
