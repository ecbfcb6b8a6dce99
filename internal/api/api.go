// Package api is the host protocol, version 1: the messages that clients and the
// host exchange on <store>/host.sock. docs/protocol.md is its contract.
//
// It imports nothing of ours. Fields are only ever added; unknown ones are ignored.
package api

import (
	"encoding/json"
	"time"
)

// Version of the protocol. A request with a newer one is refused with KindVersion.
const Version = 1

// MaxLine is the longest line either side sends, in bytes.
const MaxLine = 1 << 20

// Operations.
const (
	OpPing        = "ping"            // → Status
	OpStatus      = "status"          // → Status
	OpStop        = "stop"            // → StopResult; the host exits after it has answered
	OpCreate      = "create"          // CreateRequest → Sandbox
	OpStart       = "start"           // NameRequest → StartResult
	OpExec        = "exec"            // ExecRequest → ExecResult, then frames both ways
	OpPause       = "pause"           // NameRequest → Transition
	OpResume      = "resume"          // NameRequest → Transition
	OpSleep       = "sleep"           // NameRequest → Transition
	OpHibernate   = "hibernate"       // NameRequest → Transition
	OpWake        = "wake"            // NameRequest → StartResult
	OpFork        = "fork"            // ForkRequest → ForkResult
	OpDuplicate   = "duplicate"       // DuplicateRequest → DuplicateResult
	OpPointTake   = "point.take"      // PointTakeRequest → PointResult
	OpPointList   = "point.ls"        // NameRequest → []Point
	OpPointFind   = "point.find"      // PointRequest → Point
	OpPointRevert = "point.revert"    // PointRequest → PointResult
	OpPointFork   = "point.fork"      // PointForkRequest → Sandbox
	OpPointRemove = "point.rm"        // PointRequest → Point
	OpReset       = "reset"           // NameRequest → Transition
	OpShutdown    = "shutdown"        // NameRequest → Sandbox
	OpRemove      = "rm"              // NameRequest → {}
	OpList        = "ls"              // ListRequest → []Sandbox
	OpInspect     = "inspect"         // NameRequest → Sandbox
	OpEvents      = "events"          // EventsRequest → Event lines until the client leaves
	OpConsole     = "console"         // ConsoleRequest → console lines while Follow
	OpImageImport = "image.import"    // ImageImportRequest → Image
	OpImageRemove = "image.rm"        // NameRequest → {}
	OpTemplate    = "template.create" // TemplateRequest → Image
	OpImageList   = "image.ls"        // → []Image
)

// Operations on sessions: programs with a terminal, kept in the sandbox.
const (
	OpSessions       = "sessions"         // SessionsRequest → SessionList
	OpAttach         = "attach"           // AttachRequest → AttachResult, then frames both ways
	OpRun            = "run"              // RunRequest → AttachResult, then frames both ways unless Detach
	OpSessionEnd     = "sessions.end"     // SessionRequest → Session
	OpSessionRestart = "sessions.restart" // SessionRequest → Session
)

// Request is the one line a client sends first. Op's own fields stand beside v and op.
type Request struct {
	V  int    `json:"v"`
	Op string `json:"op"`
}

