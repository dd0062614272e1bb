package httpapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/problem"
)

const (
	// apiVersion is the version of the API, not of the program.
	apiVersion   = "1"
	documentPath = "/v1/openapi.json"
	problemRef   = "#/components/schemas/Problem"
)

// Document gives the OpenAPI document as indented JSON, as it is served and
// committed in api/openapi.
func Document() ([]byte, error) {
	s := &server{}
	s.register(http.NewServeMux())
	return s.document()
}

// describe fills what huma does not derive from types.
func describe(d *huma.OpenAPI) {
	d.Info.Description = strings.TrimSpace(`
Sandboxed Platform for Agentic Code Execution: the native API.

Control calls are under /v1 and take an API key. The data plane is under /d, on a listener of its own whose
address the answers that carry a token give (attach.url), and takes attach and data tokens.

Errors are problem documents (RFC 9457) with a stable code; docs/errors.md lists them. Every mutation may carry an
Idempotency-Key: a repeat with the same key and body is the same mutation, with another body it is 422. Every answer
has an X-Request-Id, the one of the request when it sent one.`)
	d.Info.License = &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}
	d.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"key":   {Type: "http", Scheme: "bearer", Description: "an API key (spk_…)"},
		"token": {Type: "http", Scheme: "bearer", Description: "an attach token of the session, or a data token with scope exec of its sandbox"},
	}
	d.Security = []map[string][]string{{"key": {}}}
	d.Tags = []*huma.Tag{
		{Name: "sandboxes", Description: "Isolated machines and their life cycle."},
		{Name: "operations", Description: "Durable records of life-cycle changes."},
		{Name: "sessions", Description: "One command each: creating authorises it, attaching starts it."},
		{Name: "keys", Description: "API keys, their scopes and their end."},
		{Name: "templates", Description: "Starting file systems."},
		{Name: "audit", Description: "Who did what."},
		{Name: "operator", Description: "What only operators see."},
		{Name: "health", Description: "Whether the server serves."},
		{Name: "data plane", Description: "Streams and input of sessions."},
	}
}

// document completes what the routes have declared and gives it as JSON.
func (s *server) document() ([]byte, error) {
	d := s.api.OpenAPI()
	d.Components.Responses = map[string]*huma.Response{}
	for _, n := range errorStatuses {
		d.Components.Responses[path.Base(errorResponse(n))] = problemResponse(n)
	}
	d.Servers = []*huma.Server{{URL: "http://127.0.0.1:7780", Description: "the control API of a local installation"}}
	for _, item := range d.Paths {
		for method, op := range operationsOf(item) {
			complete(method, op)
		}
	}
	health := d.Paths["/v1/health"].Get
	health.Security = []map[string][]string{}
	health.Responses["503"] = &huma.Response{Description: "Degraded", Content: health.Responses["200"].Content}
	for _, code := range []string{"400", "401", "403", "404", "409", "410", "413", "415", "422"} {
		delete(health.Responses, code)
	}
	create := d.Paths["/v1/sandboxes"].Post
	create.RequestBody.Content["application/json"].Examples = map[string]*huma.Example{
		"default": {Summary: "all defaults", Value: map[string]any{}},
		"agent": {Summary: "a machine for an agent", Value: spaceapi.CreateSandbox{
			Name: "agent-7", Template: "base:latest", Resources: spaceapi.Resources{CPUs: 2, MemoryMiB: 1024, DiskMiB: 4096},
			TimeoutSeconds: 3600, OnTimeout: "stop", IdleSeconds: 300, OnIdle: "pause", Metadata: map[string]string{"team": "blue"},
		}},
	}
	d.Paths["/v1/sandboxes/{id}/sessions"].Post.RequestBody.Content["application/json"].Examples = map[string]*huma.Example{
		"shell": {Summary: "text for the shell, standard input open", Value: map[string]any{"shell": "read x; echo $x", "stdin": true}},
	}
	d.Paths["/v1/sandboxes/{id}/exec"].Post.RequestBody.Content["application/json"].Examples = map[string]*huma.Example{
		"python": {Summary: "argv, no shell", Value: map[string]any{"args": []string{"python3", "-c", "print(6*7)"}, "timeout_seconds": 30}},
	}
	dataPlane(d)
	b, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("httpapi: document: %w", err)
	}
	return append(b, '\n'), nil
}

