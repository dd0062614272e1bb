package node

import (
	"context"
	"database/sql"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// box is one sandbox on this node.
//
// mu is its turn: every decision about the sandbox and every write of its row
// happens with mu held, and no call to the runtime, the guest or a session hook
// does. Lock order: box.mu, then the database's writer, then Node.mu or ledger.mu.
type box struct {
	n  *Node
	id sandbox.ID

	// dueAt is when the limits must be looked at, in Unix nanoseconds; math.MaxInt64 = never.
	dueAt atomic.Int64
	wake  chan struct{} // buffered: something changed for a waiting actor

	mu      sync.Mutex
	row     row      // as durable, but for Steps, which are written when it settles
	pending *Outcome // latest unabsorbed one
	gone    bool     // a tombstone replaced it; look it up anew

	// What the last look at the host said.
	known   bool
	cond    runtime.Condition
	exit    *runtime.Exit
	bootID  string
	machine runtime.Machine
	created bool // this process has seen Create succeed
	ready   bool // the guest of the running machine is configured
	guest   guestclient.Guest

	// The actor.
	working    bool
	current    step
	cancel     context.CancelCauseFunc // of current; nil between steps
	waitingFor string
	attempts   int       // failures in a row
	bootSince  time.Time // when this boot or wake began to be waited for
	started    bool      // this process has started the machine and not seen it end
	bootDeaths int       // machines that died before they were ready, this generation
	lastErr    *operation.Problem

	activity time.Time
	busy     bool          // a session was running at the last look of the limits
	changed  chan struct{} // closed and replaced at every visible change
	keeping  context.CancelFunc
}

func newBox(n *Node, id sandbox.ID) *box {
	b := &box{n: n, id: id, wake: make(chan struct{}, 1), changed: make(chan struct{})}
	b.dueAt.Store(1<<63 - 1)
	return b
}

func (b *box) log() *slog.Logger {
	return b.n.log.With(slog.String("sandbox", string(b.id)), slog.String("tenant", b.row.Tenant))
}

// notify wakes who awaits a change. b.mu is held.
func (b *box) notify() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// commit makes a change of the row durable, with more in the same transaction,
// then visible. Nothing is changed when it fails. b.mu is held.
func (b *box) commit(ctx context.Context, change func(r *row), more func(tx *sql.Tx) error) error {
	r := b.row
	r.Steps = slices.Clone(r.Steps)
	was := r.observed()
	change(&r)
	r.Activity = b.activity
	if r.observed() != was {
		r.Since = b.n.clock.Now().UTC()
	}
	err := b.n.update(ctx, func(tx *sql.Tx) error {
		if err := saveRow(ctx, tx, &r); err != nil {
			return err
		}
		if more != nil {
			return more(tx)
		}
		return nil
	})
	if err != nil {
		return err
	}
	b.row = r
	b.n.ledger.set(b.id, chargeOf(&r))
	b.schedule()
	b.notify()
	return nil
}

// move is a step down that the node makes by itself: an outcome, durable before
// the machine is touched. b.mu is held.
func (b *box) move(ctx context.Context, to sandbox.State, trigger string, p *operation.Problem) error {
	if to == sandbox.Paused && b.row.BootID == "" {
		to = sandbox.Stopped // it is not up yet: there is no memory to keep, and a limit boots nothing
	}
	o := Outcome{ID: b.id, Tenant: b.row.Tenant, Generation: b.row.Generation, State: to, Trigger: trigger,
		Problem: p, At: b.n.clock.Now().UTC()}
	err := b.commit(ctx, func(r *row) { b.turnTo(r, to, trigger, p) }, func(tx *sql.Tx) error {
		if err := saveOutcome(ctx, tx, &o); err != nil {
			return err
		}
		return b.n.audit.Append(ctx, tx, audit.Entry{At: o.At, Tenant: o.Tenant, Actor: "node",
			Action: "sandbox." + trigger, Target: string(b.id), Detail: map[string]string{"state": string(to)}})
	})
	if err != nil {
		return err
	}
	b.pending = &o
	b.n.metrics.outcome(trigger)
	b.log().Info("moved by the node", slog.String("trigger", trigger), slog.String("state", string(to)),
		slog.Uint64("outcome", o.Seq), slog.Uint64("generation", o.Generation))
	b.n.signalOutcome()
	b.turned()
	return nil
}

// turnTo changes the row towards a state that the node chose. Failed and
// quarantined are answers in themselves: the assignment has ended with them,
// whatever is left to clean up.
func (b *box) turnTo(r *row, to sandbox.State, trigger string, p *operation.Problem) {
	r.Target, r.Problem = to, p
	r.Cause, r.Reason = trigger, ""
	if p != nil {
		r.Cause, r.Reason = p.Code, p.What
	}
	switch to {
	case sandbox.Failed, sandbox.Quarantined:
		r.State, r.Converged = to, true
		r.Down = to == sandbox.Failed
	case sandbox.Stopped, sandbox.Deleted:
		r.Down = true
	}
}

// fail ends an assignment that could not be reached; when it had been reached
// before, that is an outcome. b.mu is held.
func (b *box) fail(ctx context.Context, to sandbox.State, trigger string, p *operation.Problem) error {
	if b.row.Converged {
		return b.move(ctx, to, trigger, p)
	}
	now := b.n.clock.Now().UTC()
	err := b.commit(ctx, func(r *row) { b.turnTo(r, to, trigger, p) }, func(tx *sql.Tx) error {
		return b.n.audit.Append(ctx, tx, audit.Entry{At: now, Tenant: b.row.Tenant, Actor: "node",
			Action: "sandbox." + string(to), Target: string(b.id), Detail: map[string]string{"code": p.Code}})
	})
	if err != nil {
		return err
	}
	b.log().Warn("assignment ended", slog.String("state", string(to)), slog.String("code", p.Code),
		slog.Uint64("generation", b.row.Generation))
	b.turned()
	return nil
}

// turned starts or redirects the actor after the target has changed. b.mu is held.
func (b *box) turned() {
	b.attempts, b.waitingFor, b.lastErr = 0, "", nil
	if b.row.Target != sandbox.Running {
		b.ready = false
	}
	if b.cancel != nil {
		switch t := b.row.Target; b.current {
		case stepCreate, stepStart, stepConfigure, stepResume, stepPause:
			// What leads up gives way to what leads down.
			if t != sandbox.Running && t != sandbox.Paused {
				b.cancel(errOvertaken)
			}
		case stepLook, stepStop:
			if t == sandbox.Deleted {
				b.cancel(errOvertaken)
			}
		}
	}
	b.poke()
}

// poke makes sure that an actor looks at the sandbox. b.mu is held.
func (b *box) poke() {
	if b.gone {
		return
	}
	if b.working {
		select {
		case b.wake <- struct{}{}:
		default:
		}
		return
	}
	b.working = b.n.spawn(b.work)
}

// observe is what the node knows. b.mu is held.
func (b *box) observe() Observation {
	r := &b.row
	caps := b.n.caps
	o := Observation{
		ID: b.id, Generation: r.Generation, State: r.observed(), Converged: r.Converged, Problem: r.Problem,
		Steps: slices.Clone(r.Steps), WaitingFor: b.waitingFor, Class: caps.Class, Runtime: caps.Name,
		BootID: r.BootID, Since: r.Since,
	}
	if b.pending != nil {
		p := *b.pending
		o.Pending = &p
	}
	if o.WaitingFor == "" && !o.Converged && b.current != stepNone && b.current != stepLook {
		o.WaitingFor = "the host to " + stepWords[b.current] + " the machine"
		if b.current == stepConfigure {
			o.WaitingFor = "the guest daemon to answer"
		}
	}
	if o.Problem == nil && !o.Converged {
		o.Problem = b.lastErr
	}
	return o
}

// stepBegins notes a step with its time. b.mu is held.
func (b *box) stepBegins(s step) {
	if s == stepLook {
		return
	}
	now := b.n.clock.Now().UTC()
	steps := b.row.Steps
	if n := len(steps); n > 0 && steps[n-1].Name == string(s) && b.attempts > 0 {
		steps[n-1].EndedAt = time.Time{} // the same again
	} else {
		steps = append(steps, operation.Step{Name: string(s), StartedAt: now})
	}
	if len(steps) > operation.MaxSteps {
		steps = slices.Clone(steps[len(steps)-operation.MaxSteps:])
	}
	b.row.Steps = steps
	b.notify()
}

// stepEnds notes the end of the last step. b.mu is held.
func (b *box) stepEnds(s step) {
	if n := len(b.row.Steps); s != stepLook && n > 0 && b.row.Steps[n-1].Name == string(s) {
		b.row.Steps[n-1].EndedAt = b.n.clock.Now().UTC()
	}
}

// releaseGuest forgets the way to the guest. b.mu is held.
func (b *box) releaseGuest() {
	b.ready = false
	if b.guest != nil {
		go b.guest.Close()
		b.guest = nil
	}
	if b.keeping != nil {
		b.keeping()
		b.keeping = nil
	}
}
