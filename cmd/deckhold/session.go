package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/term"
)

const (
	// historyLines is how many lines that scrolled away a session keeps.
	historyLines = 2000
	// sessionsMost run at once.
	sessionsMost = 512
	// endedKept of those that ended with nobody looking are kept to be looked at.
	endedKept = 16
	// endStep is what a program gets between HUP, TERM and KILL.
	endStep = time.Second
	// inputMost is how much input waits for a program that does not read it.
	inputMost = 64 << 10
)

// sessions are the programs with a terminal. They belong to nobody: clients and hosts
// come and go.
type sessions struct {
	mu     sync.Mutex // guards the map; may be held while a session's own is taken
	byName map[string]*session
}

// session is one. Its name and spec do not change.
type session struct {
	name    string
	spec    guest.SessionOpen // without its variables, which may be secrets
	hadEnv  bool
	pty     *os.File
	pid     int
	group   *cgroup
	done    <-chan syscall.WaitStatus
	started time.Time
	over    chan struct{} // closed when the program has ended and all it wrote is on the screen

	mu      sync.Mutex // guards the rest
	screen  *term.Screen
	viewers []*viewer
	lead    *viewer // whose size the session has, and whose terminal answers
	output  time.Time
	exit    *guest.ExitStatus
	input   []byte    // for the program
	typing  sync.Cond // input has changed, or the session is over
}

func newSession(open *guest.SessionOpen, pty *os.File, cols, rows int) *session {
	s := &session{name: open.Session, spec: *open, pty: pty, started: time.Now(), over: make(chan struct{})}
	s.spec.Env, s.hadEnv = nil, len(open.Env) > 0
	s.typing.L = &s.mu
	s.screen = term.New(cols, rows, historyLines)
	s.screen.Answer = func(b []byte) {
		// With a viewer, its terminal answers. s.mu is held by whoever writes the screen.
		if s.lead == nil && len(s.input)+len(b) <= inputMost {
			s.input = append(s.input, b...)
			s.typing.Broadcast()
		}
	}
	return s
}

// open starts a session.
func (m *machine) open(open guest.SessionOpen) (*session, error) {
	if open.Cols == 0 || open.Rows == 0 {
		open.Cols, open.Rows = 80, 24
	}
	cols, rows := min(max(open.Cols, 2), term.MaxCols), min(max(open.Rows, 1), term.MaxRows)
	all := &m.sessions
	all.mu.Lock()
	defer all.mu.Unlock()
	if all.byName == nil {
		all.byName = map[string]*session{}
	}
	if open.Session == "" {
		open.Session = all.freeName(open.Argv)
	}
	if !sessionName(open.Session) {
		return nil, &guest.Error{Code: guest.CodeUsage, Message: fmt.Sprintf("%q is no session name: 1 to 40 of a-z, 0-9 and -", open.Session)}
	}
	if old := all.byName[open.Session]; old != nil && !old.ended() {
		return nil, &guest.Error{Code: guest.CodeExists, Message: fmt.Sprintf("session %q runs already", open.Session)}
	}
	if all.running() >= sessionsMost {
		return nil, &guest.Error{Code: guest.CodeFailed, Message: fmt.Sprintf("%d sessions run already", sessionsMost)}
	}
	s, err := m.launchSession(&open, cols, rows)
	if err != nil {
		return nil, err
	}
	all.byName[s.name] = s
	go s.pump()
	go s.feed()
	go func() {
		s.wait()
		all.forget(s)
	}()
	return s, nil
}

func sessionName(name string) bool {
	return name != "" && len(name) <= 40 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}

// freeName makes a name of a program's.
func (a *sessions) freeName(argv []string) string {
	base := "shell"
	if len(argv) > 0 {
		base = strings.Trim(strings.Map(func(r rune) rune {
			if sessionName(string(r)) {
				return r
			}
			return '-'
		}, strings.ToLower(filepath.Base(argv[0]))), "-")
	}
	if base = base[:min(len(base), 30)]; base == "" {
		base = "program"
	}
	for n, name := 2, base; ; n++ {
		if old := a.byName[name]; old == nil {
			return name
		}
		name = fmt.Sprintf("%s-%d", base, n)
	}
}

