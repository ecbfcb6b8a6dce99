package term

import (
	"fmt"
	"slices"
	"strings"
)

func (s *Screen) control(c byte) {
	switch c {
	case '\b':
		s.cur.wrap = false
		s.cur.x = max(s.cur.x-1, 0)
	case '\t':
		s.tab(1)
	case '\n', '\v', '\f':
		s.cur.wrap = false
		s.index()
		if s.newline {
			s.cur.x = 0
		}
	case '\r':
		s.cur.wrap = false
		s.cur.x = 0
	case 0x0e:
		s.cur.shift = 1
	case 0x0f:
		s.cur.shift = 0
	}
}

// tab goes n tab stops on, or back.
func (s *Screen) tab(n int) {
	s.cur.wrap = false
	for ; n > 0 && s.cur.x < s.cols-1; n-- {
		for s.cur.x++; s.cur.x < s.cols-1 && !s.tabs[s.cur.x]; s.cur.x++ {
		}
	}
	for ; n < 0 && s.cur.x > 0; n++ {
		for s.cur.x--; s.cur.x > 0 && !s.tabs[s.cur.x]; s.cur.x-- {
		}
	}
}

// lineDrawing is what DEC's special set has in place of ` to ~.
var lineDrawing = []rune("◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·")

func (s *Screen) drawing(c byte) rune {
	if s.cur.sets[s.cur.shift] == '0' && c >= '`' && c <= '~' {
		return lineDrawing[c-'`']
	}
	return rune(c)
}

func (s *Screen) escape(seq []byte) {
	final := seq[len(seq)-1]
	if len(seq) == 3 {
		switch {
		case seq[1] >= '(' && seq[1] <= '+':
			s.cur.sets[seq[1]-'('] = final
		case seq[1] == '#' && final == '8':
			for _, r := range s.now.rows {
				fill(r.cells, cell{ch: 'E'})
			}
			s.top, s.end = 0, s.rows
			s.move(0, 0)
		}
		return
	}
	if len(seq) != 2 {
		return
	}
	switch final {
	case '7':
		s.save()
	case '8':
		s.restore()
	case 'D':
		s.cur.wrap = false
		s.index()
	case 'E':
		s.cur.wrap = false
		s.cur.x = 0
		s.index()
	case 'M':
		s.cur.wrap = false
		if s.cur.y == s.top {
			s.scrollDown(s.top, 1)
		} else {
			s.cur.y = max(s.cur.y-1, 0)
		}
	case 'H':
		s.tabs[s.cur.x] = true
	case 'c':
		s.reset()
	case '=':
		s.keypad = true
	case '>':
		s.keypad = false
	case 'n':
		s.cur.shift = 2
	case 'o':
		s.cur.shift = 3
	}
}

func (s *Screen) save() { s.now.saved = s.cur }

func (s *Screen) restore() {
	s.cur = s.now.saved
	s.cur.x, s.cur.y = min(s.cur.x, s.cols-1), min(s.cur.y, s.rows-1)
	s.cur.wrap = s.cur.wrap && s.cur.x == s.cols-1
}

// move puts the cursor, counting from 0, inside the margins when the origin is there.
func (s *Screen) move(x, y int) {
	low, high := 0, s.rows-1
	if s.cur.origin {
		low, high = s.top, s.end-1
		y += low
	}
	s.cur.wrap = false
	s.cur.x, s.cur.y = min(max(x, 0), s.cols-1), min(max(y, low), high)
}

// up and down stop at the margin they are inside of.
func (s *Screen) up(n int) {
	limit := 0
	if s.cur.y >= s.top {
		limit = s.top
	}
	s.cur.wrap = false
	s.cur.y = max(s.cur.y-n, limit)
}

func (s *Screen) down(n int) {
	limit := s.rows - 1
	if s.cur.y < s.end {
		limit = s.end - 1
	}
	s.cur.wrap = false
	s.cur.y = min(s.cur.y+n, limit)
}

