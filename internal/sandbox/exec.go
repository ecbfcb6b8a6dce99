package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
)

// Exec starts a program in a sandbox, which it starts first unless told not to. The
// stream carries the program's frames; the caller closes it, which ends the program
// if it still runs.
func (m *Manager) Exec(ctx context.Context, req api.ExecRequest, progress func(api.Progress)) (net.Conn, api.ExecResult, error) {
	var result api.ExecResult
	b, err := m.get(req.Name)
	if err != nil {
		return nil, result, err
	}
	if len(req.Argv) == 0 || req.Argv[0] == "" {
		return nil, result, &api.Error{Kind: api.KindUsage, Message: "no program to run was named"}
	}
	if phase := b.phase(); phase != api.Running && !(saved(phase) && req.NoWake) && !(!saved(phase) && req.NoStart) {
		start, err := m.Start(ctx, req.Name, progress)
		if err != nil {
			return nil, result, err
		}
		result.Started, result.Woke, result.BootMillis, result.Notes = start.Started, start.Woke, start.BootMillis, start.Notes
	}
	if err := allowed("exec", b.name, b.phase()); err != nil {
		return nil, result, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	if err := m.takeBack(ctx, b); err != nil {
		return nil, result, m.silent(b, err)
	}
	session, err := m.talk(ctx, b)
	if err != nil {
		return nil, result, m.silent(b, err)
	}
	stream, response, err := session.Exec(ctx, guest.ExecRequest{
		Argv: req.Argv, Env: req.Env, User: req.User, Workdir: req.Workdir,
		Stdin: req.Stdin, TimeoutMillis: req.TimeoutMillis,
	})
	if err != nil {
		var refused *guest.Error
		if errors.As(err, &refused) {
			return nil, result, execError(b.name, refused)
		}
		return nil, result, m.silent(b, err)
	}
	m.heard(b)
	result.PID = response.PID
	return stream, result, nil
}

// saved says whether programs stand still in the phase, to be gone on with.
func saved(p api.Phase) bool { return p == api.Paused || p == api.Asleep || p == api.Hibernated }

// execError is the guest's refusal as the client's error.
func execError(name string, refused *guest.Error) error {
	return &api.Error{Kind: api.KindExec, Message: fmt.Sprintf("cannot run a program in sandbox %q: %s", name, refused.Message)}
}

// silent marks a sandbox whose guest did not answer, and says so.
func (m *Manager) silent(b *box, err error) error {
	b.mu.Lock()
	gone := b.machine == nil && !b.left
	b.unresponsive = !gone
	b.mu.Unlock()
	e := &api.Error{Kind: api.KindFailed, Message: fmt.Sprintf("sandbox %q does not answer: %v", b.name, err)}
	if gone {
		e.Message = fmt.Sprintf("sandbox %q ended meanwhile", b.name)
	} else {
		e.Hint = "try again, or end it with: doz shutdown " + b.name
	}
	return e
}

// heard takes the mark of silent back.
func (m *Manager) heard(b *box) {
	b.mu.Lock()
	b.unresponsive = false
	b.mu.Unlock()
}

// watchInterval is how often running guests are asked whether they answer.
const watchInterval = 5 * time.Second

// Watch asks every running sandbox whether it answers, until ctx is done, so that
// a list can say so without asking.
func (m *Manager) Watch(ctx context.Context) {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		m.mu.Lock()
		for _, b := range m.boxes {
			if b.watched() {
				go m.ask(ctx, b)
			}
		}
		m.mu.Unlock()
	}
}

// watched says whether the sandbox is to be asked: it runs, or its machine was left.
func (b *box) watched() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left || b.record.Phase == api.Running
}

func (m *Manager) ask(ctx context.Context, b *box) {
	ctx, cancel := context.WithTimeout(ctx, watchInterval)
	defer cancel()
	if m.takeBack(ctx, b) != nil || b.phase() != api.Running {
		return
	}
	session, err := m.talk(ctx, b)
	if err == nil {
		err = session.Call(ctx, guest.OpClock, guest.ClockRequest{}, nil)
	}
	b.mu.Lock()
	b.unresponsive = err != nil && b.machine != nil
	b.mu.Unlock()
}
