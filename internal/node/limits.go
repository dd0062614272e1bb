package node

import (
	"context"
	"log/slog"
	"math"
	"time"

	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
)

// The limits of time, and what counts as activity
//
// Expiry and deadline are wall-clock instants of the policy in force. Idle
// counts from the last activity: a call that was given the guest, Activity (the
// session manager reports every data-plane call, reader and exit), an applied
// assignment, or an adoption (nobody could reach the sandbox while the node was
// away). A sandbox with a running session is busy, with or without a reader:
// an unattended command is never cut off as idle, only by expiry or deadline.
// Whatever moves a sandbox is announced to its sessions (SandboxEnded,
// SandboxPaused).
//
// All decisions are made in the sandbox's turn (box.mu), the same that admits
// calls and applies assignments: a renewal either comes before the move and is
// in force, or comes after and is told ErrOutcomePending.
const (
	triggerExpired      = "expired"
	triggerDeadline     = "deadline"
	triggerIdle         = "idle"
	triggerDied         = "machine_died"
	triggerUnresponsive = "guest_unresponsive"
	triggerProtocol     = "guest_protocol_error"
	triggerAdoptedDead  = "adopted_dead"
	triggerMismatch     = "adoption_mismatch"
)

// maxSleep bounds how late a jump of the wall clock is noticed.
const maxSleep = 5 * time.Second

var limitProblems = map[string]operation.Problem{
	triggerExpired: {Code: "sandbox_expired", What: "the sandbox reached the end of its life time",
		Remedy: "wake it if it was paused or stopped; give new ones a longer life time, or renew in time"},
	triggerDeadline: {Code: "lifetime_over", What: "the sandbox reached its hard end",
		Why: "the maximal life time counts from creation and cannot be moved", Remedy: "create a new one"},
	triggerIdle: {Code: "sandbox_idle", What: "nobody used the sandbox for its idle time",
		Remedy: "wake it; or give it a longer idle time"},
}

// timeLimit tells which end of life has passed at now, and where that leads; ok
// is false when none has, or when the row is already as deep as that.
func timeLimit(r *row, now time.Time) (trigger string, to sandbox.State, ok bool) {
	if r.Target == sandbox.Quarantined || r.Target == sandbox.Deleted {
		return "", "", false
	}
	p := &r.Policy
	if passed(p.DeadlineAt, now) {
		to = sandbox.Stopped
		if p.OnExpire == sandbox.ActionDelete {
			to = sandbox.Deleted
		}
		if depth(to) > depth(r.Target) {
			return triggerDeadline, to, true
		}
	}
	if passed(p.ExpiresAt, now) {
		if to = actionState(p.OnExpire, sandbox.Stopped); depth(to) > depth(r.Target) {
			return triggerExpired, to, true
		}
	}
	return "", "", false
}

