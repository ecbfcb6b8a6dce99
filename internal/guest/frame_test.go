package guest

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

type frame struct {
	Type    byte
	Payload string
}

// readFrames reads to the end, and gives what ended it.
func readFrames(r io.Reader) (list []frame, err error) {
	frames := NewFrameReader(r)
	for {
		typ, payload, err := frames.Read()
		if err != nil {
			return list, err
		}
		list = append(list, frame{typ, string(payload)})
	}
}

func TestFramesRoundTrip(t *testing.T) {
	want := []frame{
		{Stdin, "input"}, {Stdin, ""}, {Stdout, strings.Repeat("x", MaxFrame)}, {Stderr, "short again"},
		{Exit, `{"code":3}`}, {200, "a type of the future"},
	}
	var wire bytes.Buffer
	w := NewFrameWriter(&wire)
	for _, f := range want {
		if err := w.Write(f.Type, []byte(f.Payload)); err != nil {
			t.Fatal(err)
		}
	}
	for name, r := range map[string]io.Reader{
		"whole":        bytes.NewReader(wire.Bytes()),
		"byte by byte": iotest.OneByteReader(bytes.NewReader(wire.Bytes())),
	} {
		got, err := readFrames(r)
		if err != io.EOF {
			t.Errorf("%s: ended with %v, want io.EOF", name, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: frames differ (-want +got):\n%s", name, diff)
		}
	}
}

func TestFrameIsOneWrite(t *testing.T) {
	var writes writeCounter
	w := NewFrameWriter(&writes)
	n := copy(w.Buffer(), "read straight into place")
	if err := w.WriteBuffered(Stdout, n); err != nil {
		t.Fatal(err)
	}
	if err := w.WriteJSON(Exit, ExitStatus{Code: 1}); err != nil {
		t.Fatal(err)
	}
	if writes.n != 2 {
		t.Errorf("two frames took %d writes", writes.n)
	}
	got, _ := readFrames(&writes.Buffer)
	want := []frame{{Stdout, "read straight into place"}, {Exit, `{"code":1}`}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("frames differ (-want +got):\n%s", diff)
	}
}

type writeCounter struct {
	bytes.Buffer
	n int
}

func (w *writeCounter) Write(b []byte) (int, error) {
	w.n++
	return w.Buffer.Write(b)
}

func TestFrameHeaderStandsBeforePayload(t *testing.T) {
	got, err := readFrames(io.MultiReader(bytes.NewReader(FrameHeader(Stdout, 5)), strings.NewReader("hello")))
	if err != io.EOF {
		t.Error(err)
	}
	if diff := cmp.Diff([]frame{{Stdout, "hello"}}, got); diff != "" {
		t.Errorf("frames differ (-want +got):\n%s", diff)
	}
}

func TestBadFrames(t *testing.T) {
	for name, test := range map[string]struct{ wire, want string }{
		"too long":             {string(FrameHeader(Stdout, MaxFrame+1)), "too long"},
		"as long as can be":    {"\x01\xff\xff\xff\xff", "too long"},
		"ends in the header":   {"\x01\x00", "within a frame"},
		"ends before the rest": {string(FrameHeader(Stdout, 5)) + "hell", "within a frame"},
		"ends at the payload":  {string(FrameHeader(Stdout, 5)), "within a frame"},
	} {
		got, err := readFrames(strings.NewReader(test.wire))
		if len(got) != 0 || err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v and error %v, want none and %q", name, got, err, test.want)
		}
	}
	if err := NewFrameWriter(io.Discard).Write(Stdout, make([]byte, MaxFrame+1)); err == nil {
		t.Error("a frame that is too long was written")
	}
}

func TestReadLineTakesNotAByteMore(t *testing.T) {
	for name, r := range map[string]io.Reader{
		"plain":    strings.NewReader("one\n\nthree\nrest"),
		"buffered": bufio.NewReader(strings.NewReader("one\n\nthree\nrest")),
		"no bytes": struct{ io.Reader }{strings.NewReader("one\n\nthree\nrest")},
	} {
		for _, want := range []string{"one", "", "three"} {
			if line, err := ReadLine(r, 5); err != nil || string(line) != want {
				t.Fatalf("%s: got %q, %v; want %q", name, line, err, want)
			}
		}
		if rest, _ := io.ReadAll(r); string(rest) != "rest" {
			t.Errorf("%s: left %q, want rest", name, rest)
		}
	}
}

func TestReadLineRefuses(t *testing.T) {
	if _, err := ReadLine(strings.NewReader("123456\n"), 5); err == nil || !strings.Contains(err.Error(), "longer than 5 bytes") {
		t.Errorf("a line that is too long: %v", err)
	}
	if _, err := ReadLine(strings.NewReader("half"), 5); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("half a line: %v", err)
	}
	if _, err := ReadLine(strings.NewReader(""), 5); err != io.EOF {
		t.Errorf("nothing: %v", err)
	}
	var v Request
	if err := ReadJSON(strings.NewReader("no JSON\n"), &v); err == nil {
		t.Error("what is no JSON was read")
	}
	if err := WriteJSON(io.Discard, strings.Repeat("x", MaxLine)); err == nil {
		t.Error("a line that is too long was written")
	}
}

// What was read of any bytes is what stands at their beginning when it is written
// again.
func FuzzFrames(f *testing.F) {
	for _, seed := range []string{"", "\x01", "\x01\x00\x00\x00\x02hi", "\x00\x00\x00\x00\x00", "\x01\xff\xff\xff\xff", "\x05\x00\x00\x00\x0a{\"code\":0}\x01"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := readFrames(bytes.NewReader(data))
		var again bytes.Buffer
		w := NewFrameWriter(&again)
		for _, one := range list {
			if len(one.Payload) > MaxFrame {
				t.Fatalf("a frame of %d bytes was read", len(one.Payload))
			}
			w.Write(one.Type, []byte(one.Payload))
		}
		if !bytes.HasPrefix(data, again.Bytes()) {
			t.Fatalf("%q was read as %q", data, again.Bytes())
		}
		if (err == io.EOF) != (again.Len() == len(data)) {
			t.Fatalf("%d of %d bytes were frames, and the end is %v", again.Len(), len(data), err)
		}
	})
}

func FuzzReadLine(f *testing.F) {
	for _, seed := range []string{"", "\n", "line\nrest", "no end", strings.Repeat("x", 20) + "\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		const limit = 16
		want, _, found := bytes.Cut(data, []byte("\n"))
		line, err := ReadLine(bufio.NewReader(bytes.NewReader(data)), limit)
		if fits := found && len(want) <= limit; fits != (err == nil) {
			t.Fatalf("ReadLine(%q) = %q, %v", data, line, err)
		}
		if err == nil && !bytes.Equal(line, want) {
			t.Fatalf("ReadLine(%q) = %q", data, line)
		}
	})
}
