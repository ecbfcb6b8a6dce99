package guest

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Stream is one of a session's streams. It is a net.Conn whose writes return when
// the bytes are on their way, and whose Close ends both directions: the other side
// reads what was sent and then io.EOF, and cannot write. When the whole session
// ends, both sides get ErrEnded instead.
type Stream struct {
	mux    *mux
	id     uint32
	change sync.Cond // on mux.mu, which guards all that follows

	in       bytes.Buffer // received and not read
	inCredit int          // what the other side may still send
	unacked  int          // read since the last credit

	out       []byte // written and not sent
	outCredit int    // what may be sent
	bulk      *transfer

	queued    bool // in mux.ready
	openDue   bool
	closeDue  bool
	creditDue int

	closed bool          // by this side
	gone   bool          // the other side closed it
	left   chan struct{} // closed when gone is set

	readBy, writeBy deadline
}

var _ net.Conn = (*Stream)(nil)

// transfer is a piece of output that the sender fetches itself.
type transfer struct {
	stream *Stream
	head   []byte
	n      int
	send   func(io.Writer) error
	taken  bool
}

// queue puts the stream in line if it has anything to send.
func (s *Stream) queue() {
	if s.queued || !(s.openDue || s.creditDue > 0 || s.closeDue && len(s.out) == 0 ||
		len(s.out) > 0 && s.outCredit > 0 || s.bulk != nil && !s.bulk.taken) {
		return
	}
	s.queued = true
	s.mux.ready = append(s.mux.ready, s)
	s.mux.work.Signal()
}

// collect appends what the stream can send now, in the order the other side must
// see it.
func (s *Stream) collect(batch []byte) []byte {
	if s.openDue {
		s.openDue = false
		batch = message(batch, msgOpen, s.id, 0)
	}
	if s.creditDue > 0 {
		batch = message(batch, msgCredit, s.id, s.creditDue)
		s.creditDue = 0
	}
	if n := min(len(s.out), s.outCredit); n > 0 {
		batch = append(message(batch, msgData, s.id, n), s.out[:n]...)
		s.out = s.out[:copy(s.out, s.out[n:])]
		s.outCredit -= n
		s.change.Broadcast()
	}
	if s.closeDue && len(s.out) == 0 {
		s.closeDue = false
		batch = message(batch, msgClose, s.id, 0)
		delete(s.mux.streams, s.id)
	}
	return batch
}

// Left is closed when the other side has closed the stream, however much of what it
// sent before is still unread. The end of the whole session does not close it.
func (s *Stream) Left() <-chan struct{} { return s.left }

// Read gives what has arrived.
func (s *Stream) Read(b []byte) (int, error) {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	if err := s.awaitInput(0); err != nil || len(b) == 0 {
		return 0, err
	}
	n, _ := s.in.Read(b)
	s.acknowledge(n)
	return n, nil
}

