// Package control holds the use cases behind every front door, and the
// reconciler that makes them true.
//
// # Intent
//
// Service is stateless. A mutation checks the caller's scope, validates, and
// then writes record, operation, idempotency row and audit entry in one
// store.Mutate; only after that it answers (promise 1). It never asks the node
// to do anything: it triggers the reconciler, which reads the rows. A trigger
// may be lost; the periodic pass is the truth.
//
// # Generations
//
// An intent that changes what is wanted raises the sandbox's generation; one
// that asks for what is already wanted joins the generation in force. So does
// every absorbed node outcome raise it: an outcome of the generation in force
// is unabsorbed for certain, and no reply of an older generation can undo it.
//
// # Reconciler
//
// Only the reconciler writes observed fields. For one sandbox it observes the
// node, absorbs a pending outcome, records what was reached (so that a pause
// that was carried out before its resume ends as succeeded, and one that was
// overtaken as cancelled), applies the generation in force, and waits. Two
// control processes may do this at once: every write is a compare-and-set and
// every node call is idempotent.
//
// # Operations
//
// An operation is done when its generation is reported reached. It ends at its
// deadline at the latest, as failed with code "operation_timeout"; what was
// wanted stays wanted and is converged to later. A later request that wants
// another state marks it superseded; whether it had been reached before is
// decided by the node's report, not by the request.
package control

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// Sealer seals tenant data at rest; aad binds it to its row. *secret.Sealer is one.
type Sealer interface {
	Seal(plain, aad []byte) ([]byte, error)
	Open(sealed, aad []byte) ([]byte, error)
}

// NodeInfo describes the node behind Config.Node: what it is called and what
// its runtime truly gives.
type NodeInfo struct {
	Name    string
	Runtime string
	Class   sandbox.Class
}

// Config is what a Service is made of. Store, Node, NodeInfo.Class and HashKey
// are needed; the rest has defaults.
type Config struct {
	Store    store.Store
	Node     node.API
	NodeInfo NodeInfo
	// Sealer seals environments; without one a request with Env is refused.
	Sealer Sealer
	// Keys mints, lists and revokes API keys.
	Keys Keys
	// HashKey keys the hashes of request bodies that idempotency rows keep; at
	// least 16 bytes, the same after a restart.
	HashKey  []byte
	Clock    clock.Clock
	Log      *slog.Logger
	Registry prometheus.Registerer // nil: metrics are counted but not registered
	Defaults Defaults
	Limits   Limits
	Tuning   Tuning
}

// Request is what every mutation carries from its front door.
type Request struct {
	ID             string // request id, for audit and logs
	IdempotencyKey string // "" is none
	// BodyHash is a hash of the canonical request body; control keys it before
	// it is kept. Needed with IdempotencyKey.
	BodyHash []byte
	Method   string
	Route    string // pattern with its ids filled in
	// Wait is how long to wait for the operation's end before answering; bounded
	// by Limits.MaxWait.
	Wait time.Duration
}

// Sandbox is what callers see of a sandbox: the row without its environment.
type Sandbox struct {
	Tenant         tenant.ID
	ID             sandbox.ID
	Name           string
	Template       string
	TemplateDigest string
	Accept         []sandbox.Class
	Class          sandbox.Class // "" until the first start
	Runtime        string
	Resources      sandbox.Resources
	Policy         sandbox.Policy
	Metadata       map[string]string
	Node           string
	Desired        sandbox.State
	Observed       sandbox.State
	Generation     uint64
	Converged      uint64
	Problem        *operation.Problem
	CreatedAt      time.Time
	UpdatedAt      time.Time
	DeletedAt      time.Time
	CreatedBy      string
}

