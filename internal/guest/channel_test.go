package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// serial is a guest's port whose host can be replaced, as QEMU's is: the guest sees
// no end, and what it had begun to write goes on to the next host.
type serial struct {
	mu   sync.Mutex
	turn sync.Cond
	conn net.Conn
	gone bool // the machine has ended
}

func newSerial(t *testing.T) *serial {
	s := &serial{}
	s.turn.L = &s.mu
	t.Cleanup(s.end)
	return s
}

// connect gives the host's end of a new connection, which ends the one before.
func (s *serial) connect() net.Conn {
	ours, theirs := net.Pipe()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		s.conn.Close()
	}
	s.conn = theirs
	s.turn.Broadcast()
	return ours
}

func (s *serial) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	if s.conn != nil {
		s.conn.Close()
	}
	s.turn.Broadcast()
}

// other waits for a connection that is not c.
func (s *serial) other(c net.Conn) net.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.conn == c && !s.gone {
		s.turn.Wait()
	}
	if s.gone {
		return nil
	}
	return s.conn
}

func (s *serial) Read(b []byte) (int, error) {
	for c := s.other(nil); c != nil; c = s.other(c) {
		if n, err := c.Read(b); err == nil {
			return n, nil
		}
	}
	return 0, io.EOF
}

func (s *serial) Write(b []byte) (n int, err error) {
	for c := s.other(nil); c != nil; c = s.other(c) {
		k, err := c.Write(b[n:])
		if n += k; err == nil {
			return n, nil
		}
	}
	return n, io.EOF
}

// boot runs a small guest on the port.
func boot(t *testing.T, rw io.ReadWriter) {
	t.Helper()
	go NewPort(rw, testToken).Serve(answer)
}

// answer is the small guest: it does what the request's op says.
func answer(s *Stream) {
	defer s.Close()
	var r Request
	if ReadJSON(s, &r) != nil {
		return
	}
	switch r.Op {
	case "hello":
		WriteJSON(s, Response{OK: true, Result: r.Args})
	case "refuse":
		WriteJSON(s, Response{Error: &Error{Code: CodeNotFound, Message: "there is no such thing"}})
	case "refuse without reason":
		WriteJSON(s, Response{})
	case "garbage":
		io.WriteString(s, "this is no JSON\n")
	case "too long":
		io.WriteString(s, strings.Repeat("x", MaxLine+1)+"\n")
	case "leave":
	case "hang":
		<-s.Left()
	case OpExec:
		WriteJSON(s, Response{OK: true, Result: json.RawMessage(`{"pid":7}`)})
		var e ExecRequest
		json.Unmarshal(r.Args, &e)
		programs[e.Argv[0]](s)
	}
}

// programs are what the small guest can run, on the bare stream.
var programs = map[string]func(*Stream){
	"cat":  func(s *Stream) { io.Copy(struct{ io.Writer }{s}, struct{ io.Reader }{s}) },
	"yes":  func(s *Stream) { io.Copy(s, endless{}) },
	"hang": func(s *Stream) { <-s.Left() },
	"last words": func(s *Stream) {
		s.Write(bytes.Repeat([]byte("w"), window/2))
	},
}

type endless struct{}

func (endless) Read(b []byte) (int, error) { return len(b), nil }

func open(t *testing.T, conn net.Conn) *Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := Open(ctx, conn, testToken)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// hello fails the test unless the session works.
func hello(t *testing.T, s *Session) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var got string
	if err := s.Call(ctx, "hello", "you", &got); err != nil || got != "you" {
		t.Fatalf("the session does not work: got %q, %v", got, err)
	}
}

func run(t *testing.T, s *Session, program string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, response, err := s.Exec(ctx, ExecRequest{Argv: []string{program}})
	if err != nil || response.PID != 7 {
		t.Fatalf("cannot run %s: %+v, %v", program, response, err)
	}
	return stream
}

