package session

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/quota"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session/journal"
	"github.com/space-platform/space/internal/tenant"
)

var errEnded = fault.New(fault.Conflict, "session_ended", "the session has ended")

// guest gives the daemon of a session whose process runs.
func (l *live) guest(ctx context.Context) (guestclient.Guest, error) {
	l.mu.Lock()
	r := l.row
	l.mu.Unlock()
	if r.state == Created {
		return nil, errNotStarted
	}
	select {
	case <-l.up: // a start that is under way is waited for
	case <-ctx.Done():
		return nil, fault.New(fault.Deadline, "start_pending", "the session is still being started").Do("try again").Retry(true)
	}
	select {
	case <-l.ended:
		return nil, errEnded
	default:
	}
	return l.m.Guests.Guest(ctx, r.tenant, r.sandbox)
}

// ended turns the guest's "no process" into ours: the exit is on its way.
func asEnded(err error) error {
	if fault.IsCode(err, guestapi.CodeProcessEnded) || fault.IsCode(err, guestapi.CodeNoSuchProcess) {
		return errEnded
	}
	return err
}

// Kill ends the process tree and returns when it is gone. A session that never
// started becomes expired.
func (m *Manager) Kill(ctx context.Context, t tenant.ID, id sandbox.SessionID) (Session, error) {
	l, err := m.acquire(ctx, t, id)
	if err != nil {
		return Session{}, err
	}
	defer m.release(l)
	l.mu.Lock()
	created := l.row.state == Created
	l.mu.Unlock()
	if created {
		l.start.Lock()
		err := m.expireWhere(ctx, "the session was killed before it was attached", `id=?`, string(id))
		if err == nil {
			err = l.reload(ctx)
		}
		l.start.Unlock()
		if err != nil {
			return Session{}, err
		}
	}
	if err := l.kill(ctx); err != nil {
		return Session{}, err
	}
	return m.Get(ctx, t, id)
}

// kill sends KILL to the tree until the end is in the journal.
func (l *live) kill(ctx context.Context) error {
	for {
		g, err := l.guest(ctx)
		if err == nil {
			err = g.Signal(ctx, string(l.id), "KILL", true)
		}
		if err != nil && !fault.IsCode(asEnded(err), errEnded.Code) {
			select {
			case <-l.ended: // lost meanwhile
				return nil
			default:
				return err
			}
		}
		// Once more after a while: the tree may have grown as it was killed.
		select {
		case <-l.ended:
			return nil
		case <-ctx.Done():
			return fault.New(fault.Deadline, "kill_pending", "the process tree was sent KILL and is not gone yet").Do("ask again").Retry(true)
		case <-l.m.Clock.After(2 * time.Second):
		}
	}
}

// StdinReply tells how much stdin was accepted in all.
type StdinReply struct {
	Accepted uint64 `json:"accepted"`
	Closed   bool   `json:"closed"`
}

// Stdin offers what body has, its first byte at *offset, or with offset nil
// where the accepted stdin ends now. It holds at most one chunk in memory and
// ends when the process takes no more for guestclient.StdinWait: the answer's
// Accepted tells from where to send again.
func (m *Manager) Stdin(ctx context.Context, t tenant.ID, id sandbox.SessionID, offset *uint64, body io.Reader) (StdinReply, error) {
	l, err := m.acquire(ctx, t, id)
	if err != nil {
		return StdinReply{}, err
	}
	defer m.release(l)
	m.Activity(l.id.Sandbox())
	g, err := l.guest(ctx)
	if err != nil {
		return StdinReply{}, err
	}
	var at uint64
	if offset != nil {
		at = *offset
	} else {
		p, err := g.Process(ctx, string(id))
		if err != nil {
			return StdinReply{}, asEnded(err)
		}
		at = p.StdinOffset
	}
	buf := make([]byte, stdinChunk)
	reply := StdinReply{Accepted: at}
	for {
		n, rerr := io.ReadFull(body, buf)
		if n > 0 || rerr == io.EOF && at == reply.Accepted {
			r, err := g.Stdin(ctx, string(id), at, buf[:n])
			if err != nil {
				return reply, asEnded(err)
			}
			l.accepted(r.Accepted)
			reply = StdinReply{Accepted: r.Accepted, Closed: r.Closed}
			if at += uint64(n); r.Accepted < at || r.Closed {
				return reply, nil
			}
		}
		switch {
		case rerr == io.EOF || rerr == io.ErrUnexpectedEOF:
			return reply, nil
		case rerr != nil:
			return reply, fault.New(fault.Invalid, "body_broken", "the request broke off").Do("send again from expected").Wrap(rerr)
		}
	}
}

