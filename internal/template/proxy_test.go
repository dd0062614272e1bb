package template

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// through starts a proxy for the mirrors and returns a client that uses it.
func through(t *testing.T, cache string, mirrors ...string) (*proxy, *http.Client) {
	t.Helper()
	var sources []source
	for _, m := range mirrors {
		sources = append(sources, source{m + "/debian", "bookworm", "main"})
	}
	p := newProxy(sources, cache, nil)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { p.serve(ctx, l); close(ended) }()
	t.Cleanup(func() { cancel(); <-ended })
	u := &url.URL{Scheme: "http", Host: l.Addr().String()}
	tr := &http.Transport{Proxy: http.ProxyURL(u), DisableKeepAlives: true}
	return p, &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func status(t *testing.T, c *http.Client, method, url string, body io.Reader) (int, string) {
	t.Helper()
	req, err := http.NewRequest(method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestProxyServesTheMirrorAndNothingElse(t *testing.T) {
	var others atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { others.Add(1) }))
	defer other.Close()
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/debian/away" {
			http.Redirect(w, r, other.URL+"/x", http.StatusFound)
			return
		}
		io.WriteString(w, "mirror "+r.URL.Path+r.Header.Get("Authorization")+r.Header.Get("X-Extra"))
	}))
	defer mirror.Close()
	p, c := through(t, "", mirror.URL)

	if code, body := status(t, c, "GET", mirror.URL+"/debian/dists/bookworm/InRelease", nil); code != 200 || body != "mirror /debian/dists/bookworm/InRelease" {
		t.Fatalf("mirror: %d %q", code, body)
	}
	// The answer is passed on; it is apt that asks again, and is refused.
	if code, _ := status(t, c, "GET", mirror.URL+"/debian/away", nil); code != http.StatusFound {
		t.Errorf("redirect: %d", code)
	}
	before := p.refused.Load()
	port := strings.TrimPrefix(other.URL, "http://127.0.0.1:")
	for what, try := range map[string][2]string{
		"another port":      {"GET", other.URL + "/debian/x"},
		"another name":      {"GET", "http://localhost:" + port + "/x"},
		"name in path":      {"GET", "http://attacker.invalid/" + strings.TrimPrefix(mirror.URL, "http://")},
		"metadata address":  {"GET", "http://169.254.169.254/latest/meta-data"},
		"method":            {"POST", mirror.URL + "/debian/x"},
		"query":             {"GET", mirror.URL + "/debian/x?leak=1"},
		"name with the dot": {"GET", strings.Replace(mirror.URL, "127.0.0.1", "127.0.0.1.", 1) + "/debian/x"},
	} {
		if code, body := status(t, c, try[0], try[1], nil); code != http.StatusForbidden {
			t.Errorf("%s: %d %q, want 403", what, code, body)
		}
	}
	if code, _ := status(t, c, "GET", mirror.URL+"/debian/x", strings.NewReader("body")); code != http.StatusForbidden {
		t.Errorf("a body: %d, want 403", code)
	}
	if got := p.refused.Load() - before; got != 8 {
		t.Errorf("%d requests refused, want 8", got)
	}
	if others.Load() != 0 {
		t.Errorf("%d requests reached another host", others.Load())
	}
	req, _ := http.NewRequest("GET", mirror.URL+"/debian/h", nil)
	req.Header.Set("Authorization", "secret")
	req.Header.Set("X-Extra", "extra")
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); string(b) != "mirror /debian/h" {
		t.Errorf("headers passed on: %q", b)
	}
}

