package client_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guest/guesttest"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/tenant"
)

// cutter is a listener whose connections break after a random number of bytes
// to the client, once armed.
type cutter struct {
	net.Listener
	armed atomic.Bool
	cuts  atomic.Int64
}

func (c *cutter) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil || !c.armed.Load() {
		return conn, err
	}
	k := &cutConn{Conn: conn, c: c}
	k.left.Store(rand.Int64N(200_000))
	return k, nil
}

type cutConn struct {
	net.Conn
	c    *cutter
	left atomic.Int64
}

func (k *cutConn) Write(p []byte) (int, error) {
	left := k.left.Add(-int64(len(p)))
	if left < 0 {
		// The first part goes out: events are broken anywhere.
		if n := int(left) + len(p); n > 0 {
			_, _ = k.Conn.Write(p[:n])
		}
		k.c.cuts.Add(1)
		_ = k.Conn.Close()
		return 0, net.ErrClosed
	}
	return k.Conn.Write(p)
}

type trail struct{}

func (trail) Append(context.Context, *sql.Tx, audit.Entry) error { return nil }

type guests struct {
	id sandbox.ID
	g  guestclient.Guest
}

func (g guests) Guest(_ context.Context, _ tenant.ID, id sandbox.ID) (guestclient.Guest, error) {
	if id != g.id {
		return nil, fault.New(fault.NotFound, "sandbox_not_found", "there is no such sandbox")
	}
	return g.g, nil
}

// plane is the real session service over a real guest daemon, with the two
// control routes that streams use.
type plane struct {
	t      *testing.T
	mgr    *session.Manager
	box    sandbox.ID
	who    tenant.ID
	cutter *cutter
	url    string
	odd    atomic.Pointer[func(w http.ResponseWriter, r *http.Request, next http.Handler)]
	c      *client.Client
}

