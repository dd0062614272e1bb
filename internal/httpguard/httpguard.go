// Package httpguard keeps browsers of other origins, and names that were
// rebound to us, away from a listener: every listener, loopback included,
// checks the Host header against its configured names and refuses foreign
// Origins, WebSockets too.
package httpguard

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/problem"
)

// Guard is the rule of one listener.
type Guard struct {
	// Hosts are the names (without port) that the listener answers to. IP
	// literals of the address a request arrived at are always among them, since
	// they cannot be rebound.
	Hosts []string
	// Origins are the foreign origins ("https://console.example") that browsers may call from.
	Origins []string
}

// Local are the names of a loopback listener.
var Local = []string{"localhost", "127.0.0.1", "::1"}

// Wrap checks each request before next sees it.
func (g Guard) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !g.hostOK(r) {
			problem.Write(w, fault.New(fault.Denied, "host_not_allowed", "this server does not answer to the name in the Host header").
				Do("use its configured name, or have the operator add yours with --host"))
			return
		}
		if o := r.Header.Get("Origin"); o != "" && !g.originOK(r, o) {
			problem.Write(w, fault.New(fault.Denied, "origin_not_allowed", "requests from this web origin are refused").
				Do("have the operator add it with --origin"))
			return
		}
		if s := r.Header.Get("Sec-Fetch-Site"); s == "cross-site" && r.Header.Get("Origin") == "" {
			problem.Write(w, fault.New(fault.Denied, "origin_not_allowed", "cross-site requests are refused"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func hostname(hostport string) string {
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		hostport = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(hostport, "[]"), "."))
}

func (g Guard) hostOK(r *http.Request) bool {
	h := hostname(r.Host)
	if slices.ContainsFunc(g.Hosts, func(x string) bool { return strings.EqualFold(x, h) }) {
		return true
	}
	want, err := netip.ParseAddr(h)
	if err != nil {
		return false
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if local == nil {
		return false
	}
	got, err := netip.ParseAddrPort(local.String())
	return err == nil && got.Addr().Unmap() == want.Unmap()
}

func (g Guard) originOK(r *http.Request, origin string) bool {
	if slices.Contains(g.Origins, origin) {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && strings.EqualFold(u.Host, r.Host)
}
