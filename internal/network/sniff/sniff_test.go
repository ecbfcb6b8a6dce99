package sniff

import (
	"crypto/tls"
	"encoding/binary"
	"net"
	"strings"
	"testing"
	"time"
)

// greeting is a real ClientHello.
func greeting(t testing.TB, name string) []byte {
	t.Helper()
	client, server := net.Pipe()
	defer client.Close()
	go tls.Client(client, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
	server.SetDeadline(time.Now().Add(10 * time.Second))
	buf := make([]byte, 4096)
	size, err := server.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:size]
}

// split spreads a greeting's message over records of at most size bytes.
func split(hello []byte, size int) []byte {
	var out []byte
	for message := hello[recordHeader:]; len(message) > 0; {
		part := message[:min(size, len(message))]
		message = message[len(part):]
		out = append(out, TLSByte, 3, 1)
		out = binary.BigEndian.AppendUint16(out, uint16(len(part)))
		out = append(out, part...)
	}
	return out
}

func TestBegin(t *testing.T) {
	hello := greeting(t, "good.example")
	unnamed := greeting(t, "")
	two := append([]byte(nil), hello...)
	for _, c := range []struct {
		what string
		data string
		want Result
	}{
		{"a greeting", string(hello), Result{TLS, "good.example"}},
		{"one without a name", string(unnamed), Result{TLS, ""}},
		{"one in records of 7 bytes", string(split(hello, 7)), Result{TLS, "good.example"}},
		{"one in records of 1 byte", string(split(hello, 1)), Result{TLS, "good.example"}},
		{"with more after it", string(two) + "more", Result{TLS, "good.example"}},
		{"cut short", string(hello[:100]), Result{More, ""}},
		{"another message", "\x16\x03\x01\x00\x04\x02\x00\x00\x00", Result{Bad, ""}},
		{"an empty record", "\x16\x03\x01\x00\x00", Result{Bad, ""}},
		{"another record first", string(split(hello, 100)[:105]) + "\x15\x03\x01\x00\x01a", Result{Bad, ""}},
		{"no TLS", "\x16\x01\x02\x03\x04", Result{Other, ""}},
		{"a request", "GET / HTTP/1.1\r\nHost: x\r\n", Result{HTTP, ""}},
		{"lines before it", "\r\n\n\rGET / HTTP/1.1\r\n", Result{HTTP, ""}},
		{"bare line feed", "get /x http/1.0\n", Result{HTTP, ""}},
		{"tabs", "GET\t/\tHTTP/1.1\n", Result{HTTP, ""}},
		{"spaces in its target", "GET /a b c HTTP/1.1\n", Result{HTTP, ""}},
		{"HTTP/2's preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Result{HTTP, ""}},
		{"a method of its own", "X-Y!z / HTTP/9.9\r\n", Result{HTTP, ""}},
		{"its first bytes", "GET /", Result{More, ""}},
		{"a line without end", "GET /" + strings.Repeat("a", firstRequestLine), Result{HTTP, ""}},
		{"SMTP", "EHLO x\r\n", Result{Other, ""}},
		{"SSH", "SSH-2.0-x\r\n", Result{Other, ""}},
		{"Redis", "*1\r\n$4\r\nPING\r\n", Result{Other, ""}},
		{"PostgreSQL", "\x00\x00\x00\x08\x04\xd2\x16\x2f", Result{Other, ""}},
		{"a long word", strings.Repeat("A", 70), Result{Other, ""}},
		{"nothing", "", Result{More, ""}},
	} {
		if got := Begin([]byte(c.data), false); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.what, got, c.want)
		}
	}
	if got := Begin(hello[:100], true); got.Protocol != Bad {
		t.Errorf("a greeting that ends early: %+v", got)
	}
	if got := Begin(make([]byte, 0), true); got.Protocol != Other {
		t.Errorf("nothing at all: %+v", got)
	}
	// A message that claims megabytes is not waited for.
	if got := Begin([]byte("\x16\x03\x01\x00\x04\x01\xff\xff\xff"), false); got.Protocol != Bad {
		t.Errorf("a giant greeting: %+v", got)
	}
}

// No two names, and none with something hidden behind it.
func TestServerNameForms(t *testing.T) {
	hello := func(extensions ...[]byte) []byte {
		body := append(make([]byte, helloFixed), 0, 0, 2, 0x13, 1, 1, 0)
		var all []byte
		for _, e := range extensions {
			all = append(all, e...)
		}
		body = append(binary.BigEndian.AppendUint16(body, uint16(len(all))), all...)
		message := append([]byte{messageHello, 0, byte(len(body) >> 8), byte(len(body))}, body...)
		return append([]byte{TLSByte, 3, 1, byte(len(message) >> 8), byte(len(message))}, message...)
	}
	name := func(names ...string) []byte {
		var list []byte
		for _, n := range names {
			list = append(append(list, 0, 0, byte(len(n))), n...)
		}
		e := append([]byte{0, byte(len(list))}, list...)
		return append([]byte{0, 0, 0, byte(len(e))}, e...)
	}
	for _, c := range []struct {
		what string
		data []byte
		want Result
	}{
		{"one", hello(name("A.Example.")), Result{TLS, "a.example"}},
		{"two in one", hello(name("a.example", "b.example")), Result{Bad, ""}},
		{"two extensions", hello(name("a.example"), name("b.example")), Result{Bad, ""}},
		{"a zero byte", hello(name("a.example\x00.b.example")), Result{Bad, ""}},
		{"an empty one", hello(name("")), Result{Bad, ""}},
		{"only a dot", hello(name(".")), Result{Bad, ""}},
		{"none", hello(), Result{TLS, ""}},
		{"a length too long", append(hello(name("a.example")[:8]), 0), Result{Bad, ""}},
	} {
		if got := Begin(c.data, false); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.what, got, c.want)
		}
	}
}

func TestQUIC(t *testing.T) {
	initial := append([]byte{0xc0, 0, 0, 0, 1}, make([]byte, 1195)...)
	if !QUIC(initial) || QUIC(initial[:1199]) || QUIC(make([]byte, 1300)) || QUIC(nil) {
		t.Error("QUIC's first datagram is not told from others")
	}
}

// A decision stands: whatever follows, the same name comes out, and bytes that come in
// pieces end in the same decision as at once.
func FuzzBegin(f *testing.F) {
	f.Add(greeting(f, "good.example"))
	f.Add(split(greeting(f, "good.example"), 50))
	f.Add([]byte("GET / HTTP/1.1\r\nHost: good.example\r\n\r\n"))
	f.Add([]byte("\r\n\r\nPOST"))
	f.Fuzz(func(t *testing.T, data []byte) {
		data = data[:min(len(data), 2048)]
		whole := Begin(data, false)
		for i := 0; i < len(data); i += 1 + len(data)/32 {
			if early := Begin(data[:i], false); early.Protocol != More && early != whole {
				t.Fatalf("%+v after %d bytes, %+v after %d", early, i, whole, len(data))
			}
		}
		if end := Begin(data, true); end.Protocol == More || whole.Protocol != More && end != whole {
			t.Fatalf("%+v, and at the end %+v", whole, end)
		}
		QUIC(data)
	})
}
