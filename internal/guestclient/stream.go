package guestclient

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
)

// stream is an answer whose body goes on: it ends with the caller's context,
// the client, Close, or when the guest stands still while we wait for it.
type stream struct {
	caller context.Context
	ctx    context.Context
	cancel context.CancelCauseFunc
	resp   *http.Response
	idle   time.Duration
	once   sync.Once
}

func (c *Client) open(ctx context.Context, path string, q url.Values) (*stream, error) {
	s := &stream{caller: ctx, idle: c.opt.IdleTimeout}
	s.ctx, s.cancel = c.scope(ctx)
	t := time.AfterFunc(c.opt.CallTimeout, func() { s.cancel(errIdle) })
	resp, err := c.request(s.ctx, "GET", path, q, nil, 0)
	t.Stop()
	if err != nil {
		err = broken(ctx, s.ctx, err)
		s.cancel(nil)
		return nil, err
	}
	s.resp = resp
	if resp.StatusCode != http.StatusOK {
		defer func() { _ = s.Close() }()
		var b []byte
		err := s.wait(func() (err error) {
			b, err = io.ReadAll(io.LimitReader(resp.Body, guestapi.MaxMessage))
			return err
		})
		if err != nil {
			return nil, err
		}
		return nil, refusal(resp.StatusCode, b)
	}
	return s, nil
}

// wait runs one read under the idle bound and maps its error.
func (s *stream) wait(read func() error) error {
	t := time.AfterFunc(s.idle, func() { s.cancel(errIdle) })
	err := read()
	t.Stop()
	if err == nil || err == io.EOF {
		return err
	}
	return broken(s.caller, s.ctx, err)
}

func (s *stream) Close() error {
	s.once.Do(func() {
		s.cancel(nil)
		_ = s.resp.Body.Close()
	})
	return nil
}

// output implements Output.
type output struct {
	*stream
	frames *guestapi.FrameReader
	quiet  int
	since  time.Time
}

// maxQuiet is how many keepalives in a row we take within quietSpan.
const (
	maxQuiet  = 32
	quietSpan = 30 * time.Second
)

// Output implements Guest.
func (c *Client) Output(ctx context.Context, id string, from uint64) (Output, error) {
	s, err := c.open(ctx, of(guestapi.PathOutput, id), url.Values{"from": {strconv.FormatUint(from, 10)}})
	if err != nil {
		return nil, err
	}
	return &output{stream: s, frames: guestapi.NewFrameReader(s.resp.Body, from)}, nil
}

// Next implements Output.
func (o *output) Next() (guestapi.Frame, error) {
	var f guestapi.Frame
	err := o.wait(func() (err error) { f, err = o.frames.Next(); return err })
	if err != nil {
		return guestapi.Frame{}, err
	}
	if f.Type != guestapi.FrameKeepalive {
		o.quiet = 0
		return f, nil
	}
	if o.quiet == 0 || time.Since(o.since) > quietSpan {
		o.quiet, o.since = 0, time.Now()
	}
	if o.quiet++; o.quiet > maxQuiet {
		o.cancel(nil)
		return guestapi.Frame{}, protocol("a flood of keepalives")
	}
	return f, nil
}

type download struct {
	*stream
	left int64 // -1: unknown
}

func (d *download) Read(p []byte) (n int, err error) {
	err = d.wait(func() (err error) { n, err = d.resp.Body.Read(p); return err })
	if d.left >= 0 {
		d.left -= int64(n)
	}
	return n, err
}

// GetFile implements Guest.
func (c *Client) GetFile(ctx context.Context, path, user string) (*File, error) {
	s, err := c.open(ctx, guestapi.PathFiles, url.Values{"path": {path}, "user": {user}})
	if err != nil {
		return nil, err
	}
	mode, err := strconv.ParseUint(s.resp.Header.Get(guestapi.HeaderMode), 8, 32)
	if err != nil || mode > 0o7777 {
		_ = s.Close()
		return nil, protocol("a file's mode is malformed")
	}
	nanos, err := strconv.ParseInt(s.resp.Header.Get(guestapi.HeaderModTime), 10, 64)
	if err != nil {
		_ = s.Close()
		return nil, protocol("a file's time is malformed")
	}
	return &File{
		ReadCloser: &download{s, s.resp.ContentLength},
		Size:       s.resp.ContentLength, Mode: uint32(mode), ModTime: time.Unix(0, nanos),
	}, nil
}

// PutFile implements Guest.
func (c *Client) PutFile(ctx context.Context, path, user string, mode uint32, size int64, r io.Reader) error {
	q := url.Values{"path": {path}, "user": {user}}
	if mode != 0 {
		q.Set("mode", strconv.FormatUint(uint64(mode), 8))
	}
	sctx, end := c.scope(ctx)
	defer end(nil)
	body := &upload{r: r, after: max(c.opt.IdleTimeout, transferAfter)}
	body.t = time.AfterFunc(c.opt.IdleTimeout, func() { end(errIdle) })
	defer body.stop()
	var from io.Reader = body
	if size == 0 {
		from = nil
	}
	resp, err := c.request(sctx, "PUT", guestapi.PathFiles, q, from, size)
	if cause := body.failed(); cause != nil {
		return fault.New(fault.Invalid, "upload_broken", "the upload broke off before its end").Wrap(cause)
	}
	if err != nil {
		return broken(ctx, sctx, err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, guestapi.MaxMessage))
	if err != nil {
		return broken(ctx, sctx, err)
	}
	if resp.StatusCode != http.StatusOK {
		return refusal(resp.StatusCode, b)
	}
	return nil
}

// upload watches that the guest takes the body: the timer runs while the
// transport holds bytes, and stands while we wait for the source.
type upload struct {
	r     io.Reader
	after time.Duration // for sync and answer, once all is sent

	mu      sync.Mutex
	t       *time.Timer
	stopped bool
	err     error
}

func (u *upload) Read(p []byte) (int, error) {
	u.set(0)
	n, err := u.r.Read(p)
	if err != nil {
		if !errors.Is(err, io.EOF) {
			u.mu.Lock()
			u.err = err
			u.mu.Unlock()
		}
	}
	u.set(u.after)
	return n, err
}

func (u *upload) set(d time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.stopped:
	case d == 0:
		u.t.Stop()
	default:
		u.t.Reset(d)
	}
}

func (u *upload) stop() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.stopped = true
	u.t.Stop()
}

func (u *upload) failed() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.err
}
