package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/space-platform/space/api/spaceapi"
)

// Stream reads one session's events in order, each once, over as many
// connections as it takes. Next is for one goroutine; the other methods may be
// called from any.
type Stream struct {
	c       *Client
	session string

	mu         sync.Mutex
	attach     spaceapi.Attach // guarded by mu
	last       string          // id of the last event given; guarded by mu
	body       io.Closer       // of the open connection; guarded by mu
	reconnects int             // guarded by mu
	closed     bool            // guarded by mu

	// Of Next's goroutine only.
	rd      *bufio.Reader
	started bool // the first attach got through
	ended   bool
	refusal int // answers in a row that promise nothing

	stdinMu sync.Mutex
	stdin   uint64 // bytes accepted; guarded by stdinMu
}

// Attach opens the stream of a session from its first event; the first
// connection starts the process.
func (c *Client) Attach(s spaceapi.SessionCreated) *Stream {
	return &Stream{c: c, session: s.Session.ID, attach: s.Attach}
}

// Follow opens the stream of a session that may be running already. after is
// the id of the last event seen, "" for all that is kept. It mints a token. A
// session that was not attached before is started by the first Next.
func (c *Client) Follow(ctx context.Context, session, after string) (*Stream, error) {
	a, err := c.MintAttach(ctx, session)
	if err != nil {
		return nil, err
	}
	s, err := c.Session(ctx, session)
	if err != nil {
		return nil, err
	}
	return &Stream{c: c, session: session, attach: a, last: after, started: s.State != "created", stdin: s.StdinOffset}, nil
}

// errFinal marks errors that reconnecting cannot mend.
type errFinal struct{ error }

func (e errFinal) Unwrap() error { return e.error }

func isFinal(err error) bool {
	var f errFinal
	return errors.As(err, &f)
}

// maxRefusals is how often in a row a server may fail in a way that promises
// nothing (a 5xx that is not retryable) before it is believed.
const maxRefusals = 5

// backoff waits between tries, longer each time, up to a second.
type backoff time.Duration

func (b *backoff) wait(ctx context.Context) error {
	if *b == 0 {
		*b = backoff(20 * time.Millisecond)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Duration(*b)):
	}
	*b = min(2**b, backoff(time.Second))
	return nil
}

// Next gives the next event, reconnecting as often as needed until ctx ends.
// io.EOF follows the last event (exit, or error), and Close.
func (s *Stream) Next(ctx context.Context) (Event, error) {
	var pause backoff
	for {
		if err := ctx.Err(); err != nil {
			return Event{}, err
		}
		if s.ended || s.isClosed() {
			return Event{}, io.EOF
		}
		if s.rd == nil {
			if err := s.open(ctx); err != nil {
				if isFinal(err) {
					return Event{}, err
				}
				if err := pause.wait(ctx); err != nil {
					return Event{}, err
				}
				continue
			}
		}
		ev, err := s.read(ctx)
		if err == nil && ev.Type == eventInterrupted {
			err = ev.interruption()
		}
		if err == nil {
			if err = ev.follows(s.Last()); err != nil {
				err = errFinal{err}
			}
		}
		if err == nil {
			s.given(ev)
			return ev, nil
		}
		s.hangUp()
		s.mu.Lock()
		s.reconnects++
		s.mu.Unlock()
		switch {
		case ctx.Err() != nil:
			return Event{}, ctx.Err()
		case isFinal(err):
			s.ended = true
			return Event{}, err
		}
		// A server that opens streams and breaks them at once is not to be hammered.
		if err := pause.wait(ctx); err != nil {
			return Event{}, err
		}
	}
}

func (s *Stream) given(ev Event) {
	s.mu.Lock()
	s.last = ev.ID
	s.mu.Unlock()
	s.refusal = 0
	if ev.Type == spaceapi.EventExit || ev.Type == spaceapi.EventError {
		s.ended = true
		s.hangUp()
	}
}

// interruption gives why the server cut the stream: final only when coming back
// cannot help. A revoked token can be replaced.
func (e Event) interruption() error {
	p := &Error{}
	if err := json.Unmarshal(e.Raw, &p.Problem); err != nil {
		return fmt.Errorf("%w: %w", errStreamBroken, err)
	}
	if p.Retryable || p.Status == http.StatusUnauthorized {
		return p
	}
	return errFinal{p}
}

