package node

import (
	"context"
	"errors"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/runtime"
)

// The problems that a sandbox can end with; see docs/errors.md. None carries
// the text of a driver's error: it may hold host paths and goes to the log only.

const keptRemedy = "start (or wake) it: files are kept, memory is not"

var exitProblems = map[runtime.Cause]operation.Problem{
	runtime.CauseOutOfMemory: {Code: "out_of_memory", What: "the machine used more memory than its limit and was ended",
		Remedy: "create the sandbox with more memory, or use less; " + keptRemedy},
	runtime.CauseProcesses: {Code: "process_limit", What: "the machine passed its hard limit of processes and was ended",
		Remedy: "run fewer processes; " + keptRemedy},
	runtime.CausePoweroff: {Code: "machine_powered_off", What: "the machine powered itself off", Remedy: keptRemedy},
	runtime.CauseKilled:   {Code: "machine_killed", What: "the machine's process was killed from outside", Remedy: keptRemedy},
	runtime.CauseCrashed:  {Code: "machine_crashed", What: "the machine failed by itself", Remedy: keptRemedy},
	runtime.CauseReboot:   {Code: "host_reboot", What: "the host restarted under the machine", Remedy: keptRemedy},
}

func diedProblem(exit *runtime.Exit) *operation.Problem {
	p := operation.Problem{Code: "machine_died", What: "the machine ended", Why: "the cause is not known", Remedy: keptRemedy}
	if exit != nil {
		if q, ok := exitProblems[exit.Cause]; ok {
			p = q
		}
		if exit.Detail != "" {
			p.Why = exit.Detail
		}
	}
	return &p
}

func lostProblem() *operation.Problem {
	return &operation.Problem{Code: "machine_lost", What: "the machine and its files are no longer on the host",
		Why: "they were removed from outside of this service", Remedy: "delete the sandbox and create a new one"}
}

func mismatchProblem(spec bool) *operation.Problem {
	p := &operation.Problem{Code: "adoption_mismatch", What: "the machine on the host is not the one that was recorded",
		Remedy: "ask an operator to inspect it, then to release or delete it"}
	if spec {
		p.Why = "template or limits differ"
	} else {
		p.Why = "it was booted by somebody else"
	}
	return p
}

func protocolProblem() *operation.Problem {
	return &operation.Problem{Code: "guest_protocol_error", What: "the guest daemon broke its protocol and the sandbox was cut off",
		Remedy: "ask an operator to inspect it, then to release or delete it"}
}

func unresponsiveProblem() *operation.Problem {
	return &operation.Problem{Code: "guest_unresponsive", What: "the guest daemon did not answer in time", Remedy: keptRemedy, Retryable: true}
}

var stepWords = map[step]string{
	stepLook: "inspect", stepCreate: "create", stepStart: "start", stepConfigure: "configure", stepPause: "pause",
	stepResume: "resume", stepStop: "stop", stepDelete: "delete",
}

func stepProblem(s step, err error) *operation.Problem {
	p := &operation.Problem{Code: "machine_" + string(s) + "_failed", What: "the host could not " + stepWords[s] + " the machine",
		Remedy: "retry; if it stays, ask your operator to look at the node's log", Retryable: true}
	var f *fault.Error
	switch {
	case errors.Is(err, runtime.ErrNoSpace):
		p.Code, p.What, p.Remedy = "capacity", "this host has no room for the machine", "delete sandboxes that are not needed, or retry later"
	case errors.As(err, &f) && f.Class != fault.Internal:
		p.Why = f.What
	case errors.Is(err, errStepTimeout), errors.Is(err, errDeadline), errors.Is(err, context.DeadlineExceeded):
		p.Why = "it took too long"
	}
	return p
}
