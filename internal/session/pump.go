package session

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/session/journal"
)

// The causes of an Exit.
const (
	CauseExited      = "exited"
	CauseSignal      = "signal"
	CauseTimeLimit   = "time_limit"
	CauseOutOfMemory = "out_of_memory"
	CauseSandboxLost = "sandbox_lost"
	CauseExpired     = "expired"
	CauseStartFailed = "start_failed" // Reason begins with the guest's code
)

var errEnd = io.EOF

// begin starts the session's process unless it was started; whoever comes
// second finds it started. It returns when "starting" is durable.
func (l *live) begin(ctx context.Context) error {
	l.start.Lock()
	defer l.start.Unlock()
	l.mu.Lock()
	r := l.row
	l.mu.Unlock()
	if r.state != Created {
		return nil
	}
	m := l.m
	if m.now().Sub(r.createdAt) > m.Limits.AttachWithin {
		m.expire(ctx)
		return l.reload(ctx)
	}
	g, boot, err := m.boot(ctx, l)
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, fpStartBefore); err != nil {
		return fault.Of(err)
	}
	now := m.now()
	prepared := l.prepare()
	err = m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := markStarting(ctx, tx, l.id, boot, m.HostBoot, now); err != nil {
			return err
		}
		return m.auditStart(ctx, tx, r, now)
	})
	<-prepared
	if err != nil {
		l.unprepare()
	}
	if errors.Is(err, errNoRow) {
		return l.reload(ctx)
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, fpStartRow); err != nil {
		m.Log.Warn("failpoint", "name", fpStartRow, "error", err)
	}
	return l.launch(boot, now, g)
}

func (m *Manager) auditStart(ctx context.Context, tx *sql.Tx, r row, now time.Time) error {
	return m.Auditor.Append(ctx, tx, audit.Entry{At: now, Tenant: r.tenant.String(), Actor: r.principal, Action: "session.start",
		Target: string(r.id), Request: r.request})
}

// launch sets the pump on a session whose start is durable. g may be nil.
func (l *live) launch(boot string, now time.Time, g guestclient.Guest) error {
	l.mu.Lock()
	l.row.state, l.row.guestBoot, l.row.hostBoot, l.row.startedAt = Starting, boot, l.m.HostBoot, now
	l.mu.Unlock()
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	if l.m.closed {
		return errClosing // the next Manager goes on
	}
	l.refs++
	l.m.metrics.started.Inc()
	l.m.wg.Go(func() { l.pumpWith(g) })
	return nil
}

// prepare opens the journal of a session that is about to start, while the row
// is committed. When the disk refuses, the pump tries again before it starts
// anything.
func (l *live) prepare() <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := l.openJournal(false)
		if err == nil {
			err = l.journal.Prepare()
		}
		if err != nil {
			l.m.Log.Error("journal cannot be opened", "session", l.id, "error", err)
		}
	}()
	return done
}

// unprepare takes prepare back: the session does not start. Another starter of
// a session that was in memory twice may have a journal there: leave the files.
func (l *live) unprepare() {
	l.mu.Lock()
	j := l.journal
	l.journal = nil
	l.mu.Unlock()
	if j != nil {
		l.m.forget(j)
		j.Close()
	}
}

// boot finds the guest and which boot of it answers.
func (m *Manager) boot(ctx context.Context, l *live) (guestclient.Guest, string, error) {
	g, err := m.Guests.Guest(ctx, l.tenant, l.id.Sandbox())
	if err != nil {
		return nil, "", err
	}
	hello, err := g.Hello(ctx)
	if err != nil {
		return nil, "", err
	}
	return g, hello.BootEpoch, nil
}

// reload takes the row as the database has it: somebody else moved it.
func (l *live) reload(ctx context.Context) error {
	r, err := l.m.rowOf(ctx, l.tenant, l.id)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.row.state != Created {
		return nil
	}
	if r.exit == nil {
		return fault.New(fault.Unavailable, "recovering", "the session is being started elsewhere").Do("try again in a moment")
	}
	l.row = r
	l.markUp()
	close(l.ended)
	close(l.done)
	return nil
}

func (l *live) pump() { l.pumpWith(nil) }

// pumpWith carries the guest's output into the journal until the session's end,
// which it records. g is a guest that was just greeted, or nil.
func (l *live) pumpWith(g guestclient.Guest) {
	m := l.m
	defer m.release(l)
	ctx, stop := context.WithCancel(m.ctx)
	defer stop()
	l.mu.Lock()
	l.stop = stop
	if l.verdict != nil {
		stop()
	}
	l.mu.Unlock()
	m.metrics.running.Inc()
	defer m.metrics.running.Dec()

	exit, err := l.settled()
	if err == nil && exit == nil {
		exit = l.follow(ctx, g)
	}
	if exit == nil {
		if m.ctx.Err() == nil {
			m.Log.Error("session cannot go on", "session", l.id, "error", err)
		}
		return // closing: the next Manager goes on
	}
	l.finish(*exit)
}

