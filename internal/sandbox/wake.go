package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// rises says whether an operation takes a sandbox to running. Two of them on one
// sandbox do not race: the second waits for the first.
func rises(op string) bool { return op == "start" || op == "wake" || op == "resume" }

// Wake has a sleeping or hibernated sandbox carry on. One that runs is left as it is.
func (m *Manager) Wake(ctx context.Context, name string, progress func(api.Progress)) (api.StartResult, error) {
	return m.rise(ctx, name, "wake", progress)
}

// rise takes a sandbox to running from wherever it is.
func (m *Manager) rise(ctx context.Context, name, op string, progress func(api.Progress)) (api.StartResult, error) {
	if progress == nil {
		progress = func(api.Progress) {}
	}
	b, err := m.get(name)
	if err != nil {
		return api.StartResult{}, err
	}
	end, err := m.begin(ctx, b, op, true)
	if err != nil {
		return api.StartResult{}, err
	}
	defer end()
	began := time.Now()
	var result api.StartResult
	switch b.phase() {
	case api.Running:
	case api.Paused, api.Asleep:
		result.Woke = true
		slept := b.get().Snapshot != nil
		if result.Notes, err = m.resume(context.WithoutCancel(ctx), b); slept {
			err = keepsSnapshot(b, err)
		} else if err != nil {
			err = cannot(op, b.name, err)
		}
	case api.Hibernated:
		result.Woke = true
		result.Notes, err = m.wake(ctx, b, progress)
	default:
		result.Started = true
		result.Notes, err = m.boot(ctx, b, progress)
	}
	if err != nil {
		return api.StartResult{}, err
	}
	result.Sandbox, result.BootMillis = b.view(), time.Since(began).Milliseconds()
	return result, nil
}

// wake loads the saved machine of a hibernated sandbox and lets it go on. When it
// fails the machine is gone, and the snapshot is as it was.
func (m *Manager) wake(ctx context.Context, b *box, progress func(api.Progress)) (notes []string, err error) {
	// A client that leaves does not take the wake with it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bootDeadline)
	defer cancel()
	progress(api.Progress{Step: "load", Total: 2})
	before := b.get()
	log := m.beginBoot(b, "wake")
	machine, notes, err := m.load(ctx, b, log)
	if err == nil {
		// From here on the disk moves on and the memory with it: what was saved counts
		// as gone before the first instruction runs.
		err = m.update(b, func(r *record) { r.Phase, r.Problem, r.Snapshot = api.Running, "", nil })
	}
	if err != nil {
		m.kill(b)
		err = keepsSnapshot(b, err)
		log.end(err)
		return nil, err
	}
	m.step(b, "wake/recorded")
	progress(api.Progress{Step: "guest", Done: 1, Total: 2})
	if err := m.letGo(ctx, b, machine, before); err != nil {
		log.end(err)
		return nil, cannot("wake", b.name, err)
	}
	m.step(b, "wake/resumed")
	os.Remove(b.dir.State())
	notes = append(notes, m.refresh(ctx, b)...)
	log.step("answers", "")
	log.end(nil)
	m.step(b, "wake/running")
	progress(api.Progress{Step: "ready", Done: 2, Total: 2})
	return notes, nil
}

// letGo resumes a machine whose seal has just been discarded, which is then as was
// recorded before only if it certainly did not run.
func (m *Manager) letGo(ctx context.Context, b *box, machine vm.Machine, before record) error {
	err := machine.Resume(ctx)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, vm.ErrUnresponsive): // it may go on yet
		b.mu.Lock()
		b.unresponsive = true
		b.mu.Unlock()
	case errors.Is(err, vm.ErrEnded): // perhaps after it had gone on
		m.kill(b)
		m.update(b, func(r *record) { r.Phase, r.Died, r.Problem = api.Off, true, "its machine ended as it was to go on" })
	default:
		m.update(b, func(r *record) { r.Phase, r.Snapshot = before.Phase, before.Snapshot })
		if before.Phase == api.Hibernated {
			m.kill(b)
		}
	}
	return err
}

