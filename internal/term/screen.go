// Package term is a terminal without a display: it keeps the screen that a program's
// output makes, draws it on other terminals, and keeps from those what must not reach
// them.
//
// It must not know where bytes come from or go to. What it reads is hostile: whatever
// arrives, its memory is bounded and it goes on.
package term

import (
	"unicode/utf8"

	"github.com/mattn/go-runewidth"
)

// Limits of a screen's size. Larger ones are made smaller, and none is refused.
const (
	MaxCols = 1000
	MaxRows = 500
)

// cell is one place on the screen. ch is 0 for an empty one, tail for the right half
// of a wide character, and below that a grapheme's index.
type cell struct {
	ch    rune
	style uint32
}

const tail rune = -1

type row struct {
	cells   []cell
	wrapped bool // the next row goes on where this one ends
}

// cursor is where and how characters are put.
type cursor struct {
	x, y    int
	wrap    bool // the last column is full: the next character goes to the next row
	style   uint32
	sets    [4]byte // G0 to G3: '0' is line drawing, all others are ASCII
	shift   int     // which of them is in use
	origin  bool    // rows count from the top margin
	current style   // style, spelled out
}

// grid is one of the two screens.
type grid struct {
	rows  []row
	saved cursor
	keys  []byte // the kitty keyboard protocol's flags, the current last
}

// Screen is a terminal's state. Not for concurrent use.
type Screen struct {
	// Answer, when set, is called with the terminal's answer to what a program asks it.
	Answer func([]byte)

	parser     parser
	cols, rows int
	main, alt  grid
	now        *grid // main or alt
	cur        cursor
	top, end   int // the scrolling region: rows top to end-1
	tabs       []bool
	modes      map[int]bool // private modes that were set or reset
	insert     bool
	newline    bool
	keypad     bool
	shape      int // of the cursor, DECSCUSR
	other      int // modifyOtherKeys
	title      string
	palette    map[string]string // colours that were set, by OSC's number and index
	last       rune              // for REP

	styles    []style
	styleIDs  map[style]uint32
	linkBytes int
	// how often more may be refused before a look for what can be forgotten
	styleMisses, graphMisses int
	graphemes                []string
	graphIDs                 map[string]rune
	history                  history
	scratch                  []byte
}

// New is an empty screen that keeps as many lines that have scrolled away.
func New(cols, rows, lines int) *Screen {
	s := &Screen{}
	s.cols, s.rows = clampSize(cols, rows)
	s.history.limit = lines
	s.reset()
	return s
}

func clampSize(cols, rows int) (int, int) {
	return min(max(cols, 2), MaxCols), min(max(rows, 1), MaxRows)
}

// Size is the screen's size.
func (s *Screen) Size() (cols, rows int) { return s.cols, s.rows }

// Title is what the program called its window last.
func (s *Screen) Title() string { return s.title }

// Lines counts the lines that have scrolled away since the beginning.
func (s *Screen) Lines() int64 { return s.history.total }

// Write takes a program's output.
func (s *Screen) Write(b []byte) (int, error) {
	s.parser.feed(b, s)
	return len(b), nil
}

// reset makes the terminal as new, but for its history and size.
func (s *Screen) reset() {
	s.styles, s.styleIDs, s.linkBytes = []style{{}}, map[style]uint32{{}: 0}, 0
	s.graphemes, s.graphIDs = nil, map[string]rune{}
	s.main = grid{rows: newRows(s.cols, s.rows)}
	s.alt = grid{}
	s.now = &s.main
	s.modes, s.palette = map[int]bool{}, map[string]string{}
	s.title = ""
	s.soft()
	s.cur.x, s.cur.y = 0, 0
	s.resetTabs()
}

// soft is DECSTR.
func (s *Screen) soft() {
	s.cur = cursor{x: s.cur.x, y: s.cur.y}
	s.top, s.end = 0, s.rows
	s.insert, s.newline, s.keypad = false, false, false
	s.shape, s.other = 0, 0
	s.now.saved = cursor{}
	for _, mode := range []int{1, 6, 7, 25} {
		delete(s.modes, mode)
	}
}

func (s *Screen) resetTabs() {
	s.tabs = make([]bool, MaxCols)
	for i := 8; i < MaxCols; i += 8 {
		s.tabs[i] = true
	}
}

func newRows(cols, n int) []row {
	rows := make([]row, n)
	cells := make([]cell, cols*n)
	for i := range rows {
		rows[i].cells = cells[i*cols : (i+1)*cols : (i+1)*cols]
	}
	return rows
}

// isAlt says whether the alternate screen is shown.
func (s *Screen) isAlt() bool { return s.now == &s.alt }