func TestProxyTunnelsOnlyToHTTPSMirrors(t *testing.T) {
	mirror := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "secure") }))
	defer mirror.Close()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	_, c := through(t, "", mirror.URL, plain.URL)
	proxyURL, _ := c.Transport.(*http.Transport).Proxy(&http.Request{URL: &url.URL{Scheme: "http", Host: "x"}})
	tr := mirror.Client().Transport.(*http.Transport).Clone()
	tr.Proxy = http.ProxyURL(proxyURL)
	secure := &http.Client{Transport: tr, Timeout: 20 * time.Second}
	if code, body := status(t, secure, "GET", mirror.URL+"/debian/x", nil); code != 200 || body != "secure" {
		t.Fatalf("https mirror: %d %q", code, body)
	}
	for _, to := range []string{"127.0.0.1:22", strings.TrimPrefix(plain.URL, "http://"), "mirror.example:443", "nonsense"} {
		conn, err := net.Dial("tcp", proxyURL.Host)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, "CONNECT "+to+" HTTP/1.1\r\nHost: "+to+"\r\n\r\n")
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		answer := make([]byte, 64)
		n, _ := conn.Read(answer)
		if got := string(answer[:n]); !strings.HasPrefix(got, "HTTP/1.1 403") && !strings.HasPrefix(got, "HTTP/1.1 400") {
			t.Errorf("CONNECT %s: %q", to, got)
		}
		conn.Close()
	}
}

func TestProxyKeepsWhatNeverChanges(t *testing.T) {
	var hits atomic.Int64
	mirror := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hits.Add(1)
		if strings.Contains(r.URL.Path, "cut") {
			w.Header().Set("Content-Length", "100")
			io.WriteString(w, "only this")
			return
		}
		io.WriteString(w, "content of "+r.URL.Path)
	}))
	defer mirror.Close()
	cache := t.TempDir()
	p, c := through(t, cache, mirror.URL)
	get := func(path string, want int64) {
		t.Helper()
		if code, body := status(t, c, "GET", mirror.URL+path, nil); code != 200 || body != "content of "+path {
			t.Fatalf("%s: %d %q", path, code, body)
		}
		if got := hits.Load(); got != want {
			t.Errorf("%s: %d requests at the mirror, want %d", path, got, want)
		}
	}
	get("/debian/pool/main/b/bash/bash_5_amd64.deb", 1)
	get("/debian/pool/main/b/bash/bash_5_amd64.deb", 1)
	get("/debian/dists/bookworm/main/by-hash/SHA256/00ff", 2)
	get("/debian/dists/bookworm/main/by-hash/SHA256/00ff", 2)
	get("/debian/dists/bookworm/InRelease", 3)
	get("/debian/dists/bookworm/InRelease", 4)
	if p.cached.Load() != 2 || p.fetched.Load() != 4 {
		t.Errorf("cached %d, fetched %d", p.cached.Load(), p.fetched.Load())
	}
	// What arrives cut short is not kept.
	before, _ := os.ReadDir(cache)
	if resp, err := c.Get(mirror.URL + "/debian/pool/cut.deb"); err == nil {
		_, err = io.ReadAll(resp.Body)
		resp.Body.Close()
		if err == nil {
			t.Error("a cut answer looked whole")
		}
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		after, _ := os.ReadDir(cache)
		if len(after) == len(before) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("cache has %d files, want %d", len(after), len(before))
		}
		time.Sleep(10 * time.Millisecond) // polling: the handler ends on its own
	}
}

func TestPruneCache(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	for name, age := range map[string]time.Duration{"new": 0, "old": cacheAge + time.Hour, ".partial-1": 2 * time.Hour, ".partial-2": 0} {
		p := writeFile(t, filepath.Join(dir, name), name)
		if err := os.Chtimes(p, now, now.Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	names := func() string {
		es, _ := os.ReadDir(dir)
		var out []string
		for _, e := range es {
			out = append(out, e.Name())
		}
		return strings.Join(out, " ")
	}
	if pruneCache(dir, now, false); names() != ".partial-2 new" {
		t.Errorf("left: %s", names())
	}
	if pruneCache(dir, now, true); names() != "" {
		t.Errorf("left: %s", names())
	}
}