// readLine reads a line of at most limit bytes as ReadLine does, in one piece.
func (s *Stream) readLine(limit int) ([]byte, error) {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	var line []byte
	for {
		if err := s.awaitInput(0); err != nil {
			if err == io.EOF && len(line) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		part := s.in.Bytes()
		end := bytes.IndexByte(part, '\n')
		if end >= 0 {
			part = part[:end]
		}
		if len(line)+len(part) > limit {
			return nil, fmt.Errorf("a line is longer than %d bytes", limit)
		}
		line = append(line, part...)
		if end >= 0 {
			s.in.Next(end + 1)
			s.acknowledge(end + 1)
			return line, nil
		}
		s.in.Next(len(part))
		s.acknowledge(len(part))
	}
}

// awaitInput waits until more than have bytes are there to be read.
func (s *Stream) awaitInput(have int) error {
	for {
		switch {
		case s.closed:
			return net.ErrClosed
		case s.readBy.passed():
			return os.ErrDeadlineExceeded
		case s.in.Len() > have:
			return nil
		case s.gone:
			return io.EOF
		case s.mux.err != nil:
			return s.mux.err
		}
		s.change.Wait()
	}
}

// acknowledge lets the other side send as much again as was read.
func (s *Stream) acknowledge(n int) {
	if s.unacked += n; s.unacked >= window/4 && !s.gone {
		s.creditDue += s.unacked
		s.inCredit += s.unacked
		s.unacked = 0
		s.queue()
	}
}

// Write queues b and waits only while much is queued before it.
func (s *Stream) Write(b []byte) (written int, err error) {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	for {
		if err := s.writeError(); err != nil {
			return written, err
		}
		if n := min(sendLimit-len(s.out), len(b)-written); n > 0 && s.bulk == nil {
			s.out = append(s.out, b[written:written+n]...)
			written += n
			s.queue()
		}
		if written == len(b) {
			return written, nil
		}
		s.change.Wait()
	}
}

func (s *Stream) writeError() error {
	switch {
	case s.closed:
		return net.ErrClosed
	case s.gone:
		return io.ErrClosedPipe
	case s.mux.err != nil:
		return s.mux.err
	case s.writeBy.passed():
		return os.ErrDeadlineExceeded
	}
	return nil
}

// Transfer sends head and then n bytes, at most MaxFrame together with head's, that
// send writes to the connection itself, so that they need not be copied. send is
// called at most once, by the session's sender, and must write exactly n bytes or
// fail, which ends the session. Transfer returns when send has, and reports whether
// the bytes were taken.
func (s *Stream) Transfer(head []byte, n int, send func(connection io.Writer) error) error {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	b := &transfer{stream: s, head: head, n: n, send: send}
	for queued := false; ; {
		if !b.taken {
			if err := s.writeError(); err != nil {
				if queued {
					s.bulk = nil
				}
				return err
			}
		}
		switch {
		case queued && s.bulk != b:
			return nil
		case !queued && s.bulk == nil && len(s.out) == 0 && s.outCredit >= len(head)+n:
			queued = true
			s.bulk = b
			s.outCredit -= len(head) + n
			s.queue()
		}
		s.change.Wait()
	}
}

// Close ends the stream. It never waits. In the guest, what was written is still
// sent; the host, which closes only what it has no more use for, drops it.
func (s *Stream) Close() error {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.in = bytes.Buffer{}
	s.readBy.stop()
	s.writeBy.stop()
	if s.mux.handle == nil || s.gone {
		s.out = nil
	}
	if s.openDue {
		// The other side has never heard of it. It stays queued, with nothing to send.
		s.openDue, s.creditDue = false, 0
		delete(s.mux.streams, s.id)
	} else {
		s.closeDue = true
		s.queue()
	}
	s.change.Broadcast()
	return nil
}

// SetDeadline, SetReadDeadline and SetWriteDeadline are net.Conn's.
func (s *Stream) SetDeadline(t time.Time) error {
	s.setDeadline(&s.readBy, t)
	s.setDeadline(&s.writeBy, t)
	return nil
}

func (s *Stream) SetReadDeadline(t time.Time) error {
	s.setDeadline(&s.readBy, t)
	return nil
}

func (s *Stream) SetWriteDeadline(t time.Time) error {
	s.setDeadline(&s.writeBy, t)
	return nil
}

// deadline is a time, and a timer that wakes whoever waits then.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

func (s *Stream) setDeadline(d *deadline, at time.Time) {
	s.mux.mu.Lock()
	defer s.mux.mu.Unlock()
	d.stop()
	d.at = at
	if wait := time.Until(at); !at.IsZero() && wait > 0 && !s.closed {
		d.timer = time.AfterFunc(wait, func() {
			s.mux.mu.Lock()
			defer s.mux.mu.Unlock()
			s.change.Broadcast()
		})
	}
	s.change.Broadcast()
}

// LocalAddr and RemoteAddr name nothing: a session has no addresses.
func (s *Stream) LocalAddr() net.Addr  { return addr{} }
func (s *Stream) RemoteAddr() net.Addr { return addr{} }

type addr struct{}

func (addr) Network() string { return "guest" }
func (addr) String() string  { return "guest" }
