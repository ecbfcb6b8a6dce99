package guest

import (
	"context"
	"net"
)

// SessionOpen starts a program with a terminal of its own, which deckhold keeps. No
// shell is involved.
type SessionOpen struct {
	// Session is its name; "" makes one of the program's.
	Session string            `json:"session,omitempty"`
	Argv    []string          `json:"argv,omitempty"` // none: a login shell, bash where there is one
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
	Cols    int               `json:"cols,omitempty"` // 0: 80 × 24
	Rows    int               `json:"rows,omitempty"`
}

// SessionAttach looks at a session, and types in it.
type SessionAttach struct {
	Session string `json:"session"`
	Cols    int    `json:"cols"` // the viewer's terminal; 0 takes it as it is
	Rows    int    `json:"rows"`
	// Open is what to open when no session of that name runs.
	Open *SessionOpen `json:"open,omitempty"`
	// New wants it opened, and refuses one that runs.
	New bool `json:"new,omitempty"`
	// NoHistory leaves out the lines that have scrolled away.
	NoHistory bool `json:"noHistory,omitempty"`
}

// SessionAttached is the answer. What follows is in frames: Lead, then Stdout with
// what draws the screen, then what the program writes.
type SessionAttached struct {
	SessionInfo
	Opened bool `json:"opened,omitempty"`
}

// SessionName names a session.
type SessionName struct {
	Session string `json:"session"`
	Fresh   bool   `json:"fresh,omitempty"` // restart: as if it had never run
}

// SessionInfo is a session as a list shows it.
type SessionInfo struct {
	Session string   `json:"session"`
	PID     int      `json:"pid,omitempty"`
	Cols    int      `json:"cols"`
	Rows    int      `json:"rows"`
	Clients int      `json:"clients"`
	State   string   `json:"state"` // "running" or "ended"
	Argv    []string `json:"argv"`
	User    string   `json:"user,omitempty"`
	Title   string   `json:"title,omitempty"`
	// Started and Output are when it began and when it last wrote something.
	StartedUnixNanos int64       `json:"startedUnixNanos"`
	OutputUnixNanos  int64       `json:"outputUnixNanos,omitempty"`
	Exit             *ExitStatus `json:"exit,omitempty"`       // how it ended
	EnvDropped       bool        `json:"envDropped,omitempty"` // restart: what -e had set is not set again
}

// SessionList is every session, those that ended unseen included.
type SessionList struct {
	Sessions []SessionInfo `json:"sessions"`
}

// SessionScreen is what a session shows.
type SessionScreen struct {
	Info SessionInfo `json:"info"`
	Text []byte      `json:"text"` // plain text, history first
	VT   []byte      `json:"vt"`   // what draws it on a terminal of its size
}

// Closing is why a session's stream ended without the session's end.
type Closing struct {
	Reason string `json:"reason"` // "rest": the machine came to rest, in Phase; "lost": it does not answer
	Phase  string `json:"phase,omitempty"`
}

// Switch is what Hold and Lead frames carry.
type Switch struct {
	On bool `json:"on"`
}

// Size is what a Resize frame carries.
type Size struct {
	Cols int `json:"cols"`
	Rows int `json:"rows"`
}

// Attach opens a session's stream of frames. Closing the stream leaves the session,
// which goes on.
func (s *Session) Attach(ctx context.Context, request SessionAttach) (net.Conn, SessionAttached, error) {
	var response SessionAttached
	stream, err := s.open(ctx, OpSessionAttach, request, &response)
	if err != nil {
		return nil, response, err
	}
	return stream, response, nil
}