func (a *sessions) running() (n int) {
	for _, s := range a.byName {
		if !s.ended() {
			n++
		}
	}
	return n
}

// find gives a session.
func (a *sessions) find(name string) (*session, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.byName[name]; s != nil {
		return s, nil
	}
	return nil, &guest.Error{Code: guest.CodeNoSession, Message: fmt.Sprintf("there is no session %q", name)}
}

// forget drops a session that ended while somebody looked, and the oldest of those
// that nobody saw end.
func (a *sessions) forget(s *session) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s.seen() {
		a.drop(s)
		return
	}
	var ended []*session
	for _, s := range a.byName {
		if s.ended() {
			ended = append(ended, s)
		}
	}
	slices.SortFunc(ended, func(a, b *session) int { return a.started.Compare(b.started) })
	for _, s := range ended[:max(len(ended)-endedKept, 0)] {
		a.drop(s)
	}
}

func (a *sessions) drop(s *session) {
	if a.byName[s.name] == s {
		delete(a.byName, s.name)
	}
}

func (s *session) ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.exit != nil
}

func (s *session) seen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.viewers) > 0
}

// chunks are what output is read into. They are only held while there is some: most
// sessions are silent.
var chunks = sync.Pool{New: func() any { return new([64 << 10]byte) }}

// pump takes what the program writes, whoever looks or does not.
func (s *session) pump() {
	defer close(s.over)
	raw, err := s.pty.SyscallConn()
	for err == nil {
		var ended bool
		err = raw.Read(func(fd uintptr) bool {
			var n int
			n, ended = s.take(int(fd))
			return n > 0 || ended
		})
		if ended {
			return
		}
	}
}

// take shows what there is, at most a chunk of it, and says how much that was, and
// whether there will be no more.
func (s *session) take(fd int) (n int, ended bool) {
	chunk := chunks.Get().(*[64 << 10]byte)
	defer chunks.Put(chunk)
	for n < len(chunk) {
		k, err := unix.Read(fd, chunk[n:])
		if err == unix.EINTR {
			continue
		}
		if k <= 0 {
			ended = err != unix.EAGAIN
			break
		}
		n += k
	}
	if n > 0 {
		s.show(chunk[:n])
	}
	return n, ended
}

// show puts output on the screen, and in every viewer's way.
func (s *session) show(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.output = time.Now()
	s.screen.Write(b)
	for _, v := range s.viewers {
		v.add(b)
	}
}

// feed writes input to the program, at the program's pace.
func (s *session) feed() {
	for {
		s.mu.Lock()
		for len(s.input) == 0 && s.exit == nil {
			s.typing.Wait()
		}
		if s.exit != nil {
			s.mu.Unlock()
			return
		}
		b := s.input
		s.input = nil
		s.typing.Broadcast()
		s.mu.Unlock()
		if _, err := s.pty.Write(b); err != nil {
			return
		}
	}
}

// wait waits for the program's end, and tells it.
func (s *session) wait() {
	status := <-s.done
	// What something it left running holds open counts no more after a moment.
	select {
	case <-s.over:
	case <-time.After(drainGrace):
		s.pty.SetReadDeadline(time.Unix(1, 0))
		<-s.over
	}
	exit := exitStatus(status, false)
	s.group.release()
	s.mu.Lock()
	s.exit = &exit
	s.typing.Broadcast()
	for _, v := range s.viewers {
		v.wake.Broadcast()
	}
	s.mu.Unlock()
	s.pty.Close()
}

