package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"dozable.com/doz/internal/network/policy"
)

const (
	dnsPort     = 53
	answerTTL   = 30   // seconds
	plainLimit  = 512  // of a datagram, for who says nothing else (RFC 1035, 4.2.1)
	maxDatagram = 4096 // of one, for who takes more
	maxMessage  = 65535
	maxQueries  = 256 // at once
	maxDNSConns = 64  // at once
	dnsIdle     = 30 * time.Second
)

// serveDNS answers on the gateway's port 53, over UDP and TCP.
func (n *Network) serveDNS() error {
	queries := make(chan struct{}, maxQueries)
	conns := make(chan struct{}, maxDNSConns)
	for _, gateway := range []netip.Addr{Gateway4, Gateway6} {
		at := tcpip.FullAddress{NIC: nic, Addr: stackAddr(gateway), Port: dnsPort}
		packets, err := gonet.DialUDP(n.stack, &at, nil, protocolOf(gateway))
		if err != nil {
			return fmt.Errorf("cannot serve DNS: %w", err)
		}
		n.dns = append(n.dns, packets)
		n.work.Go(func() { n.serveDatagrams(packets, queries) })
		listener, err := gonet.ListenTCP(n.stack, at, protocolOf(gateway))
		if err != nil {
			return fmt.Errorf("cannot serve DNS: %w", err)
		}
		n.dns = append(n.dns, listener)
		n.work.Go(func() { n.serveStreams(listener, queries, conns) })
	}
	return nil
}

func (n *Network) serveDatagrams(packets *gonet.UDPConn, queries chan struct{}) {
	buf := make([]byte, maxDatagram)
	for {
		size, from, err := packets.ReadFrom(buf)
		if err != nil {
			return
		}
		query := append([]byte(nil), buf[:size]...)
		select {
		case queries <- struct{}{}:
		default:
			continue // it asks again
		}
		n.work.Go(func() {
			defer func() { <-queries }()
			if answer := n.answer(n.ctx, query, false); answer != nil {
				packets.WriteTo(answer, from)
			}
		})
	}
}

func (n *Network) serveStreams(listener net.Listener, queries, conns chan struct{}) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		select {
		case conns <- struct{}{}:
		default:
			conn.Close()
			continue
		}
		n.work.Go(func() {
			defer func() { <-conns }()
			defer conn.Close()
			defer context.AfterFunc(n.ctx, func() { conn.Close() })()
			n.serveStream(conn, queries)
		})
	}
}

func (n *Network) serveStream(conn net.Conn, queries chan struct{}) {
	for {
		conn.SetDeadline(time.Now().Add(dnsIdle))
		var size [2]byte
		if _, err := io.ReadFull(conn, size[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(conn, query); err != nil {
			return
		}
		queries <- struct{}{}
		answer := n.answer(n.ctx, query, true)
		<-queries
		if answer == nil {
			return
		}
		framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)
		if _, err := conn.Write(framed); err != nil {
			return
		}
	}
}

// question is what a query asks.
type question struct {
	header dnsmessage.Header
	dnsmessage.Question
	edns  bool
	limit int // bytes that the answer may have
}

var errNoQuery = errors.New("not a query")

// parseQuery reads a query. With errNoQuery there is nothing to answer; with another
// error the header can be.
func parseQuery(query []byte, stream bool) (question, error) {
	q := question{limit: plainLimit}
	var p dnsmessage.Parser
	h, err := p.Start(query)
	if err != nil || h.Response {
		return q, errNoQuery
	}
	q.header = h
	questions, err := p.AllQuestions()
	if err != nil {
		return q, err
	}
	if len(questions) != 1 {
		return q, errors.New("not one question")
	}
	q.Question = questions[0]
	if err := p.SkipAllAnswers(); err != nil {
		return q, err
	}
	if err := p.SkipAllAuthorities(); err != nil {
		return q, err
	}
	for {
		h, err := p.AdditionalHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			break
		}
		if err != nil {
			return q, err
		}
		if h.Type == dnsmessage.TypeOPT {
			q.edns = true
			q.limit = min(max(int(h.Class), plainLimit), maxDatagram)
		}
		if err := p.SkipAdditional(); err != nil {
			return q, err
		}
	}
	if stream {
		q.limit = maxMessage
	}
	return q, nil
}

