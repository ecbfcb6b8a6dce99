package network

import (
	"bytes"
	"crypto/rand"
	"io"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/dns/dnsmessage"
)

// An allowed name is resolved, connected to, and carried whole in both directions, over
// IPv4 and IPv6.
func TestAllowedNameIsCarried(t *testing.T) {
	w, _, g := start(t, "allow good.example")
	w.name("good.example", "93.184.216.34", "2606:2800:21f::1")
	for _, address := range []string{"93.184.216.34:7", "[2606:2800:21f::1]:7"} {
		w.serve(t, address, echo)
	}
	if diff := cmp.Diff([]string{"93.184.216.34"}, addrs(g.resolve(t, "good.example", dnsmessage.TypeA))); diff != "" {
		t.Fatal(diff)
	}
	if diff := cmp.Diff([]string{"2606:2800:21f::1"}, addrs(g.resolve(t, "good.example", dnsmessage.TypeAAAA))); diff != "" {
		t.Fatal(diff)
	}
	for _, addr := range []string{"93.184.216.34", "2606:2800:21f::1"} {
		conn, err := g.dial(addr, 7)
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		sent := make([]byte, 3<<20)
		rand.Read(sent)
		go func() {
			conn.Write(sent)
			conn.CloseWrite()
		}()
		got, err := io.ReadAll(conn)
		if err != nil || !bytes.Equal(got, sent) {
			t.Fatalf("%s: %d bytes of %d came back, %v", addr, len(got), len(sent), err)
		}
		conn.Close()
		r := w.find(t, addr, func(r Record) bool { return r.Address == addr && r.Verdict == "allow" })
		want := Record{Time: r.Time, Protocol: "tcp", Host: "good.example", Address: addr, Port: 7, Verdict: "allow", Rule: "allow good.example", Sent: 3 << 20, Received: 3 << 20, Millis: r.Millis}
		if diff := cmp.Diff(want, r); diff != "" {
			t.Error(diff)
		}
	}
}
