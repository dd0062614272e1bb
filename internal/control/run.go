package control

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

const (
	refBatch     = 10_000 // unsettled sandboxes seen by one periodic pass
	overdueBatch = 256
	outcomeBatch = 256
	sweepBatch   = 500
	// orphanGeneration is above every generation that control gives, and the
	// highest that a node takes, so that a delete of what nobody knows is in force
	// whatever came before.
	orphanGeneration = uint64(1) << 62
)

// Run reconciles until ctx ends, then waits for what is under way. It is called
// once. Until it runs, intents are recorded and nothing else happens.
func (r *Reconciler) Run(ctx context.Context) error {
	r.mu.Lock()
	if r.run != nil {
		r.mu.Unlock()
		return errors.New("control: the reconciler runs already")
	}
	r.run = ctx
	r.mu.Unlock()
	r.loop(ctx, r.t.Period, "pass", r.periodic)
	r.loop(ctx, r.t.Sweep, "sweep", r.sweep)
	r.loop(ctx, r.t.PurgeEvery, "purge", func(ctx context.Context) error {
		n, err := r.s.store.System().Purge(ctx, r.s.now().Add(-r.t.Keep))
		if n > 0 {
			r.s.log.Info("purged old records", "rows", n)
		}
		return err
	})
	r.wg.Add(1)
	go func() {
		defer r.wg.Done()
		r.listen(ctx)
	}()
	<-ctx.Done()
	r.wg.Wait()
	return nil
}

// loop runs fn at once and then each period.
func (r *Reconciler) loop(ctx context.Context, period time.Duration, name string, fn func(context.Context) error) {
	r.wg.Add(1)
	go func() {
		defer r.wg.Done()
		for ctx.Err() == nil {
			if err := fn(ctx); err != nil && ctx.Err() == nil {
				r.s.log.Error("reconciler "+name, "err", err)
			}
			select {
			case <-ctx.Done():
			case <-r.s.clock.After(period):
			}
		}
	}()
}

// listen absorbs outcomes when the node hints at them, and each period.
func (r *Reconciler) listen(ctx context.Context) {
	for ctx.Err() == nil {
		hint := r.s.node.OutcomeSignal() // before listing, so that none falls between
		if err := r.outcomes(ctx); err != nil && ctx.Err() == nil {
			r.s.log.Warn("reconciler outcomes", "err", err)
			hint = nil // do not spin on a node that fails
		}
		select {
		case <-ctx.Done():
		case <-hint:
		case <-r.s.clock.After(r.t.Period):
		}
	}
}

// outcomes absorbs all that the node has.
func (r *Reconciler) outcomes(ctx context.Context) error {
	for {
		lctx, cancel := context.WithTimeout(ctx, r.t.CallLimit)
		list, err := r.s.node.Outcomes(lctx, outcomeBatch)
		cancel()
		if err != nil {
			return fmt.Errorf("control: outcomes: %w", err)
		}
		var errs []error
		for _, o := range list {
			if err := r.absorb(ctx, o); err != nil {
				errs = append(errs, fmt.Errorf("control: absorb %s: %w", o.ID, err))
				continue
			}
			if t, err := r.owner(ctx, o.ID); err == nil {
				r.launch(store.Ref{Tenant: t, ID: o.ID}, true)
			}
		}
		if len(list) < outcomeBatch || len(errs) == len(list) {
			return errors.Join(errs...)
		}
	}
}

func (r *Reconciler) owner(ctx context.Context, id sandbox.ID) (tenant.ID, error) {
	row, err := r.s.store.System().FindSandbox(ctx, id)
	return row.Tenant, err
}

// periodic is the truth behind the triggers.
func (r *Reconciler) periodic(ctx context.Context) error {
	overdue := r.overdue(ctx) // first: it needs no node
	refs, err := r.s.store.System().Unsettled(ctx, refBatch)
	if err != nil {
		return errors.Join(overdue, err)
	}
	r.s.metrics.lag.Set(float64(len(refs)))
	for _, ref := range refs {
		r.launch(ref, false)
	}
	return overdue
}