// answer answers one query; nil when it deserves no answer.
func (n *Network) answer(ctx context.Context, query []byte, stream bool) []byte {
	q, err := parseQuery(query, stream)
	if errors.Is(err, errNoQuery) {
		return nil
	}
	if err != nil {
		return q.reply(dnsmessage.RCodeFormatError, nil)
	}
	if q.header.OpCode != 0 || q.Class != dnsmessage.ClassINET {
		return q.reply(dnsmessage.RCodeNotImplemented, nil)
	}
	name := policy.Canonical(q.Name.String())
	if rcode, records, done := n.ownNames(name, q.Type); done {
		return q.reply(rcode, records)
	}
	// An unlisted name ends here: what is in it never reaches another resolver.
	v := n.policy.Load().CouldAllow(name)
	if !policy.ValidName(name) || !v.Allow {
		n.log.refused(Record{Protocol: "dns", Host: name}, v)
		return q.reply(dnsmessage.RCodeNameError, nil)
	}
	switch q.Type {
	case dnsmessage.TypeA, dnsmessage.TypeAAAA:
		addrs, err := n.resolve(ctx, name)
		if err != nil {
			return q.reply(rcodeOf(err), nil)
		}
		return q.reply(dnsmessage.RCodeSuccess, ofType(addrs, q.Type))
	case dnsmessage.TypeMX, dnsmessage.TypeSRV, dnsmessage.TypeTXT, dnsmessage.TypeNS:
		if n.proxied(name) {
			return q.reply(dnsmessage.RCodeSuccess, nil)
		}
		ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
		defer cancel()
		records, err := n.c.Resolver.Records(ctx, name, q.Type)
		if err != nil {
			return q.reply(rcodeOf(err), nil)
		}
		return q.reply(dnsmessage.RCodeSuccess, records)
	}
	// There is no such record. For HTTPS and SVCB that is policy: what they hold leads
	// to addresses and to server names that nobody here could read.
	return q.reply(dnsmessage.RCodeSuccess, nil)
}

func rcodeOf(err error) dnsmessage.RCode {
	if errors.Is(err, ErrNoName) || errors.Is(err, errRestricted) {
		return dnsmessage.RCodeNameError
	}
	return dnsmessage.RCodeServerFailure
}

// errRestricted means that a name has only addresses that the policy keeps closed.
var errRestricted = errors.New("only addresses that are closed")

// resolve gives an allowed name's addresses and notes them, so that they can be
// connected to. Addresses of this computer and its networks are left out unless a rule
// names them: an answer is no way to reach them.
func (n *Network) resolve(ctx context.Context, name string) ([]netip.Addr, error) {
	if n.proxied(name) {
		return []netip.Addr{n.book.standFor(name)}, nil
	}
	all, err := n.names.addresses(ctx, name)
	if err != nil {
		return nil, err
	}
	p := n.policy.Load()
	var addrs []netip.Addr
	for _, a := range all {
		if n.restricted(a) && !p.NamesAddress(a) {
			n.log.refused(Record{Protocol: "dns", Host: name, Address: a.String()}, policy.Verdict{Why: policy.Restricted})
			continue
		}
		addrs = append(addrs, a)
	}
	if len(addrs) == 0 {
		return nil, errRestricted
	}
	n.book.add(name, addrs)
	return addrs, nil
}

func ofType(addrs []netip.Addr, kind dnsmessage.Type) []dnsmessage.ResourceBody {
	var records []dnsmessage.ResourceBody
	for _, a := range addrs {
		switch {
		case a.Is4() && kind == dnsmessage.TypeA:
			records = append(records, &dnsmessage.AResource{A: a.As4()})
		case a.Is6() && kind == dnsmessage.TypeAAAA:
			records = append(records, &dnsmessage.AAAAResource{AAAA: a.As16()})
		}
	}
	return records
}

// ownNames answers what this network itself knows: its gateway, and whose an address is
// that it gave out. done is false for all else.
func (n *Network) ownNames(name string, kind dnsmessage.Type) (rcode dnsmessage.RCode, records []dnsmessage.ResourceBody, done bool) {
	if name == HostName {
		return dnsmessage.RCodeSuccess, ofType([]netip.Addr{Gateway4, Gateway6}, kind), true
	}
	addr, is := reverseName(name)
	if !is {
		return 0, nil, false
	}
	known := n.book.nameOf(addr)
	if addr == Gateway4 || addr == Gateway6 {
		known = HostName
	}
	if known == "" {
		return dnsmessage.RCodeNameError, nil, true
	}
	if target, err := dnsmessage.NewName(known + "."); err == nil && kind == dnsmessage.TypePTR {
		records = append(records, &dnsmessage.PTRResource{PTR: target})
	}
	return dnsmessage.RCodeSuccess, records, true
}

// reply builds an answer that fits, or one that says it does not.
func (q question) reply(rcode dnsmessage.RCode, records []dnsmessage.ResourceBody) []byte {
	message, err := q.build(rcode, records, false)
	if err != nil {
		message, _ = q.build(dnsmessage.RCodeServerFailure, nil, false)
	}
	if len(message) > q.limit {
		message, _ = q.build(rcode, nil, true)
	}
	return message
}

func (q question) build(rcode dnsmessage.RCode, records []dnsmessage.ResourceBody, truncated bool) ([]byte, error) {
	m := dnsmessage.Message{Header: dnsmessage.Header{
		ID: q.header.ID, Response: true, OpCode: q.header.OpCode, RecursionDesired: q.header.RecursionDesired,
		RecursionAvailable: true, RCode: rcode, Truncated: truncated,
	}}
	if q.Name.Length > 0 {
		m.Questions = []dnsmessage.Question{q.Question}
	}
	for _, body := range records {
		m.Answers = append(m.Answers, dnsmessage.Resource{Body: body, Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: answerTTL}})
	}
	if q.edns {
		var h dnsmessage.ResourceHeader
		if err := h.SetEDNS0(maxDatagram, 0, false); err != nil {
			return nil, err
		}
		m.Additionals = append(m.Additionals, dnsmessage.Resource{Header: h, Body: &dnsmessage.OPTResource{}})
	}
	return m.AppendPack(make([]byte, 0, plainLimit))
}
