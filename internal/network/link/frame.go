package link

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// handle judges one frame from the guest: to the stack, answered here, or dropped.
func (l *Link) handle(s *stream, frame *buffer.View) {
	eth := header.Ethernet(frame.AsSlice())
	if len(eth) < header.EthernetMinimumSize {
		l.count(Malformed)
		frame.Release()
		return
	}
	if eth.SourceAddress() != l.guestMAC {
		l.count(Forged)
		frame.Release()
		return
	}
	to := eth.DestinationAddress()
	if to != l.gatewayMAC && to[0]&1 == 0 {
		frame.Release() // for a neighbour that is not there
		return
	}
	payload := eth[header.EthernetMinimumSize:]
	switch eth.Type() {
	case header.IPv4ProtocolNumber:
		if l.take4(s, payload) {
			l.deliver(header.IPv4ProtocolNumber, frame)
			return
		}
	case header.IPv6ProtocolNumber:
		if l.take6(s, payload) {
			l.deliver(header.IPv6ProtocolNumber, frame)
			return
		}
	case header.ARPProtocolNumber:
		l.arp(s, payload)
	default:
		l.count(Foreign)
	}
	frame.Release()
}

// arp answers who has the gateway's address, and nothing else: there is no table that
// a guest could fill.
func (l *Link) arp(s *stream, payload []byte) {
	request := header.ARP(payload)
	if !request.IsValid() {
		l.count(Malformed)
		return
	}
	gateway := l.c.Gateway4.As4()
	if request.Op() != header.ARPRequest || !bytes.Equal(request.ProtocolAddressTarget(), gateway[:]) {
		return
	}
	frame := make([]byte, header.EthernetMinimumSize+header.ARPSize)
	l.putHeader(frame, header.ARPProtocolNumber)
	reply := header.ARP(frame[header.EthernetMinimumSize:])
	reply.SetIPv4OverEthernet()
	reply.SetOp(header.ARPReply)
	copy(reply.HardwareAddressSender(), l.gatewayMAC)
	copy(reply.ProtocolAddressSender(), gateway[:])
	copy(reply.HardwareAddressTarget(), l.guestMAC)
	copy(reply.ProtocolAddressTarget(), request.ProtocolAddressSender())
	l.answer(s, frame)
}

// take4 says whether an IPv4 packet is for the stack.
func (l *Link) take4(s *stream, payload []byte) bool {
	ip := header.IPv4(payload)
	if !ip.IsValid(len(payload)) {
		l.count(Malformed)
		return false
	}
	from, to := addrOf(ip.SourceAddress()), addrOf(ip.DestinationAddress())
	if to.IsMulticast() || to == broadcast || from == netip.IPv4Unspecified() {
		return false // the chatter of DHCP, mDNS and the like
	}
	if from != l.c.Guest4 {
		l.count(Forged)
		return false
	}
	switch ip.TransportProtocol() {
	case header.TCPProtocolNumber, header.UDPProtocolNumber:
		return true
	case header.ICMPv4ProtocolNumber:
		if to == l.c.Gateway4 {
			return true
		}
		if icmp := ip.Payload(); ip.FragmentOffset() != 0 || len(icmp) == 0 || header.ICMPv4Type(icmp[0]) != header.ICMPv4Echo {
			return false // errors are not answered with errors (RFC 1122, 3.2.2)
		}
		l.refuse(s, "icmp", to, l.unreachable4(payload))
		return false
	}
	if ip.FragmentOffset() == 0 {
		l.refuse(s, "ip", to, l.unreachable4(payload))
	}
	return false
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// take6 says whether an IPv6 packet is for the stack.
func (l *Link) take6(s *stream, payload []byte) bool {
	ip := header.IPv6(payload)
	if !ip.IsValid(len(payload)) {
		l.count(Malformed)
		return false
	}
	from, to := addrOf(ip.SourceAddress()), addrOf(ip.DestinationAddress())
	if ip.TransportProtocol() == header.ICMPv6ProtocolNumber && (from.IsLinkLocalUnicast() || from.IsUnspecified() || to.IsMulticast() || to == l.c.Gateway6) {
		if icmp := ip.Payload(); len(icmp) > 0 && header.ICMPv6Type(icmp[0]) == header.ICMPv6NeighborSolicit {
			l.neighbour(s, ip)
			return false
		}
	}
	if to.IsMulticast() || from.IsLinkLocalUnicast() || from.IsUnspecified() {
		return false
	}
	if from != l.c.Guest6 {
		l.count(Forged)
		return false
	}
	switch header.IPv6ExtensionHeaderIdentifier(ip.NextHeader()) {
	case header.IPv6HopByHopOptionsExtHdrIdentifier, header.IPv6RoutingExtHdrIdentifier,
		header.IPv6FragmentExtHdrIdentifier, header.IPv6DestinationOptionsExtHdrIdentifier:
		return true // the stack looks further
	}
	switch ip.TransportProtocol() {
	case header.TCPProtocolNumber, header.UDPProtocolNumber:
		return true
	case header.ICMPv6ProtocolNumber:
		if to == l.c.Gateway6 {
			return true
		}
		if icmp := ip.Payload(); len(icmp) == 0 || header.ICMPv6Type(icmp[0]) != header.ICMPv6EchoRequest {
			return false
		}
		l.refuse(s, "icmp", to, l.unreachable6(payload))
		return false
	}
	l.refuse(s, "ip", to, l.unreachable6(payload))
	return false
}

// neighbour answers a solicitation for the gateway's address (RFC 4861, 7.2.4).
func (l *Link) neighbour(s *stream, ip header.IPv6) {
	icmp := header.ICMPv6(ip.Payload())
	if len(icmp) < header.ICMPv6NeighborSolicitMinimumSize || ip.HopLimit() != header.NDPHopLimit {
		l.count(Malformed)
		return
	}
	target := header.NDPNeighborSolicit(icmp.MessageBody()).TargetAddress()
	from := ip.SourceAddress()
	if addrOf(target) != l.c.Gateway6 || from.Unspecified() {
		return
	}
	const size = header.ICMPv6NeighborAdvertMinimumSize + header.NDPLinkLayerAddressSize
	frame := make([]byte, header.EthernetMinimumSize+header.IPv6MinimumSize+size)
	l.putHeader(frame, header.IPv6ProtocolNumber)
	l.put6(frame, target, from, header.NDPHopLimit, size)
	reply := header.ICMPv6(frame[header.EthernetMinimumSize+header.IPv6MinimumSize:])
	reply.SetType(header.ICMPv6NeighborAdvert)
	advert := header.NDPNeighborAdvert(reply.MessageBody())
	advert.SetTargetAddress(target)
	advert.SetSolicitedFlag(true)
	advert.SetOverrideFlag(true)
	advert.SetRouterFlag(true)
	advert.Options().Serialize(header.NDPOptionsSerializer{header.NDPTargetLinkLayerAddressOption(l.gatewayMAC)})
	reply.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: reply, Src: target, Dst: from}))
	l.answer(s, frame)
}

