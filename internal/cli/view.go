package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/client"
	"dozable.com/doz/internal/guest"
)

const (
	menuWait    = 15 * time.Second      // for a key in the menu
	partialWait = 50 * time.Millisecond // for the rest of a key
	comeBack    = 100 * time.Millisecond
	lostWait    = 30 * time.Second // for a host to serve again
)

// viewing is one terminal on a sandbox's sessions, one after the other, until it
// leaves or the last one ends.
type viewing struct {
	a       *app
	sandbox string
	session string
	at      *terminal
	keys    keys
	one     bool // the key leaves at once: no menu
	typed   chan []byte
	signals chan os.Signal
	shown   *client.Viewer
	menu    bool
	list    []string // the menu shows these sessions
}

// why a session is looked at no more.
type why struct {
	left    bool              // the viewer wanted it
	signal  os.Signal         // or was told to
	next    string            // to look at this session instead
	exit    *guest.ExitStatus // it has ended
	closing *guest.Closing    // it may have not
	err     error
}

// detachKey reads --detach-key.
func (v *viewing) detachKey(s string) error {
	v.keys.key = menuKey
	if s == "" {
		return nil
	}
	if s == "none" {
		v.keys.key = 0
		return nil
	}
	letter, found := strings.CutPrefix(strings.ToLower(s), "ctrl-")
	// Not those that are Tab, Enter and Escape.
	if !found || len(letter) != 1 || letter[0] < 'a' && letter != "\\" && letter != "]" || letter[0] > 'z' || strings.Contains("ijm", letter) {
		return &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("--detach-key: %q is neither none nor a key like ctrl-x", s)}
	}
	v.keys.key = letter[0] & 0x1f
	v.one = v.keys.key != menuKey
	return nil
}

// run shows what join opens, and what comes after, and gives the exit code.
func (v *viewing) run(ctx context.Context, join func(context.Context, *client.Client, int, int) (*client.Viewer, api.AttachResult, error)) error {
	// Until the terminal is ours, Ctrl-C ends the command.
	steps := v.a.steps("start " + v.sandbox)
	defer steps.end()
	c, err := v.a.connect(ctx, steps.show)
	if err != nil {
		return err
	}
	v.at = v.a.terminal()
	defer v.at.leave()
	v.one = v.one || v.at.in == nil
	cols, rows := v.at.size()
	shown, result, err := join(ctx, c, cols, rows)
	if err != nil {
		return err
	}
	steps.end()
	if err := v.begin(); err != nil {
		shown.Close()
		return err
	}
	for {
		if err != nil {
			return err
		}
		if len(result.Notes) > 0 {
			v.at.show([]byte("doz: note: " + strings.Join(result.Notes, "\r\ndoz: note: ") + "\r\n"))
		}
		v.session, v.shown = result.Session.Session, shown
		v.at.afresh()
		end := v.look()
		shown.Close()
		again := api.AttachRequest{Name: v.sandbox, Session: v.session, NoHistory: true, NoOpen: true, NoStart: true, NoWake: true}
		switch {
		case end.exit != nil:
			return v.over(end.exit)
		case end.err != nil:
			return end.err
		case end.left:
			return v.left()
		case end.signal != nil:
			v.at.leave()
			return exitCode(128 + int(end.signal.(syscall.Signal)))
		case end.next != "":
			again.Session = end.next
		default:
			if end := v.wait(ctx, end.closing); end != nil {
				if end.left {
					return v.left()
				}
				return end.err
			}
		}
		again.Cols, again.Rows = v.at.size()
		shown, result, err = v.rejoin(ctx, again)
	}
}

// begin takes the terminal over, and what is typed, and the signals.
func (v *viewing) begin() error {
	if v.typed != nil {
		return nil
	}
	if err := v.at.raw(); err != nil {
		return err
	}
	v.signals = make(chan os.Signal, 8)
	signal.Notify(v.signals, syscall.SIGWINCH, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT, syscall.SIGCONT)
	v.typed = make(chan []byte)
	go v.read()
	return nil
}