// Last is the id of the last event given.
func (s *Stream) Last() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// Reconnects counts connections after the first.
func (s *Stream) Reconnects() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reconnects
}

// Close hangs up; the process goes on. A Next that waits ends with io.EOF.
func (s *Stream) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.Drop()
}

func (s *Stream) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Drop cuts the present connection; Next opens another one.
func (s *Stream) Drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.body != nil {
		_ = s.body.Close()
	}
}

func (s *Stream) hangUp() {
	s.Drop()
	s.mu.Lock()
	s.body = nil
	s.mu.Unlock()
	s.rd = nil
}

func (s *Stream) request(ctx context.Context, method, path string, body []byte, last string) (*http.Response, error) {
	s.mu.Lock()
	a := s.attach
	s.mu.Unlock()
	var rd io.Reader
	if body != nil {
		rd = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.URL+path, rd)
	if err != nil {
		return nil, errFinal{fmt.Errorf("client: %w", err)}
	}
	req.Header.Set("Authorization", "Bearer "+a.Token)
	if last != "" {
		req.Header.Set(spaceapi.HeaderLastEventID, last)
	}
	resp, err := s.c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	return resp, nil
}

func (s *Stream) open(ctx context.Context) error {
	method, path := http.MethodGet, "/events"
	if !s.started {
		method, path = http.MethodPost, "/attach"
	}
	// The connection outlives this call's context; only its opening ends with it. A
	// server that does not answer is as dead as a stream that is silent.
	octx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	timer := time.AfterFunc(s.c.stall, cancel)
	resp, err := s.request(octx, method, path, nil, s.Last())
	if err != nil {
		cancel()
		return err
	}
	if !timer.Stop() || !stop() {
		cancel()
		_ = resp.Body.Close()
		return errors.New("client: the server did not answer in time")
	}
	if resp.StatusCode != http.StatusOK {
		defer cancel()
		return s.refused(ctx, resp)
	}
	s.started = true
	s.mu.Lock()
	defer s.mu.Unlock()
	s.body = connection{resp.Body, cancel}
	s.rd = bufio.NewReaderSize(resp.Body, maxLine)
	if s.closed {
		_ = s.body.Close()
	}
	return nil
}

// connection ends its request when it is closed, so that a read that waits ends,
// too.
type connection struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (c connection) Close() error {
	c.cancel()
	return c.ReadCloser.Close()
}

// refused decides what a refusal to open means: a new token mends 401, time
// mends 429 and 5xx, nothing mends the rest.
func (s *Stream) refused(ctx context.Context, resp *http.Response) error {
	e := readProblem(resp)
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		if s.refusal++; s.refusal > maxRefusals {
			return errFinal{e} // our new tokens are refused, too
		}
		return s.renew(ctx)
	case e.Retryable:
		return e
	case resp.StatusCode >= 500:
		if s.refusal++; s.refusal <= maxRefusals {
			return e
		}
	}
	return errFinal{e}
}

// renew takes a new attach token. Its error is final when the server refuses.
func (s *Stream) renew(ctx context.Context) error {
	a, err := s.c.MintAttach(ctx, s.session)
	if err != nil {
		var e *Error
		if errors.As(err, &e) && !e.Retryable && e.Status < 500 {
			return errFinal{err}
		}
		return err
	}
	s.mu.Lock()
	s.attach = a
	s.mu.Unlock()
	return errRenewed
}

// errRenewed says that the request is to be sent again, with the new token.
var errRenewed = errors.New("client: the attach token was renewed")

func readProblem(resp *http.Response) *Error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20)) // what is there must do
	_ = resp.Body.Close()
	return problemOf(resp, b)
}

func (s *Stream) read(ctx context.Context) (Event, error) {
	s.mu.Lock()
	body := s.body
	s.mu.Unlock()
	timer := time.AfterFunc(s.c.stall, func() { _ = body.Close() })
	defer timer.Stop()
	stop := context.AfterFunc(ctx, func() { _ = body.Close() })
	defer stop()
	return scan(s.rd, func() { timer.Reset(s.c.stall) })
}

