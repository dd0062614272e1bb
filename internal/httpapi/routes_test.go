package httpapi_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/space-platform/space/api/openapi"
	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/httpapi"
	"github.com/space-platform/space/internal/sandbox"
)

// known is what the tests know of each route. A route that is not here fails them.
var known = map[string]struct {
	scope auth.Scope // what it needs; "" for open ones
	body  string
}{
	"GET /v1/health":                   {"", ""},
	"POST /v1/sandboxes":               {auth.SandboxesWrite, `{"metadata":{"a":"b"}}`},
	"GET /v1/sandboxes":                {auth.SandboxesRead, ""},
	"GET /v1/sandboxes/{id}":           {auth.SandboxesRead, ""},
	"PATCH /v1/sandboxes/{id}":         {auth.SandboxesWrite, `{"metadata":{"a":"c"}}`},
	"DELETE /v1/sandboxes/{id}":        {auth.SandboxesWrite, ""},
	"POST /v1/sandboxes/{id}/pause":    {auth.SandboxesWrite, ""},
	"POST /v1/sandboxes/{id}/resume":   {auth.SandboxesWrite, ""},
	"POST /v1/sandboxes/{id}/stop":     {auth.SandboxesWrite, ""},
	"POST /v1/sandboxes/{id}/start":    {auth.SandboxesWrite, ""},
	"POST /v1/sandboxes/{id}/wake":     {auth.SandboxesWrite, ""},
	"GET /v1/sandboxes/{id}/stats":     {auth.SandboxesRead, ""},
	"POST /v1/sandboxes/{id}/sessions": {auth.Exec, `{"args":["echo","hi"]}`},
	"GET /v1/sandboxes/{id}/sessions":  {auth.SandboxesRead, ""},
	"POST /v1/sandboxes/{id}/exec":     {auth.Exec, `{"args":["echo","hi"]}`},
	"POST /v1/sandboxes/{id}/tokens":   {auth.Exec, `{"scopes":["exec"]}`},
	"DELETE /v1/sandboxes/{id}/tokens": {auth.Exec, ""},
	"GET /v1/sessions/{id}":            {auth.SandboxesRead, ""},
	"DELETE /v1/sessions/{id}":         {auth.Exec, ""},
	"POST /v1/sessions/{id}/tokens":    {auth.Exec, ""},
	"DELETE /v1/sessions/{id}/tokens":  {auth.Exec, ""},
	"GET /v1/operations":               {auth.SandboxesRead, ""},
	"GET /v1/operations/{id}":          {auth.SandboxesRead, ""},
	"POST /v1/operations/{id}/cancel":  {auth.SandboxesWrite, ""},
	"GET /v1/quarantine":               {auth.Operator, ""},
	"POST /v1/quarantine/{id}/release": {auth.Operator, ""},
	"POST /v1/keys":                    {auth.KeysWrite, `{"name":"k","scopes":["exec"]}`},
	"GET /v1/keys":                     {auth.KeysWrite, ""},
	"DELETE /v1/keys/{id}":             {auth.KeysWrite, ""},
	"GET /v1/templates":                {auth.SandboxesRead, ""},
	"GET /v1/templates/{ref}":          {auth.SandboxesRead, ""},
	"GET /v1/nodes":                    {auth.Operator, ""},
	"GET /v1/audit":                    {auth.AuditRead, ""},
}

// routes gives the control API's routes as the committed document has them.
func routes(t *testing.T) []string {
	t.Helper()
	var doc struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	must(t, json.Unmarshal(openapi.Document, &doc))
	var out []string
	for path, item := range doc.Paths {
		for method := range item {
			if method != "servers" && strings.HasPrefix(path, "/v1/") {
				out = append(out, strings.ToUpper(method)+" "+path)
			}
		}
	}
	slices.Sort(out)
	if !slices.Equal(out, httpapi.Routes()) {
		t.Fatalf("document and server differ:\n%v\n%v", out, httpapi.Routes())
	}
	for _, r := range out {
		if _, ok := known[r]; !ok {
			t.Errorf("the tests do not know the route %s", r)
		}
	}
	if len(out) != len(known) {
		t.Errorf("%d routes, the tests know %d", len(out), len(known))
	}
	return out
}

// ids are one of each thing that a path can name.
type ids struct{ sandbox, name, session, operation, key string }

