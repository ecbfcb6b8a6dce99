package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"dozable.com/doz/internal/network/policy"
)

const (
	headTimeout  = 30 * time.Second
	maxHeadBytes = 256 << 10
)

// plainProxy is the upstream proxy for a flow's plain HTTP requests, or nil.
func (n *Network) plainProxy(j judgement) *url.URL {
	host := j.name
	if host == "" {
		host = j.to.Addr().String()
	}
	if u := n.proxyFor(host, j.to.Port()); u != nil && (u.Scheme == "http" || u.Scheme == "https") {
		return u
	}
	return nil
}

// serveHTTP speaks HTTP with the guest, so that every request on the connection is
// judged by its Host, not only the first.
func (f *flow) serveHTTP(first []byte) {
	transport := f.transport()
	defer transport.CloseIdleConnections()
	proxy := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme = "http"
			r.Out.URL.Host = f.j.to.String()
			r.Out.URL.RawQuery = r.In.URL.RawQuery
			r.Out.Host = r.In.Host
			if name := policy.Canonical(hostOf(r.In)); transport.Proxy != nil && name != "" {
				r.Out.URL.Host = hostPort(name, f.j.to.Port()) // its proxy resolves it
			}
			if _, given := r.In.Header["User-Agent"]; !given {
				r.Out.Header["User-Agent"] = nil // none, rather than Go's
			}
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			f.say(w, http.StatusBadGateway, "cannot reach "+r.Host+": "+plain(err))
		},
	}
	conn := &once{Conn: f.guest, rest: bytes.NewReader(first), f: f, done: make(chan struct{})}
	server := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { f.request(w, r, proxy) }),
		ReadHeaderTimeout: headTimeout, MaxHeaderBytes: maxHeadBytes,
		ErrorLog:    log.New(io.Discard, "", 0),
		BaseContext: func(net.Listener) context.Context { return f.n.ctx },
		Protocols: func() *http.Protocols {
			p := new(http.Protocols)
			p.SetHTTP1(true)
			p.SetUnencryptedHTTP2(true)
			return p
		}(),
	}
	stop := context.AfterFunc(f.n.ctx, func() { server.Close() })
	defer stop()
	server.Serve(conn)
	<-conn.done
	if f.j.Allow {
		f.log("http", verdictAllow, "")
	}
}

// transport makes the connections of one flow's requests: the one that is there
// already, and others to the same place when the server has closed it.
func (f *flow) transport() *http.Transport {
	t := &http.Transport{DisableCompression: true, MaxConnsPerHost: 1, ResponseHeaderTimeout: 0}
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	if u := f.n.plainProxy(f.j); u != nil {
		t.Proxy = http.ProxyURL(u)
		t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			return f.n.c.Dial(ctx, network, address)
		}
		return t
	}
	t.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
		f.mu.Lock()
		conn := f.upstream
		f.upstream = nil
		f.mu.Unlock()
		if conn != nil {
			return conn, nil
		}
		return f.n.dial(ctx, "tcp", f.j)
	}
	return t
}

// request judges one request, and passes it on.
func (f *flow) request(w http.ResponseWriter, r *http.Request, next http.Handler) {
	name := policy.Canonical(hostOf(r))
	v := f.j.Verdict
	if v.Allow {
		v = f.n.speaks(f.j, name)
	}
	if r.Method == http.MethodConnect {
		v = policy.Verdict{Why: policy.Relay}
	}
	record := f.record("http")
	if name != "" && (!f.j.Allow || !v.Allow) {
		record.Host = name
	}
	if v.Allow {
		if policy.ValidName(name) {
			f.spoken.Store(&spoken{name, v.Rule})
		}
		next.ServeHTTP(w, r)
		return
	}
	if f.j.Allow { // else the connection's refusal has been logged
		f.n.log.refused(record, v)
	}
	text := fmt.Sprintf("sandbox %s may not reach %s: %s", f.n.c.Name, hostPort(record.Host, f.j.to.Port()), v.Why)
	if _, offer := words(record, v); offer != "" {
		text += "\n\n    doz net allow " + f.n.c.Name + " " + offer
	}
	f.say(w, http.StatusForbidden, text)
}

// hostOf is the host that a request names, without its port.
func hostOf(r *http.Request) string {
	if host, _, err := net.SplitHostPort(r.Host); err == nil {
		return host
	}
	return strings.Trim(r.Host, "[]")
}

func hostPort(host string, port uint16) string {
	if port == 80 {
		return host
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// say answers a request in words, and ends the connection.
func (f *flow) say(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Connection", "close")
	w.Header().Set("X-Doz", "refused")
	w.WriteHeader(status)
	fmt.Fprintln(w, "doz: "+text)
}

// once is the guest's connection, and a listener that gives it, once.
type once struct {
	net.Conn
	rest *bytes.Reader // what was read already
	f    *flow

	given sync.Once
	ended sync.Once
	done  chan struct{}
}

func (c *once) Read(p []byte) (int, error) {
	if c.rest.Len() > 0 {
		return c.rest.Read(p)
	}
	size, err := c.Conn.Read(p)
	c.f.sent.Add(int64(size))
	return size, err
}

func (c *once) Write(p []byte) (int, error) {
	size, err := c.Conn.Write(p)
	c.f.received.Add(int64(size))
	return size, err
}

// Accept gives the connection, then waits for its end.
func (c *once) Accept() (net.Conn, error) {
	var conn net.Conn
	c.given.Do(func() { conn = c })
	if conn != nil {
		return conn, nil
	}
	<-c.done
	return nil, errors.New("served")
}

// Close ends the connection, and with it the listener.
func (c *once) Close() error {
	c.ended.Do(func() { close(c.done) })
	return c.Conn.Close()
}

func (c *once) Addr() net.Addr { return c.Conn.LocalAddr() }
