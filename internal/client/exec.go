package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"dozable.com/doz/internal/api"
	"dozable.com/doz/internal/guest"
)

// IO is where a program's bytes come from and go to. A nil Stdin is no input.
type IO struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Signals        <-chan string // names without SIG, sent on to the program
}

// Exec runs a program to its end. started is called once it runs. The error is of
// ours; how the program ended is in the status.
func (c *Client) Exec(ctx context.Context, r api.ExecRequest, streams IO, started func(api.ExecResult)) (guest.ExitStatus, error) {
	r.Stdin = streams.Stdin != nil
	w, err := c.open(ctx, api.OpExec, r)
	if err != nil {
		return guest.ExitStatus{}, err
	}
	defer w.Close()
	stop := context.AfterFunc(ctx, func() { w.Close() })
	defer stop()
	var result api.ExecResult
	if err := c.answer(w, &result); err != nil {
		return guest.ExitStatus{}, err
	}
	started(result)

	send := &sender{frames: guest.NewFrameWriter(w.Conn)}
	if streams.Stdin != nil {
		go send.input(streams.Stdin)
	}
	done := make(chan struct{})
	defer close(done)
	go send.signals(streams.Signals, done)
	status, err := receive(guest.NewFrameReader(w), streams)
	if errors.Is(err, errLost) {
		err = c.whyLost(r.Name)
	}
	return status, err
}

// whyLost says why a program's stream broke, as far as can be seen now.
func (c *Client) whyLost(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), answerWait)
	defer cancel()
	v, err := c.Inspect(ctx, name)
	if err != nil {
		return errLost
	}
	e := *errLost
	switch v.Phase {
	case api.Asleep, api.Hibernated:
		e.Message = fmt.Sprintf("sandbox %q is %s; the program goes on in it when it wakes, unheard", name, v.Phase)
		e.Hint = "wake it with: doz wake " + name
	case api.Off, api.Failed:
		e.Message = fmt.Sprintf("sandbox %q ended while the program ran", name)
		e.Hint = "see why with: doz inspect " + name
	}
	return &e
}

// receive writes out what arrives until the program's end does.
func receive(frames *guest.FrameReader, streams IO) (guest.ExitStatus, error) {
	for {
		typ, payload, err := frames.Read()
		if err != nil {
			return guest.ExitStatus{}, lost(err, errLost)
		}
		switch typ {
		case guest.Stdout:
			_, err = streams.Stdout.Write(payload)
		case guest.Stderr:
			_, err = streams.Stderr.Write(payload)
		case guest.Exit:
			var status guest.ExitStatus
			if err := json.Unmarshal(payload, &status); err != nil {
				return status, &api.Error{Kind: api.KindFailed, Message: "the guest told no exit code"}
			}
			return status, nil
		case guest.Failure:
			var e api.Error
			if json.Unmarshal(payload, &e) != nil || e.Message == "" {
				e = api.Error{Kind: api.KindFailed, Message: "the sandbox ended while the program ran"}
			}
			return guest.ExitStatus{}, &e
		}
		if err != nil {
			// Whoever reads our output is gone: the program is told by our leaving.
			return guest.ExitStatus{}, err
		}
	}
}

// sender sends input and signals, one frame at a time.
type sender struct {
	mu     sync.Mutex
	frames *guest.FrameWriter
}

func (s *sender) input(r io.Reader) {
	buf := make([]byte, guest.MaxFrame)
	for {
		n, err := r.Read(buf)
		if n > 0 && s.send(guest.Stdin, buf[:n]) != nil {
			return
		}
		if err != nil {
			s.send(guest.Stdin, nil)
			return
		}
	}
}

func (s *sender) signals(names <-chan string, done <-chan struct{}) {
	for {
		select {
		case name := <-names:
			s.send(guest.Signal, []byte(name))
		case <-done:
			return
		}
	}
}

func (s *sender) send(typ byte, payload []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.frames.Write(typ, payload)
}
