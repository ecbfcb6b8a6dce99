//go:build linux

package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"dozable.com/doz/internal/vm"
)

const greeting = `{"QMP":{"version":{},"capabilities":[]}}` + "\n"

// monitorOf gives a session with a monitor that script plays: it gets each command
// and what to answer with.
func monitorOf(t *testing.T, event func(string, json.RawMessage), script func(command string, id int, w io.Writer)) (*qmp, error) {
	t.Helper()
	ours, theirs := net.Pipe()
	t.Cleanup(func() { theirs.Close() })
	go func() {
		io.WriteString(theirs, greeting)
		lines := bufio.NewScanner(theirs)
		for lines.Scan() {
			var c struct {
				Execute string
				ID      int
			}
			if json.Unmarshal(lines.Bytes(), &c) != nil {
				return
			}
			script(c.Execute, c.ID, theirs)
		}
	}()
	return greet(deadline(t), ours, event)
}

func answer(w io.Writer, id int, rest string) {
	data, _ := json.Marshal(id)
	io.WriteString(w, `{"id":`+string(data)+`,`+rest+"}\n")
}

func TestMonitor(t *testing.T) {
	var events []string
	q, err := monitorOf(t, func(name string, _ json.RawMessage) { events = append(events, name) },
		func(command string, id int, w io.Writer) {
			switch command {
			case "refused":
				answer(w, id, `"error":{"class":"GenericError","desc":"not now"}`)
			case "silent":
			case "garbage":
				io.WriteString(w, "} not a message\n")
			default:
				io.WriteString(w, `{"event":"STOP","data":{}}`+"\n")
				answer(w, id+1000, `"return":"nobody asked"`)
				answer(w, id, `"return":{"status":"running"}`)
			}
		})
	if err != nil {
		t.Fatal(err)
	}
	var status struct{ Status string }
	if err := q.run(deadline(t), "query-status", nil, &status); err != nil || status.Status != "running" {
		t.Errorf("query-status: %+v, %v", status, err)
	}
	if err := q.run(deadline(t), "refused", nil, nil); err == nil || err.Error() != "not now" {
		t.Errorf("a refused command: %v", err)
	}
	short, cancel := context.WithTimeout(deadline(t), 10*time.Millisecond)
	defer cancel()
	if err := q.run(short, "silent", nil, nil); !errors.Is(err, vm.ErrUnresponsive) {
		t.Errorf("a command without an answer: %v", err)
	}
	if err := q.run(deadline(t), "garbage", nil, nil); err == nil {
		t.Error("garbage was an answer")
	}
	if err := q.run(deadline(t), "query-status", nil, nil); err == nil {
		t.Error("a session went on after garbage")
	}
	q.close()
	if len(events) != 2 { // one each with qmp_capabilities and query-status
		t.Errorf("events: %q", events)
	}
}

func TestMonitorThatIsNone(t *testing.T) {
	for name, first := range map[string]string{
		"garbage":  "220 mail.example ESMTP\n",
		"no greet": `{"return":{}}` + "\n",
		"too long": strings.Repeat("x", maxMessage+1),
		"nothing":  "",
	} {
		ours, theirs := net.Pipe()
		go func() {
			io.WriteString(theirs, first)
			theirs.Close()
		}()
		if _, err := greet(deadline(t), ours, nil); err == nil {
			t.Errorf("%s: a session began", name)
		}
	}
}

func FuzzReadMessage(f *testing.F) {
	f.Add([]byte(greeting))
	f.Add([]byte(`{"event":"SHUTDOWN","data":{"guest":true,"reason":"guest-shutdown"},"timestamp":{"seconds":1,"microseconds":2}}` + "\n"))
	f.Add([]byte(`{"id":1,"return":{}}` + "\r\n" + `{"id":2,"error":{"class":"GenericError","desc":"no"}}` + "\n"))
	f.Add([]byte(`{"id":null,"error":null}` + "\n{\n\n"))
	f.Add(bytes.Repeat([]byte("["), 70<<10))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bufio.NewReaderSize(bytes.NewReader(data), 64)
		m := newMachine(vm.Config{}, nil)
		for {
			message, err := readMessage(r)
			if err != nil {
				return
			}
			m.event(message.Event, message.Data)
		}
	})
}
