package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/sandbox"
	"dozable.com/doz/internal/wire"
)

// operation answers one request; line is the whole of it.
type operation func(h *Host, ctx context.Context, w *wire.Conn, line []byte)

// operations is all a host can be asked for.
var operations = map[string]operation{
	api.OpPing:   plain(func(h *Host, _ context.Context, _ struct{}, _ progress) (api.Status, error) { return h.status(), nil }),
	api.OpStatus: plain(func(h *Host, _ context.Context, _ struct{}, _ progress) (api.Status, error) { return h.status(), nil }),
	api.OpStop:   plain(stopHost),
	api.OpCreate: plain(func(h *Host, ctx context.Context, r api.CreateRequest, _ progress) (api.Sandbox, error) {
		return h.manager.Create(ctx, r)
	}),
	api.OpStart: plain(func(h *Host, ctx context.Context, r api.NameRequest, p progress) (api.StartResult, error) {
		return h.manager.Start(ctx, r.Name, p)
	}),
	api.OpWake: plain(func(h *Host, ctx context.Context, r api.NameRequest, p progress) (api.StartResult, error) {
		return h.manager.Wake(ctx, r.Name, p)
	}),
	api.OpPause:     plain(transition((*sandbox.Manager).Pause)),
	api.OpResume:    plain(transition((*sandbox.Manager).Resume)),
	api.OpSleep:     plain(transition((*sandbox.Manager).Sleep)),
	api.OpHibernate: plain(transition((*sandbox.Manager).Hibernate)),
	api.OpFork: plain(func(h *Host, ctx context.Context, r api.ForkRequest, p progress) (api.ForkResult, error) {
		return h.manager.Fork(ctx, r, p)
	}),
	api.OpDuplicate: plain(func(h *Host, ctx context.Context, r api.DuplicateRequest, _ progress) (api.DuplicateResult, error) {
		return h.manager.Duplicate(ctx, r)
	}),
	api.OpPointTake: plain(func(h *Host, ctx context.Context, r api.PointTakeRequest, _ progress) (api.PointResult, error) {
		return h.manager.TakePoint(ctx, r)
	}),
	api.OpPointList: plain(func(h *Host, _ context.Context, r api.NameRequest, _ progress) ([]api.Point, error) {
		return sandbox.Points(h.store, r.Name)
	}),
	api.OpPointFind: plain(func(h *Host, _ context.Context, r api.PointRequest, _ progress) (api.Point, error) {
		return h.manager.FindPoint(r.Name, r.Point)
	}),
	api.OpPointRevert: plain(func(h *Host, ctx context.Context, r api.PointRequest, _ progress) (api.PointResult, error) {
		return h.manager.Revert(ctx, r)
	}),
	api.OpPointFork: plain(func(h *Host, ctx context.Context, r api.PointForkRequest, _ progress) (api.Sandbox, error) {
		return h.manager.ForkPoint(ctx, r)
	}),
	api.OpPointRemove: plain(func(h *Host, ctx context.Context, r api.PointRequest, _ progress) (api.Point, error) {
		return h.manager.RemovePoint(ctx, r)
	}),
	api.OpReset: plain(transition((*sandbox.Manager).Reset)),
	api.OpShutdown: plain(func(h *Host, ctx context.Context, r api.NameRequest, _ progress) (api.Sandbox, error) {
		return h.manager.Shutdown(ctx, r.Name)
	}),
	api.OpRemove: plain(removeSandbox),
	api.OpList: plain(func(h *Host, _ context.Context, r api.ListRequest, _ progress) ([]api.Sandbox, error) {
		return h.manager.ListAfter(r.After, api.MaxList), nil
	}),
	api.OpInspect: plain(func(h *Host, _ context.Context, r api.NameRequest, _ progress) (api.Sandbox, error) {
		return h.manager.Inspect(r.Name)
	}),
	api.OpImageImport: plain(importImage),
	api.OpImageRemove: plain(removeImage),
	api.OpTemplate:    plain(makeTemplate),
	api.OpImageList:   plain(func(h *Host, _ context.Context, _ struct{}, _ progress) ([]api.Image, error) { return h.listImages() }),
	api.OpSessions: plain(func(h *Host, ctx context.Context, r api.SessionsRequest, _ progress) (api.SessionList, error) {
		return h.manager.Sessions(ctx, r)
	}),
	api.OpSessionEnd: plain(func(h *Host, ctx context.Context, r api.SessionRequest, _ progress) (api.Session, error) {
		return h.manager.EndSession(ctx, r)
	}),
	api.OpSessionRestart: plain(func(h *Host, ctx context.Context, r api.SessionRequest, _ progress) (api.Session, error) {
		return h.manager.RestartSession(ctx, r)
	}),
	api.OpAttach:  attach,
	api.OpRun:     runSession,
	api.OpExec:    execute,
	api.OpEvents:  events,
	api.OpConsole: console,
}

type progress = func(api.Progress)

