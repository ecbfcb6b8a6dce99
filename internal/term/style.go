package term

import "strconv"

// color is 0 for the terminal's own, or a kind and a number.
type color uint32

const (
	indexed   color = 1 << 24
	direct    color = 2 << 24
	colorBits       = 1<<24 - 1
)

// style is how a character looks. Its zero value is plain.
type style struct {
	fg, bg, line color // line is the underline's
	flags        uint16
	underline    uint8  // 0 none, 1 single, 2 double, 3 curly, 4 dotted, 5 dashed
	link         string // OSC 8's parameters and address, "" for none
}

// flags of a style; each one's SGR number is in setFlags.
const (
	bold uint16 = 1 << iota
	faint
	italic
	blink
	inverse
	hidden
	struck
	overlined
)

var setFlags = [...]struct {
	flag uint16
	sgr  byte
}{{bold, 1}, {faint, 2}, {italic, 3}, {blink, 5}, {inverse, 7}, {hidden, 8}, {struck, 9}, {overlined, 53}}

// graphics changes s as SGR says.
func (s *style) graphics(p *parameters) {
	for i := 0; i < p.n; i++ {
		v := max(p.list[i].value, 0)
		sub := i+1 < p.n && p.list[i+1].sub
		switch {
		case v == 0:
			*s = style{link: s.link}
		case v == 4 && sub:
			s.underline = uint8(min(max(p.list[i+1].value, 0), 5))
		case v == 38 || v == 48 || v == 58:
			c, used := p.color(i + 1)
			i += used
			switch v {
			case 38:
				s.fg = c
			case 48:
				s.bg = c
			case 58:
				s.line = c
			}
		default:
			s.simple(v)
		}
		for i+1 < p.n && p.list[i+1].sub {
			i++
		}
	}
}

func (s *style) simple(v int) {
	for _, f := range setFlags {
		if v == int(f.sgr) {
			s.flags |= f.flag
		}
	}
	switch {
	case v == 4:
		s.underline = 1
	case v == 6:
		s.flags |= blink
	case v == 21:
		s.underline = 2
	case v == 22:
		s.flags &^= bold | faint
	case v == 23:
		s.flags &^= italic
	case v == 24:
		s.underline = 0
	case v == 25:
		s.flags &^= blink
	case v == 27:
		s.flags &^= inverse
	case v == 28:
		s.flags &^= hidden
	case v == 29:
		s.flags &^= struck
	case v == 55:
		s.flags &^= overlined
	case v == 39:
		s.fg = 0
	case v == 49:
		s.bg = 0
	case v == 59:
		s.line = 0
	case v >= 30 && v <= 37:
		s.fg = indexed | color(v-30)
	case v >= 40 && v <= 47:
		s.bg = indexed | color(v-40)
	case v >= 90 && v <= 97:
		s.fg = indexed | color(v-90+8)
	case v >= 100 && v <= 107:
		s.bg = indexed | color(v-100+8)
	}
}

// color reads what follows 38, 48 or 58, and how many parameters that were.
func (p *parameters) color(i int) (color, int) {
	if i >= p.n {
		return 0, 0
	}
	at := func(k int) color { return color(min(max(p.list[k].value, 0), 255)) }
	colons := p.list[i].sub
	end := i + 1
	if colons {
		for end < p.n && p.list[end].sub {
			end++
		}
	} else {
		end = p.n
	}
	switch p.list[i].value {
	case 5:
		if i+1 < end {
			return indexed | at(i+1), 2
		}
	case 2:
		// With colons there may be a colour space before the three.
		if colons && end-i >= 5 {
			return direct | at(i+2)<<16 | at(i+3)<<8 | at(i+4), end - i
		}
		if i+3 < end {
			return direct | at(i+1)<<16 | at(i+2)<<8 | at(i+3), 4
		}
	}
	if colons {
		return 0, end - i
	}
	return 0, 1
}

// append writes the sequences that lead from plain to the style, but for its link.
func (s *style) append(b []byte) []byte {
	b = append(b, "\x1b[0"...)
	for _, f := range setFlags {
		if s.flags&f.flag != 0 {
			b = strconv.AppendInt(append(b, ';'), int64(f.sgr), 10)
		}
	}
	switch {
	case s.underline == 1:
		b = append(b, ";4"...)
	case s.underline > 1:
		b = append(b, ";4:"...)
		b = append(b, '0'+s.underline)
	}
	b = appendColor(b, s.fg, 30)
	b = appendColor(b, s.bg, 40)
	b = appendColor(b, s.line, 50)
	return append(b, 'm')
}

func appendColor(b []byte, c color, base int) []byte {
	n := int64(c & colorBits)
	number := func(n int64) { b = strconv.AppendInt(append(b, ';'), n, 10) }
	switch {
	case c == 0:
	case c&direct != 0:
		number(int64(base + 8))
		number(2)
		number(n >> 16)
		number(n >> 8 & 255)
		number(n & 255)
	case n < 8 && base < 50:
		number(int64(base) + n)
	case n < 16 && base < 50:
		number(int64(base) + 60 + n - 8)
	default:
		number(int64(base + 8))
		number(5)
		number(n)
	}
	return b
}
