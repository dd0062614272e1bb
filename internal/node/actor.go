package node

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

var (
	errOvertaken   = errors.New("node: a newer wish overtook this step")
	errStepTimeout = errors.New("node: step took too long")
	errDeadline    = errors.New("node: the assignment's deadline passed")
)

// Failpoints around every call that changes a machine: a process that dies at
// ".before" has decided and recorded, at ".after" it has acted and not recorded.
var failpoints = func() map[step][2]string {
	m := map[step][2]string{}
	for _, s := range []step{stepCreate, stepStart, stepConfigure, stepPause, stepResume, stepStop, stepDelete} {
		m[s] = [2]string{failpoint.Name("node." + string(s) + ".before"), failpoint.Name("node." + string(s) + ".after")}
	}
	return m
}()

// work is the actor: one goroutine while there is something to do for the
// sandbox, none when it is settled. It looks, does one step, and looks again.
func (b *box) work() {
	ctx := b.n.ctx
	for {
		b.mu.Lock()
		if ctx.Err() != nil || b.gone {
			b.working = false
			b.mu.Unlock()
			return
		}
		select { // what is seen from here on includes this wake-up
		case <-b.wake:
		default:
		}
		s := stepLook
		if b.known {
			s = next(b.view())
		}
		var err error
		switch s {
		case stepNone:
			var hook func()
			if hook, err = b.settle(ctx); err == nil {
				// Still the one actor while the hook runs, so that hooks keep their order.
				b.mu.Unlock()
				hook()
				b.mu.Lock()
				if len(b.wake) == 0 {
					b.working = false
					b.mu.Unlock()
					return
				}
			}
		case stepDied:
			err = b.fail(ctx, sandbox.Failed, triggerDied, diedProblem(b.exit))
		case stepLost:
			err = b.fail(ctx, sandbox.Failed, triggerAdoptedDead, lostProblem())
		default:
			b.mu.Unlock()
			b.perform(ctx, s)
			continue
		}
		b.mu.Unlock()
		if err != nil {
			b.n.log.Error("cannot record the state of a sandbox; will retry", slog.String("sandbox", string(b.id)), slog.Any("error", err))
			b.rest(ctx, time.Second)
		}
	}
}

// view is what the next step depends on. b.mu is held.
func (b *box) view() view {
	return view{target: b.row.Target, cond: b.cond, made: b.row.Made, whole: b.whole(), booted: b.row.BootID != "",
		down: b.row.Down, ready: b.ready}
}

// whole reports whether the machine is known to be completely made.
func (b *box) whole() bool {
	return b.row.Made || b.created || b.cond != runtime.Created && b.cond != absent
}

// settle records that nothing is left to do. It gives the session hook to call
// without the lock. b.mu is held.
func (b *box) settle(ctx context.Context) (hook func(), err error) {
	r := &b.row
	boot := ""
	if b.cond == runtime.Running || b.cond == runtime.Paused {
		boot = b.bootID
	}
	changed := !r.settled() || !r.Converged
	if changed || r.BootID != boot || r.Made != b.whole() {
		err := b.commit(ctx, func(r *row) {
			r.State, r.Converged, r.BootID, r.Down = r.Target, true, boot, false
			r.Made = b.whole()
		}, nil)
		if err != nil {
			return nil, err
		}
	}
	b.attempts, b.bootDeaths, b.waitingFor, b.lastErr = 0, 0, "", nil
	b.notify()
	if boot != "" {
		b.keep()
	} else {
		b.releaseGuest()
	}
	id, target, cause, reason := b.id, r.Target, r.Cause, r.Reason
	return func() {
		switch target {
		case sandbox.Running:
			b.n.sessions.SandboxResumed(id)
		case sandbox.Paused:
			b.n.sessions.SandboxPaused(id)
		default:
			b.n.sessions.SandboxEnded(id, cause, reason)
		}
	}, nil
}

// timeout bounds one run of a step.
func (b *box) timeout(s step, now time.Time) time.Duration {
	c := &b.n.cfg
	switch s {
	case stepCreate:
		return c.CreateTimeout
	case stepConfigure:
		return max(0, runtime.BootTimeout-now.Sub(b.bootSince))
	default:
		return c.StepTimeout
	}
}

