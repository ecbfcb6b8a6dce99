package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/wire"
)

// host listens in a temporary folder and answers each connection with answer, which
// is given the request. The connection is closed after it.
func host(t *testing.T, answer func(w *wire.Conn, line []byte)) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "host.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				w := wire.New(conn)
				if line, err := w.ReadLine(); err == nil {
					answer(w, line)
				}
			}()
		}
	}()
	return socket
}

// saying answers every request with the same text.
func saying(t *testing.T, text string) string {
	return host(t, func(w *wire.Conn, _ []byte) { io.WriteString(w.Conn, text) })
}

func wantError(t *testing.T, err error, kind api.Kind, text string) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) || e.Kind != kind || !strings.Contains(e.Message, text) {
		t.Errorf("got error %#v, want kind %s and %q", err, kind, text)
	}
}

func TestProgressThenReply(t *testing.T) {
	var steps []api.Progress
	socket := host(t, func(w *wire.Conn, line []byte) {
		if diff := cmp.Diff(`{"name":"a1","op":"start","v":1}`, string(line)); diff != "" {
			t.Errorf("the request (-want +got):\n%s", diff)
		}
		io.WriteString(w.Conn, `{"event":"progress","step":"kernel","done":1,"total":2}`+"\n")
		io.WriteString(w.Conn, `{"event":"of a later version","future":true}`+"\n")
		w.Reply(api.StartResult{Sandbox: api.Sandbox{Name: "a1", Phase: api.Running}, Started: true, BootMillis: 7}, nil)
	})
	got, err := New(socket, func(p api.Progress) { steps = append(steps, p) }).Start(t.Context(), "a1")
	if err != nil || !got.Started || got.BootMillis != 7 || got.Sandbox.Phase != api.Running {
		t.Errorf("got %+v, %v", got, err)
	}
	if len(steps) != 2 || steps[0].Step != "kernel" || steps[0].Total != 2 {
		t.Errorf("progress: %+v", steps)
	}
}

func TestErrorsKeepTheirKind(t *testing.T) {
	want := &api.Error{Kind: api.KindPhase, Message: "it is booting", Hint: "wait"}
	socket := host(t, func(w *wire.Conn, _ []byte) { w.Reply(nil, want) })
	_, err := New(socket, nil).Inspect(t.Context(), "a1")
	if diff := cmp.Diff(error(want), err); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestBadHosts(t *testing.T) {
	for name, test := range map[string]struct{ says, want string }{
		"ends at once":      {"", "ended before it answered"},
		"ends in a line":    {`{"ok":tr`, "ended before it answered"},
		"ends in progress":  {`{"event":"progress","step":"x"}` + "\n", "ended before it answered"},
		"garbage":           {"garbage\n", "what is no message"},
		"no answer":         {"{}\n", "what is no answer"},
		"an endless line":   {strings.Repeat("x", api.MaxLine+1), "longer than"},
		"no result at all":  {`{"ok":true}` + "\n", "what is no answer"},
		"another's results": {`{"ok":true,"result":[1]}` + "\n", "what is no answer"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(saying(t, test.says), nil).Inspect(t.Context(), "a1")
			wantError(t, err, api.KindUnavailable, test.want)
		})
	}
}

func TestNoHost(t *testing.T) {
	c := New(filepath.Join(t.TempDir(), "host.sock"), nil)
	_, err := c.Connect(t.Context(), nil)
	wantError(t, err, api.KindUnavailable, "no host runs")

	_, err = c.Connect(t.Context(), func() (func() error, error) { return nil, errors.New("no program") })
	wantError(t, err, api.KindUnavailable, "no program")
	_, err = c.Connect(t.Context(), func() (func() error, error) {
		return func() error { return errors.New("the disk is full") }, nil
	})
	wantError(t, err, api.KindUnavailable, "the disk is full")
	ctx, cancel := context.WithCancel(t.Context())
	_, err = c.Connect(ctx, func() (func() error, error) { cancel(); return func() error { return nil }, nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled, got %v", err)
	}
	_, err = New(filepath.Join(t.TempDir(), strings.Repeat("x", 200)), nil).Connect(t.Context(), nil)
	wantError(t, err, api.KindUnavailable, "cannot reach the host")
}

// A host that takes a connection and says nothing is waited for, but not for ever.
func TestSilentHost(t *testing.T) {
	socket := host(t, func(w *wire.Conn, _ []byte) { w.Read(make([]byte, 1)) })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := New(socket, nil).Connect(ctx, func() (func() error, error) {
		t.Error("another host was started beside it")
		return nil, errors.New("no")
	})
	wantError(t, err, api.KindUnavailable, "does not answer")
}

func TestHostOfAnotherVersion(t *testing.T) {
	spawn := func() (func() error, error) {
		t.Error("another host was started beside it")
		return nil, errors.New("no")
	}
	newer := host(t, func(w *wire.Conn, _ []byte) { w.Reply(api.Status{Version: "9.1", ProtocolVersion: 9, PID: 4242}, nil) })
	_, err := New(newer, nil).Connect(t.Context(), spawn)
	wantError(t, err, api.KindVersion, "the host is doz 9.1 and speaks protocol version 9, not 1")
	if hint := api.AsError(err).Hint; !strings.Contains(hint, "kill 4242") {
		t.Errorf("the hint is %q", hint)
	}
	older := host(t, func(w *wire.Conn, _ []byte) { w.Reply(nil, &api.Error{Kind: api.KindVersion, Message: "too new"}) })
	_, err = New(older, nil).Connect(t.Context(), spawn)
	wantError(t, err, api.KindVersion, "too new")
}

// What a host says before it has read a request that it does not want is heard.
func TestRefusedUnread(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "host.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		wire.New(conn).Reply(nil, &api.Error{Kind: api.KindUnavailable, Message: "too many clients"})
		conn.Close()
	}()
	// Longer than what fits in the socket, so that writing it fails.
	_, err = New(socket, nil).Create(t.Context(), api.CreateRequest{Name: "a1", Image: strings.Repeat("x", 900<<10)})
	wantError(t, err, api.KindUnavailable, "too many clients")
}