// Reply is the last line of an answer (and, for a stream, the last line before its frames).
type Reply struct {
	OK     bool            `json:"ok"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  *Error          `json:"error,omitempty"`
}

// Progress lines come before the Reply of a long operation.
type Progress struct {
	Event string `json:"event"` // "progress"
	Step  string `json:"step"`  // "unpack image", in words
	Done  int64  `json:"done"`
	Total int64  `json:"total"`          // 0 when not known
	Unit  string `json:"unit,omitempty"` // "bytes", or "" for plain counts
}

// Kind is what went wrong, for programs.
type Kind string

const (
	KindFailed      Kind = "failed"           // exit code 1
	KindNotFound    Kind = "not-found"        // 2
	KindPhase       Kind = "wrong-phase"      // 3
	KindExists      Kind = "already-exists"   // 4
	KindUnconfirmed Kind = "not-confirmed"    // 5
	KindUnavailable Kind = "host-unavailable" // 6
	KindNotBuilt    Kind = "not-implemented"  // 7
	KindUsage       Kind = "usage"            // 64
	KindVersion     Kind = "version"          // 6: the other side is of another protocol version
	KindExec        Kind = "exec-failed"      // 125: the program could not be run
)

// Error is one sentence, its kind, and the next thing to do where there is one.
type Error struct {
	Kind    Kind   `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

func (e *Error) Error() string { return e.Message }

// Phase of a sandbox.
type Phase string

const (
	Off        Phase = "off"
	Booting    Phase = "booting"
	Running    Phase = "running"
	Paused     Phase = "paused"
	Asleep     Phase = "asleep"
	Hibernated Phase = "hibernated"
	Failed     Phase = "failed"
	Damaged    Phase = "damaged" // its record cannot be read
)

// Sandbox is a sandbox as ls and inspect show it.
type Sandbox struct {
	Name      string    `json:"name"`
	Phase     Phase     `json:"phase"`
	Since     time.Time `json:"since"`
	Image     string    `json:"image"`
	ImageKey  string    `json:"imageKey"`
	CPUs      int       `json:"cpus"`
	MemoryMiB int       `json:"memoryMiB"`
	DiskGiB   int       `json:"diskGiB"`
	Network   string    `json:"network"`
	Workspace *string   `json:"workspace"`
	Isolated  bool      `json:"isolated"`
	Audio     bool      `json:"audio"`
	Created   time.Time `json:"created"`
	// DiedWithHost marks a sandbox whose machine ended without being asked.
	DiedWithHost bool   `json:"diedWithHost"`
	Problem      string `json:"problem,omitempty"` // why it is failed, died or damaged: one sentence
	Unresponsive bool   `json:"unresponsive,omitempty"`
	PID          int    `json:"pid,omitempty"`
	MemoryBytes  int64  `json:"memoryBytes"`       // of this computer, now; 0 when off
	DiskBytes    int64  `json:"diskBytes"`         // of this computer, its own blocks
	Machine      string `json:"machine,omitempty"` // the versioned machine type it is built as
	Kernel       string `json:"kernel,omitempty"`
	Dir          string `json:"dir"`
	// Snapshot is the saved machine of a sandbox that is asleep or hibernated.
	Snapshot *Snapshot `json:"snapshot,omitempty"`
}

// Snapshot is a saved machine, and what it needs to be woken.
type Snapshot struct {
	At            time.Time `json:"at"`
	Bytes         int64     `json:"bytes"` // of this computer's disk
	Engine        string    `json:"engine"`
	EngineVersion string    `json:"engineVersion"` // this one or a later one
	Accelerator   string    `json:"accelerator"`
	Machine       string    `json:"machine"`
	Kernel        string    `json:"kernel"`
	Tools         string    `json:"tools"`
}

// Transition is a sandbox that came to rest, or went on.
type Transition struct {
	Sandbox Sandbox  `json:"sandbox"`
	Millis  float64  `json:"milliseconds"`
	Notes   []string `json:"notes,omitempty"` // what the user should know besides, in sentences
}

// Status of the host.
type Status struct {
	Version            string    `json:"version"`
	ProtocolVersion    int       `json:"protocolVersion"`
	Flavour            string    `json:"flavour"`
	PID                int       `json:"pid"`
	Store              string    `json:"store"`
	Started            time.Time `json:"started"`
	Running            int       `json:"running"`            // machines
	Clients            int       `json:"clients"`            // connected, this one included
	IdleTimeoutSeconds int       `json:"idleTimeoutSeconds"` // 0 is never
}

// StopRequest ends the host.
type StopRequest struct{}

// StopResult has a row for each sandbox that ran.
type StopResult struct {
	Sandboxes []StopRow `json:"sandboxes"`
}

// StopRow is what became of one sandbox when the host stopped.
type StopRow struct {
	Name    string `json:"name"`
	Phase   Phase  `json:"phase"`
	Millis  int64  `json:"milliseconds"`
	Bytes   int64  `json:"snapshotBytes"` // on this computer's disk
	Problem string `json:"problem,omitempty"`
}

// CreateRequest makes a sandbox; zero values are the image's or the settings' defaults.
type CreateRequest struct {
	Name      string `json:"name"`
	Image     string `json:"image"`
	CPUs      int    `json:"cpus,omitempty"`
	MemoryMiB int    `json:"memoryMiB,omitempty"`
	DiskGiB   int    `json:"diskGiB,omitempty"`
}

// NameRequest names a sandbox or an image.
type NameRequest struct {
	Name string `json:"name"`
}

// ForkRequest copies a sandbox, memory and disk included.
type ForkRequest struct {
	Name   string `json:"name"`
	New    string `json:"new"`              // with Count above 1: NEW-1, NEW-2, …
	Count  int    `json:"count,omitempty"`  // 1 to 100; 0 is 1
	NoWake bool   `json:"noWake,omitempty"` // leave the copies hibernated
}

// ForkResult is the copies.
type ForkResult struct {
	Sandboxes []Sandbox `json:"sandboxes"`
	Millis    float64   `json:"milliseconds"`
	Notes     []string  `json:"notes,omitempty"`
}

// DuplicateRequest makes a new sandbox, off, of another's disk; zero values are the
// other's.
type DuplicateRequest struct {
	Name      string `json:"name"`
	New       string `json:"new"`
	CPUs      int    `json:"cpus,omitempty"`
	MemoryMiB int    `json:"memoryMiB,omitempty"`
}

// DuplicateResult is the new sandbox.
type DuplicateResult struct {
	Sandbox Sandbox  `json:"sandbox"`
	Notes   []string `json:"notes,omitempty"`
}

// PointTakeRequest makes a restore point.
type PointTakeRequest struct {
	Name   string `json:"name"`
	Point  string `json:"point,omitempty"` // its name, at most 64 characters
	Note   string `json:"note,omitempty"`
	Memory bool   `json:"memory,omitempty"` // the running programs too
}

// PointRequest names a restore point by its name, its id, or a beginning of either that
// is no other's.
type PointRequest struct {
	Name  string `json:"name"`
	Point string `json:"point"`
}

// PointForkRequest makes a new sandbox of a restore point.
type PointForkRequest struct {
	Name  string `json:"name"`
	Point string `json:"point"`
	New   string `json:"new"`
}

// Point is a restore point.
type Point struct {
	ID      string    `json:"id"`
	Name    string    `json:"name,omitempty"`
	Note    string    `json:"note,omitempty"`
	Created time.Time `json:"created"`
	Memory  bool      `json:"memory"` // it holds the running programs too
	Bytes   int64     `json:"bytes"`  // of this computer's disk, its uppermost disk file and its memory
}

// PointResult is a point that was taken: the one asked for, or the one a revert took
// first.
type PointResult struct {
	Sandbox Sandbox  `json:"sandbox"`
	Point   Point    `json:"point"`
	Millis  float64  `json:"milliseconds"`
	Notes   []string `json:"notes,omitempty"`
}

// ListRequest asks for sandboxes in the order of their names, at most MaxList of them.
type ListRequest struct {
	After string `json:"after,omitempty"` // the last name that is known already
}

// MaxList is how many sandboxes one answer holds, so that it fits a line.
const MaxList = 128

// StartResult is a started sandbox.
type StartResult struct {
	Sandbox    Sandbox  `json:"sandbox"`
	Started    bool     `json:"started"` // it booted
	Woke       bool     `json:"woke"`    // it was paused or saved, and went on; with neither it ran already
	BootMillis int64    `json:"bootMilliseconds"`
	Notes      []string `json:"notes,omitempty"` // what the user should know besides, in sentences
}

// ExecRequest runs a program. Frames follow an ok reply: see docs/protocol.md.
type ExecRequest struct {
	Name          string            `json:"name"`
	Argv          []string          `json:"argv"`
	Env           map[string]string `json:"env,omitempty"`
	User          string            `json:"user,omitempty"`
	Workdir       string            `json:"workdir,omitempty"`
	Stdin         bool              `json:"stdin,omitempty"`
	TimeoutMillis int64             `json:"timeoutMillis,omitempty"`
	NoStart       bool              `json:"noStart,omitempty"` // refuse rather than boot it
	NoWake        bool              `json:"noWake,omitempty"`  // refuse rather than wake or resume it
}

// ExecResult is a program that runs; its frames follow.
type ExecResult struct {
	PID        int      `json:"pid"`
	Started    bool     `json:"started"`
	Woke       bool     `json:"woke"`
	BootMillis int64    `json:"bootMilliseconds"` // of the start or wake
	Notes      []string `json:"notes,omitempty"`  // likewise
}

// SessionsRequest lists a sandbox's sessions, or looks at one's screen.
type SessionsRequest struct {
	Name   string `json:"name"`
	Screen string `json:"screen,omitempty"` // the session to look at
}

// SessionList is a sandbox's sessions.
type SessionList struct {
	Sessions []Session `json:"sessions"`
	Screen   *Screen   `json:"screen,omitempty"`
}

// Screen is what a session shows.
type Screen struct {
	Text string `json:"text"` // plain, lines that scrolled away first
	VT   []byte `json:"vt"`   // base64: what draws it on a terminal of the session's size
}

// SessionState is whether a session's program runs.
type SessionState string

const (
	SessionRunning SessionState = "running"
	SessionEnded   SessionState = "ended" // with nobody looking; kept until somebody does
)

// Session is a program with a terminal that lives in a sandbox.
type Session struct {
	Session    string       `json:"session"`
	PID        int          `json:"pid,omitempty"` // in the guest
	Cols       int          `json:"cols"`
	Rows       int          `json:"rows"`
	Clients    int          `json:"clients"`
	State      SessionState `json:"state"`
	Argv       []string     `json:"argv"`
	User       string       `json:"user,omitempty"`
	Title      string       `json:"title,omitempty"` // as the program says
	Started    time.Time    `json:"started"`
	LastOutput *time.Time   `json:"lastOutput,omitempty"`
	ExitCode   *int         `json:"exitCode,omitempty"`   // of one that ended
	EnvDropped bool         `json:"envDropped,omitempty"` // restarted without the variables it was run with
}

// SessionRequest names a session.
type SessionRequest struct {
	Name    string `json:"name"`
	Session string `json:"session"`
	Fresh   bool   `json:"fresh,omitempty"` // restart: do not continue a conversation
}

// AttachRequest looks at a session and types in it. "shell", the default, is opened
// when it does not run.
type AttachRequest struct {
	Name      string `json:"name"`
	Session   string `json:"session,omitempty"`
	Cols      int    `json:"cols,omitempty"` // of the terminal; 0 takes the session's
	Rows      int    `json:"rows,omitempty"`
	NoHistory bool   `json:"noHistory,omitempty"` // draw the screen alone
	NoOpen    bool   `json:"noOpen,omitempty"`    // fail when it does not run, shell too
	NoStart   bool   `json:"noStart,omitempty"`   // fail when the sandbox is off
	NoWake    bool   `json:"noWake,omitempty"`    // fail when it is paused, asleep or hibernated
}

// RunRequest opens a new session.
type RunRequest struct {
	Name    string            `json:"name"`
	Session string            `json:"session,omitempty"` // its name; missing is one after the program
	Argv    []string          `json:"argv"`
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
	Detach  bool              `json:"detach,omitempty"` // no frames follow
	Cols    int               `json:"cols,omitempty"`
	Rows    int               `json:"rows,omitempty"`
	NoStart bool              `json:"noStart,omitempty"`
	NoWake  bool              `json:"noWake,omitempty"`
}

// AttachResult is a session that runs; its frames follow.
type AttachResult struct {
	Session    Session  `json:"session"`
	Opened     bool     `json:"opened"`
	Started    bool     `json:"started"`
	Woke       bool     `json:"woke"`
	BootMillis int64    `json:"bootMilliseconds"`
	Notes      []string `json:"notes,omitempty"`
}

// EventsRequest follows what happens; an empty Name is all sandboxes.
type EventsRequest struct {
	Name string `json:"name,omitempty"`
}

// Event is one line of the events stream.
type Event struct {
	Event  string    `json:"event"` // "phase", "step"
	At     time.Time `json:"at"`
	Name   string    `json:"name"`
	Phase  Phase     `json:"phase,omitempty"`
	Step   string    `json:"step,omitempty"`
	Millis int64     `json:"milliseconds,omitempty"`
	Note   string    `json:"note,omitempty"`
}

// ConsoleRequest reads a kept boot log. Boot 0 and 1 are the latest.
type ConsoleRequest struct {
	Name   string `json:"name"`
	Boot   int    `json:"boot,omitempty"`
	Follow bool   `json:"follow,omitempty"`
}

// ConsoleText is one piece of a followed console.
type ConsoleText struct {
	Event string `json:"event"` // "console"
	Text  string `json:"text"`
}

// Boot is one kept boot.
type Boot struct {
	Number  int        `json:"number"` // 1 is the latest
	Kind    string     `json:"kind"`   // "start"
	At      time.Time  `json:"at"`
	Millis  int64      `json:"milliseconds"`
	OK      bool       `json:"ok"`
	Problem string     `json:"problem,omitempty"`
	Steps   []BootStep `json:"steps"`
	Console string     `json:"console,omitempty"` // only when one boot is asked for
}

// BootStep is one timed step of a boot, since the command to start.
type BootStep struct {
	Name   string `json:"name"`
	Millis int64  `json:"milliseconds"`
	Note   string `json:"note,omitempty"`
}

// ImageImportRequest makes an image of a rootfs tar, an OCI layout or an OCI archive.
type ImageImportRequest struct {
	Name string `json:"name"`
	Path string `json:"path"` // absolute
}

// TemplateRequest makes an image of a sandbox's root disk, or of a restore point's.
type TemplateRequest struct {
	Name  string `json:"name"`
	Point string `json:"point,omitempty"`
	As    string `json:"as"` // the image's name
}

// Image is an image of the store.
type Image struct {
	Name      string    `json:"name"`
	Key       string    `json:"key"`
	Created   time.Time `json:"created"`
	Source    string    `json:"source"` // "rootfs tar", "OCI layout", "OCI archive", "template"
	DiskBytes int64     `json:"diskBytes"`
	SizeBytes int64     `json:"sizeBytes"` // as the guest sees it
	UsedBy    []string  `json:"usedBy"`
	MemoryMiB int       `json:"memoryMiB"` // default for sandboxes made from it
	Problem   string    `json:"problem,omitempty"`
	// UpToDate is an import's: the image was there already.
	UpToDate bool `json:"upToDate,omitempty"`
}