// bounded gives a context that ends after d on the node's clock.
func (n *Node) bounded(ctx context.Context, d time.Duration, cause error) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-n.clock.After(d):
			cancel(cause)
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// open reports whether a deadline bounds what the actor does: only while it
// converges to what was assigned. A delete and the node's own moves never give up.
func (b *box) open() bool {
	return !b.row.Converged && b.row.Target == b.row.Desired && b.row.Target != sandbox.Deleted && !b.row.Deadline.IsZero()
}

// perform runs one step and takes in how it ended.
func (b *box) perform(ctx context.Context, s step) {
	b.mu.Lock()
	now := b.n.clock.Now()
	if s == stepConfigure && b.bootSince.IsZero() {
		b.bootSince = now
	}
	d, cause := b.timeout(s, now), errStepTimeout
	if b.open() {
		if left := b.row.Deadline.Sub(now); left <= d {
			d, cause = left, errDeadline
		}
	}
	r, machine := b.row, b.machine
	ctx, cancel := b.n.bounded(ctx, max(0, d), cause)
	defer cancel(nil)
	b.current, b.cancel = s, cancel
	b.stepBegins(s)
	b.mu.Unlock()

	err := ctx.Err()
	if err == nil && d <= 0 {
		err = cause
	}
	if err == nil {
		err = b.act(ctx, s, &r, machine)
	}
	took := b.n.clock.Now().Sub(now)
	b.n.metrics.step(s, took, err)

	b.mu.Lock()
	b.current, b.cancel = stepNone, nil
	b.stepEnds(s)
	if b.n.ctx.Err() != nil {
		b.mu.Unlock()
		return
	}
	if err == nil {
		if s != stepLook { // a look between two tries is no success
			b.attempts, b.waitingFor, b.lastErr = 0, "", nil
		}
		b.mu.Unlock()
		return
	}
	if c := context.Cause(ctx); c != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", c, err)
	}
	wait := b.failed(b.n.ctx, s, err)
	b.mu.Unlock()
	if wait > 0 {
		b.rest(b.n.ctx, wait)
	}
}

// act makes the call of a step, with its failpoints, and what must be recorded
// at once. b.mu is not held.
func (b *box) act(ctx context.Context, s step, r *row, m runtime.Machine) error {
	if s == stepLook {
		return b.look(ctx)
	}
	points := failpoints[s]
	if err := failpoint.Hit(ctx, points[0]); err != nil {
		return err
	}
	if err := b.call(ctx, s, r, m); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, points[1]); err != nil {
		return err
	}
	return b.record(ctx, s, r)
}

// call is the act itself: everything in it may happen twice.
func (b *box) call(ctx context.Context, s step, r *row, m runtime.Machine) (err error) {
	switch s {
	case stepCreate:
		m, err = b.n.rt.Create(ctx, r.spec().runtime())
		if err != nil {
			return err
		}
		b.mu.Lock()
		b.machine = m
		b.mu.Unlock()
		return nil
	case stepStart:
		return m.Start(ctx)
	case stepConfigure:
		return b.configure(ctx, r, m)
	case stepPause:
		return m.Pause(ctx)
	case stepResume:
		return m.Resume(ctx)
	case stepStop:
		b.mu.Lock()
		b.releaseGuest()
		over := b.cond != runtime.Running && b.cond != runtime.Paused
		b.mu.Unlock()
		if over {
			b.n.sessions.SandboxEnded(b.id, r.Cause, r.Reason)
		}
		if err := m.Stop(ctx); err != nil {
			return err
		}
		if !over {
			b.n.sessions.SandboxEnded(b.id, r.Cause, r.Reason)
		}
		return nil
	case stepDelete:
		b.mu.Lock()
		b.releaseGuest()
		b.mu.Unlock()
		if err := b.n.rt.Destroy(ctx, b.id); err != nil {
			return err
		}
		b.n.sessions.SandboxEnded(b.id, r.Cause, r.Reason)
		return b.n.sessions.Erase(ctx, b.id)
	}
	return fmt.Errorf("node: no step %q", s)
}

