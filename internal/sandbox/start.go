package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/vm"
)

const (
	consoleLimit = 1 << 20 // bytes kept of one boot's console
	// bootRoom has to be free on the store's disk for a boot: half of it is what the
	// memory of a system that has just booted takes.
	bootRoom = 128 << 20

	// How long a machine may take to answer after its start. Emulated, the slowest
	// boot seen (64 CPUs, 8 GiB) takes a tenth of it.
	bootDeadline = 120 * time.Second
	// How long after its sockets a machine's process may be seen to end.
	endDeadline = time.Second
	// How long a running guest may take to answer a short question.
	answerDeadline = 10 * time.Second
)

// Start has a sandbox run: it boots one that is off, and wakes one that was saved. One
// that runs is left as it is, and a start already under way is joined.
func (m *Manager) Start(ctx context.Context, name string, progress func(api.Progress)) (api.StartResult, error) {
	return m.rise(ctx, name, "start", progress)
}

// boot takes a sandbox from off to running, and gives what the user should know
// besides. When it fails the machine is gone and the sandbox failed, with the reason.
func (m *Manager) boot(ctx context.Context, b *box, progress func(api.Progress)) (notes []string, err error) {
	config, files, err := m.config(b, m.parts.Boot)
	if err != nil {
		return nil, err
	}
	if err := m.room(bootRoom); err != nil {
		return nil, cannot("start", b.name, err)
	}
	// A power cut's leftovers: memory that no machine has is worth nothing.
	err = b.clean()
	if err == nil {
		err = os.Mkdir(b.dir.Machine(), 0o700)
	}
	if err != nil {
		return nil, &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot start sandbox %q: %v", b.name, err)}
	}
	err = m.update(b, func(r *record) {
		r.Phase, r.Problem, r.Boots, r.Tools = api.Booting, "", r.Boots+1, files.ToolsName
	})
	if err != nil {
		return nil, err
	}
	m.step(b, "start/recorded")
	log := m.beginBoot(b, "start")
	config.ConsoleFile, config.ConsoleLimit = log.console, consoleLimit

	// A client that leaves does not take the boot with it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bootDeadline)
	defer cancel()
	machine, err := m.startMachine(ctx, b, config, log, progress)
	if err != nil {
		return nil, m.bootFailed(b, log, err)
	}
	m.step(b, "start/machine")
	progress(api.Progress{Step: "guest", Done: 1, Total: 2})

	setup, err := m.connect(ctx, b, machine)
	if err != nil {
		m.kill(b)
		return nil, m.bootFailed(b, log, err)
	}
	log.guest(setup)
	m.step(b, "start/guest")
	if err := m.update(b, func(r *record) { r.Phase, r.Died, r.Check = api.Running, false, false }); err != nil {
		m.kill(b)
		return nil, m.bootFailed(b, log, err)
	}
	os.Remove(b.dir.State()) // of the template
	log.end(nil)
	m.step(b, "start/running")
	progress(api.Progress{Step: "ready", Done: 2, Total: 2})
	return files.Notes, nil
}

// startMachine gives a machine whose processors run: one that has booted already, from
// a template, or one that boots.
func (m *Manager) startMachine(ctx context.Context, b *box, config vm.Config, log *bootLog, progress func(api.Progress)) (vm.Machine, error) {
	machine, err := m.fromTemplate(ctx, b, config, log, progress)
	if err != nil {
		m.log.Warn("a sandbox boots without a template", "sandbox", b.name, "error", err)
		progress(api.Progress{Step: "boot", Total: 2})
		config.Cmdline = cmdline(b.get().Token)
		if machine, err = m.engine.Start(ctx, config); err != nil {
			return nil, err
		}
	}
	m.attach(b, machine)
	log.step("machine", "")
	if log.offset > 0 {
		log.resumed = time.Since(log.record.At).Milliseconds()
	}
	if err := machine.Resume(ctx); err != nil {
		m.kill(b)
		return nil, err
	}
	return machine, nil
}

// bootFailed records why a boot failed and gives it as an error.
func (m *Manager) bootFailed(b *box, log *bootLog, err error) error {
	log.end(err)
	e := &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot start sandbox %q: %v", b.name, err), Hint: "see its boot with: doz console " + b.name}
	var known *api.Error
	if errors.As(err, &known) {
		e = known
	}
	if err := b.clean(); err != nil {
		m.log.Warn("cannot clean up after a failed boot", "sandbox", b.name, "error", err)
	}
	if err := m.update(b, func(r *record) { r.Phase, r.Problem = api.Failed, e.Message }); err != nil {
		m.log.Error("cannot record a failed boot", "sandbox", b.name, "error", err)
	}
	return e
}

