package control

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/store"
)

// ready answers the row of ref once its machine runs. A machine that is on its
// way up, or whose way down was overtaken, is waited for up to
// Limits.TransitionWait; a refusal says whether an unchanged retry may succeed.
func (s *Service) ready(ctx context.Context, p Principal, ref string) (store.Sandbox, error) {
	row, err := s.find(ctx, p, ref)
	if err != nil {
		return row, err
	}
	end := s.now().Add(s.limits.TransitionWait)
	for {
		changed, release := s.hub.watch(row.ID)
		if row, err = s.store.Sandbox(ctx, p.Tenant, row.ID); err != nil {
			release()
			if errors.Is(err, store.ErrNotFound) {
				return row, notFound(ref)
			}
			return row, storeFault(err)
		}
		wait, refusal := runnable(row)
		left := end.Sub(s.now())
		if !wait || left <= 0 {
			release()
			return row, refusal
		}
		select {
		case <-changed:
		case <-s.clock.After(min(left, pollEvery)):
		case <-ctx.Done():
			release()
			return row, refusal
		}
		release()
	}
}

// runnable says whether sessions can be made in row now (nil refusal), and if
// not whether waiting may help.
func runnable(row store.Sandbox) (wait bool, refusal error) {
	settled := row.Converged >= row.Generation
	switch {
	case row.Desired == sandbox.Deleted:
		return false, goneFault(row)
	case row.Observed == sandbox.Quarantined:
		return false, fault.New(fault.Conflict, "sandbox_quarantined", "the sandbox is quarantined").
			Do("ask an operator to release or delete it")
	case row.Desired == sandbox.Running && row.Observed == sandbox.Running:
		return false, nil // a change of policy may be under way; the machine runs
	case row.Desired == sandbox.Running && !settled:
		return true, fault.New(fault.Unavailable, "sandbox_in_transition", "the sandbox is %s and did not run in time", row.Observed).
			Do("retry; its operation says what it waits for")
	case row.Observed == sandbox.Failed:
		e := fault.New(fault.Conflict, "sandbox_failed", "the sandbox has failed").Do("start it (files are kept), then retry")
		if row.Problem != nil {
			e = e.Because("%s", row.Problem.What)
		}
		return false, e
	}
	state := row.Observed
	if !settled {
		state = row.Desired // going there
	}
	if state == sandbox.Paused {
		// Anyone may wake it at any time: the same request may succeed later.
		return false, fault.New(fault.Conflict, "sandbox_paused", "the sandbox is paused").Do("wake it, then retry").Retry(true)
	}
	return false, fault.New(fault.Conflict, "sandbox_not_running", "the sandbox is %s", state).
		Do("wake it, then retry").Retry(!settled)
}

// sessionFault gives errors of the session service their class.
func sessionFault(err error) error {
	if errors.Is(err, node.ErrUnknown) {
		return fault.New(fault.Unavailable, "sandbox_in_transition", "the machine is not there at the moment").
			Do("retry; get the sandbox to see its state").Wrap(err)
	}
	return nodeFault(err)
}

func parseSession(id string) (sandbox.SessionID, error) {
	sid, err := sandbox.ParseSessionID(id)
	if err != nil {
		// Not an id at all, or one that is not there: the same answer.
		return "", fault.New(fault.NotFound, "session_not_found", "there is no session %s", quote(id))
	}
	return sid, nil
}

func (s *Service) createRequest(p Principal, req Request, row store.Sandbox, cmd session.Command, ttl time.Duration) session.CreateRequest {
	r := session.CreateRequest{Sandbox: row.ID, Principal: p.KeyID, Request: req.ID, Command: cmd, TokenTTL: ttl}
	if req.IdempotencyKey != "" {
		// The session service scopes keys by tenant and principal; method and route
		// are bound here, so that one key on two routes is two requests.
		r.IdempotencyKey, r.BodyHash = req.Method+" "+req.Route+" "+req.IdempotencyKey, s.bodyHash(req)
	}
	return r
}

