// Command doznet sets up a guest's network and looks at it, from the guest's inside,
// with no help of the image: no DHCP, no ip, no resolver's service.
//
//	doznet up          reads a guest.NetworkSetup, prints a guest.NetworkState
//	doznet ports       prints the listening ports, a list of guest.ListeningPort
//	doznet connect A   joins its standard input and output to the TCP address A, for
//	                   services that listen on the guest's loopback only
//
// It must not decide what may be reached: that is the host's.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"dozable.com/doz/internal/guest"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "doznet:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "up":
		var setup guest.NetworkSetup
		if err := json.NewDecoder(io.LimitReader(os.Stdin, 1<<20)).Decode(&setup); err != nil {
			return fmt.Errorf("the set-up cannot be read: %w", err)
		}
		state, err := up(setup)
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(state)
	case len(args) == 1 && args[0] == "ports":
		ports, err := listening()
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(ports)
	case len(args) == 2 && args[0] == "connect":
		return connect(args[1])
	}
	return fmt.Errorf("usage: doznet up | ports | connect ADDRESS:PORT")
}

// connect joins standard input and output to a TCP connection.
func connect(address string) error {
	conn, err := net.DialTimeout("tcp", address, 10*time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() {
		io.Copy(conn, os.Stdin)
		conn.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(os.Stdout, conn)
	return err
}
