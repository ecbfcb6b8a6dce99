package vmfake_test

import (
	"testing"

	"dozable.com/doz/internal/vm/vmfake"
	"dozable.com/doz/internal/vm/vmtest"
)

func TestConformance(t *testing.T) {
	vmtest.Run(t, vmtest.Setup{Engine: vmfake.New(vmfake.Options{})})
}
