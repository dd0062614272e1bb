package guestclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
)

// Options of a Client; zero values are the defaults.
type Options struct {
	// CallTimeout bounds every call whose answer is one message; 0 = 30 s.
	CallTimeout time.Duration
	// IdleTimeout bounds how long a stream or transfer may stand still while we
	// wait for the guest; 0 = 30 s. The daemon sends a keepalive every 5 s.
	IdleTimeout time.Duration
}

// Client implements Guest.
type Client struct {
	opt    Options
	tr     *http.Transport
	base   context.Context
	cancel context.CancelFunc
}

var _ Guest = (*Client)(nil)

const (
	maxHeader     = 16 << 10
	maxID         = 128
	maxText       = 300 // bytes of a guest's error text that are kept
	transferAfter = time.Minute
)

// New makes a client over dial, which opens a fresh stream to the daemon each
// time, such as runtime.Machine.Dial.
func New(dial func(ctx context.Context) (net.Conn, error), o Options) *Client {
	if o.CallTimeout <= 0 {
		o.CallTimeout = 30 * time.Second
	}
	if o.IdleTimeout <= 0 {
		o.IdleTimeout = 30 * time.Second
	}
	base, cancel := context.WithCancel(context.Background())
	return &Client{
		opt: o, base: base, cancel: cancel,
		tr: &http.Transport{
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			DisableKeepAlives:      true, // a stream costs one frame; a stale one costs a lost call
			DisableCompression:     true,
			MaxResponseHeaderBytes: maxHeader,
			ReadBufferSize:         16 << 10,
			WriteBufferSize:        16 << 10,
		},
	}
}

// Close ends every open stream and call.
func (c *Client) Close() {
	c.cancel()
	c.tr.CloseIdleConnections()
}

func protocol(format string, args ...any) *fault.Error {
	return fault.New(fault.Unavailable, "guest_protocol_error", "the sandbox's guest daemon does not keep to the protocol").
		Because(format, args...).Retry(false).
		Do("treat what runs in the sandbox as hostile; stop and start it to get a fresh daemon")
}

var (
	errUnavailable = fault.New(fault.Unavailable, "guest_unavailable", "the sandbox's guest daemon cannot be reached").
			Do("retry; the daemon dials again within a second while the sandbox runs")
	errTimeout = fault.New(fault.Unavailable, "guest_timeout", "the sandbox's guest daemon did not answer in time").
			Do("retry; a sandbox that stays silent can be stopped and started")
)

// errIdle is the cause with which a stream that stands still is cancelled.
var errIdle = errors.New("guestclient: no progress")

// scope ends with ctx or the client, whichever is first.
func (c *Client) scope(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.base, func() { cancel(net.ErrClosed) })
	return ctx, func(err error) { stop(); cancel(err) }
}

// broken maps an error of the transport. caller is the caller's context, whose
// end is told as such; ctx the one that was in use.
func broken(caller, ctx context.Context, err error) error {
	switch {
	case caller.Err() != nil:
		f := errUnavailable
		if errors.Is(caller.Err(), context.DeadlineExceeded) {
			f = errTimeout
		}
		return f.Wrap(caller.Err())
	case errors.Is(context.Cause(ctx), errIdle), errors.Is(ctx.Err(), context.DeadlineExceeded):
		return errTimeout.Wrap(err)
	case errors.Is(err, guestapi.ErrProtocol):
		return protocol("its output stream is malformed").Wrap(err)
	case malformed(err):
		return protocol("its answer is not HTTP within our bounds").Wrap(err)
	}
	return errUnavailable.Wrap(err)
}

// malformed tells answers that net/http refused from connections that broke.
func malformed(err error) bool {
	s := err.Error()
	for _, part := range []string{"malformed", "server response headers exceeded", "too many 1xx", "bad Content-Length", "invalid byte in chunk length", "unsupported transfer encoding", "too many transfer encodings", "http chunk length too large", "trailer", "excessive data", "too much overhead", "invalid header", "line too long"} {
		if strings.Contains(s, part) {
			return true
		}
	}
	return false
}

