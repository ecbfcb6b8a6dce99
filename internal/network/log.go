package network

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"dozable.com/doz/internal/network/policy"
)

// Record is one line of a sandbox's network log. It says who was spoken to and how
// much, never what was said.
type Record struct {
	Time     time.Time `json:"time"`              // when it was decided
	Protocol string    `json:"protocol"`          // tcp, tls, http, udp, dns, icmp, ip; in-tcp and in-udp for published ports
	Host     string    `json:"host,omitempty"`    // the name, where there is one
	Address  string    `json:"address,omitempty"` // the literal address
	Port     uint16    `json:"port,omitempty"`    //
	Verdict  string    `json:"verdict"`           // allow, deny; failed: allowed, and could not be reached
	Rule     string    `json:"rule,omitempty"`    // a permission's id or a rule
	Why      string    `json:"why,omitempty"`     // of a refusal or failure, in words
	Sent     int64     `json:"sent"`              // bytes from the sandbox
	Received int64     `json:"received"`          // bytes to it
	Millis   int64     `json:"millis"`            // how long it was open
	Count    int       `json:"count,omitempty"`   // how many alike this line stands for, where more than one
	Dropped  int       `json:"dropped,omitempty"` // how many records before this one were lost
}

// Refusal is what was refused lately, and how it could be allowed.
type Refusal struct {
	Protocol string    `json:"protocol"`
	Host     string    `json:"host"` // or the address
	Port     uint16    `json:"port,omitempty"`
	Count    int       `json:"count"`
	First    time.Time `json:"first"`
	Last     time.Time `json:"last"`
	Words    string    `json:"words"`             // one sentence
	Offer    string    `json:"offer,omitempty"`   // what `net allow` takes
	Command  string    `json:"command,omitempty"` // the command that allows it
}

const (
	verdictAllow  = "allow"
	verdictDeny   = "deny"
	verdictFailed = "failed"

	maxWaiting   = 1024             // records for a slow log
	maxRefusals  = 256              // remembered
	maxAlike     = 512              // refusals that are being counted
	alikeWindow  = 10 * time.Second // how long refusals alike are one line
	overflowName = "(others)"
)

// logger counts refusals alike, remembers the latest, and hands records to the log
// without ever waiting for it.
type logger struct {
	name    string
	records chan Record
	done    chan struct{}

	mu      sync.Mutex
	closed  bool
	dropped int
	alike   map[alike]*Record   // counted since their line was written
	recent  map[recent]*Refusal // the latest, for people
}

// alike is what makes refusals one.
type alike struct {
	protocol, host, address, why string
	port                         uint16
}

type recent struct {
	protocol, host string
	port           uint16
}

func newLogger(sink func(Record), name string) *logger {
	l := &logger{name: name, records: make(chan Record, maxWaiting), done: make(chan struct{}), alike: map[alike]*Record{}, recent: map[recent]*Refusal{}}
	go func() {
		defer close(l.done)
		for r := range l.records {
			if sink != nil {
				sink(r)
			}
		}
	}()
	return l
}

func (l *logger) close() {
	l.mu.Lock()
	for k := range l.alike {
		l.flush(k)
	}
	l.closed = true
	close(l.records)
	l.mu.Unlock()
	<-l.done
}

// write hands a record on.
func (l *logger) write(r Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.put(r)
}

// put is write with mu held.
func (l *logger) put(r Record) {
	if l.closed {
		return
	}
	if r.Time.IsZero() {
		r.Time = time.Now()
	}
	r.Dropped = l.dropped
	select {
	case l.records <- r:
		l.dropped = 0
	default:
		l.dropped++
	}
}

// refused logs a refusal: the first of its like at once, and how many followed when a
// moment has passed.
func (l *logger) refused(r Record, v policy.Verdict) {
	r.Time, r.Verdict, r.Rule, r.Why = time.Now(), verdictDeny, v.Rule, string(v.Why)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remember(r, v)
	k := alike{r.Protocol, r.Host, r.Address, r.Why, r.Port}
	if _, counting := l.alike[k]; !counting && len(l.alike) >= maxAlike {
		// A guest that tries everything gets one line for all.
		r.Host, r.Address, r.Port = overflowName, "", 0
		k = alike{protocol: r.Protocol, host: r.Host, why: r.Why}
	}
	if counted := l.alike[k]; counted != nil {
		counted.Count++
		return
	}
	if l.closed {
		return
	}
	l.put(r)
	r.Count = 0
	l.alike[k] = &r
	time.AfterFunc(alikeWindow, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.flush(k)
	})
}

// flush writes how many refusals followed the first, with mu held.
func (l *logger) flush(k alike) {
	r := l.alike[k]
	delete(l.alike, k)
	if r != nil && r.Count > 0 {
		r.Time = time.Now()
		l.put(*r)
	}
}

// remember keeps a refusal for people, with mu held.
func (l *logger) remember(r Record, v policy.Verdict) {
	k := recent{r.Protocol, cmp.Or(r.Host, r.Address), r.Port}
	known := l.recent[k]
	if known == nil {
		if len(l.recent) >= maxRefusals {
			var oldest recent
			for key, old := range l.recent {
				if o := l.recent[oldest]; o == nil || old.Last.Before(o.Last) {
					oldest = key
				}
			}
			delete(l.recent, oldest)
		}
		known = &Refusal{Protocol: r.Protocol, Host: k.host, Port: r.Port, First: r.Time}
		l.recent[k] = known
	}
	known.Count++
	known.Last = r.Time
	known.Words, known.Offer = words(r, v)
	if known.Offer != "" {
		known.Command = "doz net allow " + l.name + " " + known.Offer
	}
}

func (l *logger) refusals() []Refusal {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []Refusal
	for _, r := range l.recent {
		all = append(all, *r)
	}
	slices.SortFunc(all, func(a, b Refusal) int { return b.Last.Compare(a.Last) })
	return all
}

// words says what was refused and why, and what would allow it: "" where nothing does.
func words(r Record, v policy.Verdict) (sentence, offer string) {
	what := cmp.Or(r.Host, r.Address)
	if r.Port != 0 {
		what = net.JoinHostPort(what, strconv.Itoa(int(r.Port)))
	}
	verb := "connect to"
	if r.Protocol == "dns" {
		verb = "resolve"
	}
	sentence = fmt.Sprintf("tried to %s %s (%s): %s", verb, what, r.Protocol, v.Why)
	switch v.Why {
	case policy.NoRule, policy.Disagrees:
		if r.Host != "" && policy.ValidName(r.Host) {
			return sentence, policy.Offer(r.Host, r.Port)
		}
		return sentence, offerAddress(r)
	case policy.Restricted, policy.Unresolved:
		return sentence, offerAddress(r)
	case policy.Denied:
		return sentence + " (" + v.Rule + ")", ""
	}
	return sentence, ""
}

// offerAddress is the site that names an address, and its port where there is one.
func offerAddress(r Record) string {
	if r.Address == "" {
		return ""
	}
	target := r.Address
	if r.Port != 0 {
		target = net.JoinHostPort(r.Address, strconv.Itoa(int(r.Port)))
	}
	return "site:" + target
}
