package node

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
	"github.com/space-platform/space/internal/tenant"
)

// Apply implements API. Everything is decided in the sandbox's turn; the actor
// does the rest.
func (n *Node) Apply(ctx context.Context, a Assignment) (Observation, error) {
	if err := a.check(); err != nil {
		return Observation{}, err
	}
	if !n.ready() {
		return Observation{}, errNotServing()
	}
	sealed, err := n.sealEnv(a.ID, a.Tenant.String(), a.Env)
	if err != nil {
		return Observation{}, err
	}
	for {
		b := n.boxFor(a.ID)
		b.mu.Lock()
		if b.gone {
			b.mu.Unlock()
			continue // another box has taken its place, or none
		}
		o, err := b.apply(ctx, a, sealed)
		b.mu.Unlock()
		return o, err
	}
}

func (a *Assignment) check() error {
	invalid := func(what string, args ...any) error {
		return fault.New(fault.Invalid, "invalid_assignment", what, args...)
	}
	switch a.Desired {
	case sandbox.Running, sandbox.Paused, sandbox.Stopped, sandbox.Deleted:
	default:
		return invalid("a node cannot make a sandbox %q", a.Desired)
	}
	if _, err := sandbox.ParseID(string(a.ID)); err != nil {
		return err
	}
	// Only what nobody's record knows is deleted without a tenant: an orphan of a
	// control store that was lost or set back.
	if a.Tenant.IsZero() && a.Desired != sandbox.Deleted || a.Generation == 0 || a.Generation > 1<<62 {
		return invalid("an assignment needs a tenant and a generation")
	}
	return nil
}

// apply decides about one assignment. b.mu is held.
func (b *box) apply(ctx context.Context, a Assignment, sealed []byte) (Observation, error) {
	n := b.n
	fresh := b.row.ID == ""
	if fresh {
		defer func() {
			if b.row.ID == "" { // nothing came of it
				b.gone = true
				n.forget(b)
			}
		}()
		if t, ok, err := loadTombstone(ctx, n.db.Read, b.id); err != nil {
			return Observation{}, fmt.Errorf("node: %w", err)
		} else if ok {
			return b.applyDead(ctx, a, t)
		}
		if a.Tenant.IsZero() {
			return Observation{}, fmt.Errorf("%w: %s", ErrUnknown, a.ID)
		}
	} else {
		switch r := &b.row; {
		case r.Tenant == "" && a.Desired != sandbox.Deleted: // an orphan on its way out
			return Observation{}, deletedFault()
		case r.Tenant != "" && r.Tenant != a.Tenant.String() && !a.Tenant.IsZero():
			return Observation{}, notFound()
		case a.Generation < r.Generation:
			return b.observe(), fmt.Errorf("%w: %d is in force, not %d", ErrStale, r.Generation, a.Generation)
		case a.Generation == r.Generation:
			b.poke()
			return b.observe(), nil
		}
		if a.Desired != sandbox.Deleted {
			if b.row.Target == sandbox.Deleted && b.pending == nil {
				// A delete is never undone, whatever comes after it.
				return b.observe(), deletedFault()
			}
			// A limit that has passed is in force even if its timer has not fired yet.
			if trigger, to, ok := timeLimit(&b.row, n.clock.Now()); ok && b.pending == nil {
				p := limitProblems[trigger]
				if err := b.move(ctx, to, trigger, &p); err != nil {
					return b.observe(), err
				}
			}
			if b.pending != nil {
				return b.observe(), fmt.Errorf("%w: %s", ErrOutcomePending, b.pending.Trigger)
			}
		}
	}

	now := n.clock.Now().UTC()
	change := func(r *row) { assign(r, a, sealed, now, fresh) }
	r := b.row
	change(&r)
	want := chargeOf(&r)
	if up := a.Desired == sandbox.Running || a.Desired == sandbox.Paused; a.Desired == sandbox.Deleted || !up && !fresh {
		n.ledger.set(b.id, want) // what leads down needs no admission, nor does a delete of what is unknown here
	} else if err := n.ledger.reserve(b.id, want); err != nil {
		return b.observe(), err
	}
	old := b.activity
	b.activity = now
	err := b.commit(ctx, change, func(tx *sql.Tx) error {
		if a.Desired != sandbox.Deleted {
			return nil
		}
		// Whatever the node did by itself is overtaken.
		_, err := tx.ExecContext(ctx, `DELETE FROM node_outcomes WHERE id = ?`, string(b.id))
		return err
	})
	if err != nil {
		b.activity = old
		if !fresh {
			n.ledger.set(b.id, chargeOf(&b.row))
		}
		return b.observe(), err
	}
	if a.Desired == sandbox.Deleted {
		b.pending = nil
	}
	b.bootDeaths = 0
	if fresh && a.Desired != sandbox.Deleted {
		b.known, b.cond = true, absent // Start has found every machine that there is
	}
	if !b.row.Converged || !b.row.settled() {
		b.turned()
	}
	return b.observe(), nil
}

