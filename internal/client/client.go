// Package client is the host protocol as Go functions, one an operation.
//
// It must not print, ask or decide: the command line does.
package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/wire"
)

// Client calls one store's host. Each call has a connection of its own.
type Client struct {
	socket   string
	progress func(api.Progress)
}

// New gives a client of the host at socket. progress may be nil.
func New(socket string, progress func(api.Progress)) *Client {
	if progress == nil {
		progress = func(api.Progress) {}
	}
	return &Client{socket: socket, progress: progress}
}

// How long a host may take to answer a ping, and a started one to be there: it first
// takes over what runs.
const answerWait = 15 * time.Second

const logHint = "see what it has to say in the store's host.log"

var (
	// ErrNoHost means that nobody listens on the socket.
	ErrNoHost = &api.Error{Kind: api.KindUnavailable, Message: "no host runs", Hint: "start one with: doz host start"}

	errSilent = &api.Error{Kind: api.KindUnavailable, Message: "the host does not answer", Hint: logHint}
	errEnded  = &api.Error{Kind: api.KindUnavailable, Message: "the host ended before it answered", Hint: "try again: the next command starts another, which takes over what runs"}
	errLost   = &api.Error{Kind: api.KindUnavailable, Message: "the machine or the host ended while the program ran", Hint: "see what still runs with: doz ls"}
)

// Connect finds the host, or starts one with spawn, which gives a function that
// tells why the started process ended, if it has. A nil spawn starts none.
func (c *Client) Connect(ctx context.Context, spawn func() (ended func() error, err error)) (api.Status, error) {
	status, err := c.Ping(ctx)
	// A host that ended with our ping unanswered was on its way out: the next one
	// waits for it.
	if spawn == nil || !errors.Is(err, ErrNoHost) && !errors.Is(err, errEnded) {
		return status, err
	}
	ended, err := spawn()
	if err != nil {
		return status, &api.Error{Kind: api.KindUnavailable, Message: err.Error()}
	}
	within, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	for {
		if status, err = c.Ping(within); answered(err) {
			return status, err
		}
		if why := ended(); why != nil {
			// Another host may have been quicker, and answers in a moment.
			if status, err = c.Ping(within); answered(err) {
				return status, err
			}
			return status, &api.Error{Kind: api.KindUnavailable, Message: fmt.Sprintf("the host did not start: %v", why), Hint: logHint}
		}
		select {
		case <-within.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return status, ctx.Err()
			}
			return status, errSilent
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// answered says whether a ping's result is a host's, its refusal of us included.
func answered(err error) bool { return err == nil || api.AsError(err).Kind == api.KindVersion }

// open sends a request.
func (c *Client) open(ctx context.Context, op string, args any) (*wire.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.socket)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
			return nil, ErrNoHost
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, &api.Error{Kind: api.KindUnavailable, Message: fmt.Sprintf("cannot reach the host: %v", err)}
	}
	w := wire.New(conn)
	// A host that takes no request may still have said why: its answer tells.
	var broken *net.OpError
	if err := w.Request(op, args); err != nil && !errors.As(err, &broken) {
		conn.Close()
		return nil, &api.Error{Kind: api.KindUsage, Message: err.Error()}
	}
	return w, nil
}

// answer reads up to the reply.
func (c *Client) answer(w *wire.Conn, result any) error {
	for {
		line, err := w.ReadLine()
		if err != nil {
			return lost(err, errEnded)
		}
		var m struct {
			api.Progress
			api.Reply
		}
		if err := json.Unmarshal(line, &m); err != nil {
			return &api.Error{Kind: api.KindUnavailable, Message: "the host sent what is no message"}
		}
		switch {
		case m.Event != "":
			c.progress(m.Progress)
		case m.Reply.Error != nil:
			return m.Reply.Error
		case !m.OK:
			return &api.Error{Kind: api.KindUnavailable, Message: "the host sent what is no answer"}
		case result == nil:
			return nil
		case json.Unmarshal(m.Result, result) != nil:
			return &api.Error{Kind: api.KindUnavailable, Message: "the host sent what is no answer"}
		default:
			return nil
		}
	}
}

// lost is what a broken connection means; ended when it is its end.
func lost(err error, ended *api.Error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return ended
	}
	return &api.Error{Kind: api.KindUnavailable, Message: fmt.Sprintf("the connection to the host broke: %v", err)}
}

