package main

import (
	"encoding/json"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

const (
	// hangupGrace is what a program whose client left gets between HUP and KILL.
	hangupGrace = 2 * time.Second
	// drainGrace is how long after a program's end its output may stay open, held by
	// something it started, before the end is reported. What is written later is
	// dropped.
	drainGrace = 250 * time.Millisecond
)

// program is one that exec started.
type program struct {
	pid    int
	group  *cgroup
	done   <-chan syscall.WaitStatus
	stdin  *os.File // nil when it has none of ours
	stdout *output
	stderr *output

	ended   atomic.Bool // its process id may be another's
	stream  *guest.Stream
	writing sync.Mutex // one frame at a time
}

// exec runs a program whose frames the stream carries. The exit frame comes when the
// program itself has ended and what was written by then has been sent. What it left
// running in the background goes on, unheard.
//
// When the client closes the stream, the program and all it started are ended. When
// the whole session ends (the host died, or the machine woke under another), the
// program goes on, its input ends and its output is dropped.
func (m *machine) exec(stream *guest.Stream, args json.RawMessage) {
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
	defer p.group.release()
	p.stream = stream
	accept(stream, guest.ExecResponse{PID: p.pid})
	go p.input()
	go p.stdout.pump(p)
	go p.stderr.pump(p)
	status, timedOut := p.wait(request.TimeoutMillis)
	p.drain()
	p.writing.Lock()
	defer p.writing.Unlock()
	guest.NewFrameWriter(stream).WriteJSON(guest.Exit, exitStatus(status, timedOut))
}

// wait waits for the program's end, and brings it about when time runs out or the
// client has left.
func (p *program) wait(timeoutMillis int64) (status syscall.WaitStatus, timedOut bool) {
	var timeout, kill <-chan time.Time
	if timeoutMillis > 0 {
		timeout = time.After(time.Duration(timeoutMillis) * time.Millisecond)
	}
	left, done := p.stream.Left(), p.done
	for {
		select {
		case status = <-done:
			p.ended.Store(true)
			if kill == nil {
				return status, timedOut
			}
			done = nil // the rest of the tree has its grace too
		case <-timeout:
			timedOut = true
			p.group.kill(p.pid)
		case <-left:
			left = nil
			// What it writes now concerns nobody, and must not hold it up.
			p.stream.Close()
			p.group.signal(p.pid, unix.SIGHUP)
			kill = time.After(hangupGrace)
		case <-kill:
			p.group.kill(p.pid)
			if kill = nil; done == nil {
				return status, timedOut
			}
		}
	}
}

// input passes on what the client sends. Input that the program does not read waits
// in its pipe, then in the stream, then with the client, and a signal waits behind it.
func (p *program) input() {
	stdin := p.stdin
	defer func() {
		if stdin != nil {
			stdin.Close()
		}
	}()
	frames := guest.NewFrameReader(p.stream)
	for {
		typ, payload, err := frames.Read()
		if err != nil {
			return
		}
		switch typ {
		case guest.Stdin:
			if stdin == nil {
				continue
			}
			if len(payload) > 0 {
				_, err = stdin.Write(payload)
			}
			// The end of input, or a program that reads no more of it.
			if len(payload) == 0 || err != nil {
				stdin.Close()
				stdin = nil
			}
		case guest.Signal:
			if sig := unix.SignalNum("SIG" + string(payload)); sig != 0 && !p.ended.Load() {
				unix.Kill(-p.pid, sig)
			}
		}
	}
}

// drain waits until what the ended program wrote has been sent.
func (p *program) drain() {
	if p.stdin != nil {
		p.stdin.SetWriteDeadline(time.Unix(1, 0)) // nobody's input is written any more
	}
	grace := time.NewTimer(drainGrace)
	defer grace.Stop()
	for _, o := range []*output{p.stdout, p.stderr} {
		select {
		case <-o.drained:
			continue
		case <-grace.C:
			grace.Reset(0)
		}
		o.finish()
		<-o.drained
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
