package httpapi_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/httpapi"
)

// TestEveryRoute goes once through all of them, as a client would.
func TestEveryRoute(t *testing.T) {
	h := newHost(t)
	done := map[string]bool{}
	call := func(status int, route, id, query, body string) reply {
		t.Helper()
		done[route] = true
		method, path, _ := strings.Cut(route, " ")
		r := h.call(h.key, method, fill(path, id)+query, body)
		if r.status != status {
			t.Fatalf("%s: status %d, want %d: %s", route, r.status, status, r.body)
		}
		if status != 204 && !json.Valid(r.body) {
			t.Fatalf("%s: %s", route, r.body)
		}
		return r
	}
	if got := decode[spaceapi.Health](t, call(200, "GET /v1/health", "", "", ""), 200); got.Status != "ok" || got.Version != "test" || got.Checks["store"] != "ok" {
		t.Errorf("health: %+v", got)
	}
	if got := decode[spaceapi.List[spaceapi.Template]](t, call(200, "GET /v1/templates", "", "", ""), 200); len(got.Items) != 1 || got.Items[0].Reference != "base:latest" {
		t.Errorf("templates: %+v", got)
	}
	if got := decode[spaceapi.Template](t, call(200, "GET /v1/templates/{ref}", digest, "", ""), 200); got.Digest != digest || got.WorkDir != "/home/user" {
		t.Errorf("template: %+v", got)
	}
	m := decode[spaceapi.Mutation](t, call(200, "POST /v1/sandboxes", "", "?wait=30s",
		`{"name":"one","resources":{"cpus":0.5,"memory_mib":256,"disk_mib":64},"timeout_seconds":600,"on_timeout":"stop","idle_seconds":60,"on_idle":"pause","metadata":{"k":"v"},"env":{"A":"1"},"accept_isolation":["userkernel"]}`), 200)
	id := m.Sandbox.ID
	s := decode[spaceapi.Sandbox](t, call(200, "GET /v1/sandboxes/{id}", "one", "", ""), 200)
	if s.ID != id || s.State != "running" || s.Resources.CPUs != 0.5 || s.Resources.MemoryMiB != 256 || s.Resources.DiskMiB != 64 ||
		s.OnTimeout != "stop" || s.IdleSeconds != 60 || s.OnIdle != "pause" || s.Metadata["k"] != "v" || s.Isolation != "userkernel" || s.Template != "base:latest" {
		t.Errorf("sandbox: %+v", s)
	}
	if life := s.ExpiresAt.Sub(s.CreatedAt).Round(time.Second); life != 600*time.Second {
		t.Errorf("it lives %s", life)
	}
	if got := decode[spaceapi.List[spaceapi.Sandbox]](t, call(200, "GET /v1/sandboxes", "", "?state=running&metadata=k%3Dv", ""), 200); len(got.Items) != 1 {
		t.Errorf("list: %+v", got)
	}
	call(200, "PATCH /v1/sandboxes/{id}", id, "?wait=30s", `{"metadata":{"k":"w"},"timeout_seconds":900,"name":"two"}`)
	if s = decode[spaceapi.Sandbox](t, call(200, "GET /v1/sandboxes/{id}", "two", "", ""), 200); s.Metadata["k"] != "w" || s.OnTimeout != "stop" {
		t.Errorf("after patch: %+v", s)
	}
	for verb, state := range map[string]string{"pause": "paused"} {
		call(200, "POST /v1/sandboxes/{id}/"+verb, id, "?wait=30s", "")
		if s = decode[spaceapi.Sandbox](t, call(200, "GET /v1/sandboxes/{id}", id, "", ""), 200); s.State != state {
			t.Errorf("after %s: %s", verb, s.State)
		}
	}
	for _, v := range []struct{ verb, state string }{{"resume", "running"}, {"stop", "stopped"}, {"start", "running"}, {"pause", "paused"}, {"wake", "running"}} {
		got := decode[spaceapi.Mutation](t, call(200, "POST /v1/sandboxes/{id}/"+v.verb, id, "?wait=30s", ""), 200)
		if got.Sandbox.State != v.state || got.Operation.State != "succeeded" || got.Operation.Kind != v.verb {
			t.Errorf("after %s: %+v", v.verb, got)
		}
	}
	if got := decode[spaceapi.Stats](t, call(200, "GET /v1/sandboxes/{id}/stats", id, "", ""), 200); got.CPUSeconds < 0 {
		t.Errorf("stats: %+v", got)
	}

	e := decode[spaceapi.ExecResult](t, call(200, "POST /v1/sandboxes/{id}/exec", id, "", `{"args":["echo","42"]}`), 200)
	if e.Exit.Cause != "exited" || e.Exit.Code != 0 || e.Stdout.Text == nil || *e.Stdout.Text != "42\n" || e.Stderr.Text == nil || *e.Stderr.Text != "" {
		t.Errorf("exec: %+v", e)
	}
	e = decode[spaceapi.ExecResult](t, call(200, "POST /v1/sandboxes/{id}/exec", id, "", `{"args":["cat"],"stdin_b64":"AP/+","max_output_bytes":2}`), 200)
	if string(e.Stdout.B64) != "\x00\xff" || e.Stdout.Text != nil || e.Stdout.TruncatedBytes != 1 {
		t.Errorf("exec with bytes: %+v", e)
	}
	c := decode[spaceapi.SessionCreated](t, call(201, "POST /v1/sandboxes/{id}/sessions", id, "", `{"args":["cat"],"stdin":true,"env":{"X":"1"},"timeout_seconds":1.5}`), 201)
	if c.Session.State != "created" || c.Attach.URL != "http://127.0.0.1:7781/d/sessions/"+c.Session.ID || !strings.HasPrefix(c.Attach.Token, "spt_") {
		t.Errorf("session: %+v", c)
	}
	if got := decode[spaceapi.List[spaceapi.Session]](t, call(200, "GET /v1/sandboxes/{id}/sessions", id, "", ""), 200); len(got.Items) != 3 {
		t.Errorf("sessions: %+v", got)
	}
	if a := decode[spaceapi.Attach](t, call(201, "POST /v1/sessions/{id}/tokens", c.Session.ID, "?ttl_seconds=60", ""), 201); a.Token == c.Attach.Token || time.Until(a.ExpiresAt) > time.Minute {
		t.Errorf("token: %+v", a)
	}
	call(204, "DELETE /v1/sessions/{id}/tokens", c.Session.ID, "", "")
	if got := decode[spaceapi.Session](t, call(200, "DELETE /v1/sessions/{id}", c.Session.ID, "", ""), 200); got.State != "expired" || got.Exit == nil {
		t.Errorf("killed: %+v", got)
	}
	call(200, "GET /v1/sessions/{id}", c.Session.ID, "", "")
	if got := decode[spaceapi.Token](t, call(201, "POST /v1/sandboxes/{id}/tokens", id, "", `{"scopes":["files:r","exec"],"ttl_seconds":60}`), 201); len(got.Scopes) != 2 || got.URL != "http://127.0.0.1:7781" {
		t.Errorf("data token: %+v", got)
	}
	call(204, "DELETE /v1/sandboxes/{id}/tokens", id, "", "")

	k := decode[spaceapi.Key](t, call(201, "POST /v1/keys", "", "", `{"name":"ci","scopes":["sandboxes:r"],"ttl_seconds":3600}`), 201)
	if !strings.HasPrefix(k.Secret, "spk_") || h.call(k.Secret, "GET", "/v1/sandboxes", "").status != 200 {
		t.Errorf("the new key does not work")
	}
	for _, x := range decode[spaceapi.List[spaceapi.Key]](t, call(200, "GET /v1/keys", "", "", ""), 200).Items {
		if x.Secret != "" {
			t.Errorf("a list shows the secret of %s", x.ID)
		}
	}
	call(200, "DELETE /v1/keys/{id}", k.ID, "", "")
	if r := h.call(k.Secret, "GET", "/v1/sandboxes", ""); r.status != 401 || r.problem(t).Code != "key_revoked" {
		t.Errorf("a revoked key: %d %s", r.status, r.body)
	}

	ops := decode[spaceapi.List[spaceapi.Operation]](t, call(200, "GET /v1/operations", "", "?sandbox="+id, ""), 200)
	if len(ops.Items) < 7 || ops.Items[0].Kind != "wake" {
		t.Errorf("operations: %+v", ops)
	}
	call(200, "GET /v1/operations/{id}", m.Operation.ID, "?wait=1s", "")
	if r := call(409, "POST /v1/operations/{id}/cancel", m.Operation.ID, "", ""); r.problem(t).Code != "operation_not_cancellable" {
		t.Errorf("cancel: %s", r.body)
	}
	if got := decode[spaceapi.List[spaceapi.Node]](t, call(200, "GET /v1/nodes", "", "", ""), 200); len(got.Items) != 1 || got.Items[0].Sandboxes != 1 {
		t.Errorf("nodes: %+v", got)
	}
	if got := decode[spaceapi.List[spaceapi.Sandbox]](t, call(200, "GET /v1/quarantine", "", "", ""), 200); len(got.Items) != 0 || got.Items == nil {
		t.Errorf("quarantine: %+v", got)
	}
	if r := call(409, "POST /v1/quarantine/{id}/release", id, "", ""); r.problem(t).Retryable {
		t.Errorf("release: %s", r.body)
	}
	au := decode[spaceapi.List[spaceapi.AuditRecord]](t, call(200, "GET /v1/audit", "", "?limit=500", ""), 200)
	acts := map[string]bool{}
	for _, r := range au.Items {
		acts[r.Action] = true
		if len(r.Hash) != 64 || r.Actor == "" {
			t.Errorf("audit record: %+v", r)
		}
	}
	for _, a := range []string{"sandbox.create", "sandbox.pause", "key.create", "key.revoke", "token.mint", "session.token.mint"} {
		if !acts[a] {
			t.Errorf("%s is not in the audit: %v", a, acts)
		}
	}
	call(200, "DELETE /v1/sandboxes/{id}", id, "?wait=30s", "")
	if r := call(410, "GET /v1/sandboxes/{id}", id, "", ""); r.problem(t).Code != "sandbox_deleted" {
		t.Errorf("deleted: %s", r.body)
	}
	for _, r := range routes(t) {
		if !done[r] {
			t.Errorf("%s was not tried", r)
		}
	}
}

