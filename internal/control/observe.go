package control

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

var (
	fpAbsorbBefore = failpoint.Name("control.absorb.before")
	fpAbsorbAfter  = failpoint.Name("control.absorb.after")
)

// update changes a row and its open operations in one transaction, by
// compare-and-set, trying again when another writer won. fn says whether it
// changed the row; changed operations are found by comparison. after may add an
// audit entry.
func (r *Reconciler) update(ctx context.Context, ref store.Ref, fn func(row *store.Sandbox, open []operation.Operation) (bool, error), after func() *audit.Entry) error {
	var ended []operation.Operation
	var wrote bool
	for try := 0; ; try++ {
		err := r.s.store.Mutate(ctx, ref.Tenant, func(tx store.Tx) error {
			ended, wrote = nil, false
			row, err := tx.Sandbox(ref.ID)
			if err != nil {
				return err
			}
			open, err := tx.OpenOperations(ref.ID)
			if err != nil {
				return err
			}
			was := append([]operation.Operation(nil), open...)
			changed, err := fn(&row, open)
			if err != nil {
				return err
			}
			now := r.s.now()
			if changed {
				row.UpdatedAt, wrote = now, true
				if err := tx.UpdateSandbox(row); err != nil {
					return err
				}
			}
			for i, o := range open {
				if reflect.DeepEqual(o, was[i]) {
					continue
				}
				o.UpdatedAt, wrote = now, true
				if o.State.Final() {
					o.WaitingFor = ""
					ended = append(ended, o)
				}
				if err := tx.UpdateOperation(o); err != nil {
					return err
				}
			}
			if after != nil && wrote {
				if e := after(); e != nil {
					return tx.Audit(*e)
				}
			}
			return nil
		})
		if errors.Is(err, store.ErrConflict) && try < attempts {
			continue
		}
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		break
	}
	for _, o := range ended {
		r.s.metrics.ended(o)
		r.s.log.Info("operation ended", "operation", o.ID, "kind", string(o.Kind), "state", string(o.State), "sandbox", o.Sandbox, "tenant", ref.Tenant.String())
	}
	if wrote {
		r.s.hub.publish(ref.ID)
	}
	return nil
}

func end(o *operation.Operation, st operation.State, p *operation.Problem) {
	o.State, o.Problem = st, p
	if st == operation.Succeeded {
		o.Superseded = ""
	}
}

// record writes what the node reports: the one place where observed fields
// change, besides absorb, lost and the tombstone's closing. Reports may be
// late, repeated or of an older generation; see the rules inside.
func (r *Reconciler) record(ctx context.Context, ref store.Ref, obs node.Observation) (store.Sandbox, error) {
	var out store.Sandbox
	if err := failpoint.Hit(ctx, fpBeforeObserve); err != nil {
		return out, err
	}
	var entry *audit.Entry
	var elsewhere bool
	err := r.update(ctx, ref, func(row *store.Sandbox, open []operation.Operation) (bool, error) {
		entry, elsewhere = nil, false
		changed := false
		if row.DeletedAt.IsZero() {
			before := *row
			entry, elsewhere = r.judge(row, open, obs)
			changed = !reflect.DeepEqual(before, *row)
		}
		out = *row
		return changed, nil
	}, func() *audit.Entry { return entry })
	if err == nil && elsewhere {
		err = errElsewhere
	}
	return out, err
}

// errElsewhere: the node ended a generation elsewhere than wanted. A new one
// was made, to be tried after a pause.
var errElsewhere = errors.New("control: the node ended elsewhere than wanted")

