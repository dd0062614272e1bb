package node

import (
	"testing"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// effect is what a step that succeeds does to a view.
func effect(v view, s step) view {
	switch s {
	case stepCreate:
		v.cond, v.whole = runtime.Created, true
	case stepStart:
		v.cond, v.ready = runtime.Running, false
	case stepConfigure:
		v.ready = true
	case stepPause:
		v.cond, v.ready = runtime.Paused, false
	case stepResume:
		v.cond, v.ready = runtime.Running, false
	case stepStop:
		v.down, v.booted, v.ready = false, false, false
		if v.cond != absent {
			v.cond = runtime.Created
		}
	case stepDied, stepLost:
		v.target, v.down = sandbox.Failed, true
	case stepDelete:
		v.cond = absent
	}
	return v
}

// From every view the steps lead to rest, in the place that was wanted, and no
// step leads through a place that it must not.
func TestConvergeTable(t *testing.T) {
	wanted := map[sandbox.State][]runtime.Condition{
		sandbox.Running: {runtime.Running}, sandbox.Paused: {runtime.Paused}, sandbox.Stopped: {runtime.Created, absent},
		sandbox.Failed: {runtime.Created, absent}, sandbox.Quarantined: {runtime.Paused, runtime.Created, runtime.Dead, absent},
	}
	bools := []bool{false, true}
	views := 0
	for _, target := range []sandbox.State{sandbox.Running, sandbox.Paused, sandbox.Stopped, sandbox.Failed, sandbox.Quarantined, sandbox.Deleted} {
		for _, cond := range []runtime.Condition{absent, runtime.Created, runtime.Running, runtime.Paused, runtime.Dead} {
			for i := range 32 {
				v := view{target: target, cond: cond, made: bools[i&1], whole: bools[i&1] || bools[i>>1&1], booted: bools[i>>2&1], down: bools[i>>3&1], ready: bools[i>>4&1]}
				views++
				start := v
				for n := 0; ; n++ {
					s := next(v)
					switch {
					case n > 8:
						t.Fatalf("%+v never rests", start)
					case target == sandbox.Deleted && s != stepDelete:
						t.Fatalf("%+v: delete begins with %q", v, s)
					case v.down && (s == stepResume || s == stepConfigure || s == stepPause || s == stepStart):
						t.Fatalf("%+v: %s although a power-off is owed", v, s)
					case v.cond == absent && v.made && s == stepCreate:
						t.Fatalf("%+v: made anew with an empty disk", v)
					case v.booted && s == stepStart:
						t.Fatalf("%+v: a memory that clients know is replaced in silence", v)
					case s == stepStart && !v.whole && v.cond == runtime.Created:
						t.Fatalf("%+v: a half-made machine is started", v)
					case depth(v.target) >= 2 && (s == stepStart || s == stepResume || s == stepCreate):
						t.Fatalf("%+v: %s", v, s)
					}
					if s == stepNone || s == stepDelete {
						break
					}
					v = effect(v, s)
				}
				if target == sandbox.Deleted {
					continue
				}
				ok := false
				for _, c := range wanted[v.target] {
					ok = ok || c == v.cond
				}
				if !ok || (v.target == sandbox.Running && !v.ready) || (v.target != target && v.target != sandbox.Failed) {
					t.Fatalf("%+v rests as %+v", start, v)
				}
			}
		}
	}
	if views != 6*5*32 {
		t.Fatal(views)
	}
}
