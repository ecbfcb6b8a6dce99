package qemu_test

import (
	"testing"

	"dozable.com/doz/internal/parts"
	"dozable.com/doz/internal/vm/qemu"
	"dozable.com/doz/internal/vm/vmtest"
)

// TestConformance boots real machines from what make build has built.
func TestConformance(t *testing.T) {
	set, err := parts.Find()
	if err != nil {
		t.Fatalf("%v (and set DOZ_PARTS to libexec/doz, as make test does)", err)
	}
	kernel, _ := set.Current(parts.KernelPlain)
	initrd, _ := set.Current(parts.Initrd)
	vmtest.Run(t, vmtest.Setup{
		Engine: qemu.New(qemu.Options{StateDir: t.TempDir(), Kernel: set.Path(kernel)}),
		Kernel: set.Path(kernel), Initrd: set.Path(initrd),
	})
}
