package control

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

// CreateSandbox implements API.
func (s *Service) CreateSandbox(ctx context.Context, p Principal, req Request, c CreateSandbox) (Result, error) {
	if err := s.require(p, scopeSandboxesWrite, "sandbox.create", "", req.ID); err != nil {
		return Result{}, err
	}
	if res, found, err := s.replay(ctx, p, req); found || err != nil {
		return res, err
	}
	c, err := s.completeCreate(c)
	if err != nil {
		return Result{}, err
	}
	info, err := s.node.Resolve(ctx, c.Template)
	if err != nil {
		return Result{}, nodeFault(err)
	}
	// Fails closed: the node must truly give one of the classes that are accepted.
	if !slices.Contains(c.Accept, s.info.Class) {
		return Result{}, fault.New(fault.Conflict, "isolation_unavailable", "no node gives an isolation class that the request accepts").
			Because("the request accepts %v; the node gives %s", c.Accept, s.info.Class).
			Do("name %s in accept_isolation if it is enough for this work", s.info.Class)
	}
	if err := s.node.Admit(ctx, c.Resources); err != nil {
		return Result{}, nodeFault(err)
	}
	id := sandbox.NewID()
	sealed, err := s.sealEnv(p, id, c.Env)
	if err != nil {
		return Result{}, err
	}
	reference := c.Template
	if info.Reference != "" {
		reference = info.Reference
	}
	return s.intend(ctx, p, req, func(tx store.Tx, now time.Time) (decision, error) {
		n, err := tx.CountSandboxes()
		if err != nil {
			return decision{}, err
		}
		if n >= s.limits.MaxSandboxes {
			return decision{}, fault.New(fault.Exhausted, "quota_exceeded", "the tenant has %d sandboxes, its quota is %d", n, s.limits.MaxSandboxes).
				Do("delete one that is not needed, then retry")
		}
		if err := nameFree(tx, c.Name, id); err != nil {
			return decision{}, err
		}
		deadline := now.Add(c.MaxLifetime)
		row := store.Sandbox{
			Tenant: p.Tenant, ID: id, Name: c.Name, Template: reference, TemplateDigest: info.Digest,
			Accept: c.Accept, Resources: c.Resources,
			Policy: sandbox.Policy{
				ExpiresAt: now.Add(c.Timeout), OnExpire: c.OnTimeout, Timeout: c.Timeout, DeadlineAt: deadline,
				Idle: c.IdleTimeout, OnIdle: c.OnIdle,
			},
			Metadata: c.Metadata, SealedEnv: sealed, Node: s.info.Name,
			Desired: sandbox.Running, Observed: sandbox.Creating, Generation: 1,
			CreatedAt: now, UpdatedAt: now, CreatedBy: p.KeyID,
		}
		op := operation.Operation{
			ID: operation.NewID(), Kind: operation.Create, Sandbox: id, Generation: 1, State: operation.Pending,
			CreatedAt: now, UpdatedAt: now, DeadlineAt: now.Add(s.limits.OperationTimeout),
			RetrySafe: req.IdempotencyKey != "", Principal: p.KeyID,
		}
		if err := tx.InsertSandbox(row); err != nil {
			return decision{}, err
		}
		if err := tx.InsertOperation(op); err != nil {
			return decision{}, err
		}
		return decision{row, op, "sandbox.create", map[string]string{"name": c.Name, "template": reference, "operation": op.ID}}, nil
	})
}

func nameFree(tx store.Tx, name string, id sandbox.ID) error {
	if name == "" {
		return nil
	}
	other, err := tx.SandboxByName(name)
	if errors.Is(err, store.ErrNotFound) || err == nil && other.ID == id {
		return nil
	}
	if err != nil {
		return err
	}
	return fault.New(fault.Conflict, "name_taken", "a living sandbox is named %s already", quote(name)).
		Do("use another name, or delete %s first", other.ID)
}

func (s *Service) sealEnv(p Principal, id sandbox.ID, env map[string]string) ([]byte, error) {
	if len(env) == 0 {
		return nil, nil
	}
	if s.sealer == nil {
		return nil, fault.New(fault.Invalid, "env_unsupported", "this server keeps no environment: it has no sealing key").
			Do("give the environment with each command")
	}
	plain, err := json.Marshal(env)
	if err != nil {
		return nil, err
	}
	return s.sealer.Seal(plain, envAAD(p.Tenant, id))
}

// GetSandbox implements API.
func (s *Service) GetSandbox(ctx context.Context, p Principal, ref string) (Sandbox, error) {
	if err := s.require(p, scopeSandboxesRead, "sandbox.get", ref, ""); err != nil {
		return Sandbox{}, err
	}
	row, err := s.find(ctx, p, ref)
	if err != nil {
		return Sandbox{}, err
	}
	if !row.DeletedAt.IsZero() {
		return Sandbox{}, goneFault(row)
	}
	return viewOf(row), nil
}

