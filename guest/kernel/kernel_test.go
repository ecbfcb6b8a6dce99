// Package kernel_test checks the committed guest kernels: that each is the recorded
// one, and that the sound variant is the plain one but for sound.
package kernel_test

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
)

// What the sound variant adds. The first four are asked for (fragments/sound.config);
// Kconfig selects or defaults the rest, having no prompt for them or no way to refuse.
// "n" are prompts that only exist once SND does, and are refused.
var sound = map[string]string{
	"SOUND": "y", "SND": "y", "SND_VIRTIO": "y", "SND_PROC_FS": "y",

	"SND_PCM": "y", "SND_JACK": "y", // selected by SND_VIRTIO
	"SND_JACK_INPUT_DEV": "y", // default y with SND_JACK and INPUT

	"SND_OSSEMUL": "n", "SND_PCM_TIMER": "n", "SND_HRTIMER": "n", "SND_DYNAMIC_MINORS": "n",
	"SND_SUPPORT_OLD_API": "n", "SND_VERBOSE_PROCFS": "n", "SND_CTL_FAST_LOOKUP": "n",
	"SND_DEBUG": "n", "SND_CTL_INPUT_VALIDATION": "n", "SND_SEQUENCER": "n",
	"SND_DRIVERS": "n", "SND_PCI": "n", "SND_SOC": "n",
}

// forced is what Kconfig adds on one architecture only.
var forced = map[string]map[string]string{
	"x86_64": {"SND_DMA_SGBUF": "y", "SND_X86": "n", "SND_HDA_PREALLOC_SIZE": "0"},
	"arm64":  {"SND_HDA_PREALLOC_SIZE": "64"},
}

func TestSoundIsTheOnlyDifference(t *testing.T) {
	for arch, extra := range forced {
		t.Run(arch, func(t *testing.T) {
			want := readConfig(t, "config-"+arch+"-plain")
			for _, more := range []map[string]string{sound, extra} {
				for name, value := range more {
					want[name] = value
				}
			}
			if diff := cmp.Diff(want, readConfig(t, "config-"+arch+"-sound")); diff != "" {
				t.Errorf("the sound variant differs by more than sound (-want +got):\n%s", diff)
			}
		})
	}
}

// The options asked for are in the committed configurations, so that a fragment
// cannot change without a build.
func TestFragmentsAreInTheConfigs(t *testing.T) {
	for _, arch := range []string{"x86_64", "arm64"} {
		for _, variant := range []string{"plain", "sound"} {
			got := readConfig(t, "config-"+arch+"-"+variant)
			fragments := []string{"common", arch}
			if variant == "sound" {
				fragments = append(fragments, "sound")
			}
			for _, fragment := range fragments {
				for name, value := range readConfig(t, "fragments/"+fragment+".config") {
					// An option that does not exist at all is refused well enough.
					if have := got[name]; have != value && !(value == "n" && have == "") {
						t.Errorf("config-%s-%s has %s=%q, and fragments/%s.config asks for %q", arch, variant, name, have, fragment, value)
					}
				}
			}
		}
	}
}

func TestKernelsAreTheRecordedOnes(t *testing.T) {
	sums, err := os.ReadFile("SHA256SUMS")
	if err != nil {
		t.Fatal(err)
	}
	got, want := map[string]string{}, map[string]string{}
	for line := range strings.Lines(string(sums)) {
		sum, name, ok := strings.Cut(strings.TrimSpace(line), "  ")
		if !ok {
			t.Fatalf("SHA256SUMS: %q is no sum and name", line)
		}
		want[name], got[name] = sum, unpackedSum(t, name+".zst")
	}
	if len(want) != 4 {
		t.Errorf("SHA256SUMS lists %d kernels, not four", len(want))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kernels are not the recorded ones (-SHA256SUMS +files):\n%s", diff)
	}
}

func unpackedSum(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d, err := zstd.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, d); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return hex.EncodeToString(hash.Sum(nil))
}

var option = regexp.MustCompile(`(?m)^(?:CONFIG_(\w+)=(.*)|# CONFIG_(\w+) is not set)$`)

// readConfig reads a kernel configuration; what is not set is "n".
func readConfig(t *testing.T, path string) map[string]string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	config := map[string]string{}
	for _, m := range option.FindAllStringSubmatch(string(data), -1) {
		if m[3] != "" {
			config[m[3]] = "n"
		} else {
			config[m[1]] = m[2]
		}
	}
	return config
}
