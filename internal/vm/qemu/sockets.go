//go:build linux

package qemu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"dozable.com/doz/internal/vm"
)

// Sockets in a machine's folder.
const (
	monitorSocket = "monitor.sock"
	consoleSocket = "console.sock"
	guestSocket   = "guest.sock"
)

var sockets = []string{monitorSocket, consoleSocket, guestSocket}

// listenAll opens a machine's sockets, for its process to inherit: whoever connects
// from then on waits for the process rather than misses it.
func listenAll(dir string) (files []*os.File, err error) {
	removeSockets(dir)
	defer func() {
		if err != nil {
			closeAll(files)
			removeSockets(dir)
		}
	}()
	for _, name := range sockets {
		path, done, err := shortPath(dir, name)
		if err != nil {
			return files, err
		}
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		done()
		if err != nil {
			return files, err
		}
		l.SetUnlinkOnClose(false)
		f, err := l.File()
		l.Close()
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// dialSocket connects to one of the sockets in dir.
func dialSocket(ctx context.Context, dir, name string) (net.Conn, error) {
	path, done, err := shortPath(dir, name)
	if err != nil {
		return nil, err
	}
	defer done()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		return conn, nil
	case ctx.Err() != nil, errors.Is(err, syscall.EAGAIN): // a full backlog: nobody accepts
		return nil, vm.ErrUnresponsive
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNREFUSED):
		return nil, vm.ErrEnded
	}
	return nil, fmt.Errorf("cannot reach the machine: %w", err)
}

// shortPath names a socket through an open descriptor of its folder, because a
// socket's address has room for a path of 107 bytes only.
func shortPath(dir, name string) (path string, done func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name), func() { d.Close() }, nil
}

func removeSockets(dir string) {
	for _, name := range sockets {
		os.Remove(filepath.Join(dir, name))
	}
}