// assign puts a newer assignment into the row.
func assign(r *row, a Assignment, sealed []byte, now time.Time, fresh bool) {
	was := *r
	r.ID, r.Generation, r.Desired = a.ID, a.Generation, a.Desired
	if !a.Tenant.IsZero() {
		r.Tenant = a.Tenant.String()
	}
	r.Policy, r.Deadline, r.Steps = a.Policy, a.Deadline, nil
	if fresh {
		r.Template, r.Resources = a.TemplateDigest, a.Resources
		r.State, r.Created, r.Since = sandbox.Creating, now, now
	}
	if a.Desired != sandbox.Deleted {
		r.SealedEnv = sealed
	}
	r.Target, r.Converged = a.Desired, false
	switch a.Desired {
	case sandbox.Deleted:
		r.Down, r.Cause, r.Reason = !fresh, "deleted", ""
		return
	case sandbox.Stopped:
		if was.State != sandbox.Stopped || was.Target != sandbox.Stopped {
			r.Down, r.Cause, r.Reason = !fresh, "stopped", ""
		}
	default:
		// Failed and quarantined stay so: only a restart leads out of the first,
		// only a release (stopped) or a delete out of the second.
		if was.Target == sandbox.Quarantined || was.Target == sandbox.Failed && !a.Restart {
			r.Target, r.Converged = was.Target, true
			return
		}
	}
	r.Problem = nil
	if r.Target == was.Target && was.settled() && was.Converged {
		r.Converged = true // only policy or environment changed
	}
}

func deletedFault() error {
	return fault.New(fault.Gone, "sandbox_deleted", "the sandbox is deleted").Wrap(ErrStale)
}

// applyDead answers for an id that is deleted. b.mu is held; b is empty.
func (b *box) applyDead(ctx context.Context, a Assignment, t tombstone) (Observation, error) {
	pending, err := b.n.pendingOf(ctx, b.id)
	if err != nil {
		return Observation{}, err
	}
	switch {
	case t.Tenant != "" && t.Tenant != a.Tenant.String() && !a.Tenant.IsZero():
		return Observation{}, notFound()
	case a.Desired != sandbox.Deleted && pending != nil && a.Generation > t.Generation:
		return t.observe(b.id, pending), fmt.Errorf("%w: %s", ErrOutcomePending, pending.Trigger)
	case a.Generation < t.Generation:
		return t.observe(b.id, pending), fmt.Errorf("%w: deleted at %d", ErrStale, t.Generation)
	case a.Desired != sandbox.Deleted:
		return t.observe(b.id, pending), deletedFault()
	}
	t.Generation, t.Tenant = a.Generation, a.Tenant.String()
	err = b.n.update(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `DELETE FROM node_outcomes WHERE id = ?`, string(b.id)); err != nil {
			return err
		}
		return saveTombstone(ctx, tx, b.id, t)
	})
	return t.observe(b.id, nil), err
}

func (t tombstone) observe(id sandbox.ID, pending *Outcome) Observation {
	return Observation{ID: id, Generation: t.Generation, State: sandbox.Deleted, Converged: true, Since: t.Deleted, Pending: pending}
}

// pendingOf reads the latest unabsorbed outcome of id.
func (n *Node) pendingOf(ctx context.Context, id sandbox.ID) (*Outcome, error) {
	all, err := loadOutcomes(ctx, n.db.Read, id, 0)
	if err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	if len(all) == 0 {
		return nil, nil
	}
	return &all[len(all)-1], nil
}

// observation reads what is known and the channel that its next change closes; nil
// for a tombstone, which never changes.
func (n *Node) observation(ctx context.Context, t tenant.ID, id sandbox.ID) (Observation, <-chan struct{}, error) {
	if b := n.box(id); b != nil {
		b.mu.Lock()
		if !b.gone && b.row.ID != "" {
			defer b.mu.Unlock()
			if b.row.Tenant != t.String() {
				return Observation{}, nil, ErrUnknown
			}
			return b.observe(), b.changed, nil
		}
		b.mu.Unlock()
	}
	dead, ok, err := loadTombstone(ctx, n.db.Read, id)
	if err != nil {
		return Observation{}, nil, fmt.Errorf("node: %w", err)
	}
	if !ok || dead.Tenant != t.String() {
		return Observation{}, nil, ErrUnknown
	}
	pending, err := n.pendingOf(ctx, id)
	return dead.observe(id, pending), nil, err
}

