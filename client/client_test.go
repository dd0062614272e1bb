package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// seen is a request as the scripted server got it.
type seen struct {
	method, path, query, key, idem, body string
	at                                   time.Time
}

// script answers the n-th request with its n-th function, later ones with the last.
type script struct {
	mu    sync.Mutex
	seen  []seen
	steps []http.HandlerFunc
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	n := len(s.seen)
	s.seen = append(s.seen, seen{r.Method, r.URL.EscapedPath(), r.URL.RawQuery, r.Header.Get("Authorization"), r.Header.Get("Idempotency-Key"), string(b), time.Now()})
	s.mu.Unlock()
	s.steps[min(n, len(s.steps)-1)](w, r)
}

func (s *script) requests() []seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

func serve(t *testing.T, steps ...http.HandlerFunc) (*script, string) {
	t.Helper()
	s := &script{steps: steps}
	srv := httptest.NewServer(s)
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	return s, srv.URL
}

func ok(v any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
}

func refuse(status int, code string, retryable bool, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(spaceapi.Problem{Status: status, Code: code, Detail: "scripted", Remedy: "none", Retryable: retryable})
	}
}

// lose does the work and drops the answer.
func lose(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }

func TestRetriesOnlyWhatIsSafe(t *testing.T) {
	created := ok(spaceapi.Mutation{Operation: spaceapi.Operation{ID: "op1"}})
	for _, c := range []struct {
		name  string
		first http.HandlerFunc
		tries int
		code  string // of the error, when it stays one
	}{
		{"lost answer", lose, 2, ""},
		{"busy", refuse(503, "busy", true), 2, ""},
		{"exhausted", refuse(429, "capacity", true), 2, ""},
		{"deadline", refuse(504, "request_ended", true), 2, ""},
		{"proxy without a body", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(502) }, 2, ""},
		{"invalid", refuse(400, "invalid_name", false), 1, "invalid_name"},
		{"conflict, later perhaps", refuse(409, "sandbox_not_running", true), 1, "sandbox_not_running"},
		{"mismatch", refuse(422, "idempotency_mismatch", false), 1, "idempotency_mismatch"},
		{"unavailable for ever", refuse(503, "gone_for_good", false), 1, "gone_for_good"},
		{"our mistake", refuse(500, "internal", false), 1, "internal"},
		{"unauthorised", refuse(401, "key_revoked", false), 1, "key_revoked"},
		{"told to wait too long", refuse(503, "busy", true, "Retry-After", "3600"), 1, "busy"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, url := serve(t, c.first, created)
			m, err := client.New(url, "k").CreateSandbox(t.Context(), spaceapi.CreateSandbox{Name: "x"})
			got := s.requests()
			if len(got) != c.tries {
				t.Fatalf("%d tries, want %d", len(got), c.tries)
			}
			if client.Code(err) != c.code || c.code == "" && (err != nil || m.Operation.ID != "op1") {
				t.Errorf("%v, want code %q", err, c.code)
			}
			for _, r := range got {
				if r.idem == "" || r.idem != got[0].idem || r.body != `{"name":"x"}` || r.key != "Bearer k" {
					t.Errorf("a try differs: %+v", r)
				}
			}
		})
	}
}

func TestIdempotencyKeys(t *testing.T) {
	s, url := serve(t, ok(spaceapi.Mutation{}))
	c := client.New(url, "k")
	for range 2 {
		_, err := c.Lifecycle(t.Context(), "box", "pause")
		must(t, err)
	}
	_, err := c.DeleteSandbox(t.Context(), "box", client.IdempotencyKey("mine"), client.Wait(1500*time.Millisecond))
	must(t, err)
	_, err = c.Sandbox(t.Context(), "../x?y")
	must(t, err)
	r := s.requests()
	if r[0].idem == "" || r[0].idem == r[1].idem || r[2].idem != "mine" || r[3].idem != "" {
		t.Errorf("keys: %+v", r)
	}
	if r[2].query != "wait=1500ms" {
		t.Errorf("wait: %q", r[2].query)
	}
	if r[3].path != "/v1/sandboxes/..%2Fx%3Fy" {
		t.Errorf("an id became a path: %q", r[3].path)
	}
}

func TestRetryAfter(t *testing.T) {
	s, url := serve(t, refuse(503, "busy", true, "Retry-After", "1"), ok(spaceapi.Sandbox{ID: "i"}))
	_, err := client.New(url, "k").Sandbox(t.Context(), "i")
	must(t, err)
	r := s.requests()
	if d := r[1].at.Sub(r[0].at); d < 900*time.Millisecond {
		t.Errorf("came back after %s", d)
	}
}