func passed(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

func actionState(a sandbox.Action, none sandbox.State) sandbox.State {
	switch a {
	case sandbox.ActionPause:
		return sandbox.Paused
	case sandbox.ActionStop:
		return sandbox.Stopped
	case sandbox.ActionDelete:
		return sandbox.Deleted
	}
	return none
}

// idles reports whether the idle limit is in force for r.
func idles(r *row) bool {
	return r.Policy.Idle > 0 && r.Target == sandbox.Running && r.State == sandbox.Running && !r.Down
}

// nextLimit is the next instant at which limits must be looked at; zero for never.
func nextLimit(r *row, activity time.Time) time.Time {
	if r.Target == sandbox.Quarantined || r.Target == sandbox.Deleted {
		return time.Time{}
	}
	var at time.Time
	earlier := func(t time.Time) {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	// Each limit only matters when its action leads deeper.
	hard := sandbox.Stopped
	if r.Policy.OnExpire == sandbox.ActionDelete {
		hard = sandbox.Deleted
	}
	if depth(hard) > depth(r.Target) {
		earlier(r.Policy.DeadlineAt)
	}
	if depth(actionState(r.Policy.OnExpire, sandbox.Stopped)) > depth(r.Target) {
		earlier(r.Policy.ExpiresAt)
	}
	if idles(r) {
		earlier(activity.Add(r.Policy.Idle))
	}
	return at
}

// enforceLimits runs until ctx ends. The heap of timers is a scan: dueAt is one
// atomic per sandbox, and a scan of ten thousand takes well under a millisecond.
func (n *Node) enforceLimits(ctx context.Context) {
	for {
		now := n.clock.Now()
		sleep := maxSleep
		for _, b := range n.all() {
			due := b.dueAt.Load()
			if due == math.MaxInt64 {
				continue
			}
			if wait := time.Unix(0, due).Sub(now); wait <= 0 {
				b.enforce(ctx)
				sleep = min(sleep, max(0, time.Unix(0, b.dueAt.Load()).Sub(now)))
			} else {
				sleep = min(sleep, wait)
			}
		}
		if n.purgeAt.IsZero() || passed(n.purgeAt, now) {
			n.purgeAt = now.Add(24 * time.Hour)
			n.purge(ctx)
		}
		select {
		case <-ctx.Done():
			return
		case <-n.limitKick:
		case <-n.clock.After(sleep):
		}
	}
}

// enforce decides in the sandbox's turn whether a limit moves it.
func (b *box) enforce(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	busy, asked := false, false
	if b.idleDue(b.n.clock.Now()) || b.busy && idles(&b.row) {
		asked = true
		// The session manager is asked without the turn: it may be calling in. What
		// begins meanwhile is activity, which is looked at again below.
		b.mu.Unlock()
		busy = b.n.sessions.RunningSessions(b.id) > 0
		b.mu.Lock()
	}
	b.busy = busy
	if b.gone {
		b.dueAt.Store(math.MaxInt64)
		return
	}
	now := b.n.clock.Now()
	trigger, to, ok := timeLimit(&b.row, now)
	if !ok && busy && idles(&b.row) {
		// Busy is activity. Looking again soon tells when it ended, unattended too.
		b.activity = now.UTC()
		again := now.Add(min(10*time.Second, max(100*time.Millisecond, b.row.Policy.Idle/10)))
		if at := timeLimitNext(&b.row); !at.IsZero() && at.Before(again) {
			again = at
		}
		b.dueAt.Store(again.UnixNano())
		return
	}
	if !ok && asked && b.idleDue(now) {
		trigger, to = triggerIdle, actionState(b.row.Policy.OnIdle, sandbox.Paused)
		ok = true // every action is deeper than running
	}
	if !ok {
		b.schedule()
		return
	}
	p := limitProblems[trigger]
	if err := b.move(ctx, to, trigger, &p); err != nil {
		b.n.log.Error("cannot record the end of a limit; will retry", slog.String("sandbox", string(b.id)),
			slog.String("trigger", trigger), slog.Any("error", err))
		b.dueAt.Store(now.Add(time.Second).UnixNano())
	}
}

// idleDue reports whether the idle time has passed without activity. b.mu is held.
func (b *box) idleDue(now time.Time) bool {
	return !b.gone && idles(&b.row) && !now.Before(b.activity.Add(b.row.Policy.Idle))
}

// timeLimitNext is nextLimit without idle.
func timeLimitNext(r *row) time.Time {
	c := *r
	c.Policy.Idle = 0
	return nextLimit(&c, time.Time{})
}

// schedule computes dueAt anew. b.mu is held.
func (b *box) schedule() {
	due := int64(math.MaxInt64)
	if at := nextLimit(&b.row, b.activity); !at.IsZero() && !b.gone && at.Year() < 2200 { // nanoseconds end in 2262
		due = at.UnixNano()
	}
	if b.dueAt.Swap(due) > due {
		select {
		case b.n.limitKick <- struct{}{}:
		default:
		}
	}
}
