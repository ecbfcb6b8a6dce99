package network

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/dns/dnsmessage"
)

// A name that no rule could allow is no name, and no other resolver hears of it.
func TestUnlistedNameStaysInside(t *testing.T) {
	w, n, g := start(t, "allow good.example", "deny bad.wide.example", "deny half.wide.example:25", "allow *.wide.example")
	for _, name := range []string{"evil.example", "secret.payload.evil.example", "bad.wide.example", "wide.example", "localhost", "xgood.example"} {
		for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeTXT, dnsmessage.TypeMX} {
			if m := g.resolve(t, name, kind); m.RCode != dnsmessage.RCodeNameError || len(m.Answers) > 0 {
				t.Errorf("%s %s: %s, %d answers", name, kind, m.RCode, len(m.Answers))
			}
		}
		if w.askedFor(name) {
			t.Errorf("%s reached the resolver", name)
		}
		w.find(t, name, func(r Record) bool { return r.Protocol == "dns" && r.Host == name && r.Verdict == "deny" })
	}
	w.name("a.wide.example", "93.184.216.1")
	w.name("half.wide.example", "93.184.216.2")
	for _, name := range []string{"a.wide.example", "A.Wide.EXAMPLE", "half.wide.example"} {
		if m := g.resolve(t, name, dnsmessage.TypeA); len(m.Answers) != 1 {
			t.Errorf("%s: %s", name, m.RCode)
		}
	}
	for _, r := range n.Refusals() {
		if r.Host == "evil.example" {
			want := "doz net allow a1 site:evil.example"
			if r.Command != want || r.Count != 3 || !strings.Contains(r.Words, "no rule allows it") {
				t.Errorf("refusal %+v, want the command %q", r, want)
			}
			return
		}
	}
	t.Errorf("no refusal of evil.example in %+v", n.Refusals())
}

// Only addresses that an answer produced, or that a rule names, are connected to; what
// is not is reset at once.
func TestAddresses(t *testing.T) {
	w, n, g := start(t, "allow good.example", "allow 198.51.100.0/24:22", "allow 93.184.216.99", "deny 93.184.216.77", "allow lan.example", "allow 192.168.7.7:8080")
	for _, at := range []string{"93.184.216.34:443", "198.51.100.5:22", "93.184.216.99:1", "192.168.7.7:8080"} {
		w.serve(t, at, echo)
	}
	w.name("good.example", "93.184.216.34", "93.184.216.77")
	w.name("lan.example", "192.168.7.8")
	for _, c := range []struct {
		addr string
		port uint16
		ok   bool
		why  string
	}{
		{"93.184.216.34", 443, false, "no answer of the sandbox's resolver"},
		{"8.8.8.8", 53, false, "no answer"}, // another resolver
		{"198.51.100.5", 22, true, ""},
		{"198.51.100.5", 23, false, "no answer"},
		{"93.184.216.99", 1, true, ""},
		{"192.168.7.7", 8080, true, ""},
		{"192.168.7.7", 22, false, "local network"},
		{"127.0.0.1", 22, false, ""}, // does not even leave a guest
		{"169.254.169.254", 81, false, "local network"},
		{"10.0.0.1", 443, false, "local network"},
		{"203.0.113.9", 22, false, "local network"}, // this computer's own
		{"203.0.113.77", 22, false, "local network"},
		{"fd00:ec2::254", 81, false, "local network"},
		{"64:ff9b::7f00:1", 22, false, "local network"},
		{"::ffff:127.0.0.1", 22, false, ""},
		{"2606:2800::1", 443, false, "no answer"},
		{"198.18.0.1", 8080, false, "no such service"},
	} {
		conn, err := g.dial(c.addr, c.port)
		if (err == nil) != c.ok {
			t.Errorf("%s port %d: %v", c.addr, c.port, err)
		}
		if err == nil {
			conn.Close()
		} else if c.why != "" && !strings.Contains(err.Error(), "refused") {
			t.Errorf("%s port %d: not reset but %v", c.addr, c.port, err)
		}
		if c.why != "" {
			w.find(t, c.addr, func(r Record) bool {
				return (r.Address == c.addr || r.Host == HostName) && r.Port == c.port && strings.Contains(r.Why, c.why)
			})
		}
	}
	// Now that an answer gave them: one is allowed, one denied by its address.
	g.resolve(t, "good.example", dnsmessage.TypeA)
	if _, err := g.dial("93.184.216.34", 443); err != nil {
		t.Error(err)
	}
	if _, err := g.dial("93.184.216.77", 443); err == nil {
		t.Error("an address that a rule denies was reached through a name")
	}
	// A name does not open an address of the local network.
	if m := g.resolve(t, "lan.example", dnsmessage.TypeA); m.RCode != dnsmessage.RCodeNameError {
		t.Errorf("lan.example resolved: %v", addrs(m))
	}
	for _, r := range n.Refusals() {
		if r.Host == "lan.example" && r.Offer != "site:192.168.7.8" {
			t.Errorf("lan.example is offered as %q", r.Offer)
		}
	}
}

