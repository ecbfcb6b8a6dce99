package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	xterm "golang.org/x/term"

	"dozable.com/doz/internal/term"
)

// terminal is the one doz was started from, while it shows a session. All of it goes
// back to how it was in leave.
type terminal struct {
	in     *os.File // nil: input is no terminal
	screen *os.File // nil: output is no terminal
	out    io.Writer
	before *xterm.State
	taken  bool

	mu     sync.Mutex // held for each whole write
	filter term.Filter
	held   []byte // frames that arrived while something of ours is drawn over the screen
	hold   bool
	title  string
	broken error // the output's
	undo   func()
}

// heldMost is how much may arrive between a hold and its taking effect.
const heldMost = 8 << 20

// terminal is the one this process has, not taken over yet.
func (a *app) terminal() *terminal {
	t := &terminal{out: a.out}
	if f, ok := a.in.(*os.File); ok && xterm.IsTerminal(int(f.Fd())) {
		t.in = f
	}
	t.screen = a.screen()
	return t
}

// screen is the terminal that output goes to; nil when it goes elsewhere.
func (a *app) screen() *os.File {
	if o, ok := a.out.(*output); ok {
		if f, ok := o.w.(*os.File); ok && xterm.IsTerminal(int(f.Fd())) {
			return f
		}
	}
	return nil
}

// raw takes the terminal over: every key reaches the session.
func (t *terminal) raw() error {
	t.taken = true
	if t.in == nil {
		return nil
	}
	if t.before == nil {
		t.undo = guard(t.in, t.screen)
	}
	state, err := xterm.MakeRaw(int(t.in.Fd()))
	if err != nil {
		return fmt.Errorf("cannot use the terminal: %w", err)
	}
	if t.before == nil {
		t.before = state
	}
	return nil
}

// size is the terminal's; 0 when there is none.
func (t *terminal) size() (cols, rows int) {
	if t.screen == nil {
		return 0, 0
	}
	cols, rows, err := xterm.GetSize(int(t.screen.Fd()))
	if err != nil || cols == 0 || rows == 0 {
		return 80, 24
	}
	return cols, rows
}

// show writes a session's output, what may pass of it.
func (t *terminal) show(b []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.hold {
		t.held = append(t.held, b[:min(len(b), heldMost-len(t.held))]...)
		return t.broken
	}
	t.put(t.filter.Filter(b))
	return t.broken
}

func (t *terminal) put(b []byte) {
	if _, err := t.out.Write(b); err != nil && t.broken == nil {
		t.broken = err
	}
}

// lead says whether this terminal answers what the program asks.
func (t *terminal) lead(on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.filter.Quiet = !on || t.screen == nil || t.in == nil
}

// call names the window; the first time its own title is put aside.
func (t *terminal) call(title string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.screen == nil || title == t.title || t.hold {
		return
	}
	if t.title == "" {
		t.put([]byte("\x1b[22;0t"))
	}
	t.title = title
	t.put([]byte("\x1b]2;" + title + "\x1b\\"))
}

// titleFor is what the window is called.
func titleFor(sandbox, session string) string {
	return sandbox + " · " + session + " · " + time.Now().Format("15:04")
}

// over draws a line of ours over the bottom row, and holds the session's output.
func (t *terminal) over(text string) {
	cols, rows := t.size()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hold = true
	if t.screen == nil {
		return
	}
	if runes := []rune(text); len(runes) > cols-1 {
		text = string(runes[:cols-1])
	}
	t.put(fmt.Appendf(nil, "\x1b7\x1b[?6l\x1b[%d;1H\x1b[0;7m\x1b[2K%s%s\x1b[0m\x1b8", rows, text, strings.Repeat(" ", max(cols-1-len([]rune(text)), 0))))
}

// back shows the session's output again. It has to be drawn anew by the session.
func (t *terminal) back() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hold = false
	t.put(t.filter.Filter(t.held))
	t.held = nil
}

// afresh forgets what another session's output began.
func (t *terminal) afresh() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hold, t.held = false, nil
	t.filter = term.Filter{Quiet: t.filter.Quiet}
}

// leave gives the terminal back. It may be called more than once.
func (t *terminal) leave() {
	if !t.taken {
		return
	}
	// Not waiting for one whose output stands still.
	if t.before != nil {
		xterm.Restore(int(t.in.Fd()), t.before)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.screen != nil {
		_, rows := t.size()
		if t.hold {
			t.put(fmt.Appendf(nil, "\x1b[0m\x1b[%d;1H\x1b[2K", rows)) // our line
		}
		t.put(farewell(rows, t.title != "", true))
	}
	if t.before != nil {
		dropInput(t.in) // answers to what the program asked last
		xterm.Restore(int(t.in.Fd()), t.before)
		t.before = nil
		t.undo()
	}
	t.screen = nil
}

// farewell takes back whatever a session may have done to a terminal.
func farewell(rows int, titled, colored bool) []byte {
	b := []byte(term.Restore)
	if colored {
		b = append(b, term.RestoreColors...)
	}
	if titled {
		b = append(b, "\x1b[23;0t"...)
	}
	return fmt.Appendf(b, "\x1b[%d;1H\r\n", rows)
}