// call is one request and its answer. A done ctx closes the connection.
func call[R any](ctx context.Context, c *Client, op string, args any) (R, error) {
	var result R
	w, err := c.open(ctx, op, args)
	if err != nil {
		return result, err
	}
	defer w.Close()
	stop := context.AfterFunc(ctx, func() { w.Close() })
	defer stop()
	err = c.answer(w, &result)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return result, err
}

// Ping asks the host who it is. It does not wait for ever, and refuses a host of
// another protocol version.
func (c *Client) Ping(ctx context.Context) (api.Status, error) {
	within, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	status, err := call[api.Status](within, c, api.OpPing, nil)
	switch {
	case err != nil && errors.Is(ctx.Err(), context.Canceled):
		return status, ctx.Err()
	case err != nil && within.Err() != nil:
		return status, errSilent
	case err == nil && status.ProtocolVersion != api.Version:
		return status, &api.Error{
			Kind:    api.KindVersion,
			Message: fmt.Sprintf("the host is doz %s and speaks protocol version %d, not %d", status.Version, status.ProtocolVersion, api.Version),
			Hint:    fmt.Sprintf("end it, with what runs: kill %d; the next command starts one of this version", status.PID),
		}
	}
	return status, err
}

func (c *Client) Stop(ctx context.Context) (api.StopResult, error) {
	return call[api.StopResult](ctx, c, api.OpStop, nil)
}

func (c *Client) Create(ctx context.Context, r api.CreateRequest) (api.Sandbox, error) {
	return call[api.Sandbox](ctx, c, api.OpCreate, r)
}

func (c *Client) Start(ctx context.Context, name string) (api.StartResult, error) {
	return call[api.StartResult](ctx, c, api.OpStart, api.NameRequest{Name: name})
}

func (c *Client) Shutdown(ctx context.Context, name string) (api.Sandbox, error) {
	return call[api.Sandbox](ctx, c, api.OpShutdown, api.NameRequest{Name: name})
}

func (c *Client) Remove(ctx context.Context, name string) error {
	_, err := call[struct{}](ctx, c, api.OpRemove, api.NameRequest{Name: name})
	return err
}

// List gives every sandbox, in as many answers as it takes.
func (c *Client) List(ctx context.Context) (all []api.Sandbox, err error) {
	for {
		last := ""
		if len(all) > 0 {
			last = all[len(all)-1].Name
		}
		some, err := call[[]api.Sandbox](ctx, c, api.OpList, api.ListRequest{After: last})
		all = append(all, some...)
		if err != nil || len(some) < api.MaxList {
			return all, err
		}
	}
}

func (c *Client) Inspect(ctx context.Context, name string) (api.Sandbox, error) {
	return call[api.Sandbox](ctx, c, api.OpInspect, api.NameRequest{Name: name})
}

func (c *Client) ImportImage(ctx context.Context, r api.ImageImportRequest) (api.Image, error) {
	return call[api.Image](ctx, c, api.OpImageImport, r)
}

func (c *Client) RemoveImage(ctx context.Context, name string) error {
	_, err := call[struct{}](ctx, c, api.OpImageRemove, api.NameRequest{Name: name})
	return err
}

// Events calls each with every event until ctx is done or the host ends, which is
// no error.
func (c *Client) Events(ctx context.Context, name string, each func(json.RawMessage, api.Event)) error {
	return c.follow(ctx, api.OpEvents, api.EventsRequest{Name: name}, func(line []byte) {
		var e api.Event
		if json.Unmarshal(line, &e) == nil {
			each(line, e)
		}
	})
}

// Console calls each with every piece the console grows by, from its beginning,
// until the machine ends or ctx is done.
func (c *Client) Console(ctx context.Context, name string, each func(text string)) error {
	return c.follow(ctx, api.OpConsole, api.ConsoleRequest{Name: name, Follow: true}, func(line []byte) {
		var piece api.ConsoleText
		if json.Unmarshal(line, &piece) == nil {
			each(piece.Text)
		}
	})
}

// follow reads the lines after an ok reply.
func (c *Client) follow(ctx context.Context, op string, args any, each func([]byte)) error {
	w, err := c.open(ctx, op, args)
	if err != nil {
		return err
	}
	defer w.Close()
	stop := context.AfterFunc(ctx, func() { w.Close() })
	defer stop()
	if err := c.answer(w, nil); err != nil {
		return err
	}
	for {
		line, err := w.ReadLine()
		if err != nil {
			return nil
		}
		each(line)
	}
}