// mode is a private mode, as it is or as terminals begin.
func (s *Screen) mode(n int) bool {
	on, known := s.modes[n]
	return on || !known && (n == 7 || n == 25)
}

// blank is an empty cell in the current background.
func (s *Screen) blank() cell {
	if s.cur.current.bg == 0 {
		return cell{}
	}
	return cell{style: s.styleID(style{bg: s.cur.current.bg})}
}

// text puts printable ASCII.
func (s *Screen) text(b []byte) {
	s.last = rune(b[len(b)-1])
	if s.insert || s.cur.sets[s.cur.shift] == '0' {
		for _, c := range b {
			s.put(s.drawing(c), 1)
		}
		return
	}
	for len(b) > 0 {
		s.wrapNow()
		n := min(len(b), s.cols-s.cur.x)
		if n == 0 {
			return
		}
		cells := s.now.rows[s.cur.y].cells
		s.split(cells, s.cur.x, s.cur.x+n)
		to := cells[s.cur.x : s.cur.x+n]
		for i, c := range b[:n] {
			to[i] = cell{rune(c), s.cur.style}
		}
		b = b[n:]
		s.advance(n)
		if s.cur.wrap && !s.mode(7) && len(b) > 0 {
			// Without wrapping all that follows is written over the last column.
			b, s.cur.wrap = b[len(b)-1:], false
		}
	}
}

// letter puts any character, or adds it to the one before.
func (s *Screen) letter(r rune) {
	width := 1
	if r >= 0x300 || r == 0xad {
		width = widths.RuneWidth(r)
	}
	switch {
	case r < 0xa0:
		return // C1
	case width == 0:
		s.combine(r)
		return
	}
	s.last = r
	s.put(r, width)
}

// widths are those of wcwidth, as nearly all terminals have them.
var widths = &runewidth.Condition{StrictEmojiNeutral: true}

func (s *Screen) put(r rune, width int) {
	s.wrapNow()
	if s.cur.x+width > s.cols {
		if !s.mode(7) {
			return
		}
		s.cur.wrap = true
		s.wrapNow()
	}
	cells := s.now.rows[s.cur.y].cells
	if s.insert {
		s.insertCells(width)
	}
	s.split(cells, s.cur.x, s.cur.x+width)
	cells[s.cur.x] = cell{r, s.cur.style}
	if width == 2 {
		cells[s.cur.x+1] = cell{tail, s.cur.style}
	}
	s.advance(width)
}

// wrapNow goes to the next row when the last column is full.
func (s *Screen) wrapNow() {
	if !s.cur.wrap {
		return
	}
	s.cur.wrap = false
	if !s.mode(7) {
		return
	}
	s.now.rows[s.cur.y].wrapped = true
	s.cur.x = 0
	s.index()
}

func (s *Screen) advance(n int) {
	if s.cur.x += n; s.cur.x >= s.cols {
		s.cur.x, s.cur.wrap = s.cols-1, true
	}
}

// split empties the halves of wide characters that from and to cut through.
func (s *Screen) split(cells []cell, from, to int) {
	if from > 0 && from < len(cells) && cells[from].ch == tail {
		cells[from-1].ch = 0
		cells[from].ch = 0
	}
	if to > 0 && to < len(cells) && cells[to].ch == tail {
		cells[to-1].ch = 0
		cells[to].ch = 0
	}
}

const (
	graphemeBytes = 32       // a character with all its marks
	graphemesKept = 16 << 10 // different ones on a screen
)

// combine adds a mark to the character before the cursor.
func (s *Screen) combine(r rune) {
	cells := s.now.rows[s.cur.y].cells
	x := s.cur.x - 1
	if s.cur.wrap {
		x = s.cur.x
	}
	if x >= 0 && cells[x].ch == tail {
		x--
	}
	if x < 0 || cells[x].ch == 0 || cells[x].ch == tail {
		return
	}
	whole := string(utf8.AppendRune([]byte(s.glyph(cells[x].ch)), r))
	if len(whole) > graphemeBytes {
		return
	}
	id, known := s.graphIDs[whole]
	if !known {
		if len(s.graphemes) >= graphemesKept && s.maySweep(&s.graphMisses) {
			s.sweepGraphemes()
		}
		if len(s.graphemes) >= graphemesKept {
			return
		}
		s.graphemes = append(s.graphemes, whole)
		id = tail - rune(len(s.graphemes))
		s.graphIDs[whole] = id
	}
	cells[x].ch = id
}

// glyph is a cell's character with its marks.
func (s *Screen) glyph(ch rune) string {
	if ch < tail {
		return s.graphemes[tail-ch-1]
	}
	return string(ch)
}

// each calls f with every row of both screens.
func (s *Screen) each(f func(cells []cell)) {
	for _, g := range []*grid{&s.main, &s.alt} {
		for _, r := range g.rows {
			f(r.cells)
		}
	}
}

