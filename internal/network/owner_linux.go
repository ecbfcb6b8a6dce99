package network

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// portOwner is a clause that says which program has a port: "" when that cannot be
// seen.
func portOwner(at netip.AddrPort, udp bool) string {
	protocol := "tcp"
	if udp {
		protocol = "udp"
	}
	inode := ""
	for _, file := range []string{protocol, protocol + "6"} {
		if inode = socketInode("/proc/net/"+file, at, udp); inode != "" {
			break
		}
	}
	if inode == "" {
		return ""
	}
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && target == "socket:["+inode+"]" {
			process := filepath.Dir(filepath.Dir(link))
			name, _ := os.ReadFile(process + "/comm")
			return fmt.Sprintf(" by %s (process %s)", strings.TrimSpace(string(name)), filepath.Base(process))
		}
	}
	return ""
}

// socketInode finds the listening socket that has an address in one of the kernel's
// tables (proc_net_tcp.rst): "" when it is not there.
func socketInode(file string, at netip.AddrPort, udp bool) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	const listening = "0A"
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || !udp && fields[3] != listening {
			continue
		}
		addr, port, _ := strings.Cut(fields[1], ":")
		if number, err := strconv.ParseUint(port, 16, 16); err != nil || uint16(number) != at.Port() {
			continue
		}
		if a := tableAddr(addr); a.IsUnspecified() || a == at.Addr() || at.Addr().IsUnspecified() {
			return fields[9]
		}
	}
	return ""
}

// tableAddr reads an address of the kernel's tables: 32-bit words in this computer's
// byte order, which is little-endian wherever doz runs.
func tableAddr(text string) netip.Addr {
	b, err := hex.DecodeString(text)
	if err != nil || len(b)%4 != 0 {
		return netip.Addr{}
	}
	for i := 0; i < len(b); i += 4 {
		slices.Reverse(b[i : i+4])
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr.Unmap()
}
