package term

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"unicode/utf8"
)

// Restore brings a terminal back to how programs expect it: the main screen, plain
// style, no mouse, paste, focus or keyboard modes. The screen's text stays.
const Restore = "\x1b[?1049l" + restoreModes

// restoreModes is many short sequences: some terminals (tmux) take no long ones.
const restoreModes = "\x1b[!p\x1b[r\x1b[?6l" + plainly + "\x1b[4l\x1b[20l\x1b>\x1b[<99u\x1b[>4m\x1b[0 q" +
	"\x1b[?9;1000;1002;1003;1004;1005;1006l\x1b[?1015;1016;1;5;12;45;2004l\x1b[?2026;2031;2048l\x1b[?7;25h"

// plainly ends a style, a link and the use of other characters.
const plainly = "\x1b[m\x1b]8;;\x1b\\\x1b(B\x1b)B\x1b*B\x1b+B\x0f"

// RestoreColors takes back what a program did to the terminal's own colours.
const RestoreColors = "\x1b]104\x1b\\\x1b]110\x1b\\\x1b]111\x1b\\\x1b]112\x1b\\"

// Redraw gives the bytes that make a terminal of cols × rows show the screen, and
// behave as it: whatever the program writes next can be written to it too. from is
// the first line of those that scrolled away to be drawn, as Lines counts; they go
// where the terminal keeps such lines. When the sizes differ, what does not fit is
// left out.
func (s *Screen) Redraw(cols, rows int, from int64) []byte {
	b := append(make([]byte, 0, 16<<10), Restore+"\x1b[H\x1b[2J"...)
	b = s.drawHistory(b, cols, rows, from)
	for _, name := range sortedKeys(s.palette) {
		b = fmt.Appendf(b, "\x1b]%s;%s\x1b\\", name, s.palette[name])
	}
	b = s.drawTabs(b)
	if s.isAlt() {
		b = s.drawGrid(b, &s.main, cols, rows)
		b = s.drawCursor(b, &s.main.saved, cols, rows)
		b = append(b, "\x1b[?1049h"+plainly+"\x1b[?6l\x1b[H\x1b[2J"...)
	}
	b = s.drawGrid(b, s.now, cols, rows)
	b = s.drawState(b, cols, rows)
	return append(b, s.parser.pending()...)
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// drawHistory writes lines from the terminal's top and then scrolls them off.
func (s *Screen) drawHistory(b []byte, cols, rows int, from int64) []byte {
	h := &s.history
	first := int(max(from-(h.total-int64(h.count)), 0))
	used, begun := 0, false
	for i := first; i < h.count; i++ {
		l, text := h.get(i)
		b = append(b, text...)
		if begun = l.wrapped; !begun {
			b = append(b, "\r\n"...)
		}
		used += 1 + max(l.width-1, 0)/max(cols, 1)
	}
	if begun {
		b = append(b, "\r\n"...) // it goes on on the screen, which is drawn row by row
	}
	if used = min(used, rows-1); used > 0 {
		b = fmt.Appendf(b, "\x1b[%dH", rows)
		b = append(b, bytes.Repeat([]byte{'\n'}, used)...)
	}
	return b
}

// drawGrid draws a screen's rows.
func (s *Screen) drawGrid(b []byte, g *grid, cols, rows int) []byte {
	b = append(b, "\x1b[?7l"...)
	for y := range min(len(g.rows), rows) {
		cells := trim(g.rows[y].cells)
		if len(cells) > cols {
			if cells = cells[:cols]; g.rows[y].cells[cols].ch == tail {
				cells = cells[:cols-1]
			}
		}
		if len(cells) > 0 {
			b = fmt.Appendf(b, "\x1b[%dH", y+1)
			b = s.drawCells(b, cells)
		}
	}
	b = append(b, "\x1b[?7h"...)
	for _, flags := range g.keys {
		b = fmt.Appendf(b, "\x1b[>%du", flags)
	}
	return b
}

// drawCells writes cells, from plain style to plain style.
func (s *Screen) drawCells(b []byte, cells []cell) []byte {
	at := uint32(0)
	for _, c := range cells {
		if c.style != at {
			b = s.drawStyle(b, at, c.style)
			at = c.style
		}
		switch {
		case c.ch > 0 && c.ch < utf8.RuneSelf:
			b = append(b, byte(c.ch))
		case c.ch == 0:
			b = append(b, ' ')
		case c.ch != tail:
			b = append(b, s.glyph(c.ch)...)
		}
	}
	return s.drawStyle(b, at, 0)
}

func (s *Screen) drawStyle(b []byte, from, to uint32) []byte {
	if from == to {
		return b
	}
	if to == 0 {
		b = append(b, "\x1b[m"...)
	} else {
		b = s.styles[to].append(b)
	}
	if link := s.styles[to].link; link != s.styles[from].link {
		if link == "" {
			link = ";"
		}
		b = append(append(append(b, "\x1b]8;"...), link...), "\x1b\\"...)
	}
	return b
}

// drawTabs sets the tab stops when they are not every eighth column.
func (s *Screen) drawTabs(b []byte) []byte {
	usual := true
	for x := range s.cols {
		usual = usual && s.tabs[x] == (x > 0 && x%8 == 0)
	}
	if usual {
		return b
	}
	b = append(b, "\x1b[3g"...)
	for x := range s.cols {
		if s.tabs[x] {
			b = fmt.Appendf(b, "\x1b[%dG\x1bH", x+1)
		}
	}
	return b
}

// drawCursor puts the cursor, with everything that goes with it.
func (s *Screen) drawCursor(b []byte, c *cursor, cols, rows int) []byte {
	y := min(c.y, rows-1)
	if c.origin {
		y = min(max(c.y-s.top, 0), rows-1)
		b = append(b, "\x1b[?6h"...)
	} else {
		b = append(b, "\x1b[?6l"...)
	}
	b = fmt.Appendf(b, "\x1b[%d;%dH", y+1, min(c.x, cols-1)+1)
	if cells := s.now.rows; c.wrap && c.x == s.cols-1 && cols == s.cols && c.y < len(cells) && c == &s.cur {
		// The only way to a full last column is to write it.
		last := cells[c.y].cells[c.x]
		at := c.x
		if last.ch == tail {
			at--
			last = cells[c.y].cells[at]
			b = append(b, '\b')
		}
		b = s.drawCells(b, []cell{last})
	}
	if c.style != 0 {
		b = s.drawStyle(b, 0, c.style)
	}
	for i, set := range c.sets {
		if set == '0' {
			b = append(b, 0x1b, '('+byte(i), '0')
		}
	}
	switch c.shift {
	case 1:
		b = append(b, 0x0e)
	case 2:
		b = append(b, "\x1bn"...)
	case 3:
		b = append(b, "\x1bo"...)
	}
	return b
}

// drawState sets what is neither text nor style.
func (s *Screen) drawState(b []byte, cols, rows int) []byte {
	if s.now.saved != (cursor{}) {
		b = s.drawCursor(b, &s.now.saved, cols, rows)
		b = append(b, "\x1b7"+plainly...)
	}
	if s.top != 0 || s.end != s.rows {
		b = fmt.Appendf(b, "\x1b[%d;%dr", s.top+1, s.end)
	}
	b = s.drawCursor(b, &s.cur, cols, rows)
	if s.insert {
		b = append(b, "\x1b[4h"...)
	}
	if s.newline {
		b = append(b, "\x1b[20h"...)
	}
	if s.keypad {
		b = append(b, "\x1b="...)
	}
	if s.shape != 0 {
		b = fmt.Appendf(b, "\x1b[%d q", s.shape)
	}
	if s.other != 0 {
		b = fmt.Appendf(b, "\x1b[>4;%dm", s.other)
	}
	if s.title != "" {
		b = fmt.Appendf(b, "\x1b]2;%s\x1b\\", s.title)
	}
	for _, mode := range keptModes {
		if on, known := s.modes[mode]; known {
			b = strconv.AppendInt(append(b, "\x1b[?"...), int64(mode), 10)
			if on {
				b = append(b, 'h')
			} else {
				b = append(b, 'l')
			}
		}
	}
	return b
}

// Text is the screen as plain text, a line a row, empty ones at the end left out;
// with lines of those that scrolled away before it.
func (s *Screen) Text(lines int) []byte {
	var b []byte
	for i := max(s.history.count-lines, 0); i < s.history.count; i++ {
		l, text := s.history.get(i)
		b = append(b, stripped(text)...)
		if !l.wrapped {
			b = append(b, '\n')
		}
	}
	end := len(s.now.rows)
	for end > 0 && len(trim(s.now.rows[end-1].cells)) == 0 {
		end--
	}
	for _, r := range s.now.rows[:end] {
		b = append(b, bytes.TrimRight(stripped(s.drawCells(nil, r.cells)), " ")...)
		b = append(b, '\n')
	}
	return b
}

// stripped leaves the text of what draws a line.
func stripped(drawn []byte) []byte {
	var t textOnly
	var p parser
	p.feed(drawn, &t)
	return t.b
}

type textOnly struct{ b []byte }

func (t *textOnly) text(ascii []byte) { t.b = append(t.b, ascii...) }
func (t *textOnly) letter(r rune)     { t.b = utf8.AppendRune(t.b, r) }
func (t *textOnly) control(byte)      {}
func (t *textOnly) escape([]byte)     {}
func (t *textOnly) sequence([]byte)   {}
func (t *textOnly) str([]byte, bool)  {}
