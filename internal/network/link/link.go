// Package link is the wire between a machine's network card and the user-mode stack:
// QEMU's stream of Ethernet frames on one side, IP packets on the other. Streams come
// and go; the stack stays.
//
// It answers ARP and neighbour solicitations for the gateway, drops what does not come
// from the guest's own addresses, and refuses what no policy could judge. It must not
// open sockets or know of names.
package link

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// MTU is the largest IP packet. A frame of it fits in the 64 KiB blocks that the
// stack's buffers are made of, and in a virtio card's mtu.
const MTU = 65520

const (
	lengthSize = 4 // before each frame, big-endian: QEMU's -netdev stream
	maxFrame   = header.EthernetMinimumSize + MTU
	// maxLength is what QEMU could ever send (its NET_BUFSIZE); more is not its framing.
	maxLength = 4096 + 65536
	// maxQueued bounds what waits for a machine that does not take it. Beyond it
	// packets are lost, as they are on any wire.
	maxQueued = 8 << 20
)

// Config is who is on the wire.
type Config struct {
	GuestMAC, GatewayMAC net.HardwareAddr
	Guest4, Gateway4     netip.Addr
	Guest6, Gateway6     netip.Addr
	// Refused is told of what was answered with an ICMP error here. It must not block.
	Refused func(protocol string, to netip.Addr)
}

// Link is a stack.LinkEndpoint. All methods may be called concurrently.
type Link struct {
	c                    Config
	guestMAC, gatewayMAC tcpip.LinkAddress
	counts               [counters]atomic.Uint64

	mu         sync.Mutex
	dispatcher stack.NetworkDispatcher // guarded by mu
	stream     *stream                 // guarded by mu
	closed     bool                    // guarded by mu
	readers    sync.WaitGroup
}

// stream is one attached machine.
type stream struct {
	rwc    io.ReadWriteCloser
	done   chan struct{} // closed when it has been detached
	once   sync.Once
	wake   chan struct{}
	queue  []*stack.PacketBuffer // guarded by Link.mu, as is queued
	extra  [][]byte              // whole frames of ours: ARP and ICMP answers
	queued int                   // bytes
}

// Count is one reason why frames were dropped.
type Count int

const (
	Forged    Count = iota // not from the guest's own addresses
	Malformed              // cut short, or lengths that contradict each other
	Oversized              // longer than the link's MTU
	Foreign                // neither IP, ARP nor neighbour discovery
	Lost                   // to the guest: it did not take them in time
	counters
)

func (c Count) String() string {
	return [...]string{"forged", "malformed", "oversized", "foreign", "lost"}[c]
}

// New makes a link that no machine is attached to.
func New(c Config) *Link {
	return &Link{c: c, guestMAC: tcpip.LinkAddress(c.GuestMAC), gatewayMAC: tcpip.LinkAddress(c.GatewayMAC)}
}

// Counts gives how many frames were dropped, by reason.
func (l *Link) Counts() map[string]uint64 {
	all := map[string]uint64{}
	for i := range l.counts {
		if n := l.counts[i].Load(); n > 0 {
			all[Count(i).String()] = n
		}
	}
	return all
}

func (l *Link) count(c Count) { l.counts[c].Add(1) }

// Plug attaches a machine's stream in place of the one there is, which is closed. What
// waited for the old one is dropped. The link owns the stream.
func (l *Link) Plug(rwc io.ReadWriteCloser) {
	s := &stream{rwc: rwc, done: make(chan struct{}), wake: make(chan struct{}, 1)}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		rwc.Close()
		return
	}
	old := l.stream
	l.stream = s
	l.readers.Add(2)
	l.mu.Unlock()
	if old != nil {
		l.drop(old)
	}
	go l.receive(s)
	go l.send(s)
}

// Unplug detaches the machine there is, if any.
func (l *Link) Unplug() {
	l.mu.Lock()
	s := l.stream
	l.mu.Unlock()
	if s != nil {
		l.drop(s)
	}
}

// Plugged says whether a machine is attached.
func (l *Link) Plugged() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stream != nil
}

// drop ends a stream; the first call does.
func (l *Link) drop(s *stream) {
	s.once.Do(func() {
		close(s.done)
		s.rwc.Close()
		l.mu.Lock()
		if l.stream == s {
			l.stream = nil
		}
		waiting := s.queue
		s.queue, s.extra, s.queued = nil, nil, 0
		l.mu.Unlock()
		for _, p := range waiting {
			p.DecRef()
		}
	})
}

// receive reads frames until the stream ends.
func (l *Link) receive(s *stream) {
	defer l.readers.Done()
	defer l.drop(s)
	in := bufio.NewReaderSize(s.rwc, 256<<10)
	for {
		frame, err := readFrame(in)
		if errors.Is(err, errOversized) {
			l.count(Oversized)
			continue
		}
		if err != nil {
			return
		}
		l.handle(s, frame)
	}
}

var (
	errOversized = errors.New("a frame longer than the link carries")
	errFraming   = errors.New("not a stream of frames")
)