func operationsOf(i *huma.PathItem) map[string]*huma.Operation {
	out := map[string]*huma.Operation{}
	for m, op := range map[string]*huma.Operation{"GET": i.Get, "POST": i.Post, "PATCH": i.Patch, "PUT": i.Put, "DELETE": i.Delete} {
		if op != nil {
			out[m] = op
		}
	}
	return out
}

// complete says of an operation what its types do not.
func complete(method string, op *huma.Operation) {
	if ok := op.Responses["202"]; ok != nil {
		// The same body is answered with 200 when it is over.
		done := *ok
		done.Description = "Done: the operation has ended"
		op.Responses["200"] = &done
		ok.Description = "Accepted: recorded durably, and goes on"
	}
	for status, r := range op.Responses {
		if n, err := strconv.Atoi(status); err == nil && n >= 400 && r.Content["application/json"] == nil {
			*r = huma.Response{Ref: errorResponse(n)}
		}
	}
	if method == "GET" {
		delete(op.Responses, "422") // reads take no idempotency key
	}
	for _, p := range op.Parameters {
		if p.Name == spaceapi.HeaderIdempotencyKey {
			p.Example = "create-agent-7"
		}
	}
}

// errorStatuses are those of which the document has an answer to refer to.
var errorStatuses = []int{400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 422, 429, 500, 503, 504}

func errorResponse(status int) string {
	return "#/components/responses/" + strings.ReplaceAll(http.StatusText(status), " ", "")
}

func problemResponse(status int) *huma.Response {
	r := &huma.Response{
		Description: http.StatusText(status),
		Content:     map[string]*huma.MediaType{problem.ContentType: {Schema: &huma.Schema{Ref: problemRef}}},
		Headers: map[string]*huma.Param{
			spaceapi.HeaderRequestID: {Description: "names the request in logs and audit", Schema: &huma.Schema{Type: "string"}},
		},
	}
	switch status {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		r.Headers["Retry-After"] = &huma.Param{Description: "seconds", Schema: &huma.Schema{Type: "integer"}}
	case http.StatusUnauthorized:
		r.Headers["WWW-Authenticate"] = &huma.Param{Schema: &huma.Schema{Type: "string"}}
	case http.StatusMethodNotAllowed:
		r.Headers["Allow"] = &huma.Param{Description: "the methods that the route takes", Schema: &huma.Schema{Type: "string"}}
	}
	return r
}

// requests are the schemas of which unknown fields are refused.
var requests = []string{"CreateSandbox", "PatchSandbox", "CreateSession", "Exec", "MintToken", "MintKey", "Resources", "Size", "Signal"}

const eventText = `
Events, each with id "epoch.offset" (the position after it) and one line of JSON as data:

| event | data |
|---|---|
| started | Started: the process runs |
| stdout, stderr | Chunk: bytes, base64 |
| gap | Gap: output is not here |
| rewound | the sandbox was taken back: a new epoch begins |
| suspended | the sandbox is suspended; the stream goes on when it is back |
| exit | Exit: the true end; nothing follows |
| error | Ended: the session ended without an exit of the process, such as sandbox_lost; nothing follows |

A comment line is sent every 10 s of silence. A reader goes on after the last id that it saw with Last-Event-ID: it gets
all that follows, once. Event types that are not known are to be ignored. An event "interrupted" (a Problem, without an
id) says why the stream is cut although the session goes on: open it again.

With Accept: application/vnd.space.frames the same events come as binary frames, for bulk: kind (1 byte: 0 keepalive,
1 started, 2 stdout, 3 stderr, 4 gap, 5 rewound, 6 suspended, 7 exit, 8 error, 9 accepted, 10 problem), epoch and offset
of the id (8 bytes each), length (4 bytes), payload; integers are big endian. The payload is raw bytes for 2 and 3, else
the JSON of the event.`

