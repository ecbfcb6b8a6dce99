package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"dozable.com/doz/internal/network/policy"
	"dozable.com/doz/internal/network/sniff"
)

// flow is one TCP connection between the guest and the world outside.
type flow struct {
	n        *Network
	j        judgement
	began    time.Time
	sent     atomic.Int64 // bytes from the guest
	received atomic.Int64 // bytes to it
	last     atomic.Int64 // when a datagram passed, in Unix nanoseconds; 0 for TCP
	spoken   atomic.Pointer[spoken]

	mu       sync.Mutex
	guest    *guestConn // guarded by mu
	upstream net.Conn   // guarded by mu
	end      func()     // what abort does besides; guarded by mu
	aborted  bool       // guarded by mu
}

// spoken is the name a client gave inside its connection, and the rule that allows it.
type spoken struct{ name, rule string }

// acceptTCP judges a connection that the guest asks for. It runs in a goroutine of the
// forwarder's, while the guest waits for its SYN's answer: what is refused is reset, and
// so is what the world outside refuses.
func (n *Network) acceptTCP(r *tcp.ForwarderRequest) {
	id := r.ID()
	to := netip.AddrPortFrom(netipAddr(id.LocalAddress), id.LocalPort)
	if !n.tcpFlows.take() {
		n.log.refused(Record{Protocol: "tcp"}, policy.Verdict{Why: policy.TooMany})
		r.Complete(true)
		return
	}
	defer n.tcpFlows.give()
	f := &flow{n: n, began: time.Now()}
	if !n.keep(f) {
		r.Complete(true)
		return
	}
	defer n.forget(f)
	if to.Addr() == Gateway4 || to.Addr() == Gateway6 {
		f.serveHost(r, to)
		return
	}
	f.j = n.judge(to)
	switch {
	case !f.j.Allow && to.Port() == 80:
		f.sayNo(r)
		return
	case !f.j.Allow:
		n.log.refused(f.record("tcp"), f.j.Verdict)
		r.Complete(true)
		return
	}
	// An HTTP proxy for plain requests is asked for each of them, not for a connection.
	perRequest := to.Port() == 80 && n.plainProxy(f.j) != nil
	if !perRequest {
		upstream, err := n.dial(n.ctx, "tcp", f.j)
		if err != nil {
			f.failed("tcp", err)
			r.Complete(true)
			return
		}
		if !f.hold(upstream) {
			r.Complete(true)
			return
		}
	}
	if f.open(r) {
		f.carry()
	}
}

// keep counts a flow among those that Close ends.
func (n *Network) keep(f *flow) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ctx.Err() != nil {
		return false
	}
	n.flows[f] = true
	n.work.Add(1)
	return true
}

func (n *Network) forget(f *flow) {
	f.close()
	n.mu.Lock()
	delete(n.flows, f)
	n.mu.Unlock()
	n.work.Done()
}

// hold takes the connection to the world outside; false when the flow has been aborted.
func (f *flow) hold(upstream net.Conn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.aborted {
		upstream.Close()
		return false
	}
	f.upstream = upstream
	return true
}

// open answers the guest's SYN. False when the guest has gone.
func (f *flow) open(r *tcp.ForwarderRequest) bool {
	var queue waiter.Queue
	ep, err := r.CreateEndpoint(&queue)
	r.Complete(false)
	if err != nil {
		return false
	}
	ep.SocketOptions().SetDelayOption(false)
	if f.n.tcpFlows.n.Load() > roomy {
		ep.SocketOptions().SetReceiveBufferSize(crowdedBuffer, true)
		ep.SocketOptions().SetSendBufferSize(crowdedBuffer, true)
	}
	g := &guestConn{TCPConn: gonet.NewTCPConn(&queue, ep), ep: ep, queue: &queue}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.guest = g
	if f.aborted {
		ep.Abort()
		return false
	}
	return true
}

// abort ends the flow at once, with a reset to the guest.
func (f *flow) abort() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.aborted = true
	if f.guest != nil {
		f.guest.ep.Abort()
	}
	if f.upstream != nil {
		reset(f.upstream)
	}
	if f.end != nil {
		f.end()
	}
}