// ListSandboxes implements API.
func (s *Service) ListSandboxes(ctx context.Context, p Principal, f store.Filter) (store.Page[Sandbox], error) {
	if err := s.require(p, scopeSandboxesRead, "sandbox.list", "", ""); err != nil {
		return store.Page[Sandbox]{}, err
	}
	for _, st := range f.States {
		if !slices.Contains(states, st) {
			return store.Page[Sandbox]{}, fault.New(fault.Invalid, "invalid_state", "%s is not a state", quote(string(st))).
				Do("use one of %v", states)
		}
	}
	if err := checkText("metadata filter", f.Metadata, s.limits.MaxMetadata, s.limits.MaxMetadataBytes); err != nil {
		return store.Page[Sandbox]{}, err
	}
	var err error
	if f.Limit, err = s.pageLimit(f.Limit); err != nil {
		return store.Page[Sandbox]{}, err
	}
	page, err := s.store.Sandboxes(ctx, p.Tenant, f)
	if err != nil {
		return store.Page[Sandbox]{}, storeFault(err)
	}
	return mapPage(page, viewOf), nil
}

var states = []sandbox.State{
	sandbox.Creating, sandbox.Running, sandbox.Pausing, sandbox.Paused, sandbox.Resuming,
	sandbox.Suspending, sandbox.Suspended, sandbox.Restoring, sandbox.Stopping, sandbox.Stopped,
	sandbox.Starting, sandbox.Deleting, sandbox.Deleted, sandbox.Failed, sandbox.Quarantined,
}

func mapPage[A, B any](p store.Page[A], f func(A) B) store.Page[B] {
	out := store.Page[B]{Items: make([]B, 0, len(p.Items)), Next: p.Next}
	for _, a := range p.Items {
		out.Items = append(out.Items, f(a))
	}
	return out
}

// PatchSandbox implements API.
func (s *Service) PatchSandbox(ctx context.Context, p Principal, req Request, ref string, c PatchSandbox) (Result, error) {
	if err := s.require(p, scopeSandboxesWrite, "sandbox.update", ref, req.ID); err != nil {
		return Result{}, err
	}
	if err := s.checkPatch(c); err != nil {
		return Result{}, err
	}
	return s.onSandbox(ctx, p, req, ref, sandbox.Update, func(tx store.Tx, row *store.Sandbox, now time.Time) (bool, error) {
		before := row.Policy
		if c.Name != nil {
			if err := nameFree(tx, *c.Name, row.ID); err != nil {
				return false, err
			}
			row.Name = *c.Name
		}
		if c.Metadata != nil {
			row.Metadata = maps.Clone(*c.Metadata)
		}
		if c.Timeout != nil {
			if !now.Before(row.Policy.DeadlineAt) {
				return false, lifetimeOver(*row)
			}
			row.Policy.ExpiresAt = earlier(now.Add(*c.Timeout), row.Policy.DeadlineAt)
			row.Policy.Timeout = *c.Timeout
		}
		if c.OnTimeout != nil {
			row.Policy.OnExpire = *c.OnTimeout
		}
		if c.IdleTimeout != nil {
			row.Policy.Idle = *c.IdleTimeout
			if row.Policy.Idle > 0 && row.Policy.OnIdle == "" {
				row.Policy.OnIdle = s.defaults.OnIdle
			}
		}
		if c.OnIdle != nil {
			row.Policy.OnIdle = *c.OnIdle
		}
		return row.Policy != before, nil
	})
}

// DeleteSandbox implements API.
func (s *Service) DeleteSandbox(ctx context.Context, p Principal, req Request, ref string) (Result, error) {
	if err := s.require(p, scopeSandboxesWrite, "sandbox.delete", ref, req.ID); err != nil {
		return Result{}, err
	}
	return s.onSandbox(ctx, p, req, ref, sandbox.Delete, nil)
}

