package cli

import (
	"testing"
)

// TestKeys: the one key of ours is found in every way terminals send it, wherever
// input is cut, and everything else passes.
func TestKeys(t *testing.T) {
	for _, c := range []struct {
		what, in, before string
		found            bool
		after            string
	}{
		{"plain", "ab\x1dcd", "ab", true, "cd"},
		{"kitty", "ab\x1b[93;5ucd", "ab", true, "cd"},
		{"kitty, pressed", "\x1b[93;5:1u", "", true, ""},
		{"kitty, with num lock", "\x1b[93;133u", "", true, ""},
		{"kitty, with the shifted key", "\x1b[93:125;5u", "", true, ""},
		{"kitty, released", "a\x1b[93;5:3ub", "ab", false, ""},
		{"modifyOtherKeys", "\x1b[27;5;93~x", "", true, "x"},
		{"another key", "\x1b[99;5u\x1b[27;5;94~", "\x1b[99;5u\x1b[27;5;94~", false, ""},
		{"no control", "\x1b[93u", "\x1b[93u", false, ""},
		{"arrows and escape", "\x1b[A\x1bOA\x1b", "\x1b[A\x1bOA\x1b", false, ""},
		{"in a paste", "\x1b[200~a\x1d\x1b[93;5ub\x1b[201~c\x1dd", "\x1b[200~a\x1d\x1b[93;5ub\x1b[201~c", true, "d"},
	} {
		k := keys{key: menuKey}
		before, found, after := k.next([]byte(c.in))
		if string(before) != c.before || found != c.found || string(after) != c.after {
			t.Errorf("%s: %q, %v, %q", c.what, before, found, after)
		}
	}
	// Cut anywhere.
	for cut := 3; cut < len("\x1b[93;5u"); cut++ {
		k, in := keys{key: menuKey}, "\x1b[93;5u"
		if before, found, _ := k.next([]byte(in[:cut])); found || len(before) > 0 {
			t.Errorf("found in %q", in[:cut])
		}
		if _, found, _ := k.next([]byte(in[cut:])); !found {
			t.Errorf("not found after %q", in[:cut])
		}
	}
	k := keys{key: menuKey}
	k.next([]byte("\x1b[9"))
	if got := string(k.flush()); got != "\x1b[9" {
		t.Errorf("held back: %q", got)
	}
	none := keys{}
	if before, found, _ := none.next([]byte("\x1d\x1b[93;5u")); found || string(before) != "\x1d\x1b[93;5u" {
		t.Errorf("taken although none is: %q", before)
	}
}

func TestDetachKey(t *testing.T) {
	for s, want := range map[string]byte{"": 0x1d, "none": 0, "ctrl-q": 0x11, "Ctrl-A": 1, "ctrl-]": 0x1d} {
		v := viewing{}
		if err := v.detachKey(s); err != nil || v.keys.key != want {
			t.Errorf("%q: %#x, %v", s, v.keys.key, err)
		}
	}
	for _, s := range []string{"x", "ctrl-", "ctrl-m", "ctrl-i", "ctrl-1", "alt-x"} {
		if err := (&viewing{}).detachKey(s); err == nil {
			t.Errorf("%q is taken", s)
		}
	}
}

func TestMenuLetters(t *testing.T) {
	for in, want := range map[string]byte{"d": 'd', "\x1b": 0x1b, "\x1d": menuKey, "\x1b[93;5u": menuKey, "\x1b[27;5;93~": menuKey, "\x1b[100u": 'd', "\x1b[100;1:3u": 0xff, "\x1b[A": 0} {
		if got := letter([]byte(in)); got != want {
			t.Errorf("%q is %q", in, got)
		}
	}
}

// FuzzKeys: whatever is typed, nothing is lost but our key, and nothing is added.
func FuzzKeys(f *testing.F) {
	f.Add([]byte("a\x1b[93;5ub\x1b[200~\x1d\x1b[201~"), uint8(3))
	f.Fuzz(func(t *testing.T, in []byte, cut uint8) {
		k := keys{key: menuKey}
		total := 0
		at := min(int(cut), len(in))
		for _, part := range [][]byte{in[:at], in[at:]} {
			for found := true; found; {
				var before []byte
				before, found, part = k.next(part)
				total += len(before)
			}
		}
		total += len(k.flush())
		if total > len(in) {
			t.Errorf("%d bytes became %d", len(in), total)
		}
	})
}
