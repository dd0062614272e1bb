package session

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/quota"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
)

// Scopes of data tokens.
const (
	ScopeFilesRead  = "files:r"
	ScopeFilesWrite = "files:rw"
	ScopeExec       = "exec"
	ScopePort       = "port"
)

// ScopeActivity lets a data token with ScopeExec open the sessions that others
// made too. Callers add it for principals that may read what programs print.
const ScopeActivity = "activity"

var scopes = []string{ScopeActivity, ScopeExec, ScopeFilesRead, ScopeFilesWrite, ScopePort}

const (
	kindAttach   = "attach"
	kindData     = "data"
	prefixAttach = "spt_"
	prefixData   = "spd_"
	prefixTicket = "spw_"
	tokenRandom  = 40 // characters of 5 bits each
)

// tokenRow is a token as the database keeps it: its keyed hash only.
type tokenRow struct {
	id, kind  string
	hash      []byte
	tenant    tenant.ID
	sandbox   sandbox.ID
	session   sandbox.SessionID
	principal string
	scopes    string
	created   time.Time
	expires   time.Time
}

// newToken makes a token and charges it; the caller refunds it when it is not
// inserted.
func (m *Manager) newToken(kind string, t tenant.ID, box sandbox.ID, id sandbox.SessionID, principal string, want []string, ttl time.Duration) (tokenRow, Token, error) {
	prefix, def := prefixAttach, m.Limits.AttachTokenTTL
	if kind == kindData {
		prefix, def = prefixData, m.Limits.DataTokenTTL
	}
	if ttl == 0 {
		ttl = def
	}
	if ttl < time.Second || ttl > m.Limits.MaxTokenTTL {
		return tokenRow{}, Token{}, fault.New(fault.Invalid, "invalid_ttl", "a token lives between 1 s and %s", m.Limits.MaxTokenTTL)
	}
	if err := m.Ledger.Charge(t, box, quota.Tokens, 1); err != nil {
		return tokenRow{}, Token{}, err
	}
	secret := prefix + sandbox.Random(tokenRandom)
	now := m.now()
	r := tokenRow{id: "tk" + sandbox.Random(24), kind: kind, hash: m.mac("token", []byte(secret)), tenant: t, sandbox: box, session: id,
		principal: principal, scopes: strings.Join(want, " "), created: now, expires: now.Add(ttl).Truncate(time.Microsecond)}
	return r, Token{ID: r.id, Token: secret, ExpiresAt: r.expires, Scopes: want}, nil
}

