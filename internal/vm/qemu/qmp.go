//go:build linux

package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/vm"
)

// maxMessage bounds one message of QEMU's, in bytes.
const maxMessage = 1 << 20

// qmp is a connection to a machine's monitor
// (https://www.qemu.org/docs/master/interop/qmp-spec.html).
type qmp struct {
	conn  net.Conn
	event func(name string, data json.RawMessage) // called by the reader, in order

	mu      sync.Mutex
	next    int
	waiting map[int]chan reply
	err     error         // why the connection ended
	done    chan struct{} // closed when it has; every event has been told then
}

type reply struct {
	result json.RawMessage
	err    error
}

type message struct {
	QMP    json.RawMessage `json:"QMP"`
	Event  string          `json:"event"`
	Data   json.RawMessage `json:"data"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	ID *int `json:"id"`
}

// greet reads the monitor's greeting and leaves negotiation. It gives
// vm.ErrUnresponsive when none comes until ctx is done. It owns conn.
func greet(ctx context.Context, conn net.Conn, event func(string, json.RawMessage)) (*qmp, error) {
	stop := context.AfterFunc(ctx, func() { conn.SetReadDeadline(time.Unix(1, 0)) })
	q := &qmp{conn: conn, event: event, waiting: map[int]chan reply{}, done: make(chan struct{})}
	r := bufio.NewReaderSize(conn, 64<<10)
	m, err := readMessage(r)
	stopped := stop() // after that no deadline is set any more
	if err != nil || m.QMP == nil || !stopped {
		conn.Close()
		switch {
		case ctx.Err() != nil:
			return nil, vm.ErrUnresponsive
		case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
			return nil, vm.ErrEnded
		}
		return nil, errors.Join(errors.New("the machine's monitor does not greet"), err)
	}
	go q.read(r)
	if err := q.run(ctx, "qmp_capabilities", nil, nil); err != nil {
		q.close()
		return nil, err
	}
	return q, nil
}

// readMessage reads one line of the monitor's.
func readMessage(r *bufio.Reader) (message, error) {
	var m message
	var line []byte
	for {
		part, more, err := r.ReadLine()
		if err != nil {
			return m, err
		}
		if line = append(line, part...); len(line) > maxMessage {
			return m, errors.New("the machine's monitor sends too long a line")
		}
		if !more {
			break
		}
	}
	if err := json.Unmarshal(line, &m); err != nil {
		return m, fmt.Errorf("the machine's monitor sends what is no message: %w", err)
	}
	return m, nil
}

// read hands out what the monitor sends, until the connection ends.
func (q *qmp) read(r *bufio.Reader) {
	for {
		m, err := readMessage(r)
		if err != nil {
			q.fail(err)
			return
		}
		switch {
		case m.Event != "":
			q.event(m.Event, m.Data)
		case m.ID != nil:
			q.mu.Lock()
			done := q.waiting[*m.ID]
			delete(q.waiting, *m.ID)
			q.mu.Unlock()
			if done == nil {
				continue // its caller has given up
			}
			if m.Error != nil {
				done <- reply{err: errors.New(m.Error.Desc)}
			} else {
				done <- reply{result: m.Return}
			}
		}
	}
}

// fail ends every command under way.
func (q *qmp) fail(err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.ECONNRESET) {
		err = vm.ErrEnded
	}
	q.conn.Close()
	defer close(q.done)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.err = err
	for id, done := range q.waiting {
		done <- reply{err: err}
		delete(q.waiting, id)
	}
}

// close ends the connection; no event is told after it.
func (q *qmp) close() {
	q.conn.Close()
	<-q.done
}

// commandDeadline is for commands whose context sets nothing shorter. None of those
// used here takes more than milliseconds.
const commandDeadline = 5 * time.Second

// run runs a command; its result is put into result when that is not nil.
// vm.ErrEnded when the connection has ended, vm.ErrUnresponsive when no answer comes
// in time.
func (q *qmp) run(ctx context.Context, command string, args, result any) error {
	return q.runWith(ctx, command, args, result, nil)
}

// runWith runs a command that takes a file along.
func (q *qmp) runWith(ctx context.Context, command string, args, result any, file *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, commandDeadline)
	defer cancel()
	done := make(chan reply, 1)
	q.mu.Lock()
	if q.err != nil {
		q.mu.Unlock()
		return q.err
	}
	q.next++
	id := q.next
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        int    `json:"id"`
	}{command, args, id})
	if err != nil {
		q.mu.Unlock()
		return err
	}
	q.waiting[id] = done
	deadline, _ := ctx.Deadline()
	q.conn.SetWriteDeadline(deadline)
	if err = q.send(append(line, '\n'), file); err != nil {
		delete(q.waiting, id)
	}
	q.mu.Unlock()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return vm.ErrUnresponsive
	}
	if err != nil {
		return vm.ErrEnded
	}
	select {
	case r := <-done:
		if r.err == nil && result != nil {
			return json.Unmarshal(r.result, result)
		}
		return r.err
	case <-ctx.Done():
		q.mu.Lock()
		delete(q.waiting, id)
		q.mu.Unlock()
		return vm.ErrUnresponsive
	}
}

// send writes a line and, with it, a file's descriptor.
func (q *qmp) send(line []byte, file *os.File) error {
	if file == nil {
		_, err := q.conn.Write(line)
		return err
	}
	socket, ok := q.conn.(*net.UnixConn)
	if !ok {
		return errors.New("the monitor's connection carries no files")
	}
	_, _, err := socket.WriteMsgUnix(line, unix.UnixRights(int(file.Fd())), nil)
	return err
}
