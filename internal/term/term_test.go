package term

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// shown is a screen after some output.
func shown(cols, rows int, output string) *Screen {
	s := New(cols, rows, 100)
	s.Write([]byte(output))
	return s
}

func TestScreen(t *testing.T) {
	for _, c := range []struct{ what, output, want string }{
		{"lines", "one\r\ntwo", "one\ntwo\n"},
		{"wrapped", "0123456789ab", "0123456789\nab\n"},
		{"full column waits", "0123456789\r\nx", "0123456789\nx\n"},
		{"no wrapping", "\x1b[?7l0123456789abc", "012345678c\n"},
		{"backspace and tab", "ab\bc\td", "ac      d\n"},
		{"moves", "\x1b[2;3Hx\x1b[Ay\x1b[1Gz", "z  y\n  x\n"},
		{"erase line", "abcdef\x1b[3D\x1b[K", "abc\n"},
		{"erase display", "ab\r\ncd\x1b[2J", ""},
		{"insert and delete", "abcdef\r\x1b[2@\x1b[4C\x1b[1P", "  abdef\n"},
		{"insert lines", "a\r\nb\r\nc\x1b[2H\x1b[L", "a\n\nb\nc\n"},
		{"delete lines", "a\r\nb\r\nc\x1b[1H\x1b[M", "b\nc\n"},
		{"region", "1\r\n2\r\n3\r\n4\x1b[2;3r\x1b[3H\n", "1\n3\n\n4\n"},
		{"reverse index", "a\r\nb\x1b[H\x1bMz", "z\na\nb\n"},
		{"line drawing", "\x1b(0lqk\x1b(B", "┌─┐\n"},
		{"wide", "漢字x", "漢字x\n"},
		{"wide at the edge", "012345678漢", "012345678\n漢\n"},
		{"half of a wide one overwritten", "漢\x1b[2Gx", " x\n"},
		{"combining", "e\u0301x", "e\u0301x\n"},
		{"invalid UTF-8", "a\xffb\xe6\xbcc", "a\ufffdb\ufffd\ufffdc\n"},
		{"repeat", "ab\x1b[3b", "abbbb\n"},
		{"alternate screen", "main\x1b[?1049h\x1b[Halt\x1b[?1049l!", "main!\n"},
		{"on the alternate screen", "main\x1b[?1049h\x1b[Halt", "alt\n"},
		{"title is no text", "\x1b]2;hello\x07x\x1bktitle\x1b\\y", "xy\n"},
		{"device strings are no text", "\x1bPq#0;2\x1b\\\x1b_Gf=100\x1b\\ok", "ok\n"},
		{"cut off by CAN", "\x1b[3\x18Ax", "Ax\n"},
		{"control in a sequence", "ab\x1b[\b1Cx", "abx\n"},
	} {
		if got := string(shown(10, 4, c.output).Text(0)); got != c.want {
			t.Errorf("%s: got %q, want %q", c.what, got, c.want)
		}
	}
}

func TestHistory(t *testing.T) {
	s := New(10, 2, 3)
	for i := range 20 {
		fmt.Fprintf(s, "%d\r\n", i)
	}
	if got, want := string(s.Text(10)), "16\n17\n18\n19\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if s.Lines() != 19 {
		t.Errorf("%d lines have scrolled away", s.Lines())
	}
}

// TestHistoryIsBounded: whatever is printed, the bytes kept are.
func TestHistoryIsBounded(t *testing.T) {
	s := New(200, 5, 2000)
	random := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		fmt.Fprintf(s, "\x1b[38;2;%d;%d;%dm%s\r\n", random.IntN(256), random.IntN(256), random.IntN(256), strings.Repeat("x", random.IntN(300)))
	}
	if len(s.history.buf) > historyBytes {
		t.Errorf("history takes %d bytes", len(s.history.buf))
	}
	if s.history.count < 1000 {
		t.Errorf("only %d lines are kept", s.history.count)
	}
}

