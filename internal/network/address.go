package network

import (
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"dozable.com/doz/internal/network/policy"
)

// ownNetworks remembers for a moment what networks this computer is in.
type ownNetworks struct {
	list func() []netip.Prefix

	mu    sync.Mutex
	known []netip.Prefix
	until time.Time
}

func (o *ownNetworks) get() []netip.Prefix {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := time.Now(); !now.Before(o.until) {
		o.known, o.until = o.list(), now.Add(2*time.Second)
	}
	return o.known
}

// interfaceNetworks are the networks of this computer's interfaces.
func interfaceNetworks() []netip.Prefix {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var all []netip.Prefix
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			all = append(all, p)
		}
	}
	return all
}

// restricted says whether an address needs a rule that names it.
func (n *Network) restricted(addr netip.Addr) bool {
	if policy.Special(addr) {
		return true
	}
	for _, p := range n.own.get() {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// closed says whether a port is one of this computer's that no rule opens.
func (n *Network) closed(addr netip.Addr, port uint16) bool {
	if n.c.ClosedPorts == nil {
		return false
	}
	mine := addr.IsLoopback() || addr.IsUnspecified()
	for _, p := range n.own.get() {
		mine = mine || p.Addr() == addr
	}
	if mine {
		for _, closed := range n.c.ClosedPorts() {
			if closed == port {
				return true
			}
		}
	}
	return false
}

// reverseName reads a name below in-addr.arpa or ip6.arpa.
func reverseName(name string) (netip.Addr, bool) {
	if digits, is := strings.CutSuffix(name, ".in-addr.arpa"); is {
		parts := strings.Split(digits, ".")
		var b [4]byte
		for i, part := range parts {
			v, err := strconv.ParseUint(part, 10, 8)
			if err != nil || len(parts) != 4 {
				return netip.Addr{}, true
			}
			b[3-i] = byte(v)
		}
		return netip.AddrFrom4(b), true
	}
	if digits, is := strings.CutSuffix(name, ".ip6.arpa"); is {
		parts := strings.Split(digits, ".")
		var b [16]byte
		for i, part := range parts {
			v, err := strconv.ParseUint(part, 16, 8)
			if err != nil || len(parts) != 32 || len(part) != 1 {
				return netip.Addr{}, true
			}
			b[15-i/2] |= byte(v) << (4 * (i % 2))
		}
		return netip.AddrFrom16(b), true
	}
	return netip.Addr{}, false
}