func TestAttemptsEnd(t *testing.T) {
	s, url := serve(t, refuse(503, "busy", true))
	if _, err := client.New(url, "k", client.WithAttempts(3)).Sandbox(t.Context(), "i"); client.Code(err) != "busy" || len(s.requests()) != 3 {
		t.Errorf("%v after %d", err, len(s.requests()))
	}
}

func TestCallsEndWithTheirContext(t *testing.T) {
	release := make(chan struct{})
	_, url := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	defer close(release)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := client.New(url, "k").Sandbox(ctx, "i"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	// Also in the pause between two tries.
	_, url = serve(t, refuse(503, "busy", true, "Retry-After", "30"))
	began := time.Now()
	ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := client.New(url, "k").Sandbox(ctx, "i"); err == nil || time.Since(began) > 10*time.Second {
		t.Errorf("%v after %s", err, time.Since(began))
	}
}

func TestHostileAnswers(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"no JSON": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") },
		"endless": func(w http.ResponseWriter, _ *http.Request) {
			b := []byte(`"` + strings.Repeat("a", 1<<20))
			for {
				if _, err := w.Write(b); err != nil {
					return
				}
			}
		},
		"error page": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(403); _, _ = io.WriteString(w, "<html>") },
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/v1/sandboxes/other", http.StatusFound)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, url := serve(t, h)
			if _, err := client.New(url, "k").Sandbox(t.Context(), "i"); err == nil {
				t.Error("it was believed")
			}
			if n := len(s.requests()); n != 1 {
				t.Errorf("%d requests: the key was sent on", n)
			}
		})
	}
}

func TestErrorText(t *testing.T) {
	_, url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(409)
		_, _ = io.WriteString(w, `{"code":"name_taken","detail":"it is taken","cause":"by x","remedy":"take another","retryable":false}`)
	})
	_, err := client.New(url, "secret-key").Sandbox(t.Context(), "i")
	if got := fmt.Sprint(err); got != "it is taken: by x (take another) [name_taken]" {
		t.Errorf("%q", got)
	}
	var e *client.Error
	if !errors.As(err, &e) || e.Status != 409 {
		t.Errorf("%#v", err)
	}
	// A connection that fails does not name the key.
	_, err = client.New("http://127.0.0.1:1", "secret-key", client.WithAttempts(1)).Sandbox(t.Context(), "i")
	if err == nil || strings.Contains(err.Error(), "secret-key") {
		t.Errorf("%v", err)
	}
}

func TestAwaitOperation(t *testing.T) {
	running := ok(spaceapi.Operation{ID: "op", State: "running"})
	s, url := serve(t, running, running, ok(spaceapi.Operation{ID: "op", State: "failed", Error: &spaceapi.Problem{Code: "capacity", Detail: "full"}}))
	began := time.Now()
	if _, err := client.New(url, "k").AwaitOperation(t.Context(), spaceapi.Operation{ID: "op", State: "pending"}); client.Code(err) != "capacity" {
		t.Errorf("%v", err)
	}
	if n := len(s.requests()); n != 3 || time.Since(began) < 80*time.Millisecond {
		t.Errorf("%d requests in %s", n, time.Since(began))
	}
	for _, r := range s.requests() {
		if r.query != "wait=20000ms" {
			t.Errorf("it polls: %q", r.query)
		}
	}
	if _, err := client.New(url, "k").AwaitOperation(t.Context(), spaceapi.Operation{ID: "op", State: "cancelled"}); client.Code(err) != "operation_cancelled" {
		t.Errorf("%v", err)
	}
}

// A command that may have run is not run again because its answer was lost.
func TestExecIsSentOnce(t *testing.T) {
	lost := func(w http.ResponseWriter, _ *http.Request) {
		c, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			_ = c.Close()
		}
	}
	first := ok(spaceapi.Health{Status: "ok"}) // so that the lost answer is on a kept connection
	for name, answer := range map[string]http.HandlerFunc{"lost": lost, "unavailable": refuse(503, "node_stopping", true), "gateway": refuse(502, "", true)} {
		t.Run(name, func(t *testing.T) {
			s, url := serve(t, first, answer)
			c := client.New(url, "spk_test")
			_, err := c.Health(context.Background())
			must(t, err)
			if _, err := c.Exec(context.Background(), "box", spaceapi.Exec{Command: spaceapi.Command{Shell: "date >> log"}}); err == nil {
				t.Fatal("no error")
			}
			got := s.requests()
			if len(got) != 2 || got[1].path != "/v1/sandboxes/box/exec" || got[1].idem != "" {
				t.Fatalf("sent %+v", got)
			}
		})
	}
}
