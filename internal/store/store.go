// Package store is the control plane's durable state: what was asked for and
// what is known of it. storetest is the one suite that every implementation
// passes; sqlite and postgres implement it.
//
// # Guarantees
//
//  1. Mutate is one transaction: all of it is durable when it returns nil
//     (SQLite: WAL with synchronous=FULL), none of it otherwise. fn may run
//     several times and must be free of effects outside tx. Two Mutates that
//     touch the same row are serialised; the loser of a compare-and-set gets
//     ErrConflict (the caller reads again and decides).
//  2. Every row has a tenant and every method takes a proven tenant.ID: a row of
//     another tenant is ErrNotFound, exactly as one that does not exist. The
//     methods of System see all tenants; only the reconciler holds a System.
//  3. Sandbox rows change only by compare-and-set on (observed state,
//     generation, revision); generations never fall.
//  4. Rows read back equal rows written: times in UTC with microseconds, maps
//     nil or not as written, arbitrary UTF-8 in texts.
//  5. Lists are stable under concurrent change: ordered by (created_at, id)
//     descending, cursors name the last row seen, so no row that exists during
//     the whole walk is missed or seen twice.
package store

import (
	"context"
	"errors"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
)

// Errors; implementations wrap them.
var (
	ErrNotFound = errors.New("store: not found")
	ErrConflict = errors.New("store: row changed meanwhile")
	ErrExists   = errors.New("store: exists")
	// ErrBadCursor: the cursor was not made by this list.
	ErrBadCursor = errors.New("store: bad cursor")
)

// Sandbox is the control plane's record of one sandbox.
type Sandbox struct {
	Tenant tenant.ID
	ID     sandbox.ID
	// Name is unique per tenant among the living; "" is no name.
	Name           string
	Template       string // reference as resolved: name:tag
	TemplateDigest string
	// Accept is the set of isolation classes the request accepted; Class and
	// Runtime are pinned by the first start.
	Accept    []sandbox.Class
	Class     sandbox.Class
	Runtime   string
	Resources sandbox.Resources
	Policy    sandbox.Policy
	Metadata  map[string]string
	// SealedEnv is the tenant's environment, sealed (secret.Sealer) by the caller.
	SealedEnv []byte
	Node      string

	Desired  sandbox.State
	Observed sandbox.State
	// Generation is raised by every accepted intent; Converged is the highest
	// generation the node reported as reached.
	Generation uint64
	Converged  uint64
	// Problem says why it is failed or quarantined, or what moved it.
	Problem *operation.Problem
	// OutcomeSeq is the last node outcome absorbed into this row.
	OutcomeSeq uint64

	CreatedAt time.Time
	UpdatedAt time.Time
	// DeletedAt is set on the tombstone, which is kept TombstoneKeep.
	DeletedAt time.Time
	CreatedBy string
	// Revision rises with every write of the row; the store sets it.
	Revision uint64
}

// Idempotency is one remembered mutation. It holds a keyed hash of the request
// body and ids, never a response.
type Idempotency struct {
	Principal string
	Key       string
	Method    string
	Route     string // route pattern with its ids filled in
	BodyHash  []byte
	Operation string
	Resource  string
	CreatedAt time.Time
}

// Key is an API key. Only Hash of the secret part is kept.
type Key struct {
	Tenant     tenant.ID
	ID         string // "key" + 16 characters, shown everywhere
	Name       string
	Hash       []byte
	Scopes     []string
	CreatedAt  time.Time
	CreatedBy  string
	ExpiresAt  time.Time // zero: never
	RevokedAt  time.Time // zero: valid
	LastUsedAt time.Time // coarse: written at most once a minute
}

// Filter narrows a list of sandboxes. Zero fields do not narrow. A filter never
// widens: an unknown state or pair gives an empty list.
type Filter struct {
	States   []sandbox.State   // observed states
	Metadata map[string]string // all pairs must match exactly
	Deleted  bool              // include tombstones
	Cursor   string
	Limit    int // 1..1000; 0 means 100
}

// Page is one page of a list; Next is "" on the last one.
type Page[T any] struct {
	Items []T
	Next  string
}

