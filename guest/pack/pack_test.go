package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"dozable.com/doz/internal/parts"
)

// What pack writes is what a doz beside it finds, checks and copies into a store.
func TestPackedPartsBoot(t *testing.T) {
	t.Chdir("../..") // pack works in the project's folder
	for _, arch := range []string{"x86_64", "arm64"} {
		t.Run(arch, func(t *testing.T) {
			out := t.TempDir()
			must(t, pack(arch, out, "1.2.3", false))
			t.Setenv("DOZ_PARTS", out)
			set, err := parts.Find()
			must(t, err)
			got := parts.Manifest{Schema: set.Schema, Arch: set.Arch, Version: set.Version, Release: set.Release}
			if diff := cmp.Diff(parts.Manifest{Schema: parts.Schema, Arch: arch, Version: "1.2.3", Release: "source"}, got); diff != "" {
				t.Errorf("manifest (-want +got):\n%s", diff)
			}
			store := parts.NewStore(set, t.TempDir(), func(text string) { t.Error(text) })
			for _, audio := range []bool{false, true} {
				kernel, err := store.CurrentKernel(audio)
				must(t, err)
				_, _, _, err = store.Paths(kernel, "")
				must(t, err)
			}
			for _, file := range []string{"VERSION", "RELEASE", "licences/go/LICENSE", "licences/kernel/GPL-2.0.txt", "licences/tools/PACKAGES.md"} {
				if _, err := os.Stat(filepath.Join(out, file)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A public release after a build from source keeps nothing that it must not carry, and
// the files that are the same stay the same files.
func TestPublicReleaseHasNoSoundKernel(t *testing.T) {
	t.Chdir("../..")
	out := t.TempDir()
	must(t, pack("x86_64", out, "1.2.3", false))
	kernel := filepath.Join(out, "kernels/vmlinux-x86_64-plain")
	before, err := os.Stat(kernel)
	must(t, err)

	must(t, pack("x86_64", out, "1.2.3", true))
	after, err := os.Stat(kernel)
	must(t, err)
	if !os.SameFile(before, after) {
		t.Error("the plain kernel was written again, though it is the same")
	}
	kernels, err := filepath.Glob(out + "/kernels/*")
	must(t, err)
	if !slices.Equal(kernels, []string{kernel}) {
		t.Errorf("kernels are %v, want the plain one only", kernels)
	}
	t.Setenv("DOZ_PARTS", out)
	set, err := parts.Find()
	must(t, err)
	if _, ok := set.Current(parts.KernelSound); ok || set.Release != "public" {
		t.Errorf("release %q carries a sound kernel: %v", set.Release, ok)
	}
	if release, err := os.ReadFile(out + "/RELEASE"); err != nil || string(release) != "public\n" {
		t.Errorf("RELEASE is %q, %v", release, err)
	}
}

func TestUnknownArchitecture(t *testing.T) {
	if err := pack("riscv", t.TempDir(), "1.2.3", false); err == nil {
		t.Error("there is no riscv, and it was packed")
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