func (s *Screen) sequence(seq []byte) {
	p := parse(seq)
	switch {
	case p.final == 0:
	case p.prefix == 0 && p.inter == 0:
		if !s.moves(&p) && !s.edits(&p) {
			s.sets(&p)
		}
	case p.prefix == '?' && p.inter == 0 && (p.final == 'h' || p.final == 'l'):
		for i := range p.n {
			s.private(p.list[i].value, p.final == 'h')
		}
	case p.prefix == '?' && p.inter == 0 && (p.final == 'J' || p.final == 'K'):
		s.edits(&p)
	case p.final == 'u' && p.prefix != 0 && p.inter == 0:
		s.kitty(&p)
	case p.prefix == '>' && p.final == 'm' && p.inter == 0:
		if p.get(0, 0) == 4 {
			s.other = p.get(1, 0)
		}
	case p.inter == ' ' && p.final == 'q' && p.prefix == 0:
		s.shape = min(p.get(0, 0), 6)
	case p.inter == '!' && p.final == 'p':
		s.soft()
	default:
		s.asked(&p)
	}
}

// moves takes the sequences that move the cursor.
func (s *Screen) moves(p *parameters) bool {
	n := p.get(0, 1)
	// Relative moves go by screen rows, and so does an absolute one but for the origin.
	y := s.cur.y
	if s.cur.origin {
		y -= s.top
	}
	switch p.final {
	case 'A':
		s.up(n)
	case 'B', 'e':
		s.down(n)
	case 'C', 'a':
		s.move(s.cur.x+n, y)
	case 'D':
		s.move(s.cur.x-n, y)
	case 'E':
		s.down(n)
		s.cur.x = 0
	case 'F':
		s.up(n)
		s.cur.x = 0
	case 'G', '`':
		s.move(n-1, y)
	case 'H', 'f':
		s.move(p.get(1, 1)-1, n-1)
	case 'd':
		s.move(s.cur.x, n-1)
	case 'I':
		s.tab(min(n, s.cols))
	case 'Z':
		s.tab(-min(n, s.cols))
	case 's':
		s.save()
	case 'u':
		s.restore()
	default:
		return false
	}
	return true
}

// edits takes those that change what is on the screen.
func (s *Screen) edits(p *parameters) bool {
	n := p.get(0, 1)
	inside := s.cur.y >= s.top && s.cur.y < s.end
	switch p.final {
	case 'J':
		s.eraseDisplay(p.get(0, 0))
	case 'K':
		s.eraseLine(p.get(0, 0))
	case 'X':
		s.erase(s.cur.y, s.cur.x, s.cur.x+min(n, s.cols))
	case '@':
		s.insertCells(min(n, s.cols))
	case 'P':
		s.deleteCells(min(n, s.cols))
	case 'L':
		if inside {
			s.scrollDown(s.cur.y, n)
			s.cur.x = 0
		}
	case 'M':
		if inside {
			s.deleteLines(n)
			s.cur.x = 0
		}
	case 'S':
		s.scrollUp(s.top, n)
	case 'T':
		s.scrollDown(s.top, n)
	case 'b':
		s.repeat(n)
	default:
		return false
	}
	s.cur.wrap = s.cur.wrap && p.final == 'b'
	return true
}

// deleteLines is a scroll that nobody remembers.
func (s *Screen) deleteLines(n int) {
	rows := s.now.rows[s.cur.y:s.end]
	n = min(n, len(rows))
	s.rotate(rows, n)
	s.clearRows(rows[len(rows)-n:])
}

// repeat writes the last character again, at most a screen of it.
func (s *Screen) repeat(n int) {
	if s.last == 0 {
		return
	}
	for range min(n, s.cols*s.rows) {
		if s.last < 0x80 {
			s.text([]byte{byte(s.last)})
		} else {
			s.letter(s.last)
		}
	}
}

// erase empties the columns from to before to.
func (s *Screen) erase(y, from, to int) {
	cells := s.now.rows[y].cells
	to = min(to, s.cols)
	s.split(cells, from, to)
	fill(cells[from:to], s.blank())
	if to == s.cols {
		s.now.rows[y].wrapped = false
	}
}

func (s *Screen) eraseLine(how int) {
	switch how {
	case 0:
		s.erase(s.cur.y, s.cur.x, s.cols)
	case 1:
		s.erase(s.cur.y, 0, s.cur.x+1)
	case 2:
		s.erase(s.cur.y, 0, s.cols)
	}
}

func (s *Screen) eraseDisplay(how int) {
	switch how {
	case 0:
		s.eraseLine(0)
		s.clearRows(s.now.rows[s.cur.y+1:])
	case 1:
		s.clearRows(s.now.rows[:s.cur.y])
		s.eraseLine(1)
	case 2:
		s.clearRows(s.now.rows)
	case 3:
		s.history.clear()
	}
}

