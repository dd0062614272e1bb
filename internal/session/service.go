// Package session is command sessions: one command each, its authorisation, its
// output journal on the host's disk, and the data plane that streams it.
//
// # Life of a session
//
//	created ──attach──► starting ──► running ──► exited
//	   │ 60 s              │            │
//	   ▼                   └────────────┴──► lost (machine gone: cause says why)
//	expired
//
// Creating runs nothing. The first attach starts the process, exactly once
// however many race and whatever is killed in between: "starting" with the
// guest's boot epoch is durable before the guest is asked, and the guest's
// Start is idempotent by session id.
//
// # Journal and event ids
//
// All that happens in a session is a journal. An event id is "epoch.offset".
// Every byte of output counts one, every other event counts one; the id of an
// event is the position after it. A reader that gives the id of the last event
// it saw gets all that follows, once, in order, whatever the chunking was then.
// A position that is no longer kept gives one explicit gap event with the
// missing range. A position beyond the end or of an unknown epoch is an error,
// never a guess. The first event is started, the last one is exit (or error
// with the code sandbox_lost, session_expired …); nothing follows it.
//
// # Concurrency
//
// One pump goroutine per running session reads from the guest, appends to the
// journal, then acknowledges. Readers read the journal at their own speed and
// never hold up the pump or each other; a reader too slow for the kept window
// sees a gap. Memory per reader and per session is bounded by constants in
// limits.go.
package session

import (
	"context"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
)

// State of a session.
type State string

// The states.
const (
	Created  State = "created"
	Starting State = "starting"
	Running  State = "running"
	Exited   State = "exited"
	Lost     State = "lost"
	Expired  State = "expired"
)

// Command is what a session will run.
type Command struct {
	Args  []string          `json:"args,omitempty"`
	Shell string            `json:"shell,omitempty"`
	User  string            `json:"user,omitempty"`
	Cwd   string            `json:"cwd,omitempty"`
	Env   map[string]string `json:"env,omitempty"`
	Stdin bool              `json:"stdin,omitempty"`
	PTY   *guestapi.Size    `json:"pty,omitempty"`
	// TimeLimit counts time the machine runs; 0 = none.
	TimeLimit time.Duration `json:"time_limit,omitempty"`
	Overflow  string        `json:"overflow,omitempty"` // block (default) or drop
}

// Exit is the true end of a session; set once, after the process is gone and
// after all its output.
type Exit struct {
	// Cause: exited, signal, time_limit, out_of_memory, sandbox_lost, expired, or
	// start_failed (no process ever existed; Reason begins with the guest's code).
	Cause  string    `json:"cause"`
	Code   int       `json:"code"`             // 128+n for signals; -1 when the process's end is not known
	Signal string    `json:"signal,omitempty"` // SIGKILL
	Reason string    `json:"reason,omitempty"` // words, for lost ones
	At     time.Time `json:"at"`
}

// Session is what callers see of one; the command's environment is never shown.
type Session struct {
	ID        sandbox.SessionID `json:"id"`
	Sandbox   sandbox.ID        `json:"sandbox"`
	Principal string            `json:"principal"` // key id of who made it
	State     State             `json:"state"`
	Command   Command           `json:"command"` // Env removed
	Epoch     uint64            `json:"epoch"`
	CreatedAt time.Time         `json:"created_at"`
	StartedAt time.Time         `json:"started_at,omitzero"`
	PID       int               `json:"pid,omitempty"` // as the guest claims
	Exit      *Exit             `json:"exit,omitempty"`
	// FirstID and LastID bound the kept window of events.
	FirstID string `json:"first_id"`
	LastID  string `json:"last_id"`
	// StdinOffset is what the guest has accepted of stdin, as last known.
	StdinOffset uint64 `json:"stdin_offset"`
}

// Token is a credential for the data plane, shown once.
type Token struct {
	ID        string    `json:"id"`
	Token     string    `json:"token"`
	ExpiresAt time.Time `json:"expires_at"`
	Scopes    []string  `json:"scopes,omitempty"` // data tokens only
}

// CreateRequest makes a session.
type CreateRequest struct {
	Sandbox   sandbox.ID
	Principal string // key id
	Request   string // request id, for audit
	Command   Command
	// IdempotencyKey with BodyHash makes a repeat answer the same session with a
	// new token, the old one revoked; another body is a fault "idempotency_mismatch".
	IdempotencyKey string
	BodyHash       []byte
	TokenTTL       time.Duration // 0 = default
}

// ExecRequest runs a command and collects its result.
type ExecRequest struct {
	CreateRequest
	StdinData []byte
	// MaxOutput bounds each of stdout and stderr in the answer; what is beyond is
	// counted, not kept.
	MaxOutput int64
}

// ExecResult is the whole result of a blocking exec.
type ExecResult struct {
	Session sandbox.SessionID
	Exit    Exit
	Stdout  []byte
	Stderr  []byte
	// Bytes that were printed but left out of Stdout and Stderr: beyond MaxOutput,
	// or because results of the tenant, or of all, hold as much memory as they may.
	StdoutTruncated, StderrTruncated uint64
	// GapBytes were lost by the window (overflow drop, or a slow collector).
	GapBytes uint64
}

// Service is what control asks of sessions. Every method checks the tenant.
type Service interface {
	Create(ctx context.Context, t tenant.ID, r CreateRequest) (Session, Token, error)
	Get(ctx context.Context, t tenant.ID, id sandbox.SessionID) (Session, error)
	List(ctx context.Context, t tenant.ID, id sandbox.ID, cursor string, limit int) (items []Session, next string, err error)
	// Kill ends the process tree and returns when it is gone; idempotent.
	Kill(ctx context.Context, t tenant.ID, id sandbox.SessionID) (Session, error)
	// Exec is create, attach, collect. It works through the same journal.
	Exec(ctx context.Context, t tenant.ID, r ExecRequest) (ExecResult, error)
	MintAttachToken(ctx context.Context, t tenant.ID, id sandbox.SessionID, principal string, ttl time.Duration) (Token, error)
	RevokeAttachTokens(ctx context.Context, t tenant.ID, id sandbox.SessionID) error
	MintDataToken(ctx context.Context, t tenant.ID, id sandbox.ID, principal string, scopes []string, ttl time.Duration) (Token, error)
	RevokeDataTokens(ctx context.Context, t tenant.ID, id sandbox.ID) error
	// RevokePrincipal revokes every token that key id minted and cuts its streams.
	RevokePrincipal(ctx context.Context, principal string) error
}