func TestManyStylesAndMarksAreBounded(t *testing.T) {
	s := New(300, 300, 10)
	for i := range 300000 {
		fmt.Fprintf(s, "\x1b[38;2;%d;%d;%dm\x1b]8;;http://%d\x1b\\e%c%c", i>>16, i>>8&255, i&255, i, 0x300+i%100, 0x300+i/100%100)
	}
	if len(s.styles) > stylesKept || len(s.graphemes) > graphemesKept || s.linkBytes > linksKept {
		t.Errorf("%d styles, %d graphemes, %d bytes of links", len(s.styles), len(s.graphemes), s.linkBytes)
	}
}

// state is all of a screen that another could tell.
func (s *Screen) state() string {
	var b strings.Builder
	for _, g := range []*grid{&s.main, &s.alt} {
		for y, r := range g.rows {
			fmt.Fprintf(&b, "%d %q\n", y, s.drawCells(nil, r.cells))
		}
		fmt.Fprintf(&b, "keys %v\n", g.keys)
	}
	for _, c := range []*cursor{&s.cur, &s.now.saved} {
		fmt.Fprintf(&b, "cursor %d,%d wrap %v shift %d sets %q %+v\n", c.x, c.y, c.wrap, c.shift, bytes.ReplaceAll(c.sets[:], []byte{'B'}, []byte{0}), s.styles[c.style])
	}
	fmt.Fprintf(&b, "alt %v region %d-%d insert %v newline %v keypad %v shape %d other %d title %q\n", s.isAlt(), s.top, s.end, s.insert, s.newline, s.keypad, s.shape, s.other, s.title)
	for _, m := range keptModes {
		fmt.Fprintf(&b, "mode %d %v\n", m, s.mode(m))
	}
	fmt.Fprintf(&b, "colours %v\n", s.palette)
	return b.String()
}

// redrawn is another screen that was drawn from this one.
func redrawn(s *Screen) *Screen {
	again := New(s.cols, s.rows, 100)
	again.Write(s.Redraw(s.cols, s.rows, 0))
	return again
}

func TestRedraw(t *testing.T) {
	for what, output := range map[string]string{
		"plain":             "one\r\ntwo",
		"colours":           "\x1b[1;31mred\x1b[0;38;5;200m x \x1b[48;2;1;2;3;4:3;58:2::9:8:7my\x1b[m z",
		"full column":       "0123456789",
		"full wide column":  "01234567漢",
		"history":           "1\r\n2\r\n3\r\n4\r\n5\r\n6",
		"wrapped history":   strings.Repeat("0123456789", 7),
		"alternate":         "shell$ \x1b[31m\x1b[?1049h\x1b[2;3Hvi\x1b[?25l\x1b[?1h\x1b=\x1b[>1u",
		"modes":             "\x1b[?1002h\x1b[?1006h\x1b[?2004h\x1b[>5u\x1b[=2;2u\x1b[>4;2m\x1b[5 q\x1b[?1004h",
		"region and origin": "\x1b[2;3r\x1b[?6h\x1b[2;2H",
		"saved":             "ab\x1b[32m\x1b7\x1b[m\x1b[3;3Hx",
		"charset":           "\x1b(0ab",
		"tabs":              "\x1b[3g\x1b[4G\x1bH\ra\tb",
		"title and colours": "\x1b]2;a title\x07\x1b]11;#123456\x07\x1b]4;1;red;2;blue\x07",
		"link":              "\x1b]8;id=1;http://x/\x1b\\link\x1b]8;;\x1b\\ end",
		"in a sequence":     "abc\x1b[3",
		"in a character":    "abc\xe6\xbc",
		"in a title":        "abc\x1b]2;half",
		"insert":            "abc\x1b[4h",
		"marks":             "e\u0301 a\u0308\u0323",
	} {
		s := shown(10, 4, output)
		again := redrawn(s)
		// What the title becomes shows only when it ends.
		for _, both := range []*Screen{s, again} {
			both.Write([]byte("\xa2m more\x07\x1b\\"))
		}
		if diff := cmp.Diff(s.state(), again.state()); diff != "" {
			t.Errorf("%s: after the redraw (-was +is):\n%s", what, diff)
		}
		if diff := cmp.Diff(string(s.Text(100)), string(again.Text(100))); what != "wrapped history" && diff != "" {
			t.Errorf("%s: text (-was +is):\n%s", what, diff)
		}
	}
}

