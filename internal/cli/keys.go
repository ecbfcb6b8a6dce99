package cli

import (
	"bytes"
	"regexp"
	"strconv"
)

// menuKey is Ctrl-].
const menuKey = 0x1d

// keys finds the one key of ours among what is typed, in every way terminals send it:
// as a control character, in the kitty keyboard protocol and in modifyOtherKeys. What
// is pasted is never a key.
type keys struct {
	key     byte // the control character; 0 takes none
	paste   bool
	partial []byte
}

// kittyKey is a key with modifiers: its code, the modifiers, the kind of event.
var kittyKey = regexp.MustCompile(`^\x1b\[(\d+)(?::\d*)*(?:;(\d*)(?::(\d))?(?:;[\d:]*)?)?u`)

// otherKey is xterm's way.
var otherKey = regexp.MustCompile(`^\x1b\[27;(\d+);(\d+)~`)

// unfinished is what may become either, or the mark of a paste.
var unfinished = regexp.MustCompile(`^\x1b\[[\d:;]{0,40}$`)

// next splits what was typed at the first key of ours: what came before it, whether
// there was one, and what comes after it.
func (k *keys) next(in []byte) (before []byte, found bool, after []byte) {
	if len(k.partial) > 0 {
		in = append(k.partial, in...)
		k.partial = nil
	}
	for i := 0; i < len(in); i++ {
		rest := in[i:]
		switch {
		case k.paste:
			if bytes.HasPrefix(rest, []byte("\x1b[201~")) {
				k.paste = false
			}
		case k.key != 0 && rest[0] == k.key:
			return in[:i], true, rest[1:]
		case rest[0] != 0x1b:
		case bytes.HasPrefix(rest, []byte("\x1b[200~")):
			k.paste = true
		default:
			if n, press := k.encoded(rest); n > 0 {
				if press {
					return in[:i], true, rest[n:]
				}
				// Its release is ours too.
				in = append(append([]byte{}, in[:i]...), rest[n:]...)
				i--
			}
		}
		if rest[0] == 0x1b && unfinished.Match(rest) {
			k.partial = append([]byte{}, rest...)
			return in[:i], false, nil
		}
	}
	return in, false, nil
}

// flush gives what was held back, when nothing has followed it.
func (k *keys) flush() []byte {
	b := k.partial
	k.partial = nil
	return b
}

// encoded says how long an encoded form of our key at the beginning of b is, 0 for
// none, and whether it was pressed.
func (k *keys) encoded(b []byte) (n int, press bool) {
	code, modifiers, event, n := decode(b)
	if k.key == 0 || n == 0 || modifiers != 4 || code != int(k.key|0x40) && code != int(k.key|0x60) {
		return 0, false
	}
	return n, event != 3
}

// decode reads an encoded key. Caps and num lock count as no modifiers.
func decode(b []byte) (code, modifiers, event, n int) {
	number := func(s []byte, missing int) int {
		if v, err := strconv.Atoi(string(s)); err == nil {
			return v
		}
		return missing
	}
	if m := kittyKey.FindSubmatch(b); m != nil {
		return number(m[1], 0), (number(m[2], 1) - 1) &^ 0xc0, number(m[3], 1), len(m[0])
	}
	if m := otherKey.FindSubmatch(b); m != nil {
		return number(m[2], 0), (number(m[1], 1) - 1) &^ 0xc0, 1, len(m[0])
	}
	return 0, 0, 0, 0
}

// letter is what a key means to the menu: a character, or 0 for any other key.
func letter(b []byte) byte {
	code, modifiers, event, n := decode(b)
	switch {
	case n > 0 && event == 3:
		return 0xff // a release says nothing
	case n > 0 && modifiers&^1 == 0 && code < 0x80:
		return byte(code)
	case n > 0 && modifiers == 4 && code == menuKey|0x40:
		return menuKey
	case len(b) == 1:
		return b[0]
	}
	return 0
}
