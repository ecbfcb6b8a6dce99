// Package guest is what the host and the guest's deckhold share: the channel
// between them, the frames on it and the operations deckhold answers.
//
// It must not import anything of the host's: cmd/deckhold is built from it. The
// other side is hostile for the host, so everything here bounds what it reads.
//
// # The channel
//
// One byte stream (a virtio-serial port on QEMU). The host opens it with a sync
// line, the guest answers, and then both send the messages of streams (mux.go):
//
//	host  → "\n" token " sync " nonce "\n"      token: 32 hex digits, this machine's, from the kernel
//	                                           command line (doz.token=); nonce: 32 hex digits, new each time
//	guest → "\n" token " ready " nonce "\n"
//
// The host discards everything until that exact line. The guest looks for the sync
// line at all times, in the middle of a session too: it ends the session it has
// and begins a new one. So a new host, an adoption or a wake starts clean, whatever
// bytes were under way.
//
// # Streams
//
// Only the host opens streams. Each starts with one JSON line, a Request, at most
// MaxLine bytes, and is answered by one JSON line, a Response. Each side may have at
// most 1 MiB under way that the other has not read, a stream. After an ok Response
// to OpExec both sides send frames: 1 byte type, 4 bytes big-endian length (at most
// MaxFrame), payload. So they do after one to OpSessionAttach. The same frames are spoken between the host and its clients,
// so the host splices the two without reading them.
package guest

import "encoding/json"

const (
	MaxLine  = 1 << 20   // bytes of a Request or Response line
	MaxFrame = 256 << 10 // bytes of a frame's payload

	// TokenParam is the kernel parameter that carries the channel's token.
	TokenParam = "doz.token"
	// PortName is the virtio-serial port's name.
	PortName = "doz"
)

// Frame types. Client to program: Stdin, Resize, Signal. Program to client: Stdout,
// Stderr, Exit, Failure.
const (
	Stdin   byte = 0 // bytes; an empty frame is the end of input
	Stdout  byte = 1
	Stderr  byte = 2
	Resize  byte = 3 // JSON {"cols":80,"rows":24}
	Signal  byte = 4 // name without SIG: "INT", "TERM", "KILL", …
	Exit    byte = 5 // JSON ExitStatus; the last frame
	Failure byte = 6 // JSON Error; the last frame: the stream failed, not the program

	// Those that follow are a session's only.
	Closed byte = 7 // host to client: JSON Closing; the last frame: the session's end is not known
	Hold   byte = 8 // client to session: JSON {"on":true}; nothing is sent until {"on":false}, which draws anew
	Lead   byte = 9 // session to client: JSON {"on":true}; its terminal is to answer what the program asks
)

// Operations deckhold answers.
const (
	OpSetup    = "setup"    // SetupRequest → SetupResponse; once after each sync. The first mounts the root disk
	OpExec     = "exec"     // ExecRequest → ExecResponse, then frames
	OpSync     = "sync"     // {} → {}: file systems written out
	OpPowerOff = "poweroff" // {} → {}: ends every program (TERM, 2 s, KILL), unmounts, powers off
	OpClock    = "clock"    // ClockRequest → ClockResponse
	OpStats    = "stats"    // {} → Stats

	// Sessions: session.go of this package is the channel's; these are programs with a
	// terminal (terminal.go).
	OpSessionOpen    = "session.open"    // SessionOpen → SessionInfo
	OpSessionAttach  = "session.attach"  // SessionAttach → SessionAttached, then frames
	OpSessionList    = "session.list"    // {} → SessionList
	OpSessionEnd     = "session.end"     // SessionName → SessionInfo; hangs up, terminates, kills
	OpSessionRestart = "session.restart" // SessionName → SessionInfo
	OpSessionScreen  = "session.screen"  // SessionName → SessionScreen
)

// Request is the first line of a stream.
type Request struct {
	Op   string          `json:"op"`
	Args json.RawMessage `json:"args,omitempty"`
}

