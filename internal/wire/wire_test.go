package wire

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
)

// said is the first line that write sends.
func said(t *testing.T, write func(*Conn) error) string {
	t.Helper()
	a, b := net.Pipe()
	failed := make(chan error, 1)
	go func() {
		failed <- write(New(a))
		a.Close()
	}()
	line, err := New(b).ReadLine()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(line)
}

func TestLines(t *testing.T) {
	for name, test := range map[string]struct {
		write func(*Conn) error
		want  string
	}{
		"a request":       {func(c *Conn) error { return c.Request("rm", api.NameRequest{Name: "a1"}) }, `{"name":"a1","op":"rm","v":1}`},
		"without fields":  {func(c *Conn) error { return c.Request("ping", nil) }, `{"op":"ping","v":1}`},
		"a reply":         {func(c *Conn) error { return c.Reply([]int{1}, nil) }, `{"ok":true,"result":[1]}`},
		"an error":        {func(c *Conn) error { return c.Reply(7, errors.New("no")) }, `{"ok":false,"error":{"code":"failed","message":"no"}}`},
		"an error's kind": {func(c *Conn) error { return c.Reply(nil, &api.Error{Kind: api.KindPhase, Message: "no", Hint: "wait"}) }, `{"ok":false,"error":{"code":"wrong-phase","message":"no","hint":"wait"}}`},
		"what is no JSON": {func(c *Conn) error { return c.Reply(func() {}, nil) }, `{"ok":false,"error":{"code":"failed","message":"json: unsupported type: func()"}}`},
	} {
		if diff := cmp.Diff(test.want, said(t, test.write)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if err := New(nil).Request("rm", []string{"no object"}); err == nil {
		t.Error("a request whose arguments are no object was sent")
	}
	if err := New(nil).Request("rm", api.NameRequest{Name: strings.Repeat("x", api.MaxLine)}); err == nil {
		t.Error("a request that is too long was sent")
	}
}

func TestFramesFollowALine(t *testing.T) {
	a, b := net.Pipe()
	go func() {
		io.WriteString(a, "{\"ok\":true}\n"+string(guest.FrameHeader(guest.Stdout, 2))+"hi")
		a.Close()
	}()
	c := New(b)
	if line, err := c.ReadLine(); err != nil || string(line) != `{"ok":true}` {
		t.Fatalf("got %q, %v", line, err)
	}
	if typ, payload, err := guest.NewFrameReader(c).Read(); err != nil || typ != guest.Stdout || string(payload) != "hi" {
		t.Errorf("got frame %d %q, %v", typ, payload, err)
	}
}

// Whatever a client sends as its line, the host's answer is a line of JSON.
func FuzzRequestLine(f *testing.F) {
	for _, seed := range []string{"", "\n", "{}\n", "{\"v\":1,\"op\":\"ping\"}\nrest", "[1]\n", "{\"v\":\"1\"}\n", "no end"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, b := net.Pipe()
		go func() {
			io.WriteString(a, text)
			a.Close()
		}()
		line, err := New(b).ReadLine()
		b.Close()
		want, _, found := strings.Cut(text, "\n")
		if found != (err == nil) || found && string(line) != want {
			t.Fatalf("ReadLine(%q) = %q, %v", text, line, err)
		}
		var r api.Request
		if err == nil {
			err = json.Unmarshal(line, &r)
		}
		if err != nil && !json.Valid([]byte(said(t, func(c *Conn) error { return c.Reply(nil, err) }))) {
			t.Fatalf("%q is answered by what is no JSON", text)
		}
	})
}

// TestAnAnswerTooLongForALineIsSaid: the client is told rather than left with nothing.
func TestAnAnswerTooLongForALineIsSaid(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	go New(theirs).Reply(strings.Repeat("x", api.MaxLine), nil)
	line, err := New(ours).ReadLine()
	if err != nil || !strings.Contains(string(line), "too long") {
		t.Errorf("%.80s, %v", line, err)
	}
}