func (m *Manager) insertToken(ctx context.Context, tx *sql.Tx, r tokenRow, request string) error {
	var session any
	if r.session != "" {
		session = string(r.session)
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO session_tokens (id, kind, hash, tenant, sandbox, session, principal, scopes, created_at, expires_at)
		VALUES (?,?,?,?,?,?,?,?,?,?)`, r.id, r.kind, r.hash, r.tenant.String(), string(r.sandbox), session, r.principal, r.scopes,
		r.created.UnixMicro(), r.expires.UnixMicro()); err != nil {
		return fmt.Errorf("session: insert token: %w", err)
	}
	target := string(r.sandbox)
	if r.session != "" {
		target = string(r.session)
	}
	return m.Auditor.Append(ctx, tx, audit.Entry{At: r.created, Tenant: r.tenant.String(), Actor: r.principal, Action: "token.mint", Target: target,
		Request: request, Detail: map[string]string{"token_id": r.id, "kind": r.kind, "scopes": r.scopes, "expires_at": r.expires.Format(time.RFC3339)}})
}

const tokenColumns = `id, kind, tenant, sandbox, session, principal, scopes, created_at, expires_at`

func scanToken(s scanner) (tokenRow, error) {
	var r tokenRow
	var tn, box string
	var id sql.NullString
	var created, expires int64
	if err := s.Scan(&r.id, &r.kind, &tn, &box, &id, &r.principal, &r.scopes, &created, &expires); err != nil {
		return tokenRow{}, err
	}
	t, err := tenant.Mint(tn) // the row was written for a proven tenant
	if err != nil {
		return tokenRow{}, fmt.Errorf("session: token %s: %w", r.id, err)
	}
	r.tenant, r.sandbox, r.session = t, sandbox.ID(box), sandbox.SessionID(id.String)
	r.created, r.expires = fromMicros(created), fromMicros(expires)
	return r, nil
}

// deleteTokens removes tokens and tells which; their streams are cut after the
// commit (cutTokens).
func deleteTokens(ctx context.Context, tx *sql.Tx, where string, args ...any) ([]tokenRow, error) {
	q, err := tx.QueryContext(ctx, `DELETE FROM session_tokens WHERE `+where+` RETURNING `+tokenColumns, args...)
	if err != nil {
		return nil, fmt.Errorf("session: delete tokens: %w", err)
	}
	defer func() { _ = q.Close() }() // Err tells
	var out []tokenRow
	for q.Next() {
		r, err := scanToken(q)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, q.Err()
}

var errRevoked = fault.New(fault.Unauthenticated, "token_revoked", "the token was revoked").Do("ask for a new one")

// cutTokens refunds deleted tokens and ends the streams that they opened.
func (m *Manager) cutTokens(rs []tokenRow) {
	for _, r := range rs {
		m.Ledger.Refund(r.tenant, r.sandbox, quota.Tokens, 1)
		m.mu.Lock()
		var gs []*Grant
		for g := range m.grants[r.id] {
			gs = append(gs, g)
		}
		m.mu.Unlock()
		for _, g := range gs {
			g.cut(errRevoked)
		}
	}
}

// adoptTokens charges the tokens that a restart found.
func (m *Manager) adoptTokens(ctx context.Context) error {
	q, err := m.db.Read.QueryContext(ctx, `SELECT tenant, sandbox, count(*) FROM session_tokens GROUP BY tenant, sandbox`)
	if err != nil {
		return fmt.Errorf("session: read tokens: %w", err)
	}
	defer func() { _ = q.Close() }() // Err tells
	for q.Next() {
		var tn, box string
		var n int64
		if err := q.Scan(&tn, &box, &n); err != nil {
			return fmt.Errorf("session: read tokens: %w", err)
		}
		t, err := tenant.Mint(tn)
		if err != nil {
			return fmt.Errorf("session: token: %w", err)
		}
		m.Ledger.Adopt(t, sandbox.ID(box), quota.Tokens, n)
	}
	return q.Err()
}

// expireTokens removes tokens that are over. Streams they opened go on: expiry
// gates opening only.
func (m *Manager) expireTokens(ctx context.Context) error {
	now := m.now()
	m.mu.Lock()
	for k, t := range m.tickets {
		if !now.Before(t.expires) {
			delete(m.tickets, k)
		}
	}
	m.mu.Unlock()
	var n int
	err := m.db.Read.QueryRowContext(ctx, `SELECT count(*) FROM (SELECT 1 FROM session_tokens WHERE expires_at<=? LIMIT 1)`, now.UnixMicro()).Scan(&n)
	if err != nil || n == 0 {
		return err
	}
	var gone []tokenRow
	err = m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error {
		// A stream that is open keeps its row, so that revoking still finds it.
		m.mu.Lock()
		open := make([]any, 0, len(m.grants)+1)
		open = append(open, now.UnixMicro())
		for id := range m.grants {
			open = append(open, id)
		}
		m.mu.Unlock()
		where := `expires_at<=?`
		if n := len(open) - 1; n > 0 && n < 30000 {
			where += ` AND id NOT IN (?` + strings.Repeat(",?", n-1) + `)`
		}
		var err error
		gone, err = deleteTokens(ctx, tx, where, open[:min(len(open), 30000)]...)
		return err
	})
	if err != nil {
		return err
	}
	for _, r := range gone {
		m.Ledger.Refund(r.tenant, r.sandbox, quota.Tokens, 1)
	}
	return nil
}

// MintAttachToken makes one more token for a session. A ttl of 0 is the default.
func (m *Manager) MintAttachToken(ctx context.Context, t tenant.ID, id sandbox.SessionID, principal string, ttl time.Duration) (Token, error) {
	if _, err := m.rowOf(ctx, t, id); err != nil {
		return Token{}, err
	}
	return m.mint(ctx, kindAttach, t, id.Sandbox(), id, principal, nil, ttl)
}

// MintDataToken makes a token for one sandbox with scopes. The caller has
// checked that the tenant owns the sandbox.
func (m *Manager) MintDataToken(ctx context.Context, t tenant.ID, id sandbox.ID, principal string, want []string, ttl time.Duration) (Token, error) {
	if t.IsZero() {
		return Token{}, errNotFound
	}
	want = slices.Clone(want)
	slices.Sort(want)
	want = slices.Compact(want)
	if len(want) == 0 {
		return Token{}, fault.New(fault.Invalid, "invalid_scope", "a data token needs a scope").Do("name some of %s", strings.Join(scopes, ", "))
	}
	for _, s := range want {
		if !slices.Contains(scopes, s) {
			return Token{}, fault.New(fault.Invalid, "invalid_scope", "an unknown scope").Do("name some of %s", strings.Join(scopes, ", "))
		}
	}
	if _, err := m.Guests.Guest(ctx, t, id); fault.IsClass(err, fault.NotFound) || fault.IsClass(err, fault.Gone) {
		return Token{}, err
	}
	return m.mint(ctx, kindData, t, id, "", principal, want, ttl)
}

func (m *Manager) mint(ctx context.Context, kind string, t tenant.ID, box sandbox.ID, id sandbox.SessionID, principal string, want []string, ttl time.Duration) (Token, error) {
	r, tok, err := m.newToken(kind, t, box, id, principal, want, ttl)
	if err != nil {
		return Token{}, err
	}
	if err := m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error { return m.insertToken(ctx, tx, r, "") }); err != nil {
		m.Ledger.Refund(t, box, quota.Tokens, 1)
		return Token{}, err
	}
	return tok, nil
}

// RevokeAttachTokens revokes every token of a session and cuts its streams.
func (m *Manager) RevokeAttachTokens(ctx context.Context, t tenant.ID, id sandbox.SessionID) error {
	if _, err := m.rowOf(ctx, t, id); err != nil {
		return err
	}
	return m.revoke(ctx, audit.Entry{Tenant: t.String(), Actor: "control", Target: string(id)}, `tenant=? AND session=?`, t.String(), string(id))
}

// RevokeDataTokens revokes every data token of a sandbox and cuts its streams.
func (m *Manager) RevokeDataTokens(ctx context.Context, t tenant.ID, id sandbox.ID) error {
	return m.revoke(ctx, audit.Entry{Tenant: t.String(), Actor: "control", Target: string(id)}, `tenant=? AND sandbox=? AND kind='data'`, t.String(), string(id))
}

// RevokePrincipal revokes every token that a key minted and cuts its streams.
func (m *Manager) RevokePrincipal(ctx context.Context, principal string) error {
	return m.revoke(ctx, audit.Entry{Actor: "control", Target: principal}, `principal=?`, principal)
}

func (m *Manager) revoke(ctx context.Context, e audit.Entry, where string, args ...any) error {
	var gone []tokenRow
	err := m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error {
		var err error
		if gone, err = deleteTokens(ctx, tx, where, args...); err != nil || len(gone) == 0 {
			return err
		}
		e.At, e.Action = m.now(), "token.revoke"
		e.Detail = map[string]string{"count": fmt.Sprint(len(gone))}
		return m.Auditor.Append(ctx, tx, e)
	})
	if err == nil {
		m.cutTokens(gone)
	}
	return err
}

// Grant is what a token proved, for as long as a call or stream is open.
type Grant struct {
	Tenant    tenant.ID
	Sandbox   sandbox.ID
	Session   sandbox.SessionID // attach tokens only
	Principal string
	Scopes    []string
	TokenID   string

	m    *Manager
	ctx  context.Context
	stop context.CancelCauseFunc
	once sync.Once
}

// Context ends with the call's context, and when the token is revoked or the
// manager closes; context.Cause then is a fault.
func (g *Grant) Context() context.Context { return g.ctx }

func (g *Grant) cut(why error) { g.stop(why) }

// Close ends the grant.
func (g *Grant) Close() {
	g.once.Do(func() {
		g.m.mu.Lock()
		set := g.m.grants[g.TokenID]
		delete(set, g)
		if len(set) == 0 {
			delete(g.m.grants, g.TokenID)
		}
		g.m.mu.Unlock()
		g.stop(nil)
	})
}

// Allows reports whether the grant opens session id.
func (g *Grant) Allows(id sandbox.SessionID) bool {
	if g.Session != "" {
		return g.Session == id
	}
	return g.Sandbox == id.Sandbox() && slices.Contains(g.Scopes, ScopeExec)
}

// AllowsScope reports whether the grant is a data token of sandbox id with
// scope. ScopeFilesWrite includes ScopeFilesRead.
func (g *Grant) AllowsScope(id sandbox.ID, scope string) bool {
	if g.Session != "" || g.Sandbox != id {
		return false
	}
	return slices.Contains(g.Scopes, scope) || scope == ScopeFilesRead && slices.Contains(g.Scopes, ScopeFilesWrite)
}

var errToken = fault.New(fault.Unauthenticated, "invalid_token", "the token is missing, unknown, expired or revoked").
	Do("send a valid attach or data token as Authorization: Bearer")

// Verify opens a grant for a data-plane token; Close it. The answer to a token
// that is wrong in any way is the same.
func (m *Manager) Verify(ctx context.Context, token string) (*Grant, error) {
	if len(token) != len(prefixAttach)+tokenRandom || !strings.HasPrefix(token, prefixAttach) && !strings.HasPrefix(token, prefixData) {
		return nil, errToken
	}
	return m.grant(ctx, `hash=?`, m.mac("token", []byte(token)))
}

func (m *Manager) grant(ctx context.Context, where string, arg any) (*Grant, error) {
	var g *Grant
	// Registered before it is checked again: a revocation between the two cuts it.
	for i := range 2 {
		r, err := scanToken(m.db.Read.QueryRowContext(ctx, `SELECT `+tokenColumns+` FROM session_tokens WHERE `+where, arg))
		if errors.Is(err, sql.ErrNoRows) || err == nil && !m.now().Before(r.expires) {
			err = errToken
		} else if err != nil {
			err = fmt.Errorf("session: read token: %w", err)
		}
		if err != nil {
			if g != nil {
				g.Close()
			}
			return nil, err
		}
		if i > 0 {
			break
		}
		g = &Grant{Tenant: r.tenant, Sandbox: r.sandbox, Session: r.session, Principal: r.principal, Scopes: strings.Fields(r.scopes), TokenID: r.id, m: m}
		g.ctx, g.stop = context.WithCancelCause(ctx)
		m.mu.Lock()
		if m.closed {
			m.mu.Unlock()
			g.stop(nil)
			return nil, errClosing
		}
		if m.grants[r.id] == nil {
			m.grants[r.id] = map[*Grant]struct{}{}
		}
		m.grants[r.id][g] = struct{}{}
		m.mu.Unlock()
	}
	return g, nil
}

// ticket lets a browser open one WebSocket: it cannot send headers there.
type ticket struct {
	tokenID string
	expires time.Time
}

// maxTickets bounds the tickets that wait to be used.
const maxTickets = 10000

// Ticket trades a grant for a ticket that opens one WebSocket once, soon.
func (m *Manager) Ticket(g *Grant) (string, time.Time, error) {
	s := prefixTicket + sandbox.Random(tokenRandom)
	at := m.now().Add(m.Limits.TicketTTL)
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.tickets) >= maxTickets {
		return "", time.Time{}, fault.New(fault.Exhausted, "quota", "too many tickets wait to be used").Do("try again in a minute")
	}
	m.tickets[string(m.mac("ticket", []byte(s)))] = ticket{g.TokenID, at}
	return s, at, nil
}

// VerifyTicket opens the grant of a ticket and spends it.
func (m *Manager) VerifyTicket(ctx context.Context, s string) (*Grant, error) {
	key := string(m.mac("ticket", []byte(s)))
	m.mu.Lock()
	t, ok := m.tickets[key]
	delete(m.tickets, key)
	m.mu.Unlock()
	if !ok || !m.now().Before(t.expires) {
		return nil, errToken
	}
	return m.grant(ctx, `id=?`, t.tokenID)
}
