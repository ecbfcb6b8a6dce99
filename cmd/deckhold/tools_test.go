package main

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The root's own programs are left alone, and whoever sets a variable has it so.
func TestToolsData(t *testing.T) {
	given := []string{"LOCPATH=/mine", "PATH=/bin"}
	if got := withToolsData(slices.Clone(given), "/usr/bin/tmux"); !slices.Equal(got, given) {
		t.Errorf("the root's tmux gets %q", got)
	}
	want := []string{
		"ALSA_CONFIG_DIR=/run/doz/tools/share/alsa", "LOCPATH=/mine", "MKE2FS_CONFIG=/run/doz/tools/share/mke2fs.conf",
		"PATH=/bin", "TERMINFO_DIRS=:/run/doz/tools/share/terminfo",
	}
	if diff := cmp.Diff(want, withToolsData(slices.Clone(given), "/run/doz/tools/bin/tmux")); diff != "" {
		t.Errorf("the layer's tmux (-want +got):\n%s", diff)
	}
}
