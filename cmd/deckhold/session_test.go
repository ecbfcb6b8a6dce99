package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/term"
)

const testToken = "00112233445566778899aabbccddeeff"

// theMachine is one for all tests: it reaps every child of the process.
var theMachine = sync.OnceValue(func() *machine {
	m := &machine{steps: &steps{}, up: make(chan struct{}), reaper: startReaper()}
	close(m.up)
	return m
})

// host is a channel to the machine, as the host has it.
func host(t testing.TB) *guest.Session {
	t.Helper()
	ours, theirs := net.Pipe()
	go guest.NewPort(theirs, testToken).Serve(theMachine().answer)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	s, err := guest.Open(ctx, ours, testToken)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// watcher is a viewer and the screen it sees.
type watcher struct {
	t      testing.TB
	conn   net.Conn
	frames *guest.FrameReader
	out    *guest.FrameWriter
	screen *term.Screen
	bytes  int64
	lead   bool
	exit   *guest.ExitStatus
}

func watch(t testing.TB, h *guest.Session, request guest.SessionAttach) *watcher {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	conn, _, err := h.Attach(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	cols, rows := request.Cols, request.Rows
	if cols == 0 {
		cols, rows = 80, 24
	}
	conn.SetDeadline(time.Now().Add(time.Minute))
	t.Cleanup(func() { conn.Close() })
	return &watcher{t: t, conn: conn, frames: guest.NewFrameReader(conn), out: guest.NewFrameWriter(conn), screen: term.New(cols, rows, 5000)}
}

// next takes a frame; false is the last.
func (w *watcher) next() bool {
	typ, payload, err := w.frames.Read()
	if err != nil {
		w.t.Fatalf("the stream ended: %v; the screen shows:\n%s", err, w.screen.Text(0))
	}
	switch typ {
	case guest.Stdout:
		w.bytes += int64(len(payload))
		w.screen.Write(payload)
	case guest.Lead:
		var on guest.Switch
		json.Unmarshal(payload, &on)
		w.lead = on.On
	case guest.Exit:
		w.exit = &guest.ExitStatus{}
		json.Unmarshal(payload, w.exit)
		return false
	}
	return true
}

// until reads until the screen, scrolled lines included, shows text.
func (w *watcher) until(text string) {
	w.t.Helper()
	for !bytes.Contains(w.screen.Text(5000), []byte(text)) {
		if !w.next() {
			w.t.Fatalf("ended with %+v before %q; the screen shows:\n%s", w.exit, text, w.screen.Text(0))
		}
	}
}

// end reads to the program's end.
func (w *watcher) end() int {
	for w.next() {
	}
	return w.exit.Code
}

func (w *watcher) types(text string) {
	w.t.Helper()
	if err := w.out.Write(guest.Stdin, []byte(text)); err != nil {
		w.t.Fatal(err)
	}
}

func newOne(name string, cols, rows int, argv ...string) guest.SessionAttach {
	return guest.SessionAttach{Session: name, Cols: cols, Rows: rows, New: true, Open: &guest.SessionOpen{Argv: argv}}
}

func TestSessionGoesOnWithoutViewers(t *testing.T) {
	h := host(t)
	w := watch(t, h, newOne("goes-on", 80, 24, "sh", "-c", `echo begun; while read x; do echo "got $x"; [ "$x" = end ] && exit 7; done`))
	w.until("begun")
	w.types("one\n")
	w.until("got one")
	w.conn.Close()
	// Another host sees the same.
	again := host(t)
	w = watch(t, again, guest.SessionAttach{Session: "goes-on", Cols: 80, Rows: 24})
	w.until("got one")
	w.types("end\n")
	if code := w.end(); code != 7 {
		t.Errorf("exit code %d", code)
	}
	var list guest.SessionList
	if err := again.Call(context.Background(), guest.OpSessionList, struct{}{}, &list); err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Sessions {
		if s.Session == "goes-on" && s.State != "ended" {
			t.Errorf("it is still there: %+v", s)
		}
	}
}

func TestEveryByteOnce(t *testing.T) {
	h := host(t)
	w := watch(t, h, newOne("once", 80, 24, "sh", "-c", "read x; seq 1 1500; read x"))
	other := watch(t, h, guest.SessionAttach{Session: "once", Cols: 80, Rows: 24})
	w.types("\n")
	var want strings.Builder
	for i := 1; i <= 1500; i++ {
		fmt.Fprintf(&want, "%d\n", i)
	}
	for _, each := range []*watcher{w, other} {
		each.until("1500\n")
		if got := string(each.screen.Text(5000)); !strings.Contains(got, want.String()) {
			t.Errorf("lines are missing or twice there: %d bytes of %d", len(got), want.Len())
		}
	}
	// One that comes now is drawn all of it.
	late := watch(t, h, guest.SessionAttach{Session: "once", Cols: 80, Rows: 24})
	late.until("1500\n")
	if !strings.Contains(string(late.screen.Text(5000)), want.String()) {
		t.Error("what scrolled away is not whole")
	}
	late.types("\n")
	for _, each := range []*watcher{w, other, late} {
		if code := each.end(); code != 0 {
			t.Errorf("exit code %d", code)
		}
	}
}

// TestWhoTypesLeads: the session has the size of whoever typed last, and that
// terminal answers.
func TestWhoTypesLeads(t *testing.T) {
	h := host(t)
	first := watch(t, h, newOne("size", 80, 24, "sh", "-c", "while read x; do stty size; done"))
	second := watch(t, h, guest.SessionAttach{Session: "size", Cols: 100, Rows: 30})
	second.types("\n")
	second.until("30 100")
	if !second.lead {
		t.Error("who came last does not lead")
	}
	first.types("\n")
	first.until("24 80")
	if !first.lead {
		t.Error("who typed last does not lead")
	}
	first.out.WriteJSON(guest.Resize, guest.Size{Cols: 1 << 20, Rows: 1 << 20})
	first.types("\n")
	for first.screen = term.New(term.MaxCols, term.MaxRows, 0); !strings.Contains(string(first.screen.Text(0)), fmt.Sprintf("%d %d", term.MaxRows, term.MaxCols)); {
		first.next()
	}
	first.conn.Close()
	for !second.lead {
		second.next()
	}
	second.screen = term.New(100, 30, 0)
	second.types("\n")
	second.until("30 100")
}

// TestWhoDoesNotReadSlowsNobody: neither the program nor another viewer waits, and
// who reads again is drawn what there is then.
func TestWhoDoesNotReadSlowsNobody(t *testing.T) {
	h, slow := host(t), host(t)
	w := watch(t, h, newOne("slow", 80, 24, "sh", "-c", "read x; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo done; read x"))
	sleeper := watch(t, slow, guest.SessionAttach{Session: "slow", Cols: 80, Rows: 24})
	w.types("\n")
	w.until("done")
	if w.bytes < 20000000 {
		t.Logf("the viewer that reads was drawn anew after %d bytes", w.bytes)
	}
	sleeper.until("done")
	if sleeper.bytes > 19000000 {
		t.Errorf("%d bytes waited for a viewer", sleeper.bytes)
	}
	w.types("\n")
	if w.end() != 0 || sleeper.end() != 0 {
		t.Error("it did not end well")
	}
}

func TestHold(t *testing.T) {
	h := host(t)
	w := watch(t, h, newOne("hold", 80, 24, "sh", "-c", `while read x; do echo "got $x"; done`))
	w.types("one\n")
	w.until("got one")
	w.out.WriteJSON(guest.Hold, guest.Switch{On: true})
	w.types("two\n")
	w.out.WriteJSON(guest.Hold, guest.Switch{On: false})
	w.types("three\n")
	w.until("got three")
	if got := string(w.screen.Text(100)); strings.Count(got, "got two") != 1 {
		t.Errorf("the screen shows:\n%s", got)
	}
}

// TestAnswersWhenNobodyLooks: a program that asks its terminal is answered.
func TestAnswersWhenNobodyLooks(t *testing.T) {
	h := host(t)
	var info guest.SessionInfo
	err := h.Call(context.Background(), guest.OpSessionOpen, guest.SessionOpen{Session: "asks", Argv: []string{"bash", "-c", `stty -echo; printf '\e[6n'; read -d R x; echo "at ${x#*[}"; read y`}}, &info)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); ; {
		var screen guest.SessionScreen
		if err := h.Call(context.Background(), guest.OpSessionScreen, guest.SessionName{Session: "asks"}, &screen); err != nil {
			t.Fatal(err)
		}
		if string(screen.Text) == "at 1;1\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the screen shows:\n%s", screen.Text)
		}
	}
	endAll(t, h)
}

