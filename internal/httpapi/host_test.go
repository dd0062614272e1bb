package httpapi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/httpapi"
	"github.com/space-platform/space/internal/httpguard"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlite"
	"github.com/space-platform/space/internal/template"
	"github.com/space-platform/space/internal/tenant"
)

const digest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

type templates struct{}

var base = template.Info{Reference: "base:latest", Digest: digest, Config: template.Config{User: "user", WorkDir: "/home/user"}}

func (templates) List(context.Context) ([]template.Info, error) { return []template.Info{base}, nil }

func (templates) Resolve(_ context.Context, ref string) (template.Info, error) {
	if ref != digest && ref != base.Reference {
		return template.Info{}, fmt.Errorf("%w: %s", template.ErrNotFound, ref)
	}
	return base, nil
}

// logs collects every line at debug level.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// host is a whole installation on the fake runtime: stores, node, sessions,
// control and the front door, joined as in production.
type host struct {
	t       *testing.T
	store   store.Store
	node    *node.Node
	mgr     *session.Manager
	auth    *auth.Authenticator
	svc     *control.Service
	server  *httptest.Server
	handler http.Handler
	logs    *logs
	key     string // admin of the tenant default
	stop    func()
	conf    control.Config
	front   httpapi.Config
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newHost(t *testing.T, change ...func(*httpapi.Config)) *host {
	t.Helper()
	return newHostOn(t, t.TempDir(), change...)
}

func newHostOn(t *testing.T, dir string, change ...func(*httpapi.Config)) *host {
	t.Helper()
	h := &host{t: t, logs: &logs{}}
	log := slog.New(slog.NewTextHandler(h.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	sealer, err := secret.NewSealer([]byte("0123456789abcdef0123456789abcdef"))
	must(t, err)
	h.store, err = sqlite.Open(filepath.Join(dir, "control.db"))
	must(t, err)
	t.Cleanup(func() { _ = h.store.Close() })
	db, err := sqlitedb.Open(filepath.Join(dir, "node.db"))
	must(t, err)
	t.Cleanup(func() { _ = db.Close() })

	world := fake.NewWorld(fake.WithTemplates(digest))
	t.Cleanup(world.Close)
	h.node, err = node.New(t.Context(), node.Config{
		Name: "n1", DB: db, Runtime: fake.New(world), Templates: templates{}, Sealer: sealer, Log: log,
		NewGuest: func(m runtime.Machine) guestclient.Guest { return guestclient.New(m.Dial, guestclient.Options{}) },
	})
	must(t, err)
	h.mgr, err = session.New(t.Context(), session.Config{
		DB: db, Dir: filepath.Join(dir, "journals"), Guests: h.node, Sealer: sealer, Auditor: h.node.Auditor(), Log: log, Activity: h.node.Activity,
	})
	must(t, err)
	must(t, h.mgr.Recover(t.Context()))
	h.node.Bind(h.mgr)
	_, err = h.node.Start(t.Context())
	must(t, err)
	t.Cleanup(func() { h.mgr.Close(); h.node.Close() })

	h.auth, err = auth.New(auth.Config{Store: h.store, HashKey: sealer.Derive("keys"), Log: log, CacheFor: 50 * time.Millisecond})
	must(t, err)
	first, err := h.auth.FirstKey(t.Context(), dir)
	must(t, err)
	h.key = first.Key.Reveal()

	h.conf = control.Config{
		Store: h.store, Node: h.node, NodeInfo: control.NodeInfo{Name: "n1", Runtime: "fake", Class: sandbox.ClassUserKernel},
		Sealer: sealer, Keys: h.auth, HashKey: sealer.Derive("bodies"), Log: log,
	}
	h.front = httpapi.Config{
		Auth: h.auth, Guard: httpguard.Guard{Hosts: httpguard.Local, Origins: []string{"https://console.test"}},
		DataURL: "http://127.0.0.1:7781", Version: "test", Log: log,
		Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "metrics\n") }),
	}
	for _, f := range change {
		f(&h.front)
	}
	h.serve()
	return h
}