// overdue ends operations past their deadline. What was wanted stays wanted.
func (r *Reconciler) overdue(ctx context.Context) error {
	for {
		now := r.s.now()
		refs, err := r.s.store.System().OverdueOperations(ctx, now, overdueBatch)
		if err != nil || len(refs) == 0 {
			return err
		}
		for _, ref := range refs {
			err := r.update(ctx, ref, func(row *store.Sandbox, open []operation.Operation) (bool, error) {
				for i := range open {
					o := &open[i]
					if !o.DeadlineAt.Before(now) {
						continue
					}
					if o.Superseded != "" {
						end(o, operation.Cancelled, nil)
						continue
					}
					f := fault.New(fault.Deadline, "operation_timeout", "the %s did not end in time", o.Kind).
						Do("get the sandbox: what was asked for is still wanted and goes on; ask for another state to end that").Retry(true)
					if o.WaitingFor != "" {
						f = f.Because("it waited for %s", o.WaitingFor)
					}
					end(o, operation.Failed, operation.ProblemOf(f))
				}
				return false, nil
			}, nil)
			if err != nil {
				return err
			}
		}
		if len(refs) < overdueBatch {
			return nil
		}
	}
}

// sweep compares every living row with its node, and the node's list with the
// rows: what a lost report left behind is found here.
func (r *Reconciler) sweep(ctx context.Context) error {
	var errs []error
	var after sandbox.ID
	for {
		refs, err := r.s.store.System().Living(ctx, after, sweepBatch)
		if err != nil {
			return err
		}
		for _, ref := range refs {
			after = ref.ID
			if err := r.look(ctx, ref); err != nil {
				errs = append(errs, err)
			}
			if len(errs) > 3 {
				return errors.Join(errs...) // the node is away: another time
			}
		}
		if len(refs) < sweepBatch {
			break
		}
	}
	return errors.Join(append(errs, r.orphans(ctx))...)
}

// look launches work on a settled sandbox that its node sees otherwise.
func (r *Reconciler) look(ctx context.Context, ref store.Ref) error {
	row, err := r.s.store.Sandbox(ctx, ref.Tenant, ref.ID)
	if errors.Is(err, store.ErrNotFound) || err == nil && !row.DeletedAt.IsZero() {
		return nil
	}
	if err != nil {
		return err
	}
	obs, err := r.observe(ctx, row)
	switch {
	case errors.Is(err, node.ErrUnknown):
		if row.Problem != nil && row.Problem.Code == "machine_lost" && row.Converged >= row.Generation {
			return nil
		}
	case err != nil:
		return err
	case obs.Pending == nil && row.Converged >= row.Generation &&
		(obs.Generation < row.Generation || obs.Generation == row.Generation && obs.State == row.Observed):
		return nil
	}
	r.launch(ref, false)
	return nil
}

// orphans orders what the node has of no living row deleted. A row is always
// written before its node hears of it, so nothing that is being made is one;
// still it must be seen in two sweeps.
func (r *Reconciler) orphans(ctx context.Context) error {
	lctx, cancel := context.WithTimeout(ctx, r.t.CallLimit)
	known, err := r.s.node.Known(lctx)
	cancel()
	if err != nil {
		return fmt.Errorf("control: known: %w", err)
	}
	suspects := map[sandbox.ID]bool{}
	var errs []error
	for _, id := range known {
		row, err := r.s.store.System().FindSandbox(ctx, id)
		if err == nil && row.DeletedAt.IsZero() {
			continue
		}
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return err
		}
		octx, cancel := context.WithTimeout(ctx, r.t.CallLimit)
		obs, oerr := r.s.node.Observe(octx, row.Tenant, id)
		cancel()
		if oerr == nil && obs.State == sandbox.Deleted && obs.Converged {
			continue // the node's own tombstone
		}
		suspects[id] = true
		if !r.suspects[id] {
			continue
		}
		r.s.log.Error("orphan: the node has a sandbox of no living record; ordering its deletion", "sandbox", id)
		actx, cancel := context.WithTimeout(ctx, r.t.CallLimit)
		_, err = r.s.node.Apply(actx, node.Assignment{
			Tenant: row.Tenant, ID: id, Generation: orphanGeneration, Desired: sandbox.Deleted, Deadline: r.s.now().Add(r.s.limits.OperationTimeout),
		})
		cancel()
		if err != nil && !errors.Is(err, node.ErrUnknown) {
			errs = append(errs, fmt.Errorf("control: orphan %s: %w", id, err))
			continue
		}
		r.s.metrics.orphans.Inc()
	}
	r.suspects = suspects
	return errors.Join(errs...)
}
