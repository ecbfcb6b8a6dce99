//go:build !linux

package network

import "net/netip"

// portOwner would say which program has a port.
func portOwner(netip.AddrPort, bool) string { return "" }
