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

// OwnSession is the session that attach opens where none is named: a login shell.
const OwnSession = "shell"

// awake gives a sandbox that runs, started first if that may be, and what the start
// was.
func (m *Manager) awake(ctx context.Context, name string, noStart, noWake bool, progress func(api.Progress)) (*box, api.StartResult, error) {
	var start api.StartResult
	b, err := m.get(name)
	if err != nil {
		return nil, start, err
	}
	if phase := b.phase(); phase != api.Running && !(saved(phase) && noWake) && !(!saved(phase) && noStart) {
		if start, err = m.Start(ctx, name, progress); err != nil {
			return nil, start, err
		}
	}
	if err := allowed("attach", name, b.phase()); err != nil {
		return nil, start, err
	}
	if err := m.takeBack(ctx, b); err != nil {
		return nil, start, m.silent(b, err)
	}
	b.mu.Lock()
	b.noSessions = false
	b.mu.Unlock()
	return b, start, nil
}

// Attach opens the stream of frames of a session in a sandbox, which it starts first
// unless told not to. Closing the stream leaves the session, which goes on.
func (m *Manager) Attach(ctx context.Context, r api.AttachRequest, progress func(api.Progress)) (net.Conn, api.AttachResult, error) {
	request := guest.SessionAttach{Session: r.Session, Cols: r.Cols, Rows: r.Rows, NoHistory: r.NoHistory}
	if r.Session == "" || r.Session == OwnSession {
		request.Session = OwnSession
		if !r.NoOpen {
			request.Open = &guest.SessionOpen{}
		}
	}
	return m.join(ctx, r.Name, request, r.NoStart, r.NoWake, progress)
}

// Run opens a new session. Without a stream when it is to be left alone.
func (m *Manager) Run(ctx context.Context, r api.RunRequest, progress func(api.Progress)) (net.Conn, api.AttachResult, error) {
	if len(r.Argv) == 0 || r.Argv[0] == "" {
		return nil, api.AttachResult{}, &api.Error{Kind: api.KindUsage, Message: "no program to run was named"}
	}
	open := guest.SessionOpen{Session: r.Session, Argv: r.Argv, Env: r.Env, User: r.User, Workdir: r.Workdir, Cols: r.Cols, Rows: r.Rows}
	if !r.Detach {
		return m.join(ctx, r.Name, guest.SessionAttach{Session: r.Session, Cols: r.Cols, Rows: r.Rows, Open: &open, New: true}, r.NoStart, r.NoWake, progress)
	}
	b, start, err := m.awake(ctx, r.Name, r.NoStart, r.NoWake, progress)
	if err != nil {
		return nil, api.AttachResult{}, err
	}
	var info guest.SessionInfo
	err = m.askSession(ctx, b, guest.OpSessionOpen, open, &info)
	return nil, attachResult(guest.SessionAttached{SessionInfo: info, Opened: true}, start), err
}