// settled looks for an end that the journal has already, or that a crash of the
// host has made.
func (l *live) settled() (*Exit, error) {
	l.mu.Lock()
	j, r, recovered := l.journal, l.row, l.recovered
	l.mu.Unlock()
	if j == nil || !recovered {
		return nil, nil
	}
	st := j.State()
	if st.Final() {
		rd, err := j.From(st.End - 1)
		if err != nil {
			return nil, err
		}
		defer rd.Close()
		ev, ok, err := rd.Ready()
		if err != nil || !ok {
			return nil, fmt.Errorf("session: read final event: %w", err)
		}
		return parseFinal(ev)
	}
	if r.hostBoot != l.m.HostBoot {
		// Power may have taken the journal's end, also what readers saw of it: leap
		// far enough that no id comes twice.
		const leap = 1 << 32
		if err := j.Append(journal.Entry{Kind: journal.Gap, Size: leap, Data: journal.GapData("host_restarted", 0)}); err != nil {
			return nil, err
		}
		return &Exit{Cause: CauseSandboxLost, Code: -1, Reason: "the host was restarted"}, nil
	}
	return nil, nil
}

// verdictWait is how long a pump that finds its machine gone waits for
// SandboxEnded.
const verdictWait = 3 * time.Second

// errLost carries the Exit of a session whose end the pump found by itself.
type errLost struct{ exit Exit }

func (e *errLost) Error() string { return "session: " + e.exit.Cause + ": " + e.exit.Reason }

func lost(reason string) error {
	return &errLost{Exit{Cause: CauseSandboxLost, Code: -1, Reason: reason}}
}

// follow connects, and connects again, until the process's exit or a verdict.
// Nil means that the manager is closing.
func (l *live) follow(ctx context.Context, g guestclient.Guest) *Exit {
	wait := 10 * time.Millisecond
	strikes := 0
	for {
		before := l.position()
		exit, err := l.connect(ctx, g)
		g = nil
		if v := l.told(); v != nil {
			return v
		}
		if exit != nil {
			return exit
		}
		if ctx.Err() != nil {
			return nil
		}
		var gone *errLost
		if errors.As(err, &gone) {
			// The node is about to say why, and knows better.
			select {
			case <-ctx.Done():
			case <-l.m.Clock.After(verdictWait):
			}
			if v := l.told(); v != nil {
				return v
			}
			if l.m.ctx.Err() != nil {
				return nil
			}
			return &gone.exit
		}
		if isProtocol(err) {
			if strikes++; strikes >= protocolStrikes {
				l.report(ctx)
				return &Exit{Cause: CauseSandboxLost, Code: -1, Reason: "guest_protocol_error: the guest daemon broke the protocol"}
			}
		}
		if l.position() != before {
			wait, strikes = 10*time.Millisecond, 0
		}
		l.m.Log.Debug("guest is away", "session", l.id, "error", err, "retry", wait)
		select {
		case <-ctx.Done():
		case <-l.kick:
			wait = 10 * time.Millisecond
		case <-l.m.Clock.After(wait):
			wait = min(wait*2, l.m.Limits.Backoff)
		}
	}
}

// report tells the node of a guest that lies.
func (l *live) report(ctx context.Context) {
	l.m.Log.Warn("a guest broke the protocol", "session", l.id, "sandbox", l.id.Sandbox())
	if l.m.ProtocolError == nil {
		return
	}
	if err := l.m.ProtocolError(ctx, l.id.Sandbox()); err != nil {
		l.m.Log.Error("a guest that broke the protocol cannot be reported", "sandbox", l.id.Sandbox(), "error", err)
	}
}

func (l *live) position() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.journal == nil {
		return 0
	}
	return l.journal.State().End
}

func (l *live) told() *Exit {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.verdict
}

func isProtocol(err error) bool {
	return errors.Is(err, guestapi.ErrProtocol) || fault.IsCode(err, "guest_protocol_error")
}

