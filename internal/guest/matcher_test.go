package guest

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	testToken = "00112233445566778899aabbccddeeff"
	nonceA    = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	nonceB    = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
)

func syncLine(nonce string) string { return string(syncMarker(testToken)) + nonce + "\n" }

// passed is what a matcher makes of a stream: the sessions' nonces, and the bytes
// given to each and to the one before the first.
type passed struct {
	nonces []string
	data   []string
}

func match(pieces ...[]byte) passed {
	m := &matcher{marker: syncMarker(testToken)}
	got := passed{data: []string{""}}
	for _, piece := range pieces {
		for len(piece) > 0 {
			before, nonce, after := m.next(piece)
			got.data[len(got.data)-1] += string(before)
			if nonce != "" {
				got.nonces = append(got.nonces, nonce)
				got.data = append(got.data, "")
			}
			piece = after
		}
	}
	return got
}

func TestSyncLineSplitAnywhere(t *testing.T) {
	stream := "before" + syncLine(nonceA) + "between" + syncLine(nonceB) + "after"
	for i := range stream {
		got := match([]byte(stream[:i]), []byte(stream[i:]))
		if diff := cmp.Diff([]string{nonceA, nonceB}, got.nonces); diff != "" {
			t.Fatalf("split at %d (-want +got):\n%s", i, diff)
		}
		// The beginning of a line that was split may have been passed on.
		for k, want := range []string{"before", "between", "after"} {
			if rest, ok := strings.CutPrefix(got.data[k], want); !ok || !strings.HasPrefix(syncLine([]string{nonceA, nonceB, ""}[k]), rest) {
				t.Fatalf("split at %d: session %d was given %q, want %q", i, k, got.data[k], want)
			}
		}
	}
}

func TestWhatOnlyLooksLikeASyncLine(t *testing.T) {
	marker := string(syncMarker(testToken))
	for name, stream := range map[string]string{
		"another token":      "x" + strings.ReplaceAll(syncLine(nonceA), "00112233", "00112234") + "y",
		"the ready line":     "x" + string(readyLine(testToken, nonceA)) + "y",
		"no new line before": "x" + syncLine(nonceA)[1:] + "y",
		"a short nonce":      "x" + syncLine(nonceA[1:]) + "y",
		"a long nonce":       "x" + syncLine(nonceA+"a") + "y",
		"capital digits":     "x" + syncLine(strings.ToUpper(nonceA)) + "y",
		"half a line":        "x" + marker + nonceA,
		"newlines":           strings.Repeat("\n", 1000),
	} {
		bytewise := make([][]byte, 0, len(stream))
		for _, c := range []byte(stream) {
			bytewise = append(bytewise, []byte{c})
		}
		for how, pieces := range map[string][][]byte{"whole": {[]byte(stream)}, "byte by byte": bytewise} {
			got := match(pieces...)
			if len(got.nonces) != 0 || got.data[0] != stream {
				t.Errorf("%s, %s: found %q, and passed on %q of %q", name, how, got.nonces, got.data[0], stream)
			}
		}
	}
	// A line that begins in what looked like another counts.
	for _, prefix := range []string{"\n", marker, marker + nonceA + "a", marker + nonceA[1:]} {
		if got := match([]byte(prefix + syncLine(nonceB))); len(got.nonces) != 1 || got.nonces[0] != nonceB {
			t.Errorf("after %q: found %q", prefix, got.nonces)
		}
	}
}

// FuzzMatcher compares with a search of the whole stream. In the input, A and B stand
// for sync lines, M for a marker, and | for the end of a piece.
func FuzzMatcher(f *testing.F) {
	for _, seed := range []string{"", "A", "xA|yB|", "M|A", "MMA", "AA", "A|\n|A", "M" + nonceA + "A", "\nM\nB"} {
		f.Add(seed)
	}
	expand := strings.NewReplacer("A", syncLine(nonceA), "B", syncLine(nonceB), "M", string(syncMarker(testToken)))
	line := regexp.MustCompile(`\n` + testToken + ` sync ([0-9a-f]{32})\n`)
	f.Fuzz(func(t *testing.T, input string) {
		// Pieces end within lines too: split before and after the expansion.
		var pieces [][]byte
		for piece := range strings.SplitSeq(input, "|") {
			whole := []byte(expand.Replace(piece))
			cut := len(whole) * len(input) % (len(whole) + 1)
			pieces = append(pieces, whole[:cut], whole[cut:])
		}
		stream := bytes.Join(pieces, nil)
		got := match(pieces...)

		at := 0
		found := line.FindAllSubmatchIndex(stream, -1)
		if len(found) != len(got.nonces) {
			t.Fatalf("found %d lines, want %d, in %q", len(got.nonces), len(found), stream)
		}
		for k, m := range found {
			if nonce := string(stream[m[2]:m[3]]); got.nonces[k] != nonce {
				t.Fatalf("line %d has nonce %s, want %s", k, got.nonces[k], nonce)
			}
			rest, ok := strings.CutPrefix(got.data[k], string(stream[at:m[0]]))
			if !ok || !strings.HasPrefix(string(stream[m[0]:m[1]]), rest) {
				t.Fatalf("session %d was given %q, want %q", k, got.data[k], stream[at:m[0]])
			}
			at = m[1]
		}
		if got.data[len(found)] != string(stream[at:]) {
			t.Fatalf("the last session was given %q, want %q", got.data[len(found)], stream[at:])
		}
	})
}