// rejoin looks at a session again, through another host if need be.
func (v *viewing) rejoin(ctx context.Context, r api.AttachRequest) (*client.Viewer, api.AttachResult, error) {
	for end := time.Now().Add(lostWait); ; time.Sleep(comeBack) {
		c, err := v.a.connect(ctx, func(api.Progress) {})
		if err == nil {
			var shown *client.Viewer
			var result api.AttachResult
			if shown, result, err = c.Attach(ctx, r); err == nil {
				return shown, result, nil
			}
		}
		kind := api.AsError(err).Kind
		if kind == api.KindNotFound || ctx.Err() != nil || time.Now().After(end) {
			return nil, api.AttachResult{}, err
		}
	}
}

// read reads what is typed, until the end of it.
func (v *viewing) read() {
	for {
		buf := make([]byte, 32<<10)
		n, err := v.a.in.Read(buf)
		if n > 0 {
			v.typed <- buf[:n]
		}
		if err != nil {
			return
		}
	}
}

// look shows one session until it, or the looking at it, ends.
func (v *viewing) look() why {
	ends := make(chan why, 1)
	go func() { ends <- v.receive(v.shown) }()
	minute := time.NewTicker(time.Minute)
	defer minute.Stop()
	v.at.call(titleFor(v.sandbox, v.session))
	var partial, menu <-chan time.Time
	v.menu = false
	for {
		var end *why
		select {
		case e := <-ends:
			return e
		case s := <-v.signals:
			end = v.signalled(s)
		case <-minute.C:
			v.at.call(titleFor(v.sandbox, v.session))
		case <-partial:
			v.shown.Type(v.keys.flush())
		case <-menu:
			v.close()
		case b := <-v.typed:
			end = v.take(b)
		}
		if end != nil {
			return *end
		}
		partial = nil
		if len(v.keys.partial) > 0 {
			partial = time.After(partialWait)
		}
		if !v.menu {
			menu = nil
		} else if menu == nil {
			menu = time.After(menuWait)
		}
	}
}

func (v *viewing) signalled(s os.Signal) *why {
	switch s {
	case syscall.SIGWINCH:
		if cols, rows := v.at.size(); cols > 0 {
			v.shown.Resize(cols, rows)
		}
	case syscall.SIGCONT:
		// Whoever stopped us had the terminal meanwhile.
		v.at.raw()
		v.shown.Hold(false)
	default:
		return &why{signal: s}
	}
	return nil
}

// take takes what was typed.
func (v *viewing) take(b []byte) *why {
	for {
		if v.menu {
			return v.choose(b)
		}
		before, found, after := v.keys.next(b)
		if len(before) > 0 {
			v.shown.Type(before)
		}
		if !found {
			return nil
		}
		if v.one {
			return &why{left: true}
		}
		v.menu, v.list = true, nil
		v.shown.Hold(true)
		v.at.over(fmt.Sprintf(" %s/%s   d detach   n next   p previous   s sessions   Esc back   Ctrl-] detach", v.sandbox, v.session))
		if b = after; len(b) == 0 {
			return nil
		}
	}
}

// close puts the menu away.
func (v *viewing) close() {
	v.menu = false
	v.at.back()
	v.shown.Hold(false)
}

// choose takes a key of the menu's.
func (v *viewing) choose(b []byte) *why {
	key := letter(b)
	switch {
	case key == 0xff:
		return nil
	case key == 'd', key == menuKey:
		return &why{left: true}
	case key == 'n', key == 'p', key == 's':
		names := v.sessions()
		if len(names) == 0 {
			break
		}
		if key == 's' {
			v.list = names
			line := " "
			for i, name := range names[:min(len(names), 9)] {
				line += fmt.Sprintf("%d %s   ", i+1, name)
			}
			v.at.over(line + "Esc back")
			return nil
		}
		step := map[byte]int{'n': 1, 'p': len(names) - 1}[key]
		at := 0
		for i, name := range names {
			if name == v.session {
				at = i
			}
		}
		if to := names[(at+step)%len(names)]; to != v.session {
			return &why{next: to}
		}
	case v.list != nil && key >= '1' && int(key-'1') < len(v.list) && v.list[key-'1'] != v.session:
		return &why{next: v.list[key-'1']}
	}
	v.close()
	return nil
}

