package httpapi_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/sandbox"
)

func (h *host) count(key, query string) int {
	h.t.Helper()
	return len(decode[spaceapi.List[spaceapi.Sandbox]](h.t, h.call(key, "GET", "/v1/sandboxes"+query, ""), 200).Items)
}

// TestC060CreateCanBeRetried: one key is one sandbox, from two clients at once,
// after a restart, and never with another body or for another principal.
func TestC060CreateCanBeRetried(t *testing.T) {
	h := newHost(t)
	const clients, key = 8, "create-1"
	answers := make([]reply, clients)
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			r, err := h.try(context.Background(), h.key, "POST", "/v1/sandboxes", strings.NewReader(`{"metadata":{"a":"1","b":"2"}}`), "Idempotency-Key", key)
			if err != nil {
				t.Error(err)
			}
			answers[i] = r
		})
	}
	wg.Wait()
	var first spaceapi.Mutation
	fresh := 0
	for _, r := range answers {
		if r.status != 202 && r.status != 200 {
			t.Fatalf("%d %s", r.status, r.body)
		}
		m := decode[spaceapi.Mutation](t, r, r.status)
		if first.Operation.ID == "" {
			first = m
		}
		if m.Operation.ID != first.Operation.ID || m.Sandbox.ID != first.Sandbox.ID {
			t.Errorf("another sandbox: %s, %s", m.Sandbox.ID, first.Sandbox.ID)
		}
		if r.header.Get("Location") != "/v1/operations/"+m.Operation.ID {
			t.Errorf("location %q", r.header.Get("Location"))
		}
		if r.header.Get("Idempotency-Replayed") != "true" {
			fresh++
		}
	}
	if fresh != 1 {
		t.Errorf("%d answers say that they are the first", fresh)
	}
	// The order of members and white space are no other body.
	again := func(body string) reply {
		return h.call(h.key, "POST", "/v1/sandboxes?wait=30s", body, "Idempotency-Key", key)
	}
	for range 2 {
		m := decode[spaceapi.Mutation](t, again(`{ "metadata": {"b":"2", "a":"1"} }`), 200)
		if m.Operation.ID != first.Operation.ID || m.Operation.State != "succeeded" {
			t.Errorf("replay: %+v", m.Operation)
		}
		if r := again(`{"metadata":{"a":"1"}}`); r.status != 422 || r.problem(t).Code != "idempotency_mismatch" {
			t.Errorf("another body: %d %s", r.status, r.body)
		}
		h.restart() // and the same once more
	}
	if n := h.count(h.key, ""); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
	// The key is of its principal, method and route.
	other := h.keyOf("default", auth.Admin)
	if m := decode[spaceapi.Mutation](t, h.call(other, "POST", "/v1/sandboxes", `{}`, "Idempotency-Key", key), 202); m.Sandbox.ID == first.Sandbox.ID {
		t.Error("another principal was given the first one's sandbox")
	}
	if m := decode[spaceapi.Mutation](t, h.call(h.key, "POST", "/v1/sandboxes/"+first.Sandbox.ID+"/pause?wait=30s", ``, "Idempotency-Key", key), 200); m.Operation.Kind != "pause" {
		t.Errorf("another route: %+v", m.Operation)
	}
	// A repeat is authorised anew.
	k := decode[spaceapi.Key](t, h.call(h.key, "POST", "/v1/keys", `{"name":"short","scopes":["sandboxes:rw"]}`), 201)
	decode[spaceapi.Mutation](t, h.call(k.Secret, "POST", "/v1/sandboxes", `{}`, "Idempotency-Key", "mine"), 202)
	h.call(h.key, "DELETE", "/v1/keys/"+k.ID, "")
	if r := h.call(k.Secret, "POST", "/v1/sandboxes", `{}`, "Idempotency-Key", "mine"); r.status != 401 {
		t.Errorf("a repeat with a revoked key: %d %s", r.status, r.body)
	}
}

