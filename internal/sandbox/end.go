package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
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
	ctx = context.WithoutCancel(ctx)
	m.step(b, "shutdown/begun")
	clean := m.powerOff(ctx, b)
	m.step(b, "shutdown/ended")
	if err := m.kill(b); err != nil {
		return api.Sandbox{}, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot shut down sandbox %q: %v", name, err)}
	}
	err = m.update(b, func(r *record) {
		r.Phase, r.Problem = api.Off, ""
		if !clean {
			r.Problem = "it did not power off by itself and was cut off"
		}
	})
	if err != nil {
		return api.Sandbox{}, err
	}
	m.step(b, "shutdown/recorded")
	return b.view(), nil
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

// ShutdownAll shuts every live sandbox down, all at once, and says what became of
// each.
func (m *Manager) ShutdownAll(ctx context.Context) []api.StopRow {
	var names []string
	for _, v := range m.List() {
		if live(v.Phase) {
			names = append(names, v.Name)
		}
	}
	rows := make([]api.StopRow, len(names))
	done := make(chan struct{})
	for i, name := range names {
		go func() {
			defer func() { done <- struct{}{} }()
			began := time.Now()
			v, err := m.Shutdown(ctx, name)
			rows[i] = api.StopRow{Name: name, Phase: v.Phase, Millis: time.Since(began).Milliseconds(), Problem: v.Problem}
			if err != nil {
				rows[i].Problem = err.Error()
				if left, err := m.Inspect(name); err == nil {
					rows[i].Phase = left.Phase
				}
			}
		}()
	}
	for range names {
		<-done
	}
	return rows
}
