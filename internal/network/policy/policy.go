// Package policy decides what a sandbox may reach: kinds, permissions, rules, and the
// verdict on a name, an address or a connection. It is data and pure functions.
//
// It must not open a socket, resolve a name or know of sandboxes.
package policy

import (
	"net/netip"
	"slices"
	"strings"
)

// Rule allows or denies one kind of destination. Rules are ordered; the first that
// matches decides, and what none matches is denied.
type Rule struct {
	Allow bool
	// Exactly one of the three says what the rule is about.
	Host string       // "example.com", or "*.example.com": the names below it
	Net  netip.Prefix // literal destinations
	Any  bool         // every name, and every address of the public Internet
	// Ports limits the rule; none means all.
	Ports []Ports
	// Source says where the rule is from: "rule" for the user's own, else the
	// permission's id.
	Source string
}

// Ports is an inclusive range.
type Ports struct{ First, Last uint16 }

// String is the rule as ParseRule reads it.
func (r Rule) String() string {
	verb := "deny "
	if r.Allow {
		verb = "allow "
	}
	return verb + r.target()
}

// OwnRule is the Source of rules that a user wrote.
const OwnRule = "rule"

// ID names the rule in logs: the permission it is from, or its own text.
func (r Rule) ID() string {
	if r.Source != OwnRule && r.Source != "" {
		return r.Source
	}
	return r.String()
}

func (r Rule) covers(port uint16) bool {
	return len(r.Ports) == 0 || slices.ContainsFunc(r.Ports, func(p Ports) bool { return p.First <= port && port <= p.Last })
}

func (r Rule) matchesName(name string) bool {
	switch {
	case name == "":
		return false
	case r.Any:
		return true
	}
	if below, is := strings.CutPrefix(r.Host, "*"); is {
		return len(name) > len(below) && strings.HasSuffix(name, below)
	}
	return r.Host == name
}

// Policy is what a sandbox may reach. It never changes; a new one takes its place.
type Policy struct {
	Kind  Kind
	Rules []Rule
}

// Verdict is what a policy says of one destination.
type Verdict struct {
	Allow bool
	Rule  string // the rule that decided: a permission's id or the rule's text; "" when none matched
	Why   Reason // why not
}

// Reason is why something was refused.
type Reason string

const (
	NoRule     Reason = "no rule allows it"
	Denied     Reason = "a rule denies it"
	Restricted Reason = "it is an address of this computer or its local network, which no rule names"
	Unresolved Reason = "no answer of the sandbox's resolver gave that address"
	Disagrees  Reason = "the name asked for is not the one the address was given for"
	Unreadable Reason = "its beginning cannot be read"
	NoService  Reason = "this computer offers the sandbox no such service"
	Relay      Reason = "it asks for a connection to elsewhere"
	TooMany    Reason = "too many connections are open"
	Protocol   Reason = "what it speaks cannot be held to the policy"
)

// CouldAllow says whether a connection to name could be allowed on some port: only
// such names are resolved.
func (p *Policy) CouldAllow(name string) Verdict {
	name = Canonical(name)
	for _, r := range p.Rules {
		if !r.matchesName(name) {
			continue
		}
		if r.Allow {
			return Verdict{Allow: true, Rule: r.ID()}
		}
		if len(r.Ports) == 0 {
			return Verdict{Rule: r.ID(), Why: Denied}
		}
	}
	return Verdict{Why: NoRule}
}

// Name judges a connection to a name alone, where its address is not known here.
func (p *Policy) Name(name string, port uint16) Verdict {
	name = Canonical(name)
	for _, r := range p.Rules {
		if r.matchesName(name) && r.covers(port) {
			return decided(r)
		}
	}
	return Verdict{Why: NoRule}
}

// Address judges a connection to a literal address, or, where name is not empty, to an
// address that an answer for name produced. Restricted addresses (restricted says
// which) need a rule that names the address, whatever allows the name.
func (p *Policy) Address(name string, addr netip.Addr, port uint16, restricted bool) Verdict {
	name, addr = Canonical(name), addr.Unmap()
	for _, r := range p.Rules {
		if !r.covers(port) {
			continue
		}
		if r.Net.IsValid() {
			if r.Net.Contains(addr) {
				return decided(r)
			}
			continue
		}
		if !r.matchesName(name) && !(r.Any && name == "") {
			continue
		}
		if r.Allow && restricted && !p.namesAddress(addr, port) {
			return Verdict{Rule: r.ID(), Why: Restricted}
		}
		return decided(r)
	}
	if restricted {
		return Verdict{Why: Restricted}
	}
	return Verdict{Why: NoRule}
}

// NamesAddress says whether a rule about addresses allows this one, on some port.
func (p *Policy) NamesAddress(addr netip.Addr) bool {
	for _, r := range p.Rules {
		if r.Net.IsValid() && r.Net.Contains(addr.Unmap()) {
			if r.Allow {
				return true
			}
			if len(r.Ports) == 0 {
				return false
			}
		}
	}
	return false
}

// namesAddress says whether a rule about addresses allows this one.
func (p *Policy) namesAddress(addr netip.Addr, port uint16) bool {
	for _, r := range p.Rules {
		if r.Net.IsValid() && r.covers(port) && r.Net.Contains(addr) {
			return r.Allow
		}
	}
	return false
}

// DeniesNames says whether some rule refuses names. Where none does, a connection that
// is allowed by its address needs no look inside.
func (p *Policy) DeniesNames() bool {
	return slices.ContainsFunc(p.Rules, func(r Rule) bool { return !r.Allow && !r.Net.IsValid() })
}

func decided(r Rule) Verdict {
	if r.Allow {
		return Verdict{Allow: true, Rule: r.ID()}
	}
	return Verdict{Rule: r.ID(), Why: Denied}
}

// Canonical is a name as rules compare it: lower case, without the final dot.
func Canonical(name string) string {
	return strings.ToLower(strings.TrimSuffix(name, "."))
}