func TestIdempotentVerbsAndKeys(t *testing.T) {
	h := newHost(t)
	s := h.up(h.key, "")
	a := decode[spaceapi.Mutation](t, h.call(h.key, "POST", "/v1/sandboxes/"+s.ID+"/pause?wait=30s", "", "Idempotency-Key", "p"), 200)
	decode[spaceapi.Mutation](t, h.call(h.key, "POST", "/v1/sandboxes/"+s.ID+"/resume?wait=30s", ""), 200)
	r := h.call(h.key, "POST", "/v1/sandboxes/"+s.ID+"/pause?wait=30s", "", "Idempotency-Key", "p")
	if b := decode[spaceapi.Mutation](t, r, 200); b.Operation.ID != a.Operation.ID || r.header.Get("Idempotency-Replayed") != "true" || b.Sandbox.State != "running" {
		t.Errorf("a repeated pause acted again: %+v", b)
	}
	// A minted key's secret is shown once.
	k1 := decode[spaceapi.Key](t, h.call(h.key, "POST", "/v1/keys", `{"name":"k","scopes":["exec"]}`, "Idempotency-Key", "k"), 201)
	k2 := decode[spaceapi.Key](t, h.call(h.key, "POST", "/v1/keys", `{"name":"k","scopes":["exec"]}`, "Idempotency-Key", "k"), 201)
	if k1.ID != k2.ID || k1.Secret == "" || k2.Secret != "" {
		t.Errorf("a repeated mint: %+v %v", k2, k1.ID == k2.ID)
	}
	if r := h.call(h.key, "POST", "/v1/keys", `{"name":"k","scopes":["exec","admin"]}`, "Idempotency-Key", "k"); r.status != 422 {
		t.Errorf("another body: %d %s", r.status, r.body)
	}
}

// TestSessionReplay: a repeated session create answers the same session with a
// new token, and the old one is dead.
func TestSessionReplay(t *testing.T) {
	h := newHost(t)
	s := h.up(h.key, "")
	create := func(body string) reply {
		return h.call(h.key, "POST", "/v1/sandboxes/"+s.ID+"/sessions", body, "Idempotency-Key", "s")
	}
	a := decode[spaceapi.SessionCreated](t, create(`{"args":["echo","x"]}`), 201)
	b := decode[spaceapi.SessionCreated](t, create(`{"args":["echo","x"]}`), 201)
	if a.Session.ID != b.Session.ID || a.Attach.Token == b.Attach.Token || a.Attach.TokenID == b.Attach.TokenID {
		t.Errorf("replay: %+v %+v", a, b)
	}
	if g, err := h.mgr.Verify(context.Background(), a.Attach.Token); err == nil {
		g.Close()
		t.Error("the first token lives on")
	}
	g, err := h.mgr.Verify(context.Background(), b.Attach.Token)
	must(t, err)
	g.Close()
	if r := create(`{"args":["echo","y"]}`); r.status != 422 || r.problem(t).Code != "idempotency_mismatch" {
		t.Errorf("another body: %d %s", r.status, r.body)
	}
}

// slow is a control plane whose mutations wait for the test.
type slow struct {
	control.API
	reached chan struct{} // the intent is about to be recorded
	ended   chan error
}

func (s *slow) CreateSandbox(ctx context.Context, p control.Principal, req control.Request, c control.CreateSandbox) (control.Result, error) {
	r, err := s.API.CreateSandbox(ctx, p, req, c)
	if err == nil && req.Wait > 0 {
		s.reached <- struct{}{}
		<-ctx.Done()
		s.ended <- context.Cause(ctx)
	}
	return r, err
}