// judge applies one observation to a row and its open operations.
func (r *Reconciler) judge(row *store.Sandbox, open []operation.Operation, obs node.Observation) (entry *audit.Entry, elsewhere bool) {
	now := r.s.now()
	if obs.Generation > row.Generation {
		// The node is ahead: this store was set back. Take the lead again; what is
		// wanted is what this store says.
		r.s.log.Error("reconcile: the node is ahead of the store", "sandbox", row.ID, "node", obs.Generation, "store", row.Generation)
		row.Generation = obs.Generation + 1
		carry(open, row)
		return nil, false
	}
	dead := obs.Converged && obs.State == sandbox.Deleted && row.Desired != sandbox.Deleted
	if !dead && (obs.Generation < row.Converged || obs.Generation == row.Converged && !obs.Converged) {
		return nil, false // a late report: more is known already
	}
	if row.Class == "" && started(obs.State) {
		// The first start pins the class. Until then nothing of the tenant's can be
		// in the sandbox: no session is made before this row says running.
		row.Class, row.Runtime = cmp.Or(obs.Class, r.s.info.Class), cmp.Or(obs.Runtime, r.s.info.Runtime)
	}
	row.Observed, row.Problem = obs.State, problemAfter(*row, obs)
	for i := range open {
		o := &open[i]
		if o.Generation == obs.Generation || o.Generation < obs.Generation && o.Superseded == "" {
			o.State, o.WaitingFor = operation.Running, obs.WaitingFor
			o.Steps = obs.Steps
			if n := len(o.Steps); n > operation.MaxSteps {
				o.Steps = o.Steps[n-operation.MaxSteps:]
			}
		}
		if o.Superseded != "" && o.Generation < obs.Generation {
			end(o, operation.Cancelled, nil) // a later one is in force, and this one was not seen reached
		}
	}
	if !obs.Converged {
		return nil, false
	}
	return r.reached(row, open, obs, now)
}

// started reports whether a machine in state s has been up.
func started(s sandbox.State) bool {
	switch s {
	case sandbox.Creating, sandbox.Starting, sandbox.Failed, sandbox.Quarantined, sandbox.Deleting, sandbox.Deleted:
		return false
	}
	return true
}

// problemAfter keeps what moved a sandbox (an expiry, say) until it moves again.
func problemAfter(row store.Sandbox, obs node.Observation) *operation.Problem {
	if obs.Problem != nil || broken(obs.State) && obs.State != row.Observed {
		return obs.Problem
	}
	if obs.State == row.Observed || obs.State == row.Desired && row.Desired != sandbox.Running || row.Desired == sandbox.Deleted {
		return row.Problem
	}
	return nil
}

// reached handles a report that obs.Generation has come to its end.
func (r *Reconciler) reached(row *store.Sandbox, open []operation.Operation, obs node.Observation, now time.Time) (entry *audit.Entry, elsewhere bool) {
	current := obs.Generation == row.Generation
	if current && row.Desired == sandbox.Deleted {
		if obs.State == sandbox.Deleted {
			return r.bury(row, open, now), false
		}
		// The node gave up; we do not: with a new generation it tries again.
		row.Generation++
		row.Observed = sandbox.Deleting
		carry(open, row)
		for i := range open {
			if !open[i].State.Final() {
				open[i].WaitingFor = "the node, which could not delete it yet"
			}
		}
		return nil, true
	}
	if obs.State == sandbox.Deleted && row.Desired != sandbox.Deleted {
		// The node deleted it and its outcome is gone. A node never undoes that, so
		// it holds whatever the report's generation.
		p := &operation.Problem{Code: "sandbox_deleted", What: "the node deleted the sandbox"}
		row.Desired, row.Observed, row.Problem = sandbox.Deleted, sandbox.Deleting, p
		row.Generation++
		failAll(open, p)
		return nil, false
	}
	if current && !broken(obs.State) && obs.State != row.Desired {
		// Reached, but not what is wanted, and no outcome says why: ask again.
		r.s.log.Error("reconcile: the node is elsewhere", "sandbox", row.ID, "generation", row.Generation, "wanted", string(row.Desired), "is", string(obs.State))
		row.Converged = row.Generation
		row.Generation++
		carry(open, row)
		return nil, true
	}
	row.Converged = obs.Generation
	for i := range open {
		o := &open[i]
		if o.State.Final() || o.Generation > obs.Generation {
			continue
		}
		switch w := wants(o.Kind); {
		case w == anyState, w == obs.State:
			end(o, operation.Succeeded, nil)
		case o.Superseded != "":
			end(o, operation.Cancelled, nil)
		case broken(obs.State):
			p := obs.Problem
			if p == nil {
				p = &operation.Problem{Code: "sandbox_" + string(obs.State), What: "the sandbox is " + string(obs.State)}
			}
			end(o, operation.Failed, p)
		case current:
			end(o, operation.Cancelled, nil) // what is wanted changed without a request of its own
		}
	}
	if obs.State == sandbox.Failed && row.Class == "" && current {
		// It never ran: nothing of the tenant's is in it. Give back what it holds
		// (name, quota, room on the node); the operation says why it failed.
		row.Desired, row.Observed = sandbox.Deleted, sandbox.Deleting
		row.Generation++
		failAll(open, obs.Problem)
		return &audit.Entry{
			At: now, Tenant: row.Tenant.String(), Actor: "reconciler", Action: "sandbox.delete",
			Target: string(row.ID), Detail: map[string]string{"reason": "never_started"},
		}, false
	}
	return nil, false
}

