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

// Event is one event of a session's stream.
type Event struct {
	// ID is "epoch.offset": the position after the event.
	ID   string
	Type string // one of spaceapi.Event*
	// Data is the bytes of stdout and stderr events.
	Data []byte
	// Exit is set on exit events.
	Exit *spaceapi.Exit
	// Raw is the JSON of the event, for the types that have no field here.
	Raw json.RawMessage
}

// Gap tells what a gap event says is missing.
type Gap struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Bytes uint64 `json:"bytes"`
}

// Stream reads one session's events in order, each once, over as many
// connections as it takes. Next is for one goroutine; the other methods may be
// called from any.
type Stream struct {
	c       *Client
	session string

	mu     sync.Mutex
	attach spaceapi.Attach // guarded by mu

	last    string // id of the last event given
	started bool   // the first attach got through
	ended   bool
	resp    *http.Response
	rd      *bufio.Reader
	stdin   uint64
	stdinMu sync.Mutex
	// Reconnects counts connections after the first, for tests and logs.
	Reconnects int
}

// Attach opens the stream of a session from its first event; the first
// connection starts the process.
func (c *Client) Attach(s spaceapi.SessionCreated) *Stream {
	return &Stream{c: c, session: s.Session.ID, attach: s.Attach}
}

// Follow opens the stream of a session that may be running already. after is
// the id of the last event seen, "" for all that is kept. It mints a token.
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

// streamStall is how long a stream may be silent (events and keepalives) before
// it counts as dead: three keepalives of 10 s.
const streamStall = 35 * time.Second

// errFinal marks errors that reconnecting cannot mend.
type errFinal struct{ error }

func (e errFinal) Unwrap() error { return e.error }

// Next gives the next event, reconnecting as often as needed until ctx ends.
// io.EOF follows the last event (exit, or error).
func (s *Stream) Next(ctx context.Context) (Event, error) {
	wait := 20 * time.Millisecond
	for {
		if s.ended {
			return Event{}, io.EOF
		}
		if s.rd == nil {
			if err := s.open(ctx); err != nil {
				var f errFinal
				if errors.As(err, &f) || ctx.Err() != nil {
					return Event{}, err
				}
				select {
				case <-ctx.Done():
					return Event{}, ctx.Err()
				case <-time.After(wait):
				}
				wait = min(2*wait, time.Second)
				continue
			}
		}
		ev, err := s.read(ctx)
		if err != nil {
			s.hangUp()
			if ctx.Err() != nil {
				return Event{}, ctx.Err()
			}
			s.Reconnects++
			continue
		}
		s.last = ev.ID
		if ev.Type == spaceapi.EventExit || ev.Type == spaceapi.EventError {
			s.ended = true
			s.hangUp()
		}
		return ev, nil
	}
}

// Last is the id of the last event given.
func (s *Stream) Last() string { return s.last }

// Close hangs up; the process goes on.
func (s *Stream) Close() { s.ended = true; s.hangUp() }

// Drop cuts the present connection; Next opens another one. For tests.
func (s *Stream) Drop() { s.hangUp() }

func (s *Stream) hangUp() {
	if s.resp != nil {
		_ = s.resp.Body.Close()
	}
	s.resp, s.rd = nil, nil
}

func (s *Stream) request(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	s.mu.Lock()
	a := s.attach
	s.mu.Unlock()
	req, err := http.NewRequestWithContext(ctx, method, a.URL+path, body)
	if err != nil {
		return nil, errFinal{fmt.Errorf("client: %w", err)}
	}
	req.Header.Set("Authorization", "Bearer "+a.Token)
	if s.last != "" && method == http.MethodGet {
		req.Header.Set(spaceapi.HeaderLastEventID, s.last)
	}
	return s.c.http.Do(req)
}

func (s *Stream) open(ctx context.Context) error {
	method, path := http.MethodGet, "/events"
	if !s.started {
		method, path = http.MethodPost, "/attach"
	}
	resp, err := s.request(ctx, method, path, nil)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return s.refused(ctx, resp)
	}
	s.started = true
	s.resp, s.rd = resp, bufio.NewReaderSize(resp.Body, 256<<10)
	return nil
}

