package main

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"dozable.com/doz/internal/guest"
)

// States of the kernel's sockets (include/net/tcp_states.h).
const (
	timeWait = 6
	closed   = 7 // of UDP: bound, and to nobody
	listen   = 10
)

// sockets gives the kernel's TCP and UDP sockets of both families.
func sockets(visit func(protocol string, s *netlink.Socket)) error {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		tcp, err := netlink.SocketDiagTCP(family)
		if err != nil {
			return fmt.Errorf("cannot list the TCP sockets: %w", err)
		}
		for _, s := range tcp {
			visit("tcp", s)
		}
		udp, err := netlink.SocketDiagUDP(family)
		if err != nil {
			return fmt.Errorf("cannot list the UDP sockets: %w", err)
		}
		for _, s := range udp {
			visit("udp", s)
		}
	}
	return nil
}

// connections are the TCP connections to others than this machine itself.
func connections() ([]guest.Connection, error) {
	var open []guest.Connection
	err := sockets(func(protocol string, s *netlink.Socket) {
		local, remote := addrOf(s.ID.Source), addrOf(s.ID.Destination)
		if protocol == "tcp" && s.State != listen && s.State != timeWait && !remote.IsLoopback() && local != remote && remote.IsValid() && !remote.IsUnspecified() {
			open = append(open, guest.Connection{Local: netip.AddrPortFrom(local, s.ID.SourcePort), Remote: netip.AddrPortFrom(remote, s.ID.DestinationPort)})
		}
	})
	return open, err
}

// listening are the ports that programs wait at.
func listening() ([]guest.ListeningPort, error) {
	owners := socketOwners()
	ports := []guest.ListeningPort{}
	err := sockets(func(protocol string, s *netlink.Socket) {
		if protocol == "tcp" && s.State != listen || protocol == "udp" && s.State != closed {
			return
		}
		p := guest.ListeningPort{Protocol: protocol, Address: addrOf(s.ID.Source), Port: s.ID.SourcePort, PID: owners[s.INode]}
		if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.PID)); err == nil && p.PID != 0 {
			p.Process = strings.TrimSpace(string(name))
		}
		ports = append(ports, p)
	})
	return ports, err
}

// socketOwners gives the process that holds each socket, by inode.
func socketOwners() map[uint32]int {
	owners := map[uint32]int{}
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, link := range links {
		target, err := os.Readlink(link)
		if err != nil {
			continue
		}
		inode, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(target, "socket:["), "]"), 10, 32)
		if err != nil {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(link))))
		owners[uint32(inode)] = pid
	}
	return owners
}

func addrOf(ip net.IP) netip.Addr {
	addr, _ := netip.AddrFromSlice(ip)
	return addr.Unmap()
}