// carry moves the open operations that are still wanted on to the row's
// generation.
func carry(open []operation.Operation, row *store.Sandbox) {
	for i := range open {
		o := &open[i]
		if w := wants(o.Kind); !o.State.Final() && o.Superseded == "" && (w == anyState || w == row.Desired) {
			o.Generation = row.Generation
		}
	}
}

func failAll(open []operation.Operation, p *operation.Problem) {
	if p == nil {
		p = &operation.Problem{Code: "sandbox_failed", What: "the sandbox has failed"}
	}
	for i := range open {
		o := &open[i]
		switch {
		case o.State.Final() || o.Kind == sandbox.Delete:
		case o.Superseded != "":
			end(o, operation.Cancelled, nil)
		default:
			end(o, operation.Failed, p)
		}
	}
}

// bury makes the row its own tombstone.
func (r *Reconciler) bury(row *store.Sandbox, open []operation.Operation, now time.Time) *audit.Entry {
	row.Observed, row.DeletedAt, row.Converged = sandbox.Deleted, now, row.Generation
	row.SealedEnv, row.Metadata = nil, nil // tenant data ends with the sandbox
	closeOps(open)
	return &audit.Entry{
		At: now, Tenant: row.Tenant.String(), Actor: "reconciler", Action: "sandbox.deleted", Target: string(row.ID),
	}
}

func closeOps(open []operation.Operation) {
	var winner string
	for i := range open {
		if o := &open[i]; o.Kind == sandbox.Delete {
			end(o, operation.Succeeded, nil)
			winner = o.ID
		}
	}
	for i := range open {
		o := &open[i]
		switch {
		case o.State.Final():
		case o.Superseded != "":
			end(o, operation.Cancelled, nil)
		case winner != "":
			end(o, operation.Cancelled, nil)
			o.Superseded = winner
		default:
			end(o, operation.Failed, &operation.Problem{Code: "sandbox_deleted", What: "the sandbox is deleted"})
		}
	}
}

// closeDeleted ends what is still open on a tombstone.
func (r *Reconciler) closeDeleted(ctx context.Context, ref store.Ref) error {
	return r.update(ctx, ref, func(row *store.Sandbox, open []operation.Operation) (bool, error) {
		if !row.DeletedAt.IsZero() {
			closeOps(open)
		}
		return false, nil
	}, nil)
}

// lost fails a sandbox that had run and that its node does not know any more.
func (r *Reconciler) lost(ctx context.Context, seen store.Sandbox) error {
	p := &operation.Problem{
		Code: "machine_lost", What: "the sandbox's machine and files are gone",
		Why: "its node has no record of it", Remedy: "delete it and create a new one",
	}
	var entry *audit.Entry
	return r.update(ctx, store.Ref{Tenant: seen.Tenant, ID: seen.ID}, func(row *store.Sandbox, open []operation.Operation) (bool, error) {
		entry = nil
		if row.Revision != seen.Revision || row.Observed == sandbox.Failed && row.Converged >= row.Generation {
			return false, nil
		}
		row.Observed, row.Problem = sandbox.Failed, p
		row.Generation++
		row.Converged = row.Generation
		failAll(open, p)
		entry = &audit.Entry{
			At: r.s.now(), Tenant: row.Tenant.String(), Actor: "reconciler", Action: "sandbox.machine_lost", Target: string(row.ID),
		}
		return true, nil
	}, func() *audit.Entry { return entry })
}