func (h *host) things(key string) ids {
	h.t.Helper()
	name := "n" + sandbox.Random(8)
	m := decode[spaceapi.Mutation](h.t, h.call(key, "POST", "/v1/sandboxes?wait=30s", `{"name":"`+name+`"}`), 200)
	s := decode[spaceapi.SessionCreated](h.t, h.call(key, "POST", "/v1/sandboxes/"+m.Sandbox.ID+"/sessions", `{"args":["cat"],"stdin":true}`), 201)
	k := decode[spaceapi.Key](h.t, h.call(key, "POST", "/v1/keys", `{"name":"k","scopes":["exec"]}`), 201)
	return ids{m.Sandbox.ID, name, s.Session.ID, m.Operation.ID, k.ID}
}

// unknown is one of each that does not exist, of the same form.
func unknown() ids {
	id := sandbox.NewID()
	return ids{string(id), "n" + sandbox.Random(8), string(sandbox.NewSessionID(id)), "op" + sandbox.Random(24), "key" + sandbox.Random(16)}
}

// in gives the ids that may be put into a path: several for routes of sandboxes.
func (i ids) in(path string) []string {
	switch {
	case strings.HasPrefix(path, "/v1/sessions/{id}"):
		return []string{i.session}
	case strings.HasPrefix(path, "/v1/operations/{id}"):
		return []string{i.operation}
	case strings.HasPrefix(path, "/v1/keys/{id}"):
		return []string{i.key}
	case strings.Contains(path, "{ref}"):
		return []string{"base:latest"}
	}
	return []string{i.sandbox, i.name}
}

func fill(path, id string) string {
	return regexp.MustCompile(`\{[a-z]+\}`).ReplaceAllLiteralString(path, url.PathEscape(id))
}

// same gives an answer without what may differ: the request id, and the id asked for.
func same(r reply, id string) string {
	var p map[string]any
	if json.Unmarshal(r.body, &p) == nil {
		delete(p, "request_id")
	}
	b, _ := json.Marshal(p)
	return fmt.Sprintf("%d %s %s", r.status, r.header.Get("Content-Type"), strings.ReplaceAll(string(b), id, "ID"))
}

// TestC069ForeignIsUnknown tries every route of the document with the ids of
// another tenant.
func TestC069ForeignIsUnknown(t *testing.T) {
	h := newHost(t)
	theirs := h.things(h.key)
	mine := h.tenant("other")
	tried := 0
	for _, route := range routes(t) {
		method, path, _ := strings.Cut(route, " ")
		if !strings.Contains(path, "{id}") {
			continue
		}
		un := unknown()
		for n, foreign := range theirs.in(path) {
			tried++
			never := un.in(path)[n]
			got := h.call(mine, method, fill(path, foreign), known[route].body)
			want := h.call(mine, method, fill(path, never), known[route].body)
			if want.status != 404 {
				t.Errorf("%s with an unknown id: %d %s", route, want.status, want.body)
			}
			want.problem(t)
			if a, b := same(got, foreign), same(want, never); a != b {
				t.Errorf("%s tells a foreign id from an unknown one:\n%s\n%s", route, a, b)
			}
		}
	}
	if tried < 20 {
		t.Fatalf("only %d requests were tried: the walk is broken", tried)
	}
	// And what was tried has left no trace on the owner's side.
	for path, id := range map[string]string{"/v1/sandboxes/": theirs.sandbox, "/v1/sessions/": theirs.session, "/v1/operations/": theirs.operation} {
		if r := h.call(h.key, "GET", path+id, ""); r.status != 200 || strings.Contains(string(r.body), `"cancelled"`) || strings.Contains(string(r.body), `"expired"`) {
			t.Errorf("the owner's %s: %d %s", id, r.status, r.body)
		}
	}
	if s := decode[spaceapi.Sandbox](t, h.call(h.key, "GET", "/v1/sandboxes/"+theirs.sandbox, ""), 200); s.State != "running" || s.Metadata != nil {
		t.Errorf("the owner's sandbox changed: %+v", s)
	}
	for _, k := range decode[spaceapi.List[spaceapi.Key]](t, h.call(h.key, "GET", "/v1/keys", ""), 200).Items {
		if k.ID == theirs.key && !k.RevokedAt.IsZero() {
			t.Error("another tenant has revoked a key")
		}
	}
	// The filter of operations names a sandbox, too.
	never := string(sandbox.NewID())
	if a, b := same(h.call(mine, "GET", "/v1/operations?sandbox="+theirs.sandbox, ""), theirs.sandbox), same(h.call(mine, "GET", "/v1/operations?sandbox="+never, ""), never); a != b {
		t.Errorf("operations of a foreign sandbox: %s, of an unknown one: %s", a, b)
	}
}