// An answer that changes to an address inside, after the name was allowed, opens
// nothing; neither do the ports of the dashboards, whatever a rule says.
func TestRebindingAndClosedPorts(t *testing.T) {
	w := newWorld()
	c := w.config(rules(t, "allow *", "allow 203.0.113.9"))
	c.ClosedPorts = func() []uint16 { return []uint16{7777} }
	n := w.network(t, c)
	g := bootGuest(t, n)
	w.name("re.example", "93.184.216.34")
	g.resolve(t, "re.example", dnsmessage.TypeA)
	n.names.mu.Lock()
	clear(n.names.known) // as after a moment
	n.names.mu.Unlock()
	w.name("re.example", "127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fe80::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "0.0.0.0")
	for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
		if m := g.resolve(t, "re.example", kind); m.RCode != dnsmessage.RCodeNameError {
			t.Errorf("re.example resolved to %v", addrs(m))
		}
	}
	for _, a := range []string{"10.1.2.3", "169.254.169.254"} {
		if _, err := g.dial(a, 443); err == nil {
			t.Errorf("%s was reached", a)
		}
	}
	w.serve(t, "203.0.113.9:7777", echo)
	w.serve(t, "203.0.113.9:7778", echo)
	if _, err := g.dial("203.0.113.9", 7777); err == nil {
		t.Error("a dashboard was reached")
	}
	if _, err := g.dial("203.0.113.9", 7778); err != nil {
		t.Error("an address that a rule names was not reached:", err)
	}
}

// hello does a TLS handshake from inside, as far as the server's first answer.
func hello(g *guestStack, addr, name string) error {
	conn, err := g.dial(addr, 443)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	c := tls.Client(conn, &tls.Config{ServerName: name, InsecureSkipVerify: true})
	return c.Handshake()
}

// The TLS server name has to be one that the address was an answer for.
func TestServerNameAgrees(t *testing.T) {
	w, n, g := start(t, "allow good.example", "allow other.example", "allow 93.184.216.99", "deny bad.example")
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	for _, a := range []string{"93.184.216.34:443", "93.184.216.99:443"} {
		w.at(a, server.Listener.Addr().String())
	}
	w.name("good.example", "93.184.216.34")
	w.name("other.example", "93.184.216.35")
	g.resolve(t, "good.example", dnsmessage.TypeA)
	g.resolve(t, "other.example", dnsmessage.TypeA)
	for _, c := range []struct {
		addr, name string
		ok         bool
	}{
		{"93.184.216.34", "good.example", true},
		{"93.184.216.34", "GOOD.example", true},
		{"93.184.216.34", "evil.example", false},  // a foreign name at an allowed CDN's address
		{"93.184.216.34", "other.example", false}, // allowed, and elsewhere
		{"93.184.216.34", "", true},               // claims nothing
		{"93.184.216.99", "any.example", true},    // the address itself is allowed
		{"93.184.216.99", "bad.example", false},   // and the name is denied
	} {
		if err := hello(g, c.addr, c.name); (err == nil) != c.ok {
			t.Errorf("%s as %q: %v", c.addr, c.name, err)
		}
	}
	w.find(t, "evil.example", func(r Record) bool {
		return r.Protocol == "tls" && r.Host == "evil.example" && r.Verdict == "deny" && r.Port == 443
	})
	for _, r := range n.Refusals() {
		if r.Host == "evil.example" && r.Command != "doz net allow a1 site:evil.example" {
			t.Errorf("evil.example is offered as %q", r.Command)
		}
	}
}