func (f *flow) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.guest != nil {
		f.guest.Close()
	}
	if f.upstream != nil {
		f.upstream.Close()
	}
}

// carry looks at what the guest says first and then carries both directions until they
// end.
func (f *flow) carry() {
	if f.n.settled(f.j) && f.upstream != nil {
		f.relay("tcp", nil)
		return
	}
	if f.upstream == nil {
		first, result := f.peek()
		f.begin(first, result)
		return
	}
	// A server may speak first: its direction runs while the guest's is looked at.
	early := make(chan error, 1)
	f.n.work.Go(func() { early <- f.toGuest() })
	first, result := f.peek()
	switch result.Protocol {
	case sniff.HTTP:
		// HTTP servers do not speak first. The connection made is given to the first
		// request; its early reader has to let go of it.
		f.upstream.SetReadDeadline(time.Unix(1, 0))
		if err := <-early; !errors.Is(err, errLetGo) {
			f.abort() // it did speak, or has gone
			f.log("tcp", verdictFailed, "the server ended the connection")
			return
		}
		f.upstream.SetReadDeadline(time.Time{})
		f.begin(first, result)
	case sniff.TLS, sniff.Bad:
		if v := f.checkTLS(result); !v.Allow {
			f.abort()
			<-early
			return
		}
		f.both("tls", first, early)
	default:
		f.both("tcp", first, early)
	}
}

// begin goes on after the look at the first bytes, with nobody reading from upstream.
func (f *flow) begin(first []byte, result sniff.Result) {
	if result.Protocol == sniff.HTTP {
		f.serveHTTP(first)
		return
	}
	if f.upstream == nil { // plain port, upstream proxy, and not HTTP: a tunnel
		upstream, err := f.n.dial(f.n.ctx, "tcp", f.j)
		if err != nil {
			f.failed("tcp", err)
			f.abort()
			return
		}
		if !f.hold(upstream) {
			return
		}
	}
	protocol := "tcp"
	if result.Protocol == sniff.TLS || result.Protocol == sniff.Bad {
		protocol = "tls"
		if v := f.checkTLS(result); !v.Allow {
			f.abort()
			return
		}
	}
	f.relay(protocol, first)
}

// checkTLS judges the server name of a client's greeting.
func (f *flow) checkTLS(result sniff.Result) policy.Verdict {
	v := policy.Verdict{Why: policy.Unreadable}
	if result.Protocol == sniff.TLS {
		v = f.n.speaks(f.j, result.Name)
	}
	if result.Name != "" {
		f.spoken.Store(&spoken{result.Name, v.Rule})
	}
	if !v.Allow {
		f.n.log.refused(f.record("tls"), v)
	}
	return v
}

// peekTimeout is how long a beginning may stay undecided once a byte of it is there.
// Then it is refused: what comes later could be the request that nobody looks at.
const peekTimeout = 10 * time.Second

// peek reads what the guest says first until it is clear what it is. It holds no buffer
// while the guest says nothing.
func (f *flow) peek() ([]byte, sniff.Result) {
	g := f.guest
	waitReadable(g.ep, g.queue)
	defer g.SetReadDeadline(time.Time{})
	g.SetReadDeadline(time.Now().Add(peekTimeout))
	var first []byte
	for {
		if cap(first)-len(first) < 1024 {
			first = append(make([]byte, 0, max(2048, 2*cap(first))), first...)
		}
		size, err := g.Read(first[len(first):cap(first)])
		first = first[:len(first)+size]
		f.sent.Add(int64(size))
		result := sniff.Begin(first, err != nil)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return first, sniff.Result{Protocol: sniff.Bad}
		case result.Protocol != sniff.More:
			return first, result
		case first[0] != sniff.TLSByte && f.received.Load() > 0:
			return first, sniff.Result{Protocol: sniff.Other} // no HTTP server speaks first
		}
	}
}

// relay carries both directions, what was read first before the rest.
func (f *flow) relay(protocol string, first []byte) {
	early := make(chan error, 1)
	f.n.work.Go(func() { early <- f.toGuest() })
	f.both(protocol, first, early)
}

