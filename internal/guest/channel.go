package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync"
)

// errReplaced ends a guest's session because the host has begun a new one.
var errReplaced = fmt.Errorf("%w: the host began a new session", ErrEnded)

func syncMarker(token string) []byte       { return []byte("\n" + token + " sync ") }
func readyLine(token, nonce string) []byte { return []byte("\n" + token + " ready " + nonce + "\n") }

const nonceLen = 32

// Port is the guest's end of the channel: a byte stream in which the host may begin
// anew at any time.
type Port struct {
	rw    io.ReadWriter
	token string

	// writing is held for each write, so that a new session's ready line follows
	// whole writes of the last.
	writing sync.Mutex
}

// NewPort speaks on rw, whose reads and writes wait for a host.
func NewPort(rw io.ReadWriter, token string) *Port { return &Port{rw: rw, token: token} }

// Serve reads the port for ever and hands each stream the host opens to handle, in
// a goroutine of its own. It returns when reading fails, with that error.
func (p *Port) Serve(handle func(*Stream)) error {
	find := &matcher{marker: syncMarker(p.token)}
	buf := make([]byte, 64<<10)
	var session *mux
	defer func() {
		if session != nil {
			session.fail(ErrEnded)
		}
	}()
	for {
		n, err := p.rw.Read(buf)
		for data := buf[:n]; len(data) > 0; {
			before, nonce, after := find.next(data)
			if session != nil {
				if err := session.feed(before); err != nil {
					session.fail(fmt.Errorf("%w: %w", ErrEnded, err))
				}
			}
			if nonce != "" {
				if session != nil {
					session.fail(errReplaced)
				}
				session = p.begin(nonce, handle)
			}
			data = after
		}
		if err != nil {
			return err
		}
	}
}

// begin starts the session that nonce names. Nothing here waits for the host to
// read: only then can it be heard beginning another.
func (p *Port) begin(nonce string, handle func(*Stream)) *mux {
	session := newMux(p.rw, &p.writing, handle)
	go func() {
		if err := session.write(readyLine(p.token, nonce), nil); err != nil {
			session.fail(fmt.Errorf("%w: %w", ErrEnded, err))
			return
		}
		session.send()
	}()
	return session
}

// matcher finds sync lines in a stream that arrives in pieces. Bytes before one are
// passed on at once, also when they may turn out to be the line's beginning: the
// session they go to ends with the line.
type matcher struct {
	marker []byte
	have   int // how much of the marker the bytes so far end with
	nonce  []byte
}

// next looks for a sync line's end. It gives the bytes to pass on to the session
// before it and, when nonce is not empty, what follows the line; else there is none.
func (m *matcher) next(data []byte) (before []byte, nonce string, after []byte) {
	start := -1 // of a line that begins in data
	for i := 0; i < len(data); i++ {
		if m.have == 0 {
			skip := bytes.IndexByte(data[i:], '\n')
			if skip < 0 {
				break
			}
			i += skip
		}
		switch c := data[i]; {
		case m.have < len(m.marker) && c == m.marker[m.have]:
			if m.have == 0 {
				start = i
			}
			m.have++
			m.nonce = m.nonce[:0]
		case m.have == len(m.marker) && c == '\n' && len(m.nonce) == nonceLen:
			m.have = 0
			return data[:max(start, 0)], string(m.nonce), data[i+1:]
		case m.have == len(m.marker) && isHex(c) && len(m.nonce) < nonceLen:
			m.nonce = append(m.nonce, c)
		case c == '\n': // the marker's first byte, which it has nowhere else
			m.have, start = 1, i
		default:
			m.have, start = 0, -1
		}
	}
	return data, "", nil
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' }

// await reads until want has passed and gives what came after it. What passes
// before, at most limit bytes, is of an earlier session.
func await(r io.Reader, want []byte, limit int) ([]byte, error) {
	var seen []byte
	buf := make([]byte, 64<<10)
	for total := 0; total < limit; {
		n, err := r.Read(buf)
		total += n
		seen = append(seen, buf[:n]...)
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
