package network

import (
	"net/netip"
	"slices"

	"dozable.com/doz/internal/network/policy"
)

// judgement is what was decided of one connection.
type judgement struct {
	policy.Verdict
	to    netip.AddrPort
	name  string   // the name it is for, "" for a literal address
	names []string // all the names its address is known for
	stand bool     // the address stands for a name that a proxy resolves
	own   bool     // restricted
	// literal says that the address itself is allowed, whatever name it has.
	literal policy.Verdict
}

// judge decides on a connection to an address.
func (n *Network) judge(to netip.AddrPort) judgement {
	p := n.policy.Load()
	j := judgement{to: to}
	j.names, j.stand = n.book.names(to.Addr())
	j.own = !j.stand && n.restricted(to.Addr())
	if n.closed(to.Addr(), to.Port()) || p.Kind == policy.NAT && (to.Addr().IsLoopback() || to.Addr().IsUnspecified()) {
		j.Verdict = policy.Verdict{Why: policy.Restricted}
		return j
	}
	if !j.stand {
		j.literal = p.Address("", to.Addr(), to.Port(), j.own)
	}
	var refused policy.Verdict
	for _, name := range j.names {
		v := j.ofName(p, name)
		if v.Allow {
			j.Verdict, j.name = v, name
			return j
		}
		if refused.Why == "" {
			refused, j.name = v, name
		}
	}
	switch {
	case j.literal.Allow:
		j.Verdict, j.name = j.literal, ""
	case refused.Why != "":
		j.Verdict = refused
	case j.literal.Why == policy.NoRule:
		j.Verdict = policy.Verdict{Why: policy.Unresolved}
	default:
		j.Verdict = j.literal
	}
	return j
}

// ofName judges the connection as one for name.
func (j *judgement) ofName(p *policy.Policy, name string) policy.Verdict {
	if j.stand {
		return p.Name(name, j.to.Port())
	}
	return p.Address(name, j.to.Addr(), j.to.Port(), j.own)
}

// speaks judges the name that a client gave inside the connection: it has to be one
// that the address was the answer for, or the address is allowed as such and the name
// is not denied. A name that was not given, or is the address itself, claims nothing.
func (n *Network) speaks(j judgement, name string) policy.Verdict {
	name = policy.Canonical(name)
	if addr, err := netip.ParseAddr(name); name == "" || err == nil && addr.Unmap() == j.to.Addr() {
		return j.Verdict
	}
	p := n.policy.Load()
	if slices.Contains(j.names, name) {
		if v := j.ofName(p, name); v.Allow {
			return v
		}
	}
	if j.literal.Allow {
		if v := p.Name(name, j.to.Port()); v.Why == policy.Denied || v.Allow {
			return v
		}
		return j.literal
	}
	return policy.Verdict{Why: policy.Disagrees}
}

// settled says that a connection needs no look inside: its address is allowed as such,
// and no name could be refused.
func (n *Network) settled(j judgement) bool {
	return j.literal.Allow && !n.policy.Load().DeniesNames()
}