func (l *live) accepted(n uint64) {
	l.mu.Lock()
	l.stdin = max(l.stdin, n)
	l.mu.Unlock()
}

// CloseStdin ends the process's input.
func (m *Manager) CloseStdin(ctx context.Context, t tenant.ID, id sandbox.SessionID) (StdinReply, error) {
	var out StdinReply
	err := m.withGuest(ctx, t, id, func(l *live, g guestclient.Guest) error {
		r, err := g.CloseStdin(ctx, string(id))
		if err == nil {
			l.accepted(r.Accepted)
			out = StdinReply{Accepted: r.Accepted, Closed: r.Closed}
		}
		return err
	})
	return out, err
}

// Signal sends a signal to the process's group, or to its whole tree.
func (m *Manager) Signal(ctx context.Context, t tenant.ID, id sandbox.SessionID, sig string, tree bool) error {
	if guestapi.SignalNumber(sig) == 0 {
		return fault.New(fault.Invalid, "invalid_signal", "that is no signal").Do("name one such as TERM or SIGINT, or give a number from 1 to 64")
	}
	return m.withGuest(ctx, t, id, func(_ *live, g guestclient.Guest) error { return g.Signal(ctx, string(id), sig, tree) })
}

// Resize sets the size of the session's terminal.
func (m *Manager) Resize(ctx context.Context, t tenant.ID, id sandbox.SessionID, size guestapi.Size) error {
	if size.Rows == 0 || size.Cols == 0 {
		return fault.New(fault.Invalid, "invalid_size", "a terminal has at least one row and one column")
	}
	return m.withGuest(ctx, t, id, func(_ *live, g guestclient.Guest) error { return g.Resize(ctx, string(id), size) })
}

func (m *Manager) withGuest(ctx context.Context, t tenant.ID, id sandbox.SessionID, do func(*live, guestclient.Guest) error) error {
	l, err := m.acquire(ctx, t, id)
	if err != nil {
		return err
	}
	defer m.release(l)
	m.Activity(id.Sandbox())
	g, err := l.guest(ctx)
	if err != nil {
		return err
	}
	return asEnded(do(l, g))
}

// endWait bounds how long SandboxEnded waits for the ends to be recorded.
const endWait = 10 * time.Second

// SandboxEnded tells that the machine of id is gone, and why: its running
// sessions end, with cause out_of_memory when that is the cause, otherwise with
// sandbox_lost and the cause and reason in words. It returns when their ends are
// recorded, at the latest after endWait; it may be told twice.
func (m *Manager) SandboxEnded(id sandbox.ID, cause, reason string) {
	ctx, cancel := context.WithTimeout(m.ctx, endWait)
	defer cancel()
	m.end(ctx, id, cause, reason)
}

func (m *Manager) end(ctx context.Context, id sandbox.ID, cause, reason string) {
	exit := Exit{Cause: CauseSandboxLost, Code: -1, Reason: cause}
	if cause == CauseOutOfMemory {
		exit.Cause, exit.Reason = CauseOutOfMemory, reason
	} else if reason != "" {
		exit.Reason = cause + ": " + reason
	}
	ls := m.livesOf(id)
	m.mu.Lock()
	delete(m.paused, id)
	delete(m.boots, id)
	m.mu.Unlock()
	for _, l := range ls {
		l.judge(exit)
	}
	for _, l := range ls {
		if l.fresh() {
			continue
		}
		select {
		case <-l.done:
		case <-ctx.Done():
			return
		}
	}
}

func (m *Manager) livesOf(id sandbox.ID) []*live {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*live
	for _, l := range m.lives {
		if l.id.Sandbox() == id {
			out = append(out, l)
		}
	}
	return out
}

// fresh reports whether the session has not been attached.
func (l *live) fresh() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.row.state == Created
}

func (l *live) running() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.row.state == Starting || l.row.state == Running
}

// judge makes the pump end the session with e, unless it has ended already.
func (l *live) judge(e Exit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.verdict != nil || l.row.exit != nil || l.row.state == Created {
		return
	}
	l.verdict = &e
	if l.stop != nil {
		l.stop()
	}
}