// echo sends data through a stream that gives it back.
func echo(t *testing.T, stream net.Conn, data []byte) {
	t.Helper()
	go stream.Write(data)
	got := make([]byte, len(data))
	if _, err := io.ReadFull(stream, got); err != nil {
		t.Error(err)
	} else if !bytes.Equal(got, data) {
		t.Error("what came back is not what was sent")
	}
}

// bytesOf gives n bytes in which a lost or doubled piece shows.
func bytesOf(n int) []byte {
	data := make([]byte, 0, n+8)
	for i := uint64(0); len(data) < n; i++ {
		data = binary.BigEndian.AppendUint64(data, i)
	}
	return data[:n]
}

func TestSession(t *testing.T) {
	port := newSerial(t)
	boot(t, port)
	s := open(t, port.connect())
	hello(t, s)

	var refusal *Error
	if err := s.Call(t.Context(), "refuse", nil, nil); !errors.As(err, &refusal) || refusal.Code != CodeNotFound {
		t.Errorf("a refused call gave %v", err)
	}
	for op, want := range map[string]string{
		"refuse without reason": "without a reason",
		"garbage":               "not the JSON it should be",
		"too long":              "longer than",
		"leave":                 "EOF",
	} {
		if err := s.Call(t.Context(), op, nil, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("call %q gave %v, want %q", op, err, want)
		}
	}
	var number int
	if err := s.Call(t.Context(), "hello", "no number", &number); err == nil || !strings.Contains(err.Error(), "not what it should be") {
		t.Errorf("an answer of another shape gave %v", err)
	}

	echo(t, run(t, s, "cat"), bytesOf(5*window/2))
	hello(t, s)
}

// What a program wrote before it ended arrives, however late it is read.
func TestLastWordsArrive(t *testing.T) {
	port := newSerial(t)
	boot(t, port)
	stream := run(t, open(t, port.connect()), "last words")
	<-stream.(*Stream).Left()
	got, err := io.ReadAll(stream)
	if err != nil || len(got) != window/2 {
		t.Errorf("got %d bytes, %v; want %d", len(got), err, window/2)
	}
	if _, err := stream.Write([]byte("too late")); err == nil {
		t.Error("a stream that the guest closed took bytes")
	}
}

func TestEndReachesTheGuest(t *testing.T) {
	port := newSerial(t)
	began, ended := make(chan struct{}), make(chan error)
	go NewPort(port, testToken).Serve(func(s *Stream) {
		began <- struct{}{}
		_, err := io.ReadAll(s)
		ended <- err
	})
	s := open(t, port.connect())
	stream, err := s.mux.open()
	if err != nil {
		t.Fatal(err)
	}
	<-began
	stream.Write([]byte("bytes"))
	stream.Close()
	if err := <-ended; err != nil {
		t.Errorf("a closed stream ended with %v in the guest", err)
	}
	if _, err := stream.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("reading a closed stream gave %v", err)
	}

	s.mux.open()
	<-began
	port.end()
	if err := <-ended; !errors.Is(err, ErrEnded) {
		t.Errorf("the machine's end gave %v in the guest, want ErrEnded", err)
	}
	<-s.Done()
}

// sockets are two ends of a connection with room for bytes that nobody reads.
func sockets(t *testing.T) (host, guest net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		ends[i], err = net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ends[i].Close() })
	}
	return ends[0], ends[1]
}

func TestStaleBytesAreDiscarded(t *testing.T) {
	ready := string(readyLine(testToken, nonceA))
	for name, stale := range map[string]string{
		"nothing":           "",
		"messages":          string(message(nil, msgData, 1, 3)) + "abc",
		"an earlier ready":  ready + "stale",
		"half a ready":      ready[:40],
		"two MiB of zeroes": strings.Repeat("\x00", 2<<20),
	} {
		t.Run(name, func(t *testing.T) {
			host, guest := sockets(t)
			go func() {
				io.WriteString(guest, stale)
				NewPort(guest, testToken).Serve(answer)
			}()
			hello(t, open(t, host))
		})
	}
}