// TestC061ClientLeavesDuringCreate: what was recorded is in the list and gets up.
func TestC061ClientLeavesDuringCreate(t *testing.T) {
	h := newHost(t)
	s := &slow{API: h.svc, reached: make(chan struct{}), ended: make(chan error, 1)}
	h.stop()
	h.front.Control = s
	h.serve()
	s.API = h.svc
	ctx, hangUp := context.WithCancel(context.Background())
	gone := make(chan error)
	go func() {
		_, err := h.try(ctx, h.key, "POST", "/v1/sandboxes?wait=30s", strings.NewReader(`{"name":"left"}`))
		gone <- err
	}()
	<-s.reached
	hangUp()
	if err := <-gone; err == nil {
		t.Fatal("the client was answered")
	}
	select {
	case <-s.ended: // the server knows that the client has gone
	case <-time.After(20 * time.Second):
		t.Fatal("the server goes on waiting for a client that has gone")
	}
	got := decode[spaceapi.Sandbox](t, h.call(h.key, "GET", "/v1/sandboxes/left", ""), 200)
	ops := decode[spaceapi.List[spaceapi.Operation]](t, h.call(h.key, "GET", "/v1/operations?sandbox="+got.ID, ""), 200)
	op := decode[spaceapi.Operation](t, h.call(h.key, "GET", "/v1/operations/"+ops.Items[0].ID+"?wait=30s", ""), 200)
	if op.State != "succeeded" || got.ExpiresAt.IsZero() {
		t.Errorf("it ended as %+v", op)
	}
}

// TestWait: without wait, or when it is too short, the answer is 202 and the
// operation goes on; with enough it is 200.
func TestWait(t *testing.T) {
	h := newHost(t)
	r := h.call(h.key, "POST", "/v1/sandboxes", `{}`)
	m := decode[spaceapi.Mutation](t, r, 202)
	if m.Operation.State != "pending" || r.header.Get("Location") == "" || m.Operation.DeadlineAt.Before(time.Now()) {
		t.Errorf("202 with %+v", m.Operation)
	}
	op := decode[spaceapi.Operation](t, h.call(h.key, "GET", "/v1/operations/"+m.Operation.ID+"?wait=30s", ""), 200)
	if op.State != "succeeded" || len(op.Steps) == 0 {
		t.Errorf("waited for: %+v", op)
	}
	for _, w := range []string{"0", "1", "500ms", "1s", "1m", "99999m"} { // a long one is bounded by control
		if m := decode[spaceapi.Mutation](t, h.call(h.key, "POST", "/v1/sandboxes/"+m.Sandbox.ID+"/wake?wait="+w, ""), 200); m.Operation.State != "succeeded" {
			t.Errorf("what is so already, wait=%s: %+v", w, m.Operation)
		}
	}
}

// TestC062PagesCoverTheList: 25 in pages of 10 while others come and go.
func TestC062PagesCoverTheList(t *testing.T) {
	h := newHost(t)
	want := map[string]bool{}
	create := func() string {
		return decode[spaceapi.Mutation](t, h.call(h.key, "POST", "/v1/sandboxes", `{"resources":{"memory_mib":32,"disk_mib":16}}`), 202).Sandbox.ID
	}
	for range 25 {
		want[create()] = true
	}
	extra := create()
	seen := map[string]int{}
	cursor, pages := "", 0
	for {
		p := decode[spaceapi.List[spaceapi.Sandbox]](t, h.call(h.key, "GET", "/v1/sandboxes?limit=10&cursor="+url.QueryEscape(cursor), ""), 200)
		if len(p.Items) > 10 {
			t.Fatalf("a page of %d", len(p.Items))
		}
		for _, s := range p.Items {
			seen[s.ID]++
		}
		pages++
		create()
		if pages == 1 {
			h.call(h.key, "DELETE", "/v1/sandboxes/"+extra, "")
		}
		if cursor = p.Next; cursor == "" {
			break
		}
	}
	for id := range want {
		if seen[id] != 1 {
			t.Errorf("%s was seen %d times", id, seen[id])
		}
	}
	if pages != 3 {
		t.Errorf("%d pages", pages)
	}
	if r := h.call(h.key, "GET", "/v1/sandboxes?limit=10&cursor=nonsense", ""); r.status != 400 || r.problem(t).Code != "bad_cursor" {
		t.Errorf("a bad cursor: %d %s", r.status, r.body)
	}
}

