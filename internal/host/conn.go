package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/wire"
)

// How long a client may take to say what it wants.
const requestWait = 10 * time.Second

// maxClients bounds the connections served at once.
const maxClients = 1024

// accept serves every connection in its own goroutine.
func (h *Host) accept(ctx context.Context) {
	for {
		conn, err := h.listener.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				// Out of descriptors, most likely: those who are served go first.
				h.log.Warn("cannot accept a client", "error", err)
				time.Sleep(100 * time.Millisecond)
				continue
			}
			return
		}
		h.serving.Add(1)
		go func() {
			defer h.serving.Done()
			defer conn.Close()
			h.clients.Add(1)
			h.stir()
			h.serve(ctx, wire.New(conn))
			h.clients.Add(-1)
			h.stir()
		}()
	}
}

// stir tells the idle clock that something happened.
func (h *Host) stir() {
	select {
	case h.activity <- struct{}{}:
	default:
	}
}

// serve answers one request.
func (h *Host) serve(ctx context.Context, w *wire.Conn) {
	if err := ours(w.Conn); err != nil {
		w.Reply(nil, err)
		return
	}
	if h.clients.Load() > maxClients {
		w.Reply(nil, &api.Error{Kind: api.KindUnavailable, Message: "the host serves too many clients already", Hint: "try again when some have left"})
		return
	}
	w.SetReadDeadline(time.Now().Add(requestWait))
	line, err := w.ReadLine()
	if err != nil {
		if !errors.Is(err, io.EOF) {
			w.Reply(nil, &api.Error{Kind: api.KindUsage, Message: "the request cannot be read: " + err.Error()})
		}
		return
	}
	w.SetReadDeadline(time.Time{})
	var request api.Request
	if err := json.Unmarshal(line, &request); err != nil {
		w.Reply(nil, &api.Error{Kind: api.KindUsage, Message: "the request is not one JSON object a line"})
		return
	}
	if request.V > api.Version {
		w.Reply(nil, &api.Error{Kind: api.KindVersion, Message: fmt.Sprintf("the host speaks protocol version %d, not %d", api.Version, request.V), Hint: "stop it with doz host stop, and start it again with the newer doz"})
		return
	}
	op, known := operations[request.Op]
	if !known || request.V < 1 {
		w.Reply(nil, &api.Error{Kind: api.KindUsage, Message: fmt.Sprintf("there is no operation %q in protocol version %d", request.Op, request.V)})
		return
	}
	op(h, ctx, w, line)
}

// ours refuses another user, root excepted.
func ours(conn net.Conn) error {
	refused := &api.Error{Kind: api.KindUnavailable, Message: "the host is another user's"}
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return refused
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return refused
	}
	var peer *unix.Ucred
	raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err != nil || (peer.Uid != uint32(os.Getuid()) && peer.Uid != 0) {
		return refused
	}
	return nil
}

// splice joins a client's stream with a guest's until one of them ends. Neither is
// looked into. When the guest's ends without an exit the client is told why.
func splice(client *wire.Conn, stream net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The client's end is the program's: closing the stream ends it.
		io.CopyBuffer(onlyWriter{stream}, onlyReader{client}, make([]byte, 256<<10))
		stream.Close()
	}()
	io.CopyBuffer(onlyWriter{client.Conn}, onlyReader{stream}, make([]byte, 256<<10))
	client.Close()
	<-done
}

// The plain faces of connections: their own ReadFrom and WriteTo copy in small
// pieces.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)