// saved is config's parts of a machine that was saved or runs.
func (m *Manager) saved(tools string) func(kernel string) (BootFiles, error) {
	return func(kernel string) (BootFiles, error) { return m.parts.Saved(kernel, tools) }
}

// config is the machine a sandbox is, the same one every time, and the parts it boots
// from, which parts gives.
func (m *Manager) config(b *box, parts func(kernel string) (BootFiles, error)) (vm.Config, BootFiles, error) {
	r := b.get()
	fail := func(err error) error {
		e := &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("cannot start sandbox %q: %v", r.Name, err)}
		var known *api.Error
		if errors.As(err, &known) {
			e.Hint = known.Hint
		}
		return e
	}
	base, err := m.images.Key(r.Image, r.ImageKey)
	if err != nil {
		return vm.Config{}, BootFiles{}, fail(err)
	}
	boot, err := parts(r.Kernel)
	if err != nil {
		return vm.Config{}, BootFiles{}, fail(err)
	}
	var files []string
	for _, file := range r.Disks {
		path := b.dir.File(file)
		if _, err := os.Stat(path); err != nil {
			return vm.Config{}, BootFiles{}, fail(fmt.Errorf("its root disk cannot be read: %w", err))
		}
		files = append(files, path)
	}
	return vm.Config{
		Dir: b.dir.Machine(), Name: r.Name, CPUs: r.CPUs, MemoryMiB: r.MemoryMiB,
		MemoryFile: b.dir.Memory(), Kernel: boot.Kernel, Initrd: boot.Initrd,
		Cmdline: cmdline(r.Token),
		Disks: []vm.Disk{
			{Path: files[0], Layers: files[1:], Base: base.Disk, Format: vm.Overlay},
			{Path: boot.Tools, Format: vm.Raw, ReadOnly: true},
		},
		MachineType: r.MachineType, Audio: r.Audio,
	}, boot, nil
}

// cmdline is what a sandbox's kernel is told.
func cmdline(token string) []string {
	return []string{guest.TokenParam + "=" + token, "doz.root=vda", "doz.tools=vdb"}
}

// attach makes a machine the box's and watches for its end.
func (m *Manager) attach(b *box, machine vm.Machine) {
	b.mu.Lock()
	b.machine, b.ending, b.unresponsive, b.left = machine, false, false, false
	b.mu.Unlock()
	exit := machine.Wait()
	go func() { m.ended(b, machine, <-exit) }()
}

// ended records the end of a machine that nobody asked for. The transitions that
// end one themselves record it themselves.
func (m *Manager) ended(b *box, machine vm.Machine, exit vm.Exit) {
	b.mu.Lock()
	if b.machine != machine || b.ending {
		b.mu.Unlock()
		return
	}
	phase := b.record.Phase
	b.detach()
	b.mu.Unlock()
	if phase == api.Booting {
		return // boot fails by itself and says why
	}
	err := m.update(b, func(r *record) {
		if r.Snapshot != nil { // it slept: all of it is saved
			r.Phase = api.Hibernated
			return
		}
		r.Phase = api.Off
		if !exit.Clean {
			r.Died, r.Problem = true, "its machine ended unasked: "+exit.Text
		}
	})
	if err != nil {
		m.log.Error("cannot record a machine's end", "sandbox", b.name, "error", err)
	}
	m.tidy(b)
}

// tidy removes what an ended machine has left, once nobody is at the sandbox any more.
func (m *Manager) tidy(b *box) {
	end, err := m.begin(context.Background(), b, "tidy", true)
	if err != nil {
		return // it runs again, and whoever started it has tidied first
	}
	defer end()
	m.mu.Lock()
	removed := m.boxes[b.name] != b
	m.mu.Unlock()
	if removed {
		return // the folder may be another's by now
	}
	if err := b.clean(); err != nil {
		m.log.Warn("cannot clean up after a machine", "sandbox", b.name, "error", err)
	}
	m.step(b, "tidied")
}

// detach forgets the machine. The caller holds b.mu.
func (b *box) detach() {
	if b.session != nil {
		b.session.Close()
	}
	b.machine, b.session, b.unresponsive, b.left = nil, nil, false, false
}

