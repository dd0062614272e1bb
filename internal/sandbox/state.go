package sandbox

import "github.com/space-platform/space/internal/fault"

// State is a desired or observed state of a sandbox.
type State string

// Desired states, and observed ones.
const (
	Running   State = "running"
	Paused    State = "paused"
	Suspended State = "suspended"
	Stopped   State = "stopped"
	Deleted   State = "deleted"

	// Only observed.
	Creating    State = "creating"
	Pausing     State = "pausing"
	Resuming    State = "resuming"
	Suspending  State = "suspending"
	Restoring   State = "restoring"
	Starting    State = "starting"
	Stopping    State = "stopping"
	Deleting    State = "deleting"
	Failed      State = "failed"
	Quarantined State = "quarantined"
)

// Verb is a life-cycle request.
type Verb string

// The verbs. Update changes policy or metadata only; Release ends a quarantine.
const (
	Pause   Verb = "pause"
	Resume  Verb = "resume"
	Suspend Verb = "suspend"
	Restore Verb = "restore"
	Stop    Verb = "stop"
	Start   Verb = "start"
	Wake    Verb = "wake"
	Delete  Verb = "delete"
	Update  Verb = "update"
	Release Verb = "release"
)

// table maps (settled state, verb) to the next desired state. "Settled" is
// what the sandbox is or is on its way to: the desired state, unless it is
// observed failed or quarantined. Asking for the state one has succeeds.
// What is absent is a conflict.
var table = map[State]map[Verb]State{
	Running: {
		Pause: Paused, Suspend: Suspended, Stop: Stopped, Delete: Deleted,
		Resume: Running, Start: Running, Restore: Running, Wake: Running, Update: Running,
	},
	Paused: {
		Resume: Running, Wake: Running, Suspend: Suspended, Stop: Stopped, Delete: Deleted,
		Pause: Paused, Update: Paused,
	},
	Suspended: {
		Restore: Running, Wake: Running, Stop: Stopped, Delete: Deleted,
		Suspend: Suspended, Update: Suspended,
	},
	Stopped: {
		Start: Running, Wake: Running, Delete: Deleted,
		Stop: Stopped, Update: Stopped,
	},
	Failed: {
		Start: Running, Wake: Running, Stop: Stopped, Delete: Deleted,
		Update: Failed,
	},
	Quarantined: {Delete: Deleted, Release: Stopped},
	Deleted:     {Delete: Deleted},
}

// Settled gives the state that verbs are judged by.
func Settled(desired, observed State) State {
	if desired == Deleted {
		return Deleted
	}
	if observed == Failed || observed == Quarantined {
		return observed
	}
	return desired
}

// Next gives the desired state that v leads to, or a typed conflict. Update on
// a failed sandbox gives Failed, which callers read as "desired unchanged".
func Next(desired, observed State, v Verb) (State, error) {
	s := Settled(desired, observed)
	if to, ok := table[s][v]; ok {
		return to, nil
	}
	if s == Deleted {
		return "", fault.New(fault.Gone, "sandbox_deleted", "the sandbox is deleted")
	}
	return "", fault.New(fault.Conflict, "state_conflict", "cannot %s a sandbox that is %s", v, s).
		Do("%s", remedy(s))
}

func remedy(s State) string {
	switch s {
	case Quarantined:
		return "ask an operator to release or delete it"
	case Failed:
		return "start (or wake) it: files are kept; or delete it"
	default:
		return "use wake to bring it back whatever state it is in"
	}
}

// Verbs lists every verb; for tests, OpenAPI and the CLI.
func Verbs() []Verb {
	return []Verb{Pause, Resume, Suspend, Restore, Stop, Start, Wake, Delete, Update, Release}
}

// SettledStates lists the states that the table judges by.
func SettledStates() []State {
	return []State{Running, Paused, Suspended, Stopped, Failed, Quarantined, Deleted}
}