// plain makes an operation of a function from arguments to a result. A client that
// leaves cancels it.
func plain[A, R any](f func(*Host, context.Context, A, progress) (R, error)) operation {
	return func(h *Host, ctx context.Context, w *wire.Conn, line []byte) {
		var args A
		if err := json.Unmarshal(line, &args); err != nil {
			w.Reply(nil, badArguments(err))
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() {
			// Nothing more is expected of the client: a byte or an end is its leaving.
			w.Read(make([]byte, 1))
			cancel()
		}()
		result, err := f(h, ctx, args, func(p api.Progress) {
			p.Event = "progress"
			w.WriteJSON(p)
		})
		w.Reply(result, err)
	}
}

// transition is a function that takes a sandbox to another phase.
func transition(f func(*sandbox.Manager, context.Context, string) (api.Transition, error)) func(*Host, context.Context, api.NameRequest, progress) (api.Transition, error) {
	return func(h *Host, ctx context.Context, r api.NameRequest, _ progress) (api.Transition, error) {
		return f(h.manager, ctx, r.Name)
	}
}

func badArguments(err error) error {
	return &api.Error{Kind: api.KindUsage, Message: "the request's fields cannot be read: " + err.Error()}
}

// stopHost brings every sandbox to rest, then answers; the host ends after it.
func stopHost(h *Host, _ context.Context, _ api.StopRequest, _ progress) (api.StopResult, error) {
	h.stop()
	<-h.ended
	return api.StopResult{Sandboxes: append([]api.StopRow{}, h.rows...)}, nil
}

// execute starts a program and becomes its stream.
func execute(h *Host, ctx context.Context, w *wire.Conn, line []byte) {
	var request api.ExecRequest
	if err := json.Unmarshal(line, &request); err != nil {
		w.Reply(nil, badArguments(err))
		return
	}
	stream, result, err := h.manager.Exec(ctx, request, func(p api.Progress) {
		p.Event = "progress"
		w.WriteJSON(p)
	})
	if err != nil {
		w.Reply(nil, err)
		return
	}
	defer stream.Close()
	if w.Reply(result, nil) == nil {
		splice(w, stream)
	}
}

// events streams what happens until the client leaves or the host ends.
func events(h *Host, ctx context.Context, w *wire.Conn, line []byte) {
	var request api.EventsRequest
	if err := json.Unmarshal(line, &request); err != nil {
		w.Reply(nil, badArguments(err))
		return
	}
	if request.Name != "" {
		if _, err := h.manager.Inspect(request.Name); err != nil {
			w.Reply(nil, err)
			return
		}
	}
	stream, cancel := h.manager.Subscribe(request.Name)
	defer cancel()
	if w.Reply(struct{}{}, nil) != nil {
		return
	}
	left := leaving(w)
	for {
		select {
		case e := <-stream:
			if w.WriteJSON(e) != nil {
				return
			}
		case <-left:
			return
		case <-ctx.Done():
			return
		}
	}
}

// leaving is closed when the client closes its end.
func leaving(w *wire.Conn) <-chan struct{} {
	left := make(chan struct{})
	go func() {
		w.Read(make([]byte, 1))
		close(left)
	}()
	return left
}

// How often a followed console is looked at.
const consoleInterval = 50 * time.Millisecond

// console streams the latest boot's console while its machine runs.
func console(h *Host, ctx context.Context, w *wire.Conn, line []byte) {
	var request api.ConsoleRequest
	if err := json.Unmarshal(line, &request); err != nil {
		w.Reply(nil, badArguments(err))
		return
	}
	if !request.Follow {
		boot, err := sandbox.Boot(h.store, request.Name, request.Boot)
		w.Reply(boot, err)
		return
	}
	if _, err := sandbox.Boot(h.store, request.Name, request.Boot); err != nil {
		w.Reply(nil, err)
		return
	}
	file, err := os.Open(sandbox.ConsoleFile(h.store, request.Name, request.Boot))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.Reply(nil, fmt.Errorf("cannot read the console of sandbox %q: %w", request.Name, err))
		return
	}
	defer file.Close()
	if w.Reply(struct{}{}, nil) != nil {
		return
	}
	h.follow(ctx, w, file, request.Name)
}

// follow sends a growing file until the sandbox's machine has ended.
func (h *Host) follow(ctx context.Context, w *wire.Conn, file *os.File, name string) {
	left := leaving(w)
	buf := make([]byte, 32<<10)
	for {
		v, err := h.manager.Inspect(name)
		live := err == nil && v.PID != 0
		for {
			n, err := file.Read(buf)
			if n > 0 && w.WriteJSON(api.ConsoleText{Event: "console", Text: string(buf[:n])}) != nil {
				return
			}
			if n == 0 || err != nil {
				break
			}
		}
		if !live {
			return
		}
		select {
		case <-left:
			return
		case <-ctx.Done():
			return
		case <-time.After(consoleInterval):
		}
	}
}
