// Package wire is how the host protocol's messages travel: JSON lines on a Unix
// socket and, for streams, the guest channel's frames after them.
//
// It must not know what a message means.
package wire

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
)

// Conn is one side of a connection. Reads and writes may go on at the same time,
// each by one goroutine.
type Conn struct {
	net.Conn
	r *bufio.Reader
}

// New speaks on c.
func New(c net.Conn) *Conn { return &Conn{Conn: c, r: bufio.NewReaderSize(c, 64<<10)} }

// Read reads what follows the lines read so far.
func (c *Conn) Read(b []byte) (int, error) { return c.r.Read(b) }

// ReadLine reads one line of at most api.MaxLine bytes.
func (c *Conn) ReadLine() ([]byte, error) { return guest.ReadLine(c.r, api.MaxLine) }

// WriteJSON writes v as one line.
func (c *Conn) WriteJSON(v any) error { return guest.WriteJSON(c.Conn, v) }

// replyFrame is more than a reply adds to its result.
const replyFrame = 64

// Reply ends an answer, or begins a stream, with result or with err.
func (c *Conn) Reply(result any, err error) error {
	if err != nil {
		return c.WriteJSON(api.Reply{Error: api.AsError(err)})
	}
	data, err := json.Marshal(result)
	if err != nil {
		return c.WriteJSON(api.Reply{Error: api.AsError(err)})
	}
	if len(data) > api.MaxLine-replyFrame {
		return c.WriteJSON(api.Reply{Error: &api.Error{Kind: api.KindFailed, Message: "the answer is too long for one line of the protocol"}})
	}
	return c.WriteJSON(api.Reply{OK: true, Result: data})
}

// Request writes a request: op and v beside the fields of args, which may be nil.
func (c *Conn) Request(op string, args any) error {
	fields := map[string]any{}
	if args != nil {
		data, err := json.Marshal(args)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(data, &fields); err != nil {
			return fmt.Errorf("a request's arguments must be an object: %w", err)
		}
	}
	fields["v"], fields["op"] = api.Version, op
	return c.WriteJSON(fields)
}
