package host

import (
	"context"
	"encoding/json"
	"net"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/wire"
)

// attach joins a session and becomes its stream.
func attach(h *Host, ctx context.Context, w *wire.Conn, line []byte) {
	var request api.AttachRequest
	if err := json.Unmarshal(line, &request); err != nil {
		w.Reply(nil, badArguments(err))
		return
	}
	stream, result, err := h.manager.Attach(ctx, request, show(w))
	h.join(w, request.Name, stream, result, err)
}

// runSession opens a session and, unless it is to be left alone, becomes its stream.
func runSession(h *Host, ctx context.Context, w *wire.Conn, line []byte) {
	var request api.RunRequest
	if err := json.Unmarshal(line, &request); err != nil {
		w.Reply(nil, badArguments(err))
		return
	}
	stream, result, err := h.manager.Run(ctx, request, show(w))
	h.join(w, request.Name, stream, result, err)
}

func show(w *wire.Conn) progress {
	return func(p api.Progress) {
		p.Event = "progress"
		w.WriteJSON(p)
	}
}

// join answers and passes frames on, both ways, until one side ends.
func (h *Host) join(w *wire.Conn, name string, stream net.Conn, result api.AttachResult, err error) {
	if err != nil {
		w.Reply(nil, err)
		return
	}
	if stream == nil {
		w.Reply(result, nil)
		return
	}
	defer stream.Close()
	if w.Reply(result, nil) != nil {
		return
	}
	left := make(chan struct{})
	go func() {
		defer close(left)
		pass(onlyWriter{stream}, onlyReader{w})
		stream.Close() // the client has left
	}()
	if last, err := pass(onlyWriter{w.Conn}, onlyReader{stream}); last != guest.Exit && last != guest.Failure && err == nil {
		select {
		case <-left:
		default:
			h.tellClosing(w, name)
		}
	}
	w.Close()
	<-left
}

// restWait is how long a machine whose session was cut off may take to come to rest.
const restWait = 10 * time.Second

// tellClosing tells a client whose session's stream ended without the session why, so
// that it can wait and come back.
func (h *Host) tellClosing(w *wire.Conn, name string) {
	closing := guest.Closing{Reason: "lost"}
	for end := time.Now().Add(restWait); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		v, err := h.manager.Inspect(name)
		if err != nil {
			closing = guest.Closing{Reason: "rest", Phase: "removed"}
			break
		}
		if v.Phase != api.Running {
			closing = guest.Closing{Reason: "rest", Phase: string(v.Phase)}
			break
		}
		if v.PID != 0 && !v.Unresponsive {
			break // the channel was cut, and a new one can be had
		}
	}
	guest.NewFrameWriter(w.Conn).WriteJSON(guest.Closed, closing)
}
