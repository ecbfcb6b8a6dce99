package network

import (
	"net/netip"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

func TestReverseName(t *testing.T) {
	for name, want := range map[string]string{
		"34.216.184.93.in-addr.arpa": "93.184.216.34",
		"1.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.a.7.f.6.4.6.d.f.ip6.arpa": "fd64:6f7a::1",
		"1.2.3.in-addr.arpa":       "invalid IP",
		"999.2.3.4.in-addr.arpa":   "invalid IP",
		"1.2.3.4.5.6.in-addr.arpa": "invalid IP",
		".ip6.arpa":                "invalid IP",
		"good.example":             "",
	} {
		addr, is := reverseName(name)
		if got := addr.String(); is != (want != "") || is && got != want {
			t.Errorf("%s: %s, %v", name, got, is)
		}
	}
}

// Whatever a guest asks, the answer is one that can be read, fits, and is to its query.
func FuzzQuery(f *testing.F) {
	f.Add(query("good.example", dnsmessage.TypeA), false)
	f.Add(query("34.216.184.93.in-addr.arpa", dnsmessage.TypePTR), true)
	w := newWorld()
	w.name("good.example", "93.184.216.34", "2606:2800::1")
	n, err := New(w.config(rules(f, "allow good.example")))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { n.Close() })
	n.book.add("good.example", []netip.Addr{netip.MustParseAddr("93.184.216.34")})
	f.Fuzz(func(t *testing.T, data []byte, stream bool) {
		q, _ := parseQuery(data, stream)
		answer := n.answer(t.Context(), data, stream)
		if answer == nil {
			return
		}
		var m dnsmessage.Message
		if err := m.Unpack(answer); err != nil || !m.Response || m.ID != q.header.ID || len(answer) > q.limit {
			t.Errorf("%x is answered with %x: %v", data, answer, err)
		}
		for _, name := range w.asked {
			if name != "good.example" {
				t.Errorf("%q reached the resolver", name)
			}
		}
	})
}

func FuzzParsePort(f *testing.F) {
	for _, text := range []string{"8080:80", "127.0.0.1:8080:80/udp", "[::1]:1:2/tcp"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParsePort(text)
		if err != nil {
			return
		}
		if again, err := ParsePort(p.String()); err != nil || again != p {
			t.Errorf("%q is %+v, and that %+v, %v", text, p, again, err)
		}
	})
}
