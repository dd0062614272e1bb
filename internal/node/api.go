// Package node owns the machines of one host: it makes them what the control
// plane assigned, enforces their limits by itself, adopts them after a restart,
// and reports what became of them.
//
// # Node API
//
// API is the only meeting place of control and node. In `space up` it is a Go
// value; between machines it will be carried over TLS. Neither side ever reads
// the other's database.
//
// # Generations
//
// Only the control plane raises a generation. An Assignment below the persisted
// generation is refused (ErrStale); one equal to it is the same assignment
// again. Within one generation the node moves a machine only downwards (expiry,
// idle, failure, quarantine) by the policy it has persisted. Such a move is an
// Outcome: it is durable before the machine is touched, and it stays until the
// control plane absorbed it. While an Outcome of a sandbox is unabsorbed, a new
// Assignment for it is refused with ErrOutcomePending, unless it is a delete
// (delete wins every race). So an expired sandbox is never resurrected by a
// request that crossed its expiry.
//
// # Concurrency
//
// One actor goroutine per sandbox does its steps; there is no lock held over a
// runtime call other than that sandbox's own turn. Apply persists, then wakes
// the actor; it does not wait for convergence. A failed step is retried with
// backoff while the assignment's deadline has not passed; then it has failed. A
// delete, and what the node decided by itself, never gives up.
//
// # Rules that callers may rely on
//
//  1. Running is said only after the guest daemon has answered and has taken its
//     configuration, after every start and every resume.
//  2. What is failed stays so under later assignments until one has Restart (or
//     is stopped or deleted); what is quarantined until one is stopped (release)
//     or deleted. Failed machines are powered off; files are kept.
//  3. A power-off that was told of is carried out even if the next assignment
//     overtakes it: after stopped, running is always a cold boot.
//  4. Within a limit's action, pause becomes stop for a machine that is not up yet.
//  5. Quarantine outlasts expiry, deadline and restarts.
//  6. A sandbox with a running session is not idle, with or without a reader.
//  7. A deleted id never comes back: later assignments are refused with the fault
//     sandbox_deleted (which wraps ErrStale), a delete of it succeeds.
//  8. A sandbox whose machine vanished from the host is failed with machine_lost
//     and is never made anew with an empty disk.
package node

import (
	"context"
	"errors"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/template"
	"github.com/space-platform/space/internal/tenant"
)

// Errors of the node API; wrapped.
var (
	ErrStale          = errors.New("node: generation is older than the one in force")
	ErrOutcomePending = errors.New("node: an outcome waits to be absorbed")
	ErrUnknown        = errors.New("node: no such sandbox here")
)

// Assignment is what the control plane wants of one sandbox.
type Assignment struct {
	Tenant         tenant.ID
	ID             sandbox.ID
	Generation     uint64
	Desired        sandbox.State // running, paused, stopped or deleted
	TemplateDigest string
	Resources      sandbox.Resources
	Policy         sandbox.Policy
	// Env is the tenant's environment in clear; the node seals it at rest and
	// hands it to the guest daemon only over the channel.
	Env map[string]string
	// Deadline is when the node gives up converging and reports failed.
	Deadline time.Time
	// Restart asks for a cold boot of a machine that is failed or dead although
	// Desired was running before (start after a failure).
	Restart bool
}

// Observation is what the node knows of one sandbox.
type Observation struct {
	ID         sandbox.ID
	Generation uint64        // of the assignment in force
	State      sandbox.State // observed
	// Converged: the assignment is reached, or has ended as failed or quarantined.
	Converged  bool
	Problem    *operation.Problem
	Steps      []operation.Step // of the assignment in force
	WaitingFor string
	Class      sandbox.Class
	Runtime    string
	BootID     string
	Since      time.Time // of State
	// Pending is the unabsorbed outcome, if any.
	Pending *Outcome
}

// Outcome is a move that the node made by itself.
type Outcome struct {
	Seq        uint64 // rises per node, never reused
	ID         sandbox.ID
	Tenant     string
	Generation uint64
	State      sandbox.State // paused, stopped, deleted, failed, quarantined
	// Trigger: "expired", "deadline", "idle", "machine_died", "guest_unresponsive",
	// "guest_protocol_error", "limit", "adopted_dead", "adoption_mismatch".
	Trigger string
	Problem *operation.Problem
	At      time.Time
}

// Capacity is what the node may give and what is taken.
type Capacity struct {
	Total, Used  sandbox.Resources // MaxProcesses is not accounted
	Sandboxes    int
	MaxSandboxes int
}

// Stats of one sandbox as the host measures them.
type Stats struct {
	CPUNanos, MemoryBytes, MemoryPeak, DiskBytes, Processes uint64
}

// API is what the control plane may ask of a node.
type API interface {
	// Apply persists the assignment and starts converging. Errors: ErrStale,
	// ErrOutcomePending, a fault with code "capacity".
	Apply(ctx context.Context, a Assignment) (Observation, error)
	// Observe: ErrUnknown when the node has no row and no machine of id.
	Observe(ctx context.Context, t tenant.ID, id sandbox.ID) (Observation, error)
	// Await returns when generation (or a later one) is converged, or the
	// observation differs from the one last returned to this caller in state, or
	// ctx ends (then with the last observation and ctx.Err()).
	Await(ctx context.Context, t tenant.ID, id sandbox.ID, generation uint64) (Observation, error)
	// Outcomes lists unabsorbed ones in order of Seq.
	Outcomes(ctx context.Context, limit int) ([]Outcome, error)
	// Absorb forgets the outcome seq of id; idempotent.
	Absorb(ctx context.Context, id sandbox.ID, seq uint64) error
	// OutcomeSignal is closed or sent to when a new outcome may be there. A hint.
	OutcomeSignal() <-chan struct{}
	// Known lists every sandbox id the node has a row or a machine for.
	Known(ctx context.Context) ([]sandbox.ID, error)
	// Admit is the advisory check before intent: a fault with code "capacity"
	// when r does not fit now.
	Admit(ctx context.Context, r sandbox.Resources) error
	Capacity(ctx context.Context) (Capacity, error)
	Stats(ctx context.Context, t tenant.ID, id sandbox.ID) (Stats, error)
	Templates(ctx context.Context) ([]template.Info, error)
	// Resolve finds a template by name:tag or digest; a fault "template_not_found".
	Resolve(ctx context.Context, ref string) (template.Info, error)

	// Audit lists the tenant's records of this node's chain below seq before (0:
	// from the newest), newest first.
	Audit(ctx context.Context, t tenant.ID, before uint64, limit int) ([]audit.Record, error)

	// Sessions serves command sessions and data-plane tokens.
	Sessions() session.Service
}