// TestC063FilterNeverWidens: 1, 0, 0, client error, 0.
func TestC063FilterNeverWidens(t *testing.T) {
	h := newHost(t)
	h.up(h.key, `{"metadata":{"team":"red","k":"a=b"}}`)
	h.up(h.key, `{"metadata":{"team":"blue"}}`)
	for query, want := range map[string]int{
		"": 2, "?metadata=team%3Dred": 1, "?metadata=team%3Dgreen": 0, "?metadata=nobody%3Dred": 0, "?state=paused": 0,
		"?state=running": 2, "?state=running&state=paused": 2, "?metadata=team%3Dred&metadata=k%3Da%3Db": 1, "?metadata=team%3Dred&metadata=k%3Dx": 0,
		"?metadata=team%3D": 0, "?state=running&metadata=team%3Dblue": 1, "?metadata=team%3Dred%27%20OR%201%3D1": 0, "?metadata=te%25%3Dred": 0,
	} {
		if n := h.count(h.key, query); n != want {
			t.Errorf("%q gives %d, want %d", query, n, want)
		}
	}
	for query, code := range map[string]string{
		"?metadata=team": "invalid_filter", "?metadata=%3Dred": "invalid_filter", "?metadata=": "invalid_request", "?state=flying": "invalid_state", "?state=": "invalid_request", "?metadata=team%zz": "invalid_request", "?state=paused;x=1": "invalid_request",
		"?metadata=team%3Dred&metadata=team%3Dblue": "invalid_filter", "?meta=team%3Dred": "invalid_request", "?deleted=perhaps": "invalid_request",
		"?metadata=a%3D%ff": "invalid_pair",
	} {
		if r := h.call(h.key, "GET", "/v1/sandboxes"+query, ""); r.status != 400 || r.problem(t).Code != code {
			t.Errorf("%q: %d %.200s", query, r.status, r.body)
		}
	}
	// Deleted ones only when asked for.
	s := decode[spaceapi.List[spaceapi.Sandbox]](t, h.call(h.key, "GET", "/v1/sandboxes?metadata=team%3Dblue", ""), 200).Items[0]
	decode[spaceapi.Mutation](t, h.call(h.key, "DELETE", "/v1/sandboxes/"+s.ID+"?wait=30s", ""), 200)
	if a, b := h.count(h.key, ""), h.count(h.key, "?deleted=true"); a != 1 || b != 2 {
		t.Errorf("%d without, %d with deleted ones", a, b)
	}
}

