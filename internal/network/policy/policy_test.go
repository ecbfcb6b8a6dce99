package policy

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseRule(t *testing.T) {
	for text, want := range map[string]string{
		"allow example.com":                  "",
		"deny  Example.COM.:443":             "deny example.com:443",
		"allow *.example.com:80,443,8000-80": `"8000-80" in rule "*.example.com:80,443,8000-80" is no port or range of ports from 1 to 65535`,
		"allow *.example.com:80,8000-8999":   "",
		"allow *":                            "",
		"deny *:25":                          "",
		"allow 192.0.2.1":                    "",
		"allow 192.0.2.0/24:22":              "",
		"allow 192.0.2.1/24":                 `network "192.0.2.1/24" has bits beyond its length: it is 192.0.2.0/24`,
		"allow 2001:db8::1":                  "",
		"allow [2001:db8::1]:53":             "",
		"allow [2001:db8::/32]:53":           "",
		"allow [2001:db8::1":                 `rule "[2001:db8::1" opens a bracket and does not close it`,
		"allow [2001:db8::1]x":               `rule "[2001:db8::1]x" has "x" where a colon and ports could be`,
		"allow ::ffff:10.0.0.1":              "allow 10.0.0.1",
		"allow fe80::1%eth0":                 `address "fe80::1%eth0" has a zone, which a sandbox does not know`,
		"allow":                              `rule "" names no host`,
		"permit x":                           `rule "permit x" does not begin with allow or deny`,
		"allow example.com:":                 `rule "example.com:" ends in a colon without ports`,
		"allow example.com:0":                `"0" in rule "example.com:0" is no port or range of ports from 1 to 65535`,
		"allow a.*.com":                      `host "a.*.com" has a * that is not the whole first label`,
		"allow *com":                         `host "*com" has a * that is not the whole first label`,
		"allow exa mple.com":                 `"exa mple.com" is no host name`,
		"allow http://example.com":           `"http://example.com" is a URL: a rule takes only its host`,
		"allow example.com/x":                `"example.com/x" is no network: an address, a slash and a length are`,
		"allow 10.1":                         `"10.1" is neither a host name nor an address`,
		"allow 0x7f.0x1":                     `"0x7f.0x1" is neither a host name nor an address`,
	} {
		r, err := ParseRule(text)
		got := r.String()
		if err != nil {
			got = err.Error()
		}
		if want == "" {
			want = text
		}
		if got != want {
			t.Errorf("%q: %s\nwant %s", text, got, want)
		}
	}
}

func TestPresets(t *testing.T) {
	for _, c := range []struct {
		kind Kind
		list string
		o    Options
		want string // permissions, or an error
	}{
		{Agent, "", Options{Language: "go"}, "model update install:system install:go github error-reports"},
		{Locked, "", Options{}, "model"},
		{Locked, "", Options{OpenAI: true}, "model model:openai"},
		{Agent, "model,site:Example.com", Options{}, "model site:example.com"},
		{Agent, "standard,+web,-error-reports", Options{}, "model update install:system github web"},
		{Agent, "-github", Options{}, "model update install:system error-reports"},
		{Agent, "github:push", Options{}, "github:push github:as-you"},
		{Agent, "github:push,-github:as-you", Options{}, ""},
		{Agent, "install", Options{}, "install:system install:node install:python install:go install:rust install:java install:ruby install:dotnet"},
		{Agent, "nonsense", Options{}, "\"nonsense\" is no permission: see `doz net permissions`, or name a host as site:nonsense"},
		{Agent, "site:a b", Options{}, `"site:a" `},
		{Bake, "web", Options{}, "network bake takes no permissions: agent, locked and open do"},
	} {
		r, err := ParseChoice(c.kind, c.list, c.o)
		got := strings.Join(r.Permissions, " ")
		if err != nil {
			got = err.Error()
		}
		if c.list == "site:a b" { // two words
			if err == nil {
				t.Error("b is no permission")
			}
			continue
		}
		if got != c.want {
			t.Errorf("%s %q: %s\nwant %s", c.kind, c.list, got, c.want)
		}
	}
	// A later preset leaves the credentials' permissions and the sites alone.
	r, err := Record{Kind: Agent, Permissions: []string{"web", "github:as-you", "site:x.example"}}.Allow([]string{"locked"}, Options{})
	if diff := cmp.Diff([]string{"github:as-you", "site:x.example", "model"}, r.Permissions); err != nil || diff != "" {
		t.Error(diff, err)
	}
}