// SandboxPaused tells that the machine is not scheduled from now on: limits of
// commands stand still.
func (m *Manager) SandboxPaused(id sandbox.ID) {
	now := m.now()
	m.mu.Lock()
	if _, ok := m.paused[id]; !ok {
		m.paused[id] = now
	}
	m.mu.Unlock()
	for _, l := range m.livesOf(id) {
		l.mu.Lock()
		if l.row.pausedAt.IsZero() {
			l.row.pausedAt = now
		}
		l.mu.Unlock()
	}
	m.note("pause", func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE session_sessions SET paused_at=? WHERE sandbox=? AND state IN ('starting','running') AND paused_at IS NULL`,
			now.UnixMicro(), string(id))
		return err
	})
}

// SandboxResumed tells that the machine runs again.
func (m *Manager) SandboxResumed(id sandbox.ID) {
	now := m.now()
	m.mu.Lock()
	_, was := m.paused[id]
	delete(m.paused, id)
	m.mu.Unlock()
	for _, l := range m.livesOf(id) {
		l.mu.Lock()
		if !l.row.pausedAt.IsZero() {
			l.row.paused += now.Sub(l.row.pausedAt)
			l.row.pausedAt = time.Time{}
		}
		l.mu.Unlock()
		select {
		case l.kick <- struct{}{}:
		default:
		}
	}
	if !was {
		return
	}
	m.note("resume", func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE session_sessions SET paused_micros = paused_micros + (? - paused_at), paused_at = NULL
			WHERE sandbox=? AND paused_at IS NOT NULL`, now.UnixMicro(), string(id))
		return err
	})
}

// note commits what only accounts for paused time: without it, a limit ends a
// command a little early after a crash.
func (m *Manager) note(what string, fn func(ctx context.Context, tx *sql.Tx) error) {
	if err := m.commits.do(context.Background(), fn); err != nil {
		m.Log.Error("session times cannot be noted", "what", what, "error", err)
	}
}

