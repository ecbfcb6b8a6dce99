package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// snapshot seals a saved machine: what it needs to be loaded by, and by what its files
// are known again. What else the machine is made of is the record's, for life.
type snapshot struct {
	At            time.Time `json:"at"`
	Engine        string    `json:"engine"`
	EngineVersion string    `json:"engineVersion"`
	Accelerator   string    `json:"accelerator"`
	StateSum      uint32    `json:"stateSum"`
	MemorySum     uint32    `json:"memorySum"`
	// The disk that is written to, as the machine left it.
	DiskBytes int64     `json:"diskBytes"`
	DiskTime  time.Time `json:"diskTime"`
}

const (
	// syncDeadline is how long a guest may take to write its file systems out before it
	// is saved. What it did not write out is in its memory, and is saved with that.
	syncDeadline = 5 * time.Second
	// saveRoom is what has to be free on the store's disk before anything is saved.
	saveRoom = 64 << 20
)

// transition runs one transition of a sandbox from beginning to end. A client that
// leaves does not cut it off.
func (m *Manager) transition(ctx context.Context, name, op string, do func(context.Context, *box) ([]string, error)) (api.Transition, error) {
	b, err := m.get(name)
	if err != nil {
		return api.Transition{}, err
	}
	end, err := m.begin(ctx, b, op, rises(op))
	if err != nil {
		return api.Transition{}, err
	}
	defer end()
	began := time.Now()
	notes, err := do(context.WithoutCancel(ctx), b)
	if err != nil {
		return api.Transition{}, cannot(op, b.name, err)
	}
	return api.Transition{Sandbox: b.view(), Millis: millis(began), Notes: notes}, nil
}

func millis(since time.Time) float64 { return float64(time.Since(since).Microseconds()) / 1000 }

// cannot is err as what became of op, unless it says so itself.
func cannot(op, name string, err error) error {
	var known *api.Error
	switch {
	case !errors.As(err, &known):
		return &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot %s sandbox %q: %v", op, name, err)}
	case known.Kind == api.KindFailed && !strings.HasPrefix(known.Message, "cannot "):
		return &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot %s sandbox %q: %s", op, name, known.Message), Hint: known.Hint}
	}
	return known
}

// first is the first of errs that is one: what follows from it says nothing more.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Pause stops a running sandbox where it is.
func (m *Manager) Pause(ctx context.Context, name string) (api.Transition, error) {
	return m.transition(ctx, name, "pause", func(ctx context.Context, b *box) ([]string, error) {
		machine, err := m.held(ctx, b)
		if err != nil {
			return nil, err
		}
		notes := m.saveScreens(ctx, b, false)
		if err := machine.Pause(ctx); err != nil {
			return notes, err
		}
		m.step(b, "pause/paused")
		if err := m.update(b, func(r *record) { r.Phase = api.Paused }); err != nil {
			machine.Resume(ctx)
			return notes, err
		}
		m.step(b, "pause/recorded")
		return notes, nil
	})
}

// Resume lets a paused sandbox go on.
func (m *Manager) Resume(ctx context.Context, name string) (api.Transition, error) {
	return m.transition(ctx, name, "resume", m.resume)
}

// resume lets the machine of a paused or sleeping sandbox go on. Its seal, if it has
// one, is discarded first.
func (m *Manager) resume(ctx context.Context, b *box) ([]string, error) {
	machine, err := m.held(ctx, b)
	if err != nil {
		return nil, err
	}
	before := b.get()
	if err := m.update(b, func(r *record) { r.Phase, r.Snapshot = api.Running, nil }); err != nil {
		return nil, err
	}
	m.step(b, "resume/recorded")
	if err := m.letGo(ctx, b, machine, before); err != nil {
		return nil, err
	}
	os.Remove(b.dir.State()) // it is worth nothing without its seal
	m.step(b, "resume/resumed")
	return m.tellTime(ctx, b), nil
}

// tellTime gives a guest that went on in its place the time; the rest of its set-up, of
// which hardly anything can have changed, follows when it may.
func (m *Manager) tellTime(ctx context.Context, b *box) (notes []string) {
	b.mu.Lock()
	session := b.session
	b.mu.Unlock()
	if session == nil {
		return m.refresh(ctx, b)
	}
	short, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	if err := setClock(short, session); err != nil {
		return m.refresh(ctx, b)
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), answerDeadline)
		defer cancel()
		// One that stands still again by then is set up when it goes on the next time.
		if _, err := m.setUp(ctx, b, session); err != nil {
			m.log.Info("a resumed guest was not set up again", "sandbox", b.name, "error", err)
		}
	}()
	return nil
}

