package control

import (
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

var (
	fpBeforeCommit = failpoint.Name("control.intent.before_commit")
	fpAfterCommit  = failpoint.Name("control.intent.after_commit")
)

// attempts bounds how often an intent is tried again after it lost a
// compare-and-set. Each loss means that another writer made progress.
const attempts = 16

// decision is what an intent's function decided inside the transaction.
type decision struct {
	sandbox   store.Sandbox
	operation operation.Operation
	action    string
	detail    map[string]string
}

// intend records one mutation: what decide writes, the idempotency row and the
// audit entry, in one transaction; then it triggers the reconciler and waits if
// asked to. decide may run several times and has no effect outside tx.
func (s *Service) intend(ctx context.Context, p Principal, req Request, decide func(tx store.Tx, now time.Time) (decision, error)) (Result, error) {
	var res Result
	begun := s.now()
	for try := 0; ; try++ {
		err := s.store.Mutate(ctx, p.Tenant, func(tx store.Tx) error {
			res = Result{}
			if found, err := s.remembered(tx, p, req, &res); found || err != nil {
				return err
			}
			now := s.now()
			d, err := decide(tx, now)
			if err != nil {
				return err
			}
			if req.IdempotencyKey != "" {
				if err := tx.InsertIdempotency(store.Idempotency{
					Principal: p.KeyID, Key: req.IdempotencyKey, Method: req.Method, Route: req.Route,
					BodyHash: s.bodyHash(req), Operation: d.operation.ID, Resource: string(d.sandbox.ID), CreatedAt: now,
				}); err != nil {
					return err
				}
			}
			if err := tx.Audit(audit.Entry{
				At: now, Tenant: p.Tenant.String(), Actor: p.KeyID, Action: d.action,
				Target: string(d.sandbox.ID), Request: req.ID, Detail: d.detail,
			}); err != nil {
				return err
			}
			res = Result{Sandbox: viewOf(d.sandbox), Operation: d.operation}
			return failpoint.Hit(ctx, fpBeforeCommit)
		})
		if err == nil {
			break
		}
		// Another writer won: read again and decide anew. Another client with the
		// same idempotency key is such a writer; the next round finds its row.
		if (errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrExists)) && try < attempts && ctx.Err() == nil {
			continue
		}
		return Result{}, storeFault(err)
	}
	if err := failpoint.Hit(ctx, fpAfterCommit); err != nil {
		return Result{}, err
	}
	if !res.Replayed {
		s.metrics.intent(res.Operation.Kind, s.now().Sub(begun))
		if res.Operation.State.Final() {
			s.metrics.ended(res.Operation)
		}
		s.hub.publish(res.Sandbox.ID)
	}
	if !res.Operation.State.Final() {
		s.rec.Trigger(store.Ref{Tenant: p.Tenant, ID: res.Sandbox.ID})
		s.await(ctx, p, &res, req.Wait)
	}
	return res, nil
}