// clean removes what only a running machine needs. What is sealed stays.
func (b *box) clean() error {
	if b.get().Snapshot == nil {
		for _, path := range []string{b.dir.Memory(), b.dir.State(), b.dir.ScreensDir()} {
			if err := os.RemoveAll(path); err != nil {
				return err
			}
		}
	}
	return os.RemoveAll(b.dir.Machine())
}

func (b *box) phase() api.Phase {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.record.Phase
}

// connect opens the guest channel and makes the guest this sandbox.
func (m *Manager) connect(ctx context.Context, b *box, machine vm.Machine) (guest.SetupResponse, error) {
	var setup guest.SetupResponse
	// A machine that ends while it boots ends the wait.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	exit := machine.Wait()
	go func() {
		select {
		case e := <-exit:
			cancel(fmt.Errorf("its machine ended while it booted: %s", cmp.Or(e.Text, "powered off")))
		case <-ctx.Done():
		}
	}()
	conn, err := machine.DialGuest(ctx)
	if err != nil {
		return setup, because(ctx, err)
	}
	session, err := guest.Open(ctx, conn, b.record.Token)
	if err != nil {
		conn.Close()
		return setup, because(ctx, err)
	}
	if setup, err = m.setUp(ctx, b, session); err != nil {
		session.Close()
		return setup, because(ctx, err)
	}
	b.mu.Lock()
	if b.session != nil {
		b.session.Close()
	}
	b.session = session
	b.mu.Unlock()
	return setup, nil
}

const (
	seedBytes = 64
	// In so short an exchange a clock is set rightly enough, and in one of up to the
	// longer time once half of it is made up for.
	clockExact, clockFair = 10 * time.Millisecond, 80 * time.Millisecond
	clockTries            = 3
)

// setClock gives a guest this computer's time. A request may be long on its way: under
// emulation the first after a wake takes a tenth of a second.
func setClock(ctx context.Context, session *guest.Session) error {
	for try := 1; ; try++ {
		sent := time.Now()
		if err := session.Call(ctx, guest.OpClock, guest.ClockRequest{UnixNanos: sent.UnixNano()}, nil); err != nil {
			return err
		}
		switch took := time.Since(sent); {
		case took <= clockExact:
			return nil
		case took <= clockFair || try == clockTries:
			return session.Call(ctx, guest.OpClock, guest.ClockRequest{MoveNanos: int64(took / 2)}, nil)
		}
	}
}

// setUp makes the guest this sandbox, here and now: its names, its time, its own
// random numbers. It is asked of every guest that was not heard of for a while.
func (m *Manager) setUp(ctx context.Context, b *box, session *guest.Session) (guest.SetupResponse, error) {
	r := b.get()
	seed := make([]byte, seedBytes)
	rand.Read(seed)
	request := guest.SetupRequest{
		Hostname: b.name, UnixNanos: time.Now().UnixNano(), TimeZone: localZone(), MachineID: r.MachineID,
		Seed: seed, Fresh: r.Fresh, Check: r.Check,
	}
	var setup guest.SetupResponse
	if err := session.Call(ctx, guest.OpSetup, request, &setup); err != nil {
		return setup, err
	}
	if r.Fresh {
		if err := m.update(b, func(r *record) { r.Fresh = false }); err != nil {
			return setup, err
		}
	}
	return setup, setClock(ctx, session)
}

// because prefers the reason a context was cancelled for over what that led to.
func because(ctx context.Context, err error) error {
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) || errors.Is(err, vm.ErrEnded) {
		// A machine's sockets close a moment before its end is known.
		select {
		case <-ctx.Done():
		case <-time.After(endDeadline):
		}
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		if errors.Is(cause, context.DeadlineExceeded) {
			return errors.New("the guest does not answer")
		}
		return cause
	}
	return err
}

// talk gives a session with the running guest, a new one when the last has ended.
func (m *Manager) talk(ctx context.Context, b *box) (*guest.Session, error) {
	b.dialing.Lock()
	defer b.dialing.Unlock()
	b.mu.Lock()
	session, machine := b.session, b.machine
	b.mu.Unlock()
	if machine == nil {
		return nil, vm.ErrEnded
	}
	if session != nil {
		select {
		case <-session.Done():
		default:
			return session, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	if _, err := m.connect(ctx, b, machine); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.session, nil
}
