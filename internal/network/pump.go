package network

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/waiter"
)

// blocks are what bytes are carried in. A connection has one only while something is
// there to read, so that idle ones cost little.
var blocks = sync.Pool{New: func() any { return new([128 << 10]byte) }}

// errLetGo means that reading was given up because its deadline was set in the past.
var errLetGo = errors.New("let go")

// pump copies from one connection to another and counts. nil at the end of input.
func pump(to io.Writer, from net.Conn, count *atomic.Int64) error {
	for {
		block, size, err := readBlock(from)
		if size > 0 {
			written, writeErr := to.Write(block[:size])
			count.Add(int64(written))
			if writeErr != nil {
				blocks.Put(block)
				return writeErr
			}
		}
		if block != nil {
			blocks.Put(block)
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return errLetGo
		case err != nil:
			return err
		}
	}
}

// readBlock waits until there is something to read, and takes a block only then.
func readBlock(from net.Conn) (*[128 << 10]byte, int, error) {
	switch c := from.(type) {
	case *guestConn:
		waitReadable(c.ep, c.queue)
	case *guestDatagrams:
		waitReadable(c.ep, c.queue)
	case *net.TCPConn:
		return readSocket(c)
	case *net.UDPConn:
		return readSocket(c)
	}
	block := blocks.Get().(*[128 << 10]byte)
	size, err := from.Read(block[:])
	return block, size, err
}

// readSocket reads from a socket of this computer without holding a block while it
// waits.
func readSocket(c syscall.Conn) (block *[128 << 10]byte, size int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, 0, err
	}
	var readErr error
	err = raw.Read(func(fd uintptr) bool {
		block = blocks.Get().(*[128 << 10]byte)
		for {
			size, readErr = unix.Read(int(fd), block[:])
			if readErr != unix.EINTR {
				break
			}
		}
		if readErr == unix.EAGAIN {
			blocks.Put(block)
			block = nil
			return false
		}
		return true
	})
	switch {
	case err != nil:
		return block, 0, err
	case readErr != nil:
		return block, 0, readErr
	}
	if _, datagrams := c.(*net.UDPConn); size == 0 && !datagrams {
		return block, 0, io.EOF
	}
	return block, size, nil
}

// waitReadable waits until a read would not block, and holds nothing meanwhile.
func waitReadable(ep tcpip.Endpoint, queue *waiter.Queue) {
	const events = waiter.ReadableEvents | waiter.EventHUp | waiter.EventErr
	if ep.Readiness(events) != 0 {
		return
	}
	entry, ready := waiter.NewChannelEntry(events)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	if ep.Readiness(events) == 0 {
		<-ready
	}
}

// reset ends a connection so that its other end sees a reset.
func reset(c net.Conn) {
	if socket, is := c.(*net.TCPConn); is {
		socket.SetLinger(0)
	}
	c.Close()
}
