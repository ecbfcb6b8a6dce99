// Package parts finds the files doz carries beside its executable (kernels,
// initramfs, tools layer) and keeps checked copies of them in a store, which
// machines boot from.
//
// It must not download anything, and never lets a file be booted whose sha256 is
// not the recorded one.
package parts

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// Roles of parts.
const (
	KernelPlain = "kernel-plain"
	KernelSound = "kernel-sound"
	Initrd      = "initrd"
	Tools       = "tools"
)

// Part is one file. Name carries the beginning of its sha256, so that two versions
// have two names.
type Part struct {
	Role   string `json:"role"`
	File   string `json:"file"` // below the manifest's folder
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
}

// Manifest is parts.json.
type Manifest struct {
	Schema  int    `json:"schema"`
	Arch    string `json:"arch"`
	Version string `json:"version"`
	Release string `json:"release"` // "source", "public", "helper"
	Parts   []Part `json:"parts"`
}

// ManifestFile is the manifest's name beside the executable.
const ManifestFile = "parts.json"

// Schema is the manifest's shape that this program reads and writes.
const Schema = 1

// Set is the parts of this program.
type Set struct {
	Dir string
	Manifest
}

// Find reads the manifest beside the resolved executable, or in $DOZ_PARTS.
func Find() (*Set, error) {
	dir := os.Getenv("DOZ_PARTS")
	if dir == "" {
		exe, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("cannot find doz's own parts: %w", err)
		}
		if exe, err = filepath.EvalSymlinks(exe); err != nil {
			return nil, fmt.Errorf("cannot find doz's own parts: %w", err)
		}
		dir = filepath.Dir(exe)
	}
	s := &Set{Dir: dir}
	data, err := os.ReadFile(filepath.Join(dir, ManifestFile))
	if err == nil {
		err = json.Unmarshal(data, &s.Manifest)
	}
	if err != nil {
		return nil, fmt.Errorf("doz's own parts are not beside it in %s: install it again, or run make build", dir)
	}
	if s.Schema != Schema {
		return nil, fmt.Errorf("doz's own parts in %s are another version's (schema %d): install it again, or run make build", dir, s.Schema)
	}
	return s, nil
}

// Current is the part that has a role now.
func (s *Set) Current(role string) (Part, bool) {
	i := slices.IndexFunc(s.Parts, func(p Part) bool { return p.Role == role })
	if i < 0 {
		return Part{}, false
	}
	return s.Parts[i], true
}

// Path is doz's own file of a part.
func (s *Set) Path(p Part) string { return filepath.Join(s.Dir, p.File) }

// Store keeps copies of parts in two folders of a store. Its methods may be called
// concurrently.
type Store struct {
	set  *Set
	root string
	note func(string)
	mu   sync.Mutex // held while a copy is checked or made
}

// NewStore keeps copies of set below root. note is told what a user should know; it may
// be called concurrently.
func NewStore(set *Set, root string, note func(string)) *Store {
	return &Store{set: set, root: root, note: note}
}

// CurrentKernel names the kernel that new sandboxes get.
func (s *Store) CurrentKernel(audio bool) (string, error) {
	role := KernelPlain
	if audio {
		role = KernelSound
	}
	p, ok := s.set.Current(role)
	if !ok {
		return "", notCarried(role)
	}
	return p.Name, nil
}

// Paths checks and gives the store's copies of a kernel, by name, of the current
// initramfs, and of the tools layer of that name, or the current one when it is "". A missing or damaged copy is made anew from doz's own.
func (s *Store) Paths(kernel, toolsName string) (kernelPath, initrd, tools string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs [3]error
	var wait sync.WaitGroup
	wait.Go(func() { kernelPath, errs[0] = s.named("kernels", kernel) })
	wait.Go(func() { initrd, errs[1] = s.current(Initrd) })
	wait.Go(func() {
		if toolsName == "" {
			tools, errs[2] = s.current(Tools)
		} else {
			tools, errs[2] = s.named("tools", toolsName)
		}
	})
	wait.Wait()
	return kernelPath, initrd, tools, errors.Join(errs[:]...)
}

