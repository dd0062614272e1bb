package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/quota"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session/journal"
	"github.com/space-platform/space/internal/tenant"
)

// live is a session in memory: one that runs, or one that somebody uses now.
type live struct {
	m  *Manager
	id sandbox.SessionID
	// Of the row, and like the id they never change.
	tenant tenant.ID
	epoch  uint64

	refs    int // guarded by Manager.mu; the pump holds one
	readers int // guarded by Manager.mu: open streams

	start sync.Mutex // one start at a time; held before mu

	mu        sync.Mutex
	row       row
	journal   *journal.Journal
	stdin     uint64        // accepted, as last known
	limit     time.Duration // of running time; 0 = none
	killed    bool          // by the host, at its limit
	verdict   *Exit         // how the session is to end, told from outside
	stop      context.CancelFunc
	recovered bool

	kick  chan struct{} // wakes a pump that waits; capacity 1
	up    chan struct{} // closed when the guest has confirmed the start, or at the end
	upSet sync.Once
	ended chan struct{} // closed when the final event is in the journal
	done  chan struct{} // closed when the end is committed

	acks acker
}

func (m *Manager) newLive(r row) *live {
	l := &live{m: m, id: r.id, tenant: r.tenant, epoch: r.epoch, row: r, stdin: r.stdinOffset, kick: make(chan struct{}, 1), up: make(chan struct{}),
		ended: make(chan struct{}), done: make(chan struct{})}
	if r.exit != nil {
		l.markUp()
		close(l.ended)
		close(l.done)
	}
	return l
}

func (l *live) markUp() { l.upSet.Do(func() { close(l.up) }) }

// acquire gives the session in memory, loading it when needed; release it.
func (m *Manager) acquire(ctx context.Context, t tenant.ID, id sandbox.SessionID) (*live, error) {
	for range 10 {
		m.mu.Lock()
		if l := m.lives[id]; l != nil && !m.closed {
			defer m.mu.Unlock()
			if l.tenant != t {
				return nil, errNotFound
			}
			l.refs++
			return l, nil
		}
		closed := m.closed
		m.mu.Unlock()
		if closed {
			return nil, errClosing
		}
		r, err := m.rowOf(ctx, t, id)
		if err != nil {
			return nil, err
		}
		if r.exit == nil && r.state != Created {
			continue // it was started since we looked: it is in memory, or has ended
		}
		l := m.newLive(r)
		m.mu.Lock()
		if m.lives[id] == nil {
			m.lives[id] = l
		}
		m.mu.Unlock()
	}
	return nil, fault.New(fault.Unavailable, "recovering", "the session is being recovered").Do("try again in a moment")
}

func (m *Manager) release(l *live) {
	m.mu.Lock()
	l.refs--
	last := l.refs == 0 && m.lives[l.id] == l
	if last {
		delete(m.lives, l.id)
	}
	m.mu.Unlock()
	if last {
		l.closeJournal()
	}
}

func (l *live) closeJournal() {
	l.mu.Lock()
	j := l.journal
	l.mu.Unlock()
	if j != nil {
		l.m.forget(j)
		_ = j.Sync() // after a final event: done already
		j.Close()
	}
}

// openJournal opens the journal for writing. verify after a crash.
func (l *live) openJournal(verify bool) error {
	l.mu.Lock()
	r := l.row
	l.mu.Unlock()
	j, err := l.m.open(r, verify, account{l.m, r.tenant, r.sandbox})
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.journal = j
	l.mu.Unlock()
	return nil
}

func (m *Manager) open(r row, verify bool, a journal.Account) (*journal.Journal, error) {
	key, err := m.Sealer.Open(r.dataKey, bind(r, "data-key"))
	if err != nil || len(key) != 32 {
		return nil, fmt.Errorf("session: open data key of %s: %w", r.id, errors.Join(err, errors.New("no key of 32 bytes")))
	}
	return journal.Open(journal.Options{Dir: m.dir(r.id), Key: [32]byte(key), Epoch: r.epoch, MaxBytes: m.Limits.JournalBytes,
		SegmentBytes: m.Limits.SegmentBytes, Account: a, Dirty: m.markDirty, Now: m.Clock.Now, Verify: verify})
}

