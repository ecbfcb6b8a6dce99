package link

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

var config = Config{
	GuestMAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, GatewayMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1},
	Guest4: netip.MustParseAddr("198.18.0.2"), Gateway4: netip.MustParseAddr("198.18.0.1"),
	Guest6: netip.MustParseAddr("fd64:6f7a::2"), Gateway6: netip.MustParseAddr("fd64:6f7a::1"),
}

// framed is a frame from the guest, with its length.
func framed(protocol uint16, payload []byte) []byte {
	frame := append(append([]byte(nil), config.GatewayMAC...), config.GuestMAC...)
	frame = append(binary.BigEndian.AppendUint16(frame, protocol), payload...)
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)
}

// memory is a stream that gives bytes and forgets what is written.
type memory struct{ io.Reader }

func (memory) Write(p []byte) (int, error) { return len(p), nil }
func (memory) Close() error                { return nil }

func echo4(to netip.Addr) []byte {
	packet := make([]byte, header.IPv4MinimumSize+header.ICMPv4MinimumSize)
	ip := header.IPv4(packet)
	ip.Encode(&header.IPv4Fields{TotalLength: uint16(len(packet)), TTL: 64, Protocol: uint8(header.ICMPv4ProtocolNumber), SrcAddr: tcpip.AddrFromSlice(config.Guest4.AsSlice()), DstAddr: tcpip.AddrFromSlice(to.AsSlice())})
	packet[header.IPv4MinimumSize] = byte(header.ICMPv4Echo)
	return packet
}

// A ping to elsewhere is answered with an error and told of; a stream of something else
// ends.
func TestRefusesPing(t *testing.T) {
	told := make(chan string, 1)
	c := config
	c.Refused = func(protocol string, to netip.Addr) { told <- protocol + " " + to.String() }
	l := New(c)
	ours, theirs := net.Pipe()
	l.Plug(theirs)
	defer l.Close()
	if _, err := ours.Write(framed(uint16(header.IPv4ProtocolNumber), echo4(netip.MustParseAddr("8.8.8.8")))); err != nil {
		t.Fatal(err)
	}
	if got := <-told; got != "icmp 8.8.8.8" {
		t.Error(got)
	}
	in := bufio.NewReader(ours)
	answer, err := readFrame(in)
	if err != nil {
		t.Fatal(err)
	}
	ip := header.IPv4(answer.AsSlice()[header.EthernetMinimumSize:])
	if icmp := header.ICMPv4(ip.Payload()); !ip.IsValid(len(ip)) || icmp.Type() != header.ICMPv4DstUnreachable || icmp.Code() != header.ICMPv4AdminProhibited {
		t.Errorf("answered with %x", answer.AsSlice())
	}
	ours.Write([]byte("\xff\xff\xff\xff"))
	if _, err := ours.Read(make([]byte, 1)); err == nil {
		t.Error("a stream that is none stays open")
	}
	l.Close()
	l.Wait()
}

// Whatever a guest's card sends, the link stays up to the stream's end, and holds only
// what it may.
func FuzzStream(f *testing.F) {
	f.Add(framed(uint16(header.IPv4ProtocolNumber), echo4(netip.MustParseAddr("8.8.8.8"))))
	f.Add(framed(uint16(header.ARPProtocolNumber), make([]byte, header.ARPSize)))
	f.Add(framed(uint16(header.IPv6ProtocolNumber), append([]byte{0x60, 0, 0, 0, 0, 24, 58, 255}, make([]byte, 56)...)))
	f.Fuzz(func(t *testing.T, data []byte) {
		l := New(config)
		l.Plug(memory{bytes.NewReader(data)})
		l.Wait()
		if l.Plugged() {
			t.Error("still plugged after the stream's end")
		}
		l.Poke(netip.AddrPortFrom(config.Gateway4, 1), netip.AddrPortFrom(config.Guest4, 2))
	})
}

// Every frame of the guest's is judged without harm, however its headers lie.
func FuzzFrame(f *testing.F) {
	f.Add(uint16(header.IPv4ProtocolNumber), echo4(netip.MustParseAddr("8.8.8.8")))
	f.Add(uint16(header.IPv6ProtocolNumber), append([]byte{0x60, 0, 0, 0, 0, 24, 58, 255}, make([]byte, 56)...))
	f.Add(uint16(header.ARPProtocolNumber), []byte{0, 1, 8, 0, 6, 4, 0, 1})
	l := New(config)
	f.Fuzz(func(t *testing.T, protocol uint16, payload []byte) {
		in := bufio.NewReader(bytes.NewReader(framed(protocol, payload)))
		frame, err := readFrame(in)
		if err != nil {
			return
		}
		l.handle(&stream{wake: make(chan struct{}, 1)}, frame)
	})
}