// load makes the saved machine again, standing, after having checked all there is to
// be checked.
func (m *Manager) load(ctx context.Context, b *box, log *bootLog) (vm.Machine, []string, error) {
	if err := m.update(b, func(r *record) { r.Boots++ }); err != nil {
		return nil, nil, err
	}
	config, files, err := m.config(b, m.saved(b.get().Tools))
	if err != nil {
		return nil, nil, err
	}
	if err := m.wholeSnapshot(ctx, b); err != nil {
		return nil, nil, err
	}
	log.step("checked", "")
	m.step(b, "wake/checked")
	if err := os.MkdirAll(b.dir.Machine(), 0o700); err != nil {
		return nil, nil, err
	}
	config.Restore = b.dir.State()
	config.ConsoleFile, config.ConsoleLimit = log.console, consoleLimit
	machine, err := m.engine.Start(ctx, config)
	if err != nil {
		return nil, nil, err
	}
	m.attach(b, machine)
	log.step("machine", "")
	m.step(b, "wake/loaded")
	return machine, files.Notes, nil
}

// wholeSnapshot refuses a snapshot that this computer cannot load, or that is not what
// was saved.
func (m *Manager) wholeSnapshot(ctx context.Context, b *box) error {
	r := b.get()
	s := r.Snapshot
	if s == nil {
		return errors.New("there is no snapshot of it")
	}
	features, err := m.probe(ctx)
	if err != nil {
		return err
	}
	switch {
	case s.Engine != features.Engine || s.Accelerator != features.Accelerator:
		return fmt.Errorf("it was saved by %s %s with %s, and here is %s %s with %s", s.Engine, s.EngineVersion, s.Accelerator, features.Engine, features.Version, features.Accelerator)
	case older(features.Version, s.EngineVersion):
		return fmt.Errorf("it was saved by %s %s, and %s is too old to load that", s.Engine, s.EngineVersion, features.Version)
	}
	memory := make(chan error, 1)
	go func() { memory <- hasSum(b.dir.Memory(), "memory", s.MemorySum) }()
	err = hasSum(b.dir.State(), "state", s.StateSum)
	if err := first(<-memory, err); err != nil {
		return err
	}
	info, err := os.Stat(b.dir.File(r.Disks[0]))
	if err != nil {
		return fmt.Errorf("its disk cannot be read: %w", err)
	}
	if info.Size() != s.DiskBytes || !info.ModTime().Equal(s.DiskTime) {
		return errors.New("its disk was changed since it was saved")
	}
	return nil
}

func hasSum(path, what string, want uint32) error {
	switch got, err := store.Sum(path); {
	case err != nil:
		return fmt.Errorf("its saved %s cannot be read: %w", what, err)
	case got != want:
		return fmt.Errorf("its saved %s is damaged", what)
	}
	return nil
}

// older says whether version a, numbers with dots between, is before b.
func older(a, b string) bool {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	for i := range min(len(as), len(bs), 2) { // the third number changes no machine
		x, _ := strconv.Atoi(as[i])
		y, _ := strconv.Atoi(bs[i])
		if x != y {
			return x < y
		}
	}
	return false
}

// keepsSnapshot adds to the reason of a failed wake that nothing is lost.
func keepsSnapshot(b *box, err error) error {
	if err == nil {
		return nil
	}
	return &api.Error{
		Kind:    api.KindFailed,
		Message: fmt.Sprintf("cannot wake sandbox %q: %v", b.name, err),
		Hint:    fmt.Sprintf("what was saved is kept, so try again, after doz host stop if it persists; to give the running programs up and keep the disk: doz shutdown %[1]s, then doz start %[1]s", b.name),
	}
}

// refresh tells a guest that went on the time and all else it should know, and gives
// what the user should know. A guest that does not answer is marked.
func (m *Manager) refresh(ctx context.Context, b *box) (notes []string) {
	ctx, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	b.mu.Lock()
	session := b.session
	b.mu.Unlock()
	live, err := m.talk(ctx, b)
	if err == nil && live == session {
		_, err = m.setUp(ctx, b, live) // a new one was set up as it began
	}
	if err != nil {
		m.silent(b, err)
		return []string{"it runs, and does not answer yet: " + err.Error()}
	}
	m.heard(b)
	return nil
}