func (s *Screen) insertCells(n int) {
	cells := s.now.rows[s.cur.y].cells
	s.split(cells, s.cur.x, s.cols)
	n = min(n, s.cols-s.cur.x)
	s.split(cells, s.cols-n, s.cols-n)
	copy(cells[s.cur.x+n:], cells[s.cur.x:])
	fill(cells[s.cur.x:s.cur.x+n], s.blank())
}

func (s *Screen) deleteCells(n int) {
	cells := s.now.rows[s.cur.y].cells
	n = min(n, s.cols-s.cur.x)
	s.split(cells, s.cur.x, s.cur.x+n)
	copy(cells[s.cur.x:], cells[s.cur.x+n:])
	fill(cells[s.cols-n:], s.blank())
	s.now.rows[s.cur.y].wrapped = false
}

// sets takes those that change how the terminal behaves.
func (s *Screen) sets(p *parameters) {
	switch p.final {
	case 'm':
		s.cur.current.graphics(p)
		s.cur.style = s.styleID(s.cur.current)
	case 'r':
		top, end := p.get(0, 1)-1, min(p.get(1, s.rows), s.rows)
		if top < end-1 || top < end && s.rows == 1 {
			s.top, s.end = top, end
			s.move(0, 0)
		}
	case 'h', 'l':
		for i := range p.n {
			switch p.list[i].value {
			case 4:
				s.insert = p.final == 'h'
			case 20:
				s.newline = p.final == 'h'
			}
		}
	case 'g':
		switch p.get(0, 0) {
		case 0:
			s.tabs[s.cur.x] = false
		case 3:
			clear(s.tabs)
		}
	default:
		s.asked(p)
	}
}

// keptModes are the private modes that are set again on a terminal the screen is
// drawn on. Others are not ours to keep.
var keptModes = []int{1, 5, 7, 12, 25, 45, 9, 1000, 1002, 1003, 1004, 1005, 1006, 1007, 1015, 1016, 2004, 2031, 2048}

// mouse modes: one ends the other.
var mouseModes = []int{9, 1000, 1002, 1003}

func (s *Screen) private(mode int, on bool) {
	switch mode {
	case 6:
		s.cur.origin = on
		s.move(0, 0)
	case 47, 1047:
		s.switchTo(on, mode == 1047)
	case 1048:
		if on {
			s.save()
		} else {
			s.restore()
		}
	case 1049:
		if on == s.isAlt() {
			return
		}
		if on {
			s.save()
		}
		s.switchTo(on, true)
		if !on {
			s.restore()
		}
	default:
		if slices.Contains(mouseModes, mode) {
			for _, m := range mouseModes {
				delete(s.modes, m)
			}
		}
		if slices.Contains(keptModes, mode) {
			s.modes[mode] = on
		}
	}
}

// switchTo shows the alternate or the main screen.
func (s *Screen) switchTo(alt, clean bool) {
	if alt == s.isAlt() {
		return
	}
	if alt {
		if s.alt.rows == nil || clean {
			s.alt = grid{rows: newRows(s.cols, s.rows)}
		}
		s.now = &s.alt
		if clean {
			s.clearRows(s.alt.rows)
		}
		return
	}
	s.now = &s.main
	if clean {
		s.alt = grid{}
	}
}

// keysKept is how deep the kitty keyboard protocol's stack is.
const keysKept = 8

// kitty takes the keyboard protocol's sequences.
func (s *Screen) kitty(p *parameters) {
	keys := &s.now.keys
	switch p.prefix {
	case '>':
		if len(*keys) == keysKept {
			*keys = slices.Delete(*keys, 0, 1)
		}
		*keys = append(*keys, byte(p.get(0, 0)&31))
	case '<':
		*keys = (*keys)[:max(len(*keys)-p.get(0, 1), 0)]
	case '=':
		if len(*keys) == 0 {
			*keys = []byte{0}
		}
		last, flags := &(*keys)[len(*keys)-1], byte(p.get(0, 0)&31)
		switch p.get(1, 1) {
		case 1:
			*last = flags
		case 2:
			*last |= flags
		case 3:
			*last &^= flags
		}
	case '?':
		s.answer("\x1b[?%du", s.keyFlags())
	}
}