// connect does one connection: start (idempotent), then output until it breaks
// or ends.
func (l *live) connect(ctx context.Context, g guestclient.Guest) (*Exit, error) {
	l.mu.Lock()
	r, j := l.row, l.journal
	l.mu.Unlock()
	m := l.m
	if j == nil {
		if err := l.openJournal(true); err != nil {
			return nil, err
		}
		l.mu.Lock()
		j = l.journal
		l.mu.Unlock()
	}
	if g == nil {
		var err error
		if g, err = m.Guests.Guest(ctx, r.tenant, r.sandbox); err != nil {
			var f *fault.Error
			if errors.As(err, &f) && !f.Retryable && ctx.Err() == nil {
				return nil, lost(f.Code + ": " + f.What)
			}
			return nil, err
		}
		hello, err := g.Hello(ctx)
		if err != nil {
			return nil, err
		}
		if hello.BootEpoch != r.guestBoot {
			return nil, lost("the machine was restarted")
		}
	}
	c, err := m.command(r)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.limit = c.TimeLimit
	l.mu.Unlock()
	if j.State().End == 0 {
		p, err := g.Start(ctx, c.start(string(l.id)))
		if guestclient.IsStartFailure(err) {
			f := fault.Of(err)
			return &Exit{Cause: CauseStartFailed, Code: -1, Reason: f.Code + ": " + f.What}, nil
		}
		if err != nil {
			return nil, err
		}
		if err := failpoint.Hit(ctx, fpStartGuest); err != nil {
			return nil, err
		}
		data, err := json.Marshal(map[string]any{"pid": p.PID, "at": m.now()})
		if err != nil {
			return nil, err
		}
		if err := j.Append(journal.Entry{Kind: journal.Started, Data: data}); err != nil {
			return nil, err
		}
		l.mu.Lock()
		l.row.pid = p.PID
		l.mu.Unlock()
	}
	l.mu.Lock()
	l.row.state = Running
	l.mu.Unlock()
	l.markUp()
	return l.copy(ctx, g, j)
}

// copy carries one output stream into the journal.
func (l *live) copy(ctx context.Context, g guestclient.Guest, j *journal.Journal) (*Exit, error) {
	out, err := g.Output(ctx, string(l.id), j.State().Guest)
	if fault.IsCode(err, guestapi.CodeNoSuchProcess) || fault.IsCode(err, guestapi.CodeOffsetAhead) {
		return nil, lost("guest_protocol_error: the guest daemon does not know the process it has started")
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = out.Close() }() // ends the stream
	// What is in the journal may not have been acknowledged, and then the guest's
	// window can be full of it: nothing would ever come.
	if have := j.State().Guest; have > 0 {
		l.acks.want(ctx, l.m, g, string(l.id), have)
	}
	for {
		f, err := out.Next()
		if err != nil {
			return nil, err
		}
		var e journal.Entry
		switch f.Type {
		case guestapi.FrameStdout:
			e = journal.Entry{Kind: journal.Stdout, Data: f.Payload, Guest: f.End()}
		case guestapi.FrameStderr:
			e = journal.Entry{Kind: journal.Stderr, Data: f.Payload, Guest: f.End()}
		case guestapi.FrameGap:
			e = journal.Entry{Kind: journal.Gap, Data: journal.GapData("overflow", f.Missing), Guest: f.End()}
		case guestapi.FrameKeepalive:
			continue
		case guestapi.FrameExit:
			if f.Exit == nil {
				return nil, fmt.Errorf("%w: exit without status", guestapi.ErrProtocol)
			}
			return &Exit{Cause: string(f.Exit.Cause), Code: f.Exit.Code, Signal: f.Exit.Signal}, nil
		default:
			return nil, fmt.Errorf("%w: frame type %d", guestapi.ErrProtocol, f.Type)
		}
		if err := l.append(ctx, j, e); err != nil {
			return nil, err
		}
		l.m.metrics.bytes.Add(float64(len(f.Payload)))
		l.acks.want(ctx, l.m, g, string(l.id), f.End())
	}
}

// append writes e, trying again while the disk refuses: meanwhile the guest's
// window fills and the process waits.
func (l *live) append(ctx context.Context, j *journal.Journal, e journal.Entry) error {
	wait := 50 * time.Millisecond
	for {
		err := j.Append(e)
		if err == nil {
			return failpoint.Hit(ctx, fpAppend)
		}
		if errors.Is(err, journal.ErrClosed) || errors.Is(err, journal.ErrFinal) {
			return err
		}
		l.m.Log.Error("output cannot be written", "session", l.id, "error", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.m.Clock.After(wait):
			wait = min(wait*2, 5*time.Second)
		}
	}
}

