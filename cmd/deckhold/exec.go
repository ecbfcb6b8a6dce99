package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// pipeSize is what a program's output may run ahead of its reader.
const pipeSize = 1 << 20

// hangupGrace is what a program whose client left gets between HUP and KILL.
const hangupGrace = 2 * time.Second

// program is one that exec started.
type program struct {
	pid    int
	group  *cgroup
	done   <-chan syscall.WaitStatus
	stdin  *os.File // nil when it has none of ours
	stdout *os.File
	stderr *os.File

	writing sync.Mutex // one frame at a time
	out     net.Conn
}

// exec runs a program whose frames the stream carries. The answer's last frame comes
// when the program itself has ended and what it wrote has been sent; what it left
// running in the background goes on, unheard.
func (m *machine) exec(session *yamux.Session, stream net.Conn, args json.RawMessage) {
	var request guest.ExecRequest
	if err := json.Unmarshal(args, &request); err != nil || len(request.Argv) == 0 {
		refuse(stream, &guest.Error{Code: guest.CodeUsage, Message: "the request names no program"})
		return
	}
	p, err := m.launch(request)
	if err != nil {
		refuse(stream, asError(err))
		return
	}
	p.out = stream
	defer p.group.remove()
	if err := accept(stream, guest.ExecResponse{PID: p.pid}); err != nil {
		p.group.kill(p.pid)
	}

	gone := make(chan struct{}) // the client left
	go p.input(session, gone)
	var drained sync.WaitGroup
	exited := make(chan struct{})
	for typ, pipe := range map[byte]*os.File{guest.Stdout: p.stdout, guest.Stderr: p.stderr} {
		drained.Add(1)
		go func() { defer drained.Done(); p.pump(typ, pipe, exited) }()
	}
	status, timedOut := p.wait(request.TimeoutMillis, gone)
	close(exited)
	p.stdout.SetReadDeadline(time.Unix(1, 0))
	p.stderr.SetReadDeadline(time.Unix(1, 0))
	drained.Wait()
	p.writing.Lock()
	defer p.writing.Unlock()
	guest.NewFrameWriter(stream).WriteJSON(guest.Exit, exitStatus(status, timedOut))
}

// wait waits for the program's end and brings it about when time runs out or the
// client has left.
func (p *program) wait(timeoutMillis int64, gone <-chan struct{}) (status syscall.WaitStatus, timedOut bool) {
	var timeout, kill <-chan time.Time
	if timeoutMillis > 0 {
		timeout = time.After(time.Duration(timeoutMillis) * time.Millisecond)
	}
	for {
		select {
		case status := <-p.done:
			return status, timedOut
		case <-timeout:
			timedOut = true
			p.group.kill(p.pid)
		case <-gone:
			gone = nil
			p.group.signal(p.pid, unix.SIGHUP)
			kill = time.After(hangupGrace)
		case <-kill:
			p.group.kill(p.pid)
		}
	}
}

// input passes on what the client sends. When the client leaves, gone is closed;
// when the whole session ends (the host died, the machine woke elsewhere), the
// program goes on.
func (p *program) input(session *yamux.Session, gone chan<- struct{}) {
	defer func() {
		if p.stdin != nil {
			p.stdin.Close()
		}
	}()
	frames := guest.NewFrameReader(p.out)
	for {
		typ, payload, err := frames.Read()
		if err != nil {
			if !session.IsClosed() {
				close(gone)
			}
			return
		}
		switch typ {
		case guest.Stdin:
			if p.stdin == nil {
				continue
			}
			if len(payload) > 0 {
				_, err = p.stdin.Write(payload)
			}
			// The end of input, or a program that reads no more of it.
			if len(payload) == 0 || err != nil {
				p.stdin.Close()
				p.stdin = nil
			}
		case guest.Signal:
			if sig := unix.SignalNum("SIG" + string(payload)); sig != 0 {
				unix.Kill(-p.pid, sig)
			}
		}
	}
}