// both carries the guest's direction, waits for the other, and logs.
func (f *flow) both(protocol string, first []byte, other chan error) {
	_, err := f.upstream.Write(first)
	if err == nil {
		err = f.fromGuest()
	}
	if err != nil {
		f.abort()
	}
	if theirs := <-other; theirs != nil && err == nil {
		err = theirs
	}
	f.log(protocol, verdictAllow, "")
}

// fromGuest carries the guest's bytes out until it has no more.
func (f *flow) fromGuest() error {
	err := pump(f.upstream, f.guest, &f.sent)
	if err == nil {
		closeWrite(f.upstream)
	}
	return err
}

// toGuest carries the world's bytes in until there are no more. A failure ends the flow
// with a reset, as it would without anybody between.
func (f *flow) toGuest() error {
	err := pump(f.guest, f.upstream, &f.received)
	switch {
	case errors.Is(err, errLetGo):
	case err != nil:
		f.abort()
	default:
		f.guest.CloseWrite()
	}
	return err
}

// sayNo answers a refused plain HTTP request in words. Anything else is reset.
func (f *flow) sayNo(r *tcp.ForwarderRequest) {
	f.n.log.refused(f.record("tcp"), f.j.Verdict)
	if f.open(r) {
		if first, result := f.peek(); result.Protocol == sniff.HTTP {
			f.serveHTTP(first)
			return
		}
		f.abort()
	}
}

// failed logs that an allowed connection could not be made.
func (f *flow) failed(protocol string, err error) {
	f.log(protocol, verdictFailed, plain(err))
}

// plain is an error without what the record says elsewhere.
func plain(err error) string {
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		return errno.Error()
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return "no answer"
	}
	return err.Error()
}

func (f *flow) record(protocol string) Record {
	r := Record{Time: f.began, Protocol: protocol, Host: f.j.name, Port: f.j.to.Port(), Rule: f.j.Rule}
	if s := f.spoken.Load(); s != nil {
		r.Host, r.Rule = s.name, s.rule
	}
	if !f.j.stand {
		r.Address = f.j.to.Addr().String()
	}
	return r
}

func (f *flow) log(protocol, verdict, why string) {
	if f.n.policy.Load().Kind == policy.NAT {
		return
	}
	r := f.record(protocol)
	r.Verdict, r.Why = verdict, why
	r.Sent, r.Received, r.Millis = f.sent.Load(), f.received.Load(), time.Since(f.began).Milliseconds()
	f.n.log.write(r)
}

// serveHost carries a connection to the gateway to a service of this computer that is
// offered to the sandbox.
func (f *flow) serveHost(r *tcp.ForwarderRequest, to netip.AddrPort) {
	f.j = judgement{to: to, name: HostName}
	f.n.mu.Lock()
	offered := f.n.services[to.Port()]
	f.n.mu.Unlock()
	if !offered {
		f.n.log.refused(f.record("tcp"), policy.Verdict{Why: policy.NoService})
		r.Complete(true)
		return
	}
	f.j.Verdict = policy.Verdict{Allow: true, Rule: "host-service"}
	port := strconv.Itoa(int(to.Port()))
	upstream, err := f.n.c.Dial(f.n.ctx, "tcp", net.JoinHostPort("127.0.0.1", port))
	if err != nil {
		upstream, err = f.n.c.Dial(f.n.ctx, "tcp", net.JoinHostPort("::1", port))
	}
	if err != nil {
		f.failed("tcp", err)
		r.Complete(true)
		return
	}
	if !f.hold(upstream) {
		r.Complete(true)
		return
	}
	if f.open(r) {
		f.relay("tcp", nil)
	}
}

// SetHostServices says which TCP ports of this computer's loopback the sandbox reaches,
// as ports of host.doz.internal.
func (n *Network) SetHostServices(ports []uint16) {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.services)
	for _, p := range ports {
		n.services[p] = true
	}
}

// guestConn is the guest's end of a connection.
type guestConn struct {
	*gonet.TCPConn
	ep    tcpip.Endpoint
	queue *waiter.Queue
}
