// Package network is a sandbox's network: a user-mode TCP/IP stack that the machine's
// card ends in, and the policy that is the only way out of it.
//
// Frames come from a stream (package link), names are answered by the resolver here,
// and each connection is judged (package policy), looked into as far as its server's
// name (package sniff), and carried on by an ordinary socket of this process. There is
// no route that goes round this. It must not know of machines, stores or sandboxes'
// life, and it never keeps or logs what connections carry.
package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpproxy"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"dozable.com/doz/internal/network/link"
	"dozable.com/doz/internal/network/policy"
)

// The addresses of every sandbox's network. Each is alone in its own, so all can be the
// same. They are of networks that are nowhere else: the one for benchmarks (RFC 2544)
// and a unique local one.
var (
	Gateway4 = netip.MustParseAddr("198.18.0.1")
	Guest4   = netip.MustParseAddr("198.18.0.2")
	Gateway6 = netip.MustParseAddr("fd64:6f7a::1")
	Guest6   = netip.MustParseAddr("fd64:6f7a::2")
	// stand4 are the addresses that stand for names which only an upstream proxy
	// resolves.
	stand4 = netip.MustParsePrefix("198.18.128.0/17")
)

// Prefix lengths of the guest's addresses.
const (
	Bits4 = 24
	Bits6 = 64
	MTU   = link.MTU
)

// GatewayMAC is the gateway's, in every sandbox.
var GatewayMAC = net.HardwareAddr{0x02, 'd', 'o', 'z', 0, 1}

// HostName resolves to the gateway inside, where this computer's named services are.
const HostName = "host.doz.internal"

// Config is what a network is made of. Name, GuestMAC and Policy are needed; what else
// is missing is this computer's own.
type Config struct {
	Name     string // the sandbox's, for what is said to people
	GuestMAC net.HardwareAddr
	Policy   *policy.Policy

	// Dial opens a connection ("tcp", "udp") to an address of the world outside.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Resolver answers for names of the world outside.
	Resolver Resolver
	// Proxy gives the upstream proxy for a URL, or nil. The default follows
	// HTTP_PROXY, HTTPS_PROXY and NO_PROXY, in either case.
	Proxy func(*url.URL) (*url.URL, error)
	// Own gives the networks that this computer's interfaces are in.
	Own func() []netip.Prefix
	// ClosedPorts gives ports of this computer that no rule opens: the dashboards'.
	ClosedPorts func() []uint16

	// Log receives what happened, from one goroutine. It may block; then records are
	// dropped, and their number is told in a later one.
	Log func(Record)
	// Wake is called before a connection to a published port is carried in while no
	// machine is attached. It returns when one is.
	Wake func(ctx context.Context) error

	// MaxFlows bounds the connections at once (0: 2048).
	MaxFlows int
	// State is what an earlier Network of the same sandbox knew.
	State *State
}

// Network is one sandbox's. All methods may be called concurrently.
type Network struct {
	c      Config
	link   *link.Link
	stack  *stack.Stack
	policy atomic.Pointer[policy.Policy]
	book   *book
	names  *names
	log    *logger
	own    ownNetworks

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup

	closing sync.Once

	tcpFlows, udpFlows counter

	mu        sync.Mutex
	flows     map[*flow]bool               // guarded by mu
	published map[PortSpec]*publication    // guarded by mu
	services  map[uint16]bool              // guarded by mu
	dns       []interface{ Close() error } // set once
}

const nic = tcpip.NICID(1)

// New makes a network that no machine is attached to. Close it.
func New(c Config) (*Network, error) {
	if c.Policy == nil || len(c.GuestMAC) != 6 {
		return nil, errors.New("a network needs a policy and the guest's MAC address")
	}
	if c.Dial == nil {
		c.Dial = (&net.Dialer{Timeout: 30 * time.Second}).DialContext
	}
	if c.Resolver == nil {
		c.Resolver = SystemResolver{}
	}
	if c.Proxy == nil {
		c.Proxy = httpproxy.FromEnvironment().ProxyFunc()
	}
	if c.Own == nil {
		c.Own = interfaceNetworks
	}
	if c.MaxFlows == 0 {
		c.MaxFlows = 2048
	}
	n := &Network{c: c, flows: map[*flow]bool{}, published: map[PortSpec]*publication{}, services: map[uint16]bool{}}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.policy.Store(c.Policy)
	n.book = newBook(c.State)
	n.names = newNames(c.Resolver)
	n.own.list = c.Own
	n.tcpFlows.limit, n.udpFlows.limit = int64(c.MaxFlows), int64(max(1, c.MaxFlows/4))
	n.log = newLogger(c.Log, c.Name)
	n.link = link.New(link.Config{
		GuestMAC: c.GuestMAC, GatewayMAC: GatewayMAC, Guest4: Guest4, Gateway4: Gateway4, Guest6: Guest6, Gateway6: Gateway6,
		Refused: func(protocol string, to netip.Addr) {
			n.log.refused(Record{Protocol: protocol, Host: n.book.nameOf(to), Address: to.String()}, policy.Verdict{Why: policy.Protocol})
		},
	})
	if err := n.buildStack(); err != nil {
		n.Close()
		return nil, err
	}
	if err := n.serveDNS(); err != nil {
		n.Close()
		return nil, err
	}
	n.work.Go(n.sweep)
	return n, nil
}

