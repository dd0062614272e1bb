package httpapi_test

import (
	"context"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/httpapi"
	"github.com/space-platform/space/internal/httpguard"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store/sqlite"
)

// refusing answers whatever gets through the front door.
type refusing struct{ control.API }

var errReached = fault.New(fault.Conflict, "state_conflict", "reached")

func (refusing) CreateSandbox(context.Context, control.Principal, control.Request, control.CreateSandbox) (control.Result, error) {
	return control.Result{}, errReached
}

// FuzzBody: no body, query or header of a create makes the front door fail on
// its own side.
func FuzzBody(f *testing.F) {
	st, err := sqlite.Open(f.TempDir() + "/control.db")
	must(f, err)
	f.Cleanup(func() { _ = st.Close() })
	sealer, err := secret.NewSealer([]byte(strings.Repeat("k", 32)))
	must(f, err)
	a, err := auth.New(auth.Config{Store: st, HashKey: sealer.Derive("keys")})
	must(f, err)
	first, err := a.FirstKey(f.Context(), f.TempDir())
	must(f, err)
	h := httpapi.New(httpapi.Config{Control: refusing{}, Auth: a, Guard: httpguard.Guard{Hosts: []string{"example.com"}}})
	f.Add([]byte(`{"name":"a","resources":{"cpus":1},"env":{"A":"b"}}`), "wait=30s", "key-1")
	f.Add([]byte(`{"metadata":{"a":null}}`), "wait=%zz", "")
	f.Add([]byte("\xff\xfe{}"), ";", "é")
	f.Add([]byte(`{"timeout_seconds":1e400,"resources":{"memory_mib":9223372036854775807}}`), "wait=99999m&wait=", strings.Repeat("k", 300))
	f.Add([]byte(strings.Repeat("[", 20000)), "", "")
	f.Fuzz(func(t *testing.T, body []byte, query, idem string) {
		r := httptest.NewRequest("POST", "/v1/sandboxes", strings.NewReader(string(body)))
		r.URL.RawQuery = query
		r.Header.Set("Authorization", "Bearer "+first.Key.Reveal())
		r.Header.Set("Idempotency-Key", idem)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code < 400 || w.Code > 499 || w.Header().Get("Content-Type") != "application/problem+json" {
			t.Errorf("%d %s: %.300s", w.Code, w.Header().Get("Content-Type"), w.Body)
		}
	})
}
