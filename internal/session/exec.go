package session

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/quota"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session/journal"
	"github.com/space-platform/space/internal/tenant"
)

// bootOf is what the last greeting of a sandbox's guest said.
type bootOf struct {
	guest guestclient.Guest
	epoch string
}

// killWait is how long Exec waits for the tree of a command whose caller has gone.
const killWait = 10 * time.Second

// Exec runs a command and collects its result. It is create, attach and collect
// in one: creating and starting share one transaction, and no token is made.
// When ctx ends first, because the caller has gone or its time is over, the
// whole process tree is killed: who wants a command to live on uses a session.
// A command that could not be started, or whose sandbox was lost, is a result
// with that cause, not an error.
//
// With an idempotency key the command runs once however often the request is
// sent, and goes on when a request ends first: the key says that the caller will
// come back for the result, which a repeat collects whole.
func (m *Manager) Exec(ctx context.Context, t tenant.ID, r ExecRequest) (ExecResult, error) {
	if r.MaxOutput <= 0 {
		r.MaxOutput = m.Limits.ExecOutput
	}
	r.MaxOutput = min(r.MaxOutput, MaxExecOutput)
	r.Command.Stdin = r.Command.Stdin || len(r.StdinData) > 0
	m.Activity(r.Sandbox)
	if r.IdempotencyKey != "" {
		return m.execOnce(ctx, t, r)
	}
	l, err := m.execStart(ctx, t, r.CreateRequest)
	if err != nil {
		return ExecResult{}, err
	}
	defer m.release(l)
	if r.Command.Stdin {
		feed, stop := context.WithCancel(ctx)
		defer stop()
		defer context.AfterFunc(m.ctx, stop)()
		m.wg.Go(func() { l.feed(feed, r.StdinData) })
	}
	out, err := l.collect(ctx, r.MaxOutput)
	if err == nil {
		return out, nil
	}
	if ctx.Err() == nil {
		return ExecResult{}, err
	}
	kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killWait)
	defer cancel()
	if kerr := l.kill(kctx); kerr != nil {
		m.Log.Warn("a command whose caller has gone cannot be killed", "session", l.id, "error", kerr)
	}
	return ExecResult{}, fault.New(fault.Deadline, "exec_cancelled", "the request ended before the command, which was killed").
		Do("use a session for commands that outlive a request").Wrap(ctx.Err())
}

// execOnce is Exec under an idempotency key: the session that the key names is
// made or found, begun, and collected from its first event.
func (m *Manager) execOnce(ctx context.Context, t tenant.ID, r ExecRequest) (ExecResult, error) {
	c := r.CreateRequest
	c.IdempotencyKey = "exec\x00" + c.IdempotencyKey // a key is one of its route
	s, _, err := m.Create(ctx, t, c)
	if err != nil {
		return ExecResult{}, err
	}
	if err := m.RevokeAttachTokens(ctx, t, s.ID); err != nil { // nobody was given one
		return ExecResult{}, err
	}
	l, err := m.acquire(ctx, t, s.ID)
	if err != nil {
		return ExecResult{}, err
	}
	defer m.release(l)
	if err := l.begin(ctx); err != nil {
		return ExecResult{}, err
	}
	if r.Command.Stdin {
		// Offsets keep it exactly once over repeats; it ends with the command.
		m.wg.Go(func() { l.feed(m.ctx, r.StdinData) })
	}
	out, err := l.collect(ctx, r.MaxOutput)
	if err != nil && ctx.Err() != nil {
		return ExecResult{}, fault.New(fault.Deadline, "exec_goes_on", "the request ended before the command, which goes on").
			Do("repeat it with the same idempotency key for the result").Retry(true).Wrap(ctx.Err())
	}
	return out, err
}