// finish records the end: event on the disk, then row and audit, then the guest
// may forget. It runs once.
func (l *live) finish(e Exit) {
	m := l.m
	if err := failpoint.Hit(m.ctx, fpExitBefore); err != nil {
		m.Log.Warn("failpoint", "name", fpExitBefore, "error", err)
	}
	l.mu.Lock()
	j := l.journal
	if l.killed && e.Cause == CauseSignal { // by us, because the guest had not
		e.Cause = CauseTimeLimit
	}
	l.mu.Unlock()
	if e.At.IsZero() {
		e.At = m.now()
	}
	for j == nil {
		if err := l.openJournal(true); err != nil {
			m.Log.Error("journal cannot be opened", "session", l.id, "error", err)
			select {
			case <-m.ctx.Done():
				return
			case <-m.Clock.After(m.Limits.Backoff):
			}
			continue
		}
		l.mu.Lock()
		j = l.journal
		l.mu.Unlock()
	}
	kind, data := finalEvent(e)
	err := l.conclude(j, journal.Entry{Kind: kind, Data: data}, e)
	if err != nil {
		return // closing: the next Manager finds what was recorded
	}
	l.markUp()
	close(l.ended)
	m.metrics.ended.WithLabelValues(e.Cause).Inc()
	if err := failpoint.Hit(m.ctx, fpExitAfter); err != nil {
		m.Log.Warn("failpoint", "name", fpExitAfter, "error", err)
	}
	l.mu.Lock()
	r := l.row
	l.mu.Unlock()
	m.keep(r, l)
	close(l.done)
	if err := m.settle(j); err != nil {
		m.Log.Error("journal cannot be synced", "session", l.id, "error", err) // the sweeper tries again
	}
	if r.state == Exited && e.Cause != CauseStartFailed {
		l.forgotten(r)
	}
}

// settling is one round of flushes that journals which ended together share: a
// file system's own log makes the second one almost free.
type settling struct {
	journals []*journal.Journal
	errs     []error
	done     chan struct{}
}

// settleWait is how long a round waits for company.
const settleWait = 20 * time.Millisecond

// settle flushes a journal that has ended.
func (m *Manager) settle(j *journal.Journal) error {
	m.mu.Lock()
	s := m.settling
	lead := s == nil
	if lead {
		s = &settling{done: make(chan struct{})}
		m.settling = s
	}
	mine := len(s.journals)
	s.journals = append(s.journals, j)
	m.mu.Unlock()
	if lead {
		select {
		case <-m.ctx.Done(): // closing: at once
		case <-m.Clock.After(settleWait):
		}
		m.mu.Lock()
		m.settling = nil
		m.mu.Unlock()
		for _, j := range s.journals {
			s.errs = append(s.errs, j.Sync())
		}
		close(s.done)
	}
	<-s.done
	return s.errs[mine]
}

// conclude records the end: the event in the journal, then row and audit in one
// transaction, and only then do readers see it. What was told as the end
// therefore stays the end, whatever is lost with the power.
func (l *live) conclude(j *journal.Journal, entry journal.Entry, e Exit) error {
	m := l.m
	commit := func(end uint64) error {
		if err := failpoint.Hit(m.ctx, fpExitRecord); err != nil {
			m.Log.Warn("failpoint", "name", fpExitRecord, "error", err)
		}
		l.mu.Lock()
		r := l.row
		r.exit, r.state, r.lastOffset = &e, stateOf(e), end
		r.stdinOffset = max(r.stdinOffset, l.stdin)
		l.mu.Unlock()
		for {
			err := m.commits.do(context.Background(), func(ctx context.Context, tx *sql.Tx) error {
				if err := m.markEnded(ctx, tx, r); err != nil {
					return err
				}
				return m.auditExit(ctx, tx, r)
			})
			if err == nil || errors.Is(err, errNoRow) { // no row: erased with its sandbox
				l.mu.Lock()
				l.row = r
				l.mu.Unlock()
				return nil
			}
			m.Log.Error("end cannot be committed", "session", l.id, "error", err)
			select {
			case <-m.ctx.Done():
				return err
			case <-m.Clock.After(m.Limits.Backoff):
			}
		}
	}
	for {
		err := j.Finish(entry, commit)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, journal.ErrFinal): // of an earlier life; commit has run
			return m.ctx.Err()
		case errors.Is(err, journal.ErrClosed): // erased beneath us: the row still tells the end
			return commit(j.State().End + 1)
		}
		m.Log.Error("end cannot be written", "session", l.id, "error", err)
		select {
		case <-m.ctx.Done():
			return err
		case <-m.Clock.After(50 * time.Millisecond):
		}
	}
}

func stateOf(e Exit) State {
	switch e.Cause {
	case CauseSandboxLost:
		return Lost
	case CauseExpired:
		return Expired
	}
	return Exited
}

