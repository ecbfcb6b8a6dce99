package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// Resolver answers for names of the world outside. Its methods are called concurrently
// and only for names that the policy could allow.
type Resolver interface {
	// Addresses gives all addresses of a name, of both families. ErrNoName when there
	// is no such name.
	Addresses(ctx context.Context, name string) ([]netip.Addr, error)
	// Records gives a name's records of another type; nil where there are none.
	Records(ctx context.Context, name string, kind dnsmessage.Type) ([]dnsmessage.ResourceBody, error)
}

// ErrNoName means that there is no such name.
var ErrNoName = errors.New("no such name")

// SystemResolver asks as this computer's own programs do: its hosts file, its resolvers
// as they are configured now, its VPN's.
type SystemResolver struct{}

// Addresses implements Resolver.
func (SystemResolver) Addresses(ctx context.Context, name string) ([]netip.Addr, error) {
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name+".")
	return addrs, notFound(err)
}

// Records implements Resolver.
func (SystemResolver) Records(ctx context.Context, name string, kind dnsmessage.Type) ([]dnsmessage.ResourceBody, error) {
	r, name := net.DefaultResolver, name+"."
	var records []dnsmessage.ResourceBody
	host := func(text string) (dnsmessage.Name, bool) {
		n, err := dnsmessage.NewName(text)
		return n, err == nil
	}
	switch kind {
	case dnsmessage.TypeMX:
		list, err := r.LookupMX(ctx, name)
		for _, mx := range list {
			if h, ok := host(mx.Host); ok {
				records = append(records, &dnsmessage.MXResource{Pref: mx.Pref, MX: h})
			}
		}
		return records, notFound(err)
	case dnsmessage.TypeSRV:
		_, list, err := r.LookupSRV(ctx, "", "", name)
		for _, srv := range list {
			if h, ok := host(srv.Target); ok {
				records = append(records, &dnsmessage.SRVResource{Priority: srv.Priority, Weight: srv.Weight, Port: srv.Port, Target: h})
			}
		}
		return records, notFound(err)
	case dnsmessage.TypeTXT:
		list, err := r.LookupTXT(ctx, name)
		for _, text := range list {
			records = append(records, &dnsmessage.TXTResource{TXT: chunks(text)})
		}
		return records, notFound(err)
	case dnsmessage.TypeNS:
		list, err := r.LookupNS(ctx, name)
		for _, ns := range list {
			if h, ok := host(ns.Host); ok {
				records = append(records, &dnsmessage.NSResource{NS: h})
			}
		}
		return records, notFound(err)
	}
	return nil, nil
}

// chunks cuts a text into the strings of a TXT record.
func chunks(text string) []string {
	var parts []string
	for len(text) > 255 {
		parts, text = append(parts, text[:255]), text[255:]
	}
	return append(parts, text)
}

func notFound(err error) error {
	if e := (*net.DNSError)(nil); errors.As(err, &e) && e.IsNotFound {
		return ErrNoName
	}
	return err
}

// names looks addresses up, once for those who ask at the same time, and remembers
// them for a moment: a program asks for both families at once.
type names struct {
	resolver Resolver

	mu    sync.Mutex
	known map[string]*lookup // guarded by mu
}

type lookup struct {
	done  chan struct{}
	until time.Time // set before done is closed
	addrs []netip.Addr
	err   error
}

const (
	lookupTimeout = 8 * time.Second
	remembered    = 5 * time.Second
	maxLookups    = 1024
)

func newNames(r Resolver) *names { return &names{resolver: r, known: map[string]*lookup{}} }

func (n *names) addresses(ctx context.Context, name string) ([]netip.Addr, error) {
	n.mu.Lock()
	l := n.known[name]
	if l != nil && l.stale() {
		l = nil
	}
	if l == nil {
		n.makeRoom()
		l = &lookup{done: make(chan struct{})}
		n.known[name] = l
		go n.look(name, l)
	}
	n.mu.Unlock()
	select {
	case <-l.done:
		return l.addrs, l.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (n *names) look(name string, l *lookup) {
	ctx, cancel := context.WithTimeout(context.Background(), lookupTimeout)
	defer cancel()
	l.addrs, l.err = n.resolver.Addresses(ctx, name)
	for i := range l.addrs {
		l.addrs[i] = l.addrs[i].Unmap().WithZone("")
	}
	l.until = time.Now().Add(remembered)
	if l.err != nil && !errors.Is(l.err, ErrNoName) {
		l.until = time.Now()
	}
	close(l.done)
}

func (l *lookup) stale() bool {
	select {
	case <-l.done:
		return !time.Now().Before(l.until)
	default:
		return false
	}
}

// makeRoom forgets what is old, and anything if that is not enough, with mu held.
func (n *names) makeRoom() {
	if len(n.known) < maxLookups {
		return
	}
	for name, l := range n.known {
		if l.stale() {
			delete(n.known, name)
		}
	}
	for name := range n.known {
		if len(n.known) < maxLookups {
			return
		}
		delete(n.known, name)
	}
}
