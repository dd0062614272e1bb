package session

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session/journal"
	"github.com/space-platform/space/internal/tenant"
)

// opener is Attach or Events.
type opener func(ctx context.Context, t tenant.ID, id sandbox.SessionID, after journal.ID) (*Stream, error)

// serveStream answers with the events of a session until its end.
func (m *Manager) serveStream(w http.ResponseWriter, r *http.Request, c call, open opener) error {
	from, err := after(r)
	if err != nil {
		return err
	}
	s, err := open(r.Context(), c.g.Tenant, c.id, from)
	if err != nil {
		return err
	}
	defer s.Close()
	ctl := http.NewResponseController(w)
	_ = ctl.SetReadDeadline(time.Time{}) // the request is read; a server-wide limit must not end the stream
	var enc encoder = sseEncoder{}
	w.Header().Set("Content-Type", "text/event-stream")
	if wantsFrames(r) {
		enc = binaryEncoder{}
		w.Header().Set("Content-Type", FramesType)
	}
	w.Header().Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	err = m.copyEvents(r.Context(), s, enc, func(b []byte) error {
		// A reader that takes nothing for this long is dead: it can come back.
		_ = ctl.SetWriteDeadline(time.Now().Add(m.Limits.WriteTimeout)) // not supported by a test's recorder only
		if len(b) > 0 {
			if _, err := w.Write(b); err != nil {
				return err
			}
		}
		return ctl.Flush()
	})
	if err != nil && r.Context().Err() == nil {
		m.Log.Debug("stream broke off", "session", c.id, "error", err)
	}
	return nil // the answer has begun: there is nothing left to say
}

// chunks are the buffers of streams that are writing.
var chunks = sync.Pool{New: func() any { b := make([]byte, 0, chunkCap); return &b }}

// chunkCap holds a full chunk and one more event in the longer form.
const chunkCap = streamChunk + guestapi.MaxFramePayload*4/3 + 256

// copyEvents writes events in chunks until the session's end, ctx, or an error
// of write. What is there is sent at once; a chunk grows only while more is
// there already. While it waits it holds no memory but a keepalive's timer.
func (m *Manager) copyEvents(ctx context.Context, s *Stream, enc encoder, write func([]byte) error) error {
	if err := write(nil); err != nil { // headers go out before the first event
		return err
	}
	for {
		b := chunks.Get().(*[]byte)
		out := (*b)[:0]
		var err error
		for len(out) < streamChunk {
			var ev journal.Event
			var ok bool
			if ev, ok, err = s.Ready(); err != nil || !ok {
				break
			}
			out = enc.event(out, s.ID(ev), ev)
		}
		if err != nil && !errors.Is(err, io.EOF) {
			out = enc.failure(out, interruption(ctx, err))
		}
		var werr error
		idle := len(out) == 0
		if !idle {
			werr = write(out)
		}
		if cap(out) <= 2*chunkCap {
			*b = out[:0]
			chunks.Put(b)
		}
		switch {
		case werr != nil:
			return werr
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case ctx.Err() != nil:
			return m.interrupt(ctx, enc, write)
		case !idle:
			continue
		}
		if err := m.idle(ctx, s, enc, write); err != nil {
			return err
		}
	}
}

// idle waits for the next event and sends keepalives meanwhile.
func (m *Manager) idle(ctx context.Context, s *Stream, enc encoder, write func([]byte) error) error {
	for {
		wait, cancel := context.WithTimeout(ctx, m.Limits.Keepalive)
		err := s.wait(wait)
		cancel()
		switch {
		case err == nil || errors.Is(err, journal.ErrClosed):
			return nil // Ready tells
		case ctx.Err() != nil:
			return m.interrupt(ctx, enc, write)
		}
		if err := write(enc.keepalive(nil)); err != nil {
			return err
		}
	}
}

// interrupt tells a reader that is still there why its stream is cut.
func (m *Manager) interrupt(ctx context.Context, enc encoder, write func([]byte) error) error {
	var f *fault.Error
	if why := context.Cause(ctx); errors.As(why, &f) {
		return errors.Join(why, write(enc.failure(nil, f)))
	}
	return ctx.Err()
}

func interruption(ctx context.Context, err error) *fault.Error {
	var f *fault.Error
	switch {
	case errors.As(context.Cause(ctx), &f):
		return f
	case errors.Is(err, journal.ErrClosed):
		return errGone
	case errors.Is(err, journal.ErrCorrupt):
		return fault.New(fault.Internal, "journal_damaged", "a part of the session's output is damaged").
			Do("read on after a later event id; the exit is in the session").Wrap(err)
	}
	return fault.Of(err)
}

// wait returns when there is an event.
func (s *Stream) wait(ctx context.Context) error {
	if w, ok := s.source.(interface{ Wait(context.Context) error }); ok {
		return w.Wait(ctx)
	}
	return nil
}
