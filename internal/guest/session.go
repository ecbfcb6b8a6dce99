package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/hashicorp/yamux"
)

// Session is the host's end of the channel. Its methods may be called concurrently.
type Session struct {
	conn net.Conn
	mux  *yamux.Session
}

// staleLimit is how many bytes of an earlier session may be discarded before the
// ready line: what a virtio port and two sockets can hold, many times over.
const staleLimit = 64 << 20

// Open begins a session on conn, which it then owns, also when it fails. It waits
// for the guest until ctx is done.
func Open(ctx context.Context, conn net.Conn, token string) (*Session, error) {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	rest, err := handshake(conn, token)
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	session, err := yamux.Client(&withRest{Conn: conn, rest: rest}, mux())
	if err != nil {
		conn.Close()
		return nil, err
	}
	s := &Session{conn: conn, mux: session}
	go s.refuse()
	return s, nil
}

// handshake sends the sync line and discards everything up to the answer. It gives
// what came after it.
func handshake(conn net.Conn, token string) ([]byte, error) {
	b := make([]byte, nonceLen/2)
	rand.Read(b)
	nonce := hex.EncodeToString(b)
	if _, err := conn.Write(syncLine(token, nonce)); err != nil {
		return nil, err
	}
	want := readyLine(token, nonce)
	var seen []byte
	buf := make([]byte, 64<<10)
	for total := 0; total < staleLimit; {
		n, err := conn.Read(buf)
		seen = append(seen, buf[:n]...)
		total += n
		if i := bytes.Index(seen, want); i >= 0 {
			return seen[i+len(want):], nil
		}
		if keep := len(want) - 1; len(seen) > keep {
			seen = append(seen[:0], seen[len(seen)-keep:]...)
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the machine closed the guest channel")
			}
			return nil, err
		}
	}
	return nil, errors.New("the guest sends garbage instead of an answer")
}

// withRest gives the bytes that were read past the handshake before the others.
type withRest struct {
	net.Conn
	rest []byte
}

func (c *withRest) Read(b []byte) (int, error) {
	if len(c.rest) > 0 {
		n := copy(b, c.rest)
		c.rest = c.rest[n:]
		return n, nil
	}
	return c.Conn.Read(b)
}

// refuse closes every stream the guest opens: only the host may.
func (s *Session) refuse() {
	for {
		stream, err := s.mux.AcceptStream()
		if err != nil {
			return
		}
		stream.Close()
	}
}

// Close ends the session. Programs it started go on, unheard.
func (s *Session) Close() error {
	s.mux.Close()
	return s.conn.Close()
}

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.mux.CloseChan() }

// Call asks the guest one thing. An *Error is the guest's own answer; anything else
// means that it did not answer, until ctx was done.
func (s *Session) Call(ctx context.Context, op string, args, result any) error {
	stream, err := s.open(ctx, op, args, result)
	if err != nil {
		return err
	}
	return stream.Close()
}

// Exec starts a program and gives the stream of its frames. Closing the stream
// before the program has ended ends the program.
func (s *Session) Exec(ctx context.Context, request ExecRequest) (net.Conn, ExecResponse, error) {
	var response ExecResponse
	stream, err := s.open(ctx, OpExec, request, &response)
	return stream, response, err
}

// open opens a stream, sends the request and reads its answer.
func (s *Session) open(ctx context.Context, op string, args, result any) (net.Conn, error) {
	data, err := json.Marshal(args)
	if err != nil {
		return nil, err
	}
	if len(data) > MaxLine/2 {
		return nil, &Error{Code: CodeUsage, Message: "the request is too long"}
	}
	// Opening and writing can block when the guest does not read, which no deadline
	// on the stream covers: the session is given up then, and the next one syncs anew.
	stop := context.AfterFunc(ctx, func() { s.stalled(ctx) })
	defer stop()
	stream, err := s.mux.OpenStream()
	if err != nil {
		return nil, orCause(ctx, err)
	}
	unblock := context.AfterFunc(ctx, func() { stream.SetDeadline(time.Unix(1, 0)) })
	err = exchange(stream, Request{Op: op, Args: data}, result)
	if !unblock() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		stream.Close()
		return nil, orCause(ctx, err)
	}
	return stream, nil
}

// stalled ends the session if it cannot even be written to a second after its
// caller gave up.
func (s *Session) stalled(context.Context) {
	done := make(chan struct{})
	go func() {
		s.mux.Ping()
		close(done)
	}()
	select {
	case <-done:
	case <-s.Done():
	case <-time.After(time.Second):
		s.Close()
	}
}

func exchange(stream net.Conn, request Request, result any) error {
	if err := WriteJSON(stream, request); err != nil {
		return err
	}
	var response Response
	if err := ReadJSON(stream, &response); err != nil {
		return err
	}
	if !response.OK {
		if response.Error == nil || response.Error.Message == "" {
			return errors.New("the guest refused without a reason")
		}
		return response.Error
	}
	if result == nil || len(response.Result) == 0 {
		return nil
	}
	if err := json.Unmarshal(response.Result, result); err != nil {
		return fmt.Errorf("the guest's answer is not what it should be: %w", err)
	}
	return nil
}

// orCause says that time ran out rather than how that showed.
func orCause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errors.New("the guest does not answer in time")
	}
	return err
}