// record takes in what a successful call has changed.
func (b *box) record(ctx context.Context, s step, r *row) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch s {
	case stepCreate:
		b.created = true
		// Where there was a machine already, one of an earlier, unrecorded run may be further.
		b.known = b.cond == absent
		b.cond, b.bootID, b.exit = runtime.Created, "", nil
	case stepStart:
		// The boot's id comes from the host; configure asks for it meanwhile.
		b.ready, b.bootSince, b.started = false, time.Time{}, true
		b.cond, b.bootID, b.exit = runtime.Running, "", nil
	case stepConfigure:
		b.ready = true
	case stepPause:
		b.cond, b.ready = runtime.Paused, false
		b.known = b.bootID != ""
	case stepResume:
		b.cond, b.ready, b.bootSince = runtime.Running, false, time.Time{}
	case stepStop:
		b.known = false
		b.bootID = ""
		return b.commit(ctx, func(r *row) { r.Down, r.BootID = false, "" }, nil)
	case stepDelete:
		return b.bury(ctx)
	}
	return nil
}

// bury replaces the row by its tombstone. b.mu is held.
func (b *box) bury(ctx context.Context) error {
	now := b.n.clock.Now().UTC()
	err := b.n.update(ctx, func(tx *sql.Tx) error {
		if err := saveTombstone(ctx, tx, b.id, tombstone{Tenant: b.row.Tenant, Generation: b.row.Generation, Deleted: now}); err != nil {
			return err
		}
		return b.n.audit.Append(ctx, tx, audit.Entry{At: now, Tenant: b.row.Tenant, Actor: "node",
			Action: "sandbox.gone", Target: string(b.id), Detail: map[string]string{"cause": b.row.Cause}})
	})
	if err != nil {
		return err
	}
	b.gone = true
	b.n.forget(b)
	b.schedule()
	b.notify()
	return nil
}

// look asks the host what there is of the sandbox.
func (b *box) look(ctx context.Context) error {
	m, err := b.n.rt.Adopt(ctx, b.id)
	var st runtime.Status
	if err == nil {
		st, err = m.Status(ctx)
	}
	if errors.Is(err, runtime.ErrNotFound) {
		m, st, err = nil, runtime.Status{Condition: absent}, nil
	}
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.saw(ctx, m, st)
}

// saw takes in what the host said. b.mu is held.
func (b *box) saw(ctx context.Context, m runtime.Machine, st runtime.Status) error {
	r := &b.row
	if st.Condition != absent && r.Target != sandbox.Deleted && r.Target != sandbox.Quarantined {
		other := st.Spec != r.spec().runtime()
		reborn := (st.Condition == runtime.Running || st.Condition == runtime.Paused) && r.BootID != "" && st.BootID != r.BootID
		if other || reborn {
			// Not the machine that was recorded: kept for inspection, out of reach.
			b.machine, b.cond, b.bootID, b.exit, b.known = m, st.Condition, st.BootID, st.Exit, true
			b.releaseGuest()
			return b.fail(ctx, sandbox.Quarantined, triggerMismatch, mismatchProblem(other))
		}
	}
	if b.bootID != st.BootID || st.Condition != runtime.Running {
		b.ready = false
	}
	b.machine, b.cond, b.bootID, b.exit, b.known = m, st.Condition, st.BootID, st.Exit, true
	if m != nil && b.guest == nil && st.Condition == runtime.Running && r.State == sandbox.Running && r.Target == sandbox.Running && !r.Down {
		// Adopted: clients may go on at once, the guest is asked anew meanwhile.
		b.guest = b.newGuest(m)
	}
	if st.Condition == runtime.Dead && r.BootID == "" && !r.Down && r.Target == sandbox.Running && b.started {
		b.started = false
		// It died before it was ready. Limits of the guest's own making will be
		// met again; other ends get two more tries.
		b.bootDeaths++
		limit := st.Exit != nil && (st.Exit.Cause == runtime.CauseOutOfMemory || st.Exit.Cause == runtime.CauseProcesses)
		if limit || b.bootDeaths > maxBootDeaths {
			return b.fail(ctx, sandbox.Failed, triggerDied, diedProblem(st.Exit))
		}
	}
	return nil
}

