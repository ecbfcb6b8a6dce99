package network

import (
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"dozable.com/doz/internal/network/policy"
	"dozable.com/doz/internal/network/sniff"
)

// udpIdle ends an exchange of datagrams that both sides have left.
const udpIdle = 90 * time.Second

// acceptUDP judges a datagram that belongs to no exchange yet. It is called with the
// guest's packets and does not block. What is refused is answered with an ICMP error by
// the stack.
func (n *Network) acceptUDP(r *udp.ForwarderRequest) (handled bool) {
	id := r.ID()
	to := netip.AddrPortFrom(netipAddr(id.LocalAddress), id.LocalPort)
	if to.Addr() == Gateway4 || to.Addr() == Gateway6 {
		n.log.refused(Record{Protocol: "udp", Host: HostName, Port: to.Port()}, policy.Verdict{Why: policy.NoService})
		return false
	}
	f := &flow{n: n, began: time.Now(), j: n.judge(to)}
	v := f.j.Verdict
	switch {
	case !v.Allow:
	case f.j.stand:
		v = policy.Verdict{Rule: v.Rule, Why: policy.Protocol} // a proxy carries no datagrams
	case to.Port() == 443 && !n.settled(f.j):
		v = policy.Verdict{Rule: v.Rule, Why: policy.Protocol} // QUIC: programs go on with TCP
	}
	if !v.Allow {
		n.log.refused(f.record("udp"), v)
		return false
	}
	if !n.udpFlows.take() {
		n.log.refused(Record{Protocol: "udp"}, policy.Verdict{Why: policy.TooMany})
		return false
	}
	var queue waiter.Queue
	ep, err := r.CreateEndpoint(&queue)
	if err != nil {
		n.udpFlows.give()
		return false
	}
	guest := &guestDatagrams{UDPConn: gonet.NewUDPConn(&queue, ep), ep: ep, queue: &queue}
	if !n.keep(f) {
		n.udpFlows.give()
		guest.Close()
		return false
	}
	go func() {
		defer n.udpFlows.give()
		defer n.forget(f)
		f.exchange(guest)
	}()
	return true
}

// guestDatagrams is the guest's end of an exchange.
type guestDatagrams struct {
	*gonet.UDPConn
	ep    tcpip.Endpoint
	queue *waiter.Queue
}

// exchange carries datagrams both ways until neither side has sent any for a while, or
// one of them has gone.
func (f *flow) exchange(guest *guestDatagrams) {
	f.mu.Lock()
	f.end = func() { guest.Close() }
	f.mu.Unlock()
	defer guest.Close()
	upstream, err := f.n.dial(f.n.ctx, "udp", f.j)
	if err != nil {
		f.failed("udp", err)
		return
	}
	if !f.hold(upstream) {
		return
	}
	f.touch()
	done := make(chan struct{})
	f.n.work.Go(func() {
		defer close(done)
		f.datagrams(guest, upstream, &f.received, false)
	})
	f.datagrams(upstream, guest, &f.sent, !f.n.settled(f.j))
	<-done
	f.log("udp", verdictAllow, "")
}

// datagrams carries one direction. Its end is the other's too.
func (f *flow) datagrams(to io.Writer, from net.Conn, count *atomic.Int64, look bool) {
	defer f.abort()
	for first := true; ; first = false {
		block, size, err := readBlock(from)
		quic := look && first && sniff.QUIC(block[:size])
		if err == nil && !quic {
			_, err = to.Write(block[:size])
			count.Add(int64(size))
			f.touch()
		}
		if block != nil {
			blocks.Put(block)
		}
		if quic {
			f.n.log.refused(f.record("udp"), policy.Verdict{Rule: f.j.Rule, Why: policy.Protocol})
		}
		if err != nil || quic {
			return
		}
	}
}

func (f *flow) touch() { f.last.Store(time.Now().UnixNano()) }

// sweep ends exchanges of datagrams that nothing has come of for a while.
func (n *Network) sweep() {
	tick := time.NewTicker(udpIdle / 6)
	defer tick.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case now := <-tick.C:
			n.mu.Lock()
			for f := range n.flows {
				if last := f.last.Load(); last != 0 && now.UnixNano()-last > int64(udpIdle) {
					f.abort()
				}
			}
			n.mu.Unlock()
		}
	}
}
