package control

import (
	"context"
	"errors"
	"regexp"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

var operationRE = regexp.MustCompile(`^op[a-z2-7]{24}$`)

func (s *Service) findOperation(ctx context.Context, p Principal, id string) (operation.Operation, error) {
	none := fault.New(fault.NotFound, "operation_not_found", "there is no operation %s", quote(id)).
		Do("list the operations to see what is kept")
	if !operationRE.MatchString(id) {
		return operation.Operation{}, none
	}
	op, err := s.store.Operation(ctx, p.Tenant, id)
	if errors.Is(err, store.ErrNotFound) {
		return op, none
	}
	return op, storeFault(err)
}

// GetOperation implements API.
func (s *Service) GetOperation(ctx context.Context, p Principal, id string, wait time.Duration) (operation.Operation, error) {
	if err := s.require(p, scopeSandboxesRead, "operation.get", id, ""); err != nil {
		return operation.Operation{}, err
	}
	op, err := s.findOperation(ctx, p, id)
	if err != nil || wait <= 0 || op.State.Final() {
		return op, err
	}
	return s.waitOperation(ctx, p, op, wait)
}

// ListOperations implements API.
func (s *Service) ListOperations(ctx context.Context, p Principal, ref, cursor string, limit int) (store.Page[operation.Operation], error) {
	var none store.Page[operation.Operation]
	if err := s.require(p, scopeSandboxesRead, "operation.list", ref, ""); err != nil {
		return none, err
	}
	limit, err := s.pageLimit(limit)
	if err != nil {
		return none, err
	}
	var id sandbox.ID
	if ref != "" {
		row, err := s.find(ctx, p, ref)
		if err != nil {
			return none, err
		}
		id = row.ID
	}
	page, err := s.store.Operations(ctx, p.Tenant, id, cursor, limit)
	return page, storeFault(err)
}

// CancelOperation implements API. What can be taken back is the latest request
// on a sandbox while the machine has not gone past the point of return:
//
//	create           → the sandbox is deleted
//	pause            → running again
//	resume of paused → paused again
//	start of stopped → stopped again
//
// A stop gives up memory and a delete gives up files; they, and changes of
// policy, cannot be taken back. The operation ends as cancelled at once; the way
// back is converged to like any intent, with a new generation.
func (s *Service) CancelOperation(ctx context.Context, p Principal, req Request, id string) (Result, error) {
	if err := s.require(p, scopeSandboxesWrite, "operation.cancel", id, req.ID); err != nil {
		return Result{}, err
	}
	if res, found, err := s.replay(ctx, p, req); found || err != nil {
		return res, err
	}
	op, err := s.findOperation(ctx, p, id)
	if err != nil {
		return Result{}, err
	}
	row, err := s.store.Sandbox(ctx, p.Tenant, op.Sandbox)
	if err != nil {
		return Result{}, storeFault(err)
	}
	s.rec.catchUp(ctx, row)
	res, err := s.intend(ctx, p, req, func(tx store.Tx, now time.Time) (decision, error) {
		op, err := tx.Operation(id)
		if err != nil {
			return decision{}, err
		}
		row, err := tx.Sandbox(op.Sandbox)
		if err != nil {
			return decision{}, err
		}
		back, why := backOf(op, row)
		if why != "" {
			return decision{}, fault.New(fault.Conflict, "operation_not_cancellable", "the operation cannot be cancelled").
				Because("%s", why).Do("ask for the state that is wanted instead")
		}
		row.Desired, row.UpdatedAt = back, now
		row.Generation++
		op.State, op.WaitingFor, op.UpdatedAt = operation.Cancelled, "", now
		if err := tx.UpdateSandbox(row); err != nil {
			return decision{}, err
		}
		if err := tx.UpdateOperation(op); err != nil {
			return decision{}, err
		}
		open, err := tx.OpenOperations(row.ID)
		if err != nil {
			return decision{}, err
		}
		for _, o := range open { // requests that asked for the same
			if w := wants(o.Kind); w != anyState && w != back && o.Superseded == "" {
				o.Superseded, o.UpdatedAt = op.ID, now
				if err := tx.UpdateOperation(o); err != nil {
					return decision{}, err
				}
			}
		}
		return decision{row, op, "operation.cancel", map[string]string{"operation": id, "desired": string(back)}}, nil
	})
	if err == nil {
		// The operation is final, but the way back has only begun.
		s.rec.Trigger(store.Ref{Tenant: p.Tenant, ID: res.Sandbox.ID})
	}
	return res, err
}

// backOf gives the desired state that takes op back, or why that is impossible.
func backOf(op operation.Operation, row store.Sandbox) (back sandbox.State, why string) {
	switch {
	case op.State.Final():
		return "", "it has ended as " + string(op.State)
	case op.Generation != row.Generation || op.Superseded != "":
		return "", "a later request has overtaken it"
	case row.Converged >= op.Generation:
		return "", "it has taken effect"
	}
	switch op.Kind {
	case operation.Create:
		return sandbox.Deleted, ""
	case sandbox.Pause:
		if row.Observed == sandbox.Running || row.Observed == sandbox.Pausing {
			return sandbox.Running, ""
		}
	case sandbox.Resume, sandbox.Wake, sandbox.Start:
		switch row.Observed {
		case sandbox.Paused, sandbox.Resuming:
			return sandbox.Paused, ""
		case sandbox.Stopped, sandbox.Starting:
			return sandbox.Stopped, ""
		}
	}
	return "", "a " + string(op.Kind) + " of a sandbox that is " + string(row.Observed) + " cannot be taken back"
}