// Buffers of a guest's connection, each way. They hold only what is under way; these are
// bounds. So that what a guest makes the host hold is bounded too, they are small where
// there are many connections.
const (
	minBuffer     = 16 << 10
	defaultBuffer = 512 << 10
	maxBuffer     = 4 << 20
	roomy         = 64 // connections with the large ones
	crowdedBuffer = 128 << 10
)

// buildStack makes the stack: one card, the gateway's addresses on it, and every other
// destination taken in too and given to the forwarders.
func (n *Network) buildStack() error {
	n.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	sack, moderate := tcpip.TCPSACKEnabled(true), tcpip.TCPModerateReceiveBufferOption(true)
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: minBuffer, Default: defaultBuffer, Max: maxBuffer}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: minBuffer, Default: defaultBuffer, Max: maxBuffer}
	wait := tcpip.TCPTimeWaitTimeoutOption(2 * time.Second)
	for _, option := range []tcpip.SettableTransportProtocolOption{&sack, &moderate, &receive, &send, &wait} {
		if err := n.stack.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return fmt.Errorf("cannot set up the network's TCP: %s", err)
		}
	}
	if err := n.stack.CreateNIC(nic, n.link); err != nil {
		return fmt.Errorf("cannot make the network's card: %s", err)
	}
	for _, a := range []struct {
		protocol tcpip.NetworkProtocolNumber
		addr     netip.Addr
		bits     int
	}{{ipv4.ProtocolNumber, Gateway4, Bits4}, {ipv6.ProtocolNumber, Gateway6, Bits6}} {
		address := tcpip.ProtocolAddress{Protocol: a.protocol, AddressWithPrefix: tcpip.AddressWithPrefix{Address: stackAddr(a.addr), PrefixLen: a.bits}}
		if err := n.stack.AddProtocolAddress(nic, address, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("cannot give the network's card its address: %s", err)
		}
	}
	if err := n.stack.SetPromiscuousMode(nic, true); err != nil {
		return fmt.Errorf("cannot set up the network's card: %s", err)
	}
	if err := n.stack.SetSpoofing(nic, true); err != nil {
		return fmt.Errorf("cannot set up the network's card: %s", err)
	}
	n.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}, {Destination: header.IPv6EmptySubnet, NIC: nic}})
	n.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, tcp.NewForwarder(n.stack, 0, maxHandshakes, n.acceptTCP).HandlePacket)
	n.stack.SetTransportProtocolHandler(udp.ProtocolNumber, udp.NewForwarder(n.stack, n.acceptUDP).HandlePacket)
	return nil
}

// maxHandshakes bounds the connections that are being judged and dialled at once; a
// guest's further SYNs are not answered, and it sends them again.
const maxHandshakes = 1024

// Attach connects a machine: stream carries QEMU's -netdev stream framing. It takes
// the place of the one attached before. The network owns the stream, and closes it.
func (n *Network) Attach(stream net.Conn) { n.link.Plug(stream) }

// Detach disconnects the machine. Connections stay and wait for the next.
func (n *Network) Detach() { n.link.Unplug() }

// Attached says whether a machine's stream is connected.
func (n *Network) Attached() bool { return n.link.Plugged() }

// SetPolicy puts another policy in place, for all that begins from now on.
func (n *Network) SetPolicy(p *policy.Policy) { n.policy.Store(p) }

// Dropped gives how many of the guest's frames were dropped, by reason.
func (n *Network) Dropped() map[string]uint64 { return n.link.Counts() }

// Refusals are what was refused lately, the latest first, with what would allow it.
func (n *Network) Refusals() []Refusal { return n.log.refusals() }

// Open is how many connections there are.
func (n *Network) Open() int { return int(n.tcpFlows.n.Load() + n.udpFlows.n.Load()) }

// Close ends every connection, frees the published ports, and tells the log the rest.
// Detach first where the guest is not to hear of it. It is idempotent.
func (n *Network) Close() error {
	n.closing.Do(n.close)
	return nil
}

func (n *Network) close() {
	n.cancel()
	for _, s := range n.dns {
		s.Close()
	}
	n.mu.Lock()
	for _, p := range n.published {
		p.close()
	}
	for f := range n.flows {
		f.abort()
	}
	n.mu.Unlock()
	n.link.Close()
	if n.stack != nil {
		n.stack.Close()
	}
	n.work.Wait()
	if n.stack != nil {
		n.stack.Destroy()
	}
	n.log.close()
}

// counter is a number with a limit.
type counter struct {
	n     atomic.Int64
	limit int64
}

func (c *counter) take() bool {
	if c.n.Add(1) > c.limit {
		c.n.Add(-1)
		return false
	}
	return true
}

func (c *counter) give() { c.n.Add(-1) }

func stackAddr(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

func netipAddr(a tcpip.Address) netip.Addr {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return addr.Unmap()
}

// protocolOf is the stack's number for an address's protocol.
func protocolOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return ipv4.ProtocolNumber
	}
	return ipv6.ProtocolNumber
}
