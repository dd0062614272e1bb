package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

var (
	fpBeforeApply   = failpoint.Name("control.reconcile.before_apply")
	fpAfterApply    = failpoint.Name("control.reconcile.after_apply")
	fpBeforeObserve = failpoint.Name("control.reconcile.before_observe")
)

// Reconciler converges sandboxes. One flight (goroutine) per sandbox at most in
// this process; a slot is held only while it works, not while it waits.
type Reconciler struct {
	s     *Service
	t     Tuning
	slots chan struct{}

	mu      sync.Mutex
	run     context.Context        // guarded by mu; nil while not running
	flights map[sandbox.ID]*flight // guarded by mu
	wg      sync.WaitGroup

	suspects map[sandbox.ID]bool // orphans of the last sweep; only the sweep uses it
}

// flight is the work on one sandbox. Both fields are guarded by Reconciler.mu.
type flight struct {
	again     bool // something changed since the row was read
	interrupt context.CancelFunc
}

func newReconciler(s *Service, t Tuning) *Reconciler {
	return &Reconciler{
		s: s, t: t, slots: make(chan struct{}, t.Workers),
		flights: map[sandbox.ID]*flight{}, suspects: map[sandbox.ID]bool{},
	}
}

// maxTries ends a flight that gets nowhere; the periodic pass begins a new one.
const maxTries = 8

// Trigger says that ref may need work. It never blocks; what it drops, the
// periodic pass finds.
func (r *Reconciler) Trigger(ref store.Ref) { r.launch(ref, true) }

func (r *Reconciler) launch(ref store.Ref, urgent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.run == nil || r.run.Err() != nil {
		return
	}
	if f := r.flights[ref.ID]; f != nil {
		if urgent {
			f.again = true
			if f.interrupt != nil {
				f.interrupt()
			}
		}
		return
	}
	if len(r.flights) >= r.t.Queue {
		return
	}
	f := &flight{}
	r.flights[ref.ID] = f
	r.wg.Add(1)
	go func(ctx context.Context) {
		defer r.wg.Done()
		r.fly(ctx, ref, f)
	}(r.run)
}

// fly works on one sandbox until it is settled.
func (r *Reconciler) fly(ctx context.Context, ref store.Ref, f *flight) {
	for tries := 0; ; {
		settled, err := r.pass(ctx, ref, f)
		r.mu.Lock()
		again := f.again
		f.again = false
		if ctx.Err() != nil || !again && (settled || tries >= maxTries) {
			delete(r.flights, ref.ID)
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		if again || err == nil {
			tries = 0
			continue
		}
		r.s.log.Warn("reconcile: will try again", "sandbox", ref.ID, "tenant", ref.Tenant.String(), "try", tries, "err", err)
		r.rest(ctx, f, min(r.t.Backoff<<tries, 30*time.Second))
		tries++
	}
}

// interruptible gives a context that Trigger ends.
func (r *Reconciler) interruptible(ctx context.Context, f *flight) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	f.interrupt = cancel
	if f.again {
		cancel()
	}
	return ctx, func() {
		cancel()
		r.mu.Lock()
		defer r.mu.Unlock()
		f.interrupt = nil
	}
}

func (r *Reconciler) rest(ctx context.Context, f *flight, d time.Duration) {
	ctx, done := r.interruptible(ctx, f)
	defer done()
	select {
	case <-ctx.Done():
	case <-r.s.clock.After(d):
	}
}