// A new host, an adoption and a wake begin anew while programs run and bytes are
// under way in both directions.
func TestNewConnectionInTheMiddle(t *testing.T) {
	port := newSerial(t)
	boot(t, port)
	for range 5 {
		first := open(t, port.connect())
		reading, writing := run(t, first, "yes"), run(t, first, "hang")
		written := make(chan error)
		go func() {
			_, err := io.Copy(struct{ io.Writer }{writing}, endless{})
			written <- err
		}()
		if _, err := io.CopyN(io.Discard, reading, 3<<20); err != nil {
			t.Fatal(err)
		}

		second := open(t, port.connect())
		hello(t, second)
		echo(t, run(t, second, "cat"), bytesOf(window))
		<-first.Done()
		if err := <-written; !errors.Is(err, ErrEnded) {
			t.Errorf("a writer of the first session got %v, want ErrEnded", err)
		}
		if _, err := io.Copy(io.Discard, reading); !errors.Is(err, ErrEnded) {
			t.Errorf("a reader of the first session got %v, want ErrEnded", err)
		}
		if err := first.Call(t.Context(), "hello", nil, nil); !errors.Is(err, ErrEnded) {
			t.Errorf("a call in the first session gave %v, want ErrEnded", err)
		}
	}
}

// The guest's streams of the session before end, and say that they were replaced.
func TestNewSessionOnTheSameConnection(t *testing.T) {
	host, guest := sockets(t)
	began, ended := make(chan struct{}), make(chan error)
	go NewPort(guest, testToken).Serve(func(s *Stream) {
		began <- struct{}{}
		_, err := io.ReadAll(s)
		ended <- err
	})
	for _, nonce := range []string{nonceA, nonceB} {
		io.WriteString(host, syncLine(nonce))
		if _, err := await(host, readyLine(testToken, nonce), 1<<20); err != nil {
			t.Fatal(err)
		}
		if nonce == nonceB {
			if err := <-ended; !errors.Is(err, ErrEnded) {
				t.Errorf("the first session's stream ended with %v", err)
			}
		}
		// Stream numbers begin anew.
		host.Write(message(nil, msgOpen, 1, 0))
		<-began
	}
	host.Close()
	<-ended
}

func TestManyStreamsAtOnce(t *testing.T) {
	port := newSerial(t)
	boot(t, port)
	s := open(t, port.connect())
	var wait sync.WaitGroup
	for i := range 200 {
		wait.Go(func() {
			stream := run(t, s, "cat")
			defer stream.Close()
			echo(t, stream, bytesOf(1000+i*100))
		})
		wait.Go(func() { hello(t, s) })
	}
	wait.Wait()
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	for _, stream := range s.mux.streams {
		if !stream.closed {
			t.Errorf("stream %d is left open", stream.id)
		}
	}
}

func TestStalledStreamBlocksNoOther(t *testing.T) {
	port := newSerial(t)
	boot(t, port)
	s := open(t, port.connect())
	// Nobody reads the first; the second's guest reads nothing, and its writer waits.
	unread, stuck := run(t, s, "yes"), run(t, s, "hang")
	waiting := make(chan error)
	go func() {
		_, err := io.Copy(struct{ io.Writer }{stuck}, endless{})
		waiting <- err
	}()
	full := func(s *Stream) {
		s.mux.mu.Lock()
		defer s.mux.mu.Unlock()
		for s.inCredit > 0 {
			s.change.Wait()
		}
	}
	full(unread.(*Stream))
	echo(t, run(t, s, "cat"), bytesOf(4*window))
	hello(t, s)

	stuck.SetWriteDeadline(time.Unix(1, 0))
	if err := <-waiting; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a writer whose time was up got %v", err)
	}
	unread.Close()
	hello(t, s)
}

// mute reads all and answers nothing.
func mute(c net.Conn) { io.Copy(io.Discard, c) }

