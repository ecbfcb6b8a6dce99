package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// up makes the card what the set-up says, however often it is called, and tells which
// connections were open over it.
func up(s guest.NetworkSetup) (guest.NetworkState, error) {
	mac, err := net.ParseMAC(s.MAC)
	if err != nil {
		return guest.NetworkState{}, err
	}
	gatewayMAC, err := net.ParseMAC(s.GatewayMAC)
	if err != nil {
		return guest.NetworkState{}, err
	}
	if lo, err := netlink.LinkByName("lo"); err == nil {
		netlink.LinkSetUp(lo)
	}
	card, err := findCard(mac)
	if err != nil {
		return guest.NetworkState{}, err
	}
	name := card.Attrs().Name
	// Everything is told; nothing is to be found out.
	for _, setting := range []string{"accept_ra", "autoconf", "router_solicitations", "accept_dad"} {
		os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", name, setting), []byte("0"), 0)
	}
	os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf", name, "addr_gen_mode"), []byte("1"), 0)
	if !bytes.Equal(card.Attrs().HardwareAddr, mac) {
		if err := netlink.LinkSetHardwareAddr(card, mac); err != nil {
			return guest.NetworkState{}, fmt.Errorf("cannot set the MAC address of %s: %w", name, err)
		}
	}
	if s.MTU > 0 && card.Attrs().MTU != s.MTU {
		if err := netlink.LinkSetMTU(card, s.MTU); err != nil {
			return guest.NetworkState{}, fmt.Errorf("cannot set the MTU of %s to %d: %w", name, s.MTU, err)
		}
	}
	if err := netlink.LinkSetUp(card); err != nil {
		return guest.NetworkState{}, fmt.Errorf("cannot bring %s up: %w", name, err)
	}
	if err := setAddresses(card, s); err != nil {
		return guest.NetworkState{}, err
	}
	if err := setRoutes(card, s, gatewayMAC); err != nil {
		return guest.NetworkState{}, err
	}
	if err := setResolvers(s.Resolvers); err != nil {
		return guest.NetworkState{}, err
	}
	open, err := connections()
	return guest.NetworkState{Card: name, Connections: open}, err
}

// findCard finds the card with a MAC address, or the only card there is.
func findCard(mac net.HardwareAddr) (netlink.Link, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("cannot list the network cards: %w", err)
	}
	var cards []netlink.Link
	for _, l := range links {
		if bytes.Equal(l.Attrs().HardwareAddr, mac) {
			return l, nil
		}
		// Of hardware, not a bridge or tunnel that a program made.
		if _, err := os.Stat(filepath.Join("/sys/class/net", l.Attrs().Name, "device")); err == nil {
			cards = append(cards, l)
		}
	}
	if len(cards) != 1 {
		return nil, fmt.Errorf("no network card has the address %s, and there are %d", mac, len(cards))
	}
	return cards[0], nil
}

// setAddresses gives the card its addresses and takes others away.
func setAddresses(card netlink.Link, s guest.NetworkSetup) error {
	want := map[netip.Prefix]bool{}
	for _, prefix := range s.Addresses {
		want[prefix] = true
		addr := &netlink.Addr{IPNet: ipNet(prefix)}
		if prefix.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrReplace(card, addr); err != nil {
			return fmt.Errorf("cannot give %s the address %s: %w", card.Attrs().Name, prefix, err)
		}
	}
	have, err := netlink.AddrList(card, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("cannot list the addresses of %s: %w", card.Attrs().Name, err)
	}
	for _, a := range have {
		prefix, err := netip.ParsePrefix(a.IPNet.String())
		if err == nil && !want[prefix] && !prefix.Addr().IsLinkLocalUnicast() {
			netlink.AddrDel(card, &a)
		}
	}
	return nil
}

// setRoutes sends everything to the gateways, whose hardware address is known.
func setRoutes(card netlink.Link, s guest.NetworkSetup, gatewayMAC net.HardwareAddr) error {
	index := card.Attrs().Index
	for _, gateway := range s.Gateways {
		ip := net.IP(gateway.AsSlice())
		err := netlink.NeighSet(&netlink.Neigh{LinkIndex: index, IP: ip, HardwareAddr: gatewayMAC, State: netlink.NUD_PERMANENT})
		if err != nil {
			return fmt.Errorf("cannot note the gateway %s: %w", gateway, err)
		}
		all := &net.IPNet{IP: make(net.IP, len(ip)), Mask: make(net.IPMask, len(ip))}
		if err := netlink.RouteReplace(&netlink.Route{LinkIndex: index, Dst: all, Gw: ip}); err != nil {
			return fmt.Errorf("cannot route to the gateway %s: %w", gateway, err)
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

const resolvConf = "/etc/resolv.conf"

// setResolvers writes resolv.conf where the image has it. A link to a service's file,
// which nobody here writes, gives way; a root that cannot be written to gets a file
// mounted over it.
func setResolvers(resolvers []netip.Addr) error {
	text := []byte("# written by doz at each start\n")
	for _, r := range resolvers {
		text = append(text, "nameserver "+r.String()+"\n"...)
	}
	if current, err := os.ReadFile(resolvConf); err == nil && bytes.Equal(current, text) {
		return nil
	}
	tmp := filepath.Join(filepath.Dir(resolvConf), ".resolv.conf.doz")
	err := os.WriteFile(tmp, text, 0o644)
	if err == nil {
		err = os.Rename(tmp, resolvConf)
	}
	if err == nil {
		return nil
	}
	os.Remove(tmp)
	if !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("cannot write %s: %w", resolvConf, err)
	}
	const over = "/run/doz/resolv.conf"
	if err := os.MkdirAll(filepath.Dir(over), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(over, text, 0o644); err != nil {
		return err
	}
	if err := unix.Mount(over, resolvConf, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("cannot mount %s: %w", resolvConf, err)
	}
	return nil
}
