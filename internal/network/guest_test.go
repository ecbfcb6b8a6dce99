package network

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"dozable.com/doz/internal/network/policy"
)

var guestMAC = net.HardwareAddr{0x02, 0, 0, 0, 0, 0x10}

// guestStack plays the machine: a stack of its own at the other end of the frames.
type guestStack struct {
	stack *stack.Stack
	card  *channel.Endpoint
	conn  net.Conn // our end of the stream

	mu sync.Mutex // guards writes of whole frames
}

// bootGuest attaches a guest to a network.
func bootGuest(t testing.TB, n *Network) *guestStack {
	t.Helper()
	g := &guestStack{
		card: channel.New(4096, MTU+header.EthernetMinimumSize, tcpip.LinkAddress(guestMAC)),
		stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{arp.NewProtocol, ipv4.NewProtocol, ipv6.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
		}),
	}
	sack := tcpip.TCPSACKEnabled(true)
	g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack)
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: 1 << 20, Max: 8 << 20}
	g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &receive)
	send := tcpip.TCPSendBufferSizeRangeOption{Min: 4096, Default: 1 << 20, Max: 8 << 20}
	g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &send)
	if err := g.stack.CreateNIC(1, ethernet.New(g.card)); err != nil {
		t.Fatal(err)
	}
	for _, a := range []struct {
		addr netip.Addr
		bits int
	}{{Guest4, Bits4}, {Guest6, Bits6}} {
		g.stack.AddProtocolAddress(1, tcpip.ProtocolAddress{Protocol: protocolOf(a.addr), AddressWithPrefix: tcpip.AddressWithPrefix{Address: stackAddr(a.addr), PrefixLen: a.bits}}, stack.AddressProperties{})
	}
	g.stack.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, Gateway: stackAddr(Gateway4), NIC: 1},
		{Destination: header.IPv6EmptySubnet, Gateway: stackAddr(Gateway6), NIC: 1},
	})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for {
			p := g.card.ReadContext(ctx)
			if p == nil {
				return
			}
			v := p.ToView()
			p.DecRef()
			g.send(v.AsSlice())
			v.Release()
		}
	}()
	g.plug(t, n)
	t.Cleanup(func() {
		g.conn.Close()
		g.stack.Close()
		g.stack.Wait()
		cancel()
	})
	return g
}

// plug connects the guest to a network, as a wake or an adoption does.
func (g *guestStack) plug(t testing.TB, n *Network) {
	t.Helper()
	ours, theirs := socketPair(t)
	g.mu.Lock()
	if g.conn != nil {
		g.conn.Close()
	}
	g.conn = ours
	g.mu.Unlock()
	n.Attach(theirs)
	go func() {
		in := bufio.NewReaderSize(ours, 256<<10)
		for {
			frame, err := readTestFrame(in)
			if err != nil {
				return
			}
			p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
			g.card.InjectInbound(0, p)
			p.DecRef()
		}
	}()
}

func readTestFrame(in *bufio.Reader) ([]byte, error) {
	var prefix [4]byte
	if _, err := io.ReadFull(in, prefix[:]); err != nil {
		return nil, err
	}
	frame := make([]byte, binary.BigEndian.Uint32(prefix[:]))
	_, err := io.ReadFull(in, frame)
	return frame, err
}

// send sends one frame.
func (g *guestStack) send(frame []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	framed := append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(frame)), uint32(len(frame))), frame...)
	g.conn.Write(framed)
}

// socketPair is a connected pair of Unix sockets.
func socketPair(t testing.TB) (net.Conn, net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		conns[i], err = net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	return conns[0], conns[1]
}

func full(a netip.Addr, port uint16) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: 1, Addr: stackAddr(a), Port: port}
}

// dial connects from inside.
func (g *guestStack) dial(to string, port uint16) (*gonet.TCPConn, error) {
	a := netip.MustParseAddr(to)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return gonet.DialContextTCP(ctx, g.stack, full(a, port), protocolOf(a))
}

func (g *guestStack) dialUDP(t testing.TB, to string, port uint16) *gonet.UDPConn {
	t.Helper()
	a := netip.MustParseAddr(to)
	remote := full(a, port)
	conn, err := gonet.DialUDP(g.stack, nil, &remote, protocolOf(a))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// query builds a DNS query.
func query(name string, kind dnsmessage.Type) []byte {
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name + "."), Type: kind, Class: dnsmessage.ClassINET}},
	}
	b, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return b
}

