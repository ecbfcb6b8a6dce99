package policy

import "net/netip"

// special are the networks that are no part of the public Internet, or that carry
// another address inside, of IANA's special-purpose registries. The networks kept for
// documentation are not among them: they lead nowhere, or to a laboratory's Internet.
var special = parsePrefixes(
	"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
	"192.0.0.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
	"::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23",
	"2002::/16", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
)

// Special says whether an address is not one of the public Internet: loopback, private,
// link-local (the clouds' metadata services), multicast, or one of the forms that embed an IPv4 address.
func Special(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	for _, p := range special {
		if p.Contains(addr) {
			return true
		}
	}
	return !addr.IsValid()
}

func parsePrefixes(list ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range list {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}