// post sends one call of the data plane, with a new token where the old one has
// ended.
func (s *Stream) post(ctx context.Context, path string, body []byte, out any) error {
	for try := 0; ; try++ {
		resp, err := s.request(ctx, http.MethodPost, path, body, "")
		if err != nil {
			return err
		}
		if resp.StatusCode == http.StatusUnauthorized && try == 0 {
			_ = resp.Body.Close()
			if err := s.renew(ctx); !errors.Is(err, errRenewed) {
				return err
			}
			continue
		}
		if resp.StatusCode >= 300 {
			return readProblem(resp)
		}
		defer func() { _ = resp.Body.Close() }()
		if out == nil {
			return nil
		}
		if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(out); err != nil {
			return fmt.Errorf("client: answer is not what the API says: %w", err)
		}
		return nil
	}
}

// again reports whether a call that is safe to repeat may succeed later.
func again(err error) bool {
	var e *Error
	if errors.As(err, &e) {
		return e.Retryable
	}
	return !isFinal(err) // the connection broke
}

// ErrStdinClosed is given by Write when the process takes no more input.
var ErrStdinClosed = errors.New("client: the process takes no more standard input")

// stdinPiece is how much one request of Write carries.
const stdinPiece = 256 << 10

// Write sends p to the process's standard input, whole, and returns when the
// process's side has it all. It waits while the process does not read, and
// repeats what a broken connection left open until ctx ends; the offset keeps
// every byte exactly once. It is the only writer of this session's input.
func (s *Stream) Write(ctx context.Context, p []byte) error {
	s.stdinMu.Lock()
	defer s.stdinMu.Unlock()
	end := s.stdin + uint64(len(p))
	var pause backoff
	for s.stdin < end {
		rest := p[len(p)-int(end-s.stdin):]
		rest = rest[:min(len(rest), stdinPiece)]
		var out spaceapi.StdinReply
		err := s.post(ctx, "/stdin?offset="+strconv.FormatUint(s.stdin, 10), rest, &out)
		switch {
		case err == nil && (out.Accepted < s.stdin || out.Accepted > end):
			return fmt.Errorf("client: the server says that %d bytes of standard input were accepted; %d were sent before, %d are now", out.Accepted, s.stdin, end)
		case err == nil && out.Closed && out.Accepted < end:
			s.stdin = out.Accepted
			return ErrStdinClosed
		case err == nil && out.Accepted > s.stdin:
			s.stdin, pause = out.Accepted, 0
			continue
		case err != nil && (ctx.Err() != nil || !again(err)):
			return err
		}
		if err := pause.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// CloseStdin ends the process's standard input. Closing it twice is no error. A
// session that ended after a try whose answer was lost took it.
func (s *Stream) CloseStdin(ctx context.Context) error {
	var pause backoff
	for try := 0; ; try++ {
		err := s.post(ctx, "/close-stdin", nil, nil)
		if try > 0 && Code(err) == "session_ended" {
			return nil
		}
		if err == nil || ctx.Err() != nil || !again(err) {
			return err
		}
		if err := pause.wait(ctx); err != nil {
			return err
		}
	}
}

// Signal sends a signal by name ("INT", "SIGTERM") to the process's group. It is
// sent once: when the answer is lost, nobody knows whether it arrived.
func (s *Stream) Signal(ctx context.Context, name string) error {
	return s.signal(ctx, spaceapi.Signal{Signal: name})
}

// SignalTree sends a signal to every process of the session.
func (s *Stream) SignalTree(ctx context.Context, name string) error {
	return s.signal(ctx, spaceapi.Signal{Signal: name, Tree: true})
}

func (s *Stream) signal(ctx context.Context, in spaceapi.Signal) error {
	b, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	return s.post(ctx, "/signal", b, nil)
}

// Resize sets the terminal's size.
func (s *Stream) Resize(ctx context.Context, size spaceapi.Size) error {
	b, err := json.Marshal(size)
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	return s.post(ctx, "/resize", b, nil)
}

// Session is the id of the stream's session.
func (s *Stream) Session() string { return s.session }

// SessionOf gives the session id inside an attach URL, or "".
func SessionOf(attachURL string) string {
	u, err := url.Parse(attachURL)
	if err != nil {
		return ""
	}
	return u.Path[strings.LastIndexByte(u.Path, '/')+1:]
}