// end ends the program: it is hung up on, then asked, then killed.
func (s *session) end() {
	for _, sig := range []syscall.Signal{unix.SIGHUP, unix.SIGTERM, unix.SIGKILL} {
		if s.ended() {
			return
		}
		if sig == unix.SIGKILL {
			s.group.kill(s.pid)
		} else {
			s.group.signal(s.pid, sig)
			s.group.signal(s.pid, unix.SIGCONT)
		}
		for end := time.Now().Add(endStep); !s.ended() && time.Now().Before(end); {
			time.Sleep(5 * time.Millisecond)
		}
	}
}

// info is the session as a list shows it.
func (s *session) info() guest.SessionInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	cols, rows := s.screen.Size()
	i := guest.SessionInfo{
		Session: s.name, PID: s.pid, Cols: cols, Rows: rows, Clients: len(s.viewers), State: "running",
		Argv: s.spec.Argv, User: s.spec.User, Title: s.screen.Title(), StartedUnixNanos: s.started.UnixNano(),
	}
	if !s.output.IsZero() {
		i.OutputUnixNanos = s.output.UnixNano()
	}
	if s.exit != nil {
		i.State, i.PID, i.Exit = "ended", 0, s.exit
	}
	return i
}

// screenMost bounds what is told of a screen, in bytes: it has to fit in a line.
const screenMost = 300 << 10

func (s *session) view() guest.SessionScreen {
	view := guest.SessionScreen{Info: s.info()}
	s.mu.Lock()
	defer s.mu.Unlock()
	cols, rows := s.screen.Size()
	for lines := historyLines; ; lines /= 2 {
		view.Text = s.screen.Text(lines)
		view.VT = s.screen.Redraw(cols, rows, s.screen.Lines()-int64(lines))
		if len(view.Text) <= screenMost && len(view.VT) <= screenMost {
			return view
		}
		if lines == 0 {
			view.Text = view.Text[:min(len(view.Text), screenMost)]
			view.VT = view.VT[:min(len(view.VT), screenMost)]
			return view
		}
	}
}

// sessionCall does what one request and one answer are enough for.
func (m *machine) sessionCall(op string, args json.RawMessage) (any, error) {
	if op == guest.OpSessionList {
		return m.sessions.list(), nil
	}
	if op == guest.OpSessionOpen {
		var open guest.SessionOpen
		if err := json.Unmarshal(args, &open); err != nil {
			return nil, unreadable(err)
		}
		s, err := m.open(open)
		if err != nil {
			return nil, err
		}
		return s.info(), nil
	}
	var request guest.SessionName
	if err := json.Unmarshal(args, &request); err != nil {
		return nil, unreadable(err)
	}
	s, err := m.sessions.find(request.Session)
	if err != nil {
		return nil, err
	}
	switch op {
	case guest.OpSessionScreen:
		return s.view(), nil
	case guest.OpSessionEnd:
		s.end()
		m.sessions.mu.Lock()
		m.sessions.drop(s)
		m.sessions.mu.Unlock()
		return s.info(), nil
	case guest.OpSessionRestart:
		return m.restart(s)
	}
	return nil, &guest.Error{Code: guest.CodeUsage, Message: fmt.Sprintf("there is no operation %q", op)}
}

func unreadable(err error) error {
	return &guest.Error{Code: guest.CodeUsage, Message: "the request cannot be read: " + err.Error()}
}

// restart ends a session and opens it again as it was, but for its variables, which
// may be secrets and are not kept.
func (m *machine) restart(s *session) (any, error) {
	s.end()
	open := s.spec
	s.mu.Lock()
	open.Cols, open.Rows = s.screen.Size()
	s.mu.Unlock()
	again, err := m.open(open)
	if err != nil {
		return nil, err
	}
	info := again.info()
	info.EnvDropped = s.hadEnv
	return info, nil
}

func (a *sessions) list() guest.SessionList {
	a.mu.Lock()
	defer a.mu.Unlock()
	list := guest.SessionList{Sessions: []guest.SessionInfo{}}
	for _, s := range a.byName {
		list.Sessions = append(list.Sessions, s.info())
	}
	slices.SortFunc(list.Sessions, func(a, b guest.SessionInfo) int { return strings.Compare(a.Session, b.Session) })
	return list
}
