package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// How long a guest may take to power off by itself before its machine is ended.
const powerOffDeadline = 20 * time.Second

// Shutdown ends a sandbox's programs and its machine; its disks are kept. A guest
// that does not power off in time is cut off, and its disk counts as not cleanly
// unmounted.
func (m *Manager) Shutdown(ctx context.Context, name string) (api.Sandbox, error) {
	b, err := m.get(name)
	if err != nil {
		return api.Sandbox{}, err
	}
	end, err := m.begin(ctx, b, "shutdown", false)
	if err != nil {
		return api.Sandbox{}, err
	}
	defer end()
	if err := m.shutdown(context.WithoutCancel(ctx), b); err != nil {
		return api.Sandbox{}, cannot("shut down", name, err)
	}
	return b.view(), nil
}

// shutdown takes a sandbox to off from wherever it is. One that was saved goes on
// first, so that it ends in good order; what cannot be woken is given up.
func (m *Manager) shutdown(ctx context.Context, b *box) error {
	m.step(b, "shutdown/begun")
	problem := m.goOn(ctx, b)
	if problem == "" && !m.powerOff(ctx, b) {
		problem = "it did not power off by itself and was cut off"
	}
	m.step(b, "shutdown/ended")
	// What is recorded before its files are removed is not taken for a whole snapshot.
	if b.get().Snapshot != nil {
		if err := m.update(b, func(r *record) { r.Snapshot = nil }); err != nil {
			return err
		}
	}
	if err := m.kill(b); err != nil {
		return err
	}
	if err := m.update(b, func(r *record) { r.Phase, r.Problem, r.Died = api.Off, problem, false }); err != nil {
		return err
	}
	m.step(b, "shutdown/recorded")
	return nil
}

// goOn has the programs of a sandbox that stands still go on, to be ended. It gives
// what the user should know when they cannot.
func (m *Manager) goOn(ctx context.Context, b *box) (problem string) {
	var err error
	switch b.phase() {
	case api.Paused, api.Asleep:
		_, err = m.resume(ctx, b)
	case api.Hibernated:
		_, err = m.wake(ctx, b, func(api.Progress) {})
	}
	if err != nil {
		return "it could not be woken to be shut down, so its programs were cut off: " + err.Error()
	}
	return ""
}

// Reset ends a sandbox's programs and drops its root disk: it is off then, as made anew
// from what its image is now. Its restore points stay.
func (m *Manager) Reset(ctx context.Context, name string) (api.Transition, error) {
	return m.transition(ctx, name, "reset", func(ctx context.Context, b *box) ([]string, error) {
		r := b.get()
		base, err := m.images.Current(r.Image)
		if err != nil {
			return nil, err
		}
		if base.SizeBytes > r.diskBytes() {
			return nil, fmt.Errorf("its image is now larger than its disk of %d GiB", r.DiskGiB)
		}
		if phase := b.phase(); live(phase) || phase == api.Hibernated {
			if err := m.shutdown(ctx, b); err != nil {
				return nil, err
			}
		}
		m.step(b, "reset/off")
		defer m.sweepDisks(b) // of the old, or of a new one made in vain
		files, err := m.fromBase(ctx, b.dir, base, store.LaterDisk(randomHex(4)), r.diskBytes())
		if err != nil {
			return nil, err
		}
		err = m.update(b, func(r *record) {
			r.Disks, r.ImageKey, r.Phase, r.Problem, r.Died, r.Check = files, base.Key, api.Off, "", false, base.Check
			r.Fresh = true
		})
		if err != nil {
			return nil, err
		}
		m.step(b, "reset/recorded")
		return nil, nil
	})
}

// powerOff asks the guest to power off and waits for it. It says whether it did.
func (m *Manager) powerOff(ctx context.Context, b *box) bool {
	b.mu.Lock()
	machine := b.machine
	b.ending = true
	b.mu.Unlock()
	if machine == nil {
		return true
	}
	exit := machine.Wait()
	asked := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(ctx, answerDeadline)
		defer cancel()
		session, err := m.talk(ctx, b)
		if err == nil {
			err = session.Call(ctx, guest.OpPowerOff, struct{}{}, nil)
		}
		asked <- err
	}()
	deadline := time.After(powerOffDeadline)
	for {
		select {
		case e := <-exit:
			return e.Clean
		case err := <-asked:
			// Whoever powers off may be gone before the answer arrives; whoever did
			// not hear us has a power button.
			if err != nil && !errors.Is(err, io.EOF) {
				machine.PowerOff(ctx)
			}
			asked = nil
		case <-deadline:
			return false
		}
	}
}

// kill ends the sandbox's machine, whether we hold it or an unresponsive one is
// left, and removes its files. It is idempotent.
func (m *Manager) kill(b *box) error {
	b.mu.Lock()
	machine := b.machine
	b.ending = true
	b.mu.Unlock()
	if machine != nil {
		if err := machine.Kill(); err != nil {
			return err
		}
	} else if err := m.engine.KillLeftover(b.dir.Machine()); err != nil && !errors.Is(err, vm.ErrNoMachine) {
		return err
	}
	b.mu.Lock()
	b.detach()
	b.mu.Unlock()
	return b.clean()
}

// Rest brings every live sandbox to rest, all at once, and says what became of each.
// One that cannot be hibernated is shut down; one whose machine does not answer is
// left as it is, for the next host.
func (m *Manager) Rest(ctx context.Context) []api.StopRow {
	var boxes []*box
	m.mu.Lock()
	for _, b := range m.boxes {
		if b.busy() || live(b.phase()) {
			boxes = append(boxes, b)
		}
	}
	m.mu.Unlock()
	slices.SortFunc(boxes, func(a, b *box) int { return strings.Compare(a.name, b.name) })
	rows := make([]*api.StopRow, len(boxes))
	var wait sync.WaitGroup
	for i, b := range boxes {
		wait.Go(func() { rows[i] = m.restOne(ctx, b) })
	}
	wait.Wait()
	all := []api.StopRow{}
	for _, row := range rows {
		if row != nil {
			all = append(all, *row)
		}
	}
	return all
}

// restOne brings one sandbox to rest once nothing else is done with it; nil when there
// was nothing to do.
func (m *Manager) restOne(ctx context.Context, b *box) *api.StopRow {
	b.idle()
	if !live(b.phase()) {
		return nil
	}
	began := time.Now()
	_, err := m.Hibernate(ctx, b.name)
	problem := ""
	if err != nil {
		problem = err.Error()
		if _, held := b.held(); held == nil && !b.view().Unresponsive {
			if _, err := m.Shutdown(ctx, b.name); err == nil {
				problem += "; it was shut down, its disk is kept"
			}
		} else {
			problem += "; it is left as it is"
		}
	}
	v := b.view()
	row := &api.StopRow{Name: b.name, Phase: v.Phase, Millis: time.Since(began).Milliseconds(), Problem: cmp.Or(problem, v.Problem)}
	if v.Snapshot != nil {
		row.Bytes = v.Snapshot.Bytes
	}
	return row
}

// busy says whether a transition is under way; idle waits until none is.
func (b *box) busy() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.op != nil
}

func (b *box) idle() {
	for {
		b.mu.Lock()
		op := b.op
		b.mu.Unlock()
		if op == nil {
			return
		}
		<-op.done
	}
}
