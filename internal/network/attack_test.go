package network

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// ip4 builds an Ethernet frame with an IPv4 packet.
func ip4(from, to netip.Addr, protocol tcpip.TransportProtocolNumber, offset uint16, flags uint8, id uint16, payload []byte) []byte {
	frame := make([]byte, header.EthernetMinimumSize+header.IPv4MinimumSize+len(payload))
	copy(frame, GatewayMAC)
	copy(frame[6:], guestMAC)
	binary.BigEndian.PutUint16(frame[12:], uint16(header.IPv4ProtocolNumber))
	ip := header.IPv4(frame[header.EthernetMinimumSize:])
	ip.Encode(&header.IPv4Fields{TotalLength: uint16(len(ip)), ID: id, Flags: flags, FragmentOffset: offset, TTL: 64, Protocol: uint8(protocol), SrcAddr: stackAddr(from), DstAddr: stackAddr(to)})
	ip.SetChecksum(^ip.CalculateChecksum())
	copy(ip.Payload(), payload)
	return frame
}

func syn(from, to netip.Addr, fromPort, toPort uint16) []byte {
	segment := header.TCP(make([]byte, header.TCPMinimumSize))
	segment.Encode(&header.TCPFields{SrcPort: fromPort, DstPort: toPort, SeqNum: 1, DataOffset: header.TCPMinimumSize, Flags: header.TCPFlagSyn, WindowSize: 1024})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, stackAddr(from), stackAddr(to), header.TCPMinimumSize)
	segment.SetChecksum(^segment.CalculateChecksum(sum))
	return ip4(from, to, header.TCPProtocolNumber, 0, 0, 1, segment)
}

// still says that the network serves its guest as before.
func still(t *testing.T, w *world, g *guestStack) {
	t.Helper()
	if m := g.resolve(t, "good.example", dnsmessage.TypeA); len(m.Answers) != 1 {
		t.Fatalf("good.example: %s", m.RCode)
	}
	conn, err := g.dial("93.184.216.34", 7)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	io.WriteString(conn, "still\n")
	if _, err := io.ReadFull(conn, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
}

func startGood(t *testing.T, limit int) (*world, *Network, *guestStack) {
	w := newWorld()
	c := w.config(rules(t, "allow good.example"))
	c.MaxFlows = limit
	n := w.network(t, c)
	g := bootGuest(t, n)
	w.name("good.example", "93.184.216.34")
	w.serve(t, "93.184.216.34:7", echo)
	return w, n, g
}

// Frames that lie about who sent them, or about their own form, are counted and dropped.
func TestForgedFrames(t *testing.T) {
	w, n, g := startGood(t, 0)
	still(t, w, g)
	good := netip.MustParseAddr("93.184.216.34")
	forgedMAC := syn(Guest4, good, 1000, 7)
	forgedMAC[6] ^= 4
	oversized := make([]byte, 66000)
	cut := syn(Guest4, good, 1000, 7)
	long := syn(Guest4, good, 1000, 7)
	binary.BigEndian.PutUint16(long[header.EthernetMinimumSize+2:], 5000)
	arp := make([]byte, header.EthernetMinimumSize+header.ARPSize)
	copy(arp, header.EthernetBroadcastAddress)
	copy(arp[6:], guestMAC)
	binary.BigEndian.PutUint16(arp[12:], uint16(header.ARPProtocolNumber))
	reply := header.ARP(arp[header.EthernetMinimumSize:])
	reply.SetIPv4OverEthernet()
	reply.SetOp(header.ARPReply)
	gateway := Gateway4.As4()
	copy(reply.ProtocolAddressSender(), gateway[:]) // "the gateway is me"
	for range 50 {
		for _, frame := range [][]byte{
			syn(netip.MustParseAddr("198.18.0.3"), good, 1000, 7),
			syn(Gateway4, good, 1000, 7), syn(good, Guest4, 7, 1000), forgedMAC, oversized, cut[:20], cut[:3], {}, long, arp,
		} {
			g.send(frame)
		}
	}
	still(t, w, g)
	got := n.Dropped()
	for _, reason := range []string{"forged", "malformed", "oversized"} {
		if got[reason] == 0 {
			t.Errorf("nothing counted as %s: %v", reason, got)
		}
	}
	// The one just used may take a moment to be gone.
	for end := time.Now().Add(10 * time.Second); n.Open() > 1; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d connections are open", n.Open())
		}
	}
}

