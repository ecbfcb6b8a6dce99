package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"dozable.com/doz/internal/network/policy"
)

// PortSpec is a port of the guest's that this computer answers for.
type PortSpec struct {
	Address netip.Addr // of this computer; zero is its loopback, of both families
	Host    uint16
	Guest   uint16
	UDP     bool
}

// ParsePort reads "[ADDRESS:]HOST:GUEST[/udp]"; an IPv6 address stands in brackets.
func ParsePort(text string) (PortSpec, error) {
	var p PortSpec
	whole := text
	bad := func(why string) (PortSpec, error) { return PortSpec{}, fmt.Errorf("port %q %s", whole, why) }
	if rest, protocol, is := strings.Cut(text, "/"); is {
		if protocol != "udp" && protocol != "tcp" {
			return bad("is neither tcp nor udp")
		}
		text, p.UDP = rest, protocol == "udp"
	}
	i := strings.LastIndexByte(text, ':')
	if i < 0 {
		return bad("is not HOST:GUEST, as in 8080:80")
	}
	text, guest := text[:i], text[i+1:]
	host := text
	if i := strings.LastIndexByte(text, ':'); i >= 0 {
		host = text[i+1:]
		addr, err := netip.ParseAddr(strings.Trim(text[:i], "[]"))
		if err != nil || addr.Zone() != "" || addr.Is6() != strings.HasPrefix(text, "[") {
			return bad("has no address before its ports: 127.0.0.1 and [::1] are")
		}
		p.Address = addr.Unmap()
	}
	h, err1 := strconv.ParseUint(host, 10, 16)
	g, err2 := strconv.ParseUint(guest, 10, 16)
	if err1 != nil || err2 != nil || h == 0 || g == 0 {
		return bad("has a number that is no port from 1 to 65535")
	}
	p.Host, p.Guest = uint16(h), uint16(g)
	return p, nil
}

// String is the port as ParsePort reads it.
func (p PortSpec) String() string {
	text := fmt.Sprintf("%d:%d", p.Host, p.Guest)
	switch {
	case p.Address.Is4():
		text = p.Address.String() + ":" + text
	case p.Address.Is6():
		text = "[" + p.Address.String() + "]:" + text
	}
	if p.UDP {
		text += "/udp"
	}
	return text
}

// addresses are where the port is answered.
func (p PortSpec) addresses() []netip.Addr {
	if p.Address.IsValid() {
		return []netip.Addr{p.Address}
	}
	return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
}

// publication is a published port: its sockets.
type publication struct {
	sockets []interface{ Close() error }
}

func (p *publication) close() {
	for _, s := range p.sockets {
		s.Close()
	}
}

// ErrPublished means that the sandbox publishes that port already.
var ErrPublished = errors.New("published already")

// Publish answers for a port of the guest's from now on. A taken port fails, and says
// who has it where that can be seen.
func (n *Network) Publish(p PortSpec) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ctx.Err() != nil {
		return errors.New("the network is closed")
	}
	if n.published[p] != nil {
		return fmt.Errorf("port %s: %w", p, ErrPublished)
	}
	pub := &publication{}
	for i, addr := range p.addresses() {
		at := netip.AddrPortFrom(addr, p.Host)
		err := n.listen(pub, p, at)
		if err != nil && i > 0 && !errors.Is(err, syscall.EADDRINUSE) {
			continue // a computer without IPv6
		}
		if err != nil {
			pub.close()
			if errors.Is(err, syscall.EADDRINUSE) {
				return fmt.Errorf("port %s is taken%s", at, portOwner(at, p.UDP))
			}
			return fmt.Errorf("cannot publish port %s: %w", p, err)
		}
	}
	n.published[p] = pub
	return nil
}

// listen opens one socket of a published port.
func (n *Network) listen(pub *publication, p PortSpec, at netip.AddrPort) error {
	if p.UDP {
		socket, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		if err != nil {
			return err
		}
		pub.sockets = append(pub.sockets, socket)
		n.work.Go(func() { n.publishDatagrams(socket, p) })
		return nil
	}
	listener, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return err
	}
	pub.sockets = append(pub.sockets, listener)
	n.work.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			n.work.Go(func() { n.carryIn(conn, p) })
		}
	})
	return nil
}

// Unpublish stops answering for a port; connections that are open go on. False when it
// was not published.
func (n *Network) Unpublish(p PortSpec) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	pub := n.published[p]
	if pub == nil {
		return false
	}
	pub.close()
	delete(n.published, p)
	return true
}

// Published lists the published ports, in order.
func (n *Network) Published() []PortSpec {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []PortSpec
	for p := range n.published {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b PortSpec) int {
		return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.Guest, b.Guest), a.Address.Compare(b.Address))
	})
	return all
}

// wakeTimeout bounds the wait for a sleeping sandbox that somebody connects to.
const wakeTimeout = 60 * time.Second

// awake makes sure that a machine is attached.
func (n *Network) awake(ctx context.Context) error {
	if n.Attached() {
		return nil
	}
	if n.c.Wake == nil {
		return errors.New("the sandbox does not run")
	}
	ctx, cancel := context.WithTimeout(ctx, wakeTimeout)
	defer cancel()
	return n.c.Wake(ctx)
}