// maxBootDeaths is how many machines may die before they are ready, per assignment.
const maxBootDeaths = 3

// failed takes in the error of a step and gives how long to rest. b.mu is held.
func (b *box) failed(ctx context.Context, s step, err error) time.Duration {
	if errors.Is(err, errOvertaken) {
		b.known = false
		return 0
	}
	b.known = false
	b.attempts++
	log := b.log().With(slog.String("step", string(s)), slog.Int("attempt", b.attempts))
	give := func(to sandbox.State, trigger string, p *operation.Problem) time.Duration {
		log.Warn("step failed for good", slog.Any("error", err))
		if err := b.fail(ctx, to, trigger, p); err != nil {
			log.Error("cannot record a failure; will retry", slog.Any("error", err))
			return time.Second
		}
		return 0
	}
	if errors.Is(err, errNoStatus) {
		b.bootSince = time.Time{} // the guest has answered: its time is not running
	}
	settling := b.row.Target == sandbox.Running || b.row.Target == sandbox.Paused
	switch {
	case !settling:
	case errors.Is(err, runtime.ErrNoTemplate):
		return give(sandbox.Failed, "limit", &operation.Problem{Code: "template_not_found",
			What: "the template of the sandbox is not on this host", Remedy: "create the sandbox from a template that exists"})
	case errors.Is(err, runtime.ErrSpecMismatch):
		return give(sandbox.Quarantined, triggerMismatch, mismatchProblem(true))
	case s == stepConfigure && fault.IsCode(err, "guest_protocol_error"):
		return give(sandbox.Quarantined, triggerProtocol, protocolProblem())
	case s == stepConfigure && b.silent(err):
		return give(b.n.cfg.OnUnresponsive, triggerUnresponsive, unresponsiveProblem())
	}
	if s == stepPause && b.row.Target == sandbox.Quarantined && b.attempts >= 3 {
		// Better without its memory than going on.
		if err := b.commit(ctx, func(r *row) { r.Down = true }, nil); err != nil {
			log.Error("cannot record a power-off; will retry", slog.Any("error", err))
		}
	}
	p := stepProblem(s, err)
	if b.open() && (errors.Is(err, errDeadline) || passed(b.row.Deadline, b.n.clock.Now())) {
		return give(sandbox.Failed, "limit", p)
	}
	b.lastErr = p
	wait := backoff(b.attempts)
	if s == stepConfigure {
		wait = min(wait, time.Second)
	}
	if b.open() {
		wait = max(time.Millisecond, min(wait, b.row.Deadline.Sub(b.n.clock.Now())))
	}
	b.waitingFor = fmt.Sprintf("another try to %s the machine: %s", s, p.What)
	b.notify()
	log.Warn("step failed; will retry", slog.Any("error", err), slog.Duration("in", wait))
	return wait
}

// silent reports whether the guest has had all its time to answer. b.mu is held.
func (b *box) silent(err error) bool {
	if errors.Is(err, runtime.ErrNotRunning) || errors.Is(err, runtime.ErrPaused) || errors.Is(err, errNoStatus) {
		return false // the host's matter, or the machine's end, not the guest's silence
	}
	return errors.Is(err, errStepTimeout) ||
		!b.bootSince.IsZero() && b.n.clock.Now().Sub(b.bootSince) >= runtime.BootTimeout
}

// backoff is exponential from 50 ms to 10 s, with jitter of a quarter.
func backoff(attempt int) time.Duration {
	d := min(10*time.Second, 50*time.Millisecond<<min(attempt-1, 8))
	return d*3/4 + rand.N(d/2)
}

// rest waits for d, or until something changes.
func (b *box) rest(ctx context.Context, d time.Duration) {
	select {
	case <-b.n.clock.After(d):
	case <-b.wake:
	case <-ctx.Done():
	}
}
