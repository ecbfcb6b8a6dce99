package main

import (
	"encoding/json"
	"slices"
	"sync"
	"time"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/term"
)

const (
	// queueMost is how far a viewer may be behind. What it has not read then is
	// dropped, and drawn from the screen when it reads again.
	queueMost = 2 << 20
	// paintPace is how often a viewer is drawn for whose terminal has another size.
	paintPace = 50 * time.Millisecond
	// gather is how long output that comes in masses is gathered before more of it is
	// sent: each frame costs the host's attention. An echo of what is typed waits for
	// nothing.
	gather = 2 * time.Millisecond
	masses = 4 << 10
)

// viewer is one terminal that shows a session. All but session and stream is guarded by the
// session's mu.
type viewer struct {
	session    *session
	stream     *guest.Stream
	cols, rows int
	queue      []byte // of the program's output, not sent yet
	mark       int64  // the screen's Lines when the queue began
	paint      bool   // to be drawn anew, from line mark on
	held       bool
	leadDue    bool // to be told whether it leads
	gone       bool
	wake       sync.Cond
}

// attach serves a viewer until it leaves or the session ends.
func (m *machine) attach(stream *guest.Stream, args json.RawMessage) {
	var request guest.SessionAttach
	if err := json.Unmarshal(args, &request); err != nil {
		refuse(stream, asError(unreadable(err)))
		return
	}
	s, opened, err := m.join(request)
	if err != nil {
		refuse(stream, asError(err))
		return
	}
	v := &viewer{session: s, stream: stream, paint: true}
	v.wake.L = &s.mu
	s.mu.Lock()
	v.cols, v.rows = s.screen.Size()
	if request.Cols > 0 && request.Rows > 0 {
		v.cols, v.rows = clamp(request.Cols, request.Rows)
	}
	if request.NoHistory {
		v.mark = s.screen.Lines()
	}
	s.viewers = append(s.viewers, v)
	s.follow(v)
	s.mu.Unlock()
	accept(stream, guest.SessionAttached{SessionInfo: s.info(), Opened: opened})
	go v.receive()
	if v.send() {
		// Somebody has seen it end.
		m.sessions.mu.Lock()
		m.sessions.drop(s)
		m.sessions.mu.Unlock()
	}
}

func clamp(cols, rows int) (int, int) {
	return min(max(cols, 2), term.MaxCols), min(max(rows, 1), term.MaxRows)
}

// join finds the session or opens it.
func (m *machine) join(request guest.SessionAttach) (s *session, opened bool, err error) {
	if !request.New {
		s, err = m.sessions.find(request.Session)
		// One that ended is shown once, unless the same can be opened again.
		if err == nil && (request.Open == nil || !s.ended()) {
			return s, false, nil
		}
	}
	if request.Open == nil {
		return nil, false, err
	}
	open := *request.Open
	open.Session, open.Cols, open.Rows = request.Session, request.Cols, request.Rows
	s, err = m.open(open)
	if refused, ok := err.(*guest.Error); ok && refused.Code == guest.CodeExists && !request.New {
		s, err = m.sessions.find(request.Session) // another was faster
		return s, false, err
	}
	return s, true, err
}

// follow makes v the viewer whose size the session has and whose terminal answers.
func (s *session) follow(v *viewer) {
	if s.lead != v {
		for _, other := range []*viewer{s.lead, v} {
			if other != nil {
				other.leadDue = true
				other.wake.Broadcast()
			}
		}
		s.lead = v
	}
	if v == nil || s.exit != nil {
		return
	}
	if cols, rows := s.screen.Size(); cols == v.cols && rows == v.rows {
		return
	}
	s.screen.Resize(v.cols, v.rows)
	setSize(s.pty, v.cols, v.rows)
	for _, each := range s.viewers {
		each.redraw()
	}
}

// redraw drops what was to be sent, and has the screen drawn.
func (v *viewer) redraw() {
	v.paint = true
	v.queue = nil
	v.wake.Broadcast()
}

// exact says whether the viewer's terminal is as large as the session's. Only then
// the program's output means the same on it.
func (v *viewer) exact() bool {
	cols, rows := v.session.screen.Size()
	return cols == v.cols && rows == v.rows
}