func TestReflow(t *testing.T) {
	s := shown(10, 4, "0123456789abcde\r\n$ ")
	s.Resize(5, 4)
	if got, want := string(s.Text(10)), "01234\n56789\nabcde\n$\n"; got != want {
		t.Errorf("narrower: %q, want %q", got, want)
	}
	s.Resize(20, 4)
	if got, want := string(s.Text(10)), "0123456789abcde\n$\n"; got != want {
		t.Errorf("wider: %q, want %q", got, want)
	}
	s.Write([]byte("x"))
	if got, want := string(s.Text(10)), "0123456789abcde\n$ x\n"; got != want {
		t.Errorf("the cursor: %q, want %q", got, want)
	}
	s.Resize(1<<20, 1<<20)
	if cols, rows := s.Size(); cols != MaxCols || rows != MaxRows {
		t.Errorf("%d×%d", cols, rows)
	}
}

func TestFilter(t *testing.T) {
	for _, c := range []struct{ what, in, want string }{
		{"text", "plain ünïcode 漢\r\n\t\b\x07", "plain ünïcode 漢\r\n\t\b\x07"},
		{"looks", "\x1b[1;38;2;1;2;3mx\x1b[m", "\x1b[1;38;2;1;2;3mx\x1b[m"},
		{"modes", "\x1b[?2004h\x1b[?1006h\x1b[>1u\x1b[<u\x1b[>4;2m", "\x1b[?2004h\x1b[?1006h\x1b[>1u\x1b[<u\x1b[>4;2m"},
		{"clipboard written", "a\x1b]52;c;aGk=\x07b", "ab"},
		{"clipboard read", "a\x1b]52;c;?\x1b\\b", "ab"},
		{"title", "\x1b]0;t\x07\x1b]2;t\x07\x1bkt\x1b\\x", "x"},
		{"title read back", "\x1b[21tx", "x"},
		{"window", "\x1b[8;1000;1000t\x1b[2tx", "x"},
		{"size asked", "\x1b[18t", "\x1b[18t"},
		{"printing", "\x1b[5ix\x1b[4i", "x"},
		{"screen read back", "\x1b[1;1;1;1;5;5*yx", "x"},
		{"answerback", "\x05x", "x"},
		{"files", "\x1b]1337;File=name=x;inline=1:aGk=\x07x", "x"},
		{"notification", "\x1b]9;hello\x07\x1b]777;notify;a;b\x07\x1b]99;;x\x1b\\x", "x"},
		{"progress", "\x1b]9;4;1;50\x07", "\x1b]9;4;1;50\x1b\\"},
		{"through tmux", "\x1bPtmux;\x1b\x1b]52;c;?\x07\x1b\\x", "x"},
		{"kitty pictures", "\x1b_Ga=T,t=f;L2V0Yy9wYXNzd2Q=\x1b\\x", "x"},
		{"C1 in UTF-8", "\u009b31mx\u009d52;c;?\u009c", "31mx52;c;?"},
		{"C1 in a link", "\x1b]8;;http://a\u009c\u009d52;c;?\x07x", "x"},
		{"bare C1", "\x9b31mx", "\ufffd31mx"},
		{"link", "\x1b]8;;http://a\x07x\x1b]8;;\x07", "\x1b]8;;http://a\x1b\\x\x1b]8;;\x1b\\"},
		{"control in a sequence", "\x1b[3\n1mx", "\n\x1b[31mx"},
		{"held until whole", "\x1b[3", ""},
		{"endless string", "\x1b]8;;" + strings.Repeat("x", 100000) + "\x07y", "y"},
	} {
		var f Filter
		if got := string(f.Filter([]byte(c.in))); got != c.want {
			t.Errorf("%s: got %q, want %q", c.what, got, c.want)
		}
	}
	quiet := Filter{Quiet: true}
	if got := string(quiet.Filter([]byte("\x1b[c\x1b[6n\x1b[?u\x1b]11;?\x07\x1bP+q544e\x1b\\\x1b[>qx"))); got != "x" {
		t.Errorf("quiet: %q", got)
	}
}