// pump sends one of the program's outputs until it is closed or, once the program
// has exited, until what the pipe then held has been sent. When the client cannot
// be reached the output is read and dropped, so that the program never hangs on it.
func (p *program) pump(typ byte, pipe *os.File, exited <-chan struct{}) {
	defer pipe.Close()
	w := guest.NewFrameWriter(p.out)
	left := pipeSize // what the pipe can have held at the exit
	var lost bool
	for left > 0 {
		select {
		case <-exited:
			pipe.SetReadDeadline(time.Time{})
			if unread(pipe) == 0 {
				return
			}
		default:
		}
		n, err := pipe.Read(w.Buffer())
		if errors.Is(err, os.ErrDeadlineExceeded) {
			continue
		}
		if err != nil {
			return
		}
		select {
		case <-exited:
			left -= n
		default:
		}
		if !lost {
			p.writing.Lock()
			lost = w.WriteBuffered(typ, n) != nil
			p.writing.Unlock()
		}
	}
}

func exitStatus(status syscall.WaitStatus, timedOut bool) guest.ExitStatus {
	if status.Signaled() {
		name := unix.SignalName(status.Signal())
		if len(name) > 3 {
			name = name[3:]
		}
		return guest.ExitStatus{Code: 128 + int(status.Signal()), Signal: name, TimedOut: timedOut}
	}
	return guest.ExitStatus{Code: status.ExitStatus(), TimedOut: timedOut}
}

// asError gives a failure to start its code.
func asError(err error) *guest.Error {
	var e *guest.Error
	if errors.As(err, &e) {
		return e
	}
	return &guest.Error{Code: guest.CodeFailed, Message: err.Error()}
}

// launch starts the program of a request.
func (m *machine) launch(request guest.ExecRequest) (*program, error) {
	if m.problem != nil {
		return nil, m.problem
	}
	who, err := lookupUser(request.User)
	if err != nil {
		return nil, err
	}
	env, path := environment(request, who)
	dir := request.Workdir
	if dir == "" {
		dir = who.workdir()
	} else if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return nil, &guest.Error{Code: guest.CodeNotFound, Message: fmt.Sprintf("there is no folder %s", dir)}
	}
	program, err := lookupProgram(request.Argv[0], path, dir)
	if err != nil {
		return nil, err
	}
	return m.fork(program, request, env, dir, who)
}

func (m *machine) fork(path string, request guest.ExecRequest, env []string, dir string, who user) (*program, error) {
	p := &program{group: newCgroup()}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	failed := func(err error) (*program, error) {
		for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
			if f != nil {
				f.Close()
			}
		}
		p.group.remove()
		return nil, err
	}
	if request.Stdin {
		w, r, err := pipe(true)
		if err != nil {
			return failed(err)
		}
		p.stdin, theirs = w, append(theirs, r)
	} else {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return failed(err)
		}
		theirs = append(theirs, null)
	}
	for _, ours := range []**os.File{&p.stdout, &p.stderr} {
		r, w, err := pipe(false)
		if err != nil {
			return failed(err)
		}
		*ours, theirs = r, append(theirs, w)
	}
	attr := &syscall.ProcAttr{Dir: dir, Env: env, Sys: &syscall.SysProcAttr{Setsid: true, Credential: who.credential()}}
	for _, f := range theirs {
		attr.Files = append(attr.Files, f.Fd())
	}
	p.group.join(attr.Sys)
	var err error
	if p.pid, p.done, err = m.reaper.start(path, request.Argv, attr); err != nil {
		return failed(&guest.Error{Code: guest.CodeNotAllowed, Message: fmt.Sprintf("%s cannot be run: %v", request.Argv[0], err)})
	}
	return p, nil
}

// pipe makes a roomy pipe. The program's end blocks, as programs expect; ours does
// not, so that deadlines work on it.
func pipe(weWrite bool) (ours, theirs *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	mine, its := fds[0], fds[1]
	if weWrite {
		mine, its = its, mine
	}
	unix.FcntlInt(uintptr(mine), unix.F_SETPIPE_SZ, pipeSize)
	unix.SetNonblock(mine, true)
	return os.NewFile(uintptr(mine), "pipe"), os.NewFile(uintptr(its), "pipe"), nil
}

// unread is how many bytes a pipe holds.
func unread(pipe *os.File) (n int) {
	conn, err := pipe.SyscallConn()
	if err != nil {
		return 0
	}
	conn.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	return n
}