func endAll(t *testing.T, h *guest.Session) {
	t.Helper()
	var list guest.SessionList
	if err := h.Call(context.Background(), guest.OpSessionList, struct{}{}, &list); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for _, s := range list.Sessions {
		all.Go(func() {
			if err := h.Call(context.Background(), guest.OpSessionEnd, guest.SessionName{Session: s.Session}, nil); err != nil {
				t.Errorf("%s: %v", s.Session, err)
			}
		})
	}
	all.Wait()
	if err := h.Call(context.Background(), guest.OpSessionList, struct{}{}, &list); err != nil || len(list.Sessions) > 0 {
		t.Errorf("left: %+v, %v", list.Sessions, err)
	}
}

func TestManySessions(t *testing.T) {
	h := host(t)
	names := map[string]bool{}
	for range 200 {
		var info guest.SessionInfo
		if err := h.Call(context.Background(), guest.OpSessionOpen, guest.SessionOpen{Argv: []string{"sh", "-c", "trap '' HUP; echo here; read x"}, Env: map[string]string{"A": "b"}}, &info); err != nil {
			t.Fatal(err)
		}
		names[info.Session] = true
	}
	if len(names) != 200 || !names["sh"] || !names["sh-200"] {
		t.Errorf("%d names", len(names))
	}
	var again guest.SessionInfo
	if err := h.Call(context.Background(), guest.OpSessionRestart, guest.SessionName{Session: "sh-7"}, &again); err != nil || !again.EnvDropped {
		t.Errorf("restart: %+v, %v", again, err)
	}
	w := watch(t, h, guest.SessionAttach{Session: "sh-7"})
	w.until("here")
	endAll(t, h)
}