// Observe implements API.
func (n *Node) Observe(ctx context.Context, t tenant.ID, id sandbox.ID) (Observation, error) {
	o, _, err := n.observation(ctx, t, id)
	return o, err
}

// Await implements API: the state to differ from is the one at the call.
func (n *Node) Await(ctx context.Context, t tenant.ID, id sandbox.ID, generation uint64) (Observation, error) {
	first := sandbox.State("")
	var last Observation
	for {
		o, changed, err := n.observation(context.WithoutCancel(ctx), t, id)
		if err != nil {
			return last, err
		}
		last = o
		if first == "" {
			first = o.State
		}
		if o.Generation >= generation && o.Converged || o.State != first || changed == nil {
			return o, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return o, ctx.Err()
		case <-n.ctx.Done():
			return o, errNotServing()
		}
	}
}

// Outcomes implements API.
func (n *Node) Outcomes(ctx context.Context, limit int) ([]Outcome, error) {
	out, err := loadOutcomes(ctx, n.db.Read, "", limit)
	if err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	return out, nil
}

// Absorb implements API. Outcomes of id before seq are overtaken by it and go too.
func (n *Node) Absorb(ctx context.Context, id sandbox.ID, seq uint64) error {
	if seq > 1<<62 {
		return nil
	}
	absorb := func() error {
		return n.update(ctx, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `DELETE FROM node_outcomes WHERE id = ? AND seq <= ?`, string(id), int64(seq))
			return err
		})
	}
	b := n.box(id)
	if b == nil {
		return absorb()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := absorb(); err != nil {
		return err
	}
	if b.pending != nil && b.pending.Seq <= seq {
		b.pending = nil
		b.notify()
	}
	return nil
}

// OutcomeSignal implements API.
func (n *Node) OutcomeSignal() <-chan struct{} { return n.outcomeSignal }

// Admit implements API.
func (n *Node) Admit(_ context.Context, r sandbox.Resources) error {
	return n.ledger.fits("", charge{milliCPU: r.MilliCPU, memory: r.MemoryBytes, disk: r.DiskBytes})
}

// Capacity implements API.
func (n *Node) Capacity(context.Context) (Capacity, error) {
	used, count := n.ledger.totals()
	t := n.ledger.total
	return Capacity{
		Total:     sandbox.Resources{MilliCPU: t.milliCPU, MemoryBytes: t.memory, DiskBytes: t.disk},
		Used:      sandbox.Resources{MilliCPU: used.milliCPU, MemoryBytes: used.memory, DiskBytes: used.disk},
		Sandboxes: count, MaxSandboxes: n.ledger.max,
	}, nil
}

// Stats implements API: zeros for a sandbox without a machine.
func (n *Node) Stats(ctx context.Context, t tenant.ID, id sandbox.ID) (Stats, error) {
	b := n.box(id)
	if b == nil {
		return Stats{}, ErrUnknown
	}
	b.mu.Lock()
	m, other := b.machine, b.gone || b.row.Tenant != t.String()
	b.mu.Unlock()
	if other {
		return Stats{}, ErrUnknown
	}
	if m == nil {
		return Stats{}, nil
	}
	s, err := m.Stats(ctx)
	if err != nil {
		return Stats{}, fmt.Errorf("node: stats of %s: %w", id, err)
	}
	return Stats{CPUNanos: s.CPUNanos, MemoryBytes: s.MemoryBytes, MemoryPeak: s.MemoryPeak, DiskBytes: s.DiskBytes, Processes: s.Processes}, nil
}

// Audit implements API.
func (n *Node) Audit(ctx context.Context, t tenant.ID, before uint64, limit int) ([]audit.Record, error) {
	return n.audit.TenantRecords(ctx, n.db.Read, t.String(), before, limit)
}

// Templates implements API.
func (n *Node) Templates(ctx context.Context) ([]template.Info, error) {
	infos, err := n.cfg.Templates.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("node: templates: %w", err)
	}
	return slices.Clone(infos), nil
}

// Resolve implements API.
func (n *Node) Resolve(ctx context.Context, ref string) (template.Info, error) {
	info, err := n.cfg.Templates.Resolve(ctx, ref)
	if errors.Is(err, template.ErrNotFound) || errors.Is(err, template.ErrInvalid) {
		return info, fault.New(fault.NotFound, "template_not_found", "there is no such template on this host").
			Do("list the templates").Wrap(err)
	}
	if err != nil {
		return info, fmt.Errorf("node: resolve template: %w", err)
	}
	return info, nil
}
