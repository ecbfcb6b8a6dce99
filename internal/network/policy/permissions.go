package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Kind is a sandbox's network (`--network`).
type Kind string

const (
	Agent  Kind = "agent"  // the Standard permissions
	Locked Kind = "locked" // the agent's model and nothing else
	Open   Kind = "open"   // everything on the Internet, logged
	Bake   Kind = "bake"   // package registries
	NAT    Kind = "nat"    // everything this computer reaches, unfiltered and unlogged
	None   Kind = "none"   // no network card
)

// Kinds are all kinds, in the order they are told in.
var Kinds = []Kind{Agent, Locked, Open, Bake, NAT, None}

// ParseKind reads a kind's name.
func ParseKind(name string) (Kind, error) {
	if k := Kind(name); slices.Contains(Kinds, k) {
		return k, nil
	}
	return "", fmt.Errorf("%q is no kind of network: agent, locked, open, bake, nat and none are", clip(name))
}

// Filtered says whether permissions and rules apply, and the kind can be changed while
// the sandbox runs.
func (k Kind) Filtered() bool { return k != NAT && k != None }

// Permission is a named set of hosts.
type Permission struct {
	ID      string
	Meaning string
	Hosts   []string // rule targets
	// Presets it is part of.
	Presets []string
	// Asks is set where allowing it deserves a question first.
	Asks bool
}

const siteID = "site:"

// The presets.
const (
	PresetLocked   = "locked"
	PresetStandard = "standard"
	PresetOpen     = "open"
)

var presets = []string{PresetLocked, PresetStandard, PresetOpen}

var everyPreset = presets

// permissions is what each name stands for today. Records keep names, so that a host
// added here reaches the sandboxes that exist.
var permissions = []Permission{
	{ID: "model", Meaning: "the agent's model API", Presets: everyPreset,
		Hosts: []string{"api.anthropic.com:443"}},
	{ID: "model:openai", Meaning: "OpenAI's model API",
		Hosts: []string{"chatgpt.com:443", "api.openai.com:443", "ab.chatgpt.com:443"}},
	{ID: "sign-in", Meaning: "the vendors' sign-in pages",
		Hosts: []string{"claude.ai:443", "console.anthropic.com:443", "platform.claude.com:443", "auth.openai.com:443"}},
	{ID: "update", Meaning: "the agent's own updates", Presets: []string{PresetStandard, PresetOpen},
		Hosts: []string{"downloads.claude.ai:443", "pi.dev:443", "registry.npmjs.org:443"}},
	{ID: "install:system", Meaning: "Debian, Ubuntu and Alpine packages", Presets: []string{PresetStandard, PresetOpen},
		Hosts: []string{"deb.debian.org:80,443", "security.debian.org:80,443", "archive.ubuntu.com:80,443", "security.ubuntu.com:80,443", "ports.ubuntu.com:80,443", "dl-cdn.alpinelinux.org:80,443"}},
	{ID: "install:node", Meaning: "Node packages", Presets: []string{PresetOpen},
		Hosts: []string{"registry.npmjs.org:443", "registry.yarnpkg.com:443", "nodejs.org:443"}},
	{ID: "install:python", Meaning: "Python packages", Presets: []string{PresetOpen},
		Hosts: []string{"pypi.org:443", "files.pythonhosted.org:443"}},
	{ID: "install:go", Meaning: "Go modules", Presets: []string{PresetOpen},
		Hosts: []string{"proxy.golang.org:443", "sum.golang.org:443", "go.dev:443", "dl.google.com:443"}},
	{ID: "install:rust", Meaning: "Rust crates and toolchains", Presets: []string{PresetOpen},
		Hosts: []string{"crates.io:443", "index.crates.io:443", "static.crates.io:443", "static.rust-lang.org:443"}},
	{ID: "install:java", Meaning: "Maven and Gradle packages", Presets: []string{PresetOpen},
		Hosts: []string{"repo.maven.apache.org:443", "repo1.maven.org:443", "plugins.gradle.org:443", "services.gradle.org:443"}},
	{ID: "install:ruby", Meaning: "Ruby gems", Presets: []string{PresetOpen},
		Hosts: []string{"rubygems.org:443", "index.rubygems.org:443"}},
	{ID: "install:dotnet", Meaning: "NuGet packages and .NET SDKs", Presets: []string{PresetOpen},
		Hosts: []string{"api.nuget.org:443", "www.nuget.org:443", "globalcdn.nuget.org:443", "builds.dotnet.microsoft.com:443"}},
	{ID: "github", Meaning: "cloning and fetching from GitHub, as nobody", Presets: []string{PresetStandard, PresetOpen},
		Hosts: []string{"github.com:22,80,443", "codeload.github.com:443", "raw.githubusercontent.com:443", "objects.githubusercontent.com:443"}},
	{ID: "github:as-you", Meaning: "GitHub as you, reading",
		Hosts: []string{"github.com:443", "api.github.com:443", "uploads.github.com:443", "codeload.github.com:443"}},
	{ID: "github:push", Meaning: "GitHub as you, writing",
		Hosts: []string{"github.com:443", "api.github.com:443", "uploads.github.com:443", "codeload.github.com:443"}},
	{ID: "error-reports", Meaning: "crash reports of the agents", Presets: []string{PresetStandard, PresetOpen},
		Hosts: []string{"http-intake.logs.us5.datadoghq.com:443", "browser-intake-us5-datadoghq.com:443"}},
	{ID: "web", Meaning: "any site", Presets: []string{PresetOpen}, Asks: true,
		Hosts: []string{"*"}},
}