// Erase removes every session of a deleted sandbox: running ones end first, then
// rows, keys, tokens and files go. It may be repeated.
func (m *Manager) Erase(ctx context.Context, id sandbox.ID) error {
	m.end(ctx, id, "deleted", "the sandbox was deleted")
	m.lastWords(ctx, id)
	if err := ctx.Err(); err != nil {
		return err
	}
	rows, err := m.rows(ctx, `sandbox=?`, string(id))
	if err != nil {
		return err
	}
	var revoked []tokenRow
	err = m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error {
		var err error
		if revoked, err = deleteTokens(ctx, tx, `sandbox=?`, string(id)); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM session_sessions WHERE sandbox=?`, string(id))
		return err
	})
	if err != nil {
		return err
	}
	m.cutTokens(revoked)
	m.mu.Lock()
	ended := m.kept[id]
	delete(m.kept, id)
	m.mu.Unlock()
	for _, k := range ended {
		m.Ledger.Refund(k.tenant, id, quota.JournalBytes, k.bytes)
	}
	for _, r := range rows {
		m.Ledger.Refund(r.tenant, id, quota.Sessions, 1)
		m.closeReaders(r.id)
	}
	return journal.Erase(filepath.Join(m.Dir, string(id)))
}

// lastWords gives readers the time to take the end of their session, which is
// recorded by now: those that keep up end by themselves at once. Who is slow
// holds no deletion for longer than half a second.
func (m *Manager) lastWords(ctx context.Context, id sandbox.ID) {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	for m.ActiveReaders(id) > 0 {
		select {
		case <-ctx.Done():
			return
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// closeReaders ends the streams of a session whose journal goes.
func (m *Manager) closeReaders(id sandbox.SessionID) {
	m.mu.Lock()
	l := m.lives[id]
	m.mu.Unlock()
	if l != nil {
		l.mu.Lock()
		j := l.journal
		l.mu.Unlock()
		if j != nil {
			m.forget(j)
			j.Close()
		}
	}
}

// pop takes the oldest ended session of a sandbox off the list that pick accepts.
func (m *Manager) pop(id sandbox.ID, pick func(kept) bool) (kept, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, k := range m.kept[id] {
		if pick(k) {
			m.kept[id] = slices.Delete(m.kept[id], i, i+1)
			if len(m.kept[id]) == 0 {
				delete(m.kept, id)
			}
			return k, true
		}
	}
	return kept{}, false
}

// evict removes the oldest ended session of a sandbox, to make room for a new one.
func (m *Manager) evict(ctx context.Context, id sandbox.ID) bool {
	k, ok := m.pop(id, func(kept) bool { return true })
	if !ok {
		return false
	}
	if err := m.remove(ctx, []kept{k}); err != nil {
		m.Log.Error("ended session cannot be removed", "session", k.id, "error", err)
		m.mu.Lock()
		m.kept[id] = append([]kept{k}, m.kept[id]...)
		m.mu.Unlock()
		return false
	}
	return true
}

// remove erases ended sessions that are off the list: rows and tokens, then files.
func (m *Manager) remove(ctx context.Context, ks []kept) error {
	var revoked []tokenRow
	err := m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error {
		revoked = nil
		for _, k := range ks {
			gone, err := deleteTokens(ctx, tx, `session=?`, string(k.id))
			if err != nil {
				return err
			}
			revoked = append(revoked, gone...)
			if _, err := tx.ExecContext(ctx, `DELETE FROM session_sessions WHERE id=?`, string(k.id)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	m.cutTokens(revoked)
	for _, k := range ks {
		m.closeReaders(k.id)
		if err := journal.Erase(m.dir(k.id)); err != nil {
			m.Log.Error("journal cannot be erased", "session", k.id, "error", err) // the next Recover does
		}
		m.Ledger.Refund(k.tenant, k.id.Sandbox(), quota.JournalBytes, k.bytes)
		m.Ledger.Refund(k.tenant, k.id.Sandbox(), quota.Sessions, 1)
	}
	return nil
}

// reclaim erases the output of the oldest ended session of a sandbox; its row
// and its exit stay.
func (m *Manager) reclaim(id sandbox.ID) bool {
	m.mu.Lock()
	i := slices.IndexFunc(m.kept[id], func(k kept) bool { return k.bytes > 0 })
	if i < 0 {
		m.mu.Unlock()
		return false
	}
	k := m.kept[id][i]
	m.kept[id][i].bytes = 0
	m.mu.Unlock()
	m.closeReaders(k.id)
	if err := journal.Erase(m.dir(k.id)); err != nil {
		m.Log.Error("journal cannot be erased", "session", k.id, "error", err)
	}
	m.Ledger.Refund(k.tenant, id, quota.JournalBytes, k.bytes)
	return true
}

// markDirty notes a journal for the next Sync.
func (m *Manager) markDirty(j *journal.Journal) {
	m.mu.Lock()
	m.dirty[j] = struct{}{}
	delete(m.resting, j)
	m.mu.Unlock()
}

func (m *Manager) forget(j *journal.Journal) {
	m.mu.Lock()
	delete(m.dirty, j)
	delete(m.resting, j)
	m.mu.Unlock()
}

// sweeper does what time asks for: sync, expiry, limits, activity.
func (m *Manager) sweeper() {
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-m.Clock.After(m.Limits.Sweep):
		}
		m.sync()
		m.expire(m.ctx)
		m.limits()
		m.retire()
		m.activity()
	}
}

// sync flushes what was appended since the last time, and closes the files of
// journals that had nothing since.
func (m *Manager) sync() {
	m.mu.Lock()
	dirty, resting := m.dirty, m.resting
	m.dirty, m.resting = map[*journal.Journal]struct{}{}, map[*journal.Journal]struct{}{}
	m.mu.Unlock()
	for j := range resting {
		j.Rest()
	}
	for j := range dirty {
		if err := j.Sync(); err != nil {
			m.Log.Error("journal cannot be synced", "error", err)
			m.markDirty(j)
			continue
		}
		m.mu.Lock()
		if _, again := m.dirty[j]; !again {
			m.resting[j] = struct{}{}
		}
		m.mu.Unlock()
	}
}

// expire ends the sessions that nobody attached in time, and old tokens.
func (m *Manager) expire(ctx context.Context) {
	cutoff := m.now().Add(-m.Limits.AttachWithin)
	if err := m.expireWhere(ctx, "nobody attached within the time allowed", `created_at<?`, cutoff.UnixMicro()); err != nil && m.ctx.Err() == nil {
		m.Log.Error("sessions cannot be expired", "error", err)
	}
	if err := m.expireTokens(ctx); err != nil && m.ctx.Err() == nil {
		m.Log.Error("tokens cannot be expired", "error", err)
	}
}

func (m *Manager) expireWhere(ctx context.Context, reason, where string, args ...any) error {
	rows, err := m.rows(ctx, `state='created' AND `+where+` LIMIT 500`, args...)
	if err != nil || len(rows) == 0 {
		return err
	}
	now := m.now()
	var gone []row
	err = m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error {
		gone = nil
		for _, r := range rows {
			r.state, r.exit, r.lastOffset = Expired, &Exit{Cause: CauseExpired, Code: -1, Reason: reason, At: now}, 1
			res, err := tx.ExecContext(ctx, `UPDATE session_sessions SET state='expired' WHERE id=? AND state='created'`, string(r.id))
			if err := one(res, err); errors.Is(err, errNoRow) {
				continue // attached just now
			} else if err != nil {
				return err
			}
			if err := m.markEnded(ctx, tx, r); err != nil {
				return err
			}
			if err := m.Auditor.Append(ctx, tx, audit.Entry{At: now, Tenant: r.tenant.String(), Actor: "node", Action: "session.expire",
				Target: string(r.id), Request: r.request}); err != nil {
				return err
			}
			gone = append(gone, r)
		}
		return nil
	})
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range gone {
		m.kept[r.sandbox] = append(m.kept[r.sandbox], kept{id: r.id, tenant: r.tenant})
		m.metrics.ended.WithLabelValues(CauseExpired).Inc()
	}
	return nil
}

// limits ends commands whose guest did not end them at their limit.
func (m *Manager) limits() {
	now := m.now()
	m.mu.Lock()
	ls := make([]*live, 0, len(m.lives))
	for _, l := range m.lives {
		ls = append(ls, l)
	}
	m.mu.Unlock()
	for _, l := range ls {
		l.mu.Lock()
		over := l.limit > 0 && l.row.exit == nil && l.row.state == Running && l.row.pausedAt.IsZero()
		ran := now.Sub(l.row.startedAt) - l.row.paused
		limit, killed := l.limit, l.killed
		if over = over && ran > limit+m.Limits.LimitSlack; over && !killed {
			l.killed = true
		}
		l.mu.Unlock()
		switch {
		case over && !killed:
			m.Log.Warn("a guest has not ended a command at its limit", "session", l.id, "limit", limit)
			m.wg.Go(func() {
				ctx, cancel := context.WithTimeout(m.ctx, m.Limits.LimitSlack)
				defer cancel()
				if err := l.kill(ctx); err != nil {
					m.Log.Warn("a command at its limit cannot be killed", "session", l.id, "error", err)
				}
			})
		case over && ran > limit+2*m.Limits.LimitSlack:
			l.judge(Exit{Cause: CauseTimeLimit, Code: -1, Reason: "the guest did not confirm the end of the process"})
		}
	}
}

// retire removes ended sessions that were kept long enough.
func (m *Manager) retire() {
	rows, err := m.rows(m.ctx, `ended_at IS NOT NULL AND ended_at<? ORDER BY ended_at LIMIT 100`, m.now().Add(-m.Limits.Retain).UnixMicro())
	if err != nil {
		if m.ctx.Err() == nil {
			m.Log.Error("old sessions cannot be listed", "error", err)
		}
		return
	}
	var ks []kept
	for _, r := range rows {
		if k, ok := m.pop(r.sandbox, func(k kept) bool { return k.id == r.id }); ok {
			ks = append(ks, k)
		}
	}
	if len(ks) == 0 {
		return
	}
	if err := m.remove(m.ctx, ks); err != nil {
		m.Log.Error("old sessions cannot be removed", "error", err)
		m.mu.Lock()
		for _, k := range ks {
			m.kept[k.id.Sandbox()] = append([]kept{k}, m.kept[k.id.Sandbox()]...)
		}
		m.mu.Unlock()
	}
}

// activity tells of sandboxes with a reader attached to a running session.
func (m *Manager) activity() {
	m.mu.Lock()
	active := map[sandbox.ID]bool{}
	for _, l := range m.lives {
		if l.readers > 0 {
			active[l.id.Sandbox()] = active[l.id.Sandbox()] || l.running()
		}
	}
	m.mu.Unlock()
	for id, ok := range active {
		if ok {
			m.Activity(id)
		}
	}
}

// ActiveReaders counts the streams that are open on sessions of a sandbox.
func (m *Manager) ActiveReaders(id sandbox.ID) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.readers[id]
}

// RunningSessions counts the sessions of a sandbox that are starting or running.
func (m *Manager) RunningSessions(id sandbox.ID) int {
	n := 0
	for _, l := range m.livesOf(id) {
		if l.running() {
			n++
		}
	}
	return n
}
