package guest

import "net/netip"

// NetworkSetup is what `doznet up` reads, as JSON, on its standard input.
type NetworkSetup struct {
	MAC       string         `json:"mac"` // which card; one with another MAC is given this one when it is the only card
	MTU       int            `json:"mtu"`
	Addresses []netip.Prefix `json:"addresses"`
	Gateways  []netip.Addr   `json:"gateways"`
	// GatewayMAC is put into the neighbour table, so that nothing is asked first.
	GatewayMAC string       `json:"gatewayMAC"`
	Resolvers  []netip.Addr `json:"resolvers"`
}

// NetworkState is what `doznet up` prints, as JSON.
type NetworkState struct {
	Card string `json:"card"` // eth0
	// Connections are the TCP connections that are open over the card. After a wake
	// nobody at the other end may know them any more.
	Connections []Connection `json:"connections,omitempty"`
}

// Connection is a TCP connection of the guest's.
type Connection struct {
	Local  netip.AddrPort `json:"local"`
	Remote netip.AddrPort `json:"remote"`
}

// ListeningPort is one of what `doznet ports` prints, as a JSON list.
type ListeningPort struct {
	Protocol string     `json:"protocol"` // tcp, udp
	Address  netip.Addr `json:"address"`  // unspecified: all
	Port     uint16     `json:"port"`
	Process  string     `json:"process,omitempty"` // its name, where it can be seen
	PID      int        `json:"pid,omitempty"`
}
