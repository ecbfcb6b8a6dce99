package network

import (
	"container/list"
	"net/netip"
	"slices"
	"sync"
)

// book remembers which names' answers produced which addresses. Only such addresses can
// be connected to by name. What has not been used for longest is forgotten first, and
// only to make room: programs keep addresses for longer than answers allow.
type book struct {
	mu    sync.Mutex
	pages map[netip.Addr]*list.Element // of *page
	order *list.List                   // the latest used first
	stand map[string]netip.Addr        // names that only an upstream proxy resolves
	next  netip.Addr                   // of stand4
}

// page is what is known of one address.
type page struct {
	addr  netip.Addr
	names []string // the latest first
	stand bool
}

const (
	maxPages = 16384
	maxNames = 32 // of one address: a CDN's
)

// State is what a Network knows that its successor should: a program that resolved a
// name before its machine was saved connects afterwards.
type State struct {
	Names []KnownAddress `json:"names,omitempty"` // the longest unused first
}

// KnownAddress is an address and the names that it was the answer for.
type KnownAddress struct {
	Address netip.Addr `json:"address"`
	Names   []string   `json:"names"`
	Stand   bool       `json:"stand,omitempty"` // it stands for a name that a proxy resolves
}

// State gives what the sandbox's next Network should know.
func (n *Network) State() *State { return n.book.state() }

func newBook(s *State) *book {
	b := &book{pages: map[netip.Addr]*list.Element{}, order: list.New(), stand: map[string]netip.Addr{}, next: stand4.Addr()}
	if s == nil {
		return b
	}
	for _, k := range s.Names {
		for _, name := range slices.Backward(k.Names) {
			b.write(k.Address, name, k.Stand)
		}
		if k.Stand && b.next.Less(k.Address) {
			b.next = k.Address
		}
	}
	return b
}

func (b *book) state() *State {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := &State{}
	for e := b.order.Back(); e != nil; e = e.Prev() {
		p := e.Value.(*page)
		s.Names = append(s.Names, KnownAddress{p.addr, slices.Clone(p.names), p.stand})
	}
	return s
}

// add notes that an answer for name produced addrs.
func (b *book) add(name string, addrs []netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, a := range addrs {
		b.write(a.Unmap(), name, false)
	}
}

// standFor gives the address that stands for a name.
func (b *book) standFor(name string) netip.Addr {
	b.mu.Lock()
	defer b.mu.Unlock()
	addr, known := b.stand[name]
	for !known {
		if b.next = b.next.Next(); !stand4.Contains(b.next) {
			b.next = stand4.Addr().Next()
		}
		addr = b.next
		_, taken := b.pages[addr]
		known = !taken
	}
	b.write(addr, name, true)
	return addr
}

// write is add for one address, with mu held.
func (b *book) write(addr netip.Addr, name string, stand bool) {
	e, known := b.pages[addr]
	if !known {
		if len(b.pages) >= maxPages {
			b.forget(b.order.Back())
		}
		e = b.order.PushFront(&page{addr: addr, stand: stand})
		b.pages[addr] = e
	}
	b.order.MoveToFront(e)
	p := e.Value.(*page)
	if i := slices.Index(p.names, name); i >= 0 {
		p.names = slices.Delete(p.names, i, i+1)
	}
	p.names = slices.Insert(p.names, 0, name)
	if len(p.names) > maxNames {
		p.names = p.names[:maxNames]
	}
	if stand {
		b.stand[name] = addr
	}
}

func (b *book) forget(e *list.Element) {
	p := b.order.Remove(e).(*page)
	delete(b.pages, p.addr)
	if p.stand {
		for _, name := range p.names {
			delete(b.stand, name)
		}
	}
}

// names gives the names an address was the answer for, the latest first, and whether it
// stands for one that is resolved elsewhere.
func (b *book) names(addr netip.Addr) (names []string, stand bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, known := b.pages[addr]
	if !known {
		return nil, false
	}
	b.order.MoveToFront(e)
	p := e.Value.(*page)
	return slices.Clone(p.names), p.stand
}

// nameOf is an address's latest name, or "".
func (b *book) nameOf(addr netip.Addr) string {
	if names, _ := b.names(addr); len(names) > 0 {
		return names[0]
	}
	return ""
}