// A host that goes away as we ask is followed by the next one.
func TestConnectToAHostOnItsWayOut(t *testing.T) {
	var asked atomic.Int32
	socket := host(t, func(w *wire.Conn, _ []byte) {
		if asked.Add(1) > 1 {
			w.Reply(api.Status{PID: 8, ProtocolVersion: api.Version}, nil)
		}
	})
	status, err := New(socket, nil).Connect(t.Context(), func() (func() error, error) {
		return func() error { return nil }, nil
	})
	if err != nil || status.PID != 8 {
		t.Errorf("got %+v, %v", status, err)
	}
}

func TestConnectStartsAHost(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "host.sock")
	status, err := New(socket, nil).Connect(t.Context(), func() (func() error, error) {
		l, err := net.Listen("unix", socket)
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				w := wire.New(conn)
				w.ReadLine()
				w.Reply(api.Status{PID: 7, ProtocolVersion: api.Version}, nil)
				conn.Close()
			}
		}()
		return func() error { return nil }, err
	})
	if err != nil || status.PID != 7 {
		t.Errorf("got %+v, %v", status, err)
	}
}

func TestCancelledCallLeaves(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan struct{})
	socket := host(t, func(w *wire.Conn, _ []byte) {
		cancel()
		w.Read(make([]byte, 1)) // until the client has left
		close(left)
	})
	if _, err := New(socket, nil).Create(ctx, api.CreateRequest{Name: "a1"}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	<-left
}

func TestEventsAndConsole(t *testing.T) {
	socket := saying(t, `{"ok":true,"result":{}}`+"\n"+`{"event":"phase","name":"a1","phase":"running"}`+"\nno JSON\n"+`{"event":"console","text":"hi"}`+"\nhalf a li")
	c := New(socket, nil)
	var names []string
	if err := c.Events(t.Context(), "", func(_ json.RawMessage, e api.Event) { names = append(names, e.Event+e.Name) }); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"phasea1", "console"}, names); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	var text string
	if err := c.Console(t.Context(), "a1", func(s string) { text += s }); err != nil || text != "hi" {
		t.Errorf("console: %q, %v", text, err)
	}
}

// echo is an exec that sends back what it gets, half of it as errors, and then code.
func echo(code int) func(*wire.Conn, []byte) {
	return func(w *wire.Conn, _ []byte) {
		w.Reply(api.ExecResult{PID: 7}, nil)
		in, out := guest.NewFrameReader(w), guest.NewFrameWriter(w.Conn)
		for {
			typ, payload, err := in.Read()
			if err != nil || typ == guest.Stdin && len(payload) == 0 {
				break
			}
			if typ == guest.Signal {
				out.WriteJSON(guest.Exit, guest.ExitStatus{Code: 128, Signal: string(payload)})
				return
			}
			half := len(payload) / 2
			out.Write(guest.Stdout, payload[:half])
			out.Write(guest.Stderr, payload[half:])
			out.Write(77, []byte("a frame of a later version"))
		}
		out.WriteJSON(guest.Exit, guest.ExitStatus{Code: code})
	}
}

func run(t *testing.T, socket string, streams IO) (guest.ExitStatus, error) {
	return New(socket, nil).Exec(t.Context(), api.ExecRequest{Name: "a1", Argv: []string{"x"}}, streams, func(api.ExecResult) {})
}

