// Package client is the Go client of a SPACE server: control calls and command
// streams that reconnect by themselves without losing or repeating a byte.
//
// Every mutation carries an idempotency key that the client makes when the
// caller gives none, so that a call which failed on the way is repeated safely.
// Exec alone is sent once. Calls end when their context ends.
package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/space-platform/space/api/spaceapi"
)

// maxBody bounds an answer that is read whole: 64 MiB, above the largest exec result.
const maxBody = 64 << 20

// maxRetryAfter is the longest wait, in seconds, that a call makes by itself
// because a server asks for it.
const maxRetryAfter = 60

// maxWait is the longest wait that a server is asked for.
const maxWait = time.Minute

// Client speaks to one server with one key. It is safe for concurrent use.
type Client struct {
	base string
	key  string
	http *http.Client
	// attempts is how often a safe call is tried in all.
	attempts int
	// stall is how long a stream may be silent before it counts as dead.
	stall time.Duration
}

// Option changes a Client at construction.
type Option func(*Client)

// WithHTTPClient replaces the HTTP client. It must not have an overall timeout,
// since streams live long.
func WithHTTPClient(h *http.Client) Option { return func(c *Client) { c.http = h } }

// WithAttempts sets how often a call that is safe to repeat is tried (default 4).
func WithAttempts(n int) Option { return func(c *Client) { c.attempts = max(n, 1) } }

// WithStreamStall sets how long a stream may be silent (events and keepalives)
// before it counts as dead and is opened anew: by default 35 s, three keepalives.
func WithStreamStall(d time.Duration) Option { return func(c *Client) { c.stall = d } }

// New makes a client for the control API at base ("http://127.0.0.1:7780").
func New(base, key string, opts ...Option) *Client {
	c := &Client{base: strings.TrimRight(base, "/"), key: key, attempts: 4, stall: 35 * time.Second}
	for _, o := range opts {
		o(c)
	}
	if c.http == nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		t.MaxIdleConnsPerHost = 64
		t.Proxy = nil // the key goes to the named server and nowhere else
		c.http = &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	return c
}

// Error is an answer of the server that is not a success.
type Error struct{ spaceapi.Problem }

// Error implements error: what happened, why, what to do.
func (e *Error) Error() string {
	s := e.Detail
	if s == "" {
		s = e.Title
	}
	if e.Cause != "" {
		s += ": " + e.Cause
	}
	if e.Remedy != "" {
		s += " (" + e.Remedy + ")"
	}
	return s + " [" + e.Code + "]"
}

// Code gives the stable code of a server error inside err, or "".
func Code(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// CallOption changes one call.
type CallOption func(*call)

type call struct {
	idem string
	wait time.Duration
	// once: never sent twice. No idempotency key either: net/http repeats by itself
	// what has one.
	once bool
}

// IdempotencyKey names the mutation, so that a repeat by another process is the same one.
func IdempotencyKey(k string) CallOption { return func(c *call) { c.idem = k } }

// Wait lets the server hold the answer until the operation ended, at most d.
func Wait(d time.Duration) CallOption { return func(c *call) { c.wait = d } }

func newKey() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails (crypto/rand)
	return hex.EncodeToString(b)
}

// do sends a control call. Every call that reaches it is safe to repeat: reads,
// and mutations under an idempotency key.
func (c *Client) do(ctx context.Context, method, path string, q url.Values, in, out any, opts ...CallOption) error {
	var o call
	for _, f := range opts {
		f(&o)
	}
	if o.wait > 0 {
		if q == nil {
			q = url.Values{}
		}
		// Servers bound it; a longer one is not refused.
		q.Set("wait", strconv.FormatInt(min(o.wait, maxWait).Milliseconds(), 10)+"ms")
	}
	if len(q) > 0 {
		path += "?" + q.Encode()
	}
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return fmt.Errorf("client: %w", err)
		}
	}
	if method != http.MethodGet && o.idem == "" && !o.once {
		o.idem = newKey()
	}
	var err error
	for try := 1; ; try++ {
		var again time.Duration
		again, err = c.once(ctx, method, c.base+path, body, o.idem, out)
		if err == nil || again < 0 || try >= c.attempts || o.once || ctx.Err() != nil {
			return err
		}
		if again == 0 {
			again = time.Duration(try*try) * 50 * time.Millisecond
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(again):
		}
	}
}

