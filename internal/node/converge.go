package node

import (
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// step is one thing the actor of a sandbox does, then looks again.
type step string

const (
	stepNone      step = ""
	stepLook      step = "look" // ask the host what there is
	stepCreate    step = "create"
	stepStart     step = "start"
	stepConfigure step = "configure"
	stepPause     step = "pause"
	stepResume    step = "resume"
	stepStop      step = "stop"
	stepDelete    step = "delete"
	// Findings rather than work: the row is moved to failed.
	stepDied step = "died"
	stepLost step = "lost"
)

// absent is the condition of a machine that the host does not have.
const absent runtime.Condition = "absent"

// specOf is what a machine of a row must have been made from.
type specOf struct {
	id        sandbox.ID
	template  string
	resources sandbox.Resources
}

func (s specOf) runtime() runtime.Spec {
	return runtime.Spec{ID: s.id, TemplateDigest: s.template, Resources: s.resources}
}

// view is all that the next step depends on.
type view struct {
	target sandbox.State
	cond   runtime.Condition
	made   bool // the files of this sandbox exist, or existed
	whole  bool // the machine is known not to be half made
	booted bool // clients know a memory that should be there
	down   bool // a power-off is owed
	ready  bool // the guest of the running machine was configured
}

// next is the converge table: from what is there and what is wanted to the one
// step that leads nearer. Pure.
func next(v view) step {
	if v.target == sandbox.Deleted {
		return stepDelete
	}
	if v.cond == absent {
		switch {
		case v.made && v.target != sandbox.Failed && v.target != sandbox.Quarantined:
			return stepLost
		case v.target == sandbox.Running || v.target == sandbox.Paused:
			return stepCreate
		}
		return stepNone
	}
	if v.down {
		return stepStop
	}
	up := v.cond == runtime.Running || v.cond == runtime.Paused
	switch v.target {
	case sandbox.Running, sandbox.Paused:
		switch {
		case !up && v.booted:
			return stepDied
		case v.cond == runtime.Created && !v.whole:
			return stepCreate // what an interrupted Create left; it goes on from there
		case !up:
			return stepStart
		case v.target == sandbox.Running && v.cond == runtime.Paused:
			return stepResume
		case v.target == sandbox.Running && !v.ready:
			return stepConfigure
		case v.target == sandbox.Paused && v.cond == runtime.Running:
			return stepPause
		}
	case sandbox.Quarantined:
		if v.cond == runtime.Running {
			return stepPause
		}
	default: // stopped, failed
		if v.cond != runtime.Created {
			return stepStop
		}
	}
	return stepNone
}

// depth orders states: a node moves only to a greater one by itself.
func depth(s sandbox.State) int {
	switch s {
	case sandbox.Paused:
		return 1
	case sandbox.Stopped, sandbox.Failed:
		return 2
	case sandbox.Quarantined:
		return 3
	case sandbox.Deleted:
		return 4
	}
	return 0
}
