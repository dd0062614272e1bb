// Package operation holds the durable record of an asynchronous life-cycle
// change: what was asked, how far it is, what it waits for, and how it ended.
// Pure: no I/O, no clock of its own.
package operation

import (
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
)

// State of an operation. Pending and Running are open; the others are final.
type State string

// The states.
const (
	Pending   State = "pending"
	Running   State = "running"
	Succeeded State = "succeeded"
	Failed    State = "failed"
	// Cancelled: by request before it took effect, or overtaken by a later
	// operation on the same sandbox (Superseded names it).
	Cancelled State = "cancelled"
)

// Final reports whether s never changes again.
func (s State) Final() bool { return s == Succeeded || s == Failed || s == Cancelled }

// Step is one stage of the work with its times. EndedAt zero means it is going on.
type Step struct {
	Name      string    `json:"name"`
	StartedAt time.Time `json:"started_at"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
}

// MaxSteps bounds Steps; the oldest go first.
const MaxSteps = 32

// Problem is how an operation failed; the user-facing part of a fault.Error.
type Problem struct {
	Code      string `json:"code"`
	What      string `json:"what"`
	Why       string `json:"why,omitempty"`
	Remedy    string `json:"remedy,omitempty"`
	Retryable bool   `json:"retryable"`
}

// ProblemOf keeps the user-facing part of err.
func ProblemOf(err error) *Problem {
	if err == nil {
		return nil
	}
	e := fault.Of(err)
	return &Problem{Code: e.Code, What: e.What, Why: e.Why, Remedy: e.Remedy, Retryable: e.Retryable}
}

// Operation is one record.
type Operation struct {
	ID      string       `json:"id"`   // "op" + 24 characters
	Kind    sandbox.Verb `json:"kind"` // "create" or a verb
	Sandbox sandbox.ID   `json:"sandbox"`
	// Generation is the sandbox generation this operation asked for: it is done
	// when that generation is observed as converged.
	Generation uint64 `json:"generation"`
	State      State  `json:"state"`
	Steps      []Step `json:"steps,omitempty"`
	// WaitingFor says in words what an open operation waits for.
	WaitingFor string    `json:"waiting_for,omitempty"`
	CreatedAt  time.Time `json:"created_at"`
	UpdatedAt  time.Time `json:"updated_at"`
	// DeadlineAt is when it fails at the latest. It always ends.
	DeadlineAt time.Time `json:"deadline_at"`
	// RetrySafe reports whether asking again cannot do it twice; always true
	// for level-triggered verbs and for requests with an idempotency key.
	RetrySafe  bool     `json:"retry_safe"`
	Superseded string   `json:"superseded_by,omitempty"`
	Problem    *Problem `json:"error,omitempty"`
	Principal  string   `json:"principal"` // key id of who asked
}

// Create is the kind of the operation that makes a sandbox.
const Create sandbox.Verb = "create"

// NewID makes an operation id.
func NewID() string { return "op" + sandbox.Random(24) }