// catchUp takes in what the node did by itself, or has reached, before a
// request is judged. It fails silently: the reconciler does the same later.
func (r *Reconciler) catchUp(ctx context.Context, row store.Sandbox) {
	if !row.DeletedAt.IsZero() {
		return
	}
	octx, cancel := context.WithTimeout(ctx, min(r.t.CallLimit, 2*time.Second))
	defer cancel()
	obs, err := r.s.node.Observe(octx, row.Tenant, row.ID)
	if err == nil && obs.Pending != nil {
		err = r.absorb(ctx, *obs.Pending)
	} else if err == nil && obs.Converged && obs.Generation > row.Converged {
		_, err = r.record(ctx, store.Ref{Tenant: row.Tenant, ID: row.ID}, obs)
	}
	if err != nil && !errors.Is(err, node.ErrUnknown) {
		r.s.log.Debug("catch up before a request", "sandbox", row.ID, "err", err)
	}
}

// absorb takes in a move that the node made by itself: row and audit first,
// then the node may forget it. Absorbing raises the generation, so that an
// outcome of the generation in force is unabsorbed for certain and one absorbed
// before is known by its number.
func (r *Reconciler) absorb(ctx context.Context, o node.Outcome) error {
	if err := failpoint.Hit(ctx, fpAbsorbBefore); err != nil {
		return err
	}
	row, err := r.s.store.System().FindSandbox(ctx, o.ID)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	if err == nil {
		var entry *audit.Entry
		err = r.update(ctx, store.Ref{Tenant: row.Tenant, ID: row.ID}, func(row *store.Sandbox, open []operation.Operation) (bool, error) {
			entry = nil
			if !row.DeletedAt.IsZero() || o.Generation < row.Generation && o.Seq <= row.OutcomeSeq {
				return false, nil
			}
			r.takeIn(row, open, o)
			entry = &audit.Entry{
				At: r.s.now(), Tenant: row.Tenant.String(), Actor: "node", Action: "sandbox." + string(o.State), Target: string(row.ID),
				Detail: map[string]string{"trigger": o.Trigger},
			}
			return true, nil
		}, func() *audit.Entry { return entry })
		if err != nil {
			return err
		}
		if entry != nil {
			r.s.metrics.outcomes.WithLabelValues(o.Trigger, string(o.State)).Inc()
			r.s.log.Info("absorbed outcome", "sandbox", o.ID, "tenant", row.Tenant.String(), "trigger", o.Trigger, "state", string(o.State), "seq", o.Seq)
		}
	}
	if err := failpoint.Hit(ctx, fpAbsorbAfter); err != nil {
		return err
	}
	actx, cancel := context.WithTimeout(ctx, r.t.CallLimit)
	defer cancel()
	return r.s.node.Absorb(actx, o.ID, o.Seq)
}

