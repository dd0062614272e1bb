package control

import (
	"context"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/template"
)

// API is what front doors may ask; Service implements it. Every method checks
// the principal's scope first and answers with faults. Wherever a sandbox is
// named, ref is an id or the name of a living sandbox of the principal's
// tenant; what belongs to another tenant is not_found exactly as what does not
// exist.
type API interface {
	// CreateSandbox records the wish for a sandbox. Faults: invalid ones,
	// "template_not_found", "isolation_unavailable", "capacity", "quota_exceeded",
	// "name_taken", "idempotency_mismatch".
	CreateSandbox(ctx context.Context, p Principal, req Request, c CreateSandbox) (Result, error)
	// GetSandbox: a deleted one is "sandbox_deleted" (Gone) by its id while its
	// tombstone is kept, and not found by its name.
	GetSandbox(ctx context.Context, p Principal, ref string) (Sandbox, error)
	// ListSandboxes lists newest first. Deleted ones only with Filter.Deleted.
	ListSandboxes(ctx context.Context, p Principal, f store.Filter) (store.Page[Sandbox], error)
	// PatchSandbox changes metadata and policy. It is the only request that may
	// shorten life. A new timeout is cut at the hard deadline.
	PatchSandbox(ctx context.Context, p Principal, req Request, ref string, c PatchSandbox) (Result, error)
	// DeleteSandbox wins over everything that is going on.
	DeleteSandbox(ctx context.Context, p Principal, req Request, ref string) (Result, error)
	// Lifecycle asks for pause, resume, stop, start or wake. Verbs are
	// level-triggered: asking for what is succeeds at once.
	Lifecycle(ctx context.Context, p Principal, req Request, ref string, c Lifecycle) (Result, error)
	// Release ends a quarantine: the sandbox becomes stopped. Operators only.
	Release(ctx context.Context, p Principal, req Request, ref string) (Result, error)
	// ListQuarantine lists the tenant's quarantined sandboxes. Operators only.
	ListQuarantine(ctx context.Context, p Principal, cursor string, limit int) (store.Page[Sandbox], error)
	// SandboxStats is what the host measures of it.
	SandboxStats(ctx context.Context, p Principal, ref string) (node.Stats, error)

	// GetOperation answers at its end or after wait.
	GetOperation(ctx context.Context, p Principal, id string, wait time.Duration) (operation.Operation, error)
	// ListOperations lists newest first; of one sandbox when ref is not "".
	ListOperations(ctx context.Context, p Principal, ref, cursor string, limit int) (store.Page[operation.Operation], error)
	// CancelOperation takes a request back that has not taken effect: see
	// operations.go for what can be; else "operation_not_cancellable".
	CancelOperation(ctx context.Context, p Principal, req Request, id string) (Result, error)

	// CreateSession authorises one command; nothing runs until it is attached. A
	// machine that is on its way up is waited for.
	CreateSession(ctx context.Context, p Principal, req Request, ref string, c CreateSession) (session.Session, session.Token, error)
	GetSession(ctx context.Context, p Principal, id string) (session.Session, error)
	ListSessions(ctx context.Context, p Principal, ref, cursor string, limit int) (store.Page[session.Session], error)
	KillSession(ctx context.Context, p Principal, req Request, id string) (session.Session, error)
	Exec(ctx context.Context, p Principal, req Request, ref string, c Exec) (session.ExecResult, error)
	MintAttachToken(ctx context.Context, p Principal, req Request, id string, ttl time.Duration) (session.Token, error)
	RevokeAttachTokens(ctx context.Context, p Principal, req Request, id string) error
	MintDataToken(ctx context.Context, p Principal, req Request, ref string, scopes []string, ttl time.Duration) (session.Token, error)
	RevokeDataTokens(ctx context.Context, p Principal, req Request, ref string) error

	// MintKey answers the key and its secret, shown once: a repeat has a zero
	// secret. No wider than the caller's.
	MintKey(ctx context.Context, p Principal, req Request, c MintKey) (store.Key, secret.Value, error)
	ListKeys(ctx context.Context, p Principal, cursor string, limit int) (store.Page[store.Key], error)
	// RevokeKey ends the key, the tokens it minted and their streams.
	RevokeKey(ctx context.Context, p Principal, req Request, id string) (store.Key, error)

	ListTemplates(ctx context.Context, p Principal) ([]template.Info, error)
	// GetTemplate: ref is name:tag or a digest.
	GetTemplate(ctx context.Context, p Principal, ref string) (template.Info, error)
	ListNodes(ctx context.Context, p Principal) ([]Node, error)
	// ListAudit lists the tenant's records of a chain, newest first: ChainControl
	// (also "") has what was asked for, ChainNode what sandboxes and sessions did.
	ListAudit(ctx context.Context, p Principal, chain, cursor string, limit int) (store.Page[audit.Record], error)
	Health(ctx context.Context) (checks map[string]string, ok bool)
}

// CreateSandbox asks for a sandbox; zero fields take Defaults.
type CreateSandbox struct {
	Name        string
	Template    string
	Accept      []sandbox.Class
	Resources   sandbox.Resources
	Timeout     time.Duration
	OnTimeout   sandbox.Action
	IdleTimeout time.Duration // 0: never
	OnIdle      sandbox.Action
	MaxLifetime time.Duration
	Metadata    map[string]string
	Env         map[string]string
}

// PatchSandbox changes what is not nil.
type PatchSandbox struct {
	Name        *string // "" takes the name away
	Metadata    *map[string]string
	Timeout     *time.Duration // new end of life, counted from now
	OnTimeout   *sandbox.Action
	IdleTimeout *time.Duration
	OnIdle      *sandbox.Action
}

// Lifecycle is one verb.
type Lifecycle struct {
	Verb sandbox.Verb
	// Timeout is the least life wanted from now on, for verbs that lead to
	// running; it never shortens. 0: a sandbox that comes back and whose end of
	// life is sooner gets the timeout it was last given.
	Timeout time.Duration
}

// CreateSession asks for one command session.
type CreateSession struct {
	Command  session.Command
	TokenTTL time.Duration // 0: the session service's default
}

// Exec runs a command and waits for its whole result.
type Exec struct {
	Command   session.Command
	StdinData []byte
	MaxOutput int64
}

// MintKey asks for an API key.
type MintKey struct {
	Name   string
	Scopes []string
	TTL    time.Duration // 0: no expiry
}

// Node is what an operator sees of a node.
type Node struct {
	NodeInfo
	node.Capacity
}

var _ API = (*Service)(nil)
