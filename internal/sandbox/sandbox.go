// Package sandbox holds the words of SPACE: ids, states, verbs, limits and the
// one pure table of transitions. It does no I/O, has no clock and imports
// nothing else of ours but the error classes.
package sandbox

import (
	"crypto/rand"
	"regexp"
	"time"

	"github.com/space-platform/space/internal/fault"
)

// ID names one sandbox for ever. It matches ^[a-z0-9]+$ and always has IDLen
// characters, so that no id is a prefix of another (runsc treats prefixes as
// ambiguous).
type ID string

// IDLen is the fixed length of an ID: "i" and 19 characters of 5 bits each.
const IDLen = 20

const alphabet = "abcdefghijklmnopqrstuvwxyz234567"

var idRE = regexp.MustCompile(`^i[a-z0-9]{19}$`)

// NewID makes a random ID (95 bits).
func NewID() ID { return ID("i" + Random(IDLen-1)) }

// Random gives n characters of 5 random bits each, for ids and tokens.
func Random(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails (crypto/rand)
	for i := range b {
		b[i] = alphabet[b[i]&31]
	}
	return string(b)
}

// ParseID checks the form of an id that came from outside.
func ParseID(s string) (ID, error) {
	if !idRE.MatchString(s) {
		return "", fault.New(fault.Invalid, "invalid_id", "%q is not a sandbox id", clip(s)).
			Do("use the id that create answered: 20 characters of a-z and 0-9")
	}
	return ID(s), nil
}

// SessionID names a command session: the id of its sandbox, "-" and SessionRandLen
// random characters, so that a session alone tells where it lives.
type SessionID string

// SessionRandLen is the length of a SessionID's random part.
const SessionRandLen = 20

var sessionRE = regexp.MustCompile(`^i[a-z0-9]{19}-[a-z2-7]{20}$`)

// NewSessionID makes a session id of sandbox id.
func NewSessionID(id ID) SessionID {
	return SessionID(string(id) + "-" + Random(SessionRandLen))
}

// ParseSessionID checks the form of a session id that came from outside.
func ParseSessionID(s string) (SessionID, error) {
	if !sessionRE.MatchString(s) {
		return "", fault.New(fault.Invalid, "invalid_id", "%q is not a session id", clip(s)).
			Do("use the id that creating the session answered")
	}
	return SessionID(s), nil
}

// Sandbox gives the sandbox that the session belongs to.
func (s SessionID) Sandbox() ID {
	if len(s) < IDLen {
		return ""
	}
	return ID(s[:IDLen])
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "…"
	}
	return s
}

// Resources are the limits of one sandbox. They hold on the node.
type Resources struct {
	// MilliCPU is the CPU quota in thousandths of a CPU (1000 = one CPU).
	MilliCPU int64 `json:"milli_cpu"`
	// MemoryBytes is the memory of the machine, guest kernel included.
	MemoryBytes int64 `json:"memory_bytes"`
	// DiskBytes is the size of the writable disk.
	DiskBytes int64 `json:"disk_bytes"`
	// MaxProcesses is the soft limit of processes per uid in the guest.
	MaxProcesses int64 `json:"max_processes"`
}

// Action is what a node does by itself when a limit of time passes. All of
// them move downwards.
type Action string

// The actions.
const (
	ActionPause  Action = "pause"
	ActionStop   Action = "stop"
	ActionDelete Action = "delete"
)

// Policy is what a node enforces by itself, also while the control plane is
// away. Times are wall clock, absolute: the node never computes them from its
// own idea of "created".
type Policy struct {
	// ExpiresAt is the end of life that PATCH may move, never past DeadlineAt.
	ExpiresAt time.Time `json:"expires_at"`
	// OnExpire says what happens then.
	OnExpire Action `json:"on_expire"`
	// Timeout is the length of life last asked for: what a sandbox that comes
	// back after its end gets anew. Only the control plane reads it.
	Timeout time.Duration `json:"timeout,omitempty"`
	// DeadlineAt is the hard end, fixed at create: the machine is stopped or
	// deleted whatever the guest does.
	DeadlineAt time.Time `json:"deadline_at"`
	// Idle is how long without activity before OnIdle; 0 means never. Activity
	// is: a running session, with or without a reader, or any data-plane call.
	Idle   time.Duration `json:"idle"`
	OnIdle Action        `json:"on_idle"`
}

// Class is what a runtime truly gives as isolation.
type Class string

// The isolation classes.
const (
	ClassMicroVM    Class = "microvm"
	ClassUserKernel Class = "userkernel"
	ClassEmulated   Class = "emulated"
)