// FuzzScreen: nothing a program prints harms the screen, wherever it is cut in
// pieces; and what is drawn from it behaves as it does.
func FuzzScreen(f *testing.F) {
	f.Add([]byte("\x1b[?1049h\x1b[2;3rabc\x1b[4h漢\x1b(0q\x1b7\x1b]8;;x\x07y\x1b[5;5H\x1b[3Mé\x1b[?6h"), uint8(3), uint8(20), uint8(5))
	f.Add([]byte("0123456789\r\n\x1b[1;31mx\x1b[Z\x1b[?7lxxxxxxxxxxxx\x1b[2@\x1b[5X"), uint8(7), uint8(9), uint8(2))
	f.Add([]byte("\x1b[>1u\x1b[=5;2u\x1b[<9u\x1bP1$r\x1b\\\x1b_x\x1b[99999999999;1H\x1b[2147483648b"), uint8(1), uint8(200), uint8(100))
	f.Fuzz(func(t *testing.T, data []byte, cut, cols, rows uint8) {
		s := New(20, 6, 50)
		s.Answer = func([]byte) {}
		at := min(int(cut), len(data))
		s.Write(data[:at])
		s.Resize(int(cols), int(rows))
		s.Write(data[at:])
		if len(s.Redraw(7, 3, 0)) == 0 {
			t.Error("nothing is drawn")
		}
		s.Text(1000)
		// Drawn for a terminal as large, the text is the same.
		again := redrawn(s)
		if a, b := string(s.Text(0)), string(again.Text(0)); a != b {
			t.Errorf("drawn again: %q, was %q", b, a)
		}
		one, many := New(20, 6, 50), New(20, 6, 50)
		one.Write(data)
		for i := range data {
			many.Write(data[i : i+1])
		}
		if diff := cmp.Diff(one.state(), many.state()); diff != "" {
			t.Errorf("in single bytes (-whole +bytes):\n%s", diff)
		}
	})
}

// FuzzFilter: what passes once passes again unchanged, and holds nothing that must
// not.
func FuzzFilter(f *testing.F) {
	f.Add([]byte("\x1b]52;c;?\x07\x1b[21t\x1b]8;;\xc2\x9c\x07\u009d52;c;?\x9c\x1bPtmux;\x1b\x1b]52;\x07"))
	f.Fuzz(func(t *testing.T, data []byte) {
		once := (&Filter{}).Filter(data)
		twice := (&Filter{}).Filter(once)
		if !bytes.Equal(once, twice) {
			t.Errorf("passed %q, then %q", once, twice)
		}
		for _, bad := range []string{"\x1b]52", "\x1b]0;", "\x1b]1337", "\x1b_", "\x1b^", "\x1bX", "\x1bk", "\x1bPtmux", "\x05", "\u009b", "\u009d"} {
			if bytes.Contains(once, []byte(bad)) {
				t.Errorf("%q passes in %q", bad, once)
			}
		}
	})
}

func BenchmarkWrite(b *testing.B) {
	var text bytes.Buffer
	for i := 0; text.Len() < 1<<20; i++ {
		fmt.Fprintf(&text, "%d the quick brown fox jumps over the lazy dog and so on and on\r\n", i)
	}
	s := New(80, 24, 2000)
	b.SetBytes(int64(text.Len()))
	for b.Loop() {
		s.Write(text.Bytes())
	}
}
