package client_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
)

// events writes a stream and ends the connection.
func events(parts ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, p := range parts {
			_, _ = io.WriteString(w, p)
		}
	}
}

func event(id, kind, data string) string {
	return "id: " + id + "\nevent: " + kind + "\ndata: " + data + "\n\n"
}

func stdout(id, text string) string {
	return event(id, "stdout", `{"b64":"`+base64.StdEncoding.EncodeToString([]byte(text))+`"}`)
}

const (
	started = "id: 1.1\nevent: started\ndata: {\"pid\":7,\"at\":\"2026-01-02T03:04:05Z\"}\n\n"
	exit0   = `{"cause":"exited","code":0,"at":"2026-01-02T03:04:05Z"}`
)

// attached gives a stream of a scripted session.
func attached(c *client.Client, url string) *client.Stream {
	return c.Attach(spaceapi.SessionCreated{Session: spaceapi.Session{ID: "s1"}, Attach: spaceapi.Attach{URL: url + "/d/sessions/s1", Token: "t1"}})
}

// drain reads to the end.
func drain(t *testing.T, s *client.Stream) (out string, all []client.Event, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		ev, err := s.Next(ctx)
		if errors.Is(err, io.EOF) {
			return out, all, nil
		}
		if err != nil {
			return out, all, err
		}
		all = append(all, ev)
		if ev.Type == spaceapi.EventStdout {
			out += string(ev.Data)
		}
	}
}

func TestStreamOverSeveralConnections(t *testing.T) {
	s, url := serve(t,
		lose, // the process may have been started: attach is asked again
		events(started, ": keepalive\n\n", stdout("1.4", "abc"), "id: 1.6\nevent: stdout\nda"), // broken in the middle
		refuse(503, "recovering", true),
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) },
		events(stdout("1.6", "de"), "event: interrupted\ndata: {\"code\":\"shutting_down\",\"status\":503,\"detail\":\"x\",\"retryable\":true}\n\n"),
		events(event("1.7", "news", `{"later":"version"}`), event("1.20", "gap", `{"reason":"window","missing":13}`), stdout("1.21", "f"), event("1.22", "exit", exit0), stdout("1.23", "late")),
	)
	st := attached(client.New(url, "k"), url)
	out, all, err := drain(t, st)
	must(t, err)
	if out != "abcdef" || st.Last() != "1.22" {
		t.Errorf("%q, last %s", out, st.Last())
	}
	var kinds []string
	for _, e := range all {
		kinds = append(kinds, e.Type)
	}
	if got := strings.Join(kinds, " "); got != "started stdout stdout news gap stdout exit" {
		t.Errorf("events: %s", got)
	}
	if all[0].Started.PID != 7 || all[4].Gap.Missing != 13 || all[4].Gap.Reason != "window" || all[6].Exit.Cause != "exited" {
		t.Errorf("%+v", all)
	}
	var asked []string
	for _, r := range s.requests() {
		asked = append(asked, r.method+" "+r.path[strings.LastIndexByte(r.path, '/'):])
		if r.key != "Bearer t1" {
			t.Errorf("the data plane was sent %q", r.key)
		}
	}
	if got := strings.Join(asked, ","); got != "POST /attach,POST /attach,GET /events,GET /events,GET /events,GET /events" {
		t.Errorf("requests: %s", got)
	}
	if _, err := st.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("after the exit: %v", err)
	}
}

func TestStreamErrorEvents(t *testing.T) {
	for data, code := range map[string]string{
		`{"code":"sandbox_lost","message":"gone","exit":{"cause":"sandbox_lost","code":-1,"reason":"it died","at":"2026-01-02T03:04:05Z"}}`:                  "sandbox_lost",
		`{"code":"start_failed","message":"no","exit":{"cause":"start_failed","code":-1,"reason":"not_found: no such program","at":"2026-01-02T03:04:05Z"}}`: "not_found",
	} {
		_, url := serve(t, events(event("1.1", "error", data)))
		_, all, err := drain(t, attached(client.New(url, "k"), url))
		must(t, err)
		if len(all) != 1 || client.Code(all[0].Err()) != code || all[0].Exit != nil {
			t.Errorf("%+v: %v", all, all[0].Err())
		}
	}
}