// execStart makes a session that is starting, in one transaction.
func (m *Manager) execStart(ctx context.Context, t tenant.ID, r CreateRequest) (*live, error) {
	g, err := m.Guests.Guest(ctx, t, r.Sandbox)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	known := m.boots[r.Sandbox]
	m.mu.Unlock()
	if known.guest != g {
		hello, err := g.Hello(ctx)
		if err != nil {
			return nil, err
		}
		known = bootOf{g, hello.BootEpoch}
		m.mu.Lock()
		m.boots[r.Sandbox] = known
		m.mu.Unlock()
	}
	rw, err := m.newRow(ctx, t, r)
	if err != nil {
		return nil, err
	}
	if err := failpoint.Hit(ctx, fpStartBefore); err != nil {
		m.Ledger.Refund(t, r.Sandbox, quota.Sessions, 1)
		return nil, fault.Of(err)
	}
	now := m.now()
	rw.state, rw.guestBoot, rw.hostBoot, rw.startedAt = Starting, known.epoch, m.HostBoot, now
	l := m.newLive(rw)
	m.mu.Lock()
	l.refs = 1
	m.lives[rw.id] = l // before the row is there: nobody can know the id
	m.mu.Unlock()

	prepared := l.prepare()
	err = m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := insertRow(ctx, tx, &rw, nil); err != nil {
			return err
		}
		return m.auditStart(ctx, tx, rw, now)
	})
	<-prepared
	if err != nil {
		m.Ledger.Refund(t, r.Sandbox, quota.Sessions, 1)
		l.unprepare()
		_ = journal.Erase(m.dir(rw.id)) // the next Recover does it as well
		m.release(l)
		return nil, err
	}
	l.mu.Lock()
	l.row.seq = rw.seq
	l.mu.Unlock()
	if err := failpoint.Hit(ctx, fpStartRow); err != nil {
		m.Log.Warn("failpoint", "name", fpStartRow, "error", err)
	}
	if err := l.launch(known.epoch, now, known.guest); err != nil {
		m.release(l)
		return nil, err
	}
	return l, nil
}

// feed gives the command its input, then closes it. It ends with ctx, or when
// the command does.
func (l *live) feed(ctx context.Context, data []byte) {
	at := uint64(0)
	wait := 20 * time.Millisecond
	for ctx.Err() == nil {
		err := func() error {
			g, err := l.guest(ctx)
			if err != nil {
				return err
			}
			for at < uint64(len(data)) {
				r, err := g.Stdin(ctx, string(l.id), at, data[at:min(uint64(len(data)), at+stdinChunk)])
				if err != nil {
					return err
				}
				if r.Closed {
					return nil
				}
				at = min(r.Accepted, uint64(len(data)))
				l.accepted(r.Accepted)
			}
			_, err = g.CloseStdin(ctx, string(l.id))
			return err
		}()
		var f *fault.Error
		if err == nil || errors.As(err, &f) && f.Class != fault.Unavailable {
			return // done, or the command has ended
		}
		select {
		case <-ctx.Done():
		case <-l.ended:
			return
		case <-l.m.Clock.After(wait):
			wait = min(2*wait, l.m.Limits.Backoff)
		}
	}
}

// collect reads to the end of the session.
func (l *live) collect(ctx context.Context, most int64) (ExecResult, error) {
	out := ExecResult{Session: l.id}
	src, err := l.read(journal.ID{})
	if errors.Is(err, errNotStarted) { // the journal could not be opened at once
		select {
		case <-l.up:
		case <-ctx.Done():
			return out, ctx.Err()
		}
		src, err = l.read(journal.ID{})
	}
	if err != nil {
		return out, err
	}
	defer src.Close()
	held, done := l.m.share(ctx, l.tenant)
	defer done()
	for {
		ev, err := src.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if errors.Is(err, journal.ErrClosed) && l.m.ctx.Err() != nil {
			return out, errClosing
		}
		if errors.Is(err, journal.ErrClosed) {
			return out, errGone
		}
		if err != nil {
			return out, err
		}
		switch ev.Kind {
		case journal.Stdout:
			take(&out.Stdout, &out.StdoutTruncated, ev.Data, most, held)
		case journal.Stderr:
			take(&out.Stderr, &out.StderrTruncated, ev.Data, most, held)
		case journal.Gap:
			var g struct {
				Missing uint64 `json:"missing"`
			}
			if err := json.Unmarshal(ev.Data, &g); err != nil {
				return out, fmt.Errorf("session: gap: %w", err)
			}
			out.GapBytes += g.Missing
		case journal.Exit, journal.Error:
			e, err := parseFinal(ev)
			if err != nil {
				return out, err
			}
			out.Exit = *e
		}
	}
	return out, nil
}

