package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// Manager owns the sandboxes of one store. There is one in a host, and one host a
// store. All methods may be called concurrently.
type Manager struct {
	store  *store.Store
	engine vm.Engine
	images Images
	parts  Parts
	log    *slog.Logger
	// reached is called at each recorded step of a transition, for events and for
	// tests that cut a transition off there.
	reached func(name, step string)

	features vm.Features

	templates sync.Mutex // held while a template is made or copied

	mu    sync.Mutex
	boxes map[string]*box
	subs  map[chan api.Event]string
}

// Images are the disks sandboxes are made from.
type Images interface {
	// Current is the image of that name as it is now, checked well enough to boot.
	Current(name string) (Base, error)
	// Key is the image of that name and key, which a sandbox was made from.
	Key(name, key string) (Base, error)
}

// Base is an image's disk.
type Base struct {
	Name      string
	Key       string
	Disk      string   // path of the read-only raw disk
	Layers    []string // paths of overlays over it that do not change, the uppermost first
	Check     bool     // they were kept from under a running system
	SizeBytes int64    // as the guest sees it
	MemoryMiB int      // default for sandboxes made from it; 0 is ours
}

// Parts are doz's own files that machines boot from.
type Parts interface {
	// CurrentKernel names the kernel that new sandboxes get.
	CurrentKernel(audio bool) (string, error)
	// Boot gives the paths to boot a kernel, by its name, with, checked at every call.
	Boot(kernel string) (BootFiles, error)
	// Saved gives the paths of what a machine booted from that was saved or runs: that
	// kernel, and the tools disk of that name.
	Saved(kernel, tools string) (BootFiles, error)
}

// BootFiles are paths in the store.
type BootFiles struct {
	Kernel, Initrd, Tools string
	ToolsName             string // names the tools disk for later
	// Notes are what the user should know: a copy that was damaged and replaced.
	Notes []string
}

// Options of a Manager.
type Options struct {
	Store   *store.Store
	Engine  vm.Engine
	Images  Images
	Parts   Parts
	Log     *slog.Logger
	Reached func(name, step string)
}

// box is one sandbox: its record, and the machine when one runs.
type box struct {
	name string
	dir  store.Sandbox

	mu           sync.Mutex
	record       record
	op           *operation // the transition under way, if any
	machine      vm.Machine
	ending       bool // the machine is being ended by us
	unresponsive bool
	left         bool // a machine runs that would not be taken over; see takeBack
	noSessions   bool // the guest was asked and had none, and none was opened since
	session      *guest.Session
	dialing      sync.Mutex // held while session is being made
	taking       sync.Mutex // held while a machine that was left alone is taken over
}

// operation is a transition under way.
type operation struct {
	name string
	done chan struct{}
}

// New loads a store's sandboxes. Call Recover before anything else.
func New(o Options) (*Manager, error) {
	m := &Manager{
		store: o.Store, engine: o.Engine, images: o.Images, parts: o.Parts, log: o.Log, reached: o.Reached,
		boxes: map[string]*box{}, subs: map[chan api.Event]string{},
	}
	if m.reached == nil {
		m.reached = func(string, string) {}
	}
	names, err := o.Store.Names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		r, err := load(o.Store, name)
		if err != nil {
			m.log.Warn("a folder among the sandboxes is none", "name", name, "error", err)
			continue
		}
		m.boxes[name] = &box{name: name, dir: o.Store.Sandbox(name), record: r}
	}
	return m, nil
}

// probe asks the engine once what it can do.
func (m *Manager) probe(ctx context.Context) (vm.Features, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.features.Engine != "" {
		return m.features, nil
	}
	f, err := m.engine.Probe(ctx)
	if err != nil {
		return f, &api.Error{Kind: api.KindFailed, Message: "cannot run a virtual machine here: " + err.Error(), Hint: "see what is missing with: doz doctor"}
	}
	m.features = f
	return f, nil
}

