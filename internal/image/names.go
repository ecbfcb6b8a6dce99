package image

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"

	"dozable.com/doz/internal/store"
)

// What stands in <store>/images:
//
//	<name>/current.json         which key the name means
//	<name>/<key12>/root.ext4    the disk, 0444
//	<name>/<key12>/layer-N.qcow2  a template's disks over that, 0 the uppermost
//	<name>/<key12>/image.json   its record
//	.building-<random>/         an image being made, and the machine that makes it
//	.trash-<random>/            an image on its way out
//	.tmp-<random>               an archive decompressed, which has a name for a moment
const (
	buildingPrefix = ".building-"
	trashPrefix    = ".trash-"
	tmpPrefix      = ".tmp-"
)

// folder is one image's folder.
type folder string

func folderOf(s *store.Store, name string) folder { return folder(filepath.Join(s.ImagesDir(), name)) }

func (f folder) pointer() string        { return filepath.Join(string(f), "current.json") }
func (f folder) key(key string) sealed  { return sealed(filepath.Join(string(f), shortKey(key))) }
func (f folder) isKey(name string) bool { return len(name) == keyDigits && isHex(name) }

// sealed is the folder of one made image.
type sealed string

func (d sealed) disk() string { return filepath.Join(string(d), "root.ext4") }
func (d sealed) layer(i int) string {
	return filepath.Join(string(d), fmt.Sprintf("layer-%d.qcow2", i)) // 0 is the uppermost
}
func (d sealed) record() string { return filepath.Join(string(d), "image.json") }

// workshop is the folder of an image being made.
type workshop string

func (w workshop) machine() string           { return filepath.Join(string(w), "machine") }
func (w workshop) memory() string            { return filepath.Join(string(w), "memory") }
func (w workshop) console() string           { return filepath.Join(string(w), "console.log") }
func (w workshop) layers() string            { return filepath.Join(string(w), "layers.raw") }
func (w workshop) folder(name string) folder { return folder(filepath.Join(string(w), name)) }

// keyDigits is how much of a key its folder's name has.
const keyDigits = 12

func shortKey(key string) string { return key[:min(len(key), keyDigits)] }

func isHex(s string) bool { return s != "" && strings.Trim(s, "0123456789abcdef") == "" }

// randomHex is n random bytes in hex.
func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}
