package session

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guest/guesttest"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/quota"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/tenant"
)

// guests is the part of the node that sessions need: one sandbox with a real
// daemon, or whatever a test puts there.
type guests struct {
	mu    sync.Mutex
	known map[sandbox.ID]guestclient.Guest
	err   map[sandbox.ID]error
}

func (g *guests) Guest(_ context.Context, t tenant.ID, id sandbox.ID) (guestclient.Guest, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.err[id]; err != nil {
		return nil, err
	}
	if c := g.known[id]; c != nil && t.String() != "stranger" {
		return c, nil
	}
	return nil, fault.New(fault.NotFound, "sandbox_not_found", "there is no such sandbox")
}

func (g *guests) fail(id sandbox.ID, err error) {
	g.mu.Lock()
	g.err[id] = err
	g.mu.Unlock()
}

// link is the channel to a guest, which tests can break.
type link struct {
	dial  func(context.Context) (net.Conn, error)
	mu    sync.Mutex
	down  bool
	conns map[net.Conn]bool
}

type linkConn struct {
	net.Conn
	l *link
}

func (c linkConn) Close() error {
	c.l.mu.Lock()
	delete(c.l.conns, c.Conn)
	c.l.mu.Unlock()
	return c.Conn.Close()
}

func (l *link) Dial(ctx context.Context) (net.Conn, error) {
	c, err := l.dial(ctx)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		_ = c.Close()
		return nil, errors.New("the link is cut")
	}
	l.conns[c] = true
	return linkConn{c, l}, nil
}

// cut breaks what is open and refuses until mend.
func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = true
	for c := range l.conns {
		_ = c.Close()
	}
}

func (l *link) mend() {
	l.mu.Lock()
	l.down = false
	l.mu.Unlock()
}

// trail is an audit chain in memory.
type trail struct {
	mu      sync.Mutex
	entries []audit.Entry
}

func (a *trail) Append(_ context.Context, _ *sql.Tx, e audit.Entry) error {
	a.mu.Lock()
	a.entries = append(a.entries, e)
	a.mu.Unlock()
	return nil
}

func (a *trail) count(action, target string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, e := range a.entries {
		if e.Action == action && (target == "" || e.Target == target) {
			n++
		}
	}
	return n
}

// logs collects log lines.
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

// host is a manager with all around it.
type host struct {
	*Manager
	t       testing.TB
	db      *sqlitedb.DB
	guests  *guests
	machine *guesttest.Machine
	link    *link
	trail   *trail
	logs    *logs
	box     sandbox.ID
	who     tenant.ID
	conf    Config
	root    string
}

func mint(t testing.TB, name string) tenant.ID {
	t.Helper()
	id, err := tenant.Mint(name)
	must(t, err)
	return id
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func key(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }

// newHost runs a manager over a fresh daemon.
func newHost(t testing.TB, limits Limits) *host {
	t.Helper()
	return newHostOver(t, limits, guesttest.Start(t))
}

func newHostOver(t testing.TB, limits Limits, machine *guesttest.Machine) *host {
	t.Helper()
	h := &host{t: t, machine: machine, trail: &trail{}, logs: &logs{}, box: sandbox.NewID(), who: mint(t, "acme"), root: t.TempDir()}
	h.guests = &guests{known: map[sandbox.ID]guestclient.Guest{}, err: map[sandbox.ID]error{}}
	if machine != nil {
		h.link = &link{dial: machine.Dial, conns: map[net.Conn]bool{}}
		c := guestclient.New(h.link.Dial, guestclient.Options{})
		t.Cleanup(c.Close)
		h.guests.known[h.box] = c
	}
	db, err := sqlitedb.Open(filepath.Join(h.root, "node.db"))
	must(t, err)
	h.db = db
	t.Cleanup(func() { _ = db.Close() })
	sealer, err := secret.NewSealer(key(7))
	must(t, err)
	if limits.Sweep == 0 {
		limits.Sweep = 100 * time.Millisecond
	}
	h.conf = Config{DB: db, Dir: filepath.Join(h.root, "journals"), Guests: h.guests, Sealer: sealer, Ledger: quota.New(quota.Defaults()),
		Auditor: h.trail, Log: slog.New(slog.NewTextHandler(h.logs, &slog.HandlerOptions{Level: slog.LevelDebug})), Limits: limits}
	h.open()
	t.Cleanup(func() { h.Manager.Close() })
	return h
}

func (h *host) open() {
	h.t.Helper()
	m, err := New(context.Background(), h.conf)
	must(h.t, err)
	must(h.t, m.Recover(context.Background()))
	h.Manager = m
}

// reopen is a restart of the host's process, in good order.
func (h *host) reopen() {
	h.t.Helper()
	h.Manager.Close()
	h.conf.Ledger = quota.New(quota.Defaults())
	h.open()
}

func (h *host) shell(text string) CreateRequest {
	return CreateRequest{Sandbox: h.box, Principal: "key1", Request: "req1", Command: Command{Shell: text}}
}

func (h *host) create(r CreateRequest) (Session, Token) {
	h.t.Helper()
	s, tok, err := h.Create(context.Background(), h.who, r)
	must(h.t, err)
	return s, tok
}

func (h *host) exec(text string) ExecResult {
	h.t.Helper()
	return h.execAs(ExecRequest{CreateRequest: h.shell(text)})
}

func (h *host) execAs(r ExecRequest) ExecResult {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	out, err := h.Exec(ctx, h.who, r)
	must(h.t, err)
	return out
}

// long reports whether the literal, slow forms were asked for.
func long() bool { return os.Getenv("SPACE_LONG") == "1" }

// pick takes the scaled value in normal runs.
func pick[T any](scaled, literal T) T {
	if long() {
		return literal
	}
	return scaled
}

// until polls a real process's effect, with a deadline.
func until(t testing.TB, d time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(d); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", d, what)
		}
	}
}

func (r ExecResult) String() string {
	return fmt.Sprintf("out=%q err=%q exit=%+v gap=%d truncated=%d/%d", clip(r.Stdout), clip(r.Stderr), r.Exit, r.GapBytes, r.StdoutTruncated, r.StderrTruncated)
}

func clip(b []byte) string { return string(b[:min(len(b), 200)]) }
