package httpguard

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestGuard(t *testing.T) {
	g := Guard{Hosts: []string{"localhost", "space.test"}, Origins: []string{"https://console.test"}}
	for _, c := range []struct {
		name, host, origin, site string
		want                     int
	}{
		{"own name", "space.test:7780", "", "", 200},
		{"case and dot", "SPACE.test.:7780", "", "", 200},
		{"address it arrived at", "127.0.0.1:7780", "", "", 200},
		{"rebound name", "evil.test:7780", "", "", 403},
		{"another address", "10.0.0.1", "", "", 403},
		{"no host", "", "", "", 403},
		{"same origin", "space.test:7780", "http://space.test:7780", "", 200},
		{"allowed origin", "space.test", "https://console.test", "", 200},
		{"foreign origin", "space.test", "https://evil.test", "", 403},
		{"null origin", "space.test", "null", "", 403},
		{"same host, other port", "space.test:7780", "http://space.test:1", "", 403},
		{"cross-site navigation", "space.test", "", "cross-site", 403},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequest("GET", "/", nil)
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 7780}))
			r.Host = c.host
			if c.origin != "" {
				r.Header.Set("Origin", c.origin)
			}
			if c.site != "" {
				r.Header.Set("Sec-Fetch-Site", c.site)
			}
			w := httptest.NewRecorder()
			g.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(200) })).ServeHTTP(w, r)
			if w.Code != c.want {
				t.Errorf("got %d, want %d: %s", w.Code, c.want, w.Body)
			}
		})
	}
}
