package sandbox

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/vm"
)

// How long one machine may take to be adopted.
const adoptDeadline = 5 * time.Second

// Recover makes what is on disk and what runs agree, after whatever ended the last
// host: it removes what cut-off creates and removals left, adopts machines that
// still run, and marks the sandboxes whose machine is gone.
func (m *Manager) Recover(ctx context.Context) {
	m.sweep()
	var wait sync.WaitGroup
	for _, b := range m.boxes {
		if b.record.Phase == api.Damaged {
			continue
		}
		wait.Add(1)
		go func() {
			defer wait.Done()
			m.recoverOne(ctx, b)
		}()
	}
	wait.Wait()
}

// recoverOne brings one sandbox's record in line with its machine.
func (m *Manager) recoverOne(ctx context.Context, b *box) {
	if !live(b.record.Phase) {
		// A machine here was ended by us in all but deed, or not yet recorded.
		if err := m.kill(b); err != nil {
			m.log.Warn("cannot end a leftover machine", "sandbox", b.name, "error", err)
		}
		return
	}
	machine, err := m.adopt(ctx, b)
	switch {
	case errors.Is(err, vm.ErrUnresponsive) && b.record.Phase != api.Booting:
		// It holds what runs in it; only the user may give that up.
		b.left = true
		m.log.Warn("a machine does not answer; it is left alone", "sandbox", b.name)
		return
	case err != nil:
		m.lost(b, err)
		return
	}
	m.takeOver(ctx, b, machine)
}

// takeBack takes over the machine of a sandbox that would not be taken over when the
// host began, if there is one and no transition is under way.
func (m *Manager) takeBack(ctx context.Context, b *box) error {
	b.taking.Lock()
	defer b.taking.Unlock()
	b.mu.Lock()
	busy := b.op != nil
	b.mu.Unlock()
	if busy {
		return nil // the transition takes it over itself, where it needs it
	}
	return m.takeLeft(ctx, b)
}

// reclaim is takeBack for the owner of a transition.
func (m *Manager) reclaim(ctx context.Context, b *box) error {
	b.taking.Lock()
	defer b.taking.Unlock()
	return m.takeLeft(ctx, b)
}

// takeLeft takes over a machine that was left alone. The caller holds b.taking.
func (m *Manager) takeLeft(ctx context.Context, b *box) error {
	b.mu.Lock()
	left := b.left && live(b.record.Phase)
	b.mu.Unlock()
	if !left {
		return nil
	}
	machine, err := m.adopt(ctx, b)
	switch {
	case errors.Is(err, vm.ErrUnresponsive):
		return err
	case err != nil:
		m.lost(b, err)
		return vm.ErrEnded
	}
	m.takeOver(ctx, b, machine)
	return nil
}

// takeOver makes an adopted machine the box's, and the guest be heard again.
func (m *Manager) takeOver(ctx context.Context, b *box, machine vm.Machine) {
	m.attach(b, machine)
	m.log.Info("adopted a machine", "sandbox", b.name, "pid", machine.PID(), "phase", b.record.Phase)
	if b.record.Phase == api.Paused || b.record.Phase == api.Asleep {
		// Whoever was to let it go on recorded that first.
		machine.Pause(ctx)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, adoptTime(b.record.Phase))
	defer cancel()
	if err := machine.Resume(ctx); err != nil {
		m.lost(b, err)
		return
	}
	if _, err := m.connect(ctx, b, machine); err != nil {
		if b.record.Phase == api.Booting {
			m.lost(b, err)
			return
		}
		b.mu.Lock()
		b.unresponsive = true
		b.mu.Unlock()
		m.log.Warn("an adopted guest does not answer", "sandbox", b.name, "error", err)
		return
	}
	os.Remove(b.dir.State()) // of a wake that was cut off
	if err := m.update(b, func(r *record) { r.Phase, r.Died, r.Problem = api.Running, false, "" }); err != nil {
		m.log.Error("cannot record an adoption", "sandbox", b.name, "error", err)
	}
}

// adoptTime lets a guest that was booting finish.
func adoptTime(p api.Phase) time.Duration {
	if p == api.Booting {
		return bootDeadline
	}
	return adoptDeadline
}

func (m *Manager) adopt(ctx context.Context, b *box) (vm.Machine, error) {
	config, _, err := m.config(b, m.saved(b.record.Tools))
	if err != nil {
		// Its image or kernel is gone from the store, and it runs all the same.
		config = vm.Config{Dir: b.dir.Machine(), Name: b.name, MemoryFile: b.dir.Memory()}
	}
	config.ConsoleFile, config.ConsoleLimit = b.dir.BootLog(b.record.Boots), consoleLimit
	ctx, cancel := context.WithTimeout(ctx, adoptDeadline)
	defer cancel()
	return m.engine.Adopt(ctx, config)
}

// lost marks a sandbox whose machine is gone: one that slept is all saved, another died.
func (m *Manager) lost(b *box, why error) {
	if err := m.kill(b); err != nil {
		m.log.Warn("cannot end a machine", "sandbox", b.name, "error", err)
	}
	err := m.update(b, func(r *record) {
		if r.Snapshot != nil {
			r.Phase = api.Hibernated
			return
		}
		r.Phase, r.Died = api.Off, true
		r.Problem = "its machine ended while no host was there"
		if !errors.Is(why, vm.ErrNoMachine) {
			r.Problem = "its machine could not be taken over: " + why.Error()
		}
	})
	if err != nil {
		m.log.Error("cannot record a lost machine", "sandbox", b.name, "error", err)
	}
}