// Tx is what Mutate's function works with. Reads see the transaction's own writes.
type Tx interface {
	Sandbox(id sandbox.ID) (Sandbox, error)
	SandboxByName(name string) (Sandbox, error) // among the living
	// InsertSandbox: ErrExists when id or living name is taken.
	InsertSandbox(s Sandbox) error
	// UpdateSandbox writes s if the row still has s.Revision, and raises it; else ErrConflict.
	// A generation below the row's is refused with ErrConflict.
	UpdateSandbox(s Sandbox) error
	CountSandboxes() (int, error) // living ones of the tenant

	InsertOperation(o operation.Operation) error
	Operation(id string) (operation.Operation, error)
	// UpdateOperation refuses to change a final one (ErrConflict).
	UpdateOperation(o operation.Operation) error
	// OpenOperations of one sandbox, oldest first.
	OpenOperations(id sandbox.ID) ([]operation.Operation, error)

	// Idempotency finds a remembered mutation; ErrNotFound otherwise.
	Idempotency(principal, key, method, route string) (Idempotency, error)
	// InsertIdempotency: ErrExists when taken (also by a concurrent transaction).
	InsertIdempotency(i Idempotency) error

	InsertKey(k Key) error
	UpdateKey(k Key) error
	Key(id string) (Key, error)

	// Audit appends to the control chain in this transaction.
	Audit(e audit.Entry) error
}

// Store is the state of all tenants behind proven ids.
type Store interface {
	// Mutate runs fn in one durable transaction for tenant t.
	Mutate(ctx context.Context, t tenant.ID, fn func(tx Tx) error) error

	Sandbox(ctx context.Context, t tenant.ID, id sandbox.ID) (Sandbox, error)
	SandboxByName(ctx context.Context, t tenant.ID, name string) (Sandbox, error)
	Sandboxes(ctx context.Context, t tenant.ID, f Filter) (Page[Sandbox], error)
	Operation(ctx context.Context, t tenant.ID, id string) (operation.Operation, error)
	// Operations of the tenant, newest first; of one sandbox when id != "".
	Operations(ctx context.Context, t tenant.ID, id sandbox.ID, cursor string, limit int) (Page[operation.Operation], error)
	Keys(ctx context.Context, t tenant.ID, cursor string, limit int) (Page[Key], error)
	AuditEntries(ctx context.Context, t tenant.ID, cursor string, limit int) (Page[audit.Record], error)

	System() System
	Ping(ctx context.Context) error
	Close() error
}

// Ref names a sandbox for the reconciler.
type Ref struct {
	Tenant tenant.ID
	ID     sandbox.ID
}

// System sees all tenants. Holders: the reconciler, auth (look up of a key by
// its hash), start-up. Never a request handler.
type System interface {
	// Unsettled lists sandboxes whose generation is above converged or that have
	// an open operation, oldest change first.
	Unsettled(ctx context.Context, limit int) ([]Ref, error)
	// Living lists every sandbox that is not a tombstone, in id order after the given one.
	Living(ctx context.Context, after sandbox.ID, limit int) ([]Ref, error)
	// OverdueOperations lists open operations past their deadline.
	OverdueOperations(ctx context.Context, now time.Time, limit int) ([]Ref, error)
	// FindSandbox finds any sandbox, for absorbing a node's outcome.
	FindSandbox(ctx context.Context, id sandbox.ID) (Sandbox, error)
	// KeyByHash finds a key by the hash of its secret: ErrNotFound otherwise.
	KeyByHash(ctx context.Context, hash []byte) (Key, error)
	// TouchKey records use, at most once a minute and key.
	TouchKey(ctx context.Context, k Key, at time.Time) error
	// Purge removes tombstones, final operations and idempotency rows older than before.
	Purge(ctx context.Context, before time.Time) (int, error)
	// AuditAll walks the control chain in order from seq (1-based), for verify.
	AuditAll(ctx context.Context, from uint64, limit int) ([]audit.Record, error)
	// EnsureTenant makes the tenant's row if it is missing.
	EnsureTenant(ctx context.Context, name string) (tenant.ID, error)
	Counts(ctx context.Context) (Counts, error)
}

// Counts are totals for metrics.
type Counts struct {
	Sandboxes map[sandbox.State]int
	OpenOps   int
}