// Saved gives the paths of what a saved machine booted from: a kernel and a tools layer
// by name, and the current initramfs. Nothing of it is executed again, so what is there
// is not read; what is not is made anew.
func (s *Store) Saved(kernel, toolsName string) (kernelPath, initrd, tools string, err error) {
	initrdPart, ok := s.set.Current(Initrd)
	if !ok {
		return "", "", "", notCarried(Initrd)
	}
	kernelPath = filepath.Join(s.root, "kernels", filepath.Base(kernel))
	initrd = filepath.Join(s.root, "kernels", initrdPart.Name)
	tools = filepath.Join(s.root, "tools", filepath.Base(toolsName))
	for _, path := range []string{kernelPath, initrd, tools} {
		if _, err := os.Stat(path); err != nil {
			return s.Paths(kernel, toolsName)
		}
	}
	return kernelPath, initrd, tools, nil
}

// named gives the path of a part by its name: one of this doz, or one that an earlier
// doz left in the store.
func (s *Store) named(folder, name string) (string, error) {
	for _, p := range s.set.Parts {
		if p.Name == name {
			return s.ensure(p)
		}
	}
	return s.kept(folder, name)
}

// current gives the path of the part that has a role now.
func (s *Store) current(role string) (string, error) {
	p, ok := s.set.Current(role)
	if !ok {
		return "", notCarried(role)
	}
	return s.ensure(p)
}

func notCarried(role string) error { return fmt.Errorf("this doz carries no %s", role) }

// ensure gives the path of a whole copy of the part.
func (s *Store) ensure(p Part) (string, error) {
	folder := "kernels"
	if p.Role == Tools {
		folder = "tools"
	}
	path := filepath.Join(s.root, folder, p.Name)
	sum, err := sumFile(path)
	if err == nil && sum == p.SHA256 {
		return path, nil
	}
	damaged := err == nil || !errors.Is(err, os.ErrNotExist)
	if err := s.copy(p, path); err != nil {
		return "", err
	}
	if damaged {
		s.note(fmt.Sprintf("the store's copy of %s was damaged; it was replaced from doz's own", p.Name))
	}
	return path, nil
}

// kept gives the copy of a part that an earlier doz left in the store. Its name vouches
// for it.
func (s *Store) kept(folder, name string) (string, error) {
	path := filepath.Join(s.root, folder, filepath.Base(name))
	sum, err := sumFile(path)
	if err != nil || !strings.HasSuffix(name, "-"+sum[:12]) {
		return "", fmt.Errorf("%s is neither carried by this doz nor whole in the store: use the doz that made the sandbox", name)
	}
	return path, nil
}

// copy makes a durable copy of doz's own file, checking it on the way.
func (s *Store) copy(p Part, path string) error {
	own, err := os.Open(s.set.Path(p))
	if err != nil {
		return fmt.Errorf("doz's own %s is missing: install doz again, or run make build", p.File)
	}
	defer own.Close()
	if err = os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("cannot copy %s into the store: %w", p.Name, err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return fmt.Errorf("cannot copy %s into the store: %w", p.Name, err)
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	hash := sha256.New()
	if _, err := io.Copy(io.MultiWriter(tmp, hash), own); err != nil {
		return fmt.Errorf("cannot copy %s into the store: %w", p.Name, err)
	}
	if hex.EncodeToString(hash.Sum(nil)) != p.SHA256 {
		return fmt.Errorf("doz's own %s is damaged: install doz again, or run make build", p.File)
	}
	if err := settle(tmp, path); err != nil {
		return fmt.Errorf("cannot copy %s into the store: %w", p.Name, err)
	}
	return nil
}

// settle gives a whole temporary file its name, so that it still has it, and its
// bytes, after a power cut.
func settle(tmp *os.File, path string) error {
	if err := errors.Join(tmp.Chmod(0o444), tmp.Sync()); err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

func sumFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}