func TestVerdicts(t *testing.T) {
	public, private := netip.MustParseAddr("93.184.216.34"), netip.MustParseAddr("10.0.0.1")
	policy := func(r Record) *Policy {
		t.Helper()
		p, err := r.Policy()
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	open := policy(Record{Kind: Open, Permissions: []string{"web", "github"}, Rules: []string{"deny bad.example", "allow 10.0.0.1:80"}})
	bake := policy(Record{Kind: Bake})
	nat := policy(Record{Kind: NAT})
	none := policy(Record{Kind: None})
	newer := policy(Record{Kind: Agent, Permissions: []string{"of-a-newer-doz", "model"}})
	for _, c := range []struct {
		p          *Policy
		name       string
		addr       netip.Addr
		port       uint16
		restricted bool
		want       Verdict
	}{
		{open, "any.example", public, 1, false, Verdict{Allow: true, Rule: "web"}},
		{open, "", public, 1, false, Verdict{Allow: true, Rule: "web"}},
		{open, "github.com", public, 443, false, Verdict{Allow: true, Rule: "github"}},
		{open, "bad.example", public, 1, false, Verdict{Rule: "deny bad.example", Why: Denied}},
		{open, "", private, 80, true, Verdict{Allow: true, Rule: "allow 10.0.0.1:80"}},
		{open, "", private, 81, true, Verdict{Rule: "web", Why: Restricted}},
		{open, "any.example", private, 80, true, Verdict{Allow: true, Rule: "allow 10.0.0.1:80"}},
		{bake, "pypi.org", public, 443, false, Verdict{Allow: true, Rule: "install:python"}},
		{bake, "pypi.org", public, 80, false, Verdict{Why: NoRule}},
		{bake, "api.anthropic.com", public, 443, false, Verdict{Why: NoRule}},
		{nat, "", private, 80, true, Verdict{Allow: true, Rule: "nat"}},
		{none, "pypi.org", public, 443, false, Verdict{Why: NoRule}},
		{newer, "api.anthropic.com", public, 443, false, Verdict{Allow: true, Rule: "model"}},
	} {
		if diff := cmp.Diff(c.want, c.p.Address(c.name, c.addr, c.port, c.restricted)); diff != "" {
			t.Errorf("%s %q %s:%d: %s", c.p.Kind, c.name, c.addr, c.port, diff)
		}
	}
	if v := nat.CouldAllow("anything.example"); !v.Allow {
		t.Error("nat resolves nothing")
	}
}

func TestOffer(t *testing.T) {
	for host, want := range map[string]string{"pypi.org": "install:python", "github.com": "github", "other.example": "site:other.example"} {
		if got := Offer(host, 443); got != want {
			t.Errorf("%s is offered as %s", host, got)
		}
	}
}

func TestSpecial(t *testing.T) {
	for _, a := range []string{"127.0.0.1", "10.1.1.1", "192.168.0.1", "172.31.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.251", "198.18.0.1",
		"::1", "::", "fe80::1", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::7f00:1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:1::"} {
		if !Special(netip.MustParseAddr(a)) {
			t.Errorf("%s is taken for public", a)
		}
	}
	for _, a := range []string{"8.8.8.8", "93.184.216.34", "2606:2800:21f::1", "172.32.0.1"} {
		if Special(netip.MustParseAddr(a)) {
			t.Errorf("%s is taken for special", a)
		}
	}
}

// Every host of a permission is a target that can be read.
func TestPermissionsParse(t *testing.T) {
	for _, p := range Permissions() {
		if rules, err := rulesOf(p.ID); err != nil || len(rules) != len(p.Hosts) {
			t.Errorf("%s: %v", p.ID, err)
		}
	}
}

// What a rule says of itself reads back as the same rule.
func FuzzParseRule(f *testing.F) {
	for _, text := range []string{"allow example.com", "deny *.example.com:80,443-444", "allow [2001:db8::1]:53", "allow 10.0.0.0/8", "deny *:25"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRule(text)
		if err != nil {
			return
		}
		again, err := ParseRule(r.String())
		if err != nil || again.String() != r.String() {
			t.Errorf("%q is %q, and that %q, %v", text, r, again, err)
		}
		if r.Net.IsValid() && (r.Host != "" || r.Any) {
			t.Errorf("%q is about two things: %+v", text, r)
		}
	})
}