// sweepGraphemes forgets those that are on no screen.
func (s *Screen) sweepGraphemes() {
	old, moved := s.graphemes, make([]rune, len(s.graphemes))
	s.graphemes, s.graphIDs = nil, map[string]rune{}
	s.each(func(cells []cell) {
		for i, c := range cells {
			if c.ch >= tail {
				continue
			}
			to := &moved[tail-c.ch-1]
			if *to == 0 {
				s.graphemes = append(s.graphemes, old[tail-c.ch-1])
				*to = tail - rune(len(s.graphemes))
				s.graphIDs[old[tail-c.ch-1]] = *to
			}
			cells[i].ch = *to
		}
	})
}

const (
	stylesKept = 32 << 10  // different ones on a screen; what comes on top is plain
	linksKept  = 256 << 10 // bytes of their links
)

// styleID is the number of a style.
func (s *Screen) styleID(want style) uint32 {
	if id, known := s.styleIDs[want]; known {
		return id
	}
	full := func() bool { return len(s.styles) >= stylesKept || s.linkBytes+len(want.link) > linksKept }
	if full() && s.maySweep(&s.styleMisses) {
		s.sweepStyles()
	}
	if full() {
		return 0
	}
	return s.addStyle(want)
}

// maySweep says whether to look for what can be forgotten: not again before so much
// was refused that the work is nothing beside it.
func (s *Screen) maySweep(misses *int) bool {
	if *misses--; *misses >= 0 {
		return false
	}
	*misses = s.cols*s.rows + stylesKept
	return true
}

func (s *Screen) addStyle(new style) uint32 {
	id := uint32(len(s.styles))
	s.styles = append(s.styles, new)
	s.styleIDs[new] = id
	s.linkBytes += len(new.link)
	return id
}

// sweepStyles forgets those that nothing has.
func (s *Screen) sweepStyles() {
	old, moved := s.styles, make([]uint32, len(s.styles))
	s.styles, s.styleIDs, s.linkBytes = []style{{}}, map[style]uint32{{}: 0}, 0
	renumber := func(id *uint32) {
		if *id == 0 {
			return
		}
		to := &moved[*id]
		if *to == 0 {
			*to = s.addStyle(old[*id])
		}
		*id = *to
	}
	s.each(func(cells []cell) {
		for i := range cells {
			renumber(&cells[i].style)
		}
	})
	renumber(&s.cur.style)
	renumber(&s.main.saved.style)
	renumber(&s.alt.saved.style)
}

// index goes down a row, and scrolls at the region's end.
func (s *Screen) index() {
	switch {
	case s.cur.y == s.end-1:
		s.scrollUp(s.top, 1)
	case s.cur.y < s.rows-1:
		s.cur.y++
	}
}

// scrollUp moves the rows from top to the region's end up by n. What leaves the main
// screen at its top is history.
func (s *Screen) scrollUp(top, n int) {
	rows := s.now.rows[top:s.end]
	n = min(n, len(rows))
	if top == 0 && !s.isAlt() {
		for i := range n {
			s.remember(&rows[i])
		}
	}
	s.rotate(rows, n)
	s.clearRows(rows[len(rows)-n:])
}

// scrollDown moves them down.
func (s *Screen) scrollDown(top, n int) {
	rows := s.now.rows[top:s.end]
	n = min(n, len(rows))
	s.rotate(rows, len(rows)-n)
	s.clearRows(rows[:n])
}

// rotate makes row n the first.
func (s *Screen) rotate(rows []row, n int) {
	if n == 1 {
		first := rows[0]
		copy(rows, rows[1:])
		rows[len(rows)-1] = first
		return
	}
	turned := append(append(make([]row, 0, len(rows)), rows[n:]...), rows[:n]...)
	copy(rows, turned)
}

func (s *Screen) clearRows(rows []row) {
	blank := s.blank()
	for i := range rows {
		rows[i].wrapped = false
		fill(rows[i].cells, blank)
	}
}

func fill(cells []cell, with cell) {
	if with == (cell{}) {
		clear(cells)
		return
	}
	for i := range cells {
		cells[i] = with
	}
}

// remember puts a row into the history.
func (s *Screen) remember(r *row) {
	cells := r.cells
	if !r.wrapped {
		cells = trim(cells)
	}
	s.scratch = s.drawCells(s.scratch[:0], cells)
	s.history.put(s.scratch, len(cells), r.wrapped)
}

// trim leaves out the empty cells at the end.
func trim(cells []cell) []cell {
	n := len(cells)
	for n > 0 && cells[n-1] == (cell{}) {
		n--
	}
	return cells[:n]
}