func TestGuestThatDoesNotAnswer(t *testing.T) {
	t.Run("to the sync line", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			host, guest := net.Pipe()
			go mute(guest)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if _, err := Open(ctx, host, testToken); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		})
	})
	t.Run("because it reads nothing", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			host, guest := net.Pipe()
			defer guest.Close()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			if _, err := Open(ctx, host, testToken); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		})
	})
	t.Run("but with garbage", func(t *testing.T) {
		host, guest := net.Pipe()
		go mute(guest)
		go io.Copy(guest, endless{})
		_, err := Open(t.Context(), host, testToken)
		if err == nil || !strings.Contains(err.Error(), "garbage") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("and ends", func(t *testing.T) {
		host, guest := net.Pipe()
		go func() {
			guest.Read(make([]byte, 10))
			guest.Close()
		}()
		if s, err := Open(t.Context(), host, testToken); err == nil {
			s.Close()
			t.Error("a session began with nobody")
		}
	})
	t.Run("when the caller has left", func(t *testing.T) {
		host, guest := net.Pipe()
		go mute(guest)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Open(ctx, host, testToken); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

func TestCallEndsByItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		port := &serial{}
		port.turn.L = &port.mu
		defer port.end()
		go NewPort(port, testToken).Serve(answer)
		s, err := Open(t.Context(), port.connect(), testToken)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := s.Call(ctx, "hang", nil, nil); err == nil || err.Error() != "the guest does not answer in time" {
			t.Errorf("got %v", err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if err := s.Call(ctx, "hang", nil, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("a cancelled call gave %v", err)
		}
		if err := s.Call(ctx, "hello", nil, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("a call that was cancelled before gave %v", err)
		}
		hello(t, s)
	})
}

func TestRequestTooLong(t *testing.T) {
	port := newSerial(t)
	boot(t, port)
	s := open(t, port.connect())
	var refusal *Error
	if err := s.Call(t.Context(), "hello", strings.Repeat("x", MaxLine), nil); !errors.As(err, &refusal) || refusal.Code != CodeUsage {
		t.Errorf("got %v, want an error of code %s", err, CodeUsage)
	}
	hello(t, s)
}

// A guest that does not keep to the protocol ends the session, at once.
func TestHostileGuest(t *testing.T) {
	data := func(id uint32, count int) []byte {
		return append(message(nil, msgData, id, count), make([]byte, count)...)
	}
	for name, sends := range map[string][]byte{
		"opens a stream":           message(nil, msgOpen, 2, 0),
		"opens the host's stream":  message(nil, msgOpen, 1, 0),
		"an unknown kind":          message(nil, 9, 1, 0),
		"data of no stream":        data(2, 1),
		"a close of no stream":     message(nil, msgClose, 2, 0),
		"more than the window":     message(nil, msgData, 1, window+1),
		"more than it may, slowly": bytes.Repeat(data(1, MaxFrame), window/MaxFrame+1),
		"too much credit":          message(nil, msgCredit, 1, window),
		"no credit at all":         message(nil, msgCredit, 1, -1),
		"text":                     []byte("Kernel panic - not syncing: Attempted to kill init!"),
	} {
		t.Run(name, func(t *testing.T) {
			host, guest := sockets(t)
			go func() {
				ReadLine(guest, MaxLine) // the empty line before it
				line, _ := ReadLine(guest, MaxLine)
				guest.Write(readyLine(testToken, string(line[len(line)-nonceLen:])))
				guest.Read(make([]byte, 1)) // the stream's beginning
				go mute(guest)
				guest.Write(sends)
			}()
			s := open(t, host)
			stream, err := s.mux.open()
			if err != nil {
				t.Fatal(err)
			}
			<-s.Done()
			if _, err := io.Copy(io.Discard, stream); !errors.Is(err, ErrEnded) {
				t.Errorf("the stream ended with %v", err)
			}
			if err := s.Call(t.Context(), "hello", nil, nil); !errors.Is(err, ErrEnded) {
				t.Errorf("a call gave %v", err)
			}
		})
	}
}

// Whatever a guest sends, a stream holds no more than its window, and nothing panics.
func FuzzHostileGuest(f *testing.F) {
	f.Add([]byte(nil), 1)
	f.Add(append(message(nil, msgData, 1, 3), "abc"...), 2)
	f.Add(append(message(message(nil, msgCredit, 1, 5), msgData, 1, 1), 'x'), 3)
	f.Add(message(message(nil, msgClose, 1, 0), msgData, 1, 1<<20), 9)
	f.Add(message(message(nil, msgClose, 2, 0), msgClose, 2, 0), 100)
	f.Fuzz(func(t *testing.T, data []byte, piece int) {
		m := newMux(io.Discard, new(sync.Mutex), nil)
		var streams []*Stream
		for range 3 {
			s, err := m.open()
			if err != nil {
				t.Fatal(err)
			}
			streams = append(streams, s)
		}
		streams[2].Write([]byte("unsent"))
		streams[1].Close()
		m.collect(nil)
		for len(data) > 0 {
			n := min(max(piece, 1), len(data))
			if err := m.feed(data[:n]); err != nil {
				break
			}
			data = data[n:]
		}
		for _, s := range streams {
			if s.in.Len() > window || s.outCredit > window || s.outCredit < 0 || s.inCredit < 0 {
				t.Fatalf("stream %d holds %d bytes, credits %d and %d", s.id, s.in.Len(), s.inCredit, s.outCredit)
			}
		}
		m.fail(ErrEnded)
	})
}

func FuzzReady(f *testing.F) {
	ready := string(readyLine(testToken, nonceA))
	for _, seed := range []string{"", ready, "stale" + ready + "rest", ready[:30] + ready, ready[:30]} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		_, want, found := bytes.Cut(data, []byte(ready))
		for how, r := range map[string]io.Reader{"whole": bytes.NewReader(data), "byte by byte": iotest.OneByteReader(bytes.NewReader(data))} {
			rest, err := await(r, []byte(ready), 1<<20)
			if found != (err == nil) || !bytes.HasPrefix(want, rest) {
				t.Fatalf("%s: await(%q) = %q, %v", how, data, rest, err)
			}
		}
	})
}

func TestTransfer(t *testing.T) {
	port := newSerial(t)
	sent := make(chan error)
	go NewPort(port, testToken).Serve(func(s *Stream) {
		defer s.Close()
		for i := range 8 {
			payload := bytes.Repeat([]byte{byte(i)}, MaxFrame)
			err := s.Transfer(FrameHeader(Stdout, len(payload)), len(payload), func(w io.Writer) error {
				_, err := w.Write(payload)
				return err
			})
			sent <- err
			if err != nil {
				return
			}
			s.Write(FrameHeader(Stderr, 0))
		}
	})
	s := open(t, port.connect())
	stream, err := s.mux.open()
	if err != nil {
		t.Fatal(err)
	}
	frames := NewFrameReader(stream)
	for i := range 4 {
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		for _, want := range []byte{Stdout, Stderr} {
			typ, payload, err := frames.Read()
			if err != nil || typ != want || want == Stdout && (len(payload) != MaxFrame || payload[0] != byte(i)) {
				t.Fatalf("transfer %d: type %d, %d bytes, %v", i, typ, len(payload), err)
			}
		}
	}
	// Nobody reads any more: what cannot be sent ends with the stream.
	for err = nil; err == nil; err = <-sent {
		stream.Close()
	}
	if !errors.Is(err, io.ErrClosedPipe) && !errors.Is(err, net.ErrClosed) {
		t.Errorf("a transfer on a stream that the host left gave %v", err)
	}
	if _, err := s.mux.open(); err != nil {
		t.Errorf("the session ended with the stream: %v", err)
	}
}

func TestDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMux(io.Discard, new(sync.Mutex), nil)
		s, _ := m.open()
		s.SetDeadline(time.Now().Add(time.Minute))
		if _, err := s.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("reading gave %v", err)
		}
		if _, err := s.Write(make([]byte, 2*sendLimit)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("writing gave %v", err)
		}
		// A deadline taken away again lets the stream work.
		s.SetReadDeadline(time.Time{})
		if err := m.feed(append(message(nil, msgData, s.id, 2), "ok"...)); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(io.ReadAll(io.LimitReader(s, 2))); got != "[111 107] <nil>" {
			t.Errorf("reading after it gave %s", got)
		}
	})
}
