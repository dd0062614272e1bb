package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"time"
)

// proxy is the only way out of a build: it fetches from the named mirrors and
// refuses everything else. It never follows a redirect itself, so that a mirror
// cannot point it elsewhere. apt verifies what it gets by signature.
type proxy struct {
	// allowed holds "http host:port" and "https host:port" of the mirrors.
	allowed map[string]bool
	// cache is a directory for files that never change, or "".
	cache     string
	transport http.RoundTripper
	dial      func(ctx context.Context, network, addr string) (net.Conn, error)
	// fetched and cached count answers from a mirror and from the cache.
	fetched, cached atomic.Int64
	refused         atomic.Int64
}

// newProxy makes a proxy for the mirrors. upstream is the proxy that the host
// itself has to use, or nil.
func newProxy(sources []source, cache string, upstream *url.URL) *proxy {
	dialer := &net.Dialer{Timeout: 20 * time.Second}
	p := &proxy{allowed: map[string]bool{}, cache: cache, dial: dialer.DialContext}
	for _, s := range sources {
		if u, err := url.Parse(s.uri); err == nil {
			p.allowed[u.Scheme+" "+hostPort(u)] = true
		}
	}
	p.transport = &http.Transport{
		Proxy:                 http.ProxyURL(upstream),
		DialContext:           dialer.DialContext,
		ResponseHeaderTimeout: 60 * time.Second,
		IdleConnTimeout:       30 * time.Second,
		MaxIdleConnsPerHost:   8,
		DisableCompression:    true,
	}
	return p
}

func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return strings.ToLower(u.Hostname()) + ":" + port
}

// serve answers on l until ctx ends.
func (p *proxy) serve(ctx context.Context, l net.Listener) {
	srv := &http.Server{
		Handler:           p,
		ReadHeaderTimeout: 20 * time.Second,
		IdleTimeout:       60 * time.Second,
		MaxHeaderBytes:    32 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	_ = srv.Serve(l) // it ends by Close
}

// ServeHTTP implements http.Handler.
func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		p.tunnel(w, r)
		return
	}
	u := r.URL
	if r.Method != http.MethodGet && r.Method != http.MethodHead || u.Scheme != "http" || u.User != nil || u.RawQuery != "" || r.ContentLength != 0 {
		p.refuse(w, "only plain GET of packages")
		return
	}
	if !p.allowed["http "+hostPort(u)] {
		p.refuse(w, "no mirror of this host: "+u.Host)
		return
	}
	p.fetch(w, r)
}

func (p *proxy) refuse(w http.ResponseWriter, why string) {
	p.refused.Add(1)
	http.Error(w, "refused: "+why, http.StatusForbidden)
}

// immutable matches what a mirror never changes under the same name.
var immutable = regexp.MustCompile(`/pool/.*\.deb$|/by-hash/SHA(256|512)/[0-9a-f]+$`)

func (p *proxy) fetch(w http.ResponseWriter, r *http.Request) {
	keep := ""
	if p.cache != "" && r.Method == http.MethodGet && r.Header.Get("Range") == "" && immutable.MatchString(r.URL.Path) {
		sum := sha256.Sum256([]byte(r.URL.String()))
		keep = filepath.Join(p.cache, hex.EncodeToString(sum[:]))
		if f, err := os.Open(keep); err == nil {
			defer f.Close()
			if st, err := f.Stat(); err == nil && st.Mode().IsRegular() {
				p.cached.Add(1)
				now := time.Now()
				_ = os.Chtimes(keep, now, now) // used: pruneCache keeps it
				w.Header().Set("Content-Length", fmt.Sprint(st.Size()))
				_, _ = io.Copy(w, f)
				return
			}
		}
	}
	out := &http.Request{Method: r.Method, URL: r.URL, Host: r.URL.Host, Header: http.Header{}, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1}
	for _, h := range []string{"Range", "If-Range", "If-Modified-Since", "Cache-Control", "User-Agent", "Accept"} {
		if v := r.Header.Get(h); v != "" {
			out.Header.Set(h, v)
		}
	}
	resp, err := p.transport.RoundTrip(out.WithContext(r.Context()))
	if err != nil {
		http.Error(w, "mirror: "+err.Error(), http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	p.fetched.Add(1)
	for _, h := range []string{"Content-Length", "Content-Range", "Content-Type", "Last-Modified", "Etag", "Accept-Ranges", "Location", "Date"} {
		if v := resp.Header.Get(h); v != "" {
			w.Header().Set(h, v)
		}
	}
	w.WriteHeader(resp.StatusCode)
	if keep == "" || resp.StatusCode != http.StatusOK || resp.ContentLength < 0 {
		_, _ = io.Copy(w, resp.Body)
		return
	}
	p.copyAndKeep(w, resp, keep)
}

// copyAndKeep passes the body on, and keeps it when it arrived whole. The cache
// only saves the way: trouble with it never disturbs the build, and apt refuses
// content of another hash wherever it comes from.
func (p *proxy) copyAndKeep(w io.Writer, resp *http.Response, keep string) {
	tmp, err := os.CreateTemp(p.cache, ".partial-*")
	if err != nil {
		_, _ = io.Copy(w, resp.Body)
		return
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	side := &sideWriter{w: tmp}
	n, err := io.Copy(w, io.TeeReader(resp.Body, side))
	if err == nil && side.err == nil && n == resp.ContentLength && tmp.Close() == nil {
		_ = os.Rename(tmp.Name(), keep)
	}
}

// sideWriter keeps its first error to itself.
type sideWriter struct {
	w   io.Writer
	err error
}

func (s *sideWriter) Write(p []byte) (int, error) {
	if s.err == nil {
		_, s.err = s.w.Write(p)
	}
	return len(p), nil
}

// cacheAge is how long an unused file stays in the package cache.
const cacheAge = 30 * 24 * time.Hour

// pruneCache removes what was not used for cacheAge, or everything, and what a
// killed proxy left half-way. It never removes anything but files of the cache.
func pruneCache(dir string, now time.Time, everything bool) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		age := now.Sub(info.ModTime())
		if everything || age > cacheAge || strings.HasPrefix(e.Name(), ".partial-") && age > time.Hour {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}

// tunnel serves CONNECT for mirrors that the host names by https.
func (p *proxy) tunnel(w http.ResponseWriter, r *http.Request) {
	host, port, err := net.SplitHostPort(r.Host)
	addr := net.JoinHostPort(strings.ToLower(host), port)
	if err != nil || !p.allowed["https "+addr] {
		p.refuse(w, "no mirror of this host: "+r.Host)
		return
	}
	up, err := p.dial(r.Context(), "tcp", addr)
	if err != nil {
		http.Error(w, "mirror: "+err.Error(), http.StatusBadGateway)
		return
	}
	defer up.Close()
	down, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, "cannot tunnel", http.StatusInternalServerError)
		return
	}
	defer down.Close()
	p.fetched.Add(1)
	if _, err := io.WriteString(down, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	stop := context.AfterFunc(r.Context(), func() { up.Close(); down.Close() })
	defer stop()
	done := make(chan struct{}, 2)
	go func() { _, _ = io.Copy(up, buffered); done <- struct{}{} }()
	go func() { _, _ = io.Copy(down, up); done <- struct{}{} }()
	<-done
}