func viewOf(s store.Sandbox) Sandbox {
	return Sandbox{
		Tenant: s.Tenant, ID: s.ID, Name: s.Name, Template: s.Template, TemplateDigest: s.TemplateDigest,
		Accept: s.Accept, Class: s.Class, Runtime: s.Runtime, Resources: s.Resources, Policy: s.Policy,
		Metadata: s.Metadata, Node: s.Node, Desired: s.Desired, Observed: s.Observed,
		Generation: s.Generation, Converged: s.Converged, Problem: s.Problem,
		CreatedAt: s.CreatedAt, UpdatedAt: s.UpdatedAt, DeletedAt: s.DeletedAt, CreatedBy: s.CreatedBy,
	}
}

// Result answers every mutation of a sandbox. When Operation.State is final it
// is done (200), else it goes on (202).
type Result struct {
	Sandbox   Sandbox
	Operation operation.Operation
	// Replayed: an earlier request with the same idempotency key did this.
	Replayed bool
}

// Service is the control plane's use cases. Safe for concurrent use; any number
// may run over one store.
type Service struct {
	store    store.Store
	node     node.API
	info     NodeInfo
	sealer   Sealer
	keys     Keys
	hashKey  []byte
	clock    clock.Clock
	log      *slog.Logger
	defaults Defaults
	limits   Limits
	metrics  *metrics
	hub      *hub
	rec      *Reconciler
}

// New makes a Service and its Reconciler (Reconciler.Run must be running for
// anything to happen). It does no I/O.
func New(c Config) (*Service, error) {
	switch {
	case c.Store == nil || c.Node == nil:
		return nil, errors.New("control: a store and a node are needed")
	case len(c.HashKey) < 16:
		return nil, errors.New("control: hash key below 16 bytes")
	case c.NodeInfo.Class == "":
		return nil, errors.New("control: the node's isolation class is needed")
	}
	if c.Clock == nil {
		c.Clock = clock.System{}
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	s := &Service{
		store: c.Store, node: c.Node, info: c.NodeInfo, sealer: c.Sealer, keys: c.Keys,
		hashKey: append([]byte(nil), c.HashKey...), clock: c.Clock, log: c.Log,
		defaults: c.Defaults.filled(), limits: c.Limits.filled(), hub: newHub(),
	}
	var err error
	if s.metrics, err = newMetrics(c.Registry); err != nil {
		return nil, err
	}
	s.rec = newReconciler(s, c.Tuning.filled())
	return s, nil
}

// Reconciler gives the service's reconciler, to be run by the owner.
func (s *Service) Reconciler() *Reconciler { return s.rec }

func (s *Service) now() time.Time { return s.clock.Now().UTC().Truncate(time.Microsecond) }

// bodyHash is what an idempotency row keeps of a body: keyed, so that rows do
// not let anyone guess bodies.
func (s *Service) bodyHash(r Request) []byte {
	m := hmac.New(sha256.New, s.hashKey)
	m.Write([]byte("space-idempotency-1\x00"))
	m.Write(r.BodyHash)
	return m.Sum(nil)
}

// envAAD binds a sealed environment to its row.
func envAAD(t tenant.ID, id sandbox.ID) []byte {
	return secret.Bind("env", t.String(), string(id))
}

// Health reports whether store and node answer; the map has "ok" or a reason
// per part. It needs no principal and tells nothing of any tenant.
func (s *Service) Health(ctx context.Context) (checks map[string]string, ok bool) {
	checks, ok = map[string]string{"store": "ok", "node": "ok"}, true
	if err := s.store.Ping(ctx); err != nil {
		s.log.Error("health: store", "err", err)
		checks["store"], ok = "does not answer", false
	}
	if _, err := s.node.Capacity(ctx); err != nil {
		s.log.Error("health: node", "err", err)
		checks["node"], ok = "does not answer", false
	}
	return checks, ok
}

// unavailable is the answer when a part of ours is away.
func unavailable(part string, err error) error {
	return fault.New(fault.Unavailable, part+"_unavailable", "the %s does not answer", part).
		Do("retry; nothing was changed by this request").Wrap(err)
}
