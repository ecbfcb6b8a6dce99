//go:build !linux

package cli

import (
	"errors"
	"os"
)

// For other platforms to come.

func dropInput(*os.File) {}

func settings(*os.File) string { return "" }

func set(*os.File, string) error { return errors.New("not built for this platform") }
