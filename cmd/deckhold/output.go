package main

import (
	"errors"
	"io"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

const (
	// pipeSize is what a program that writes much may run ahead of its reader.
	pipeSize = 1 << 20
	// smallRead is what is read of a pipe at first. Most outputs end within it.
	smallRead = 16 << 10
	// bulkMin is from how many bytes on it pays to move pages instead of reading.
	bulkMin = 32 << 10
)

// output is our end of a program's standard output or error.
type output struct {
	typ     byte
	pipe    *os.File
	fd      int           // pipe's
	roomy   bool          // the pipe has been made pipeSize large
	over    atomic.Bool   // the program has ended, and its grace
	drained chan struct{} // closed when what the client is to see has been sent
}

// finish makes the pump stop at what the pipe holds now.
func (o *output) finish() {
	o.over.Store(true)
	o.pipe.SetReadDeadline(time.Unix(1, 0))
}

// pump sends the output until the pipe is closed or finish was called, and reads and
// drops it from then on, and also when the client cannot be reached: nothing that
// still runs shall hang, or be ended, because nobody listens.
func (o *output) pump(p *program) {
	defer o.pipe.Close()
	o.send(p)
	close(o.drained)
	o.pipe.SetReadDeadline(time.Time{})
	io.Copy(io.Discard, o.pipe)
}

// send sends the output, and returns when there will be no more, or nobody to hear it.
func (o *output) send(p *program) {
	buf := make([]byte, smallRead)
	frames := guest.NewFrameWriter(p.stream)
	for {
		n, err := o.pipe.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			o.sendRest(p)
			return
		}
		if err != nil {
			return
		}
		p.writing.Lock()
		err = frames.Write(o.typ, buf[:n])
		p.writing.Unlock()
		if err != nil {
			return
		}
		if n == len(buf) && o.sendBulk(p) != nil {
			return
		}
	}
}

// sendBulk sends what the pipe holds as long as it holds much.
func (o *output) sendBulk(p *program) error {
	if !o.roomy {
		o.roomy = true
		unix.FcntlInt(uintptr(o.fd), unix.F_SETPIPE_SZ, pipeSize)
	}
	for !o.over.Load() {
		n := min(unread(o.fd), guest.MaxFrame)
		if n < bulkMin {
			return nil
		}
		if err := p.transfer(o, n); err != nil {
			return err
		}
	}
	return nil
}

// sendRest sends what the pipe holds and nothing after it.
func (o *output) sendRest(p *program) {
	for left := unread(o.fd); left > 0; {
		n := min(left, guest.MaxFrame)
		if p.transfer(o, n) != nil {
			return
		}
		left -= n
	}
}

// transfer sends n bytes that are in the pipe as one frame.
func (p *program) transfer(o *output, n int) error {
	p.writing.Lock()
	defer p.writing.Unlock()
	return p.stream.Transfer(guest.FrameHeader(o.typ, n), n, func(w io.Writer) error {
		if port, ok := w.(*port); ok {
			return port.splice(o.fd, n)
		}
		return copyPipe(w, o.fd, n)
	})
}

// copyPipe writes n bytes that are in the pipe.
func copyPipe(w io.Writer, pipe, n int) error {
	buf := make([]byte, min(n, 64<<10))
	for n > 0 {
		k, err := unix.Read(pipe, buf[:min(n, len(buf))])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if k == 0 {
			return io.ErrUnexpectedEOF
		}
		if _, err := w.Write(buf[:k]); err != nil {
			return err
		}
		n -= k
	}
	return nil
}

// unread is how many bytes a pipe holds.
func unread(pipe int) int {
	n, err := unix.IoctlGetInt(pipe, unix.TIOCINQ)
	if err != nil {
		return 0
	}
	return n
}