// takeIn applies an outcome to its row. A request may have crossed it (raised
// the generation after the node moved): an expiry wins over whatever crossed it
// except what leads further down; other moves give way to a request that asks
// for a state by name.
func (r *Reconciler) takeIn(row *store.Sandbox, open []operation.Operation, o node.Outcome) {
	crossing := o.Generation < row.Generation
	p := o.Problem
	if p == nil {
		p = triggerProblem(o)
	}
	row.OutcomeSeq = max(row.OutcomeSeq, o.Seq)
	row.Generation = max(row.Generation, o.Generation)
	if row.Desired == sandbox.Deleted {
		return // delete wins; the node goes on with it
	}
	row.Observed, row.Problem = o.State, p
	if crossing && o.State != sandbox.Deleted && depth(row.Desired) > depth(o.State) {
		return // what is wanted leads further down anyway
	}
	expiry := o.Trigger == "expired" || o.Trigger == "deadline"
	if crossing && !expiry && overrides(row, open, o) {
		return
	}
	row.Generation++
	switch o.State {
	case sandbox.Deleted:
		row.Desired, row.Observed = sandbox.Deleted, sandbox.Deleting
		failAll(open, p)
	case sandbox.Failed, sandbox.Quarantined:
		failStates(open, p)
		if o.State == sandbox.Failed && row.Class == "" {
			row.Desired, row.Observed = sandbox.Deleted, sandbox.Deleting
			failAll(open, p)
			return
		}
		if crossing && o.State == sandbox.Failed && row.Desired == sandbox.Running {
			return // a policy that crossed it is still to be given to the node
		}
		// Nothing more goes to the node: a stop that crossed a quarantine must not
		// be read as its release.
		row.Converged = row.Generation
		for i := range open {
			if q := &open[i]; !q.State.Final() && q.Generation <= o.Generation {
				end(q, operation.Succeeded, nil) // a policy that is in force
			}
		}
		failAll(open, p)
	default: // paused, stopped
		row.Desired = o.State
		for i := range open { // those that wanted this are done with the new generation
			if q := open[i]; wants(q.Kind) != o.State || q.Superseded != "" {
				failStates(open[i:i+1], p)
			}
		}
	}
}

// failStates ends the operations that want a state.
func failStates(open []operation.Operation, p *operation.Problem) {
	for i := range open {
		if wants(open[i].Kind) != anyState {
			failAll(open[i:i+1], p)
		}
	}
}

// overrides reports whether a request that crossed o holds against it: one that
// names the state that is wanted, and that can be reached from where o led.
func overrides(row *store.Sandbox, open []operation.Operation, o node.Outcome) bool {
	for _, q := range open {
		if q.Generation <= o.Generation || q.Superseded != "" || wants(q.Kind) != row.Desired {
			continue
		}
		if _, err := sandbox.Next(row.Desired, o.State, q.Kind); err == nil && o.State != sandbox.Deleted {
			return true
		}
	}
	return false
}

// depth orders states downwards: how much has been given up.
func depth(s sandbox.State) int {
	switch s {
	case sandbox.Paused:
		return 1
	case sandbox.Suspended:
		return 2
	case sandbox.Stopped:
		return 3
	case sandbox.Failed:
		return 3
	case sandbox.Quarantined:
		return 4
	case sandbox.Deleted:
		return 5
	}
	return 0
}

func triggerProblem(o node.Outcome) *operation.Problem {
	at := o.At.UTC().Format(time.RFC3339)
	switch o.Trigger {
	case "expired":
		return &operation.Problem{Code: "sandbox_expired", What: "the sandbox reached the end of its life and was " + string(o.State), Why: "it ended at " + at, Remedy: "wake it to go on, if it was kept"}
	case "deadline":
		return &operation.Problem{Code: "lifetime_over", What: "the sandbox reached the hard end of its life and was " + string(o.State), Why: "it ended at " + at, Remedy: "create a new sandbox"}
	case "idle":
		return &operation.Problem{Code: "sandbox_idle", What: "the sandbox was idle and was " + string(o.State), Why: "since " + at, Remedy: "wake it"}
	case "machine_died", "adopted_dead":
		return &operation.Problem{Code: "machine_died", What: "the sandbox's machine died", Why: "seen at " + at, Remedy: "start it; files are kept"}
	case "guest_unresponsive":
		return &operation.Problem{Code: "guest_unresponsive", What: "the sandbox's machine did not answer its host", Why: "seen at " + at, Remedy: "start it; files are kept"}
	case "limit":
		return &operation.Problem{Code: "limit_exceeded", What: "the sandbox went over a limit and its machine was ended", Why: "seen at " + at, Remedy: "start it; files are kept"}
	}
	return &operation.Problem{Code: "sandbox_" + string(o.State), What: "the node moved the sandbox to " + string(o.State), Why: o.Trigger}
}