// get finds a sandbox.
func (m *Manager) get(name string) (*box, error) {
	if !api.ValidName(name) {
		return nil, badName(name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.boxes[name]; b != nil {
		return b, nil
	}
	return nil, notFound(name)
}

// begin makes the caller the owner of the sandbox's next transition, when op may be
// asked for now. While another transition runs it fails with KindPhase, except that
// a join of the same kind (start, wake and resume are one) waits for it and looks
// again; to tidy joins anything.
func (m *Manager) begin(ctx context.Context, b *box, op string, join bool) (end func(), err error) {
	for {
		b.mu.Lock()
		running := b.op
		if running == nil {
			err := allowed(op, b.name, b.record.Phase)
			if err == nil {
				b.op = &operation{name: op, done: make(chan struct{})}
			}
			b.mu.Unlock()
			if err != nil {
				return nil, err
			}
			return func() {
				b.mu.Lock()
				close(b.op.done)
				b.op = nil
				b.mu.Unlock()
			}, nil
		}
		b.mu.Unlock()
		joins := join && (running.name == op || op == "tidy" || rises(op) && rises(running.name))
		if !joins && running.name != "tidy" { // that one is ours, and short
			return nil, &api.Error{Kind: api.KindPhase, Message: fmt.Sprintf("cannot %s sandbox %q: another command is at it (%s)", op, b.name, running.name), Hint: "try again when that is done"}
		}
		select {
		case <-running.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// update changes the record on disk and then in memory, and tells when the phase
// has changed. The caller owns the transition, or holds no lock and is the watcher
// of a machine that ended.
func (m *Manager) update(b *box, change func(*record)) error {
	b.mu.Lock()
	next := b.record
	before := next.Phase
	change(&next)
	if next.Phase != before {
		next.Since = time.Now()
	}
	err := store.WriteRecord(b.dir.Record(), next)
	// A machine that is gone is gone, on a full disk too: what we know of it must not
	// claim that it runs. The record on disk does until the next change or the next host.
	gone := b.machine == nil && !b.left && next.Snapshot == nil && before != next.Phase && live(before) && !live(next.Phase)
	if err == nil || gone {
		b.record = next
	}
	b.mu.Unlock()
	if err != nil {
		return &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot record sandbox %q: %v", b.name, errors.Unwrap(err))}
	}
	if next.Phase != before {
		m.tell(api.Event{Event: "phase", Name: b.name, Phase: next.Phase, Note: next.Problem})
	}
	return nil
}

// step marks a recorded step of a transition.
func (m *Manager) step(b *box, name string) {
	m.tell(api.Event{Event: "step", Name: b.name, Step: name})
	m.reached(b.name, name)
}

// tell sends an event to those who listen. One who does not read misses it.
func (m *Manager) tell(e api.Event) {
	e.At = time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for ch, name := range m.subs {
		if name == "" || name == e.Name {
			select {
			case ch <- e:
			default:
			}
		}
	}
}

// Subscribe gives the events of one sandbox, or of all when name is empty, until
// cancel is called. At most 1024 wait for a slow reader; later ones are dropped.
func (m *Manager) Subscribe(name string) (events <-chan api.Event, cancel func()) {
	ch := make(chan api.Event, 1024)
	m.mu.Lock()
	m.subs[ch] = name
	m.mu.Unlock()
	return ch, func() {
		m.mu.Lock()
		delete(m.subs, ch)
		m.mu.Unlock()
	}
}

// List shows every sandbox, sorted by name.
func (m *Manager) List() []api.Sandbox { return m.ListAfter("", math.MaxInt) }

// ListAfter shows the sandboxes whose names come after the given one, sorted by name,
// and at most so many.
func (m *Manager) ListAfter(after string, most int) []api.Sandbox {
	m.mu.Lock()
	boxes := make([]*box, 0, len(m.boxes))
	for _, b := range m.boxes {
		if b.name > after {
			boxes = append(boxes, b)
		}
	}
	m.mu.Unlock()
	slices.SortFunc(boxes, func(a, b *box) int {
		if a.name < b.name {
			return -1
		}
		return 1
	})
	boxes = boxes[:min(len(boxes), most)]
	list := make([]api.Sandbox, len(boxes))
	for i, b := range boxes {
		list[i] = b.view()
	}
	return list
}

// Inspect shows one sandbox.
func (m *Manager) Inspect(name string) (api.Sandbox, error) {
	b, err := m.get(name)
	if err != nil {
		return api.Sandbox{}, err
	}
	return b.view(), nil
}

func (b *box) view() api.Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	v := b.record.view(b.dir)
	v.Unresponsive = b.unresponsive || b.left
	if b.machine != nil {
		v.PID = b.machine.PID()
		if u, err := b.machine.Usage(); err == nil && u.Stopped {
			v.Unresponsive = true
		}
	}
	return v
}

// Running counts the sandboxes with a machine.
func (m *Manager) Running() int {
	n := 0
	for _, v := range m.List() {
		if live(v.Phase) {
			n++
		}
	}
	return n
}