// Every request of a connection is judged by its Host; a refusal is a 403 in words.
func TestEveryRequestAgrees(t *testing.T) {
	w, _, g := start(t, "allow good.example")
	server := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(out, "%s %s %s", r.Host, r.RequestURI, r.UserAgent())
	}))
	t.Cleanup(server.Close)
	w.at("93.184.216.34:80", server.Listener.Addr().String())
	w.name("good.example", "93.184.216.34")
	g.resolve(t, "good.example", dnsmessage.TypeA)
	ask := func(conn net.Conn, in *bufio.Reader, request string) (int, string) {
		t.Helper()
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		io.WriteString(conn, request)
		answer, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatalf("%q: %v", request, err)
		}
		body, _ := io.ReadAll(answer.Body)
		return answer.StatusCode, string(body)
	}
	for _, c := range []struct {
		requests []string
		status   int
		body     string
	}{
		{[]string{"GET /a%2Fb?x=1;y HTTP/1.1\r\nHost: good.example\r\n\r\n"}, 200, "good.example /a%2Fb?x=1;y "},
		{[]string{"GET / HTTP/1.0\r\n\r\n"}, 200, ""},
		{[]string{"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"}, 403, "doz net allow a1 site:evil.example"},
		{[]string{"GET / HTTP/1.1\r\nHost: good.example\r\n\r\n", "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"}, 403, "sandbox a1 may not reach evil.example"},
		{[]string{"\r\nGET / HTTP/1.1\nHost: evil.example\n\n"}, 400, ""},
		{[]string{"get / HTTP/1.1\r\nhost:evil.example\r\n\r\n"}, 403, "evil.example"},
		{[]string{"GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n"}, 403, "evil.example"},
		{[]string{"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n"}, 403, "elsewhere"},
		{[]string{"CONNECT good.example:443 HTTP/1.1\r\nHost: good.example:443\r\n\r\n"}, 403, "elsewhere"},
	} {
		conn, err := g.dial("93.184.216.34", 80)
		if err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(conn)
		var status int
		var body string
		for _, request := range c.requests {
			status, body = ask(conn, in, request)
		}
		if status != c.status || !strings.Contains(body, c.body) {
			t.Errorf("%q: %d %q, want %d %q", c.requests, status, body, c.status, c.body)
		}
		conn.Close()
	}
	// An address that nobody may connect to says so in words too, where it is HTTP.
	conn, err := g.dial("93.184.216.50", 80)
	if err != nil {
		t.Fatal(err)
	}
	if status, body := ask(conn, bufio.NewReader(conn), "GET / HTTP/1.1\r\nHost: x.example\r\n\r\n"); status != 403 || !strings.Contains(body, "no answer of the sandbox's resolver") {
		t.Errorf("a refused address said %d %q", status, body)
	}
	conn.Close()
	if w.dialledTo("93.184.216.50:80") {
		t.Error("a refused address was dialled")
	}
	w.find(t, "http", func(r Record) bool { return r.Protocol == "http" && r.Verdict == "allow" && r.Host == "good.example" })
}

// Datagrams are carried where a rule allows them; QUIC is not, where names are judged;
// a refusal comes at once, as an ICMP error.
func TestDatagrams(t *testing.T) {
	w, n, g := start(t, "allow good.example")
	socket, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socket.Close() })
	go func() {
		buf := make([]byte, 64<<10)
		for {
			size, from, err := socket.ReadFrom(buf)
			if err != nil {
				return
			}
			socket.WriteTo(buf[:size], from)
		}
	}()
	w.name("good.example", "93.184.216.34")
	for _, port := range []string{"123", "443", "8443"} {
		w.at("93.184.216.34:"+port, socket.LocalAddr().String())
	}
	g.resolve(t, "good.example", dnsmessage.TypeA)
	quic := append([]byte{0xc3, 0, 0, 0, 1}, make([]byte, 1195)...)
	for _, c := range []struct {
		addr string
		port uint16
		data []byte
		ok   bool
	}{
		{"93.184.216.34", 123, []byte("time"), true},
		{"93.184.216.34", 123, bytes.Repeat([]byte("x"), 40000), true},
		{"93.184.216.34", 443, []byte("quic"), false},
		{"93.184.216.34", 8443, quic, false},
		{"8.8.8.8", 53, query("good.example", dnsmessage.TypeA), false},
		{"8.8.8.8", 5353, query("good.example", dnsmessage.TypeA), false},
		{"198.18.0.1", 9, []byte("x"), false},
		{"fd64:6f7a::1", 9, []byte("x"), false},
	} {
		conn := g.dialUDP(t, c.addr, c.port)
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		_, err := conn.Write(c.data)
		if c.ok {
			buf := make([]byte, 64<<10)
			size, err := conn.Read(buf)
			if err != nil || !bytes.Equal(buf[:size], c.data) {
				t.Errorf("%s port %d: %d bytes, %v", c.addr, c.port, size, err)
			}
			continue
		}
		w.find(t, "datagrams", func(r Record) bool { return r.Protocol == "udp" && r.Port == c.port && r.Verdict == "deny" })
		if c.port == 8443 {
			continue // seen too late for an ICMP error
		}
		// A socket hears of an ICMP error at its next call.
		for late := time.Now().Add(20 * time.Second); err == nil && time.Now().Before(late); {
			_, err = conn.Write(c.data)
		}
		if err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("%s port %d: %v", c.addr, c.port, err)
		}
	}
	// Where nothing is refused by name there is nothing to look for.
	n.SetPolicy(rules(t, "allow *"))
	conn := g.dialUDP(t, "93.184.216.34", 443)
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	conn.Write(quic)
	if size, err := conn.Read(make([]byte, 2000)); err != nil || size != len(quic) {
		t.Errorf("QUIC under allow *: %d bytes, %v", size, err)
	}
}

