package guest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
)

// ErrEnded means that the whole session has ended, and not only the stream: the host
// went away or began anew, or the machine ended.
var ErrEnded = errors.New("the guest channel was closed")

// Messages of the multiplexed stream. Each begins with 9 bytes: its kind, the
// stream's number and a count, the last two big-endian.
const (
	msgOpen   = 0 // a new stream, its number larger than all before; only the host sends it
	msgData   = 1 // count bytes follow
	msgCredit = 2 // the receiver may send count bytes more
	msgClose  = 3 // the sender neither sends nor reads more on this stream

	muxHeader = 9
)

const (
	// window is how many bytes a stream's receiver holds unread, which bounds what
	// the other side can make this one keep.
	window = 1 << 20
	// sendLimit is how many bytes a stream keeps unsent before a writer waits: one
	// whole frame.
	sendLimit = MaxFrame + frameHeader
	// batchSize is about how much is written at a time.
	batchSize = 64 << 10
)

// mux carries streams over one connection. What arrives is handed to feed, which
// never waits; what is to be sent is written by send, the only one who waits for the
// connection. So no stream waits for another, and whoever waits for the other side
// waits on a stream, where deadlines hold, also while the machine is paused.
type mux struct {
	w      io.Writer
	turn   sync.Locker   // held for each whole write to w
	handle func(*Stream) // for each stream the other side opens; nil: it must not

	mu      sync.Mutex // guards the rest, and all streams' fields
	work    sync.Cond  // something is ready, or err is set
	streams map[uint32]*Stream
	last    uint32    // the largest stream number so far
	ready   []*Stream // have something to send, in turn
	err     error
	done    chan struct{} // closed when err is set

	// Where feed is within a message.
	head [muxHeader]byte
	have int     // bytes of head
	left int     // bytes of data still to come
	into *Stream // whose data it is; nil when nobody wants it any more
}

func newMux(w io.Writer, turn sync.Locker, handle func(*Stream)) *mux {
	t := &mux{w: w, turn: turn, handle: handle, streams: map[uint32]*Stream{}, done: make(chan struct{})}
	t.work.L = &t.mu
	return t
}

// open begins a stream.
func (t *mux) open() (*Stream, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		return nil, t.err
	}
	if t.last == 1<<32-1 {
		return nil, errors.New("the guest channel has run out of stream numbers")
	}
	s := t.add(t.last + 1)
	s.openDue = true
	s.queue()
	return s, nil
}

func (t *mux) add(id uint32) *Stream {
	s := &Stream{mux: t, id: id, inCredit: window, outCredit: window, left: make(chan struct{})}
	s.change.L = &t.mu
	t.streams[id], t.last = s, id
	return s
}

// fail ends every stream. The first error stays.
func (t *mux) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		return
	}
	t.err = err
	close(t.done)
	t.work.Broadcast()
	for _, s := range t.streams {
		s.change.Broadcast()
	}
}

// send writes what streams have to send until the session ends.
func (t *mux) send() {
	var batch []byte
	for {
		t.mu.Lock()
		for len(t.ready) == 0 && t.err == nil {
			t.work.Wait()
		}
		if t.err != nil {
			t.mu.Unlock()
			return
		}
		var bulk *transfer
		batch, bulk = t.collect(batch[:0])
		t.mu.Unlock()

		err := t.write(batch, bulk)
		if bulk != nil {
			t.mu.Lock()
			bulk.stream.bulk = nil
			bulk.stream.change.Broadcast()
			t.mu.Unlock()
		}
		if err != nil {
			t.fail(fmt.Errorf("%w: %w", ErrEnded, err))
			return
		}
	}
}

// write writes a batch and what follows it, unless the session has ended while it
// waited for its turn.
func (t *mux) write(batch []byte, bulk *transfer) error {
	t.turn.Lock()
	defer t.turn.Unlock()
	if err := t.ended(); err != nil {
		return err
	}
	if _, err := t.w.Write(batch); err != nil {
		return err
	}
	if bulk == nil {
		return nil
	}
	return bulk.send(t.w)
}

// collect takes from each stream in turn what it can send. A transfer ends the
// batch: its bytes follow it.
func (t *mux) collect(batch []byte) ([]byte, *transfer) {
	for len(t.ready) > 0 && len(batch) < batchSize {
		s := t.ready[0]
		t.ready = append(t.ready[:0], t.ready[1:]...)
		s.queued = false
		batch = s.collect(batch)
		if b := s.bulk; b != nil && !b.taken && !s.closed && !s.gone {
			b.taken = true
			return append(message(batch, msgData, s.id, len(b.head)+b.n), b.head...), b
		}
	}
	return batch, nil
}

func message(batch []byte, kind byte, id uint32, count int) []byte {
	batch = append(batch, kind)
	batch = binary.BigEndian.AppendUint32(batch, id)
	return binary.BigEndian.AppendUint32(batch, uint32(count))
}

// feed takes what arrived. An error means that the other side does not keep to the
// protocol. Only one goroutine may call it.
func (t *mux) feed(data []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		return t.err
	}
	for len(data) > 0 {
		if t.left > 0 {
			n := min(t.left, len(data))
			if s := t.into; s != nil && !s.closed {
				s.in.Write(data[:n])
				s.change.Broadcast()
			}
			t.left -= n
			data = data[n:]
			continue
		}
		n := copy(t.head[t.have:], data)
		t.have += n
		data = data[n:]
		if t.have < muxHeader {
			break
		}
		t.have = 0
		if err := t.arrived(t.head[0], binary.BigEndian.Uint32(t.head[1:]), binary.BigEndian.Uint32(t.head[5:])); err != nil {
			return err
		}
	}
	return nil
}

// arrived takes one message's beginning.
func (t *mux) arrived(kind byte, id, count uint32) error {
	if kind == msgOpen {
		if t.handle == nil || id <= t.last {
			return errors.New("the other side opened a stream it must not open")
		}
		go t.handle(t.add(id))
		return nil
	}
	if id > t.last || kind > msgClose {
		return errors.New("the other side does not speak the channel's language")
	}
	// Both sides forget a stream when they have closed it: what was under way then
	// still arrives, and concerns nobody.
	s := t.streams[id]
	switch kind {
	case msgData:
		if count > window || s != nil && int(count) > s.inCredit {
			return errors.New("the other side sends more than it may")
		}
		if s != nil {
			s.inCredit -= int(count)
		}
		t.into, t.left = s, int(count)
	case msgCredit:
		if s == nil {
			return nil
		}
		if count > window || s.outCredit+int(count) > window {
			return errors.New("the other side gives more credit than there is")
		}
		s.outCredit += int(count)
		s.queue()
		s.change.Broadcast()
	case msgClose:
		if s != nil && !s.gone {
			s.gone = true
			close(s.left)
			s.out = nil
			s.queue()
			s.change.Broadcast()
		}
	}
	return nil
}

// ended is why the session has ended, nil while it has not.
func (t *mux) ended() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}