// TestBadRequests: whatever is sent, the answer is a problem of the 4xx kind.
func TestBadRequests(t *testing.T) {
	h := newHost(t)
	th := h.things(h.key)
	deep := strings.Repeat(`{"a":`, 10_000) + "1" + strings.Repeat("}", 10_000)
	deeper := strings.Repeat("[", 20_000)
	box := "/v1/sandboxes/" + th.sandbox
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		code                     string
	}{
		{"no body", "POST", "/v1/sandboxes", "", 400, "invalid_request"},
		{"no JSON", "POST", "/v1/sandboxes", "{", 400, "invalid_request"},
		{"array", "POST", "/v1/sandboxes", "[]", 400, "invalid_request"},
		{"null", "POST", "/v1/sandboxes", "null", 400, "invalid_request"},
		{"two values", "POST", "/v1/sandboxes", "{}{}", 400, "invalid_request"},
		{"unknown field", "POST", "/v1/sandboxes", `{"tempalte":"x"}`, 400, "invalid_request"},
		{"unknown field inside", "POST", "/v1/sandboxes", `{"resources":{"gpus":1}}`, 400, "invalid_request"},
		{"wrong type", "POST", "/v1/sandboxes", `{"name":1}`, 400, "invalid_request"},
		{"null list", "POST", "/v1/keys", `{"name":"x","scopes":null}`, 400, "invalid_request"},
		{"missing field", "POST", "/v1/keys", `{"name":"x"}`, 400, "invalid_request"},
		{"deep", "POST", "/v1/sandboxes", deep, 400, "invalid_request"},
		{"deep metadata", "POST", "/v1/sandboxes", `{"metadata":` + deep + `}`, 400, "invalid_request"},
		{"too deep", "POST", "/v1/sandboxes", deeper, 400, "invalid_request"},
		{"broken UTF-8", "POST", "/v1/sandboxes", "{\"name\":\"a\xff\"}", 400, "invalid_request"},
		{"overlong UTF-8", "POST", box + "/exec", "{\"shell\":\"\xc0\xaf\"}", 400, "invalid_request"},
		{"large", "POST", "/v1/sandboxes", `{"name":"` + strings.Repeat("a", httpapi.MaxBody) + `"}`, 413, "body_too_large"},
		{"huge number", "POST", "/v1/sandboxes", `{"timeout_seconds":1e999}`, 400, "invalid_request"},
		{"beyond int64", "POST", "/v1/sandboxes", `{"timeout_seconds":99999999999999999999}`, 400, "invalid_request"},
		{"largest int64", "POST", "/v1/sandboxes", `{"timeout_seconds":9223372036854775807}`, 400, "invalid_max_lifetime"},
		{"wraps around", "POST", "/v1/sandboxes", `{"resources":{"memory_mib":17592186044417}}`, 400, "invalid_memory"},
		{"largest disk", "POST", "/v1/sandboxes", `{"resources":{"disk_mib":9223372036854775807}}`, 400, "invalid_disk"},
		{"negative", "POST", "/v1/sandboxes", `{"timeout_seconds":-1}`, 400, "invalid_request"},
		{"negative CPUs", "POST", "/v1/sandboxes", `{"resources":{"cpus":-0.5}}`, 400, "invalid_request"},
		{"hardly any CPU", "POST", "/v1/sandboxes", `{"resources":{"cpus":0.00001}}`, 400, "invalid_cpu"},
		{"half a second", "POST", "/v1/sandboxes", `{"timeout_seconds":0.5}`, 400, "invalid_request"},
		{"bad word", "POST", "/v1/sandboxes", `{"on_timeout":"explode"}`, 400, "invalid_request"},
		{"bad class", "POST", "/v1/sandboxes", `{"accept_isolation":["none"]}`, 400, "invalid_request"},
		{"class not here", "POST", "/v1/sandboxes", `{"accept_isolation":["microvm"]}`, 409, "isolation_unavailable"},
		{"bad name", "POST", "/v1/sandboxes", `{"name":"../x"}`, 400, "invalid_name"},
		{"name taken", "POST", "/v1/sandboxes", `{"name":"` + th.name + `"}`, 409, "name_taken"},
		{"no such template", "POST", "/v1/sandboxes", `{"template":"nope:1"}`, 404, "template_not_found"},
		{"bad variable", "POST", "/v1/sandboxes", `{"env":{"A=B":"x"}}`, 400, "invalid_env"},
		{"NUL", "POST", "/v1/sandboxes", `{"metadata":{"a":"\u0000"}}`, 400, "invalid_pair"},
		{"bad id", "GET", "/v1/sandboxes/UPPER", "", 404, "sandbox_not_found"},
		{"long id", "GET", "/v1/sandboxes/" + strings.Repeat("a", 65), "", 400, "invalid_request"},
		{"odd id", "GET", "/v1/sandboxes/%00%ff", "", 404, "sandbox_not_found"},
		{"slash in id", "GET", "/v1/sandboxes/a%2Fb", "", 404, "sandbox_not_found"},
		{"bad session id", "GET", "/v1/sessions/x", "", 404, "session_not_found"},
		{"bad operation id", "GET", "/v1/operations/op1", "", 404, "operation_not_found"},
		{"bad key id", "DELETE", "/v1/keys/%27%20or%201=1", "", 404, "key_not_found"},
		{"unknown parameter", "GET", "/v1/sandboxes?limt=1", "", 400, "invalid_request"},
		{"limit 0", "GET", "/v1/sandboxes?limit=0", "", 400, "invalid_request"},
		{"limit 1001", "GET", "/v1/sandboxes?limit=1001", "", 400, "invalid_request"},
		{"limit x", "GET", "/v1/sandboxes?limit=x", "", 400, "invalid_request"},
		{"limit huge", "GET", "/v1/sandboxes?limit=99999999999999999999", "", 400, "invalid_request"},
		{"bad wait", "POST", box + "/pause?wait=soon", "", 400, "invalid_request"},
		{"negative wait", "POST", box + "/pause?wait=-1s", "", 400, "invalid_request"},
		{"no command", "POST", box + "/exec", "{}", 400, "invalid_command"},
		{"two commands", "POST", box + "/exec", `{"args":["a"],"shell":"b"}`, 400, "invalid_command"},
		{"negative limit", "POST", box + "/exec", `{"args":["a"],"timeout_seconds":-1}`, 400, "invalid_request"},
		{"bad terminal", "POST", box + "/sessions", `{"args":["a"],"pty":{"rows":0,"cols":80}}`, 400, "invalid_request"},
		{"huge terminal", "POST", box + "/sessions", `{"args":["a"],"pty":{"rows":70000,"cols":80}}`, 400, "invalid_request"},
		{"bad base64", "POST", box + "/exec", `{"args":["cat"],"stdin_b64":"!"}`, 400, "invalid_request"},
		{"bad scope", "POST", box + "/tokens", `{"scopes":["root"]}`, 400, "invalid_request"},
		{"long-lived token", "POST", box + "/tokens", `{"scopes":["exec"],"ttl_seconds":86401}`, 400, "invalid_request"},
		{"unknown scope of a key", "POST", "/v1/keys", `{"name":"x","scopes":["root"]}`, 400, "invalid_key"},
		{"unknown route", "GET", "/v1/nothing", "", 404, "route_not_found"},
		{"root", "GET", "/", "", 404, "route_not_found"},
		{"not a clean path", "GET", "/v1//sandboxes", "", 404, "route_not_found"},
		{"dots", "GET", "/v1/templates/../keys", "", 404, "route_not_found"},
		{"slash at the end", "GET", "/v1/sandboxes/", "", 404, "route_not_found"},
		{"method", "PUT", "/v1/sandboxes", "{}", 405, "method_not_allowed"},
		{"odd method", "BREW", "/v1/sandboxes", "", 405, "method_not_allowed"},
		{"preflight", "OPTIONS", "/v1/sandboxes", "", 405, "method_not_allowed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := h.call(h.key, c.method, c.path, c.body, "Content-Type", "application/json")
			p := r.problem(t)
			if r.status != c.status || p.Code != c.code {
				t.Errorf("%d %s, want %d %s: %.300s", r.status, p.Code, c.status, c.code, r.body)
			}
			if r.status == 405 && r.header.Get("Allow") == "" {
				t.Error("a 405 names no method")
			}
			if len(r.body) > 4096 {
				t.Errorf("the answer has %d bytes", len(r.body))
			}
		})
	}
	if r := h.call(h.key, "POST", "/v1/sandboxes", "name=x", "Content-Type", "application/x-www-form-urlencoded"); r.status != 415 || r.problem(t).Code != "unsupported_media_type" {
		t.Errorf("a form: %d %s", r.status, r.body)
	}
	long := strings.Repeat("k", 256)
	if r := h.call(h.key, "POST", "/v1/sandboxes", "{}", "Idempotency-Key", long); r.status != 400 {
		t.Errorf("a long idempotency key: %d %s", r.status, r.body)
	}
	if n := len(decode[spaceapi.List[spaceapi.Sandbox]](t, h.call(h.key, "GET", "/v1/sandboxes", ""), 200).Items); n != 1 {
		t.Errorf("bad requests have made %d sandboxes", n-1)
	}
}

