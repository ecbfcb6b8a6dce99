package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// maxRecord bounds what is read as a record, in bytes.
const maxRecord = 1 << 20

// ErrDamaged means that a record is there and is not what was written.
var ErrDamaged = errors.New("the record is damaged")

// ErrNewer means that a newer doz wrote the record.
var ErrNewer = errors.New("a newer doz wrote it: upgrade this one")

// WriteRecord puts v, which carries its own "schema" field, at path as JSON. The
// record is there whole or as it was before, and is durable when WriteRecord
// returns.
func WriteRecord(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", filepath.Base(path), err)
	}
	return WriteFile(path, append(data, '\n'), 0o600)
}

// TempPrefix begins the name of a file that is being written.
const TempPrefix = ".tmp-"

// WriteFile is WriteRecord for bytes.
func WriteFile(path string, data []byte, mode fs.FileMode) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, TempPrefix+"*")
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", filepath.Base(path), plain(err))
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("cannot write %s: %w", filepath.Base(path), plain(err))
		}
	}()
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return SyncDir(dir)
}

// ReadRecord reads the record at path into v. A missing one is fs.ErrNotExist, one
// of a newer schema ErrNewer, anything else that is no record ErrDamaged.
func ReadRecord(path string, schema int, v any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err != nil {
		return fmt.Errorf("cannot read %s: %w", filepath.Base(path), plain(err))
	}
	var head struct {
		Schema int `json:"schema"`
	}
	if len(data) > maxRecord || json.Unmarshal(data, &head) != nil || head.Schema < 1 {
		return fmt.Errorf("cannot read %s: %w", filepath.Base(path), ErrDamaged)
	}
	if head.Schema > schema {
		return fmt.Errorf("cannot read %s: %w", filepath.Base(path), ErrNewer)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("cannot read %s: %w", filepath.Base(path), ErrDamaged)
	}
	return nil
}

// SyncDir makes the names in a folder durable.
func SyncDir(dir string) error {
	return SyncFile(dir)
}

// SyncFile makes what a file holds durable.
func SyncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