func (s *Screen) keyFlags() int {
	if n := len(s.now.keys); n > 0 {
		return int(s.now.keys[n-1])
	}
	return 0
}

func (s *Screen) answer(format string, args ...any) {
	if s.Answer != nil {
		s.Answer(fmt.Appendf(nil, format, args...))
	}
}

// asked answers what a program asks its terminal.
func (s *Screen) asked(p *parameters) {
	y := s.cur.y
	if s.cur.origin {
		y -= s.top
	}
	switch {
	case p.final == 'c' && p.prefix == 0 && p.inter == 0 && p.get(0, 0) == 0:
		s.answer("\x1b[?62;22c")
	case p.final == 'c' && p.prefix == '>' && p.inter == 0:
		s.answer("\x1b[>1;10;0c")
	case p.final == 'n' && p.prefix == 0 && p.get(0, 0) == 5:
		s.answer("\x1b[0n")
	case p.final == 'n' && p.prefix == 0 && p.get(0, 0) == 6:
		s.answer("\x1b[%d;%dR", y+1, s.cur.x+1)
	case p.final == 'n' && p.prefix == '?' && p.get(0, 0) == 6:
		s.answer("\x1b[?%d;%d;1R", y+1, s.cur.x+1)
	case p.final == 't' && p.prefix == 0 && p.get(0, 0) == 18:
		s.answer("\x1b[8;%d;%dt", s.rows, s.cols)
	case p.final == 'p' && p.prefix == '?' && p.inter == '$':
		s.answer("\x1b[?%d;%d$y", p.get(0, 0), s.report(p.get(0, 0)))
	}
}

// report is DECRPM's word on a private mode.
func (s *Screen) report(mode int) int {
	on := false
	switch {
	case mode == 6:
		on = s.cur.origin
	case mode == 47 || mode == 1047 || mode == 1049:
		on = s.isAlt()
	case slices.Contains(keptModes, mode):
		on = s.mode(mode)
	default:
		return 0
	}
	if on {
		return 1
	}
	return 2
}

// titleBytes is the longest title that is kept.
const titleBytes = 256

func (s *Screen) str(raw []byte, cut bool) {
	kind, body := raw[1], raw[2:]
	if cut || kind != ']' && kind != 'k' {
		return
	}
	number, rest, _ := strings.Cut(string(body), ";")
	switch {
	case kind == 'k':
		s.title = clean(string(body))
	case number == "0" || number == "2":
		s.title = clean(rest)
	case number == "8":
		s.link(rest)
	default:
		s.colors(number, rest)
	}
}

// clean makes a title a line of text.
func clean(title string) string {
	title = strings.Map(func(r rune) rune {
		if r < 0x20 || r >= 0x7f && r < 0xa0 {
			return -1
		}
		return r
	}, strings.ToValidUTF8(title, "\ufffd"))
	if len(title) > titleBytes {
		title = strings.ToValidUTF8(title[:titleBytes], "")
	}
	return title
}

// linkBytes is the longest link that is kept.
const linkBytes = 2083

func (s *Screen) link(rest string) {
	_, address, found := strings.Cut(rest, ";")
	if !found || address == "" || len(rest) > linkBytes || !plain([]byte(rest)) {
		rest = ""
	}
	s.cur.current.link = rest
	s.cur.style = s.styleID(s.cur.current)
}

// paletteKept is how many colours are.
const paletteKept = 272

// colors keeps those that were set.
func (s *Screen) colors(number, rest string) {
	switch number {
	case "4":
		parts := strings.Split(rest, ";")
		for i := 0; i+1 < len(parts); i += 2 {
			s.paint("4;"+parts[i], parts[i+1])
		}
	case "10", "11", "12":
		s.paint(number, rest)
	case "104":
		for name := range s.palette {
			if strings.HasPrefix(name, "4;") && (rest == "" || slices.Contains(strings.Split(rest, ";"), name[2:])) {
				delete(s.palette, name)
			}
		}
	case "110", "111", "112":
		delete(s.palette, number[1:])
	}
}

func (s *Screen) paint(name, value string) {
	if value == "?" || len(value) > 64 || len(name) > 8 || !plain([]byte(value)) || !plain([]byte(name)) {
		return
	}
	if _, known := s.palette[name]; known || len(s.palette) < paletteKept {
		s.palette[name] = value
	}
}