func (c *Client) request(ctx context.Context, method, path string, q url.Values, body io.Reader, size int64) (*http.Response, error) {
	u := &url.URL{Scheme: "http", Host: "guest", Path: path, RawQuery: q.Encode()}
	if strings.Contains(path, "%") {
		p, err := url.PathUnescape(path)
		if err != nil {
			return nil, fault.New(fault.Internal, "internal", "a path for the guest is not well formed").Wrap(err)
		}
		u.Path, u.RawPath = p, path
	}
	r := &http.Request{Method: method, URL: u, Host: "guest", Header: http.Header{}, ContentLength: size}
	if body != nil {
		r.Body = io.NopCloser(body)
	}
	return c.tr.RoundTrip(r.WithContext(ctx))
}

// call does one call with JSON both ways; in and out may be nil. On a refusal
// it still fills out when the body fits, and returns the guest's error mapped.
func (c *Client) call(ctx context.Context, method, path string, q url.Values, in, out any, most int64, timeout time.Duration) error {
	var body []byte
	switch v := in.(type) {
	case nil:
	case []byte:
		body = v
	default:
		var err error
		if body, err = json.Marshal(in); err != nil {
			return fault.New(fault.Internal, "internal", "a message for the guest cannot be encoded").Wrap(err)
		}
		if len(body) > guestapi.MaxMessage {
			return fault.New(fault.TooLarge, "too_large", "the request to the guest has %d bytes", len(body)).
				Do("keep arguments and environment together below %d bytes", guestapi.MaxMessage)
		}
	}
	sctx, end := c.scope(ctx)
	defer end(nil)
	sctx, cancel := context.WithTimeout(sctx, timeout)
	defer cancel()
	resp, err := c.request(sctx, method, path, q, bytes.NewReader(body), int64(len(body)))
	if err != nil {
		return broken(ctx, sctx, err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	if err != nil {
		return broken(ctx, sctx, err)
	}
	if int64(len(b)) > most {
		return protocol("an answer is longer than %d bytes", most)
	}
	if resp.StatusCode != http.StatusOK {
		err := refusal(resp.StatusCode, b)
		if out != nil && !fault.IsCode(err, "guest_protocol_error") {
			_ = json.Unmarshal(b, out)
		}
		return err
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return protocol("an answer is not the JSON expected").Wrap(err)
	}
	return nil
}

// known is the closed list of codes that a guest may answer, with our class.
var known = map[string]fault.Class{
	guestapi.CodeInvalid:          fault.Invalid,
	guestapi.CodeNoSuchProcess:    fault.NotFound,
	guestapi.CodeProcessEnded:     fault.Conflict,
	guestapi.CodeProcessRunning:   fault.Conflict,
	guestapi.CodeNoTerminal:       fault.Conflict,
	guestapi.CodeStdinAhead:       fault.Conflict,
	guestapi.CodeOffsetAhead:      fault.Conflict,
	guestapi.CodeTooManyProcesses: fault.Exhausted,
	guestapi.CodeStartFailed:      fault.Invalid,
	guestapi.CodeNotExecutable:    fault.Invalid,
	guestapi.CodeNotFound:         fault.NotFound,
	guestapi.CodeNoSuchUser:       fault.Invalid,
	guestapi.CodeBadCwd:           fault.Invalid,
	guestapi.CodeProcessLimit:     fault.Exhausted,
	guestapi.CodeArgsTooLong:      fault.Invalid,
	guestapi.CodeNoMemory:         fault.Exhausted,
	guestapi.CodeNoSpace:          fault.Exhausted,
	guestapi.CodePermissionDenied: fault.Denied,
	guestapi.CodeIsDirectory:      fault.Conflict,
	guestapi.CodeNotRegular:       fault.Conflict,
	guestapi.CodeIO:               fault.Unavailable,
}

func refusal(status int, body []byte) error {
	var e guestapi.Error
	if status < 400 || json.Unmarshal(body, &e) != nil {
		return protocol("it answered status %d without an error", status)
	}
	class, ok := known[e.Code]
	if !ok {
		return protocol("it answered the unknown code %q", clean(e.Code))
	}
	if status == http.StatusUnprocessableEntity && class == fault.NotFound {
		class = fault.Invalid // a missing program is not a missing resource of the API
	}
	return fault.New(class, e.Code, "the sandbox refused: %s", clean(e.Message))
}

// IsStartFailure reports whether err says that a process was not started and
// that none with its id exists: there is no exit to wait for.
func IsStartFailure(err error) bool {
	for _, code := range []string{
		guestapi.CodeStartFailed, guestapi.CodeNotExecutable, guestapi.CodeNotFound, guestapi.CodeNoSuchUser, guestapi.CodeBadCwd,
		guestapi.CodeProcessLimit, guestapi.CodeArgsTooLong, guestapi.CodeNoMemory, guestapi.CodeTooManyProcesses, guestapi.CodeInvalid,
	} {
		if fault.IsCode(err, code) {
			return true
		}
	}
	return false
}

// clean makes a guest's text fit for logs and answers: short and printable.
func clean(s string) string {
	if len(s) > maxText {
		s = s[:maxText]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd || (r >= 0x80 && r < 0xa0) || (r >= 0x2028 && r <= 0x202e) {
			return '?'
		}
		return r
	}, s)
}

func of(pattern, id string) string {
	return strings.Replace(pattern, "{id}", url.PathEscape(id), 1)
}

// Hello implements Guest.
func (c *Client) Hello(ctx context.Context) (guestapi.HelloReply, error) {
	var r guestapi.HelloReply
	h := guestapi.Hello{Version: guestapi.Version, Nonce: sandbox.Random(24)}
	if err := c.call(ctx, "POST", guestapi.PathHello, nil, h, &r, guestapi.MaxMessage, c.opt.CallTimeout); err != nil {
		return guestapi.HelloReply{}, err
	}
	switch {
	case r.Nonce != h.Nonce:
		return guestapi.HelloReply{}, protocol("it answered another one's hello")
	case r.Version < max(1, guestapi.Version-1) || r.Version > guestapi.Version:
		return guestapi.HelloReply{}, protocol("it speaks version %d, we speak %d", r.Version, guestapi.Version)
	case r.BootEpoch == "" || len(r.BootEpoch) > 64 || r.BootEpoch != clean(r.BootEpoch):
		return guestapi.HelloReply{}, protocol("its boot epoch is malformed")
	}
	r.Daemon = clean(r.Daemon)
	return r, nil
}

// Configure implements Guest.
func (c *Client) Configure(ctx context.Context, conf guestapi.Configure) error {
	return c.call(ctx, "POST", guestapi.PathConfigure, nil, conf, nil, guestapi.MaxMessage, c.opt.CallTimeout)
}

// Start implements Guest.
func (c *Client) Start(ctx context.Context, s guestapi.Start) (guestapi.Process, error) {
	return c.process(ctx, "POST", guestapi.PathProcesses, s, s.ID)
}

// Process implements Guest.
func (c *Client) Process(ctx context.Context, id string) (guestapi.Process, error) {
	return c.process(ctx, "GET", of(guestapi.PathProcess, id), nil, id)
}

func (c *Client) process(ctx context.Context, method, path string, in any, id string) (guestapi.Process, error) {
	var p guestapi.Process
	if err := c.call(ctx, method, path, nil, in, &p, guestapi.MaxMessage, c.opt.CallTimeout); err != nil {
		return guestapi.Process{}, err
	}
	if p.ID != id {
		return guestapi.Process{}, protocol("it answered about another process")
	}
	return p, check(p)
}

func check(p guestapi.Process) error {
	switch {
	case p.PID <= 0:
		return protocol("a process has pid %d", p.PID)
	case p.Base > p.Next || p.Next > math.MaxInt64 || p.StdinOffset > math.MaxInt64:
		return protocol("a process's offsets contradict one another")
	case p.State == guestapi.ProcessRunning && p.Exit == nil:
		return nil
	case p.State == guestapi.ProcessExited && p.Exit != nil:
		if err := p.Exit.Validate(); err != nil {
			return protocol("an exit that no process can have").Wrap(err)
		}
		return nil
	}
	return protocol("a process's state %q contradicts its exit", clean(string(p.State)))
}

// Processes implements Guest.
func (c *Client) Processes(ctx context.Context) ([]guestapi.Process, error) {
	var l guestapi.ProcessList
	if err := c.call(ctx, "GET", guestapi.PathProcesses, nil, nil, &l, guestapi.MaxList, c.opt.CallTimeout); err != nil {
		return nil, err
	}
	if len(l.Processes) > guestapi.MaxProcesses {
		return nil, protocol("it lists %d processes", len(l.Processes))
	}
	seen := make(map[string]bool, len(l.Processes))
	for _, p := range l.Processes {
		if p.ID == "" || len(p.ID) > maxID || seen[p.ID] {
			return nil, protocol("its list has a bad or a double id")
		}
		seen[p.ID] = true
		if err := check(p); err != nil {
			return nil, err
		}
	}
	return l.Processes, nil
}

// Ack implements Guest.
func (c *Client) Ack(ctx context.Context, id string, offset uint64) error {
	return c.call(ctx, "POST", of(guestapi.PathAck, id), nil, guestapi.Ack{Offset: offset}, nil, guestapi.MaxMessage, c.opt.CallTimeout)
}

// Stdin implements Guest.
func (c *Client) Stdin(ctx context.Context, id string, offset uint64, p []byte) (guestapi.StdinReply, error) {
	if len(p) > guestapi.MaxStdinChunk {
		return guestapi.StdinReply{}, fault.New(fault.TooLarge, "too_large", "a stdin chunk has %d bytes", len(p)).
			Do("send at most %d bytes at once", guestapi.MaxStdinChunk)
	}
	wait := StdinWait
	if end, ok := ctx.Deadline(); ok {
		// Leave time for the answer: what was accepted must not be lost with the call.
		wait = max(0, min(wait, time.Until(end)*3/4))
	}
	q := url.Values{"offset": {strconv.FormatUint(offset, 10)}, "wait": {wait.String()}}
	var r guestapi.StdinReply
	err := c.call(ctx, "POST", of(guestapi.PathStdin, id), q, p, &r, guestapi.MaxMessage, wait+c.opt.CallTimeout)
	if fault.IsCode(err, guestapi.CodeStdinAhead) {
		f := *fault.Of(err)
		f.Expected = &r.Accepted
		return r, &f
	}
	if err != nil {
		return guestapi.StdinReply{}, err
	}
	if r.Accepted < offset || r.Accepted > math.MaxInt64 {
		return guestapi.StdinReply{}, protocol("it accepted stdin up to %d when offered from %d", r.Accepted, offset)
	}
	return r, nil
}

// CloseStdin implements Guest.
func (c *Client) CloseStdin(ctx context.Context, id string) (guestapi.StdinReply, error) {
	var r guestapi.StdinReply
	err := c.call(ctx, "POST", of(guestapi.PathCloseStdin, id), nil, nil, &r, guestapi.MaxMessage, c.opt.CallTimeout)
	return r, err
}

// Signal implements Guest.
func (c *Client) Signal(ctx context.Context, id, sig string, tree bool) error {
	return c.call(ctx, "POST", of(guestapi.PathSignal, id), nil, guestapi.Signal{Signal: sig, Tree: tree}, nil, guestapi.MaxMessage, c.opt.CallTimeout)
}

// Resize implements Guest.
func (c *Client) Resize(ctx context.Context, id string, size guestapi.Size) error {
	return c.call(ctx, "POST", of(guestapi.PathResize, id), nil, size, nil, guestapi.MaxMessage, c.opt.CallTimeout)
}

// Forget implements Guest.
func (c *Client) Forget(ctx context.Context, id string) error {
	err := c.call(ctx, "DELETE", of(guestapi.PathProcess, id), nil, nil, nil, guestapi.MaxMessage, c.opt.CallTimeout)
	if fault.IsCode(err, guestapi.CodeNoSuchProcess) {
		return nil
	}
	return err
}

// Stats implements Guest.
func (c *Client) Stats(ctx context.Context) (guestapi.Stats, error) {
	var s guestapi.Stats
	err := c.call(ctx, "GET", guestapi.PathStats, nil, nil, &s, guestapi.MaxMessage, c.opt.CallTimeout)
	if err == nil && (s.Processes < 0 || s.CPUs < 0) {
		return guestapi.Stats{}, protocol("negative counts")
	}
	return s, err
}

// Shutdown implements Guest.
func (c *Client) Shutdown(ctx context.Context) error {
	return c.call(ctx, "POST", guestapi.PathShutdown, nil, nil, nil, guestapi.MaxMessage, c.opt.CallTimeout)
}
