package network

import (
	"io"
	"net"
	"runtime"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
)

// Both ends of the frames are in this process, so throughput is of two stacks.

func benchStart(b *testing.B) (*world, *Network, *guestStack) {
	w := newWorld()
	c := w.config(rules(b, "allow good.example"))
	n := w.network(b, c)
	g := bootGuest(b, n)
	w.name("good.example", "93.184.216.34")
	g.resolve(b, "good.example", dnsmessage.TypeA)
	return w, n, g
}

func BenchmarkOut(b *testing.B) {
	w, _, g := benchStart(b)
	done := make(chan int64, 1)
	w.serve(b, "93.184.216.34:7", func(c net.Conn) {
		n, _ := io.Copy(io.Discard, c)
		done <- n
	})
	conn, err := g.dial("93.184.216.34", 7)
	if err != nil {
		b.Fatal(err)
	}
	block := make([]byte, 1<<20)
	b.SetBytes(int64(len(block)))
	for b.Loop() {
		conn.Write(block)
	}
	conn.Close()
	<-done
}

func BenchmarkIn(b *testing.B) {
	w, _, g := benchStart(b)
	w.serve(b, "93.184.216.34:7", func(c net.Conn) {
		for block := make([]byte, 1<<20); ; {
			if _, err := c.Write(block); err != nil {
				return
			}
		}
	})
	conn, err := g.dial("93.184.216.34", 7)
	if err != nil {
		b.Fatal(err)
	}
	block := make([]byte, 1<<20)
	b.SetBytes(int64(len(block)))
	for b.Loop() {
		if _, err := io.ReadFull(conn, block); err != nil {
			b.Fatal(err)
		}
	}
	conn.Close()
}

func BenchmarkConnect(b *testing.B) {
	w, _, g := benchStart(b)
	w.serve(b, "93.184.216.34:7", func(net.Conn) {})
	for b.Loop() {
		conn, err := g.dial("93.184.216.34", 7)
		if err != nil {
			b.Fatal(err)
		}
		conn.Close()
	}
}

func BenchmarkDNS(b *testing.B) {
	_, _, g := benchStart(b)
	conn := g.dialUDP(b, Gateway4.String(), 53)
	q, buf := query("good.example", dnsmessage.TypeA), make([]byte, 512)
	for b.Loop() {
		conn.Write(q)
		if _, err := conn.Read(buf); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkHeld tells what 1,000 idle connections hold, less what the guest's and the
// server's ends hold, which are here too: bytes of heap and stacks a connection.
func BenchmarkHeld(b *testing.B) {
	const connections = 1000
	w, _, g := benchStart(b)
	hold := make(chan struct{})
	b.Cleanup(func() { close(hold) })
	w.serve(b, "93.184.216.34:7", func(net.Conn) { <-hold })
	held := func() float64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapInuse + m.StackInuse)
	}
	for range 1 {
		before := held()
		var all []*gonet.TCPConn
		for range connections {
			conn, err := g.dial("93.184.216.34", 7)
			if err != nil {
				b.Fatal(err)
			}
			io.WriteString(conn, "a line of what the policy looks at\n")
			all = append(all, conn)
		}
		b.ReportMetric((held()-before)/connections, "bytes/connection")
		for _, conn := range all {
			conn.Close()
		}
	}
}
