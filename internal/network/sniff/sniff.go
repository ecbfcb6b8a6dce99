// Package sniff reads what a connection begins with, as far as is needed to know whom
// it is for: the server name of a TLS client's greeting, whether it is an HTTP request,
// whether a datagram opens a QUIC connection.
//
// Everything here reads bytes that a guest chose. It must not keep them, block, or
// decide what is allowed.
package sniff

import (
	"bytes"
	"encoding/binary"
	"strings"
)

// Protocol is what the first bytes are.
type Protocol int

const (
	// More means that what is there fits several: read on.
	More Protocol = iota
	// Other is anything that carries no name.
	Other
	TLS
	HTTP
	// Bad began as something that has a name, and cannot be read: nothing of it may be
	// forwarded.
	Bad
)

// Limit is how many bytes are looked at before an undecided beginning is Bad (TLS) or
// Other. Greetings with post-quantum keys take 2 KiB.
const Limit = 32 << 10

// Result is what Begin found.
type Result struct {
	Protocol Protocol
	Name     string // the TLS server name, canonical; "" when the client gave none
}

// Begin looks at the first bytes a client sent. end says that no more will come.
func Begin(data []byte, end bool) Result {
	if len(data) == 0 {
		return undecided(end, Other)
	}
	if data[0] == TLSByte {
		return hello(data, end)
	}
	return request(data, end)
}

func undecided(end bool, as Protocol) Result {
	if end {
		return Result{Protocol: as}
	}
	return Result{Protocol: More}
}

const (
	// TLSByte begins every TLS client's greeting: a record of the handshake.
	TLSByte = 22

	messageHello     = 1
	extensionName    = 0
	nameTypeHost     = 0
	maxRecord        = 16384 + 2048
	recordHeader     = 5
	handshakeHeader  = 4
	helloFixed       = 2 + 32 // version, random
	firstRequestLine = 8 << 10
)

// hello reads a ClientHello, which may be spread over records (RFC 8446, 5.1).
func hello(data []byte, end bool) Result {
	var message []byte
	rest := data
	for {
		if len(message) >= handshakeHeader {
			if message[0] != messageHello {
				return Result{Protocol: Bad}
			}
			size := int(message[1])<<16 | int(message[2])<<8 | int(message[3])
			if size > Limit {
				return Result{Protocol: Bad}
			}
			if len(message) >= handshakeHeader+size {
				name, ok := serverName(message[handshakeHeader : handshakeHeader+size])
				if !ok {
					return Result{Protocol: Bad}
				}
				return Result{Protocol: TLS, Name: name}
			}
		}
		if len(rest) < recordHeader {
			break
		}
		// The version's first byte is 3 in every TLS there has been. What only begins
		// with the same byte is another protocol.
		if rest[1] != 3 && len(message) == 0 {
			return Result{Protocol: Other}
		}
		size := int(binary.BigEndian.Uint16(rest[3:]))
		if rest[0] != TLSByte || rest[1] != 3 || size == 0 || size > maxRecord {
			return Result{Protocol: Bad}
		}
		part := rest[recordHeader:]
		if len(part) < size {
			break
		}
		message = append(message, part[:size]...)
		rest = part[size:]
	}
	if end || len(data) >= Limit {
		return Result{Protocol: Bad}
	}
	// A record that is not whole yet may hold all of the message already: wait for it.
	return Result{Protocol: More}
}

// serverName is the host name of a ClientHello's body; false when it is malformed or
// names two.
func serverName(body []byte) (string, bool) {
	r := cursorOf(body)
	r.skip(helloFixed)
	r.skip(int(r.uint8()))  // session id
	r.skip(int(r.uint16())) // cipher suites
	r.skip(int(r.uint8()))  // compression methods
	if r.bad() {
		return "", false
	}
	if r.empty() {
		return "", true // no extensions
	}
	extensions := cursorOf(r.take(int(r.uint16())))
	if r.bad() || !r.empty() {
		return "", false
	}
	name, seen := "", false
	for !extensions.empty() {
		kind := extensions.uint16()
		content := cursorOf(extensions.take(int(extensions.uint16())))
		if extensions.bad() {
			return "", false
		}
		if kind != extensionName {
			continue
		}
		if seen {
			return "", false
		}
		seen = true
		list := cursorOf(content.take(int(content.uint16())))
		if content.bad() || !content.empty() {
			return "", false
		}
		for !list.empty() {
			kind := list.uint8()
			host := list.take(int(list.uint16()))
			if list.bad() || kind != nameTypeHost || name != "" || len(host) == 0 || bytes.IndexByte(host, 0) >= 0 {
				return "", false
			}
			name = strings.ToLower(strings.TrimSuffix(string(host), "."))
			if name == "" {
				return "", false
			}
		}
	}
	return name, true
}

// request says whether a client began an HTTP/1 request, or HTTP/2 without TLS, whose
// preface has a request line's form. It looks at the first line that is not empty, as
// servers do.
func request(data []byte, end bool) Result {
	data = bytes.TrimLeft(data, "\r\n")
	if len(data) == 0 {
		return undecided(end, Other)
	}
	for i, c := range data {
		if i > 64 {
			return Result{Protocol: Other} // no method is that long
		}
		if c == ' ' || c == '\t' {
			if i == 0 {
				return Result{Protocol: Other}
			}
			break
		}
		if !tokenByte(c) {
			return Result{Protocol: Other}
		}
	}
	line, _, whole := bytes.Cut(data, []byte("\n"))
	if !whole {
		if len(line) > firstRequestLine {
			// Too long for a request that a server takes; but one may, and nothing else
			// is known to begin like this.
			return Result{Protocol: HTTP}
		}
		if end {
			return Result{Protocol: Other}
		}
		return Result{Protocol: More}
	}
	if i := bytes.LastIndex(bytes.ToUpper(line), []byte("HTTP/")); i > 0 && (line[i-1] == ' ' || line[i-1] == '\t') {
		return Result{Protocol: HTTP}
	}
	return Result{Protocol: Other}
}

// tokenByte says whether a byte may be in a method's name (RFC 9110, 5.6.2).
func tokenByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// QUIC says whether a datagram opens a QUIC connection (RFC 9000, 17.2 and 14.1): a
// long header with a version, in at least 1200 bytes.
func QUIC(datagram []byte) bool {
	if len(datagram) < 1200 || datagram[0]&0xc0 != 0xc0 {
		return false
	}
	version := binary.BigEndian.Uint32(datagram[1:])
	return version == 1 || version == 0x6b3343cf || version>>8 == 0xff0000
}

// cursor takes bytes off a slice's front. After it wanted more than there was, it is
// bad and gives nothing.
type cursor struct {
	data   []byte
	failed bool
}

func cursorOf(data []byte) *cursor { return &cursor{data: data} }

func (c *cursor) take(n int) []byte {
	if c.failed || n > len(c.data) {
		c.failed, c.data = true, nil
		return nil
	}
	taken := c.data[:n]
	c.data = c.data[n:]
	return taken
}

func (c *cursor) skip(n int) { c.take(n) }

func (c *cursor) uint8() uint8 {
	if b := c.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (c *cursor) uint16() uint16 {
	if b := c.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (c *cursor) bad() bool   { return c.failed }
func (c *cursor) empty() bool { return len(c.data) == 0 }