func TestTokenRenewal(t *testing.T) {
	var url string
	mint := func(w http.ResponseWriter, r *http.Request) {
		ok(spaceapi.Attach{URL: url + "/d/sessions/s1", Token: "t2"})(w, r)
	}
	s, u := serve(t, refuse(401, "token_expired", false), mint,
		events(started, "event: interrupted\ndata: {\"code\":\"token_revoked\",\"status\":401,\"detail\":\"x\",\"retryable\":false}\n\n"),
		refuse(401, "token_revoked", false), mint, events(event("1.2", "exit", exit0)))
	url = u
	_, all, err := drain(t, attached(client.New(url, "k"), url))
	must(t, err)
	if len(all) != 2 {
		t.Errorf("%+v", all)
	}
	r := s.requests()
	if r[1].path != "/v1/sessions/s1/tokens" || r[1].key != "Bearer k" || r[2].key != "Bearer t2" {
		t.Errorf("%+v", r)
	}

	// A key that may mint no more ends it, and so do new tokens that are refused.
	_, url = serve(t, refuse(401, "token_expired", false), refuse(403, "scope_missing", false))
	if _, _, err := drain(t, attached(client.New(url, "k"), url)); client.Code(err) != "scope_missing" {
		t.Errorf("%v", err)
	}
	both, url2 := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/v1/") {
			mint(w, r)
			return
		}
		refuse(401, "token_expired", false)(w, r)
	})
	url = url2
	if _, _, err := drain(t, attached(client.New(url, "k"), url)); client.Code(err) != "token_expired" {
		t.Errorf("%v", err)
	}
	if n := len(both.requests()); n > 20 {
		t.Errorf("%d requests before it gave up", n)
	}
}

func TestStreamRefusals(t *testing.T) {
	for _, c := range []struct {
		step http.HandlerFunc
		code string
	}{
		{refuse(404, "session_not_found", false), "session_not_found"},
		{refuse(400, "unknown_event_id", false), "unknown_event_id"},
		{refuse(410, "session_erased", false), "session_erased"},
		{refuse(500, "internal", false), "internal"}, // after some tries
		{events("event: interrupted\ndata: {\"code\":\"journal_damaged\",\"status\":500,\"detail\":\"x\",\"retryable\":false}\n\n"), "journal_damaged"},
	} {
		s, url := serve(t, c.step)
		_, _, err := drain(t, attached(client.New(url, "k"), url))
		if client.Code(err) != c.code || len(s.requests()) > 10 {
			t.Errorf("%v after %d requests, want %s", err, len(s.requests()), c.code)
		}
	}
}

// TestHostileStreams: whatever a server sends, memory is bounded and the caller
// gets an error.
func TestHostileStreams(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	endless := func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, long); err != nil {
				return
			}
		}
	}
	lines := func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, "data: "+long[:1000]+"\n"); err != nil {
				return
			}
		}
	}
	for name, h := range map[string]http.HandlerFunc{
		"endless line":        endless,
		"endless event":       lines,
		"no base64":           events(started, event("1.4", "stdout", `{"b64":"!"}`)),
		"no JSON":             events(event("1.1", "started", `{`)),
		"exit is no object":   events(started, event("1.2", "exit", `7`)),
		"no id":               events(started, "event: stdout\ndata: {\"b64\":\"YQ==\"}\n\n"),
		"bad id":              events(event("x", "started", `{"pid":1}`)),
		"negative id":         events(event("1.-1", "started", `{"pid":1}`)),
		"the same id again":   events(started, started),
		"going back":          events(started, stdout("1.4", "abc"), stdout("1.3", "a")),
		"an older epoch":      events(event("2.1", "started", `{"pid":1}`), stdout("1.4", "abc")),
		"a silent gap":        events(started, stdout("1.9", "abc")),
		"more bytes than ids": events(started, stdout("1.2", "abc")),
	} {
		t.Run(name, func(t *testing.T) {
			_, url := serve(t, h)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			st := attached(client.New(url, "k"), url)
			var err error
			for err == nil {
				_, err = st.Next(ctx)
			}
			if errors.Is(err, io.EOF) || ctx.Err() != nil {
				t.Errorf("it ended with %v", err)
			}
		})
	}
	// Comments for ever are no progress, but the caller's context ends them.
	_, url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, ": ka\n\n"); err != nil {
				return
			}
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := attached(client.New(url, "k"), url).Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

// hang sends parts and then nothing, with the connection open.
func hang(parts ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		events(parts...)(w, r)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

func TestStallIsNoticed(t *testing.T) {
	s, url := serve(t, hang(started), hang(), func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, events(event("1.2", "exit", exit0)))
	st := attached(client.New(url, "k", client.WithStreamStall(150*time.Millisecond)), url)
	_, all, err := drain(t, st)
	must(t, err)
	if len(all) != 2 || len(s.requests()) != 4 || st.Reconnects() < 2 {
		t.Errorf("%+v, %d requests, %d reconnects", all, len(s.requests()), st.Reconnects())
	}
	// Keepalives are life.
	s, url = serve(t, func(w http.ResponseWriter, r *http.Request) {
		events(started)(w, r)
		for range 10 {
			_, _ = io.WriteString(w, ": keepalive\n\n")
			_ = http.NewResponseController(w).Flush()
			time.Sleep(60 * time.Millisecond)
		}
		events(event("1.2", "exit", exit0))(w, r)
	})
	if _, _, err := drain(t, attached(client.New(url, "k", client.WithStreamStall(400*time.Millisecond)), url)); err != nil || len(s.requests()) != 1 {
		t.Errorf("%v after %d requests", err, len(s.requests()))
	}
}

func TestNextEndsWithItsContextAndGoesOn(t *testing.T) {
	release := make(chan struct{})
	s, url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		events(started)(w, r)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-release:
		case <-r.Context().Done():
			return
		}
		events(event("1.2", "exit", exit0))(w, r)
	}, events(event("1.2", "exit", exit0)))
	st := attached(client.New(url, "k"), url)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := st.Next(ctx)
	must(t, err)
	cancel() // the context of an earlier call does not end the stream
	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := st.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	close(release)
	_, all, err := drain(t, st)
	must(t, err)
	if len(all) != 1 || len(s.requests()) > 2 {
		t.Errorf("%+v, %d requests", all, len(s.requests()))
	}
}

