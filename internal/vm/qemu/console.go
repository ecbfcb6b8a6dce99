//go:build linux

package qemu

import (
	"fmt"
	"io"
	"os"

	"dozable.com/doz/internal/vm"
)

const defaultConsoleLimit = 1 << 20

// consoleFile keeps the first bytes of what a guest prints. Writing to it never
// fails: a guest that prints for ever, or a full disk, must not hold the guest up.
type consoleFile struct {
	f     *os.File // nil: nothing is kept any more
	room  int64
	limit int64
}

// openConsole opens the console's file of c; fresh empties it first.
func openConsole(c vm.Config, fresh bool) (*consoleFile, error) {
	if c.ConsoleFile == "" {
		return &consoleFile{}, nil
	}
	flags := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if fresh {
		flags |= os.O_TRUNC
	}
	f, err := os.OpenFile(c.ConsoleFile, flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot keep the console: %w", err)
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("cannot keep the console: %w", err)
	}
	limit := c.ConsoleLimit
	if limit <= 0 {
		limit = defaultConsoleLimit
	}
	k := &consoleFile{f: f, room: limit - info.Size(), limit: limit}
	if k.room < 0 { // the line that says so is already there
		k.close()
	}
	return k, nil
}

func (k *consoleFile) Write(p []byte) (int, error) {
	if k.f == nil {
		return len(p), nil
	}
	keep := p[:min(int64(len(p)), k.room)]
	k.room -= int64(len(keep))
	if _, err := k.f.Write(keep); err != nil {
		k.close()
		return len(p), nil
	}
	if len(keep) < len(p) {
		fmt.Fprintf(k.f, "\n[doz: the console printed more than %d bytes; the rest was dropped]\n", k.limit)
		k.close()
	}
	return len(p), nil
}

func (k *consoleFile) close() {
	if k.f != nil {
		k.f.Close()
		k.f = nil
	}
}

// drain copies the console until it ends.
func (k *consoleFile) drain(console io.ReadCloser) {
	defer console.Close()
	defer k.close()
	io.Copy(k, console)
}