// Languages are those with an install permission.
var Languages = []string{"node", "python", "go", "rust", "java", "ruby", "dotnet"}

// Permissions lists what there is, for people to choose from.
func Permissions() []Permission { return slices.Clone(permissions) }

// Options are the facts of a sandbox that presets depend on.
type Options struct {
	Language string // the base's language, of Languages, or ""
	OpenAI   bool   // a Codex sandbox
}

// Preset gives the permissions a preset turns on.
func Preset(name string, o Options) ([]string, error) {
	if !slices.Contains(presets, name) {
		return nil, fmt.Errorf("%q is no preset: locked, standard and open are", clip(name))
	}
	var ids []string
	for _, p := range permissions {
		if slices.Contains(p.Presets, name) ||
			o.OpenAI && p.ID == "model:openai" ||
			name == PresetStandard && o.Language != "" && p.ID == "install:"+o.Language {
			ids = append(ids, p.ID)
		}
	}
	return ids, nil
}

// Record is a sandbox's choice as it is stored: names, not what they mean today.
type Record struct {
	Kind        Kind     `json:"kind"`
	Permissions []string `json:"permissions,omitempty"` // ids; not for bake, nat and none
	Rules       []string `json:"rules,omitempty"`       // the user's own, which come first
}

// NewRecord is a kind's choice for a new sandbox.
func NewRecord(kind Kind, o Options) Record {
	r := Record{Kind: kind}
	preset := map[Kind]string{Agent: PresetStandard, Locked: PresetLocked, Open: PresetOpen}[kind]
	if preset != "" {
		r.Permissions, _ = Preset(preset, o)
	}
	return r
}

// Expand gives the ids that a word of `net allow` stands for: a permission, "install"
// for all of its kind, "site:HOST", or a preset.
func Expand(word string, o Options) ([]string, error) {
	if host, is := strings.CutPrefix(word, siteID); is {
		rule, err := ParseTarget(host)
		if err != nil {
			return nil, err
		}
		return []string{siteID + rule.target()}, nil
	}
	if slices.Contains(presets, word) {
		return Preset(word, o)
	}
	var ids []string
	for _, p := range permissions {
		if p.ID == word || word == "install" && strings.HasPrefix(p.ID, "install:") {
			ids = append(ids, p.ID)
		}
	}
	if ids == nil {
		return nil, fmt.Errorf("%q is no permission: see `doz net permissions`, or name a host as %s%s", clip(word), siteID, clip(word))
	}
	return ids, nil
}

// credentials are permissions that no preset turns on or off.
var credentials = []string{"github:as-you", "github:push"}