// TestC069ForeignCursor gives every list of the document the cursors of another
// tenant: nothing of it may show, and a cursor of another list is refused.
func TestC069ForeignCursor(t *testing.T) {
	h := newHost(t)
	mine := h.tenant("other")
	theirs, own := h.things(h.key), h.things(mine)
	h.things(h.key)
	h.call(h.key, "POST", "/v1/sandboxes/"+theirs.sandbox+"/sessions", `{"args":["cat"]}`)
	marks := []string{theirs.sandbox, theirs.session, theirs.operation, theirs.key, theirs.name}
	lists := 0
	for _, route := range routes(t) {
		method, path, _ := strings.Cut(route, " ")
		first := h.call(h.key, method, fill(path, theirs.sandbox)+"?limit=1", "")
		if method != "GET" || first.status != 200 || !strings.Contains(string(first.body), `"items"`) {
			continue
		}
		page := decode[spaceapi.List[json.RawMessage]](t, first, 200)
		if page.Next == "" {
			if !strings.Contains(path, "quarantine") {
				t.Errorf("%s gave one page only: the test needs more rows", route)
			}
			continue
		}
		lists++
		got := h.call(mine, method, fill(path, own.sandbox)+"?cursor="+url.QueryEscape(page.Next), "")
		switch got.status {
		case 200:
			for _, m := range marks {
				if strings.Contains(string(got.body), m) {
					t.Errorf("%s with a foreign cursor shows %s", route, m)
				}
			}
		case 400:
			if c := got.problem(t).Code; c != "bad_cursor" {
				t.Errorf("%s with a foreign cursor: %s", route, c)
			}
		default:
			t.Errorf("%s with a foreign cursor: %d %s", route, got.status, got.body)
		}
		for _, bad := range []string{"x", "%00", "../..", strings.Repeat("A", 500), url.QueryEscape(page.Next + "!"), url.QueryEscape("s-1"), url.QueryEscape("é")} {
			if r := h.call(h.key, method, fill(path, theirs.sandbox)+"?cursor="+bad, ""); r.status != 400 || r.problem(t).Code != "bad_cursor" {
				t.Errorf("%s with cursor %.20q: %d %s", route, bad, r.status, r.body)
			}
		}
	}
	if lists < 5 {
		t.Fatalf("only %d lists had a cursor", lists)
	}
}

// TestScopes tries each route with a key that has every scope but those that
// cover the one it needs, and with no key, and a wrong one.
func TestScopes(t *testing.T) {
	h := newHost(t)
	th := h.things(h.key)
	covers := map[auth.Scope][]auth.Scope{
		auth.SandboxesRead: {auth.SandboxesRead, auth.SandboxesWrite}, auth.SandboxesWrite: {auth.SandboxesWrite},
	}
	keys := map[auth.Scope]string{}
	for _, route := range routes(t) {
		method, path, _ := strings.Cut(route, " ")
		need := known[route].scope
		p := fill(path, th.in(path)[0])
		if need == "" {
			for _, key := range []string{"", "spk_wrong"} {
				if r := h.call(key, method, p, known[route].body); r.status != 200 {
					t.Errorf("%s is not open: %d %s", route, r.status, r.body)
				}
			}
			continue
		}
		if keys[need] == "" {
			lacking := append(covers[need], need, auth.Admin)
			var scopes []auth.Scope
			for _, s := range auth.Scopes() {
				if !slices.Contains(lacking, s) {
					scopes = append(scopes, s)
				}
			}
			keys[need] = h.keyOf("default", scopes...)
		}
		r := h.call(keys[need], method, p, known[route].body)
		if r.status != 403 || r.problem(t).Code != "scope_missing" {
			t.Errorf("%s without %s: %d %s", route, need, r.status, r.body)
		}
		for key, code := range map[string]string{"": "key_missing", "spk_wrong": "unauthenticated", "spk_" + sandbox.Random(40): "unauthenticated"} {
			r := h.call(key, method, p, known[route].body)
			if r.status != 401 || r.problem(t).Code != code || r.header.Get("WWW-Authenticate") == "" {
				t.Errorf("%s with key %.8q: %d %s", route, key, r.status, r.body)
			}
		}
	}
	if r := h.call("", "GET", "/metrics", ""); r.status != 401 {
		t.Errorf("metrics without a key: %d", r.status)
	}
	if r := h.call(keys[auth.Operator], "GET", "/metrics", ""); r.status != 403 || r.problem(t).Code != "scope_missing" {
		t.Errorf("metrics without the scope: %d %s", r.status, r.body)
	}
	if r := h.call(h.key, "GET", "/metrics", ""); r.status != 200 || string(r.body) != "metrics\n" {
		t.Errorf("metrics: %d %s", r.status, r.body)
	}
}