// checkCommand refuses what can never run; the session service bounds the rest.
func checkCommand(c session.Command) error {
	if (len(c.Args) == 0) == (c.Shell == "") {
		return invalid("invalid_command", "a command has exactly one of args and shell")
	}
	if len(c.Args) > 0 && c.Args[0] == "" {
		return invalid("invalid_command", "the name of the program is empty")
	}
	if c.TimeLimit < 0 {
		return invalid("invalid_timeout", "a time limit is not negative")
	}
	switch c.Overflow {
	case "", "block", "drop":
	default:
		return invalid("invalid_overflow", "overflow cannot be %s", quote(c.Overflow)).Do("use block or drop")
	}
	return nil
}

// CreateSession implements API.
func (s *Service) CreateSession(ctx context.Context, p Principal, req Request, ref string, c CreateSession) (session.Session, session.Token, error) {
	fail := func(err error) (session.Session, session.Token, error) {
		return session.Session{}, session.Token{}, err
	}
	if err := s.require(p, scopeExec, "session.create", ref, req.ID); err != nil {
		return fail(err)
	}
	if err := checkRequest(req); err != nil {
		return fail(err)
	}
	if err := checkCommand(c.Command); err != nil {
		return fail(err)
	}
	row, err := s.ready(ctx, p, ref)
	if err != nil {
		return fail(err)
	}
	ses, tok, err := s.node.Sessions().Create(ctx, p.Tenant, s.createRequest(p, req, row, c.Command, c.TokenTTL))
	return ses, tok, sessionFault(err)
}

// Exec implements API.
func (s *Service) Exec(ctx context.Context, p Principal, req Request, ref string, c Exec) (session.ExecResult, error) {
	if err := s.require(p, scopeExec, "exec", ref, req.ID); err != nil {
		return session.ExecResult{}, err
	}
	if err := checkRequest(req); err != nil {
		return session.ExecResult{}, err
	}
	if err := checkCommand(c.Command); err != nil {
		return session.ExecResult{}, err
	}
	row, err := s.ready(ctx, p, ref)
	if err != nil {
		return session.ExecResult{}, err
	}
	res, err := s.node.Sessions().Exec(ctx, p.Tenant, session.ExecRequest{
		CreateRequest: s.createRequest(p, req, row, c.Command, 0), StdinData: c.StdinData, MaxOutput: c.MaxOutput,
	})
	return res, sessionFault(err)
}

// GetSession implements API.
func (s *Service) GetSession(ctx context.Context, p Principal, id string) (session.Session, error) {
	if err := s.require(p, scopeSandboxesRead, "session.get", id, ""); err != nil {
		return session.Session{}, err
	}
	sid, err := parseSession(id)
	if err != nil {
		return session.Session{}, err
	}
	ses, err := s.node.Sessions().Get(ctx, p.Tenant, sid)
	return ses, sessionLookup(id, err)
}

// sessionLookup answers a session whose sandbox the node does not know as one
// that does not exist.
func sessionLookup(id string, err error) error {
	if errors.Is(err, node.ErrUnknown) {
		return fault.New(fault.NotFound, "session_not_found", "there is no session %s", quote(id)).Wrap(err)
	}
	return nodeFault(err)
}

// ListSessions implements API.
func (s *Service) ListSessions(ctx context.Context, p Principal, ref, cursor string, limit int) (store.Page[session.Session], error) {
	var none store.Page[session.Session]
	if err := s.require(p, scopeSandboxesRead, "session.list", ref, ""); err != nil {
		return none, err
	}
	limit, err := s.pageLimit(limit)
	if err != nil {
		return none, err
	}
	row, err := s.find(ctx, p, ref)
	if err != nil {
		return none, err
	}
	if !row.DeletedAt.IsZero() {
		return none, goneFault(row)
	}
	items, next, err := s.node.Sessions().List(ctx, p.Tenant, row.ID, cursor, limit)
	if errors.Is(err, node.ErrUnknown) {
		return store.Page[session.Session]{}, nil // no machine yet: no sessions
	}
	return store.Page[session.Session]{Items: items, Next: next}, nodeFault(err)
}

// KillSession implements API.
func (s *Service) KillSession(ctx context.Context, p Principal, req Request, id string) (session.Session, error) {
	if err := s.require(p, scopeExec, "session.kill", id, req.ID); err != nil {
		return session.Session{}, err
	}
	sid, err := parseSession(id)
	if err != nil {
		return session.Session{}, err
	}
	ses, err := s.node.Sessions().Kill(ctx, p.Tenant, sid)
	if err != nil {
		return ses, sessionLookup(id, err)
	}
	return ses, s.audit(ctx, p, req, "session.kill", id, nil)
}

