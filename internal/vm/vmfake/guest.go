package vmfake

import (
	"encoding/json"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/vm"
)

// line is a serial port: a stream whose far end comes and goes.
type line struct {
	mu     sync.Mutex
	cond   sync.Cond
	conn   net.Conn
	paused bool
	closed bool
}

func newLine() *line {
	l := &line{}
	l.cond.L = &l.mu
	return l
}

func (l *line) connect(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		l.conn.Close()
	}
	l.conn = conn
	if l.closed {
		conn.Close()
	}
	l.cond.Broadcast()
}

func (l *line) pause(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.paused = on
	l.cond.Broadcast()
}

func (l *line) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.conn != nil {
		l.conn.Close()
	}
	l.cond.Broadcast()
}

// wait gives a connection other than the one that failed, once the line runs.
func (l *line) wait(failed net.Conn) net.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.closed && (l.conn == nil || l.conn == failed || l.paused) {
		l.cond.Wait()
	}
	if l.closed {
		return nil
	}
	return l.conn
}

func (l *line) Read(b []byte) (int, error) {
	var failed net.Conn
	for {
		conn := l.wait(failed)
		if conn == nil {
			return 0, io.EOF
		}
		n, err := conn.Read(b)
		if err == nil {
			l.wait(nil) // what arrived before a pause is read after it
			return n, nil
		}
		failed = conn
	}
}

func (l *line) Write(b []byte) (int, error) {
	conn := l.wait(nil)
	if conn == nil {
		return 0, io.ErrClosedPipe
	}
	if _, err := conn.Write(b); err != nil {
		return len(b), nil // a port whose far end is gone swallows
	}
	return len(b), nil
}

// serve is the machine's guest: it answers as deckhold does, and "runs" three
// programs: true, false, and cat.
func (m *machine) serve(c vm.Config) {
	token := ""
	for _, word := range c.Cmdline {
		if t, ok := strings.CutPrefix(word, guest.TokenParam+"="); ok {
			token = t
		}
	}
	guest.NewPort(m.line, token).Serve(func(stream *guest.Stream) { m.answer(stream) })
}

func (m *machine) answer(stream net.Conn) {
	defer stream.Close()
	var request guest.Request
	if guest.ReadJSON(stream, &request) != nil {
		return
	}
	switch request.Op {
	case guest.OpSetup:
		ok(stream, guest.SetupResponse{Version: "fake", Kernel: "fake", BootID: m.bootID(), Steps: []guest.Step{{Name: "kernel", Millis: 1}}})
	case guest.OpClock:
		ok(stream, guest.ClockResponse{UnixNanos: time.Now().UnixNano()})
	case guest.OpSync, guest.OpStats:
		ok(stream, struct{}{})
	case guest.OpPowerOff:
		ok(stream, struct{}{})
		go m.end(vm.Exit{Clean: true})
	case guest.OpExec:
		m.exec(stream, request.Args)
	default:
		guest.WriteJSON(stream, guest.Response{Error: &guest.Error{Code: guest.CodeUsage, Message: "no such operation"}})
	}
}

func (m *machine) exec(stream net.Conn, args json.RawMessage) {
	var request guest.ExecRequest
	json.Unmarshal(args, &request)
	code, known := map[string]int{"true": 0, "false": 1, "cat": 0}[request.Argv[0]]
	if !known {
		guest.WriteJSON(stream, guest.Response{Error: &guest.Error{Code: guest.CodeNotFound, Message: request.Argv[0] + " is not on the guest's PATH"}})
		return
	}
	ok(stream, guest.ExecResponse{PID: 2})
	out := guest.NewFrameWriter(stream)
	if request.Argv[0] == "cat" {
		in := guest.NewFrameReader(stream)
		for {
			typ, payload, err := in.Read()
			if err != nil {
				return
			}
			if typ != guest.Stdin {
				continue
			}
			if len(payload) == 0 {
				break
			}
			out.Write(guest.Stdout, payload)
		}
	}
	out.WriteJSON(guest.Exit, guest.ExitStatus{Code: code})
}

func ok(stream net.Conn, result any) {
	data, err := json.Marshal(result)
	if err == nil {
		guest.WriteJSON(stream, guest.Response{OK: true, Result: data})
	}
}