// refuse answers a packet with an error, so that its program need not wait.
func (l *Link) refuse(s *stream, protocol string, to netip.Addr, frame []byte) {
	l.answer(s, frame)
	if l.c.Refused != nil {
		l.c.Refused(protocol, to)
	}
}

// quoted is how much of a refused packet its error repeats.
const quoted = 128

// unreachable4 is the ICMP error "communication administratively prohibited".
func (l *Link) unreachable4(packet []byte) []byte {
	ip := header.IPv4(packet)
	quote := packet[:min(len(packet), quoted)]
	size := header.ICMPv4MinimumSize + len(quote)
	frame := make([]byte, header.EthernetMinimumSize+header.IPv4MinimumSize+size)
	l.putHeader(frame, header.IPv4ProtocolNumber)
	out := header.IPv4(frame[header.EthernetMinimumSize:])
	out.Encode(&header.IPv4Fields{
		TotalLength: uint16(header.IPv4MinimumSize + size), TTL: 64, Protocol: uint8(header.ICMPv4ProtocolNumber),
		SrcAddr: ip.DestinationAddress(), DstAddr: ip.SourceAddress(),
	})
	out.SetChecksum(^out.CalculateChecksum())
	icmp := header.ICMPv4(out.Payload())
	icmp.SetType(header.ICMPv4DstUnreachable)
	icmp.SetCode(header.ICMPv4AdminProhibited)
	copy(icmp[header.ICMPv4MinimumSize:], quote)
	icmp.SetChecksum(^checksum.Checksum(icmp, 0))
	return frame
}

// unreachable6 is likewise for IPv6.
func (l *Link) unreachable6(packet []byte) []byte {
	ip := header.IPv6(packet)
	quote := packet[:min(len(packet), quoted)]
	size := header.ICMPv6DstUnreachableMinimumSize + len(quote)
	frame := make([]byte, header.EthernetMinimumSize+header.IPv6MinimumSize+size)
	l.putHeader(frame, header.IPv6ProtocolNumber)
	l.put6(frame, ip.DestinationAddress(), ip.SourceAddress(), 64, size)
	icmp := header.ICMPv6(frame[header.EthernetMinimumSize+header.IPv6MinimumSize:])
	icmp.SetType(header.ICMPv6DstUnreachable)
	icmp.SetCode(header.ICMPv6Prohibited)
	copy(icmp[header.ICMPv6DstUnreachableMinimumSize:], quote)
	icmp.SetChecksum(header.ICMPv6Checksum(header.ICMPv6ChecksumParams{Header: icmp, Src: ip.DestinationAddress(), Dst: ip.SourceAddress()}))
	return frame
}

func (l *Link) put6(frame []byte, from, to tcpip.Address, hops uint8, size int) {
	header.IPv6(frame[header.EthernetMinimumSize:]).Encode(&header.IPv6Fields{
		PayloadLength: uint16(size), TransportProtocol: header.ICMPv6ProtocolNumber, HopLimit: hops, SrcAddr: from, DstAddr: to,
	})
}

func (l *Link) putHeader(frame []byte, protocol tcpip.NetworkProtocolNumber) {
	copy(frame, l.guestMAC)
	copy(frame[6:], l.gatewayMAC)
	binary.BigEndian.PutUint16(frame[12:], uint16(protocol))
}

func addrOf(a tcpip.Address) netip.Addr {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return addr
}