// account charges a journal's bytes; when the quota is used up, the output of
// ended sessions of the same sandbox goes first.
type account struct {
	m  *Manager
	t  tenant.ID
	id sandbox.ID
}

func (a account) Charge(n int64) error {
	for {
		err := a.m.Ledger.Charge(a.t, a.id, quota.JournalBytes, n)
		if err == nil || !a.m.reclaim(a.id) {
			return err
		}
	}
}
func (a account) Adopt(n int64)  { a.m.Ledger.Adopt(a.t, a.id, quota.JournalBytes, n) }
func (a account) Refund(n int64) { a.m.Ledger.Refund(a.t, a.id, quota.JournalBytes, n) }

// command opens the sealed command of a row.
func (m *Manager) command(r row) (Command, error) {
	var c Command
	plain, err := m.Sealer.Open(r.command, bind(r, "command"))
	if err != nil {
		return c, fmt.Errorf("session: open command of %s: %w", r.id, err)
	}
	if err := json.Unmarshal(plain, &c); err != nil {
		return c, fmt.Errorf("session: command of %s: %w", r.id, err)
	}
	return c, nil
}

// source is what a stream reads: a journal, or what is left of one.
type source interface {
	Ready() (journal.Event, bool, error)
	Next(ctx context.Context) (journal.Event, error)
	Position() uint64
	Close()
}

// read opens the events after the id. For a session that never started it
// waits for nothing: callers start it first, or refuse.
func (l *live) read(after journal.ID) (source, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.row
	if after.Epoch != r.epoch && after != (journal.ID{}) {
		return nil, fault.New(fault.Invalid, "unknown_event_id", "the event id is of epoch %d, the session is in %d", after.Epoch, r.epoch).
			Do("read from the start, or from an id that this session has sent")
	}
	if l.journal == nil && r.exit != nil {
		if _, err := os.Stat(l.m.dir(r.id)); err == nil {
			j, err := l.m.open(r, false, nil)
			if err != nil {
				return nil, err
			}
			if j.State().End == r.lastOffset && r.lastOffset > 0 {
				l.journal = j
			} else {
				j.Close()
			}
		}
		if l.journal == nil {
			return tail(r, after.Offset)
		}
	}
	if l.journal == nil {
		return nil, errNotStarted
	}
	rd, err := l.journal.From(after.Offset)
	switch {
	case errors.Is(err, journal.ErrBeyond):
		return nil, errBeyond(after)
	case errors.Is(err, journal.ErrClosed) && r.exit != nil:
		return tail(r, after.Offset)
	case err != nil:
		return nil, fmt.Errorf("session: read: %w", err)
	}
	return rd, nil
}

func errBeyond(after journal.ID) error {
	return fault.New(fault.Invalid, "unknown_event_id", "the event id %s is beyond the last event", after).
		Do("read from the start, or from an id that this session has sent")
}

var errNotStarted = fault.New(fault.Conflict, "session_not_started", "the session has not been attached yet").
	Do("attach to it first: that starts the command")

// remnant is the end of a session whose journal is gone: a gap and the final event.
type remnant struct {
	events []journal.Event
	pos    uint64
}

func tail(r row, after uint64) (source, error) {
	end := max(r.lastOffset, 1)
	if after > end {
		return nil, errBeyond(journal.ID{Epoch: r.epoch, Offset: after})
	}
	s := &remnant{pos: after}
	if after < end-1 {
		s.events = append(s.events, journal.Event{Kind: journal.Gap, Start: after, End: end - 1, At: r.exit.At, Data: journal.GapData("erased", end-1-after)})
	}
	if after < end {
		k, data := finalEvent(*r.exit)
		s.events = append(s.events, journal.Event{Kind: k, Start: end - 1, End: end, At: r.exit.At, Data: data})
	}
	return s, nil
}

func (s *remnant) Ready() (journal.Event, bool, error) {
	if len(s.events) == 0 {
		return journal.Event{}, false, errEnd
	}
	ev := s.events[0]
	s.events = s.events[1:]
	s.pos = ev.End
	return ev, true, nil
}

func (s *remnant) Next(context.Context) (journal.Event, error) {
	ev, _, err := s.Ready()
	return ev, err
}
func (s *remnant) Position() uint64 { return s.pos }
func (s *remnant) Close()           {}