// refused decides what a refusal to open means: a new token mends 401, time
// mends 429 and 5xx, nothing mends the rest.
func (s *Stream) refused(ctx context.Context, resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	_ = resp.Body.Close()
	e := problemOf(resp, b)
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		a, err := s.c.MintAttach(ctx, s.session)
		if err != nil {
			if Code(err) != "" {
				return errFinal{err}
			}
			return err
		}
		s.mu.Lock()
		same := s.attach.Token == a.Token
		s.attach = a
		s.mu.Unlock()
		if same {
			return errFinal{e}
		}
		return e
	case resp.StatusCode >= 500, e.Retryable:
		return e
	}
	return errFinal{e}
}

func (s *Stream) read(ctx context.Context) (Event, error) {
	resp := s.resp
	timer := time.AfterFunc(streamStall, func() { _ = resp.Body.Close() })
	defer timer.Stop()
	stop := context.AfterFunc(ctx, func() { _ = resp.Body.Close() })
	defer stop()
	var ev Event
	var data []byte
	for {
		line, err := s.rd.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			long := append([]byte(nil), line...)
			var rest []byte
			rest, err = s.rd.ReadBytes('\n')
			line = append(long, rest...)
		}
		if err != nil {
			return Event{}, err
		}
		timer.Reset(streamStall)
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			if ev.Type == "" {
				continue // a keepalive's end
			}
			return ev, ev.parse(data)
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "id":
			ev.ID = string(value)
		case "event":
			ev.Type = string(value)
		case "data":
			data = append(data, value...)
		}
	}
}

func (e *Event) parse(data []byte) error {
	switch e.Type {
	case spaceapi.EventStdout, spaceapi.EventStderr:
		var d struct {
			B64 []byte `json:"b64"`
		}
		if err := json.Unmarshal(data, &d); err != nil {
			return err
		}
		e.Data = d.B64
		return nil
	case spaceapi.EventExit:
		e.Exit = &spaceapi.Exit{}
		e.Raw = data
		return json.Unmarshal(data, e.Exit)
	}
	if !json.Valid(data) {
		return errors.New("client: event data is not JSON")
	}
	e.Raw = data
	return nil
}

func (s *Stream) post(ctx context.Context, path string, body []byte, out any) error {
	resp, err := s.request(ctx, http.MethodPost, path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		if resp.StatusCode == http.StatusUnauthorized {
			if err := s.refused(ctx, resp); err != nil {
				var f errFinal
				if errors.As(err, &f) {
					return err
				}
			}
			if resp, err = s.request(ctx, http.MethodPost, path, bytes.NewReader(body)); err != nil {
				return err
			}
		}
		if resp.StatusCode >= 300 {
			b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
			_ = resp.Body.Close()
			return problemOf(resp, b)
		}
	}
	defer resp.Body.Close()
	if out == nil {
		return nil
	}
	return json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(out)
}

// Write sends p to the process's standard input, whole, repeating what a broken
// connection left open; the offset keeps it exactly once.
func (s *Stream) Write(ctx context.Context, p []byte) error {
	s.stdinMu.Lock()
	defer s.stdinMu.Unlock()
	end := s.stdin + uint64(len(p))
	for tries := 0; s.stdin < end; {
		rest := p[len(p)-int(end-s.stdin):]
		rest = rest[:min(len(rest), 256<<10)]
		var out struct {
			Accepted uint64 `json:"accepted"`
		}
		err := s.post(ctx, "/stdin?offset="+strconv.FormatUint(s.stdin, 10), rest, &out)
		if err == nil {
			if out.Accepted < s.stdin || out.Accepted > end {
				return fmt.Errorf("client: server accepted %d bytes of stdin, %d were sent", out.Accepted, end)
			}
			if out.Accepted > s.stdin {
				tries = 0
			}
			s.stdin = out.Accepted
		}
		if err != nil {
			var e *Error
			if ctx.Err() != nil || errors.As(err, &e) && !e.Retryable && e.Status < 500 {
				return err
			}
		}
		if tries++; tries > 40 {
			return errors.Join(errors.New("client: standard input is not accepted"), err)
		}
		if tries > 1 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}

// CloseStdin ends the process's standard input.
func (s *Stream) CloseStdin(ctx context.Context) error { return s.post(ctx, "/close-stdin", nil, nil) }

// Signal sends a signal by name ("INT", "SIGTERM").
func (s *Stream) Signal(ctx context.Context, name string) error {
	return s.post(ctx, "/signal", []byte(`{"signal":`+strconv.Quote(name)+`}`), nil)
}

// Resize sets the terminal's size.
func (s *Stream) Resize(ctx context.Context, size spaceapi.Size) error {
	b, err := json.Marshal(size)
	if err != nil {
		return err
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