// Lifecycle implements API.
func (s *Service) Lifecycle(ctx context.Context, p Principal, req Request, ref string, c Lifecycle) (Result, error) {
	if err := s.require(p, scopeSandboxesWrite, "sandbox."+string(c.Verb), ref, req.ID); err != nil {
		return Result{}, err
	}
	switch c.Verb {
	case sandbox.Pause, sandbox.Resume, sandbox.Stop, sandbox.Start, sandbox.Wake:
	case sandbox.Suspend, sandbox.Restore:
		return Result{}, fault.New(fault.Invalid, "not_supported", "no node of this installation can %s", c.Verb).
			Do("use pause and resume, or stop and start")
	default:
		return Result{}, fault.New(fault.Invalid, "invalid_verb", "%s is not a life-cycle verb", quote(string(c.Verb))).
			Do("use pause, resume, stop, start or wake")
	}
	if c.Timeout != 0 {
		if wants(c.Verb) != sandbox.Running {
			return Result{}, fault.New(fault.Invalid, "invalid_timeout", "%s takes no timeout", c.Verb).
				Do("leave it out; PATCH changes the end of life")
		}
		if err := s.checkTimeout(c.Timeout); err != nil {
			return Result{}, err
		}
	}
	if wants(c.Verb) != sandbox.Running {
		return s.onSandbox(ctx, p, req, ref, c.Verb, nil)
	}
	return s.onSandbox(ctx, p, req, ref, c.Verb, func(_ store.Tx, row *store.Sandbox, now time.Time) (bool, error) {
		if !now.Before(row.Policy.DeadlineAt) {
			return false, lifetimeOver(*row)
		}
		// Coming back never shortens life, and gives one that has run out a new one.
		want := c.Timeout
		if want == 0 && (row.Desired != sandbox.Running || broken(row.Observed) || !now.Before(row.Policy.ExpiresAt)) {
			want = row.Policy.Timeout
		}
		end := earlier(now.Add(want), row.Policy.DeadlineAt)
		if want == 0 || !end.After(row.Policy.ExpiresAt) {
			return false, nil
		}
		row.Policy.ExpiresAt = end
		return true, nil
	})
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func lifetimeOver(row store.Sandbox) error {
	return fault.New(fault.Conflict, "lifetime_over", "the sandbox reached the hard end of its life").
		Because("max_lifetime ended at %s", row.Policy.DeadlineAt.Format(time.RFC3339)).
		Do("create a new sandbox; this one can be deleted")
}

// Release implements API.
func (s *Service) Release(ctx context.Context, p Principal, req Request, ref string) (Result, error) {
	if err := s.require(p, scopeOperator, "sandbox.release", ref, req.ID); err != nil {
		return Result{}, err
	}
	return s.onSandbox(ctx, p, req, ref, sandbox.Release, nil)
}

// ListQuarantine implements API.
func (s *Service) ListQuarantine(ctx context.Context, p Principal, cursor string, limit int) (store.Page[Sandbox], error) {
	if err := s.require(p, scopeOperator, "quarantine.list", "", ""); err != nil {
		return store.Page[Sandbox]{}, err
	}
	limit, err := s.pageLimit(limit)
	if err != nil {
		return store.Page[Sandbox]{}, err
	}
	page, err := s.store.Sandboxes(ctx, p.Tenant, store.Filter{States: []sandbox.State{sandbox.Quarantined}, Cursor: cursor, Limit: limit})
	if err != nil {
		return store.Page[Sandbox]{}, storeFault(err)
	}
	return mapPage(page, viewOf), nil
}

// SandboxStats implements API.
func (s *Service) SandboxStats(ctx context.Context, p Principal, ref string) (node.Stats, error) {
	if err := s.require(p, scopeSandboxesRead, "sandbox.stats", ref, ""); err != nil {
		return node.Stats{}, err
	}
	row, err := s.find(ctx, p, ref)
	if err != nil {
		return node.Stats{}, err
	}
	if row.Desired == sandbox.Deleted {
		return node.Stats{}, goneFault(row)
	}
	st, err := s.node.Stats(ctx, p.Tenant, row.ID)
	if errors.Is(err, node.ErrUnknown) {
		return node.Stats{}, fault.New(fault.Conflict, "sandbox_not_running", "the sandbox has no machine now").
			Do("wake it").Retry(true)
	}
	return st, nodeFault(err)
}

// onSandbox records verb v on the sandbox ref, with an optional edit of its row.
func (s *Service) onSandbox(ctx context.Context, p Principal, req Request, ref string, v sandbox.Verb, edit func(store.Tx, *store.Sandbox, time.Time) (bool, error)) (Result, error) {
	if res, found, err := s.replay(ctx, p, req); found || err != nil {
		return res, err
	}
	row, err := s.find(ctx, p, ref)
	if err != nil {
		return Result{}, err
	}
	// What the node did by itself comes before the verb: a verb is judged by what
	// is, not by what was before an expiry.
	s.rec.catchUp(ctx, row)
	return s.intend(ctx, p, req, func(tx store.Tx, now time.Time) (decision, error) {
		cur, err := tx.Sandbox(row.ID)
		if err != nil {
			return decision{}, err
		}
		var f func(*store.Sandbox) (bool, error)
		if edit != nil {
			f = func(r *store.Sandbox) (bool, error) { return edit(tx, r, now) }
		}
		next, op, err := s.change(tx, cur, v, now, p, f)
		if err != nil {
			return decision{}, err
		}
		return decision{next, op, "sandbox." + string(v), map[string]string{"operation": op.ID, "desired": string(next.Desired)}}, nil
	})
}
