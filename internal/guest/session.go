package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Session is the host's end of the channel. Its methods may be called concurrently.
// A guest that is paused, or answers nothing, does not end it: calls end by their
// deadlines, and those after it find the session as it was.
type Session struct {
	conn net.Conn
	mux  *mux
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
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	s := &Session{conn: conn, mux: newMux(conn, new(sync.Mutex), nil)}
	go s.mux.send()
	go s.receive(rest)
	return s, nil
}

// handshake sends the sync line and discards everything up to the answer. It gives
// what came after it.
func handshake(conn net.Conn, token string) ([]byte, error) {
	b := make([]byte, nonceLen/2)
	rand.Read(b)
	nonce := hex.EncodeToString(b)
	if _, err := conn.Write(append(syncMarker(token), nonce+"\n"...)); err != nil {
		return nil, err
	}
	return await(conn, readyLine(token, nonce), staleLimit)
}

// QEMU passes a guest's spliced pages on one by one, and waking up for each costs more
// than its bytes do. So while a message has at least bulkLeft bytes to come, the
// receiver lets them gather for bulkPause, in which a socket does not fill up.
const (
	bulkLeft  = 64 << 10
	bulkPause = 500 * time.Microsecond
)

// receive takes what the guest sends until the session ends.
func (s *Session) receive(data []byte) {
	err := s.mux.feed(data)
	buf := make([]byte, 256<<10)
	for err == nil {
		var n int
		n, err = s.conn.Read(buf)
		if feedErr := s.mux.feed(buf[:n]); feedErr != nil {
			err = feedErr
		}
		if s.mux.left >= bulkLeft {
			time.Sleep(bulkPause)
		}
	}
	s.mux.fail(fmt.Errorf("%w: %w", ErrEnded, err))
	s.conn.Close()
}

// Close ends the session. Programs it started go on, unheard.
func (s *Session) Close() error {
	s.mux.fail(ErrEnded)
	return s.conn.Close()
}

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.mux.done }

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
	if err != nil {
		return nil, response, err
	}
	return stream, response, nil
}

// open opens a stream, sends the request and reads its answer.
func (s *Session) open(ctx context.Context, op string, args, result any) (*Stream, error) {
	data, err := json.Marshal(args)
	if err != nil {
		return nil, err
	}
	if len(data) > MaxLine/2 {
		return nil, &Error{Code: CodeUsage, Message: "the request is too long"}
	}
	stream, err := s.mux.open()
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { stream.SetDeadline(time.Unix(1, 0)) })
	err = exchange(stream, Request{Op: op, Args: data}, result)
	if !stop() {
		// Time ran out rather than what else that made of it.
		err = noAnswer(ctx)
	}
	if err != nil {
		stream.Close()
		return nil, err
	}
	return stream, nil
}

func noAnswer(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return context.Cause(ctx)
	}
	return errors.New("the guest does not answer in time")
}

func exchange(stream *Stream, request Request, result any) error {
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
