package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// maxRuleText bounds a rule, so that no record grows without end.
const maxRuleText = 512

// ParseRule reads one rule: "allow TARGET" or "deny TARGET", where TARGET is a host
// name, "*.DOMAIN", an address, an address with a prefix length, or "*", and may end
// with ports: "example.com:443", "*.example.com:80,443,8000-8999", "[2001:db8::1]:53".
func ParseRule(text string) (Rule, error) {
	verb, target, _ := strings.Cut(strings.TrimSpace(text), " ")
	if verb != "allow" && verb != "deny" {
		return Rule{}, fmt.Errorf("rule %q does not begin with allow or deny", clip(text))
	}
	r, err := ParseTarget(strings.TrimSpace(target))
	r.Allow = verb == "allow"
	return r, err
}

// ParseTarget reads what a rule is about, without its verb.
func ParseTarget(text string) (Rule, error) {
	r := Rule{Source: OwnRule}
	if len(text) > maxRuleText {
		return r, fmt.Errorf("rule %q is longer than %d characters", clip(text), maxRuleText)
	}
	if strings.Contains(text, "://") {
		return r, fmt.Errorf("%q is a URL: a rule takes only its host", clip(text))
	}
	host, ports, err := splitPorts(text)
	if err != nil {
		return r, err
	}
	if r.Ports, err = parsePorts(text, ports); err != nil {
		return r, err
	}
	switch {
	case host == "":
		return r, fmt.Errorf("rule %q names no host", clip(text))
	case host == "*":
		r.Any = true
		return r, nil
	}
	if prefix, err := netip.ParsePrefix(host); err == nil {
		if prefix != prefix.Masked() {
			return r, fmt.Errorf("network %q has bits beyond its length: it is %s", host, prefix.Masked())
		}
		r.Net = prefix
		return r, nil
	} else if strings.Contains(host, "/") {
		return r, fmt.Errorf("%q is no network: an address, a slash and a length are", clip(host))
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		if addr.Zone() != "" {
			return r, fmt.Errorf("address %q has a zone, which a sandbox does not know", clip(host))
		}
		addr = addr.Unmap()
		r.Net = netip.PrefixFrom(addr, addr.BitLen())
		return r, nil
	}
	r.Host, err = parseHost(host)
	return r, err
}

// splitPorts cuts a target's ports off; an IPv6 address with ports stands in brackets.
func splitPorts(text string) (host, ports string, err error) {
	if rest, is := strings.CutPrefix(text, "["); is {
		host, rest, found := strings.Cut(rest, "]")
		if !found {
			return "", "", fmt.Errorf("rule %q opens a bracket and does not close it", clip(text))
		}
		if rest == "" {
			return host, "", nil
		}
		ports, is := strings.CutPrefix(rest, ":")
		if !is || ports == "" {
			return "", "", fmt.Errorf("rule %q has %q where a colon and ports could be", clip(text), clip(rest))
		}
		return host, ports, nil
	}
	if strings.Count(text, ":") != 1 { // none, or an IPv6 address
		return text, "", nil
	}
	host, ports, _ = strings.Cut(text, ":")
	if ports == "" {
		return "", "", fmt.Errorf("rule %q ends in a colon without ports", clip(text))
	}
	return host, ports, nil
}

func parsePorts(text, list string) ([]Ports, error) {
	if list == "" {
		return nil, nil
	}
	var ports []Ports
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 16)
		to, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || from == 0 || to < from {
			return nil, fmt.Errorf("%q in rule %q is no port or range of ports from 1 to 65535", clip(part), clip(text))
		}
		ports = append(ports, Ports{uint16(from), uint16(to)})
	}
	return ports, nil
}

// parseHost checks a name or a "*." pattern.
func parseHost(host string) (string, error) {
	name := Canonical(host)
	below := strings.TrimPrefix(name, "*.")
	switch {
	case strings.Contains(below, "*"):
		return "", fmt.Errorf("host %q has a * that is not the whole first label", clip(host))
	case !ValidName(below):
		return "", fmt.Errorf("%q is no host name", clip(host))
	case looksNumeric(below):
		return "", fmt.Errorf("%q is neither a host name nor an address", clip(host))
	}
	return name, nil
}

// ValidName says whether a canonical name can be a host's: labels of at most 63
// letters, digits, hyphens and underscores, 253 in all.
func ValidName(name string) bool {
	if name == "" || len(name) > 253 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range []byte(label) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return false
			}
		}
	}
	return true
}

// looksNumeric says whether a name ends like an address, which resolvers read as one:
// "127.1", "0x7f.1", "2130706433".
func looksNumeric(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	_, err := strconv.ParseUint(last, 0, 64)
	return err == nil || strings.Trim(last, "0123456789") == ""
}

// target is what the rule is about, as ParseTarget reads it.
func (r Rule) target() string {
	text := r.Host
	switch {
	case r.Any:
		text = "*"
	case r.Net.IsValid() && r.Net.IsSingleIP():
		text = r.Net.Addr().String()
	case r.Net.IsValid():
		text = r.Net.String()
	}
	if len(r.Ports) == 0 {
		return text
	}
	if strings.Contains(text, ":") {
		text = "[" + text + "]"
	}
	var ports []string
	for _, p := range r.Ports {
		if p.First == p.Last {
			ports = append(ports, strconv.Itoa(int(p.First)))
		} else {
			ports = append(ports, fmt.Sprintf("%d-%d", p.First, p.Last))
		}
	}
	return text + ":" + strings.Join(ports, ",")
}

// clip keeps what a message quotes short.
func clip(text string) string {
	if len(text) > 80 {
		return text[:80] + "…"
	}
	return text
}
