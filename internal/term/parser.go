package term

import "unicode/utf8"

const (
	// maxSequence is the longest control sequence that means anything, in bytes.
	maxSequence = 256
	// maxString is how much of a control string (a title, a colour, a link) is kept.
	maxString = 8 << 10
)

// sink takes what a stream of a terminal's bytes consists of. Slices are valid during
// the call only.
type sink interface {
	text(ascii []byte)   // printable ASCII
	letter(r rune)       // any other character; invalid UTF-8 is U+FFFD
	control(c byte)      // C0, ESC excepted
	escape(seq []byte)   // ESC, intermediates, final
	sequence(seq []byte) // CSI: ESC [ … final
	// str is a whole control string: ESC and one of ] P _ ^ X k, and what followed it
	// without its terminator. cut says that its end was too long to be kept.
	str(s []byte, cut bool)
}

// state is where in a stream the parser is.
type state byte

const (
	ground    state = iota
	partial         // in a character of several bytes
	escaped         // after ESC
	inCSI           // after ESC [
	ignoring        // in a control sequence that means nothing
	inString        // in a control string
	endString       // in one, after ESC
)

// parser splits a stream in characters and controls. What it holds is bounded
// whatever arrives.
type parser struct {
	state state
	raw   []byte // of what is not complete yet
	cut   bool   // raw lacks some of a string
}

// pending is what was read of something that is not complete: another terminal that
// gets it will understand what follows.
func (p *parser) pending() []byte {
	switch p.state {
	case ground:
		return nil
	case endString:
		return append(append([]byte{}, p.raw...), 0x1b)
	}
	return p.raw
}

func (p *parser) feed(data []byte, to sink) {
	for i := 0; i < len(data); {
		if p.state == ground {
			run := i
			for i < len(data) && data[i]-0x20 < 0x5f {
				i++
			}
			if i > run {
				to.text(data[run:i])
				continue
			}
			if data[i] >= utf8.RuneSelf {
				i += p.character(data[i:], to)
				continue
			}
		}
		if p.state == inString {
			i += p.string(data[i:])
			if i == len(data) {
				return
			}
		}
		p.step(data[i], to)
		i++
	}
}

// character takes a character at the beginning of data and gives its length.
func (p *parser) character(data []byte, to sink) int {
	if !utf8.FullRune(data) {
		p.state, p.raw = partial, append(p.raw[:0], data...)
		return len(data)
	}
	r, n := utf8.DecodeRune(data)
	to.letter(r)
	return n
}

// string takes what is plainly part of a control string.
func (p *parser) string(data []byte) int {
	n := 0
	for n < len(data) && data[n] >= 0x20 && data[n] != 0x7f {
		n++
	}
	keep := min(n, maxString-len(p.raw))
	p.raw = append(p.raw, data[:keep]...)
	p.cut = p.cut || keep < n
	return n
}

// step takes one byte where it is not plain text.
func (p *parser) step(c byte, to sink) {
	if p.state == partial {
		p.raw = append(p.raw, c)
		if utf8.FullRune(p.raw) {
			p.state = ground
			r, n := utf8.DecodeRune(p.raw)
			var rest [utf8.UTFMax]byte
			left := copy(rest[:], p.raw[n:])
			to.letter(r)
			p.feed(rest[:left], to)
		}
		return
	}
	switch {
	case c == 0x18 || c == 0x1a: // CAN and SUB end whatever there was
		p.state = ground
		return
	case p.state == endString:
		p.state = ground
		to.str(p.raw, p.cut)
		if c == '\\' {
			return
		}
		p.begin()
		p.step(c, to)
		return
	case c == 0x1b && p.state == inString:
		p.state = endString
		return
	case p.state == inString:
		if c == 0x07 && p.raw[1] == ']' {
			p.state = ground
			to.str(p.raw, p.cut)
		}
		return // other controls in a string mean nothing
	case c == 0x1b:
		p.begin()
		return
	case c < 0x20:
		to.control(c) // in the middle of a sequence too
		return
	case c == 0x7f:
		return
	}
	p.sequence(c, to)
}

func (p *parser) begin() {
	p.state, p.cut, p.raw = escaped, false, append(p.raw[:0], 0x1b)
}

// sequence takes a byte of an escape or control sequence.
func (p *parser) sequence(c byte, to sink) {
	switch {
	case p.state == ignoring && c < 0x80:
		if c >= 0x40 {
			p.state = ground
		}
		return
	case c >= 0x80: // none goes on like that
		p.state = ground
		p.feed([]byte{c}, to)
		return
	case len(p.raw) == maxSequence:
		p.state = ignoring
		p.sequence(c, to)
		return
	}
	p.raw = append(p.raw, c)
	switch {
	case p.state == inCSI:
		if c >= 0x40 {
			p.state = ground
			to.sequence(p.raw)
		}
	case len(p.raw) == 2 && c == '[':
		p.state = inCSI
	case len(p.raw) == 2 && (c == ']' || c == 'P' || c == '_' || c == '^' || c == 'X' || c == 'k'):
		p.state = inString
	case c >= 0x30:
		p.state = ground
		to.escape(p.raw)
	}
}

// parameters are a control sequence's parts.
type parameters struct {
	prefix byte // one of < = > ?, or 0
	inter  byte // the last intermediate, or 0
	final  byte
	list   [32]parameter
	n      int
}

// parameter is a number; missing ones are -1. sub says that it belongs to the one
// before it.
type parameter struct {
	value int
	sub   bool
}

const maxParameter = 1<<24 - 1

// parse reads a control sequence, ESC [ included.
func parse(seq []byte) (p parameters) {
	body := seq[2 : len(seq)-1]
	p.final = seq[len(seq)-1]
	if len(body) > 0 && body[0] >= '<' && body[0] <= '?' {
		p.prefix, body = body[0], body[1:]
	}
	p.list[0].value = -1
	p.n = 1
	for _, c := range body {
		last := &p.list[p.n-1]
		switch {
		case c >= '0' && c <= '9':
			last.value = min(max(last.value, 0)*10+int(c-'0'), maxParameter)
		case c == ';' || c == ':':
			if p.n == len(p.list) {
				return p // more than anything takes
			}
			p.list[p.n] = parameter{-1, c == ':'}
			p.n++
		case c >= 0x20 && c <= 0x2f:
			p.inter = c
		default:
			p.final = 0 // means nothing
		}
	}
	return p
}

// get is parameter i, or other where it is missing or zero.
func (p *parameters) get(i, other int) int {
	if i < p.n && p.list[i].value > 0 {
		return p.list[i].value
	}
	return other
}
