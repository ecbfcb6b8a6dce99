package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// port is the virtio-serial port as a stream that waits while no host is there. It is
// opened without blocking: a blocking write spins in the kernel
// (drivers/char/virtio_console.c, __send_to_port).
type port struct {
	file *os.File
	raw  syscall.RawConn
	// lock holds a pipe that is only ever emptied whole (see splice).
	lock [2]int
}

// portWait is how long the kernel may take to find the machine's ports.
const portWait = 5 * time.Second

// openPort opens the guest channel's port.
func openPort() (*port, error) {
	for end := time.Now().Add(portWait); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, file := range names {
			name, _ := os.ReadFile(file)
			if strings.TrimSpace(string(name)) != guest.PortName {
				continue
			}
			device := "/dev/" + filepath.Base(filepath.Dir(file))
			fd, err := unix.Open(device, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
			if err != nil {
				continue
			}
			f := os.NewFile(uintptr(fd), device)
			raw, err := f.SyscallConn()
			p := &port{file: f, raw: raw}
			unix.Pipe2(p.lock[:], unix.O_CLOEXEC|unix.O_NONBLOCK)
			unix.FcntlInt(uintptr(p.lock[0]), unix.F_SETPIPE_SZ, 1<<20)
			return p, err
		}
	}
	return nil, errors.New("there is no port named " + guest.PortName)
}

// Read waits for bytes. While no host is connected the kernel says end-of-file; the
// poller hears of the next one.
func (p *port) Read(b []byte) (n int, err error) {
	waitErr := p.raw.Read(func(fd uintptr) bool {
		for {
			n, err = unix.Read(int(fd), b)
			if err != unix.EINTR {
				return n > 0 || err != nil && err != unix.EAGAIN
			}
		}
	})
	if waitErr != nil {
		return 0, waitErr
	}
	return max(n, 0), err
}

func (p *port) Write(b []byte) (int, error) { return p.file.Write(b) }

// splice writes n bytes that are in a pipe, whose pages the kernel hands to the
// device as they are. It is not for concurrent use.
//
// They go through a pipe of the port's own: when less than a whole pipe is spliced to
// a virtio port, the kernel gives the device the rest as buffers of no length, which
// breaks it (virtio_console.c, port_fops_splice_write: the scatter list is as long as
// the pipe, and its end is not marked where the bytes end).
func (p *port) splice(pipe, n int) error {
	for n > 0 {
		k, err := unix.Splice(pipe, nil, p.lock[1], nil, n, unix.SPLICE_F_NONBLOCK)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		n -= int(k)
		if err := p.empty(int(k)); err != nil {
			return err
		}
	}
	return nil
}

// empty writes the n bytes in the port's own pipe.
func (p *port) empty(n int) error {
	for n > 0 {
		var k int64
		var err error
		waitErr := p.raw.Write(func(fd uintptr) bool {
			k, err = unix.Splice(p.lock[0], nil, int(fd), nil, n, unix.SPLICE_F_NONBLOCK)
			return err != unix.EAGAIN
		})
		switch {
		case waitErr != nil:
			return waitErr
		case err == unix.EINTR:
		case err == unix.EINVAL || err == nil && k == 0:
			return copyPipe(p, p.lock[0], n) // a port that cannot
		case err != nil:
			return err
		}
		n -= int(max(k, 0))
	}
	return nil
}
