package network

import (
	"net"
	"net/netip"

	"dozable.com/doz/internal/guest"
)

// GuestSetup is what doznet is to make of the guest's card with that MAC address, after
// each boot, wake and adoption. It works without knowing what the guest was before.
func GuestSetup(mac net.HardwareAddr) guest.NetworkSetup {
	return guest.NetworkSetup{
		MAC: mac.String(), MTU: MTU, GatewayMAC: GatewayMAC.String(),
		Addresses: []netip.Prefix{netip.PrefixFrom(Guest4, Bits4), netip.PrefixFrom(Guest6, Bits6)},
		Gateways:  []netip.Addr{Gateway4, Gateway6}, Resolvers: []netip.Addr{Gateway4, Gateway6},
	}
}

// maxRevived bounds the connections that one call asks after.
const maxRevived = 4096

// Revive asks the guest after TCP connections that it believes to be open (as
// guest.NetworkState tells): those that this network does not carry any more end at once
// with a reset, rather than when their programs next send something.
//
// The guest is sent a segment that fits nowhere in the connection; its answer (RFC 9293,
// 3.10.7.4) says what would fit, and the stack resets what it does not know.
func (n *Network) Revive(open []guest.Connection) {
	for _, c := range open[:min(len(open), maxRevived)] {
		local, remote := c.Local.Addr().Unmap(), c.Remote.Addr().Unmap()
		if local == Guest4 && remote.Is4() || local == Guest6 && remote.Is6() {
			n.link.Poke(netip.AddrPortFrom(remote, c.Remote.Port()), netip.AddrPortFrom(local, c.Local.Port()))
		}
	}
}
