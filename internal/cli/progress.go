package cli

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/term"

	"dozable.com/doz/internal/api"
)

// steps shows an operation's progress on standard error: a line redrawn in place on
// a terminal, a line a step elsewhere, and nothing for what takes under a second.
type steps struct {
	a       *app
	title   string
	began   time.Time
	redraw  bool
	silent  bool
	mu      sync.Mutex
	last    string
	pending []string // plain lines not shown yet: the operation is young
	drawn   bool
	ended   bool
}

// patience is how long an operation goes on before its steps are shown.
const patience = time.Second

func (a *app) steps(title string) *steps {
	f, isFile := a.err.(*os.File)
	return &steps{
		a: a, title: title, began: time.Now(), silent: a.quiet || a.json,
		redraw: a.progress != "plain" && os.Getenv("NO_COLOR") == "" && isFile && term.IsTerminal(int(f.Fd())),
	}
}

// show takes a step in.
func (s *steps) show(p api.Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.silent || s.ended {
		return
	}
	if !s.redraw {
		s.line(p)
		return
	}
	if !s.a.verbose && time.Since(s.began) < patience {
		return
	}
	fmt.Fprintf(s.a.err, "\r\x1b[K%s: %s %s", s.title, oneLine(p.Step), amount(p))
	s.drawn = true
}

// line prints each step once, in a plain line.
func (s *steps) line(p api.Progress) {
	if p.Step == s.last {
		return
	}
	s.last = p.Step
	s.pending = append(s.pending, fmt.Sprintf("%s: %s\n", s.title, oneLine(p.Step)))
	if s.a.verbose || time.Since(s.began) >= patience {
		for _, line := range s.pending {
			fmt.Fprint(s.a.err, line)
		}
		s.pending = nil
	}
}

// end takes the redrawn line away. It is idempotent.
func (s *steps) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	if s.drawn {
		fmt.Fprint(s.a.err, "\r\x1b[K")
		s.drawn = false
	}
}

// barWidth is a bar's, in characters.
const barWidth = 24

// amount is how far a step has come: a bar when its end is known.
func amount(p api.Progress) string {
	text := fmt.Sprint(p.Done)
	if p.Unit == "bytes" {
		text = size(p.Done)
	}
	if p.Total <= 0 {
		if p.Done == 0 {
			return "…"
		}
		return text
	}
	full := int(min(p.Done, p.Total) * barWidth / p.Total)
	bar := make([]rune, barWidth)
	for i := range bar {
		if bar[i] = '░'; i < full {
			bar[i] = '█'
		}
	}
	if p.Unit != "bytes" {
		return string(bar)
	}
	return fmt.Sprintf("%s %s of %s", string(bar), text, size(p.Total))
}