// Sleep saves a sandbox and keeps its machine, standing: waking is instant, and a
// computer that loses its power meanwhile loses nothing.
func (m *Manager) Sleep(ctx context.Context, name string) (api.Transition, error) {
	return m.transition(ctx, name, "sleep", func(ctx context.Context, b *box) (notes []string, err error) {
		if b.phase() == api.Running {
			notes = m.saveScreens(ctx, b, false)
		}
		return notes, m.save(ctx, b, "sleep", api.Asleep)
	})
}

// Hibernate saves a sandbox and gives everything it holds of this computer back but
// the room on its disk. It is durable when Hibernate returns.
func (m *Manager) Hibernate(ctx context.Context, name string) (api.Transition, error) {
	return m.transition(ctx, name, "hibernate", m.hibernate)
}

func (m *Manager) hibernate(ctx context.Context, b *box) (notes []string, err error) {
	switch b.phase() {
	case api.Asleep: // all is saved
		err = m.update(b, func(r *record) { r.Phase = api.Hibernated })
	case api.Running:
		notes = append(m.saveScreens(ctx, b, true), m.syncGuest(ctx, b)...)
		fallthrough
	default:
		err = m.save(ctx, b, "hibernate", api.Hibernated)
	}
	if err != nil {
		return nil, err
	}
	m.step(b, "hibernate/recorded")
	if err := m.kill(b); err != nil {
		return nil, err
	}
	m.step(b, "hibernate/ended")
	return notes, nil
}

// syncGuest has the guest write its file systems out, so that little is lost should
// the snapshot be given up.
func (m *Manager) syncGuest(ctx context.Context, b *box) (notes []string) {
	ctx, cancel := context.WithTimeout(ctx, syncDeadline)
	defer cancel()
	session, err := m.talk(ctx, b)
	if err == nil {
		err = session.Call(ctx, guest.OpSync, struct{}{}, nil)
	}
	if err != nil {
		return []string{"the guest did not write its disk out first: " + err.Error()}
	}
	return nil
}

// save takes a running or paused sandbox to phase, with a seal. When it fails the
// sandbox is as it was.
func (m *Manager) save(ctx context.Context, b *box, op string, phase api.Phase) error {
	if err := m.room(saveRoom); err != nil {
		return err
	}
	machine, err := m.held(ctx, b)
	if err != nil {
		return err
	}
	was := b.phase()
	m.step(b, op+"/begun")
	if err := machine.Pause(ctx); err != nil {
		return err
	}
	m.step(b, op+"/paused")
	os.Remove(b.dir.State()) // of a save that was cut off
	seal, err := m.seal(ctx, b, machine, b.dir.State())
	if err == nil {
		m.step(b, op+"/saved")
		err = m.update(b, func(r *record) { r.Phase, r.Snapshot = phase, seal })
	}
	if err != nil {
		os.Remove(b.dir.State())
		if was == api.Running {
			machine.Resume(ctx)
		}
		return err
	}
	if op == "sleep" {
		m.step(b, "sleep/recorded")
	}
	return nil
}

// room refuses what needs more of the store's disk than is free.
func (m *Manager) room(need int64) error {
	free, err := m.store.FreeBytes()
	if err == nil && free < need {
		return &api.Error{
			Kind:    api.KindFailed,
			Message: fmt.Sprintf("the store's disk has %d MiB free, and %d MiB are needed", free>>20, need>>20),
			Hint:    "make room on it: doz rm, doz point rm, or doz image rm give some back",
		}
	}
	return err
}

// seal saves a machine that stands, its state to a new file, and says what was saved.
func (m *Manager) seal(ctx context.Context, b *box, machine vm.Machine, state string) (*snapshot, error) {
	features, err := m.probe(ctx)
	if err != nil {
		return nil, err
	}
	s := &snapshot{At: time.Now(), Engine: features.Engine, EngineVersion: features.Version, Accelerator: features.Accelerator}
	// The memory does not change any more, so it can be read while it is written out.
	summed := make(chan error, 1)
	go func() {
		var err error
		s.MemorySum, err = store.Sum(b.dir.Memory())
		summed <- err
	}()
	err = machine.Save(ctx, state)
	if err := first(err, <-summed); err != nil {
		return nil, err
	}
	if s.StateSum, err = store.Sum(state); err != nil {
		return nil, err
	}
	info, err := os.Stat(b.dir.File(b.get().Disks[0]))
	if err != nil {
		return nil, err
	}
	s.DiskBytes, s.DiskTime = info.Size(), info.ModTime()
	return s, nil
}

// held is the machine of a live sandbox, whose transition the caller owns. One that was
// left alone is taken over now, if it answers.
func (m *Manager) held(ctx context.Context, b *box) (vm.Machine, error) {
	if err := m.reclaim(ctx, b); err != nil {
		return nil, err
	}
	return b.held()
}

func (b *box) held() (vm.Machine, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.machine == nil {
		return nil, vm.ErrUnresponsive // it was there, and could not be adopted
	}
	return b.machine, nil
}

// get is the record now.
func (b *box) get() record {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.record
}
