package term

// historyBytes bounds what a screen keeps of lines that have scrolled away.
const historyBytes = 512 << 10

// history is the lines that have scrolled off a screen, oldest first, each as the
// bytes that draw it from plain style to plain style. It is a ring of bytes, so that
// a line that comes and goes costs no memory of its own.
type history struct {
	buf   []byte
	next  int // where in buf the next line goes
	lines []line
	first int   // index of the oldest line
	count int   // lines kept
	total int64 // lines that ever were
	limit int
}

// line is where a line is in the ring.
type line struct {
	at, n   int
	width   int
	wrapped bool // the next line goes on where this one ends
}

// put adds a line, and forgets the oldest as far as there must be room.
func (h *history) put(text []byte, width int, wrapped bool) {
	h.total++
	if h.limit == 0 || len(text) > historyBytes/4 {
		return
	}
	if h.lines == nil {
		h.lines = make([]line, h.limit)
		h.buf = make([]byte, 4<<10)
	}
	if h.count == h.limit {
		h.drop()
	}
	at := h.room(len(text) + 1) // none takes nothing, so that next and first tell full from empty
	copy(h.buf[at:], text)
	h.next = at + len(text) + 1
	h.lines[(h.first+h.count)%h.limit] = line{at, len(text), width, wrapped}
	h.count++
}

func (h *history) drop() {
	h.first = (h.first + 1) % h.limit
	h.count--
}

// room finds n bytes in a row.
func (h *history) room(n int) int {
	for {
		if h.count == 0 {
			h.next = 0
			if n <= len(h.buf) {
				return 0
			}
		} else {
			oldest := h.lines[h.first].at
			if h.next > oldest {
				if h.next+n <= len(h.buf) {
					return h.next
				}
				if n <= oldest && len(h.buf) >= historyBytes {
					return 0
				}
			} else if h.next+n <= oldest {
				return h.next
			}
		}
		if len(h.buf) < historyBytes {
			h.grow(n)
		} else {
			h.drop()
		}
	}
}

// grow doubles the ring, and straightens it.
func (h *history) grow(n int) {
	size := len(h.buf) * 2
	for size < historyBytes && size < len(h.buf)+n {
		size *= 2
	}
	buf := make([]byte, size)
	at := 0
	for i := range h.count {
		l := &h.lines[(h.first+i)%h.limit]
		copy(buf[at:], h.buf[l.at:l.at+l.n])
		l.at = at
		at += l.n + 1
	}
	h.buf, h.next = buf, at
}

// get is line i of those kept, and its drawing.
func (h *history) get(i int) (line, []byte) {
	l := h.lines[(h.first+i)%h.limit]
	return l, h.buf[l.at : l.at+l.n]
}

// clear forgets every line.
func (h *history) clear() {
	*h = history{limit: h.limit, total: h.total}
}