// A change counts from the next connection on, and what the world refuses is refused
// inside.
func TestPolicyChangesLive(t *testing.T) {
	w, n, g := start(t)
	w.name("new.example", "93.184.216.40")
	w.serve(t, "93.184.216.40:443", echo)
	if m := g.resolve(t, "new.example", dnsmessage.TypeA); m.RCode != dnsmessage.RCodeNameError {
		t.Fatal(m.RCode)
	}
	n.SetPolicy(rules(t, "allow new.example"))
	g.resolve(t, "new.example", dnsmessage.TypeA)
	conn, err := g.dial("93.184.216.40", 443)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.dial("93.184.216.40", 444); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a port where nobody listens: %v", err)
	}
	w.find(t, "failure", func(r Record) bool { return r.Verdict == "failed" && r.Port == 444 && r.Why == "connection refused" })
	n.SetPolicy(rules(t))
	if _, err := g.dial("93.184.216.40", 443); err == nil {
		t.Error("connected after the rule had gone")
	}
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	io.WriteString(conn, "still\n")
	if _, err := io.ReadFull(conn, make([]byte, 5)); err != nil {
		t.Error("the connection that was open:", err)
	}
}

// Where this computer has an upstream proxy, names are left to it, plain requests are
// asked of it, and all else is carried through its CONNECT; NO_PROXY goes direct.
func TestUpstreamProxy(t *testing.T) {
	w := newWorld()
	var seen []string
	proxy := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		seen = append(seen, r.Method+" "+r.RequestURI+" "+r.Header.Get("Proxy-Authorization"))
		w.mu.Unlock()
		if r.Method != http.MethodConnect {
			fmt.Fprint(out, "from the proxy")
			return
		}
		out.WriteHeader(http.StatusOK)
		conn, _, _ := http.NewResponseController(out).Hijack()
		defer conn.Close()
		io.Copy(conn, conn)
	}))
	t.Cleanup(proxy.Close)
	w.at("proxy.corp:3128", proxy.Listener.Addr().String())
	c := w.config(rules(t, "allow good.example", "allow direct.example"))
	c.Proxy = func(u *url.URL) (*url.URL, error) {
		if u.Hostname() == "direct.example" {
			return nil, nil
		}
		return url.Parse("http://user:pass@proxy.corp:3128")
	}
	n := w.network(t, c)
	g := bootGuest(t, n)
	w.name("direct.example", "93.184.216.41")
	w.serve(t, "93.184.216.41:9", echo)

	stand := addrs(g.resolve(t, "good.example", dnsmessage.TypeA))
	if len(stand) != 1 || !stand4.Contains(netip.MustParseAddr(stand[0])) || w.askedFor("good.example") {
		t.Fatalf("good.example is %v, and was asked for: %v", stand, w.askedFor("good.example"))
	}
	if err := hello(g, stand[0], "evil.example"); err == nil {
		t.Error("another server name went through the proxy")
	}
	conn, err := g.dial(stand[0], 9)
	if err != nil {
		t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	io.WriteString(conn, "hello\n")
	if _, err := io.ReadFull(conn, make([]byte, 5)); err != nil {
		t.Error(err)
	}
	conn, err = g.dial(stand[0], 80)
	if err != nil {
		t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	io.WriteString(conn, "GET /x?y=z HTTP/1.1\r\nHost: good.example\r\n\r\n")
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if body, _ := io.ReadAll(answer.Body); string(body) != "from the proxy" {
		t.Errorf("plain request: %q", body)
	}
	if a := addrs(g.resolve(t, "direct.example", dnsmessage.TypeA)); !cmp.Equal(a, []string{"93.184.216.41"}) {
		t.Errorf("direct.example is %v", a)
	}
	if conn, err := g.dial("93.184.216.41", 9); err != nil {
		t.Error(err)
	} else {
		conn.Close()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	const auth = " Basic dXNlcjpwYXNz"
	want := []string{"CONNECT good.example:443" + auth, "CONNECT good.example:9" + auth, "GET http://good.example/x?y=z" + auth}
	if diff := cmp.Diff(want, seen); diff != "" {
		t.Error(diff)
	}
}

// DNS says what it has to in every form: over TCP, cut short, with other types, to
// broken queries.
func TestDNSForms(t *testing.T) {
	w, _, g := start(t, "allow good.example")
	var many []string
	for i := range 60 {
		many = append(many, fmt.Sprintf("93.184.217.%d", i))
	}
	w.name("good.example", many...)
	name := dnsmessage.MustNewName("mx.good.example.")
	w.records["good.example/TypeMX"] = []dnsmessage.ResourceBody{&dnsmessage.MXResource{Pref: 5, MX: name}}
	w.records["good.example/TypeSRV"] = []dnsmessage.ResourceBody{&dnsmessage.SRVResource{Port: 5, Target: name}}
	w.records["good.example/TypeTXT"] = []dnsmessage.ResourceBody{&dnsmessage.TXTResource{TXT: chunks(strings.Repeat("v", 700))}}
	if m := g.resolve(t, "good.example", dnsmessage.TypeA); !m.Truncated || len(m.Answers) != 0 {
		t.Errorf("%d answers in 512 bytes, truncated %v", len(m.Answers), m.Truncated)
	}
	if m := g.resolve(t, "good.example", dnsmessage.TypeTXT); !m.Truncated {
		t.Error("a long TXT came whole")
	}
	for _, kind := range []dnsmessage.Type{dnsmessage.TypeMX, dnsmessage.TypeSRV} {
		if m := g.resolve(t, "good.example", kind); len(m.Answers) != 1 {
			t.Errorf("%s: %d answers", kind, len(m.Answers))
		}
	}
	for _, kind := range []dnsmessage.Type{dnsmessage.TypeAAAA, 65, dnsmessage.TypeALL} {
		if m := g.resolve(t, "good.example", kind); m.RCode != dnsmessage.RCodeSuccess || len(m.Answers) != 0 {
			t.Errorf("%s: %s, %d answers", kind, m.RCode, len(m.Answers))
		}
	}
	if m := g.resolve(t, HostName, dnsmessage.TypeA); !cmp.Equal(addrs(m), []string{"198.18.0.1"}) {
		t.Errorf("%s is %v", HostName, addrs(m))
	}
	conn, err := g.dial(Gateway6.String(), 53)
	if err != nil {
		t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	for range 2 {
		q := query("good.example", dnsmessage.TypeA)
		conn.Write(append([]byte{0, byte(len(q))}, q...))
		var size [2]byte
		io.ReadFull(conn, size[:])
		whole := make([]byte, int(size[0])<<8|int(size[1]))
		io.ReadFull(conn, whole)
		var m dnsmessage.Message
		if err := m.Unpack(whole); err != nil || len(m.Answers) != 60 {
			t.Errorf("over TCP: %d answers, %v", len(m.Answers), err)
		}
	}
	two := query("good.example", dnsmessage.TypeA)
	two[5] = 2 // two questions, and one there
	broken := g.dialUDP(t, Gateway4.String(), 53)
	broken.SetDeadline(time.Now().Add(10 * time.Second))
	broken.Write([]byte{1})
	broken.Write(two)
	buf := make([]byte, 512)
	size, err := broken.Read(buf)
	var p dnsmessage.Parser
	h, headErr := p.Start(buf[:size])
	if err := errors.Join(err, headErr); err != nil || h.RCode != dnsmessage.RCodeFormatError {
		t.Errorf("a broken query: %v, %v", h.RCode, err)
	}
}