func TestRefusals(t *testing.T) {
	h := host(t)
	w := watch(t, h, newOne("taken", 80, 24, "sh", "-c", "read x"))
	for _, c := range []struct {
		request guest.SessionAttach
		code    string
	}{
		{newOne("taken", 80, 24, "sh"), guest.CodeExists},
		{guest.SessionAttach{Session: "nosuch"}, guest.CodeNoSession},
		{newOne("no good", 80, 24, "sh"), guest.CodeUsage},
		{newOne("other", 80, 24, "nosuch"), guest.CodeNotFound},
	} {
		_, _, err := h.Attach(context.Background(), c.request)
		var refused *guest.Error
		if e, ok := err.(*guest.Error); ok {
			refused = e
		}
		if refused == nil || refused.Code != c.code {
			t.Errorf("%+v: %v", c.request, err)
		}
	}
	w.types("\n")
	w.end()
}

// TestSignalsAreAsNew: nothing of deckhold's is passed on.
func TestSignalsAreAsNew(t *testing.T) {
	h := host(t)
	w := watch(t, h, newOne("signals", 80, 24, "grep", "-E", "SigBlk|SigIgn", "/proc/self/status"))
	if code := w.end(); code != 0 {
		t.Errorf("grep ended with %d", code)
	}
	shown := string(w.screen.Text(0))
	masks := regexp.MustCompile(`[0-9a-f]{16}`).FindAllString(shown, -1)
	// Two signals are the C library's own, and whoever runs the test may ignore them.
	const libc = 1<<31 | 1<<32
	for _, mask := range masks {
		if n, err := strconv.ParseUint(mask, 16, 64); err != nil || n&^libc != 0 {
			t.Errorf("the screen shows:\n%s", shown)
		}
	}
	if len(masks) != 2 {
		t.Errorf("the screen shows:\n%s", shown)
	}
	w = watch(t, h, newOne("killed", 80, 24, "sh", "-c", "kill -9 $$"))
	if w.end(); w.exit.Code != 128+int(unix.SIGKILL) || w.exit.Signal != "KILL" {
		t.Errorf("ended by %+v", w.exit)
	}
}

// FuzzViewer: whatever a host sends a session, deckhold goes on.
func FuzzViewer(f *testing.F) {
	f.Add([]byte("\x03\x00\x00\x00\x0f{\"cols\":-1,\"x\"}\x00\x00\x00\x00\x01a\x08\x00\x00\x00\x0b{\"on\":true}\x63\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, data []byte) {
		h := host(t)
		conn, _, err := h.Attach(context.Background(), guest.SessionAttach{Session: "fuzz", Open: &guest.SessionOpen{Argv: []string{"cat"}}})
		if err != nil {
			t.Fatal(err)
		}
		go io.Copy(io.Discard, conn)
		conn.Write(data)
		conn.Close()
		if err := h.Call(context.Background(), guest.OpSessionScreen, guest.SessionName{Session: "fuzz"}, nil); err != nil {
			if e, ok := err.(*guest.Error); !ok || e.Code != guest.CodeNoSession {
				t.Error(err)
			}
		}
	})
}

func BenchmarkSessionOutput(b *testing.B) {
	h := host(b)
	const amount = 50 << 20
	b.SetBytes(amount)
	for b.Loop() {
		w := watch(b, h, newOne("bench", 80, 24, "sh", "-c", fmt.Sprintf("yes 'the quick brown fox jumps over the lazy dog and so on' | head -c %d", amount)))
		w.screen = term.New(2, 1, 0)
		for {
			typ, _, err := w.frames.Read()
			if err != nil {
				b.Fatal(err)
			}
			if typ == guest.Exit {
				break
			}
		}
	}
}