func newPlane(t *testing.T) *plane {
	t.Helper()
	machine := guesttest.Start(t)
	p := &plane{t: t, box: sandbox.NewID()}
	dir := t.TempDir()
	db, err := sqlitedb.Open(filepath.Join(dir, "node.db"))
	must(t, err)
	t.Cleanup(func() { _ = db.Close() })
	sealer, err := secret.NewSealer([]byte(strings.Repeat("k", 32)))
	must(t, err)
	p.who, err = tenant.Mint("acme")
	must(t, err)
	p.mgr, err = session.New(t.Context(), session.Config{
		DB: db, Dir: filepath.Join(dir, "journals"), Guests: guests{p.box, machine.Guest}, Sealer: sealer, Auditor: trail{}, Log: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	must(t, p.mgr.Recover(t.Context()))
	t.Cleanup(p.mgr.Close)

	mux := http.NewServeMux()
	data := p.mgr.Handler()
	mux.HandleFunc("/d/", func(w http.ResponseWriter, r *http.Request) {
		if f := p.odd.Load(); f != nil {
			(*f)(w, r, data)
			return
		}
		data.ServeHTTP(w, r)
	})
	mux.HandleFunc("POST /v1/sessions/{id}/tokens", func(w http.ResponseWriter, r *http.Request) {
		tok, err := p.mgr.MintAttachToken(r.Context(), p.who, sandbox.SessionID(r.PathValue("id")), "key1", 0)
		if err != nil {
			http.Error(w, err.Error(), 500)
			return
		}
		_ = json.NewEncoder(w).Encode(spaceapi.Attach{URL: p.url + "/d/sessions/" + r.PathValue("id"), Token: tok.Token, ExpiresAt: tok.ExpiresAt})
	})
	mux.HandleFunc("GET /v1/sessions/{id}", func(w http.ResponseWriter, r *http.Request) {
		s, err := p.mgr.Get(r.Context(), p.who, sandbox.SessionID(r.PathValue("id")))
		if err != nil {
			http.Error(w, err.Error(), 500)
			return
		}
		_ = json.NewEncoder(w).Encode(spaceapi.Session{ID: string(s.ID), State: string(s.State), StdinOffset: s.StdinOffset})
	})
	srv := httptest.NewUnstartedServer(mux)
	p.cutter = &cutter{Listener: srv.Listener}
	srv.Listener = p.cutter
	srv.Start()
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	p.url = srv.URL
	p.c = client.New(p.url, "key")
	return p
}

func (p *plane) create(c session.Command) spaceapi.SessionCreated {
	p.t.Helper()
	s, tok, err := p.mgr.Create(p.t.Context(), p.who, session.CreateRequest{Sandbox: p.box, Principal: "key1", Command: c})
	must(p.t, err)
	return spaceapi.SessionCreated{
		Session: spaceapi.Session{ID: string(s.ID)},
		Attach:  spaceapi.Attach{URL: p.url + "/d/sessions/" + string(s.ID), Token: tok.Token},
	}
}

// read joins stdout to the end and gives the last event.
func read(t *testing.T, s *client.Stream) (out []byte, last client.Event) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	for {
		ev, err := s.Next(ctx)
		if errors.Is(err, io.EOF) {
			return out, last
		}
		if err != nil {
			t.Errorf("%v after %d bytes, %d reconnects", err, len(out), s.Reconnects())
			return out, last
		}
		if ev.Type == spaceapi.EventGap {
			t.Errorf("a gap: %+v", ev.Gap)
		}
		last = ev
		if ev.Type == spaceapi.EventStdout {
			out = append(out, ev.Data...)
		}
	}
}

// TestC007ExactlyOnceOverCuts: two readers, connections that break anywhere, and
// every byte once and in order.
func TestC007ExactlyOnceOverCuts(t *testing.T) {
	p := newPlane(t)
	var b strings.Builder
	for i := 1; i <= 200_000; i++ {
		fmt.Fprintln(&b, i)
	}
	want := sha256.Sum256([]byte(b.String()))
	made := p.create(session.Command{Shell: "seq 1 200000; exit 7"})
	p.cutter.armed.Store(true)
	var wg sync.WaitGroup
	var reconnects atomic.Int64
	for range 2 {
		wg.Go(func() {
			st := p.c.Attach(made)
			out, last := read(t, st)
			if sha256.Sum256(out) != want || last.Exit == nil || last.Exit.Code != 7 || last.Exit.Cause != "exited" {
				t.Errorf("%d bytes of %d, last %+v", len(out), b.Len(), last)
			}
			reconnects.Add(int64(st.Reconnects()))
		})
	}
	wg.Wait()
	if p.cutter.cuts.Load() < 10 || reconnects.Load() < 10 {
		t.Errorf("only %d cuts, %d reconnects: the test shows nothing", p.cutter.cuts.Load(), reconnects.Load())
	}
	// The caller drops the connection itself, and somebody else goes on.
	st, err := p.c.Follow(t.Context(), made.Session.ID, "")
	must(t, err)
	var out []byte
	for range 3 {
		ev, err := st.Next(t.Context())
		must(t, err)
		out = append(out, ev.Data...)
		st.Drop()
	}
	st.Close()
	st, err = p.c.Follow(t.Context(), made.Session.ID, st.Last())
	must(t, err)
	rest, _ := read(t, st)
	if sha256.Sum256(append(out, rest...)) != want {
		t.Errorf("%d and %d bytes do not make the whole", len(out), len(rest))
	}
}

// TestRealStdinOverLostAnswers: the process gets each byte once although answers
// are lost after the work is done.
func TestRealStdinOverLostAnswers(t *testing.T) {
	p := newPlane(t)
	var n atomic.Int64
	odd := func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, "stdin") && n.Add(1)%2 == 1 {
			next.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	}
	p.odd.Store(&odd)
	st := p.c.Attach(p.create(session.Command{Args: []string{"cat"}, Stdin: true}))
	var want []byte
	for i := range 20 {
		want = append(want, []byte(strings.Repeat(fmt.Sprintf("%03d\n", i), 25_000))...)
	}
	ev, err := st.Next(t.Context())
	must(t, err)
	if ev.Started == nil || ev.Started.PID == 0 {
		t.Errorf("first event: %+v", ev)
	}
	done := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		for rest := want; len(rest) > 0; {
			k := min(len(rest), 1+rand.IntN(400_000))
			if err := st.Write(ctx, rest[:k]); err != nil {
				done <- err
				return
			}
			rest = rest[k:]
		}
		done <- st.CloseStdin(ctx)
	}()
	out, last := read(t, st)
	must(t, <-done)
	if sha256.Sum256(out) != sha256.Sum256(want) || last.Exit == nil || last.Exit.Code != 0 {
		t.Errorf("%d bytes came back of %d; %+v", len(out), len(want), last)
	}
	if n.Load() < 10 {
		t.Errorf("%d requests: the test shows nothing", n.Load())
	}
}

// TestRealTokensAndEnds: revoked tokens are renewed in the middle of a stream,
// signals arrive, and what could not start says so.
func TestRealTokensAndEnds(t *testing.T) {
	p := newPlane(t)
	made := p.create(session.Command{Shell: `trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done`})
	st := p.c.Attach(made)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	var out string
	for !strings.Contains(out, "ready") {
		ev, err := st.Next(ctx)
		must(t, err)
		out += string(ev.Data)
	}
	must(t, p.mgr.RevokeAttachTokens(ctx, p.who, sandbox.SessionID(made.Session.ID)))
	must(t, st.Signal(ctx, "TERM"))
	rest, last := read(t, st)
	if string(rest) != "caught\n" || last.Exit == nil || last.Exit.Code != 3 {
		t.Errorf("%q, %+v", rest, last)
	}
	if st.Reconnects() == 0 {
		t.Error("revoking did not cut the stream")
	}

	_, last = read(t, p.c.Attach(p.create(session.Command{Args: []string{"/no/such/program"}})))
	if last.Type != spaceapi.EventError || client.Code(last.Err()) != "not_found" {
		t.Errorf("%+v: %v", last, last.Err())
	}
	if err := st.Write(ctx, []byte("x")); client.Code(err) != "session_ended" {
		t.Errorf("input after the end: %v", err)
	}
}
