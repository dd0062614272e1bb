package session

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/internal/problem"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session/journal"
)

// event is one event as an SSE client sees it.
type event struct {
	id, kind, data string
}

func (e event) bytes(t testing.TB) []byte {
	t.Helper()
	var d struct {
		B64 []byte `json:"b64"`
	}
	must(t, json.Unmarshal([]byte(e.data), &d))
	return d.B64
}

// plane is a data-plane client.
type plane struct {
	t   testing.TB
	h   *host
	srv *httptest.Server
}

func newPlane(t testing.TB, h *host) *plane {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.Manager.Handler().ServeHTTP(w, r) }))
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	return &plane{t, h, srv}
}

func (p *plane) do(ctx context.Context, method, path, token string, body io.Reader, headers ...string) *http.Response {
	p.t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, p.srv.URL+path, body)
	must(p.t, err)
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	must(p.t, err)
	p.t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

// json does a call and decodes its answer.
func (p *plane) json(method, path, token, body string, want int, out any) {
	p.t.Helper()
	resp := p.do(context.Background(), method, path, token, strings.NewReader(body))
	b, err := io.ReadAll(resp.Body)
	must(p.t, err)
	if resp.StatusCode != want {
		p.t.Fatalf("%s %s: %d %s, want %d", method, path, resp.StatusCode, b, want)
	}
	if out != nil {
		must(p.t, json.Unmarshal(b, out))
	}
}

func (p *plane) problem(method, path, token, body string, status int, code string) problem.Document {
	p.t.Helper()
	var d problem.Document
	p.json(method, path, token, body, status, &d)
	if d.Code != code {
		p.t.Fatalf("%s %s: code %q, want %q", method, path, d.Code, code)
	}
	return d
}

// stream is an open SSE stream.
type stream struct {
	t      testing.TB
	resp   *http.Response
	r      *bufio.Reader
	cancel context.CancelFunc
	last   string
	out    bytes.Buffer // stdout so far
	errs   bytes.Buffer
	keeps  int
}

func (p *plane) attach(id sandbox.SessionID, token, after string) *stream {
	p.t.Helper()
	return p.open("POST", "/d/sessions/"+string(id)+"/attach", token, after)
}

func (p *plane) events(id sandbox.SessionID, token, after string) *stream {
	p.t.Helper()
	return p.open("GET", "/d/sessions/"+string(id)+"/events", token, after)
}

func (p *plane) open(method, path, token, after string) *stream {
	p.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p.t.Cleanup(cancel)
	resp := p.do(ctx, method, path, token, nil, "Last-Event-ID", after)
	if resp.StatusCode != 200 {
		b, _ := io.ReadAll(resp.Body)
		p.t.Fatalf("%s %s: %d %s", method, path, resp.StatusCode, b)
	}
	if ct := resp.Header.Get("Content-Type"); ct != "text/event-stream" {
		p.t.Fatalf("content type %q", ct)
	}
	return &stream{t: p.t, resp: resp, r: bufio.NewReaderSize(resp.Body, 256<<10), cancel: cancel, last: after}
}

func (s *stream) close() {
	s.cancel()
	_ = s.resp.Body.Close()
}

// next reads one event strictly; io.EOF at the end.
func (s *stream) next() (event, error) {
	var e event
	for {
		line, err := s.r.ReadString('\n')
		if err != nil {
			if errors.Is(err, io.EOF) && (e != event{} || line != "") {
				err = io.ErrUnexpectedEOF
			}
			return e, err
		}
		line = strings.TrimSuffix(line, "\n")
		name, value, ok := strings.Cut(line, ": ")
		switch {
		case line == "":
			if e == (event{}) { // after a comment
				continue
			}
			if e.id != "" {
				s.last = e.id
			}
			switch e.kind {
			case "stdout":
				s.out.Write(decode64(s.t, e))
			case "stderr":
				s.errs.Write(decode64(s.t, e))
			}
			return e, nil
		case strings.HasPrefix(line, ":"):
			s.keeps++
		case !ok:
			return e, fmt.Errorf("bad line %q", line)
		case name == "id":
			e.id = value
		case name == "event":
			e.kind = value
		case name == "data" && e.data == "":
			e.data = value
		default:
			return e, fmt.Errorf("bad line %q", line)
		}
	}
}

func decode64(t testing.TB, e event) []byte {
	rest, ok := strings.CutPrefix(e.data, `{"b64":"`)
	rest, ok2 := strings.CutSuffix(rest, `"}`)
	b, err := base64.StdEncoding.DecodeString(rest)
	if !ok || !ok2 || err != nil {
		t.Fatalf("bad output event %.100q", e.data)
	}
	return b
}

// until reads to the first event of kind.
func (s *stream) until(kind string) event {
	s.t.Helper()
	for {
		e, err := s.next()
		if err != nil {
			s.t.Fatalf("waiting for %s: %v (after %s; out %.300q)", kind, err, s.last, s.out.String())
		}
		if e.kind == kind {
			return e
		}
	}
}

// prints reads until stdout has text.
func (s *stream) prints(text string) {
	s.t.Helper()
	for !strings.Contains(s.out.String(), text) {
		if e, err := s.next(); err != nil || e.kind == "exit" || e.kind == "error" {
			s.t.Fatalf("waiting for %q: %+v %v (out %.300q)", text, e, err, s.out.String())
		}
	}
}

// end reads to the exit event and checks that nothing follows.
func (s *stream) end() Exit {
	s.t.Helper()
	e := s.until("exit")
	var x Exit
	must(s.t, json.Unmarshal([]byte(e.data), &x))
	if extra, err := s.next(); !errors.Is(err, io.EOF) {
		s.t.Fatalf("after the exit: %+v %v", extra, err)
	}
	return x
}

func (e event) gap(t testing.TB) (missing uint64, reason string) {
	t.Helper()
	var d struct {
		Missing uint64 `json:"missing"`
		Reason  string `json:"reason"`
	}
	must(t, json.Unmarshal([]byte(e.data), &d))
	return d.Missing, d.Reason
}

func offset(t testing.TB, id string) uint64 {
	t.Helper()
	p, ok := journal.ParseID(id)
	if !ok {
		t.Fatalf("event id %q", id)
	}
	return p.Offset
}

// within fails the test when fn takes longer than d.
func within(t testing.TB, d time.Duration, what string, fn func()) {
	t.Helper()
	start := time.Now()
	fn()
	if took := time.Since(start); took > d {
		t.Fatalf("%s took %s, more than %s", what, took, d)
	}
}