// Response is the line that answers it.
type Response struct {
	OK     bool            `json:"ok"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  *Error          `json:"error,omitempty"`
}

// Error is a failure in the guest. Code is one of the Code constants.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Message }

// Codes of Error.
const (
	CodeUsage      = "usage"          // the request is not one deckhold can read
	CodeNotFound   = "not-found"      // no such program, user or folder
	CodeNotAllowed = "forbidden"      // found but not executable
	CodeFailed     = "failed"         // anything else
	CodeExists     = "already-exists" // a session of that name runs
	CodeNoSession  = "no-session"     // none has that name
	CodeTimeout    = "timed-out"      // ExecRequest.TimeoutMillis ran out; the whole tree was ended
)

// SetupRequest makes this machine the sandbox it is.
type SetupRequest struct {
	Hostname  string `json:"hostname"`
	UnixNanos int64  `json:"unixNanos"` // the host's clock now
	TimeZone  string `json:"timeZone"`  // "Europe/Berlin"; "" leaves the image's own
	MachineID string `json:"machineId"` // 32 hex digits; written where /etc/machine-id is missing or empty
	Seed      []byte `json:"seed"`      // random bytes of this set-up alone, mixed into the guest's own
	// Fresh tells a copy of another machine, or of another's disk, to become one of its
	// own: machine id and SSH host keys are made anew.
	Fresh bool `json:"fresh,omitempty"`
	// Check has the root disk checked before it is mounted, which the first set-up of a
	// machine does.
	Check bool `json:"check,omitempty"`
}

// SetupResponse describes the guest.
type SetupResponse struct {
	Version string `json:"version"` // deckhold's
	Kernel  string `json:"kernel"`  // uname -r
	BootID  string `json:"bootId"`
	Steps   []Step `json:"steps"` // the boot, in order
}

// Step is one timed step of the boot.
type Step struct {
	Name   string `json:"name"`
	Millis int64  `json:"millis"` // since the kernel started, when the step ended
	Note   string `json:"note,omitempty"`
}

// ExecRequest starts a program without a terminal.
type ExecRequest struct {
	Argv    []string          `json:"argv"`              // Argv[0] is looked up on PATH as a shell would
	Env     map[string]string `json:"env,omitempty"`     // over the defaults (PATH, HOME, USER, LANG, TERM)
	User    string            `json:"user,omitempty"`    // name, uid, or either with ":group"; "" is root
	Workdir string            `json:"workdir,omitempty"` // "" is the user's home, or / when there is none
	// Stdin false gives the program /dev/null.
	Stdin         bool  `json:"stdin,omitempty"`
	TimeoutMillis int64 `json:"timeoutMillis,omitempty"` // 0 is none
}

// ExecResponse says the program runs.
type ExecResponse struct {
	PID int `json:"pid"`
}

// ExitStatus is how a program ended.
type ExitStatus struct {
	Code     int    `json:"code"`               // 128+n when a signal ended it
	Signal   string `json:"signal,omitempty"`   // "KILL"
	TimedOut bool   `json:"timedOut,omitempty"` // the time-out ended it and its whole tree
}

// ClockRequest sets the guest's clock, or moves it; zeroes only read it.
type ClockRequest struct {
	UnixNanos int64 `json:"unixNanos,omitempty"`
	MoveNanos int64 `json:"moveNanos,omitempty"` // by how much, forwards
}

// ClockResponse is the guest's clock.
type ClockResponse struct {
	UnixNanos int64 `json:"unixNanos"`
}

// Stats is what the guest uses.
type Stats struct {
	MemTotalKiB     int64   `json:"memTotalKiB"`
	MemAvailableKiB int64   `json:"memAvailableKiB"`
	DeckholdRSSKiB  int64   `json:"deckholdRssKiB"`
	Load1           float64 `json:"load1"`
	Processes       int     `json:"processes"`
	RootTotalKiB    int64   `json:"rootTotalKiB"`
	RootFreeKiB     int64   `json:"rootFreeKiB"`
	UptimeMillis    int64   `json:"uptimeMillis"`
}