var errGone = fault.New(fault.Gone, "session_erased", "the session's output was erased").Do("its sandbox was deleted, or the session was removed to make room")

// take appends to dst up to its bound, or until no memory is left for it, and
// adds what it left out to missing. What was kept is always the beginning.
func take(dst *[]byte, missing *uint64, p []byte, most int64, s *share) {
	n := min(int64(len(p)), most-int64(len(*dst)))
	free := min(n, max(0, freeOutput-int64(len(*dst))))
	if *missing > 0 {
		n = 0
	} else if n > free && !s.take(n-free) {
		n = free
	}
	*dst = append(*dst, p[:n]...)
	*missing += uint64(int64(len(p)) - n)
}

// Attach starts the session's process unless it was started, once however many
// race, and opens a stream of the events after the given id; the zero id is the
// start. Close the stream.
func (m *Manager) Attach(ctx context.Context, t tenant.ID, id sandbox.SessionID, after journal.ID) (*Stream, error) {
	return m.stream(ctx, t, id, after, true)
}

// Events opens a stream of the events after the given id without starting anything.
func (m *Manager) Events(ctx context.Context, t tenant.ID, id sandbox.SessionID, after journal.ID) (*Stream, error) {
	return m.stream(ctx, t, id, after, false)
}

// Stream is one reader of a session's events.
type Stream struct {
	source
	l     *live
	epoch uint64
}

func (m *Manager) stream(ctx context.Context, t tenant.ID, id sandbox.SessionID, after journal.ID, start bool) (*Stream, error) {
	l, err := m.acquire(ctx, t, id)
	if err != nil {
		return nil, err
	}
	if err := m.Ledger.Charge(t, id.Sandbox(), quota.Readers, 1); err != nil {
		m.release(l)
		return nil, err
	}
	m.Activity(id.Sandbox())
	src, err := func() (source, error) {
		if start {
			if err := l.begin(ctx); err != nil {
				return nil, err
			}
		}
		src, err := l.read(after)
		if errors.Is(err, errNotStarted) && start {
			select {
			case <-l.up:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			src, err = l.read(after)
		}
		return src, err
	}()
	if err != nil {
		m.Ledger.Refund(t, id.Sandbox(), quota.Readers, 1)
		m.release(l)
		return nil, err
	}
	m.mu.Lock()
	l.readers++
	m.readers[id.Sandbox()]++
	m.mu.Unlock()
	m.metrics.readers.Inc()
	return &Stream{source: src, l: l, epoch: l.epoch}, nil
}

// Epoch of the stream's event ids.
func (s *Stream) Epoch() uint64 { return s.epoch }

// ID of an event of this stream.
func (s *Stream) ID(ev journal.Event) journal.ID { return journal.ID{Epoch: s.epoch, Offset: ev.End} }

// Close ends the reader.
func (s *Stream) Close() {
	s.source.Close()
	m, id := s.l.m, s.l.id.Sandbox()
	m.mu.Lock()
	s.l.readers--
	if m.readers[id]--; m.readers[id] <= 0 {
		delete(m.readers, id)
	}
	m.mu.Unlock()
	m.Ledger.Refund(s.l.tenant, id, quota.Readers, 1)
	m.metrics.readers.Dec()
	m.Activity(id)
	m.release(s.l)
}
