package client

import (
	"context"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
	"dozable.com/doz/internal/wire"
)

func (c *Client) Sessions(ctx context.Context, r api.SessionsRequest) (api.SessionList, error) {
	return call[api.SessionList](ctx, c, api.OpSessions, r)
}

func (c *Client) EndSession(ctx context.Context, r api.SessionRequest) (api.Session, error) {
	return call[api.Session](ctx, c, api.OpSessionEnd, r)
}

func (c *Client) RestartSession(ctx context.Context, r api.SessionRequest) (api.Session, error) {
	return call[api.Session](ctx, c, api.OpSessionRestart, r)
}

// RunDetached opens a session and leaves it alone.
func (c *Client) RunDetached(ctx context.Context, r api.RunRequest) (api.AttachResult, error) {
	r.Detach = true
	return call[api.AttachResult](ctx, c, api.OpRun, r)
}

// Viewer is a connection to a session. Next is for one goroutine, everything else for
// any.
type Viewer struct {
	conn   *wire.Conn
	frames *guest.FrameReader
	send   sender
}

// Attach joins a session; Run opens one. Done ctx ends what has not answered yet.
func (c *Client) Attach(ctx context.Context, r api.AttachRequest) (*Viewer, api.AttachResult, error) {
	return c.join(ctx, api.OpAttach, r)
}

func (c *Client) Run(ctx context.Context, r api.RunRequest) (*Viewer, api.AttachResult, error) {
	return c.join(ctx, api.OpRun, r)
}

func (c *Client) join(ctx context.Context, op string, request any) (*Viewer, api.AttachResult, error) {
	var result api.AttachResult
	w, err := c.open(ctx, op, request)
	if err != nil {
		return nil, result, err
	}
	stop := context.AfterFunc(ctx, func() { w.Close() })
	err = c.answer(w, &result)
	if !stop() && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		w.Close()
		return nil, result, err
	}
	return &Viewer{conn: w, frames: guest.NewFrameReader(w), send: sender{frames: guest.NewFrameWriter(w.Conn)}}, result, nil
}

// Next gives the next frame. Its payload is valid until the next call.
func (v *Viewer) Next() (typ byte, payload []byte, err error) { return v.frames.Read() }

// Type sends input.
func (v *Viewer) Type(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), guest.MaxFrame)
		if err := v.send.send(guest.Stdin, b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// Resize tells the terminal's size, and has the screen drawn for it.
func (v *Viewer) Resize(cols, rows int) error {
	return v.send.json(guest.Resize, guest.Size{Cols: cols, Rows: rows})
}

// Hold stops what arrives, or has the screen drawn and what follows sent again.
func (v *Viewer) Hold(on bool) error { return v.send.json(guest.Hold, guest.Switch{On: on}) }

// Close leaves the session, which goes on.
func (v *Viewer) Close() error { return v.conn.Close() }

func (s *sender) json(typ byte, value any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.frames.WriteJSON(typ, value)
}
