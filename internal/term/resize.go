package term

// Resize makes the screen cols × rows. Lines of the main screen that were wrapped are
// wrapped anew; the alternate screen, which its program draws again, is cut or
// extended.
func (s *Screen) Resize(cols, rows int) {
	cols, rows = clampSize(cols, rows)
	if cols == s.cols && rows == s.rows {
		return
	}
	at := &s.cur
	if s.isAlt() {
		at = &s.main.saved
	}
	s.reflow(at, cols, rows)
	if s.alt.rows != nil {
		old := s.alt.rows
		s.alt.rows = newRows(cols, rows)
		for y := range min(len(old), rows) {
			copyCells(s.alt.rows[y].cells, old[y].cells)
		}
	}
	s.cols, s.rows = cols, rows
	s.top, s.end = 0, rows
	for _, c := range []*cursor{&s.cur, &s.main.saved, &s.alt.saved} {
		c.wrap = c.wrap && c.x == cols-1
		c.x, c.y = min(c.x, cols-1), min(c.y, rows-1)
	}
}

// copyCells copies what fits, and no half of a wide character.
func copyCells(to, from []cell) {
	n := copy(to, from)
	if n > 0 && n < len(from) && from[n].ch == tail {
		to[n-1].ch = 0
	}
}

// reflow wraps the main screen's lines anew. at is the cursor in them.
func (s *Screen) reflow(at *cursor, cols, rows int) {
	old := s.main.rows
	end := len(old)
	for end > at.y+1 && len(trim(old[end-1].cells)) == 0 {
		end--
	}
	var out []row
	x, y := at.x, at.y
	for first := 0; first < end; {
		last := first
		for last+1 < end && old[last].wrapped {
			last++
		}
		var whole []cell
		offset := -1
		for i := first; i <= last; i++ {
			if i == at.y {
				offset = len(whole) + at.x
			}
			cells := old[i].cells
			if i == last {
				cells = trim(cells)
			}
			whole = append(whole, cells...)
		}
		begin := len(out)
		out = append(out, wrapCells(whole, cols)...)
		if offset >= 0 {
			x, y = offset%cols, begin+offset/cols
			for len(out) <= y {
				out[len(out)-1].wrapped = len(whole) >= cols
				out = append(out, row{cells: make([]cell, cols)})
			}
		}
		first = last + 1
	}
	// What does not fit leaves at the top, as if it had scrolled.
	if over := len(out) - rows; over > 0 {
		for i := range over {
			s.remember(&out[i])
		}
		out = out[over:]
		y -= over
	}
	s.main.rows = append(out, newRows(cols, rows-len(out))...)
	at.x, at.y = x, max(y, 0)
}

// wrapCells cuts a line in rows. A wide character that would be cut goes on the next.
func wrapCells(cells []cell, cols int) (rows []row) {
	for {
		n := min(len(cells), cols)
		if n < len(cells) && cells[n].ch == tail {
			n--
		}
		r := row{cells: make([]cell, cols), wrapped: n < len(cells)}
		copy(r.cells, cells[:n])
		rows = append(rows, r)
		if cells = cells[n:]; len(cells) == 0 {
			return rows
		}
	}
}
