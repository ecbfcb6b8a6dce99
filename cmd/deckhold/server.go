package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// patientPort is the port as a stream that waits while no host is there: the kernel
// says end-of-file then, and nothing tells when that changes.
type patientPort struct{ *os.File }

func (p patientPort) Read(b []byte) (int, error) {
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		n, err := p.File.Read(b)
		if n > 0 || (err != nil && !errors.Is(err, io.EOF)) {
			return n, err
		}
		time.Sleep(wait)
	}
}

// serve answers the host for ever.
func serve(m *machine, token string) error {
	file, err := openPort()
	if err != nil {
		return err
	}
	m.steps.done("channel", "")
	return guest.NewPort(patientPort{file}, token).Serve(func(session *yamux.Session) {
		for {
			stream, err := session.AcceptStream()
			if err != nil {
				return
			}
			go m.answer(session, stream)
		}
	})
}

// answer serves one stream.
func (m *machine) answer(session *yamux.Session, stream net.Conn) {
	defer stream.Close()
	var request guest.Request
	if err := guest.ReadJSON(stream, &request); err != nil {
		refuse(stream, &guest.Error{Code: guest.CodeUsage, Message: "the request cannot be read: " + err.Error()})
		return
	}
	if request.Op == guest.OpExec {
		m.exec(session, stream, request.Args)
		return
	}
	handlers := map[string]func(json.RawMessage) (any, error){
		guest.OpSetup:    m.opSetup,
		guest.OpSync:     func(json.RawMessage) (any, error) { unix.Sync(); return struct{}{}, nil },
		guest.OpClock:    opClock,
		guest.OpStats:    func(json.RawMessage) (any, error) { return stats(), nil },
		guest.OpPowerOff: func(json.RawMessage) (any, error) { go m.powerOff(); return struct{}{}, nil },
	}
	handler := handlers[request.Op]
	if handler == nil {
		refuse(stream, &guest.Error{Code: guest.CodeUsage, Message: fmt.Sprintf("there is no operation %q", request.Op)})
		return
	}
	result, err := handler(request.Args)
	if err != nil {
		refuse(stream, &guest.Error{Code: guest.CodeFailed, Message: err.Error()})
		return
	}
	accept(stream, result)
}

func accept(stream net.Conn, result any) error {
	data, err := json.Marshal(result)
	if err != nil {
		return err
	}
	return guest.WriteJSON(stream, guest.Response{OK: true, Result: data})
}

func refuse(stream net.Conn, e *guest.Error) {
	guest.WriteJSON(stream, guest.Response{Error: e})
}