// forgotten lets the guest forget the process. When that fails, the guest keeps
// it until it needs the room.
func (l *live) forgotten(r row) {
	ctx, cancel := context.WithTimeout(l.m.ctx, 5*time.Second)
	defer cancel()
	g, err := l.m.Guests.Guest(ctx, r.tenant, r.sandbox)
	if err == nil {
		err = g.Forget(ctx, string(l.id))
	}
	if err != nil {
		l.m.Log.Debug("guest keeps an ended process", "session", l.id, "error", err)
	}
}

func (m *Manager) auditExit(ctx context.Context, tx *sql.Tx, r row) error {
	return m.Auditor.Append(ctx, tx, audit.Entry{At: r.exit.At, Tenant: r.tenant.String(), Actor: "node", Action: "session.exit", Target: string(r.id),
		Request: r.request, Detail: map[string]string{"cause": r.exit.Cause, "code": fmt.Sprint(r.exit.Code)}})
}

// keep puts an ended session on the list of those that go when room is needed.
// Its bytes stay charged until then.
func (m *Manager) keep(r row, l *live) {
	var n int64
	l.mu.Lock()
	if l.journal != nil {
		n = l.journal.Disown()
	}
	l.mu.Unlock()
	m.mu.Lock()
	m.kept[r.sandbox] = append(m.kept[r.sandbox], kept{r.id, r.tenant, n})
	m.mu.Unlock()
}

// finalEvent gives the last event of a session that ended so.
func finalEvent(e Exit) (journal.Kind, []byte) {
	type final struct {
		Code string `json:"code"`
		What string `json:"message"`
		Exit Exit   `json:"exit"`
	}
	var body any = e
	kind := journal.Exit
	switch e.Cause {
	case CauseSandboxLost:
		kind, body = journal.Error, final{"sandbox_lost", "the machine that ran the command is gone", e}
	case CauseExpired:
		kind, body = journal.Error, final{"session_expired", "the session was not attached in time", e}
	case CauseStartFailed:
		kind, body = journal.Error, final{"start_failed", "the command could not be started", e}
	}
	b, err := json.Marshal(body)
	if err != nil { // strings, numbers and a time: cannot happen
		b = []byte(`{}`)
	}
	return kind, b
}

func parseFinal(ev journal.Event) (*Exit, error) {
	var f struct {
		Exit Exit `json:"exit"`
	}
	var to any = &f
	if ev.Kind == journal.Exit {
		to = &f.Exit
	}
	if err := json.Unmarshal(ev.Data, to); err != nil {
		return nil, fmt.Errorf("session: final event: %w", err)
	}
	return &f.Exit, nil
}

// acker acknowledges output on a goroutine that lives only while there is some.
type acker struct {
	mu      sync.Mutex
	guest   guestclient.Guest
	offset  uint64
	acked   uint64
	running bool
	more    chan struct{}
}

// ackRetry is how long the acker waits after a call that failed.
const ackRetry = 100 * time.Millisecond

func (a *acker) want(ctx context.Context, m *Manager, g guestclient.Guest, id string, offset uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.offset, a.guest = max(a.offset, offset), g
	if a.running {
		if a.offset-a.acked >= ackBytes {
			select {
			case a.more <- struct{}{}:
			default:
			}
		}
		return
	}
	if a.more == nil {
		a.more = make(chan struct{}, 1)
	}
	a.running = true
	m.wg.Go(func() { a.run(ctx, m, id) })
}

func (a *acker) run(ctx context.Context, m *Manager, id string) {
	t := time.NewTimer(ackDelay)
	defer t.Stop()
	for {
		a.mu.Lock()
		small := a.offset-a.acked < ackBytes
		a.mu.Unlock()
		if small {
			t.Reset(ackDelay)
			select {
			case <-a.more:
			case <-t.C:
			case <-ctx.Done():
			}
		}
		a.mu.Lock()
		offset, g := a.offset, a.guest
		if ctx.Err() != nil || offset <= a.acked {
			a.running = false
			a.mu.Unlock()
			return
		}
		a.mu.Unlock()
		err := g.Ack(ctx, id, offset)
		if fault.IsClass(err, fault.Unavailable) && !isProtocol(err) {
			// Without it the guest's window may stay full for ever: try again.
			select {
			case <-ctx.Done():
			case <-m.Clock.After(ackRetry):
			}
			continue
		}
		a.mu.Lock()
		if err != nil { // the process is gone, or the guest refuses: the stream tells
			a.running = false
			a.mu.Unlock()
			return
		}
		a.acked = offset
		a.mu.Unlock()
	}
}