// serve starts control and front door; restart drops both and starts anew.
func (h *host) serve() {
	svc, err := control.New(h.conf)
	must(h.t, err)
	h.svc = svc
	c := h.front
	if c.Control == nil {
		c.Control = svc
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = svc.Reconciler().Run(ctx) }()
	h.handler = httpapi.New(c)
	h.server = httptest.NewServer(h.handler)
	var once sync.Once
	h.stop = func() {
		once.Do(func() {
			h.server.CloseClientConnections()
			h.server.Close()
			cancel()
			<-done
		})
	}
	h.t.Cleanup(h.stop)
}

func (h *host) restart() { h.stop(); h.serve() }

// tenant gives an admin key of another tenant.
func (h *host) tenant(name string) string { return h.keyOf(name, auth.Admin) }

// keyOf makes a key of a tenant with scopes.
func (h *host) keyOf(name string, scopes ...auth.Scope) string {
	h.t.Helper()
	id, err := h.store.System().EnsureTenant(context.Background(), name)
	must(h.t, err)
	_, v, err := mint(h, id, scopes)
	must(h.t, err)
	return v
}

// mint makes a key through the authenticator, as the tenant's first admin.
func mint(h *host, id tenant.ID, scopes []auth.Scope) (store.Key, string, error) {
	admin := auth.Principal{Tenant: id, KeyID: "key" + strings.Repeat("a", 16), Scopes: []auth.Scope{auth.Admin}}
	err := h.store.Mutate(context.Background(), id, func(tx store.Tx) error {
		if _, err := tx.Key(admin.KeyID); err == nil {
			return nil
		}
		return tx.InsertKey(store.Key{Tenant: id, ID: admin.KeyID, Name: "seed", Hash: []byte("no one has this key of " + id.String()), Scopes: []string{string(auth.Admin)}, CreatedAt: time.Now().UTC().Truncate(time.Microsecond)})
	})
	if err != nil {
		return store.Key{}, "", err
	}
	k, v, err := h.auth.Mint(context.Background(), admin, auth.Wish{Name: "test", Scopes: scopes})
	return k, v.Reveal(), err
}

// reply is an answer, read whole.
type reply struct {
	status int
	header http.Header
	body   []byte
}

func (r reply) problem(t testing.TB) spaceapi.Problem {
	t.Helper()
	var p spaceapi.Problem
	if ct := r.header.Get("Content-Type"); ct != "application/problem+json" {
		t.Fatalf("%d: content type %q is no problem document: %s", r.status, ct, r.body)
	}
	must(t, json.Unmarshal(r.body, &p))
	if p.Code == "" || p.Status != r.status || p.RequestID == "" || p.RequestID != r.header.Get("X-Request-Id") {
		t.Fatalf("problem is incomplete: %s (header %q)", r.body, r.header.Get("X-Request-Id"))
	}
	return p
}

func decode[T any](t testing.TB, r reply, status int) (out T) {
	t.Helper()
	if r.status != status {
		t.Fatalf("status %d, want %d: %s", r.status, status, r.body)
	}
	must(t, json.Unmarshal(r.body, &out))
	return out
}

// call sends a request with the headers given as pairs.
func (h *host) call(key, method, path, body string, header ...string) reply {
	h.t.Helper()
	r, err := h.try(context.Background(), key, method, path, strings.NewReader(body), header...)
	must(h.t, err)
	return r
}

func (h *host) try(ctx context.Context, key, method, path string, body io.Reader, header ...string) (reply, error) {
	req, err := http.NewRequestWithContext(ctx, method, h.server.URL+path, body)
	if err != nil {
		return reply{}, err
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := h.server.Client().Do(req)
	if err != nil {
		return reply{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, b}, err
}

// up makes a sandbox that runs.
func (h *host) up(key, body string) spaceapi.Sandbox {
	h.t.Helper()
	if body == "" {
		body = "{}"
	}
	m := decode[spaceapi.Mutation](h.t, h.call(key, "POST", "/v1/sandboxes?wait=30s", body), 200)
	if m.Operation.State != "succeeded" || m.Sandbox.State != "running" {
		h.t.Fatalf("create ended as %+v", m)
	}
	return m.Sandbox
}
