// Package host is the one background process of a store: it holds the store's lock,
// answers on its socket, and joins engine, images and sandboxes into one program.
//
// It must not decide what happens to a sandbox (package sandbox does), nor how
// requests look (package api does).
package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/image"
	"dozable.com/doz/internal/sandbox"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// ErrOther means that another host already holds the store and answers.
var ErrOther = errors.New("another host holds the store")

// DefaultIdleTimeout is how long a host stays with nothing running and nobody
// connected.
const DefaultIdleTimeout = 5 * time.Minute

// How long a new host waits for an exiting one to let go of the store.
const lockWait = 30 * time.Second

// Options of a host.
type Options struct {
	Store       *store.Store
	Engine      vm.Engine
	Parts       sandbox.Parts
	Images      *image.Catalog
	Version     string
	Flavour     string
	IdleTimeout time.Duration // 0 is never
	Log         *slog.Logger
	Ready       func() // called once the socket answers
}

// Host is a running host.
type Host struct {
	options  Options
	store    *store.Store
	manager  *sandbox.Manager
	images   *image.Catalog
	log      *slog.Logger
	started  time.Time
	clients  atomic.Int32
	serving  sync.WaitGroup
	listener net.Listener

	stopOnce sync.Once
	stopping chan struct{} // closed when the host is to end
	ended    chan struct{} // closed when its sandboxes have been brought to rest
	rows     []api.StopRow // what became of them; read after ended
	activity chan struct{} // a client came or went, or a phase changed
}

// Serve is a host's whole life: it returns when the host was stopped, its sandboxes
// are at rest and the store is free again. ErrOther when another host was quicker.
func Serve(ctx context.Context, o Options) error {
	unix.Umask(0o077)
	if err := o.Store.Make(); err != nil {
		return err
	}
	lock, err := takeLock(ctx, o.Store)
	if err != nil {
		return err
	}
	defer lock.Close()

	h := &Host{
		options: o, store: o.Store, images: o.Images, log: o.Log, started: time.Now(),
		stopping: make(chan struct{}), ended: make(chan struct{}), activity: make(chan struct{}, 1),
	}
	h.manager, err = sandbox.New(sandbox.Options{
		Store: o.Store, Engine: o.Engine, Images: disks{h.images}, Parts: o.Parts, Log: o.Log,
	})
	if err != nil {
		return err
	}
	h.images.CleanLeftovers(ctx)
	if h.listener, err = listen(o.Store); err != nil {
		return err
	}
	defer os.Remove(o.Store.Socket())
	// Clients may connect from here on, and wait until everything is recovered.
	h.manager.Recover(ctx)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go h.manager.Watch(ctx)
	go h.accept(ctx)
	go h.idle(ctx)
	if o.Ready != nil {
		o.Ready()
	}
	h.log.Info("host started", "version", o.Version, "pid", os.Getpid())

	select {
	case <-ctx.Done():
		h.stop()
	case <-h.stopping:
	}
	h.log.Info("host stops")
	h.rows = h.manager.Rest(context.WithoutCancel(ctx))
	close(h.ended)
	h.listener.Close()
	cancel()
	h.waitForClients()
	h.log.Info("host stopped")
	return nil
}

// stop asks the host to end. It returns at once.
func (h *Host) stop() { h.stopOnce.Do(func() { close(h.stopping) }) }

// waitForClients lets answers under way be sent.
func (h *Host) waitForClients() {
	done := make(chan struct{})
	go func() { h.serving.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(2 * time.Second):
	}
}

// idle ends the host when nothing has run and nobody was connected for a while.
func (h *Host) idle(ctx context.Context) {
	if h.options.IdleTimeout == 0 {
		return
	}
	events, cancel := h.manager.Subscribe("")
	defer cancel()
	timer := time.NewTimer(h.options.IdleTimeout)
	for {
		select {
		case <-ctx.Done():
			return
		case <-events:
			timer.Reset(h.options.IdleTimeout)
		case <-h.activity:
			timer.Reset(h.options.IdleTimeout)
		case <-timer.C:
			if h.clients.Load() == 0 && h.manager.Running() == 0 {
				h.log.Info("nothing runs and nobody is connected")
				h.stop()
				return
			}
			timer.Reset(h.options.IdleTimeout)
		}
	}
}

// status is what ping and status answer.
func (h *Host) status() api.Status {
	return api.Status{
		Version: h.options.Version, ProtocolVersion: api.Version, Flavour: h.options.Flavour,
		PID: os.Getpid(), Store: h.store.Root(), Started: h.started,
		Running: h.manager.Running(), Clients: int(h.clients.Load()),
		IdleTimeoutSeconds: int(h.options.IdleTimeout / time.Second),
	}
}

// takeLock takes the store's lock, waiting for a host that is about to exit.
func takeLock(ctx context.Context, s *store.Store) (*os.File, error) {
	f, err := os.OpenFile(s.Lock(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot lock store %s: %w", s.Root(), err)
	}
	deadline := time.Now().Add(lockWait)
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("cannot lock store %s: %w", s.Root(), err)
		}
		if conn, err := net.DialTimeout("unix", s.Socket(), time.Second); err == nil {
			conn.Close()
			f.Close()
			return nil, ErrOther
		}
		if time.Now().After(deadline) {
			f.Close()
			return nil, fmt.Errorf("store %s is held by a host that does not answer", s.Root())
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// listen opens the host's socket. The lock is held, so a socket that is there is of
// a host that is not.
func listen(s *store.Store) (net.Listener, error) {
	if err := os.Remove(s.Socket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("cannot open the socket of store %s: %w", s.Root(), err)
	}
	l, err := net.Listen("unix", s.Socket())
	if err != nil {
		return nil, fmt.Errorf("cannot open the socket of store %s: %w", s.Root(), err)
	}
	return l, nil
}