// TestProblemsShowNoValues: a value that a request got wrong is not sent back,
// since it may be a secret in the wrong field.
func TestProblemsShowNoValues(t *testing.T) {
	h := newHost(t)
	const planted = "hunter2hunter2"
	for _, body := range []string{
		`{"timeout_seconds":"` + planted + `"}`, `{"on_timeout":"` + planted + `"}`, `{"env":["` + planted + `"]}`, `{"env":{"A":1,"B":"` + planted + `"}}`,
	} {
		if r := h.call(h.key, "POST", "/v1/sandboxes", body); r.status != 400 || strings.Contains(string(r.body), planted) {
			t.Errorf("%s: %d %s", body, r.status, r.body)
		}
	}
	if strings.Contains(h.logs.String(), planted) {
		t.Error("a refused value is in the log")
	}
}

func TestSlowBodyIsCut(t *testing.T) {
	h := newHost(t, func(c *httpapi.Config) { c.BodyTimeout = 200 * time.Millisecond })
	conn, err := net.Dial("tcp", strings.TrimPrefix(h.server.URL, "http://"))
	must(t, err)
	defer func() { _ = conn.Close() }()
	must(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	_, err = fmt.Fprintf(conn, "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: 100\r\n\r\n{", h.key)
	must(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	must(t, err)
	b, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != 408 || !strings.Contains(string(b), "body_timeout") || !resp.Close {
		t.Errorf("%d (close %v): %s", resp.StatusCode, resp.Close, b)
	}
}

// TestBodyTimeoutEndsWithTheBody: a request that waits longer than bodies may
// take is not cut.
func TestBodyTimeoutEndsWithTheBody(t *testing.T) {
	h := newHost(t, func(c *httpapi.Config) { c.BodyTimeout = 100 * time.Millisecond })
	s := h.up(h.key, "")
	e := decode[spaceapi.ExecResult](t, h.call(h.key, "POST", "/v1/sandboxes/"+s.ID+"/exec", `{"args":["sleep","0.6"]}`), 200)
	if e.Exit.Cause != "exited" || e.Exit.Code != 0 {
		t.Errorf("exec ended as %+v", e.Exit)
	}
}

// panics is a control plane that is broken in one place.
type panics struct{ control.API }

const panicText = "planted text of a panic"

func (panics) GetSandbox(context.Context, control.Principal, string) (control.Sandbox, error) {
	panic(panicText)
}

func TestPanicIsAnAnswer(t *testing.T) {
	h := newHost(t, func(c *httpapi.Config) { c.Control = panics{} })
	for range 2 { // the server goes on
		r := h.call(h.key, "GET", "/v1/sandboxes/x", "", "X-Request-Id", "my-request")
		if p := r.problem(t); r.status != 500 || p.Code != "internal" || p.RequestID != "my-request" || strings.Contains(string(r.body), "planted") || strings.Contains(string(r.body), ".go") {
			t.Errorf("%d %s", r.status, r.body)
		}
	}
	if l := h.logs.String(); !strings.Contains(l, panicText) || !strings.Contains(l, "my-request") {
		t.Error("the panic is not in the log with its request")
	}
}

func TestRequestIDs(t *testing.T) {
	h := newHost(t)
	for in, echoed := range map[string]bool{"abc-1.2_X": true, "": false, "has space": false, strings.Repeat("x", 65): false, `a"b`: false} {
		r := h.call(h.key, "GET", "/v1/sandboxes/none", "", "X-Request-Id", in)
		got := r.header.Get("X-Request-Id")
		if (got == in) != echoed || got == "" || r.problem(t).RequestID != got {
			t.Errorf("request id %q came back as %q", in, got)
		}
	}
	s := decode[spaceapi.Mutation](t, h.call(h.key, "POST", "/v1/sandboxes", "{}", "X-Request-Id", "traced-42"), 202)
	for _, a := range decode[spaceapi.List[spaceapi.AuditRecord]](t, h.call(h.key, "GET", "/v1/audit", ""), 200).Items {
		if a.Target == s.Sandbox.ID && a.Request == "traced-42" {
			return
		}
	}
	t.Error("the audit does not name the request")
}

func TestHostAndOrigin(t *testing.T) {
	h := newHost(t)
	for _, c := range []struct {
		name   string
		header []string
		status int
		code   string
	}{
		{"foreign host", []string{"Host", "evil.test"}, 403, "host_not_allowed"},
		{"foreign origin", []string{"Origin", "https://evil.test"}, 403, "origin_not_allowed"},
		{"null origin", []string{"Origin", "null"}, 403, "origin_not_allowed"},
		{"cross-site", []string{"Sec-Fetch-Site", "cross-site"}, 403, "origin_not_allowed"},
		{"console", []string{"Origin", "https://console.test"}, 200, ""},
	} {
		for _, path := range []string{"/v1/sandboxes", "/v1/health", "/v1/openapi.json", "/metrics"} {
			r := h.call(h.key, "GET", path, "", c.header...)
			if r.status != c.status || c.code != "" && r.problem(t).Code != c.code {
				t.Errorf("%s, %s: %d %.200s", c.name, path, r.status, r.body)
			}
		}
	}
}

func TestDegradedHealth(t *testing.T) {
	h := newHost(t)
	must(t, h.store.Close())
	r := h.call("", "GET", "/v1/health", "")
	if got := decode[spaceapi.Health](t, r, 503); got.Status != "degraded" || got.Checks["store"] == "ok" || strings.Contains(string(r.body), "sql") {
		t.Errorf("health: %s", r.body)
	}
	if r := h.call(h.key, "GET", "/v1/sandboxes", ""); r.status != 503 || !r.problem(t).Retryable || r.header.Get("Retry-After") == "" {
		t.Errorf("without a store: %d %s", r.status, r.body)
	}
}

func TestFailedCallsKeepNothing(t *testing.T) {
	h := newHost(t)
	s := h.up(h.key, "")
	// A session of a sandbox that is paused waits for nobody.
	decode[spaceapi.Mutation](t, h.call(h.key, "POST", "/v1/sandboxes/"+s.ID+"/pause?wait=30s", ""), 200)
	began := time.Now()
	r := h.call(h.key, "POST", "/v1/sandboxes/"+s.ID+"/exec", `{"args":["echo"]}`)
	if p := r.problem(t); r.status != 409 || p.Code != "sandbox_paused" || !p.Retryable || time.Since(began) > 10*time.Second {
		t.Errorf("exec on a paused sandbox: %d %s", r.status, r.body)
	}
	if n := len(decode[spaceapi.List[spaceapi.Session]](t, h.call(h.key, "GET", "/v1/sandboxes/"+s.ID+"/sessions", ""), 200).Items); n != 0 {
		t.Errorf("%d sessions were made", n)
	}
}