// MintAttachToken implements API.
func (s *Service) MintAttachToken(ctx context.Context, p Principal, req Request, id string, ttl time.Duration) (session.Token, error) {
	if err := s.require(p, scopeExec, "session.token", id, req.ID); err != nil {
		return session.Token{}, err
	}
	sid, err := parseSession(id)
	if err != nil {
		return session.Token{}, err
	}
	// The audit entry comes first: a token that cannot be audited is not made.
	se, err := s.node.Sessions().Get(ctx, p.Tenant, sid)
	if err != nil {
		return session.Token{}, sessionLookup(id, err)
	}
	if se.Principal != p.KeyID { // what another's program prints
		if err := s.require(p, auth.ActivityRead, "session.token", id, req.ID); err != nil {
			return session.Token{}, err
		}
	}
	if err := s.audit(ctx, p, req, "session.token.mint", id, nil); err != nil {
		return session.Token{}, err
	}
	tok, err := s.node.Sessions().MintAttachToken(ctx, p.Tenant, sid, p.KeyID, ttl)
	return tok, sessionLookup(id, err)
}

// RevokeAttachTokens implements API.
func (s *Service) RevokeAttachTokens(ctx context.Context, p Principal, req Request, id string) error {
	if err := s.require(p, scopeExec, "session.token.revoke", id, req.ID); err != nil {
		return err
	}
	sid, err := parseSession(id)
	if err != nil {
		return err
	}
	if err := s.node.Sessions().RevokeAttachTokens(ctx, p.Tenant, sid); err != nil {
		return sessionLookup(id, err)
	}
	return s.audit(ctx, p, req, "session.token.revoke", id, nil)
}

// MintDataToken implements API.
func (s *Service) MintDataToken(ctx context.Context, p Principal, req Request, ref string, scopes []string, ttl time.Duration) (session.Token, error) {
	need := map[string]auth.Scope{"files:r": auth.FilesRead, "files:rw": auth.FilesWrite, "exec": scopeExec, "port": scopeExec}
	if len(scopes) == 0 {
		return session.Token{}, invalid("invalid_scope", "a data token needs a scope").Do("use files:r, files:rw, exec or port")
	}
	for _, sc := range scopes {
		scope, ok := need[sc]
		if !ok {
			return session.Token{}, invalid("invalid_scope", "%s is not a scope of data tokens", quote(sc)).
				Do("use files:r, files:rw, exec or port")
		}
		// A key mints nothing wider than itself.
		if err := s.require(p, scope, "token.mint", ref, req.ID); err != nil {
			return session.Token{}, err
		}
	}
	given := scopes
	if slices.Contains(scopes, "exec") && p.Can(auth.ActivityRead) {
		given = append(slices.Clone(scopes), session.ScopeActivity)
	}
	row, err := s.ready(ctx, p, ref)
	if err != nil {
		return session.Token{}, err
	}
	if err := s.audit(ctx, p, req, "token.mint", string(row.ID), nil); err != nil {
		return session.Token{}, err
	}
	tok, err := s.node.Sessions().MintDataToken(ctx, p.Tenant, row.ID, p.KeyID, given, ttl)
	tok.Scopes = slices.DeleteFunc(tok.Scopes, func(sc string) bool { return sc == session.ScopeActivity }) // the key's, not asked for
	return tok, sessionFault(err)
}

// RevokeDataTokens implements API.
func (s *Service) RevokeDataTokens(ctx context.Context, p Principal, req Request, ref string) error {
	if err := s.require(p, scopeExec, "token.revoke", ref, req.ID); err != nil {
		return err
	}
	row, err := s.find(ctx, p, ref)
	if err != nil {
		return err
	}
	if err := s.node.Sessions().RevokeDataTokens(ctx, p.Tenant, row.ID); err != nil && !errors.Is(err, node.ErrUnknown) {
		return nodeFault(err)
	}
	return s.audit(ctx, p, req, "token.revoke", string(row.ID), nil)
}
