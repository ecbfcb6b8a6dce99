package term

import (
	"bytes"
	"slices"
	"strings"
	"unicode/utf8"
)

// Filter passes on what a program may do to the terminal of the person who looks at
// it, and leaves the rest out: whatever reaches beyond the text and its looks (the
// clipboard, files, notifications, the window's title and size, printing), whatever
// reads something of the terminal's back into the program that is not the program's,
// and whatever another terminal might understand differently. It lets through only
// what it knows.
type Filter struct {
	// Quiet leaves out also what asks the terminal something, because another one
	// answers.
	Quiet bool

	parser  parser
	out     []byte
	colored bool
}

// Filter gives what of data, and of what was held back before, may pass. The result
// is valid until the next call.
func (f *Filter) Filter(data []byte) []byte {
	f.out = f.out[:0]
	f.parser.feed(data, f)
	return f.out
}

// Colored says whether the terminal's own colours were changed.
func (f *Filter) Colored() bool { return f.colored }

func (f *Filter) text(ascii []byte) { f.out = append(f.out, ascii...) }

func (f *Filter) letter(r rune) {
	// U+0080 to U+009F are controls to some terminals.
	if r >= 0xa0 {
		f.out = utf8.AppendRune(f.out, r)
	}
}

func (f *Filter) control(c byte) {
	// ENQ makes a terminal answer with what somebody set it to.
	if c >= 0x07 && c <= 0x0f {
		f.out = append(f.out, c)
	}
}

func (f *Filter) escape(seq []byte) {
	switch final := seq[len(seq)-1]; {
	case len(seq) == 2 && strings.IndexByte("78DEHMNOc=>no|}~", final) >= 0:
	case len(seq) == 3 && seq[1] >= '(' && seq[1] <= '/' && final >= '0' && final <= 'Z':
	case len(seq) == 3 && seq[1] == '#':
	default:
		return
	}
	f.out = append(f.out, seq...)
}

// plainFinals are the sequences without prefix and intermediate that may pass.
const plainFinals = "@ABCDEFGHIJKLMPSTXZ`abcdefghlmnrstu"

func (f *Filter) sequence(seq []byte) {
	p := parse(seq)
	if p.final == 0 || asks(&p) && f.Quiet {
		return
	}
	pass := false
	switch {
	case p.prefix == 0 && p.inter == 0:
		pass = strings.IndexByte(plainFinals, p.final) >= 0
		if p.final == 't' {
			// Only what tells sizes. The title could be read back as input.
			pass = slices.Contains([]int{14, 16, 18}, p.get(0, 0)) && p.n == 1
		}
	case p.prefix == 0 && p.inter == ' ':
		pass = p.final == 'q'
	case p.prefix == 0 && p.inter == '!':
		pass = p.final == 'p'
	case p.prefix == 0 && p.inter == '$', p.prefix == '?' && p.inter == '$':
		pass = p.final == 'p'
	case p.prefix == '?' && p.inter == 0:
		pass = strings.IndexByte("hlJKmnrsu", p.final) >= 0
	case p.prefix == '>' && p.inter == 0:
		pass = strings.IndexByte("cmnqu", p.final) >= 0
	case p.prefix == '<' || p.prefix == '=':
		pass = p.final == 'u' && p.inter == 0
	}
	if pass {
		f.out = append(f.out, seq...)
	}
}

// asks says whether a sequence makes the terminal answer.
func asks(p *parameters) bool {
	switch p.final {
	case 'c':
		return true
	case 'n':
		return p.prefix != '>'
	case 't':
		return true
	case 'p':
		return p.inter == '$'
	case 'q':
		return p.prefix == '>'
	case 'u', 'm':
		return p.prefix == '?'
	}
	return false
}

// commands are the OSC numbers that may pass: colours, links, marks of the shell's,
// progress, the pointer's shape, an agent's status.
var commands = []string{"4", "8", "10", "11", "12", "13", "14", "17", "19", "22", "104", "110", "111", "112", "113", "114", "117", "119", "133", "7501"}

func (f *Filter) str(raw []byte, cut bool) {
	kind, body := raw[1], raw[2:]
	if cut || !plain(body) {
		return
	}
	pass := false
	switch kind {
	case ']':
		number, rest, _ := bytes.Cut(body, []byte{';'})
		pass = slices.Contains(commands, string(number)) || string(number) == "9" && bytes.HasPrefix(rest, []byte("4;"))
		question := bytes.IndexByte(rest, '?') >= 0 && string(number) != "8"
		if question && f.Quiet {
			return
		}
		if len(number) > 0 && number[0] == '1' && string(number) != "133" || string(number) == "4" {
			f.colored = f.colored || pass && !question
		}
	case 'P':
		// What the terminal can do and how it is set; no passing through another's.
		pass = (bytes.HasPrefix(body, []byte("+q")) || bytes.HasPrefix(body, []byte("$q"))) && !f.Quiet
	}
	if pass {
		f.out = append(append(f.out, raw...), "\x1b\\"...)
	}
}

// plain says whether a string is UTF-8 without controls: one that another terminal
// would not see end elsewhere.
func plain(s []byte) bool {
	for len(s) > 0 {
		r, n := utf8.DecodeRune(s)
		if r < 0x20 || r >= 0x7f && r < 0xa0 || r == utf8.RuneError && n < 2 {
			return false
		}
		s = s[n:]
	}
	return true
}