// dataPlane adds the data plane's paths, which another listener serves.
func dataPlane(d *huma.OpenAPI) {
	r := d.Components.Schemas
	ref := func(name string) *huma.Schema { return &huma.Schema{Ref: "#/components/schemas/" + name} }
	for _, v := range []any{spaceapi.StdinReply{}, spaceapi.Ticket{}, spaceapi.Signal{}, spaceapi.Started{}, spaceapi.Chunk{}, spaceapi.Gap{}, spaceapi.Ended{}, spaceapi.Exit{}} {
		r.Schema(reflect.TypeOf(v), true, "")
	}
	one := func(media string, s *huma.Schema) map[string]*huma.MediaType {
		return map[string]*huma.MediaType{media: {Schema: s}}
	}
	text := &huma.Schema{Type: "string"}
	raw := &huma.Schema{Type: "string", Format: "binary"}
	id := &huma.Param{Name: "id", In: "path", Required: true, Schema: text, Description: "of the session"}
	last := &huma.Param{Name: spaceapi.HeaderLastEventID, In: "header", Schema: text, Description: "go on after this event; without it, from the first that is kept", Example: "1.4096"}
	after := &huma.Param{Name: "after", In: "query", Schema: text, Description: "the same as Last-Event-ID, for clients that cannot send it"}
	op := func(oid, summary, description string, ok int, content map[string]*huma.MediaType, body map[string]*huma.MediaType, params ...*huma.Param) *huma.Operation {
		o := &huma.Operation{
			OperationID: oid, Summary: summary, Description: strings.TrimSpace(description), Tags: []string{"data plane"},
			Security: []map[string][]string{{"token": {}}}, Parameters: append([]*huma.Param{id}, params...), Responses: map[string]*huma.Response{},
		}
		if body != nil {
			o.RequestBody = &huma.RequestBody{Required: true, Content: body}
		}
		o.Responses[strconv.Itoa(ok)] = &huma.Response{Description: http.StatusText(ok), Content: content}
		for _, status := range []int{400, 401, 403, 404, 409, 410, 413, 429, 500, 503, 504} {
			o.Responses[strconv.Itoa(status)] = &huma.Response{Ref: errorResponse(status)}
		}
		return o
	}
	stream := map[string]*huma.MediaType{"application/vnd.space.frames": {Schema: raw}, "text/event-stream": {
		Schema:  text,
		Example: "id: 1.1\nevent: started\ndata: {\"pid\":12,\"at\":\"2026-01-02T03:04:05Z\"}\n\nid: 1.4\nevent: stdout\ndata: {\"b64\":\"NDIK\"}\n\n",
	}}
	base := "/d/sessions/{id}"
	d.Paths[base+"/attach"] = &huma.PathItem{Post: op("attach", "Start the command, once however many race, and stream its events", eventText, 200, stream, nil, last, after)}
	d.Paths[base+"/events"] = &huma.PathItem{Get: op("events", "Stream the events; starts nothing", eventText, 200, stream, nil, last, after)}
	d.Paths[base+"/stdin"] = &huma.PathItem{Post: op("stdin", "Send standard input",
		"The first byte of the body is at offset. What was accepted already is skipped; an offset ahead of it is 409 stdin_offset_ahead with expected set.",
		200, one("application/json", ref("StdinReply")), one("application/octet-stream", raw),
		&huma.Param{Name: "offset", In: "query", Schema: &huma.Schema{Type: "integer", Format: "int64", Minimum: new(float64)}, Description: "of the body's first byte; without it, where the accepted input ends"})}
	d.Paths[base+"/close-stdin"] = &huma.PathItem{Post: op("close-stdin", "End standard input", "", 200, one("application/json", ref("StdinReply")), nil)}
	d.Paths[base+"/signal"] = &huma.PathItem{Post: op("signal", "Send a signal", "", 204, nil, one("application/json", ref("Signal")))}
	d.Paths[base+"/resize"] = &huma.PathItem{Post: op("resize", "Set the terminal's size", "", 204, nil, one("application/json", ref("Size")))}
	ticket := op("ticket", "Trade the token for a ticket that opens one WebSocket, once, soon", "For browsers, which cannot send headers there.", 201, one("application/json", ref("Ticket")), nil)
	ticket.Parameters = nil
	d.Paths["/d/tickets"] = &huma.PathItem{Post: ticket}
	for _, name := range []string{"ws", "pty"} {
		d.Paths[base+"/"+name] = &huma.PathItem{Get: op(name, "Attach over a WebSocket, for terminals",
			"Messages from the server hold whole binary frames as of attach. A message from the client is one request: 1 stdin (offset of 8 bytes, then the bytes), 2 close-stdin, 3 signal (its name; + before it for the whole tree), 4 resize (rows and columns, 2 bytes each). Stdin and close-stdin are answered by a frame accepted (StdinReply), what fails by a frame problem.",
			101, nil, nil, &huma.Param{Name: "ticket", In: "query", Schema: text, Description: "instead of the token"}, after, last)}
	}
	box := &huma.Param{Name: "id", In: "path", Required: true, Schema: text, Description: "of the sandbox"}
	where := []*huma.Param{box,
		{Name: "path", In: "query", Schema: text, Description: "in the sandbox; bytes, percent-encoded"},
		{Name: "path_b64", In: "query", Schema: text, Description: "instead of path, base64, for names that are not text"},
		{Name: "user", In: "query", Schema: text, Description: "with whose rights; default the template's user"},
	}
	get := op("get-file", "Read a whole file", "Takes a data token with scope files:r or files:rw.", 200, one("application/octet-stream", raw), nil)
	get.Parameters = where
	get.Responses["200"].Headers = map[string]*huma.Param{"X-File-Mode": {Schema: text, Description: "permission bits, octal"}}
	put := op("put-file", "Replace a whole file, atomically", "Takes a data token with scope files:rw.", 204, nil, one("application/octet-stream", raw))
	put.Parameters = append(slices.Clone(where), &huma.Param{Name: "mode", In: "query", Schema: text, Description: "permission bits, octal", Example: "644"})
	d.Paths["/d/sandboxes/{id}/files"] = &huma.PathItem{Get: get, Put: put}
	for p, item := range d.Paths {
		if strings.HasPrefix(p, "/d/") {
			item.Servers = []*huma.Server{{URL: "http://127.0.0.1:7781", Description: "the data plane of a local installation"}}
		}
	}
	// huma names the schema of errors after its Go type.
	delete(r.Map(), "Failure")
	for name, schema := range r.Map() {
		if !slices.Contains(requests, name) {
			schema.AdditionalProperties = nil // answers may grow
		}
	}
	if p := r.Map()["Problem"]; p != nil {
		p.Examples = []any{spaceapi.Problem{
			Type: "about:blank", Title: "Conflict", Status: 409, Code: "sandbox_not_running", Detail: "the sandbox is stopped",
			Remedy: "wake it, then retry", RequestID: "req7f3k2",
		}}
	}
}

// Routes lists the control API's routes as "METHOD path", sorted, from the document.
func Routes() []string {
	s := &server{}
	s.register(http.NewServeMux())
	var out []string
	for p, item := range s.api.OpenAPI().Paths {
		for m := range operationsOf(item) {
			out = append(out, m+" "+p)
		}
	}
	slices.Sort(out)
	return out
}
