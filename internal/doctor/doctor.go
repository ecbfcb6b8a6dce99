// Package doctor says what doz needs of this computer, whether it is there, and what
// to do where it is not. It must not change anything but what the engine remembers.
package doctor

import (
	"context"
	"fmt"
	"runtime"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/parts"
	"dozable.com/doz/internal/store"
	"dozable.com/doz/internal/vm"
)

// Check is one thing looked at. One that is needed and not OK stops doz.
type Check struct {
	Name   string
	OK     bool
	Needed bool
	Text   string
	Remedy string
}

// roomWanted is what an image and a few sandboxes take.
const roomWanted = 4 << 30

// Run looks at everything.
func Run(ctx context.Context, s *store.Store, set *parts.Set, setErr error, engine vm.Engine, images func(*store.Store) ([]api.Image, error)) []Check {
	checks := []Check{{Name: "computer", OK: true, Needed: true, Text: runtime.GOOS + " on " + runtime.GOARCH}}
	checks = append(checks, carried(set, setErr)...)
	checks = append(checks, machines(ctx, engine)...)
	checks = append(checks, disk(s))
	list, err := images(s)
	c := Check{Name: "images", OK: err == nil && len(list) > 0, Text: fmt.Sprintf("%d in the store", len(list))}
	if err != nil {
		c.Text = err.Error()
	} else if len(list) == 0 {
		c.Remedy = "make one with: doz image import lab lab.tar"
	}
	for _, v := range list {
		if v.Problem != "" {
			c.OK, c.Text, c.Remedy = false, fmt.Sprintf("image %q is damaged: %s", v.Name, v.Problem), "import it again"
		}
	}
	return append(checks, c)
}

func carried(set *parts.Set, err error) []Check {
	if err != nil {
		return []Check{{Name: "parts", Needed: true, Text: err.Error(), Remedy: "install doz again, or run: make build"}}
	}
	kernel, _ := set.Current(parts.KernelPlain)
	checks := []Check{{Name: "kernel", OK: kernel.Name != "", Needed: true, Text: kernel.Name}}
	sound := Check{Name: "sound kernel", OK: true, Text: "carried; audio sandboxes themselves are not built yet"}
	if _, ok := set.Current(parts.KernelSound); !ok {
		sound.OK, sound.Text = false, "this doz does not carry it: no audio sandboxes"
	}
	return append(checks, sound)
}

func machines(ctx context.Context, engine vm.Engine) []Check {
	f, err := engine.Probe(ctx)
	if err != nil {
		return []Check{{Name: "machines", Needed: true, Text: err.Error(), Remedy: "install QEMU 7.2 or later"}}
	}
	checks := []Check{
		{Name: "machines", OK: true, Needed: true, Text: fmt.Sprintf("%s %s, %s", f.Engine, f.Version, f.MachineType)},
		{Name: "processor", OK: !f.Emulated, Text: fmt.Sprintf("%s: %s", f.Accelerator, f.AcceleratorWhy)},
	}
	if f.Emulated {
		checks[1].Remedy = "run doz on a computer, or a virtual machine with nested virtualization, that has KVM"
	}
	sound := Check{Name: "sound device", OK: f.Audio, Text: "QEMU has one"}
	if !f.Audio {
		sound.Text = f.AudioWhy
	}
	return append(checks, sound)
}

func disk(s *store.Store) Check {
	c := Check{Name: "store", OK: true, Needed: true, Text: s.Root()}
	free, err := s.FreeBytes()
	switch {
	case err != nil:
		c.Text += " (does not exist yet)"
	case free < roomWanted:
		c.OK, c.Text, c.Remedy = false, fmt.Sprintf("%s has %d MiB of room left", s.Root(), free>>20), fmt.Sprintf("make room: an image and a few sandboxes take %d GiB", roomWanted>>30)
		c.Needed = free < 64<<20
	default:
		c.Text += fmt.Sprintf(", %d GiB of room", free>>30)
	}
	return c
}