// once tries a call. again < 0 means: do not repeat; 0: repeat soon; else after that time.
func (c *Client) once(ctx context.Context, method, u string, body []byte, idem string, out any) (again time.Duration, err error) {
	var rd io.Reader
	if body != nil {
		rd = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, u, rd)
	if err != nil {
		return -1, fmt.Errorf("client: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+c.key)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if idem != "" {
		req.Header.Set(spaceapi.HeaderIdempotencyKey, idem)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, fmt.Errorf("client: %w", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil {
		return 0, fmt.Errorf("client: read answer: %w", err)
	}
	if len(b) > maxBody {
		return -1, errors.New("client: answer is larger than 64 MiB")
	}
	if resp.StatusCode >= 300 {
		e := problemOf(resp, b)
		again = -1
		switch resp.StatusCode {
		case http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
			if e.Retryable || e.Code == "" {
				again = 0
			}
			if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && again == 0 {
				if again = time.Duration(s) * time.Second; s < 0 || s > maxRetryAfter {
					again = -1 // the caller decides whether to wait that long
				}
			}
		}
		return again, e
	}
	if out == nil || len(b) == 0 {
		return -1, nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return -1, fmt.Errorf("client: answer is not what the API says: %w", err)
	}
	return -1, nil
}

func problemOf(resp *http.Response, b []byte) *Error {
	e := &Error{}
	if json.Unmarshal(b, &e.Problem) != nil || (e.Code == "" && e.Detail == "") {
		e.Problem = spaceapi.Problem{Title: resp.Status, Detail: "the server answered " + resp.Status}
	}
	e.Status = resp.StatusCode
	return e
}

func seg(s string) string { return url.PathEscape(s) }

// CreateSandbox asks for a sandbox. Without Wait the answer comes as soon as the
// intent is durable.
func (c *Client) CreateSandbox(ctx context.Context, in spaceapi.CreateSandbox, opts ...CallOption) (out spaceapi.Mutation, err error) {
	return out, c.do(ctx, "POST", "/v1/sandboxes", nil, in, &out, opts...)
}

// Sandbox gets one by id or name.
func (c *Client) Sandbox(ctx context.Context, id string) (out spaceapi.Sandbox, err error) {
	return out, c.do(ctx, "GET", "/v1/sandboxes/"+seg(id), nil, nil, &out)
}

// ListOptions narrow a list.
type ListOptions struct {
	States   []string
	Metadata map[string]string
	Sandbox  string // operations and sessions of one sandbox
	Cursor   string
	Limit    int
}

func (o ListOptions) values() url.Values {
	q := url.Values{}
	for _, s := range o.States {
		q.Add("state", s)
	}
	for k, v := range o.Metadata {
		q.Add("metadata", k+"="+v)
	}
	if o.Sandbox != "" {
		q.Set("sandbox", o.Sandbox)
	}
	if o.Cursor != "" {
		q.Set("cursor", o.Cursor)
	}
	if o.Limit > 0 {
		q.Set("limit", strconv.Itoa(o.Limit))
	}
	return q
}

// Sandboxes lists one page.
func (c *Client) Sandboxes(ctx context.Context, o ListOptions) (out spaceapi.List[spaceapi.Sandbox], err error) {
	return out, c.do(ctx, "GET", "/v1/sandboxes", o.values(), nil, &out)
}

// PatchSandbox changes policy or metadata.
func (c *Client) PatchSandbox(ctx context.Context, id string, in spaceapi.PatchSandbox, opts ...CallOption) (out spaceapi.Mutation, err error) {
	return out, c.do(ctx, "PATCH", "/v1/sandboxes/"+seg(id), nil, in, &out, opts...)
}

// DeleteSandbox deletes it, whatever it does.
func (c *Client) DeleteSandbox(ctx context.Context, id string, opts ...CallOption) (out spaceapi.Mutation, err error) {
	return out, c.do(ctx, "DELETE", "/v1/sandboxes/"+seg(id), nil, nil, &out, opts...)
}

// Lifecycle asks for a verb: pause, resume, stop, start, wake, …
func (c *Client) Lifecycle(ctx context.Context, id, verb string, opts ...CallOption) (out spaceapi.Mutation, err error) {
	return out, c.do(ctx, "POST", "/v1/sandboxes/"+seg(id)+"/"+seg(verb), nil, nil, &out, opts...)
}

// SandboxStats measures one sandbox.
func (c *Client) SandboxStats(ctx context.Context, id string) (out spaceapi.Stats, err error) {
	return out, c.do(ctx, "GET", "/v1/sandboxes/"+seg(id)+"/stats", nil, nil, &out)
}

// Operation gets one; with Wait it is held until the operation ended.
func (c *Client) Operation(ctx context.Context, id string, opts ...CallOption) (out spaceapi.Operation, err error) {
	return out, c.do(ctx, "GET", "/v1/operations/"+seg(id), nil, nil, &out, opts...)
}

// Operations lists one page, newest first.
func (c *Client) Operations(ctx context.Context, o ListOptions) (out spaceapi.List[spaceapi.Operation], err error) {
	return out, c.do(ctx, "GET", "/v1/operations", o.values(), nil, &out)
}

// CancelOperation cancels an open operation.
func (c *Client) CancelOperation(ctx context.Context, id string, opts ...CallOption) (out spaceapi.Operation, err error) {
	return out, c.do(ctx, "POST", "/v1/operations/"+seg(id)+"/cancel", nil, nil, &out, opts...)
}

// AwaitOperation waits until the operation ended and turns a failed or
// cancelled one into an error.
func (c *Client) AwaitOperation(ctx context.Context, op spaceapi.Operation) (spaceapi.Operation, error) {
	for {
		switch op.State {
		case "succeeded":
			return op, nil
		case "failed":
			e := &Error{}
			if op.Error != nil {
				e.Problem = *op.Error
			}
			return op, e
		case "cancelled":
			return op, &Error{spaceapi.Problem{Code: "operation_cancelled", Detail: "the operation was cancelled", Cause: op.SupersededBy}}
		}
		began := time.Now()
		next, err := c.Operation(ctx, op.ID, Wait(20*time.Second))
		if err != nil {
			return op, err
		}
		op = next
		if time.Since(began) < 50*time.Millisecond { // a server that does not wait is not hammered
			select {
			case <-ctx.Done():
				return op, ctx.Err()
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
}

// CreateSession makes a command session; nothing runs until Attach.
func (c *Client) CreateSession(ctx context.Context, sandbox string, in spaceapi.CreateSession, opts ...CallOption) (out spaceapi.SessionCreated, err error) {
	return out, c.do(ctx, "POST", "/v1/sandboxes/"+seg(sandbox)+"/sessions", nil, in, &out, opts...)
}

// Session gets one.
func (c *Client) Session(ctx context.Context, id string) (out spaceapi.Session, err error) {
	return out, c.do(ctx, "GET", "/v1/sessions/"+seg(id), nil, nil, &out)
}

// Sessions lists one page of a sandbox's sessions.
func (c *Client) Sessions(ctx context.Context, sandbox string, o ListOptions) (out spaceapi.List[spaceapi.Session], err error) {
	return out, c.do(ctx, "GET", "/v1/sandboxes/"+seg(sandbox)+"/sessions", o.values(), nil, &out)
}

// KillSession ends the command's process tree.
func (c *Client) KillSession(ctx context.Context, id string) (out spaceapi.Session, err error) {
	return out, c.do(ctx, "DELETE", "/v1/sessions/"+seg(id), nil, nil, &out)
}

// MintAttach makes a new attach token of a session.
func (c *Client) MintAttach(ctx context.Context, session string) (out spaceapi.Attach, err error) {
	return out, c.do(ctx, "POST", "/v1/sessions/"+seg(session)+"/tokens", nil, nil, &out)
}

// RevokeAttach revokes all attach tokens of a session and cuts their streams.
func (c *Client) RevokeAttach(ctx context.Context, session string) error {
	return c.do(ctx, "DELETE", "/v1/sessions/"+seg(session)+"/tokens", nil, nil, nil)
}

// Exec runs a command and returns its whole result. When ctx ends first the
// command is killed by the server, and the request is sent once: after a lost
// answer nobody knows whether the command ran.
//
// With IdempotencyKey the command runs once however often it is asked for, goes
// on when ctx ends first, and a repeat with the same key collects its result.
func (c *Client) Exec(ctx context.Context, sandbox string, in spaceapi.Exec, opts ...CallOption) (out spaceapi.ExecResult, err error) {
	var o call
	for _, f := range opts {
		f(&o)
	}
	if o.idem == "" {
		opts = append(slices.Clone(opts), func(o *call) { o.once = true })
	}
	return out, c.do(ctx, "POST", "/v1/sandboxes/"+seg(sandbox)+"/exec", nil, in, &out, opts...)
}

// MintToken makes a data token of a sandbox.
func (c *Client) MintToken(ctx context.Context, sandbox string, in spaceapi.MintToken) (out spaceapi.Token, err error) {
	return out, c.do(ctx, "POST", "/v1/sandboxes/"+seg(sandbox)+"/tokens", nil, in, &out)
}

// MintKey makes an API key, not wider than the caller's own.
func (c *Client) MintKey(ctx context.Context, in spaceapi.MintKey, opts ...CallOption) (out spaceapi.Key, err error) {
	return out, c.do(ctx, "POST", "/v1/keys", nil, in, &out, opts...)
}

// Keys lists one page.
func (c *Client) Keys(ctx context.Context, o ListOptions) (out spaceapi.List[spaceapi.Key], err error) {
	return out, c.do(ctx, "GET", "/v1/keys", o.values(), nil, &out)
}

// RevokeKey revokes a key and cuts its streams.
func (c *Client) RevokeKey(ctx context.Context, id string) (out spaceapi.Key, err error) {
	return out, c.do(ctx, "DELETE", "/v1/keys/"+seg(id), nil, nil, &out)
}

// Templates lists what is installed.
func (c *Client) Templates(ctx context.Context) (out spaceapi.List[spaceapi.Template], err error) {
	return out, c.do(ctx, "GET", "/v1/templates", nil, nil, &out)
}

// Template gets one by name:tag or digest.
func (c *Client) Template(ctx context.Context, ref string) (out spaceapi.Template, err error) {
	return out, c.do(ctx, "GET", "/v1/templates/"+seg(ref), nil, nil, &out)
}

// Audit lists one page of the tenant's audit records, newest first. Chain is
// "control" (what was asked for; the default) or "node" (what sandboxes and
// sessions did).
func (c *Client) Audit(ctx context.Context, chain string, o ListOptions) (out spaceapi.List[spaceapi.AuditRecord], err error) {
	q := o.values()
	if chain != "" {
		q.Set("chain", chain)
	}
	return out, c.do(ctx, "GET", "/v1/audit", q, nil, &out)
}

// Nodes lists the nodes.
func (c *Client) Nodes(ctx context.Context) (out spaceapi.List[spaceapi.Node], err error) {
	return out, c.do(ctx, "GET", "/v1/nodes", nil, nil, &out)
}

// Health asks whether the server serves; it needs no key.
func (c *Client) Health(ctx context.Context) (out spaceapi.Health, err error) {
	return out, c.do(ctx, "GET", "/v1/health", nil, nil, &out)
}