// Fragments that overlap or never become whole hold a bounded memory and reach nobody.
func TestFragments(t *testing.T) {
	w, _, g := startGood(t, 0)
	still(t, w, g)
	to := netip.MustParseAddr("8.8.8.8")
	for id := range uint16(2000) {
		g.send(ip4(Guest4, to, header.UDPProtocolNumber, 0, header.IPv4FlagMoreFragments, id, make([]byte, 8000)))
		g.send(ip4(Guest4, to, header.UDPProtocolNumber, 4000, header.IPv4FlagMoreFragments, id, make([]byte, 8000)))
		g.send(ip4(Guest4, to, header.UDPProtocolNumber, 65528, 0, id, make([]byte, 1000)))
	}
	still(t, w, g)
	if w.dialledTo("8.8.8.8:0") {
		t.Error("a fragment was carried out")
	}
}

// A flood of connection requests is refused, logged in a few lines with their count, and
// leaves the network serving.
func TestFlood(t *testing.T) {
	w, n, g := startGood(t, 50)
	still(t, w, g)
	for port := range 20000 {
		g.send(syn(Guest4, netip.AddrFrom4([4]byte{8, 8, byte(port >> 8), byte(port)}), uint16(port+1024), uint16(port%1000+100)))
	}
	// 200 connections that are allowed, with room for 50.
	var wg sync.WaitGroup
	var mu sync.Mutex
	var open []*gonet.TCPConn
	refused := 0
	for range 200 {
		wg.Go(func() {
			conn, err := g.dial("93.184.216.34", 7)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				refused++
				return
			}
			open = append(open, conn)
		})
	}
	wg.Wait()
	if len(open) > 50 || refused == 0 || n.Open() > 50 {
		t.Errorf("%d open and %d refused, with room for 50", len(open), refused)
	}
	w.find(t, "too many", func(r Record) bool { return strings.Contains(r.Why, "too many") })
	for _, conn := range open {
		conn.Close()
	}
	for late := time.Now().Add(20 * time.Second); n.Open() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatalf("%d connections stay open", n.Open())
		}
	}
	still(t, w, g)
	n.Close()
	w.mu.Lock()
	defer w.mu.Unlock()
	lines, count := 0, 0
	for _, r := range w.log {
		if r.Verdict == "deny" {
			lines++
			count += max(1, r.Count)
		}
	}
	if lines > 2*maxAlike+50 {
		t.Errorf("%d lines", lines)
	}
	if len(n.Refusals()) > maxRefusals {
		t.Errorf("%d refusals are remembered", len(n.Refusals()))
	}
}

// A server that takes nothing holds a bounded part of what many connections send it, and
// all are reset when the network closes.
func TestManyFullConnections(t *testing.T) {
	w, n, g := startGood(t, 0)
	g.resolve(t, "good.example", dnsmessage.TypeA)
	w.name("good.example", "93.184.216.34")
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	w.serve(t, "93.184.216.34:8", func(net.Conn) { <-stop })
	block := make([]byte, 64<<10)
	var written atomic.Int64
	var wg sync.WaitGroup
	for range 100 {
		conn, err := g.dial("93.184.216.34", 8)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			conn.SetWriteDeadline(time.Now().Add(time.Second))
			for {
				size, err := conn.Write(block)
				written.Add(int64(size))
				if err != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	if held := written.Load() >> 20; held > 100*8+64*8 { // the guest's own buffers, this computer's sockets', and ours
		t.Errorf("%d MiB are under way", held)
	}
	if n.Open() != 100 {
		t.Errorf("%d connections are open", n.Open())
	}
	still(t, w, g)
}

// A guest that names everything does not fill the resolver's memory or the book.
func TestManyNames(t *testing.T) {
	w, n, _ := start(t, "allow *")
	for i := range maxPages + 500 {
		name := fmt.Sprintf("n%d.example", i)
		a := netip.AddrFrom4([4]byte{93, byte(i >> 16), byte(i >> 8), byte(i)})
		w.name(name, a.String())
		n.answer(t.Context(), query(name, dnsmessage.TypeA), false)
	}
	n.names.mu.Lock()
	known := len(n.names.known)
	n.names.mu.Unlock()
	if known > maxLookups {
		t.Errorf("%d lookups are remembered", known)
	}
	if s := n.State(); len(s.Names) != maxPages || s.Names[0].Names[0] != "n500.example" {
		t.Errorf("%d addresses are known, the oldest %v", len(s.Names), s.Names[0])
	}
	for i := range 100 {
		n.book.add(fmt.Sprintf("cdn%d.example", i), []netip.Addr{netip.MustParseAddr("93.0.0.1")})
	}
	if names, _ := n.book.names(netip.MustParseAddr("93.0.0.1")); len(names) != maxNames || names[0] != "cdn99.example" {
		t.Errorf("%d names of one address", len(names))
	}
}