func TestExecPassesBytesUntouched(t *testing.T) {
	sent := make([]byte, 64<<20)
	rand.Read(sent)
	// Put together again in the order in which it was sent.
	var got bytes.Buffer
	got.Grow(len(sent))
	status, err := run(t, host(t, echo(3)), IO{Stdin: bytes.NewReader(sent), Stdout: &got, Stderr: &got})
	if err != nil || status.Code != 3 {
		t.Fatalf("got %+v, %v", status, err)
	}
	if !bytes.Equal(got.Bytes(), sent) {
		t.Errorf("%d bytes came back of %d, or others", got.Len(), len(sent))
	}
}

func TestExecKeepsStreamsApart(t *testing.T) {
	var out, errs strings.Builder
	status, err := run(t, host(t, echo(0)), IO{Stdin: strings.NewReader("outerr"), Stdout: &out, Stderr: &errs})
	if err != nil || status.Code != 0 || out.String() != "out" || errs.String() != "err" {
		t.Errorf("got %+v, %v, %q, %q", status, err, out.String(), errs.String())
	}
}

func TestExecSignals(t *testing.T) {
	signals := make(chan string, 1)
	signals <- "TERM"
	stdin, _ := io.Pipe() // a terminal nobody types on
	status, err := run(t, host(t, echo(0)), IO{Stdin: stdin, Stdout: io.Discard, Stderr: io.Discard, Signals: signals})
	if err != nil || status.Signal != "TERM" {
		t.Errorf("got %+v, %v", status, err)
	}
}

func TestExecEndsBadly(t *testing.T) {
	const ok = `{"ok":true,"result":{"pid":7}}` + "\n"
	for name, test := range map[string]struct {
		says string
		kind api.Kind
		want string
	}{
		"the host dies in the stream": {ok + string(guest.FrameHeader(guest.Stdout, 5)) + "hello", api.KindUnavailable, "the host ended while the program ran"},
		"the host dies in a frame":    {ok + string(guest.FrameHeader(guest.Stdout, 50)) + "hello", api.KindUnavailable, "within a frame"},
		"a frame that is too long":    {ok + "\x01\xff\xff\xff\xff", api.KindUnavailable, "too long"},
		"the sandbox ends":            {ok + string(guest.FrameHeader(guest.Failure, 0)), api.KindFailed, "ended while the program ran"},
		"a failure of a kind":         {ok + string(guest.FrameHeader(guest.Failure, 36)) + `{"code":"wrong-phase","message":"x"}`, api.KindPhase, "x"},
		"no exit code":                {ok + string(guest.FrameHeader(guest.Exit, 4)) + "none", api.KindFailed, "no exit code"},
		"refused":                     {`{"ok":false,"error":{"code":"exec-failed","message":"no such program"}}` + "\n", api.KindExec, "no such program"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := run(t, saying(t, test.says), IO{Stdout: io.Discard, Stderr: io.Discard})
			wantError(t, err, test.kind, test.want)
		})
	}
}

// When whoever reads our output is gone, exec ends, and with it the program.
func TestExecWithoutAReader(t *testing.T) {
	r, w := io.Pipe()
	r.CloseWithError(io.ErrClosedPipe)
	_, err := run(t, host(t, echo(0)), IO{Stdin: strings.NewReader("xx"), Stdout: w, Stderr: w})
	if !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v", err)
	}
}

// Whatever a host answers, the client ends, and its error has a kind.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{"", "{}\n", `{"ok":true,"result":{"pid":1}}` + "\n\x05\x00\x00\x00\x02{}", `{"event":"progress"}` + "\n", `{"ok":false,"error":{}}` + "\n", "null\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		a, b := net.Pipe()
		go func() {
			a.Write(data)
			a.Close()
		}()
		w := wire.New(b)
		defer b.Close()
		c := New("", nil)
		var result api.ExecResult
		err := c.answer(w, &result)
		if err == nil {
			_, err = receive(guest.NewFrameReader(w), IO{Stdout: io.Discard, Stderr: io.Discard})
		}
		var e *api.Error
		if err != nil && !errors.As(err, &e) {
			t.Fatalf("%q gives %#v", data, err)
		}
	})
}

// TestListOfMany: more sandboxes than one answer holds.
func TestListOfMany(t *testing.T) {
	var all []api.Sandbox
	for i := range 3 * api.MaxList {
		all = append(all, api.Sandbox{Name: fmt.Sprintf("a%04d", i)})
	}
	socket := host(t, func(w *wire.Conn, line []byte) {
		var r api.ListRequest
		json.Unmarshal(line, &r)
		at := 0
		for at < len(all) && all[at].Name <= r.After {
			at++
		}
		w.Reply(all[at:min(at+api.MaxList, len(all))], nil)
	})
	got, err := New(socket, nil).List(t.Context())
	if diff := cmp.Diff(all, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}