// readFrame reads one frame. After errOversized the next can be read.
func readFrame(in *bufio.Reader) (*buffer.View, error) {
	var prefix [lengthSize]byte
	if _, err := io.ReadFull(in, prefix[:]); err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(prefix[:])
	switch {
	case length > maxLength:
		return nil, errFraming
	case length > maxFrame:
		if _, err := in.Discard(int(length)); err != nil {
			return nil, err
		}
		return nil, errOversized
	}
	frame := buffer.NewViewSize(int(length))
	if _, err := io.ReadFull(in, frame.AsSlice()); err != nil {
		frame.Release()
		return nil, err
	}
	return frame, nil
}

// deliver hands an IP packet to the stack.
func (l *Link) deliver(protocol tcpip.NetworkProtocolNumber, frame *buffer.View) {
	l.mu.Lock()
	d := l.dispatcher
	l.mu.Unlock()
	if d == nil {
		frame.Release()
		return
	}
	frame.TrimFront(header.EthernetMinimumSize)
	p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(frame)})
	d.DeliverNetworkPacket(protocol, p)
	p.DecRef()
}

// answer queues a frame of our own.
func (l *Link) answer(s *stream, frame []byte) {
	l.mu.Lock()
	fits := s.queued+len(frame) <= maxQueued
	if fits {
		s.extra = append(s.extra, frame)
		s.queued += len(frame)
	}
	l.mu.Unlock()
	if !fits {
		l.count(Lost)
		return
	}
	s.signal()
}

func (s *stream) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// WritePackets queues what the stack sends to the guest.
func (l *Link) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	packets := list.AsSlice()
	l.mu.Lock()
	s := l.stream
	if s == nil {
		l.mu.Unlock()
		return len(packets), nil // no machine: they go where they would in a cut wire
	}
	n := 0
	for _, p := range packets {
		if s.queued+p.Size() > maxQueued {
			break
		}
		s.queue = append(s.queue, p.IncRef())
		s.queued += p.Size()
		n++
	}
	l.mu.Unlock()
	s.signal()
	if n < len(packets) {
		l.counts[Lost].Add(uint64(len(packets) - n))
		return n, &tcpip.ErrNoBufferSpace{}
	}
	return n, nil
}

// send writes what is queued, all that waits at once.
func (l *Link) send(s *stream) {
	defer l.readers.Done()
	defer l.drop(s)
	var parts net.Buffers
	var heads []byte
	for {
		select {
		case <-s.done:
			return
		case <-s.wake:
		}
		l.mu.Lock()
		packets, extra := s.queue, s.extra
		s.queue, s.extra = nil, nil
		l.mu.Unlock()
		parts, heads = parts[:0], heads[:0]
		size := 0
		if need := (len(packets) + len(extra)) * (lengthSize + header.EthernetMinimumSize); cap(heads) < need {
			heads = make([]byte, 0, need)
		}
		for _, frame := range extra {
			at := len(heads)
			heads = binary.BigEndian.AppendUint32(heads, uint32(len(frame)))
			parts = append(parts, heads[at:], frame)
			size += len(frame)
		}
		for _, p := range packets {
			at := len(heads)
			heads = binary.BigEndian.AppendUint32(heads, uint32(header.EthernetMinimumSize+p.Size()))
			heads = l.appendHeader(heads, p.NetworkProtocolNumber)
			parts = append(append(parts, heads[at:]), p.AsSlices()...)
			size += p.Size()
		}
		all := parts // WriteTo consumes the slice it is called on
		_, err := all.WriteTo(s.rwc)
		for _, p := range packets {
			p.DecRef()
		}
		l.mu.Lock()
		s.queued -= size
		l.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (l *Link) appendHeader(b []byte, protocol tcpip.NetworkProtocolNumber) []byte {
	b = append(append(b, l.guestMAC...), l.gatewayMAC...)
	return binary.BigEndian.AppendUint16(b, uint16(protocol))
}

// The rest of stack.LinkEndpoint.

func (l *Link) Attach(d stack.NetworkDispatcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dispatcher = d
}

func (l *Link) IsAttached() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dispatcher != nil
}

// Close detaches for good.
func (l *Link) Close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.Unplug()
}

func (l *Link) Wait()                                        { l.readers.Wait() }
func (l *Link) MTU() uint32                                  { return MTU }
func (l *Link) SetMTU(uint32)                                {}
func (l *Link) MaxHeaderLength() uint16                      { return 0 }
func (l *Link) LinkAddress() tcpip.LinkAddress               { return "" } // neighbours are this package's business
func (l *Link) SetLinkAddress(tcpip.LinkAddress)             {}
func (l *Link) Capabilities() stack.LinkEndpointCapabilities { return 0 }
func (l *Link) ARPHardwareType() header.ARPHardwareType      { return header.ARPHardwareNone }
func (l *Link) AddHeader(*stack.PacketBuffer)                {}
func (l *Link) ParseHeader(*stack.PacketBuffer) bool         { return true }
func (l *Link) SetOnCloseAction(func())                      {}