// resolve asks the gateway for a name's records, over UDP.
func (g *guestStack) resolve(t testing.TB, name string, kind dnsmessage.Type) dnsmessage.Message {
	t.Helper()
	conn := g.dialUDP(t, Gateway4.String(), 53)
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := conn.Write(query(name, kind)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	size, err := conn.Read(buf)
	if err != nil {
		t.Fatalf("no answer for %s: %v", name, err)
	}
	var m dnsmessage.Message
	if err := m.Unpack(buf[:size]); err != nil {
		t.Fatal(err)
	}
	return m
}

// addrs are the addresses in an answer.
func addrs(m dnsmessage.Message) []string {
	var all []string
	for _, a := range m.Answers {
		switch body := a.Body.(type) {
		case *dnsmessage.AResource:
			all = append(all, netip.AddrFrom4(body.A).String())
		case *dnsmessage.AAAAResource:
			all = append(all, netip.AddrFrom16(body.AAAA).String())
		}
	}
	return all
}

// world plays the Internet: names, and what listens where, on this computer's loopback.
type world struct {
	mu      sync.Mutex
	zone    map[string][]netip.Addr
	records map[string][]dnsmessage.ResourceBody // "name/type"
	hosts   map[string]string                    // "address:port" → where it really listens
	asked   []string                             // names that reached the resolver
	dialled []string
	log     []Record
	logged  chan struct{}
}

func newWorld() *world {
	return &world{zone: map[string][]netip.Addr{}, records: map[string][]dnsmessage.ResourceBody{}, hosts: map[string]string{}, logged: make(chan struct{}, 4096)}
}

func (w *world) name(name string, addrs ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.zone[name] = nil
	for _, a := range addrs {
		w.zone[name] = append(w.zone[name], netip.MustParseAddr(a))
	}
}

func (w *world) Addresses(_ context.Context, name string) ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, name)
	if addrs, ok := w.zone[name]; ok {
		return slices.Clone(addrs), nil
	}
	return nil, ErrNoName
}

func (w *world) Records(_ context.Context, name string, kind dnsmessage.Type) ([]dnsmessage.ResourceBody, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, name)
	return w.records[fmt.Sprintf("%s/%s", name, kind)], nil
}

func (w *world) dial(ctx context.Context, network, address string) (net.Conn, error) {
	w.mu.Lock()
	w.dialled = append(w.dialled, network+" "+address)
	to, ok := w.hosts[address]
	w.mu.Unlock()
	if !ok {
		return nil, &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", unix.ECONNREFUSED)}
	}
	var d net.Dialer
	return d.DialContext(ctx, network, to)
}

func (w *world) record(r Record) {
	w.mu.Lock()
	w.log = append(w.log, r)
	w.mu.Unlock()
	select {
	case w.logged <- struct{}{}:
	default:
	}
}

// find waits for a record that fits.
func (w *world) find(t testing.TB, what string, fits func(Record) bool) Record {
	t.Helper()
	late := time.After(20 * time.Second)
	for {
		w.mu.Lock()
		i := slices.IndexFunc(w.log, fits)
		var found Record
		if i >= 0 {
			found = w.log[i]
		}
		all := fmt.Sprintf("%+v", w.log)
		w.mu.Unlock()
		if i >= 0 {
			return found
		}
		select {
		case <-w.logged:
		case <-late:
			t.Fatalf("no record of %s in %s", what, all)
		}
	}
}

// askedFor says whether a name reached the resolver.
func (w *world) askedFor(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.asked, name)
}

func (w *world) dialledTo(address string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.dialled, func(d string) bool { return strings.HasSuffix(d, " "+address) })
}

// serve listens as an address of the world, and hands each connection to serve.
func (w *world) serve(t testing.TB, address string, serve func(net.Conn)) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	w.at(address, l.Addr().String())
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()
}

func (w *world) at(address, to string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hosts[address] = to
}

func echo(c net.Conn) { io.Copy(c, c) }

// rules makes a policy of rule texts.
func rules(t testing.TB, texts ...string) *policy.Policy {
	t.Helper()
	p, err := policy.Record{Kind: policy.Agent, Rules: texts}.Policy()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// config is a network's in a world.
func (w *world) config(p *policy.Policy) Config {
	return Config{
		Name: "a1", GuestMAC: guestMAC, Policy: p, Dial: w.dial, Resolver: w, Log: w.record,
		Proxy: func(*url.URL) (*url.URL, error) { return nil, nil },
		Own:   func() []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix("203.0.113.9/24")} },
	}
}

// start makes a world, a network in it and a guest on it.
func start(t testing.TB, texts ...string) (*world, *Network, *guestStack) {
	t.Helper()
	w := newWorld()
	n := w.network(t, w.config(rules(t, texts...)))
	return w, n, bootGuest(t, n)
}

func (w *world) network(t testing.TB, c Config) *Network {
	t.Helper()
	n, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}