func TestCloseEndsNext(t *testing.T) {
	_, url := serve(t, hang(started))
	st := attached(client.New(url, "k"), url)
	_, err := st.Next(t.Context())
	must(t, err)
	go func() { time.Sleep(20 * time.Millisecond); st.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := st.Next(ctx); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
}

// input is a scripted process that counts what it was given.
type input struct {
	mu     sync.Mutex
	got    []byte
	closed bool
	n      int
	odd    func(n int) http.HandlerFunc // instead of, or after, the work
}

func (in *input) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	in.mu.Lock()
	defer in.mu.Unlock()
	b, _ := io.ReadAll(r.Body)
	in.n++
	after := http.HandlerFunc(nil)
	if in.odd != nil {
		after = in.odd(in.n)
	}
	switch r.URL.Path[strings.LastIndexByte(r.URL.Path, '/'):] {
	case "/stdin":
		at, _ := strconv.Atoi(r.URL.Query().Get("offset"))
		if at > len(in.got) {
			refuse(409, "stdin_offset_ahead", false)(w, r)
			return
		}
		if skip := len(in.got) - at; skip < len(b) {
			in.got = append(in.got, b[skip:]...)
		}
	case "/close-stdin":
		in.closed = true
	}
	if after != nil {
		after(w, r)
		return
	}
	ok(spaceapi.StdinReply{Accepted: uint64(len(in.got)), Closed: in.closed})(w, r)
}

func TestStdinExactlyOnceOverLostAnswers(t *testing.T) {
	in := &input{odd: func(n int) http.HandlerFunc {
		switch n % 4 {
		case 1, 2:
			return lose
		case 3:
			return refuse(503, "sandbox_in_transition", true)
		}
		return nil
	}}
	srv := httptest.NewServer(in)
	t.Cleanup(srv.Close)
	url := srv.URL
	st := attached(client.New(url, "k"), url)
	var want []byte
	for i := range 5 {
		p := []byte(strings.Repeat(fmt.Sprint(i), 300_000)) // two requests each
		want = append(want, p...)
		must(t, st.Write(t.Context(), p))
	}
	must(t, st.CloseStdin(t.Context()))
	if string(in.got) != string(want) || !in.closed {
		t.Errorf("%d bytes arrived, %d were sent; closed %v", len(in.got), len(want), in.closed)
	}
}

func TestStdinRefusals(t *testing.T) {
	_, url := serve(t, refuse(409, "session_ended", false))
	if err := attached(client.New(url, "k"), url).Write(t.Context(), []byte("x")); client.Code(err) != "session_ended" {
		t.Errorf("%v", err)
	}
	_, url = serve(t, ok(spaceapi.StdinReply{Accepted: 1, Closed: true}))
	if err := attached(client.New(url, "k"), url).Write(t.Context(), []byte("xyz")); !errors.Is(err, client.ErrStdinClosed) {
		t.Errorf("%v", err)
	}
	_, url = serve(t, ok(spaceapi.StdinReply{Accepted: 1 << 60}))
	if err := attached(client.New(url, "k"), url).Write(t.Context(), []byte("xyz")); err == nil || client.Code(err) != "" {
		t.Errorf("a server that counts wrongly: %v", err)
	}
	// A process that does not read is waited for, as long as the caller wants.
	_, url = serve(t, ok(spaceapi.StdinReply{}))
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := attached(client.New(url, "k"), url).Write(ctx, []byte("xyz")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	var url2 string
	mint := func(w http.ResponseWriter, r *http.Request) {
		ok(spaceapi.Attach{URL: url2 + "/d/sessions/s1", Token: "t2"})(w, r)
	}
	s, u := serve(t, refuse(401, "token_expired", false), mint, ok(spaceapi.StdinReply{Accepted: 3}))
	url2 = u
	must(t, attached(client.New(url2, "k"), url2).Write(t.Context(), []byte("xyz")))
	if n := len(s.requests()); n != 3 {
		t.Errorf("%d requests", n)
	}
}

func TestSignalIsSentOnce(t *testing.T) {
	s, url := serve(t, lose)
	if err := attached(client.New(url, "k"), url).Signal(t.Context(), "INT"); err == nil {
		t.Error("a lost answer is no success")
	}
	if err := attached(client.New(url, "k"), url).SignalTree(t.Context(), `K"ILL`); err == nil {
		t.Error("a lost answer is no success")
	}
	r := s.requests()
	if len(r) != 2 || r[0].body != `{"signal":"INT"}` || r[1].body != `{"signal":"K\"ILL","tree":true}` {
		t.Errorf("%+v", r)
	}
}