// remembered fills res from an earlier request with the same idempotency key.
func (s *Service) remembered(tx store.Tx, p Principal, req Request, res *Result) (bool, error) {
	if req.IdempotencyKey == "" {
		return false, nil
	}
	i, err := tx.Idempotency(p.KeyID, req.IdempotencyKey, req.Method, req.Route)
	if errors.Is(err, store.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if !hmac.Equal(i.BodyHash, s.bodyHash(req)) {
		return true, mismatch()
	}
	op, err := tx.Operation(i.Operation)
	if err == nil {
		var row store.Sandbox
		if row, err = tx.Sandbox(sandbox.ID(i.Resource)); err == nil {
			*res = Result{Sandbox: viewOf(row), Operation: op, Replayed: true}
			return true, nil
		}
	}
	if errors.Is(err, store.ErrNotFound) {
		return true, fault.New(fault.Gone, "operation_expired", "the record of the request with this idempotency key is no longer kept").
			Do("use a new key")
	}
	return true, err
}

// replay answers a repeated request before anything else is checked: a repeat
// must not fail because the first one used up the quota or the node filled since.
func (s *Service) replay(ctx context.Context, p Principal, req Request) (Result, bool, error) {
	if err := checkRequest(req); err != nil {
		return Result{}, false, err
	}
	if req.IdempotencyKey == "" {
		return Result{}, false, nil
	}
	var res Result
	var found bool
	err := s.store.Mutate(ctx, p.Tenant, func(tx store.Tx) (err error) {
		res = Result{}
		found, err = s.remembered(tx, p, req, &res)
		return err
	})
	if err != nil {
		return Result{}, false, storeFault(err)
	}
	if found && !res.Operation.State.Final() {
		s.rec.Trigger(store.Ref{Tenant: p.Tenant, ID: res.Sandbox.ID})
		s.await(ctx, p, &res, req.Wait)
	}
	return res, found, nil
}

// await waits for res.Operation to end, for at most d, and refreshes res. It
// cannot fail: what was recorded stays recorded, and the caller can ask later.
func (s *Service) await(ctx context.Context, p Principal, res *Result, d time.Duration) {
	if d <= 0 {
		return
	}
	op, err := s.waitOperation(ctx, p, res.Operation, d)
	if err != nil {
		return
	}
	row, err := s.store.Sandbox(ctx, p.Tenant, res.Sandbox.ID)
	if err != nil {
		return
	}
	res.Operation, res.Sandbox = op, viewOf(row)
}

// pollEvery is how often a waiter looks itself: another control process may
// have finished what it waits for.
const pollEvery = 500 * time.Millisecond

// waitOperation answers the operation at its end, or as it is after d or when
// ctx ends.
func (s *Service) waitOperation(ctx context.Context, p Principal, op operation.Operation, d time.Duration) (operation.Operation, error) {
	end := s.now().Add(min(d, s.limits.MaxWait))
	for {
		changed, release := s.hub.watch(op.Sandbox)
		cur, err := s.store.Operation(ctx, p.Tenant, op.ID)
		if err != nil {
			release()
			return op, storeFault(err)
		}
		op = cur
		left := end.Sub(s.now())
		if op.State.Final() || left <= 0 || ctx.Err() != nil {
			release()
			return op, nil
		}
		select {
		case <-changed:
		case <-s.clock.After(min(left, pollEvery)):
		case <-ctx.Done():
		}
		release()
	}
}

// any is what an operation wants that does not care for the machine's state.
const anyState sandbox.State = ""

// wants gives the state in which an operation of kind v is done.
func wants(v sandbox.Verb) sandbox.State {
	switch v {
	case operation.Create, sandbox.Resume, sandbox.Start, sandbox.Wake, sandbox.Restore:
		return sandbox.Running
	case sandbox.Pause:
		return sandbox.Paused
	case sandbox.Suspend:
		return sandbox.Suspended
	case sandbox.Stop, sandbox.Release:
		return sandbox.Stopped
	case sandbox.Delete:
		return sandbox.Deleted
	}
	return anyState
}

// change is the one way in which a request changes a living row: it judges the
// verb by the table, raises the generation if what is wanted changes (policy
// says whether edit changed what the node enforces), writes row and operation,
// and marks what it overtakes.
func (s *Service) change(tx store.Tx, cur store.Sandbox, v sandbox.Verb, now time.Time, p Principal, edit func(*store.Sandbox) (policy bool, err error)) (store.Sandbox, operation.Operation, error) {
	none := operation.Operation{}
	open, err := tx.OpenOperations(cur.ID)
	if err != nil {
		return cur, none, err
	}
	observed := cur.Observed
	if broken(observed) && restarting(open, cur.Converged) {
		// A way out of the failure was accepted already: judge by where it leads.
		observed = cur.Desired
	}
	to, err := sandbox.Next(cur.Desired, observed, v)
	if err != nil {
		return cur, none, err
	}
	if v == sandbox.Update {
		to = cur.Desired
	}
	next, policy := cur, false
	if edit != nil {
		if policy, err = edit(&next); err != nil {
			return cur, none, err
		}
	}
	dead := !cur.DeletedAt.IsZero()
	settled := cur.Converged >= cur.Generation
	raise := !dead && (to != cur.Desired || policy ||
		(v != sandbox.Update && (broken(cur.Observed) || settled && cur.Observed != to)))
	next.Desired = to
	if raise {
		next.Generation++
	}
	op := operation.Operation{
		ID: operation.NewID(), Kind: v, Sandbox: cur.ID, Generation: next.Generation, State: operation.Pending,
		CreatedAt: now, UpdatedAt: now, DeadlineAt: now.Add(s.limits.OperationTimeout), RetrySafe: true, Principal: p.KeyID,
	}
	if !raise && (dead || settled || v == sandbox.Update) {
		op.State = operation.Succeeded
	}
	if err := tx.InsertOperation(op); err != nil {
		return cur, none, err
	}
	if !op.State.Final() {
		for _, o := range open {
			w := wants(o.Kind)
			switch {
			case v == sandbox.Delete && o.Kind != sandbox.Delete:
				// Delete wins whatever the node says of the others.
				o.State, o.Superseded, o.WaitingFor, o.UpdatedAt = operation.Cancelled, op.ID, "", now
			case w != anyState && w != to && o.Superseded == "":
				// Whether it was reached is for the node to say: see record.
				o.Superseded, o.UpdatedAt = op.ID, now
			default:
				continue
			}
			if err := tx.UpdateOperation(o); err != nil {
				return cur, none, err
			}
		}
	}
	if raise || v == sandbox.Update {
		next.UpdatedAt = now
		if err := tx.UpdateSandbox(next); err != nil {
			return cur, none, err
		}
	}
	return next, op, nil
}

func broken(s sandbox.State) bool { return s == sandbox.Failed || s == sandbox.Quarantined }

// restarting reports whether an open request leads out of a failure.
func restarting(open []operation.Operation, converged uint64) bool {
	for _, o := range open {
		if o.Generation > converged && wants(o.Kind) != anyState {
			return true
		}
	}
	return false
}

// find gives the row of ref: an id, or the name of a living sandbox.
func (s *Service) find(ctx context.Context, p Principal, ref string) (store.Sandbox, error) {
	id, err := sandbox.ParseID(ref)
	var row store.Sandbox
	switch {
	case err == nil:
		row, err = s.store.Sandbox(ctx, p.Tenant, id)
	case nameRE.MatchString(ref):
		row, err = s.store.SandboxByName(ctx, p.Tenant, ref)
	default:
		return row, notFound(ref)
	}
	if errors.Is(err, store.ErrNotFound) {
		return row, notFound(ref)
	}
	if err != nil {
		return row, storeFault(err)
	}
	return row, nil
}

func notFound(ref string) error {
	return fault.New(fault.NotFound, "sandbox_not_found", "there is no sandbox %s", quote(ref)).
		Do("list the sandboxes to see what there is")
}

func goneFault(row store.Sandbox) error {
	e := fault.New(fault.Gone, "sandbox_deleted", "the sandbox is deleted")
	if row.Problem != nil {
		e = e.Because("%s", row.Problem.What)
	}
	return e
}

func quote(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return fmt.Sprintf("%q", s)
}

// storeFault gives a store's error its class for callers; faults pass.
func storeFault(err error) error {
	var f *fault.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &f):
		return err
	case errors.Is(err, store.ErrBadCursor):
		return fault.New(fault.Invalid, "bad_cursor", "the cursor was not made by this list").
			Do("start again without a cursor").Wrap(err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return fault.New(fault.Deadline, "request_ended", "the request ended before it was recorded").
			Do("retry with the same idempotency key").Retry(true).Wrap(err)
	case errors.Is(err, store.ErrConflict), errors.Is(err, store.ErrExists):
		return fault.New(fault.Unavailable, "busy", "the sandbox is being changed by too many requests").
			Do("retry").Wrap(err)
	case errors.Is(err, store.ErrNotFound):
		return fault.New(fault.NotFound, "not_found", "there is no such thing").Wrap(err)
	case errors.Is(err, failpoint.ErrInjected):
		return err
	}
	return unavailable("store", err)
}

// nodeFault gives a node's error its class for callers; faults pass.
func nodeFault(err error) error {
	var f *fault.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &f):
		return err
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return fault.New(fault.Deadline, "request_ended", "the request ended before the node answered").
			Retry(true).Do("retry").Wrap(err)
	}
	return unavailable("node", err)
}
