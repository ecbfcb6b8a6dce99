package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/dns/dnsmessage"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"dozable.com/doz/internal/guest"
)

// A new stream takes the place of the old one and connections go on over it.
func TestAttachAgain(t *testing.T) {
	w, n, g := start(t, "allow 93.184.216.34")
	w.serve(t, "93.184.216.34:7", echo)
	conn, err := g.dial("93.184.216.34", 7)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		fmt.Fprintf(conn, "round %d\n", i)
		buf := make([]byte, 8)
		if _, err := io.ReadFull(conn, buf); err != nil || string(buf) != fmt.Sprintf("round %d\n", i) {
			t.Fatalf("%q, %v", buf, err)
		}
		if i == 1 {
			n.Detach()
		}
		g.plug(t, n)
		if !n.Attached() {
			t.Fatal("not attached")
		}
	}
}

// A sandbox's next network knows the names that its programs have resolved; what it does
// not know is its connections, and those end with a reset.
func TestNextNetwork(t *testing.T) {
	w, n, g := start(t, "allow good.example")
	w.name("good.example", "93.184.216.34", "2606:2800::34")
	for _, a := range []string{"93.184.216.34", "2606:2800::34"} {
		w.serve(t, net.JoinHostPort(a, "7"), echo)
	}
	g.resolve(t, "good.example", dnsmessage.TypeA)
	var open []guest.Connection
	var idle []*gonet.TCPConn
	for _, a := range []string{"93.184.216.34", "2606:2800::34"} {
		conn, err := g.dial(a, 7)
		if err != nil {
			t.Fatal(err)
		}
		idle = append(idle, conn)
		local := conn.LocalAddr().(*net.TCPAddr).AddrPort()
		open = append(open, guest.Connection{Local: netip.AddrPortFrom(local.Addr().Unmap(), local.Port()), Remote: netip.AddrPortFrom(netip.MustParseAddr(a), 7)})
	}
	c := w.config(rules(t, "allow good.example"))
	c.State = n.State()
	n.Detach() // as when the machine has been saved: the guest hears of nothing
	n.Close()
	next := w.network(t, c)
	if diff := cmp.Diff(c.State, next.State(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	g.plug(t, next)
	next.Revive(open)
	for _, conn := range idle {
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := conn.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
			t.Errorf("a connection that waits: %v", err)
		}
	}
	if conn, err := g.dial("93.184.216.34", 7); err != nil {
		t.Error("an address that was resolved before:", err)
	} else {
		conn.Close()
	}
}

// A published port leads into the guest, on both loopbacks; a taken one says who has it;
// a connection wakes a sandbox.
func TestPublishedPort(t *testing.T) {
	w := newWorld()
	c := w.config(rules(t))
	var n *Network
	var g *guestStack
	woken := make(chan struct{}, 10)
	c.Wake = func(context.Context) error {
		woken <- struct{}{}
		g.plug(t, n)
		return nil
	}
	n = w.network(t, c)
	g = bootGuest(t, n)
	l, err := gonet.ListenTCP(g.stack, full(Guest4, 80), protocolOf(Guest4))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { defer conn.Close(); echo(conn) }()
		}
	}()
	port := freePort(t)
	p := PortSpec{Host: port, Guest: 80}
	if err := n.Publish(p); err != nil {
		t.Fatal(err)
	}
	n.Detach()
	for _, loopback := range []string{"127.0.0.1", "::1"} {
		conn, err := net.Dial("tcp", net.JoinHostPort(loopback, fmt.Sprint(port)))
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		io.WriteString(conn, "in")
		conn.(*net.TCPConn).CloseWrite()
		if got, err := io.ReadAll(conn); string(got) != "in" || err != nil {
			t.Errorf("%s: %q, %v", loopback, got, err)
		}
		conn.Close()
	}
	if len(woken) != 1 {
		t.Errorf("woken %d times", len(woken))
	}
	if err := n.Publish(p); !errors.Is(err, ErrPublished) {
		t.Error(err)
	}
	other := w.network(t, w.config(rules(t)))
	if err := other.Publish(p); err == nil || !strings.Contains(err.Error(), "is taken by network.test (process ") {
		t.Errorf("a taken port: %v", err)
	}
	if diff := cmp.Diff([]PortSpec{p}, n.Published(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	n.Unpublish(p)
	if _, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after it was taken back: %v", err)
	}
	// Where nobody listens inside, the connection is reset.
	closed := PortSpec{Host: port, Guest: 81}
	if err := n.Publish(closed); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err == nil { // else it was reset already
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		_, err = conn.Read(make([]byte, 1))
		conn.Close()
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a port where nobody listens: %v", err)
	}
}

// Datagrams to a published port get their answers.
func TestPublishedDatagrams(t *testing.T) {
	_, n, g := start(t)
	at := full(Guest4, 53)
	inside, err := gonet.DialUDP(g.stack, &at, nil, protocolOf(Guest4))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { inside.Close() })
	go func() {
		buf := make([]byte, 2000)
		for {
			size, from, err := inside.ReadFrom(buf)
			if err != nil {
				return
			}
			inside.WriteTo(buf[:size], from)
		}
	}()
	p := PortSpec{Host: freePort(t), Guest: 53, UDP: true}
	if err := n.Publish(p); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		conn, err := net.Dial("udp", fmt.Sprintf("127.0.0.1:%d", p.Host))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		io.WriteString(conn, "ping")
		buf := make([]byte, 10)
		if size, err := conn.Read(buf); err != nil || string(buf[:size]) != "ping" {
			t.Errorf("%q, %v", buf[:size], err)
		}
	}
}

// A service of this computer's loopback is reached at the gateway once it is offered.
func TestHostService(t *testing.T) {
	w, n, g := start(t)
	w.serve(t, "127.0.0.1:5432", echo)
	if _, err := g.dial(Gateway4.String(), 5432); err == nil {
		t.Fatal("reached before it was offered")
	}
	n.SetHostServices([]uint16{5432})
	conn, err := g.dial(Gateway6.String(), 5432)
	if err != nil {
		t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	io.WriteString(conn, "select")
	if _, err := io.ReadFull(conn, make([]byte, 6)); err != nil {
		t.Error(err)
	}
	conn.Close()
	w.find(t, "service", func(r Record) bool { return r.Host == HostName && r.Verdict == "allow" && r.Port == 5432 })
}

func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return uint16(l.Addr().(*net.TCPAddr).Port)
}
