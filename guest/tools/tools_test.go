// Package tools_test checks the committed tools layers: that each is the recorded
// one, and that what is in it is listed.
package tools_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLayersAreTheRecordedOnes(t *testing.T) {
	got := map[string]string{}
	for _, name := range []string{"tools-x86_64.squashfs", "tools-arm64.squashfs"} {
		data := read(t, name)
		sum := sha256.Sum256(data)
		got[name] = hex.EncodeToString(sum[:])
		if !bytes.HasPrefix(data, []byte("hsqs")) {
			t.Errorf("%s is no squashfs", name)
		}
	}
	want := map[string]string{}
	for line := range strings.Lines(string(read(t, "SHA256SUMS"))) {
		if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  "); ok {
			want[name] = sum
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("layers are not the recorded ones (-SHA256SUMS +files):\n%s", diff)
	}
}

func TestPackagesAreListed(t *testing.T) {
	for _, arch := range []string{"x86_64", "arm64"} {
		_, list, ok := strings.Cut(string(read(t, "PACKAGES.md")), "## "+arch+"\n")
		if !ok {
			t.Errorf("PACKAGES.md has no part for %s", arch)
		}
		list, _, _ = strings.Cut(list, "\n## ")
		for _, name := range []string{"tmux", "e2fsprogs", "alsa-utils", "libc6", "libasound2"} {
			if !strings.Contains(list, "| "+name+" | ") {
				t.Errorf("PACKAGES.md does not list %s for %s", name, arch)
			}
		}
	}
}

func read(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