// TestC068SecretsStayOurs plants keys, tokens and tenant data and searches logs,
// audit, errors and what lies on the disk.
func TestC068SecretsStayOurs(t *testing.T) {
	dir := t.TempDir()
	h := newHostOn(t, dir)
	mark := "planted9" + sandbox.Random(24) // also base64
	s := h.up(h.key, `{"env":{"PASSWORD":"`+mark+`"}}`)
	box := "/v1/sandboxes/" + s.ID
	var answers []string
	keep := func(r reply) reply { answers = append(answers, string(r.body)); return r }
	c := decode[spaceapi.SessionCreated](t, h.call(h.key, "POST", box+"/sessions", `{"args":["cat"],"env":{"TOKEN":"`+mark+`"},"stdin":true}`), 201)
	d := decode[spaceapi.Token](t, h.call(h.key, "POST", box+"/tokens", `{"scopes":["exec"]}`), 201)
	k := decode[spaceapi.Key](t, h.call(h.key, "POST", "/v1/keys", `{"name":"k","scopes":["exec"]}`, "Idempotency-Key", "a"), 201)
	decode[spaceapi.ExecResult](t, h.call(h.key, "POST", box+"/exec", `{"args":["cat"],"env":{"T":"`+mark+`"},"stdin_b64":"`+mark+`"}`, "Idempotency-Key", "e"), 200)
	keep(h.call(h.key, "POST", box+"/exec", `{"args":["no-such-program"],"env":{"T":"`+mark+`"}}`))
	// Errors of every kind, with the secrets in all the wrong places.
	for _, key := range []string{h.key, c.Attach.Token, d.Token, k.Secret, "spk_" + mark} {
		keep(h.call(key, "GET", "/v1/sandboxes", ""))
		keep(h.call(key, "DELETE", "/v1/keys/none", ""))
		keep(h.call(key, "POST", "/v1/sandboxes", `{"env":{"X":5,"Y":"`+mark+`"}}`))
		keep(h.call(key, "GET", "/v1/sandboxes?metadata="+url.QueryEscape("a=b"), "", "Host", "evil.test"))
	}
	keep(h.call(h.key, "GET", box, ""))
	keep(h.call(h.key, "GET", "/v1/sessions/"+c.Session.ID, ""))
	keep(h.call(h.key, "GET", "/v1/keys", ""))
	audit := keep(h.call(h.key, "GET", "/v1/audit?limit=500", ""))
	if len(decode[spaceapi.List[spaceapi.AuditRecord]](t, audit, 200).Items) < 4 {
		t.Error("the audit is empty: the search means nothing")
	}
	log := h.logs.String()
	if !strings.Contains(log, s.ID) {
		t.Error("the log is empty: the search means nothing")
	}
	h.stop()
	secrets := map[string]string{"the admin key": h.key, "an attach token": c.Attach.Token, "a data token": d.Token, "a minted key": k.Secret, "the tenant's value": mark}
	for what, v := range secrets {
		if strings.Contains(log, v) {
			t.Errorf("%s is in the log", what)
		}
		for _, a := range answers {
			if strings.Contains(a, v) {
				t.Errorf("%s is in an answer: %.300s", what, a)
			}
		}
	}
	must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() || e.Name() == auth.FirstKeyFile {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for what, v := range secrets {
			if strings.Contains(string(b), v) {
				t.Errorf("%s lies in %s", what, e.Name())
			}
		}
		return nil
	}))
}

// TestManyAtOnce: nothing is lost or mixed up between concurrent callers.
func TestManyAtOnce(t *testing.T) {
	h := newHost(t)
	other := h.tenant("other")
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			key := []string{h.key, other}[i%2]
			r, err := h.try(context.Background(), key, "POST", "/v1/sandboxes?wait=30s", strings.NewReader(fmt.Sprintf(`{"name":"same-%d","resources":{"memory_mib":32}}`, i/2)))
			var m spaceapi.Mutation
			if err != nil || r.status != 200 || json.Unmarshal(r.body, &m) != nil || m.Sandbox.Name != fmt.Sprintf("same-%d", i/2) {
				t.Errorf("%v %d %s", err, r.status, r.body)
			}
		})
	}
	wg.Wait()
	if a, b := h.count(h.key, "?state=running"), h.count(other, "?state=running"); a != 10 || b != 10 {
		t.Errorf("%d and %d", a, b)
	}
}

// TestAnswersAreNotCached: nothing that is between us and the client keeps a copy.
func TestAnswersAreNotCached(t *testing.T) {
	h := newHost(t)
	for _, path := range []string{"/v1/sandboxes", "/v1/nothing", "/v1/health"} {
		r := h.call(h.key, "GET", path, "")
		if r.header.Get("Cache-Control") != "no-store" || r.header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %v", path, r.header)
		}
	}
	req, err := http.NewRequest("HEAD", h.server.URL+"/v1/health", nil)
	must(t, err)
	resp, err := h.server.Client().Do(req)
	must(t, err)
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || len(b) != 0 {
		t.Errorf("HEAD: %d %q", resp.StatusCode, b)
	}
	_ = resp.Body.Close()
}