// Allow turns permissions on. A preset among the words takes the place of what is on,
// but leaves the credentials' permissions and sites alone.
func (r Record) Allow(words []string, o Options) (Record, error) {
	if err := r.takesPermissions(); err != nil {
		return r, err
	}
	ids := slices.Clone(r.Permissions)
	for _, word := range words {
		more, err := Expand(word, o)
		if err != nil {
			return r, err
		}
		if slices.Contains(presets, word) {
			ids = slices.DeleteFunc(ids, func(id string) bool {
				return !slices.Contains(credentials, id) && !strings.HasPrefix(id, siteID)
			})
		}
		if slices.Contains(more, "github:push") {
			more = append(more, "github:as-you")
		}
		for _, id := range more {
			if !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	r.Permissions = ids
	return r, nil
}

// Deny turns permissions off.
func (r Record) Deny(words []string, o Options) (Record, error) {
	if err := r.takesPermissions(); err != nil {
		return r, err
	}
	ids := slices.Clone(r.Permissions)
	for _, word := range words {
		less, err := Expand(word, o)
		if err != nil {
			return r, err
		}
		if slices.Contains(less, "github:as-you") {
			less = append(less, "github:push")
		}
		ids = slices.DeleteFunc(ids, func(id string) bool { return slices.Contains(less, id) })
	}
	r.Permissions = ids
	return r, nil
}

func (r Record) takesPermissions() error {
	if r.Kind == Agent || r.Kind == Locked || r.Kind == Open {
		return nil
	}
	return fmt.Errorf("network %s takes no permissions: agent, locked and open do", r.Kind)
}

// ParseChoice reads the list of `--allow` and of a project file: a preset first, if
// any, then ids, "+id" and "-id".
func ParseChoice(kind Kind, list string, o Options) (Record, error) {
	words := strings.FieldsFunc(list, func(c rune) bool { return c == ',' || c == ' ' })
	r := NewRecord(kind, o)
	if len(words) > 0 && !strings.HasPrefix(words[0], "+") && !strings.HasPrefix(words[0], "-") {
		r.Permissions = nil // exactly those
	}
	for _, word := range words {
		var err error
		if off, is := strings.CutPrefix(word, "-"); is {
			r, err = r.Deny([]string{off}, o)
		} else {
			r, err = r.Allow([]string{strings.TrimPrefix(word, "+")}, o)
		}
		if err != nil {
			return r, err
		}
	}
	return r, nil
}

// Policy is what the record means in this program.
func (r Record) Policy() (*Policy, error) {
	p := &Policy{Kind: r.Kind}
	switch r.Kind {
	case NAT:
		for _, all := range []string{"0.0.0.0/0", "::/0"} {
			p.Rules = append(p.Rules, Rule{Allow: true, Net: netip.MustParsePrefix(all), Source: string(NAT)})
		}
		p.Rules = append(p.Rules, Rule{Allow: true, Any: true, Source: string(NAT)})
		return p, nil
	case None:
		return p, nil
	case Agent, Locked, Open, Bake:
	default:
		return nil, fmt.Errorf("%q is no kind of network", clip(string(r.Kind)))
	}
	for _, text := range r.Rules {
		rule, err := ParseRule(text)
		if err != nil {
			return nil, err
		}
		p.Rules = append(p.Rules, rule)
	}
	ids := r.Permissions
	if r.Kind == Bake {
		ids = bakePermissions()
	}
	// The broad one last, so that the log names the permission that a host is of.
	ids = slices.Clone(ids)
	slices.SortStableFunc(ids, func(a, b string) int { return boolInt(a == "web") - boolInt(b == "web") })
	for _, id := range ids {
		rules, err := rulesOf(id)
		if err != nil {
			return nil, err
		}
		p.Rules = append(p.Rules, rules...)
	}
	return p, nil
}

// bakePermissions are the package registries.
func bakePermissions() []string {
	var ids []string
	for _, p := range permissions {
		if strings.HasPrefix(p.ID, "install:") || p.ID == "update" || p.ID == "github" {
			ids = append(ids, p.ID)
		}
	}
	return ids
}

func rulesOf(id string) ([]Rule, error) {
	targets := []string{}
	if host, is := strings.CutPrefix(id, siteID); is {
		targets = append(targets, host)
	} else if i := slices.IndexFunc(permissions, func(p Permission) bool { return p.ID == id }); i >= 0 {
		targets = permissions[i].Hosts
	} else {
		// A newer doz may have known it; refusing everything else would be worse.
		return nil, nil
	}
	var rules []Rule
	for _, target := range targets {
		rule, err := ParseTarget(target)
		if err != nil {
			return nil, err
		}
		rule.Allow, rule.Source = true, id
		rules = append(rules, rule)
	}
	return rules, nil
}

// Offer is the word for `net allow` that would allow a destination: the permission it
// is part of where there is one, else its site.
func Offer(host string, port uint16) string {
	for _, p := range permissions {
		if p.ID == "web" || slices.Contains(credentials, p.ID) {
			continue
		}
		rules, _ := rulesOf(p.ID)
		if slices.ContainsFunc(rules, func(r Rule) bool { return r.matchesName(Canonical(host)) && (port == 0 || r.covers(port)) }) {
			return p.ID
		}
	}
	return siteID + host
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