// pass holds a slot for one reconciliation.
func (r *Reconciler) pass(ctx context.Context, ref store.Ref, f *flight) (settled bool, err error) {
	select {
	case r.slots <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	defer func() { <-r.slots }()
	begun := r.s.now()
	settled, err = r.reconcile(ctx, ref, f)
	result := "unsettled"
	if settled {
		result = "settled"
	} else if err != nil {
		result = "error"
	}
	r.s.metrics.passes.WithLabelValues(result).Observe(r.s.now().Sub(begun).Seconds())
	return settled, err
}

// maxRounds bounds one reconciliation: each round reads the row anew.
const maxRounds = 64

// errUnsteady: the node and the row did not come together within maxRounds.
var errUnsteady = errors.New("control: row and node keep changing")

// reconcile brings one sandbox as far as it goes now. With a nil flight it does
// not wait for the node.
func (r *Reconciler) reconcile(ctx context.Context, ref store.Ref, f *flight) (settled bool, err error) {
	for range maxRounds {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		row, err := r.s.store.Sandbox(ctx, ref.Tenant, ref.ID)
		if errors.Is(err, store.ErrNotFound) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		if !row.DeletedAt.IsZero() {
			return true, r.closeDeleted(ctx, ref)
		}
		obs, err := r.observe(ctx, row)
		unknown := errors.Is(err, node.ErrUnknown)
		if err != nil && !unknown {
			return false, r.delayed(ctx, ref, "the node, which does not answer", err)
		}
		if unknown && row.Desired != sandbox.Deleted && row.Class != "" {
			// It had run: making it anew would pass off an empty machine as the old one.
			if row.Observed == sandbox.Failed && row.Converged >= row.Generation {
				return true, nil // told already; only a request goes on from here
			}
			if err := r.lost(ctx, row); err != nil {
				return false, err
			}
			continue
		}
		if !unknown {
			if obs.Pending != nil {
				if err := r.absorb(ctx, *obs.Pending); err != nil {
					return false, err
				}
				continue
			}
			if row, err = r.record(ctx, ref, obs); err != nil {
				return false, err
			}
			if !row.DeletedAt.IsZero() {
				continue
			}
		}
		if row.Converged >= row.Generation {
			return true, nil
		}
		if unknown || obs.Generation < row.Generation {
			again, err := r.apply(ctx, ref, row)
			if err != nil {
				return false, err
			}
			if again {
				continue
			}
		}
		if f == nil {
			return false, nil
		}
		if err := r.wait(ctx, ref, f, row.Generation); err != nil {
			return false, err
		}
	}
	return false, errUnsteady
}

func (r *Reconciler) observe(ctx context.Context, row store.Sandbox) (node.Observation, error) {
	ctx, cancel := context.WithTimeout(ctx, r.t.CallLimit)
	defer cancel()
	return r.s.node.Observe(ctx, row.Tenant, row.ID)
}

// apply gives the generation in force to the node. again means that the row is
// to be read anew at once.
func (r *Reconciler) apply(ctx context.Context, ref store.Ref, row store.Sandbox) (again bool, err error) {
	a, gone, err := r.assignment(ctx, ref, row.Generation)
	if gone {
		return true, nil
	}
	if err != nil {
		var f *fault.Error
		if errors.As(err, &f) {
			return true, r.refused(ctx, ref, row.Generation, f)
		}
		return false, err
	}
	if err := failpoint.Hit(ctx, fpBeforeApply); err != nil {
		return false, err
	}
	actx, cancel := context.WithTimeout(ctx, r.t.CallLimit)
	defer cancel()
	obs, err := r.s.node.Apply(actx, a)
	if hit := failpoint.Hit(ctx, fpAfterApply); hit != nil {
		return false, hit
	}
	var f *fault.Error
	switch {
	case err == nil:
		if obs.Pending != nil {
			return true, nil
		}
		cur, err := r.record(ctx, ref, obs)
		return err == nil && cur.Converged >= cur.Generation, err
	case errors.Is(err, node.ErrUnknown) && a.Desired == sandbox.Deleted:
		// Nothing there to delete, and nothing kept: it is deleted.
		_, err := r.record(ctx, ref, node.Observation{ID: ref.ID, Generation: a.Generation, State: sandbox.Deleted, Converged: true})
		return true, err
	case errors.Is(err, node.ErrOutcomePending), errors.Is(err, node.ErrStale):
		return true, nil // the next observation shows the outcome, or the node's generation
	case errors.As(err, &f) && f.Code == "capacity":
		return false, r.delayed(ctx, ref, "room on the node: "+f.What, err)
	case errors.As(err, &f) && !f.Retryable && f.Class != fault.Internal && f.Class != fault.Deadline:
		return true, r.refused(ctx, ref, row.Generation, f)
	default:
		return false, r.delayed(ctx, ref, "the node, which does not answer", err)
	}
}

// assignment builds what the node is asked for. gone: the row is no longer at
// this generation.
func (r *Reconciler) assignment(ctx context.Context, ref store.Ref, generation uint64) (a node.Assignment, gone bool, err error) {
	var row store.Sandbox
	var open []operation.Operation
	err = r.s.store.Mutate(ctx, ref.Tenant, func(tx store.Tx) (err error) {
		if row, err = tx.Sandbox(ref.ID); err != nil {
			return err
		}
		open, err = tx.OpenOperations(ref.ID)
		return err
	})
	if err != nil {
		return a, false, err
	}
	if row.Generation != generation || !row.DeletedAt.IsZero() {
		return a, true, nil
	}
	a = node.Assignment{
		Tenant: row.Tenant, ID: row.ID, Generation: row.Generation, Desired: row.Desired,
		TemplateDigest: row.TemplateDigest, Resources: row.Resources, Policy: row.Policy,
	}
	for _, o := range open {
		if o.DeadlineAt.After(a.Deadline) && o.Superseded == "" {
			a.Deadline = o.DeadlineAt
		}
		if o.Generation > row.Converged && (o.Kind == sandbox.Start || o.Kind == sandbox.Wake) && row.Desired == sandbox.Running {
			a.Restart = true
		}
	}
	if now := r.s.now(); !a.Deadline.After(now) {
		a.Deadline = now.Add(r.s.limits.OperationTimeout)
	}
	if len(row.SealedEnv) > 0 && row.Desired != sandbox.Deleted {
		unreadable := fault.New(fault.Conflict, "env_unreadable", "the sandbox's environment cannot be opened").
			Because("it was sealed with another key").Do("delete the sandbox and create it again")
		if r.s.sealer == nil {
			return a, false, unreadable
		}
		plain, err := r.s.sealer.Open(row.SealedEnv, envAAD(row.Tenant, row.ID))
		if err != nil {
			return a, false, unreadable.Wrap(err)
		}
		if err := json.Unmarshal(plain, &a.Env); err != nil {
			return a, false, unreadable.Wrap(errors.New("control: sealed environment is not a map"))
		}
	}
	return a, false, nil
}

// wait waits for the node to come further with generation, without its slot,
// and records what it says. A trigger ends the wait.
func (r *Reconciler) wait(ctx context.Context, ref store.Ref, f *flight, generation uint64) error {
	actx, done := r.interruptible(ctx, f)
	defer done()
	actx, cancel := context.WithTimeout(actx, r.t.AwaitSlice)
	defer cancel()
	<-r.slots
	obs, err := r.s.node.Await(actx, ref.Tenant, ref.ID, generation)
	r.slots <- struct{}{} // never for long: holders of slots do bounded work
	r.mu.Lock()
	f.again = false // the row is read anew now
	r.mu.Unlock()
	switch {
	case errors.Is(err, node.ErrUnknown):
		return nil // the next round decides
	case actx.Err() != nil:
		return nil // interrupted, or a slice is over: look at everything again
	case err != nil:
		return r.delayed(ctx, ref, "the node, which does not answer", err)
	case obs.Pending != nil:
		return nil
	}
	_, err = r.record(ctx, ref, obs)
	return err
}

// delayed says in the open operations what they wait for, and gives cause back.
func (r *Reconciler) delayed(ctx context.Context, ref store.Ref, reason string, cause error) error {
	if ctx.Err() != nil {
		return cause
	}
	err := r.update(ctx, ref, func(row *store.Sandbox, open []operation.Operation) (bool, error) {
		for i := range open {
			open[i].WaitingFor = reason
		}
		return false, nil
	}, nil)
	return errors.Join(cause, err)
}

// refused ends a generation that the node will never take.
func (r *Reconciler) refused(ctx context.Context, ref store.Ref, generation uint64, f *fault.Error) error {
	r.s.log.Error("reconcile: refused for good", "sandbox", ref.ID, "tenant", ref.Tenant.String(), "generation", generation, "err", f)
	_, err := r.record(ctx, ref, node.Observation{
		ID: ref.ID, Generation: generation, State: sandbox.Failed, Converged: true, Problem: operation.ProblemOf(f),
	})
	if err != nil {
		return fmt.Errorf("refused: %w", err)
	}
	return nil
}