// add takes output. It never waits.
func (v *viewer) add(b []byte) {
	switch {
	case v.paint:
		return // it will be on the screen that is drawn
	case v.held, !v.exact(), len(v.queue)+len(b) > queueMost:
		v.redraw()
	default:
		v.queue = append(v.queue, b...)
		v.wake.Broadcast()
	}
}

// send sends what there is until the viewer is gone or the session over. It says
// whether the viewer has seen the end.
func (v *viewer) send() bool {
	defer v.leave()
	frames := guest.NewFrameWriter(v.stream)
	for {
		data, lead, exit, paced := v.next()
		if lead != nil && frames.WriteJSON(guest.Lead, lead) != nil {
			return false
		}
		much := len(data) >= masses
		for len(data) > 0 {
			n := min(len(data), 64<<10)
			if frames.Write(guest.Stdout, data[:n]) != nil {
				return false
			}
			data = data[n:]
		}
		if exit != nil {
			return frames.WriteJSON(guest.Exit, exit) == nil
		}
		if lead == nil && data == nil {
			return false
		}
		switch {
		case paced:
			time.Sleep(paintPace)
		case much:
			time.Sleep(gather)
		}
	}
}

// next waits for something to send. Nothing at all means that the viewer is gone.
func (v *viewer) next() (data []byte, lead *guest.Switch, exit *guest.ExitStatus, paced bool) {
	s := v.session
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		over := s.exit != nil
		switch {
		case v.gone:
			return nil, nil, nil, false
		case v.leadDue:
			v.leadDue = false
			return []byte{}, &guest.Switch{On: s.lead == v}, nil, false
		case v.paint && (!v.held || over):
			data = s.screen.Redraw(v.cols, v.rows, v.mark)
			v.paint, v.held = false, false
		case len(v.queue) > 0:
			data, v.queue = v.queue, nil
		case over:
			return []byte{}, nil, s.exit, false
		default:
			v.wake.Wait()
			continue
		}
		v.mark = s.screen.Lines()
		return data, nil, nil, !v.exact()
	}
}

// receive takes what the viewer sends.
func (v *viewer) receive() {
	defer v.leave()
	defer survive()
	frames := guest.NewFrameReader(v.stream)
	for {
		typ, payload, err := frames.Read()
		if err != nil {
			return
		}
		switch typ {
		case guest.Stdin:
			v.typed(payload)
		case guest.Resize:
			var size guest.Size
			if json.Unmarshal(payload, &size) == nil && size.Cols > 0 && size.Rows > 0 {
				v.resized(size)
			}
		case guest.Hold:
			var hold guest.Switch
			if json.Unmarshal(payload, &hold) == nil {
				v.hold(hold.On)
			}
		}
	}
}

// typed gives input to the program, and waits while much is waiting already.
func (v *viewer) typed(b []byte) {
	s := v.session
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follow(v)
	for len(s.input) > 0 && len(s.input)+len(b) > inputMost && s.exit == nil && !v.gone {
		s.typing.Wait()
	}
	if s.exit == nil && !v.gone {
		s.input = append(s.input, b...)
		s.typing.Broadcast()
	}
}

func (v *viewer) resized(size guest.Size) {
	v.session.mu.Lock()
	defer v.session.mu.Unlock()
	v.cols, v.rows = clamp(size.Cols, size.Rows)
	v.redraw()
	v.session.follow(v)
}

func (v *viewer) hold(on bool) {
	v.session.mu.Lock()
	defer v.session.mu.Unlock()
	if v.held = on; !on {
		v.redraw()
	}
}

// leave takes the viewer off. Who looked on before it leads now.
func (v *viewer) leave() {
	s := v.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if v.gone {
		return
	}
	v.gone = true
	v.stream.Close()
	v.wake.Broadcast()
	s.typing.Broadcast()
	s.viewers = slices.DeleteFunc(s.viewers, func(each *viewer) bool { return each == v })
	if s.lead == v {
		var next *viewer
		if n := len(s.viewers); n > 0 {
			next = s.viewers[n-1]
		}
		s.follow(next)
	}
}