// carryIn carries one connection to a published port into the guest.
func (n *Network) carryIn(conn net.Conn, p PortSpec) {
	f := &flow{n: n, began: time.Now(), upstream: conn}
	if !n.tcpFlows.take() {
		n.log.refused(Record{Protocol: "in-tcp", Port: p.Guest}, policy.Verdict{Why: policy.TooMany})
		reset(conn)
		return
	}
	defer n.tcpFlows.give()
	if !n.keep(f) {
		reset(conn)
		return
	}
	defer n.forget(f)
	from := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	f.j = judgement{to: netip.AddrPortFrom(from.Addr().Unmap(), p.Guest), Verdict: policy.Verdict{Allow: true, Rule: "port " + p.String()}}
	err := n.awake(n.ctx)
	var guest *guestConn
	if err == nil {
		guest, err = n.dialGuest(p.Guest)
	}
	if err != nil {
		f.failed("in-tcp", err)
		reset(conn)
		return
	}
	f.mu.Lock()
	f.guest = guest
	f.mu.Unlock()
	f.relay("in-tcp", nil)
}

// dialGuest connects to a port of the guest's, from the gateway.
func (n *Network) dialGuest(port uint16) (*guestConn, error) {
	conn, err := n.dialAt(Gateway4, Guest4, port)
	if err == nil {
		return conn, nil
	}
	if conn, err := n.dialAt(Gateway6, Guest6, port); err == nil {
		return conn, nil
	}
	return nil, err
}

func (n *Network) dialAt(gateway, guest netip.Addr, port uint16) (*guestConn, error) {
	var queue waiter.Queue
	ep, problem := n.stack.NewEndpoint(tcp.ProtocolNumber, protocolOf(guest), &queue)
	if problem != nil {
		return nil, errors.New(problem.String())
	}
	entry, ready := waiter.NewChannelEntry(waiter.WritableEvents)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	problem = ep.Bind(tcpip.FullAddress{NIC: nic, Addr: stackAddr(gateway)})
	if problem == nil {
		problem = ep.Connect(tcpip.FullAddress{NIC: nic, Addr: stackAddr(guest), Port: port})
	}
	if _, started := problem.(*tcpip.ErrConnectStarted); started {
		timeout := time.NewTimer(guestTimeout)
		defer timeout.Stop()
		select {
		case <-ready:
			problem = ep.LastError()
		case <-timeout.C:
			problem = &tcpip.ErrTimeout{}
		case <-n.ctx.Done():
			problem = &tcpip.ErrAborted{}
		}
	}
	if problem != nil {
		ep.Close()
		return nil, errors.New("the sandbox does not answer there: " + problem.String())
	}
	return &guestConn{TCPConn: gonet.NewTCPConn(&queue, ep), ep: ep, queue: &queue}, nil
}

// guestTimeout is how long a guest may take to answer a connection.
const guestTimeout = 10 * time.Second

// publishDatagrams carries datagrams to a published port into the guest, an exchange
// for each that sends some.
func (n *Network) publishDatagrams(socket *net.UDPConn, p PortSpec) {
	var mu sync.Mutex
	exchanges := map[netip.AddrPort]*gonet.UDPConn{}
	buf := make([]byte, 64<<10)
	for {
		size, from, err := socket.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		mu.Lock()
		guest := exchanges[from]
		mu.Unlock()
		if guest == nil {
			if guest = n.openExchange(p); guest == nil {
				continue
			}
			mu.Lock()
			exchanges[from] = guest
			mu.Unlock()
			n.work.Go(func() {
				defer n.udpFlows.give()
				n.answerExchange(socket, guest, from)
				mu.Lock()
				delete(exchanges, from)
				mu.Unlock()
			})
		}
		guest.SetReadDeadline(time.Now().Add(udpIdle))
		guest.Write(buf[:size])
	}
}

// openExchange begins an exchange with the guest; nil when there can be none now.
func (n *Network) openExchange(p PortSpec) *gonet.UDPConn {
	if n.awake(n.ctx) != nil || !n.udpFlows.take() {
		return nil
	}
	from := tcpip.FullAddress{NIC: nic, Addr: stackAddr(Gateway4)}
	to := tcpip.FullAddress{NIC: nic, Addr: stackAddr(Guest4), Port: p.Guest}
	guest, err := gonet.DialUDP(n.stack, &from, &to, protocolOf(Guest4))
	if err != nil {
		n.udpFlows.give()
		return nil
	}
	return guest
}

// answerExchange carries the guest's answers back until there are none for a while.
func (n *Network) answerExchange(socket *net.UDPConn, guest *gonet.UDPConn, from netip.AddrPort) {
	defer guest.Close()
	defer context.AfterFunc(n.ctx, func() { guest.Close() })()
	buf := make([]byte, 64<<10)
	for {
		size, err := guest.Read(buf)
		if err != nil {
			return
		}
		if _, err := socket.WriteToUDPAddrPort(buf[:size], from); err != nil {
			return
		}
		guest.SetReadDeadline(time.Now().Add(udpIdle))
	}
}
