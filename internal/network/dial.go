package network

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"time"

	"golang.org/x/net/proxy"
)

// dialTimeout bounds the wait for the world outside; a guest's own is longer.
const dialTimeout = 20 * time.Second

// proxyFor gives the upstream proxy for a host's port, or nil.
func (n *Network) proxyFor(host string, port uint16) *url.URL {
	scheme := "https"
	if port == 80 {
		scheme = "http"
	}
	u, err := n.c.Proxy(&url.URL{Scheme: scheme, Host: net.JoinHostPort(host, strconv.Itoa(int(port)))})
	if err != nil {
		return nil
	}
	return u
}

// proxied says whether a name's connections go through an upstream proxy, which
// resolves it; this computer may not be able to.
func (n *Network) proxied(name string) bool {
	return n.proxyFor(name, 443) != nil || n.proxyFor(name, 80) != nil
}

// dial connects to what a judgement allowed.
func (n *Network) dial(ctx context.Context, network string, j judgement) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	host := j.to.Addr().String()
	if j.name != "" {
		host = j.name
	}
	if network == "tcp" {
		if u := n.proxyFor(host, j.to.Port()); u != nil {
			return n.dialThrough(ctx, u, net.JoinHostPort(host, strconv.Itoa(int(j.to.Port()))))
		}
	}
	if !j.stand {
		return n.c.Dial(ctx, network, j.to.String())
	}
	// The name has a proxy for other ports and none for this one.
	return n.dialName(ctx, network, j)
}

// dialName resolves a name now and connects to it, under the same rules.
func (n *Network) dialName(ctx context.Context, network string, j judgement) (net.Conn, error) {
	addrs, err := n.names.addresses(ctx, j.name)
	if err != nil {
		return nil, err
	}
	err = errRestricted
	for _, a := range addrs {
		to := netip.AddrPortFrom(a, j.to.Port())
		if n.closed(a, to.Port()) || !n.policy.Load().Address(j.name, a, to.Port(), n.restricted(a)).Allow {
			continue
		}
		conn, dialErr := n.c.Dial(ctx, network, to.String())
		if dialErr == nil {
			return conn, nil
		}
		err = dialErr
	}
	return nil, err
}

// dialThrough connects through an upstream proxy.
func (n *Network) dialThrough(ctx context.Context, via *url.URL, target string) (net.Conn, error) {
	address := via.Host
	if via.Port() == "" {
		address = net.JoinHostPort(via.Hostname(), map[string]string{"https": "443", "socks5": "1080", "socks5h": "1080"}[via.Scheme])
		if via.Scheme == "http" {
			address = net.JoinHostPort(via.Hostname(), "80")
		}
	}
	switch via.Scheme {
	case "socks5", "socks5h":
		var auth *proxy.Auth
		if via.User != nil {
			password, _ := via.User.Password()
			auth = &proxy.Auth{User: via.User.Username(), Password: password}
		}
		d, err := proxy.SOCKS5("tcp", address, auth, forward(n.c.Dial))
		if err != nil {
			return nil, err
		}
		return d.(proxy.ContextDialer).DialContext(ctx, "tcp", target)
	case "http", "https":
	default:
		return nil, fmt.Errorf("cannot use the upstream proxy: its scheme is %q", via.Scheme)
	}
	conn, err := n.c.Dial(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("cannot reach the upstream proxy: %w", err)
	}
	if via.Scheme == "https" {
		conn = tls.Client(conn, &tls.Config{ServerName: via.Hostname()})
	}
	through, err := connect(ctx, conn, via, target)
	if err != nil {
		conn.Close()
	}
	return through, err
}

// connect asks an HTTP proxy for a connection to target.
func connect(ctx context.Context, conn net.Conn, via *url.URL, target string) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	request := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: target}, Host: target, Header: http.Header{}}
	if via.User != nil {
		password, _ := via.User.Password()
		request.Header.Set("Proxy-Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(via.User.Username()+":"+password)))
	}
	if err := request.Write(conn); err != nil {
		return nil, fmt.Errorf("cannot use the upstream proxy: %w", err)
	}
	in := bufio.NewReader(conn)
	answer, err := http.ReadResponse(in, request)
	if err != nil {
		return nil, fmt.Errorf("cannot use the upstream proxy: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the upstream proxy refused: %s", answer.Status)
	}
	if !stop() {
		return nil, context.Cause(ctx)
	}
	if in.Buffered() > 0 {
		return &buffered{Conn: conn, in: in}, nil
	}
	return conn, nil
}

// buffered is a connection of which something has been read already.
type buffered struct {
	net.Conn
	in *bufio.Reader
}

func (b *buffered) Read(p []byte) (int, error) { return b.in.Read(p) }

// CloseWrite ends the sending half, where the connection can.
func (b *buffered) CloseWrite() error { return closeWrite(b.Conn) }

func closeWrite(c net.Conn) error {
	if half, is := c.(interface{ CloseWrite() error }); is {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// forward lets the proxy package dial as the network does.
type forward func(ctx context.Context, network, address string) (net.Conn, error)

func (f forward) Dial(network, address string) (net.Conn, error) {
	return f(context.Background(), network, address)
}

func (f forward) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return f(ctx, network, address)
}
