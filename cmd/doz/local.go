package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/cli"
	"dozable.com/doz/internal/doctor"
	"dozable.com/doz/internal/host"
	"dozable.com/doz/internal/image"
	"dozable.com/doz/internal/parts"
	"dozable.com/doz/internal/sandbox"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm/qemu"
)

// local joins the packages for one store; it is the only place that knows them all.
type local struct{ store *store.Store }

func open(dir string) (cli.Local, error) {
	s, err := store.Open(dir)
	if err != nil {
		return nil, err
	}
	return local{s}, nil
}

func (l local) Socket() string { return l.store.Socket() }

// Spawn starts this program again as the host.
func (l local) Spawn() (ended func() error, err error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("cannot start a host: %w", err)
	}
	args := []string{"host", "serve", "--store", l.store.Root()}
	if minutes := os.Getenv("DOZ_HOST_IDLE"); minutes != "" {
		if _, err := strconv.ParseFloat(minutes, 64); err != nil {
			return nil, fmt.Errorf("DOZ_HOST_IDLE: %q is no number of minutes", minutes)
		}
		args = append(args, "--idle-timeout", minutes)
	}
	process, err := host.Spawn(l.store, exe, args...)
	if err != nil {
		return nil, err
	}
	return func() error {
		// A reaped process is one that ended.
		if process.Signal(syscall.Signal(0)) == nil {
			return nil
		}
		return errors.New(strings.TrimPrefix(host.LastWords(l.store), "doz: "))
	}, nil
}

// Serve is the host's life.
func (l local) Serve(ctx context.Context, idle time.Duration) error {
	if err := l.store.Make(); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	set, err := parts.Find()
	if err != nil {
		return err
	}
	carried := newCarried(set, l.store, log)
	engine := l.engine(set)
	err = host.Serve(ctx, host.Options{
		Store: l.store, Engine: engine, Parts: carried, Version: version, Flavour: "cli", IdleTimeout: idle, Log: log,
		Images: image.New(image.Options{Store: l.store, Engine: engine, Boot: carried.builder, Log: log}),
	})
	if errors.Is(err, host.ErrOther) {
		return nil
	}
	return err
}

func (l local) engine(set *parts.Set) *qemu.Engine {
	options := qemu.Options{StateDir: l.store.EngineDir()}
	if set != nil {
		if kernel, ok := set.Current(parts.KernelPlain); ok {
			options.Kernel = set.Path(kernel)
		}
	}
	return qemu.New(options)
}

func (l local) List() ([]api.Sandbox, error)             { return sandbox.List(l.store) }
func (l local) Inspect(name string) (api.Sandbox, error) { return sandbox.Inspect(l.store, name) }
func (l local) Points(name string) ([]api.Point, error)  { return sandbox.Points(l.store, name) }
func (l local) Sessions(r api.SessionsRequest) (api.SessionList, error) {
	return sandbox.SavedSessions(l.store, r)
}
func (l local) Boots(name string) ([]api.Boot, error)     { return sandbox.Boots(l.store, name) }
func (l local) Boot(name string, n int) (api.Boot, error) { return sandbox.Boot(l.store, name, n) }
func (l local) Images() ([]api.Image, error)              { return host.Images(l.store) }

// Leftovers says whether a sandbox's record claims a machine while no host runs.
func (l local) Leftovers() bool {
	list, err := sandbox.List(l.store)
	if err != nil {
		return false
	}
	for _, v := range list {
		switch v.Phase {
		case api.Booting, api.Running, api.Paused, api.Asleep:
			return true
		}
	}
	return false
}

func (l local) Doctor(ctx context.Context) []cli.Check {
	set, err := parts.Find()
	var checks []cli.Check
	for _, c := range doctor.Run(ctx, l.store, set, err, l.engine(set), host.Images) {
		checks = append(checks, cli.Check(c))
	}
	return checks
}

// carried shows doz's parts to sandboxes and builders.
type carried struct {
	store *parts.Store
	log   *slog.Logger

	mu    sync.Mutex
	notes []string // what was replaced and nobody was told of yet
}

func newCarried(set *parts.Set, s *store.Store, log *slog.Logger) *carried {
	c := &carried{log: log}
	c.store = parts.NewStore(set, s.Root(), c.note)
	return c
}

func (c *carried) note(text string) {
	c.log.Warn(text)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notes = append(c.notes, text)
}

// take gives what is to be told, once.
func (c *carried) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	notes := c.notes
	c.notes = nil
	return notes
}

func (c *carried) CurrentKernel(audio bool) (string, error) { return c.store.CurrentKernel(audio) }

func (c *carried) Boot(kernel string) (sandbox.BootFiles, error) {
	k, i, t, err := c.store.Paths(kernel, "")
	return sandbox.BootFiles{Kernel: k, Initrd: i, Tools: t, ToolsName: filepath.Base(t), Notes: c.take()}, err
}

func (c *carried) Saved(kernel, tools string) (sandbox.BootFiles, error) {
	k, i, t, err := c.store.Saved(kernel, tools)
	return sandbox.BootFiles{Kernel: k, Initrd: i, Tools: t, ToolsName: tools, Notes: c.take()}, err
}

func (c *carried) builder() (image.BootFiles, error) {
	kernel, err := c.store.CurrentKernel(false)
	if err != nil {
		return image.BootFiles{}, err
	}
	f, err := c.Boot(kernel)
	return image.BootFiles{Kernel: f.Kernel, Initrd: f.Initrd, Tools: f.Tools}, err
}