func (m *Manager) join(ctx context.Context, name string, request guest.SessionAttach, noStart, noWake bool, progress func(api.Progress)) (net.Conn, api.AttachResult, error) {
	var result api.AttachResult
	b, start, err := m.awake(ctx, name, noStart, noWake, progress)
	if err != nil {
		return nil, result, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	session, err := m.talk(ctx, b)
	if err != nil {
		return nil, result, m.silent(b, err)
	}
	stream, attached, err := session.Attach(ctx, request)
	if err != nil {
		return nil, result, m.sessionError(b, err)
	}
	m.heard(b)
	return stream, attachResult(attached, start), nil
}

func attachResult(a guest.SessionAttached, start api.StartResult) api.AttachResult {
	return api.AttachResult{Session: sessionView(a.SessionInfo), Opened: a.Opened, Started: start.Started, Woke: start.Woke, BootMillis: start.BootMillis, Notes: start.Notes}
}

// Sessions lists a sandbox's sessions: those that run, or that were saved when it came to
// rest. One that is off has none.
func (m *Manager) Sessions(ctx context.Context, r api.SessionsRequest) (api.SessionList, error) {
	list := api.SessionList{Sessions: []api.Session{}}
	b, err := m.get(r.Name)
	if err != nil {
		return list, err
	}
	if p := b.phase(); p == api.Off || p == api.Failed || saved(p) {
		return SavedSessions(m.store, r)
	}
	if err := allowed("attach", r.Name, b.phase()); err != nil {
		return list, err
	}
	if r.Screen != "" {
		var screen guest.SessionScreen
		err := m.askSession(ctx, b, guest.OpSessionScreen, guest.SessionName{Session: r.Screen}, &screen)
		list.Sessions = append(list.Sessions, sessionView(screen.Info))
		list.Screen = &api.Screen{Text: string(screen.Text), VT: screen.VT}
		return list, err
	}
	var all guest.SessionList
	err = m.askSession(ctx, b, guest.OpSessionList, struct{}{}, &all)
	for _, s := range all.Sessions {
		list.Sessions = append(list.Sessions, sessionView(s))
	}
	return list, err
}

// EndSession ends a session's program.
func (m *Manager) EndSession(ctx context.Context, r api.SessionRequest) (api.Session, error) {
	return m.onSession(ctx, guest.OpSessionEnd, r)
}

// RestartSession ends it and runs the same program again, as the same user in the same
// folder.
func (m *Manager) RestartSession(ctx context.Context, r api.SessionRequest) (api.Session, error) {
	return m.onSession(ctx, guest.OpSessionRestart, r)
}

func (m *Manager) onSession(ctx context.Context, op string, r api.SessionRequest) (api.Session, error) {
	b, err := m.get(r.Name)
	if err == nil {
		err = allowed("attach", r.Name, b.phase())
	}
	if err != nil {
		return api.Session{}, err
	}
	var info guest.SessionInfo
	err = m.askSession(ctx, b, op, guest.SessionName{Session: r.Session, Fresh: r.Fresh}, &info)
	return sessionView(info), err
}

// askSession asks the guest one thing about sessions.
func (m *Manager) askSession(ctx context.Context, b *box, op string, args, result any) error {
	ctx, cancel := context.WithTimeout(ctx, answerDeadline)
	defer cancel()
	session, err := m.talk(ctx, b)
	if err != nil {
		return m.silent(b, err)
	}
	if err := session.Call(ctx, op, args, result); err != nil {
		return m.sessionError(b, err)
	}
	m.heard(b)
	return nil
}

func noSession(sandbox, session string) error {
	return &api.Error{
		Kind: api.KindNotFound, Message: fmt.Sprintf("sandbox %q has no session %q", sandbox, session),
		Hint: "see which there are with: doz sessions " + sandbox,
	}
}

// sessionError is the guest's refusal, or its silence, as the client's error.
func (m *Manager) sessionError(b *box, err error) error {
	var refused *guest.Error
	if !errors.As(err, &refused) {
		return m.silent(b, err)
	}
	kind := api.KindExec
	switch refused.Code {
	case guest.CodeNoSession, guest.CodeExists:
		kind = api.KindNotFound
		if refused.Code == guest.CodeExists {
			kind = api.KindExists
		}
		return &api.Error{Kind: kind, Message: fmt.Sprintf("sandbox %q: %s", b.name, refused.Message), Hint: "see which there are with: doz sessions " + b.name}
	case guest.CodeUsage:
		kind = api.KindUsage
	}
	return &api.Error{Kind: kind, Message: fmt.Sprintf("cannot run a program in sandbox %q: %s", b.name, refused.Message)}
}

func sessionView(i guest.SessionInfo) api.Session {
	s := api.Session{
		Session: i.Session, PID: i.PID, Cols: i.Cols, Rows: i.Rows, Clients: i.Clients, State: api.SessionState(i.State),
		Argv: i.Argv, User: i.User, Title: i.Title, Started: time.Unix(0, i.StartedUnixNanos), EnvDropped: i.EnvDropped,
	}
	if i.OutputUnixNanos != 0 {
		at := time.Unix(0, i.OutputUnixNanos)
		s.LastOutput = &at
	}
	if i.Exit != nil {
		s.ExitCode = &i.Exit.Code
	}
	return s
}