// sessions are the names of those that run.
func (v *viewing) sessions() (names []string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	c, err := v.a.connect(ctx, func(api.Progress) {})
	if err != nil {
		return nil
	}
	list, err := c.Sessions(ctx, api.SessionsRequest{Name: v.sandbox})
	if err != nil {
		return nil
	}
	for _, s := range list.Sessions {
		if s.State == api.SessionRunning {
			names = append(names, s.Session)
		}
	}
	return names
}

// receive shows what arrives.
func (v *viewing) receive(shown *client.Viewer) why {
	for {
		typ, payload, err := shown.Next()
		if err != nil {
			return why{closing: &guest.Closing{Reason: "lost"}}
		}
		switch typ {
		case guest.Stdout:
			if err := v.at.show(payload); err != nil {
				return why{err: fmt.Errorf("cannot write to the terminal: %w", err)}
			}
		case guest.Lead:
			var lead guest.Switch
			json.Unmarshal(payload, &lead)
			v.at.lead(lead.On)
		case guest.Exit:
			var exit guest.ExitStatus
			if err := json.Unmarshal(payload, &exit); err != nil {
				return why{err: errors.New("the guest told no exit code")}
			}
			return why{exit: &exit}
		case guest.Failure:
			var e api.Error
			if json.Unmarshal(payload, &e) != nil || e.Message == "" {
				e = api.Error{Kind: api.KindFailed, Message: "the session's stream failed"}
			}
			return why{err: &e}
		case guest.Closed:
			var closing guest.Closing
			json.Unmarshal(payload, &closing)
			return why{closing: &closing}
		}
	}
}

// wait waits until a sandbox whose session was cut off runs again. nil is that it
// does. It wakes nothing: others put it to rest, and others wake it.
func (v *viewing) wait(ctx context.Context, closing *guest.Closing) *why {
	told := api.Phase("")
	lost := time.Now().Add(lostWait)
	for ; ; time.Sleep(comeBack) {
		select {
		case b := <-v.typed:
			// The keys are nobody's now, but for the one that leaves.
			if _, found, _ := v.keys.next(b); found {
				return &why{left: true}
			}
		case s := <-v.signals:
			if s != syscall.SIGWINCH && s != syscall.SIGCONT {
				return &why{left: true}
			}
		default:
		}
		c, err := v.a.connect(ctx, func(api.Progress) {})
		var s api.Sandbox
		if err == nil {
			s, err = c.Inspect(ctx, v.sandbox)
		}
		switch {
		case err != nil && (api.AsError(err).Kind == api.KindNotFound || time.Now().After(lost)):
			return &why{err: err}
		case err != nil:
		case s.Phase == api.Running:
			return nil
		case s.Phase == api.Off || s.Phase == api.Failed || s.Phase == api.Damaged:
			return &why{err: &api.Error{
				Kind: api.KindFailed, Message: fmt.Sprintf("sandbox %q is %s, and session %q has ended with it", v.sandbox, s.Phase, v.session),
				Hint: "start it anew with: doz attach " + v.sandbox,
			}}
		case s.Phase != told:
			told = s.Phase
			v.at.over(fmt.Sprintf(" %s is %s; it is shown again when it runs   Ctrl-] detach", v.sandbox, s.Phase))
		}
	}
}

// over is a session's end, seen.
func (v *viewing) over(exit *guest.ExitStatus) error {
	v.at.leave()
	if !v.a.quiet && v.at.before == nil && v.at.in != nil {
		fmt.Fprintf(v.a.err, "doz: session %s of %s has ended, exit code %d\n", v.session, v.sandbox, exit.Code)
	}
	if exit.Code != 0 {
		return exitCode(exit.Code)
	}
	return nil
}

// left is leaving a session that goes on.
func (v *viewing) left() error {
	v.at.leave()
	if !v.a.quiet {
		command := "doz attach " + v.sandbox
		if v.session != "shell" {
			command += " " + v.session
		}
		fmt.Fprintln(v.a.err, "doz: detached; come back with:", command)
	}
	return nil
}
