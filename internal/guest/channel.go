package guest

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// errReplaced ends a guest's session because the host has begun a new one.
var errReplaced = errors.New("the host began a new session")

// mux is how both sides speak yamux. A paused guest answers nothing for hours, so
// nothing here may give up by itself: whoever waits has a deadline of their own.
func mux() *yamux.Config {
	c := yamux.DefaultConfig()
	c.EnableKeepAlive = false
	c.StreamOpenTimeout = 0
	c.ConnectionWriteTimeout = 365 * 24 * time.Hour
	c.StreamCloseTimeout = 5 * time.Minute
	c.MaxStreamWindowSize = 4 << 20
	c.LogOutput = io.Discard
	return c
}

func syncLine(token, nonce string) []byte  { return []byte("\n" + token + " sync " + nonce + "\n") }
func readyLine(token, nonce string) []byte { return []byte("\n" + token + " ready " + nonce + "\n") }

const nonceLen = 32

// Port is the guest's end of the channel: a byte stream in which the host may begin
// anew at any time.
type Port struct {
	rw    io.ReadWriter
	token string

	mu      sync.Mutex // above session
	session *portConn
	writing sync.Mutex // held for each write, so that the ready line follows whole writes
}

// NewPort speaks on rw, whose reads and writes wait for a host.
func NewPort(rw io.ReadWriter, token string) *Port { return &Port{rw: rw, token: token} }

// Serve reads the port for ever and hands each session the host begins to serve, in
// its own goroutine, as a yamux server. It returns when reading fails.
func (p *Port) Serve(serve func(*yamux.Session)) error {
	find := &matcher{marker: []byte("\n" + p.token + " sync ")}
	buf := make([]byte, 256<<10)
	for {
		n, err := p.rw.Read(buf)
		data := buf[:n]
		for len(data) > 0 {
			before, nonce, after, found := find.next(data)
			if c := p.current(); c != nil && len(before) > 0 {
				c.deliver(before)
			}
			if found {
				p.begin(nonce, serve)
			}
			data = after
		}
		if err != nil {
			return err
		}
	}
}

func (p *Port) current() *portConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.session
}

// begin ends the session there is and starts the one that nonce names.
func (p *Port) begin(nonce string, serve func(*yamux.Session)) {
	c := &portConn{port: p}
	c.cond.L = &c.mu
	p.mu.Lock()
	old := p.session
	p.session = c
	p.mu.Unlock()
	if old != nil {
		old.end(errReplaced)
	}
	p.writing.Lock()
	_, err := p.rw.Write(readyLine(p.token, nonce))
	p.writing.Unlock()
	if err != nil {
		return
	}
	session, err := yamux.Server(c, mux())
	if err != nil {
		return
	}
	go serve(session)
}

// portConn is one session's view of the port.
type portConn struct {
	port *Port
	mu   sync.Mutex
	cond sync.Cond
	data []byte
	err  error
}

// portBacklog is how much unread input a session holds before the port waits. yamux
// always reads, so it is only reached for moments.
const portBacklog = 1 << 20

func (c *portConn) deliver(data []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil && len(c.data) > portBacklog {
		c.cond.Wait()
	}
	if c.err == nil {
		c.data = append(c.data, data...)
		c.cond.Broadcast()
	}
}

func (c *portConn) Read(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.data) == 0 && c.err == nil {
		c.cond.Wait()
	}
	if c.err != nil {
		return 0, c.err
	}
	n := copy(b, c.data)
	c.data = c.data[n:]
	if len(c.data) == 0 {
		c.data = nil
	}
	c.cond.Broadcast()
	return n, nil
}

func (c *portConn) Write(b []byte) (int, error) {
	c.port.writing.Lock()
	defer c.port.writing.Unlock()
	c.mu.Lock()
	err := c.err
	c.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return c.port.rw.Write(b)
}

func (c *portConn) Close() error {
	c.end(io.ErrClosedPipe)
	return nil
}

func (c *portConn) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
	c.cond.Broadcast()
}

// matcher finds a sync line in a stream that arrives in pieces. Bytes before it are
// passed on at once, also when they turn out to be the line's beginning: the session
// they go to ends with the line.
type matcher struct {
	marker []byte
	tail   []byte // the last bytes seen, shorter than marker
	nonce  []byte // read so far, once the marker was seen
	inside bool
}

// next gives what precedes a sync line, the line's nonce if it ends in data, and
// what is left to look at.
func (m *matcher) next(data []byte) (before []byte, nonce string, after []byte, found bool) {
	if m.inside {
		return m.readNonce(nil, data)
	}
	// The seam between the last piece and this one.
	if seam := min(len(data), len(m.marker)-1); len(m.tail) > 0 {
		joined := append(append([]byte{}, m.tail...), data[:seam]...)
		if i := bytes.Index(joined, m.marker); i >= 0 {
			return m.begin(nil, data[i+len(m.marker)-len(m.tail):])
		}
	}
	if i := bytes.Index(data, m.marker); i >= 0 {
		return m.begin(data[:i], data[i+len(m.marker):])
	}
	keep := len(m.marker) - 1
	if len(data) >= keep {
		m.tail = append(m.tail[:0], data[len(data)-keep:]...)
	} else {
		m.tail = append(m.tail, data...)
		m.tail = m.tail[max(0, len(m.tail)-keep):]
	}
	return data, "", nil, false
}

func (m *matcher) begin(before, rest []byte) ([]byte, string, []byte, bool) {
	m.inside, m.tail, m.nonce = true, m.tail[:0], m.nonce[:0]
	return m.readNonce(before, rest)
}

func (m *matcher) readNonce(before, data []byte) ([]byte, string, []byte, bool) {
	for i, c := range data {
		switch {
		case c == '\n' && len(m.nonce) == nonceLen:
			m.inside = false
			return before, string(m.nonce), data[i+1:], true
		case len(m.nonce) == nonceLen || (c < '0' || c > '9') && (c < 'a' || c > 'f'):
			m.inside = false // not a sync line after all
			return before, "", data[i:], false
		}
		m.nonce = append(m.nonce, c)
	}
	return before, "", nil, false
}
