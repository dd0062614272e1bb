package fake

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// Op is a step of the driver where a Fault may strike.
type Op string

// The steps. Create passes its three in order: record, disk, then the rest.
const (
	OpCreateBegin Op = "create.begin"
	OpCreateDisk  Op = "create.disk"
	OpCreateDone  Op = "create.done"
	OpStart       Op = "start"
	OpPause       Op = "pause"
	OpResume      Op = "resume"
	OpStop        Op = "stop"
	OpDestroy     Op = "destroy"
	OpDial        Op = "dial"
	OpStats       Op = "stats"
	OpStatus      Op = "status"
	OpWait        Op = "wait"
	OpList        Op = "list"
	OpAdopt       Op = "adopt"
)

// Ops lists every step, so that tests can walk all of them.
func Ops() []Op {
	return []Op{
		OpCreateBegin, OpCreateDisk, OpCreateDone, OpStart, OpPause, OpResume, OpStop,
		OpDestroy, OpDial, OpStats, OpStatus, OpWait, OpList, OpAdopt,
	}
}

// Any as an id arms a fault for every machine.
const Any sandbox.ID = "*"

// Fault is what happens at a step: first Delay, then Hang, then Call, then Err.
// With After the step's effect has happened before all of them (the answer was
// lost); without it Err comes instead of the effect.
type Fault struct {
	After bool
	// Delay passes on the World's clock; a context that ends cuts it short.
	Delay time.Duration
	// Hang blocks until the context ends (its error is returned), the driver is
	// killed, or Armed.Release is called (then the step goes on).
	Hang bool
	// Call runs in the goroutine of the step, without locks: it may kill the
	// driver or a machine, cancel a context, or panic.
	Call func()
	// Err ends the step. Create undoes what this call had made, unless After.
	Err error
	// Skip lets that many passes go by first; Times is how many are struck after
	// that (0 means all).
	Skip, Times int
}

// Armed is a Fault in force.
type Armed struct {
	w       *World
	op      Op
	id      sandbox.ID
	f       Fault
	release chan struct{}
	// seen, struck, hanging and off are guarded by w.mu.
	seen, struck, hanging int
	released, off         bool
}

// On arms a fault at op for machine id, or for all with Any. The latest armed
// one that matches strikes.
func (w *World) On(op Op, id sandbox.ID, f Fault) *Armed {
	if !slices.Contains(Ops(), op) {
		panic(fmt.Sprintf("fake: no step %q", op))
	}
	a := &Armed{w: w, op: op, id: id, f: f, release: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = append(w.faults, a)
	return a
}

// Off disarms the fault and lets go what hangs in it.
func (a *Armed) Off() {
	a.w.mu.Lock()
	a.off = true
	a.w.faults = slices.DeleteFunc(a.w.faults, func(o *Armed) bool { return o == a })
	a.w.mu.Unlock()
	a.Release()
}

// Release lets every step that hangs here, now or later, go on.
func (a *Armed) Release() {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	if !a.released {
		a.released = true
		close(a.release)
	}
}

// Struck tells how often the fault has struck.
func (a *Armed) Struck() int {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	return a.struck
}

// Hanging tells how many steps hang in it now.
func (a *Armed) Hanging() int {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	return a.hanging
}

// ClearFaults disarms everything.
func (w *World) ClearFaults() {
	w.mu.Lock()
	all := slices.Clone(w.faults)
	w.mu.Unlock()
	for _, a := range all {
		a.Off()
	}
}

// strike picks the fault of a step, and counts.
func (w *World) strike(op Op, id sandbox.ID) *Armed {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range slices.Backward(w.faults) {
		if a.off || a.op != op || (a.id != Any && a.id != id) {
			continue
		}
		a.seen++
		if a.seen <= a.f.Skip || (a.f.Times > 0 && a.struck >= a.f.Times) {
			continue
		}
		a.struck++
		return a
	}
	return nil
}

// step passes one step of a call: the fault, if any, and the effect, which runs
// under the World's lock.
func (d *Driver) step(ctx context.Context, op Op, id sandbox.ID, effect func() error) error {
	if err := d.alive(ctx); err != nil {
		return err
	}
	a := d.w.strike(op, id)
	if a != nil && !a.f.After {
		if err := d.suffer(ctx, a); err != nil {
			return err
		}
	}
	d.w.mu.Lock()
	err := d.deadLocked()
	if err == nil {
		err = effect()
	}
	d.w.mu.Unlock()
	if err != nil || a == nil || !a.f.After {
		return err
	}
	if err := d.suffer(ctx, a); err != nil {
		return &afterError{err}
	}
	return nil
}

// afterError marks an error that came after the effect, so that nothing is undone.
type afterError struct{ error }

func (e *afterError) Unwrap() error { return e.error }

func (d *Driver) suffer(ctx context.Context, a *Armed) error {
	w := d.w
	if a.f.Delay > 0 {
		select {
		case <-w.clock.After(a.f.Delay):
		case <-ctx.Done():
			return ctx.Err()
		case <-d.dead:
			return errKilled
		}
	}
	if a.f.Hang {
		w.mu.Lock()
		a.hanging++
		w.mu.Unlock()
		var err error
		select {
		case <-a.release:
		case <-ctx.Done():
			err = ctx.Err()
		case <-d.dead:
			err = errKilled
		}
		w.mu.Lock()
		a.hanging--
		w.mu.Unlock()
		if err != nil {
			return err
		}
	}
	if a.f.Call != nil {
		a.f.Call()
		if err := d.alive(ctx); err != nil {
			return err
		}
	}
	if a.f.Err != nil {
		return fmt.Errorf("fake: %s: %w", a.op, a.f.Err)
	}
	return nil
}

// alive fails when the context has ended or the driver was killed.
func (d *Driver) alive(ctx context.Context) error {
	select {
	case <-d.dead:
		return errKilled
	default:
		return ctx.Err()
	}
}

func (d *Driver) deadLocked() error {
	select {
	case <-d.dead:
		return errKilled
	default:
		return nil
	}
}

// take waits for the turn of a machine; give ends it.
func (d *Driver) take(ctx context.Context, id sandbox.ID) (give func(), err error) {
	if err := d.alive(ctx); err != nil {
		return nil, err
	}
	w := d.w
	w.mu.Lock()
	t := w.turns[id]
	if t == nil {
		t = &turn{sem: make(chan struct{}, 1)}
		w.turns[id] = t
	}
	t.users++
	w.mu.Unlock()
	leave := func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(w.turns, id)
		}
	}
	select {
	case t.sem <- struct{}{}:
		return func() { <-t.sem; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	case <-d.dead:
		leave()
		return nil, errKilled
	}
}

func notFound(id sandbox.ID) error {
	return fmt.Errorf("fake: machine %s: %w", id, runtime.ErrNotFound)
}
