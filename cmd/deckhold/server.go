package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime/debug"
	"strings"

	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// serve answers the host for ever.
func serve(m *machine, token string) error {
	port, err := openPort()
	if err != nil {
		return err
	}
	m.steps.done("channel", "")
	return guest.NewPort(port, token).Serve(m.answer)
}

// answer serves one stream.
func (m *machine) answer(stream *guest.Stream) {
	defer stream.Close()
	defer survive()
	var request guest.Request
	if err := guest.ReadJSON(stream, &request); err != nil {
		refuse(stream, &guest.Error{Code: guest.CodeUsage, Message: "the request cannot be read: " + err.Error()})
		return
	}
	if request.Op == guest.OpExec {
		m.exec(stream, request.Args)
		return
	}
	if request.Op == guest.OpSessionAttach {
		m.attach(stream, request.Args)
		return
	}
	result, err := m.call(request)
	if err != nil {
		refuse(stream, asError(err))
		return
	}
	accept(stream, result)
}

// survive keeps a fault in one stream from ending PID 1, and with it the machine and
// everything that runs in it. The console tells of it.
func survive() {
	if fault := recover(); fault != nil {
		fmt.Fprintf(os.Stderr, "deckhold: a request failed: %v\n%s", fault, debug.Stack())
	}
}

// call does what one request and one answer are enough for.
func (m *machine) call(request guest.Request) (any, error) {
	switch request.Op {
	case guest.OpSetup:
		return m.opSetup(request.Args)
	case guest.OpSync:
		unix.Sync()
		return struct{}{}, nil
	case guest.OpClock:
		return opClock(request.Args)
	case guest.OpStats:
		return stats(), nil
	case guest.OpPowerOff:
		go m.powerOff()
		return struct{}{}, nil
	}
	if strings.HasPrefix(request.Op, "session.") {
		return m.sessionCall(request.Op, request.Args)
	}
	return nil, &guest.Error{Code: guest.CodeUsage, Message: fmt.Sprintf("there is no operation %q", request.Op)}
}

func accept(stream *guest.Stream, result any) error {
	data, err := json.Marshal(result)
	if err != nil {
		return err
	}
	return guest.WriteJSON(stream, guest.Response{OK: true, Result: data})
}

func refuse(stream *guest.Stream, e *guest.Error) {
	guest.WriteJSON(stream, guest.Response{Error: e})
}
