package link

import (
	"math/rand/v2"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// Poke sends the guest a TCP segment with no data and a random sequence number, as if
// it came from the other end of one of its connections.
func (l *Link) Poke(from, to netip.AddrPort) {
	l.mu.Lock()
	s := l.stream
	l.mu.Unlock()
	if s == nil {
		return
	}
	src, dst := tcpip.AddrFromSlice(from.Addr().AsSlice()), tcpip.AddrFromSlice(to.Addr().AsSlice())
	segment := header.TCP(make([]byte, header.TCPMinimumSize))
	segment.Encode(&header.TCPFields{
		SrcPort: from.Port(), DstPort: to.Port(), SeqNum: rand.Uint32(), AckNum: rand.Uint32(),
		DataOffset: header.TCPMinimumSize, Flags: header.TCPFlagAck, WindowSize: 1024,
	})
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, src, dst, header.TCPMinimumSize)
	segment.SetChecksum(^segment.CalculateChecksum(sum))
	if from.Addr().Is4() {
		frame := make([]byte, header.EthernetMinimumSize+header.IPv4MinimumSize+header.TCPMinimumSize)
		l.putHeader(frame, header.IPv4ProtocolNumber)
		ip := header.IPv4(frame[header.EthernetMinimumSize:])
		ip.Encode(&header.IPv4Fields{
			TotalLength: header.IPv4MinimumSize + header.TCPMinimumSize, TTL: 64, Protocol: uint8(header.TCPProtocolNumber), SrcAddr: src, DstAddr: dst,
		})
		ip.SetChecksum(^ip.CalculateChecksum())
		copy(ip.Payload(), segment)
		l.answer(s, frame)
		return
	}
	frame := make([]byte, header.EthernetMinimumSize+header.IPv6MinimumSize+header.TCPMinimumSize)
	l.putHeader(frame, header.IPv6ProtocolNumber)
	header.IPv6(frame[header.EthernetMinimumSize:]).Encode(&header.IPv6Fields{
		PayloadLength: header.TCPMinimumSize, TransportProtocol: header.TCPProtocolNumber, HopLimit: 64, SrcAddr: src, DstAddr: dst,
	})
	copy(frame[header.EthernetMinimumSize+header.IPv6MinimumSize:], segment)
	l.answer(s, frame)
}
