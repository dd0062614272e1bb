package node

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
	"pgregory.net/rapid"
)

// action is one thing that befalls a node. All are drawn before they happen,
// because rapid's failures may not cross the bubble's goroutine.
type action struct {
	Do      string
	Box     int
	Desired sandbox.State
	Restart bool
	Expires time.Duration
	OnExp   sandbox.Action
	Idle    time.Duration
	Wait    time.Duration
	Cause   runtime.Cause
	Op      fake.Op
	Hang    bool
	After   bool
	Times   int
}

func genAction(boxes int) *rapid.Generator[action] {
	return rapid.Custom(func(t *rapid.T) action {
		a := action{Box: rapid.IntRange(0, boxes-1).Draw(t, "box")}
		a.Do = rapid.SampledFrom([]string{
			"apply", "apply", "apply", "apply", "apply", "wait", "wait", "wait", "absorb", "absorb",
			"kill", "crash", "reboot", "fault", "fault", "clear", "mute", "unmute", "forward", "back", "protocol", "stale", "again", "use",
		}).Draw(t, "do")
		switch a.Do {
		case "apply", "stale":
			a.Desired = rapid.SampledFrom([]sandbox.State{sandbox.Running, sandbox.Running, sandbox.Running, sandbox.Paused, sandbox.Stopped, sandbox.Deleted}).Draw(t, "desired")
			a.Restart = rapid.Bool().Draw(t, "restart")
			a.Expires = rapid.SampledFrom([]time.Duration{time.Second, 20 * time.Second, time.Minute, time.Hour, 100 * time.Hour}).Draw(t, "expires")
			a.OnExp = rapid.SampledFrom([]sandbox.Action{sandbox.ActionPause, sandbox.ActionStop, sandbox.ActionDelete}).Draw(t, "on expire")
			a.Idle = rapid.SampledFrom([]time.Duration{0, 0, 15 * time.Second}).Draw(t, "idle")
		case "wait":
			a.Wait = rapid.SampledFrom([]time.Duration{time.Millisecond, 200 * time.Millisecond, 2 * time.Second, 31 * time.Second, 3 * time.Minute}).Draw(t, "for")
		case "kill":
			a.Cause = rapid.SampledFrom([]runtime.Cause{runtime.CauseOutOfMemory, runtime.CauseKilled}).Draw(t, "cause")
		case "fault":
			a.Op = rapid.SampledFrom(fake.Ops()).Draw(t, "op")
			a.Hang, a.After = rapid.Bool().Draw(t, "hang"), rapid.Bool().Draw(t, "after")
			a.Times = rapid.IntRange(0, 3).Draw(t, "times")
		}
		return a
	})
}

// stopped is how a check inside the bubble ends it.
type stopped struct{ msg string }

// catcher turns failures into panics that the bubble's own goroutine recovers.
type catcher struct{}

func (catcher) Helper()                           {}
func (catcher) Logf(string, ...any)               {}
func (catcher) Fatalf(format string, args ...any) { panic(stopped{fmt.Sprintf(format, args...)}) }

// believed is what the test holds true of one sandbox.
type believed struct {
	id         sandbox.ID
	next       uint64 // generation to use next
	generation uint64 // accepted
	desired    sandbox.State
	deadline   time.Time
	dead       bool // was seen deleted

	// At the last check.
	starts  int
	barred  string // why it must not start, "" when it may
	highest uint64

	lateSince time.Time // since when it should have ended, by the bubble's own clock
}

// play runs the actions and gives the first broken promise, or "".
func play(t *testing.T, actions []action) (broken string) {
	synctest.Test(t, func(t *testing.T) {
		jump := &jumpClock{}
		var h *host
		defer func() {
			if r := recover(); r != nil {
				s, ok := r.(stopped)
				if !ok {
					panic(r)
				}
				broken = s.msg
			}
			defer func() { _ = recover() }() // the end of a broken host is not interesting
			h.end()
		}()
		h = newHost(catcher{}, func(c *Config) {
			c.Clock = jump
			c.Capacity = sandbox.Resources{MemoryBytes: 3 * 64 << 20}
			c.StepTimeout, c.CreateTimeout = 10*time.Second, 10*time.Second
		}, []fake.Option{fake.WithBootTime(300 * time.Millisecond)})
		var boxes []*believed
		for range 4 {
			boxes = append(boxes, &believed{id: sandbox.NewID(), next: 1})
		}
		for i, a := range actions {
			h.befall(boxes[a.Box], a, jump)
			synctest.Wait()
			for _, b := range boxes {
				h.check(b, jump, fmt.Sprintf("after action %d (%s)", i, a.Do), a.Do == "apply" && boxes[a.Box] == b)
			}
		}
		// Peace: everything converges, is absorbed, and can be deleted.
		h.world.ClearFaults()
		for _, b := range boxes {
			h.world.Mute(b.id, false)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		for _, b := range boxes {
			h.check(b, jump, "in peace", false)
			if o, err := h.n.Observe(context.Background(), h.who, b.id); err == nil && (!o.Converged || o.State == sandbox.Deleting) {
				h.t.Fatalf("never ends: %+v %+v", o, o.Problem)
			}
		}
		h.absorb()
		known, err := h.n.Known(context.Background())
		if err != nil {
			h.t.Fatalf("%v", err)
		}
		for _, id := range known {
			h.reach(id, 1<<30, sandbox.Deleted, func(a *Assignment) { a.Deadline = jump.Now().Add(time.Minute) })
		}
		h.balance()
	})
	return broken
}

// befall lets one action happen.
func (h *host) befall(b *believed, a action, jump *jumpClock) {
	switch a.Do {
	case "apply":
		g := b.next
		b.next++
		deadline := jump.Now().Add(40 * time.Second)
		o, err := h.n.Apply(context.Background(), h.wish(b.id, g, a, jump, deadline))
		f := fault.Of(err)
		switch {
		case err == nil:
			b.generation, b.desired, b.deadline = g, a.Desired, deadline
			if o.Generation != g {
				h.t.Fatalf("accepted %d and answered %+v", g, o)
			}
		case errors.Is(err, ErrOutcomePending):
			if o.Pending == nil || a.Desired == sandbox.Deleted {
				h.t.Fatalf("outcome pending, for %s, with %+v", a.Desired, o)
			}
		case f.Code == "sandbox_deleted":
			if a.Desired == sandbox.Deleted {
				h.t.Fatalf("a delete was refused: %v", err)
			}
		case f.Code == "capacity":
			if a.Desired != sandbox.Running && a.Desired != sandbox.Paused {
				h.t.Fatalf("%s was refused: %v", a.Desired, err)
			}
		default:
			h.t.Fatalf("apply %d %s: %v", g, a.Desired, err)
		}
	case "stale":
		if b.generation > 1 {
			if _, err := h.n.Apply(context.Background(), h.wish(b.id, b.generation-1, a, jump, jump.Now().Add(time.Minute))); !errors.Is(err, ErrStale) {
				h.t.Fatalf("an older generation: %v", err)
			}
		}
	case "again":
		if b.generation > 0 && b.desired != sandbox.Deleted {
			_, err := h.n.Apply(context.Background(), h.wish(b.id, b.generation, action{Desired: b.desired}, jump, b.deadline))
			if err != nil && !fault.IsCode(err, "sandbox_deleted") {
				h.t.Fatalf("the same again: %v", err)
			}
		}
	case "wait":
		time.Sleep(a.Wait)
	case "absorb":
		h.absorb()
	case "kill":
		_ = h.world.KillMachine(b.id, a.Cause) // there may be none
	case "crash":
		h.crash()
		h.boot()
	case "reboot":
		h.reboot()
		h.boot()
	case "fault":
		f := fake.Fault{Hang: a.Hang, After: a.After, Times: a.Times}
		if !a.Hang {
			f.Err = errors.New("boom")
		}
		if a.Op == fake.OpList {
			f.Times = 1 // a host that never lists is never started on
		}
		h.world.On(a.Op, b.id, f)
	case "clear":
		h.world.ClearFaults()
	case "mute", "unmute":
		h.world.Mute(b.id, a.Do == "mute")
	case "forward":
		jump.add(10 * time.Minute)
	case "back":
		jump.add(-5 * time.Minute)
	case "protocol":
		if err := h.n.ReportProtocolError(context.Background(), b.id); err != nil && !errors.Is(err, ErrUnknown) {
			h.t.Fatalf("%v", err)
		}
	case "use":
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		g, err := h.n.Guest(ctx, h.who, b.id)
		cancel()
		if o, oerr := h.n.Observe(context.Background(), h.who, b.id); g != nil && (oerr != nil || o.State != sandbox.Running) {
			h.t.Fatalf("a guest of a sandbox that is %s (%v %v)", o.State, err, oerr)
		}
	}
}

func (h *host) wish(id sandbox.ID, generation uint64, a action, jump *jumpClock, deadline time.Time) Assignment {
	w := h.assignment(id, generation, a.Desired)
	now := jump.Now()
	w.Deadline, w.Restart = deadline, a.Restart
	w.Policy = sandbox.Policy{ExpiresAt: now.Add(a.Expires), OnExpire: a.OnExp, DeadlineAt: now.Add(1000 * time.Hour), Idle: a.Idle, OnIdle: sandbox.ActionPause}
	if a.Expires == 0 {
		w.Policy.ExpiresAt = now.Add(time.Hour)
	}
	return w
}

// check holds the promises against what is there.
func (h *host) check(b *believed, jump *jumpClock, when string, applied bool) {
	if d := h.world.Census().Doubles(); len(d) > 0 {
		h.t.Fatalf("%s: two machines of %v at once", when, d)
	}
	starts := h.world.Census().Starts(b.id)
	o, err := h.n.Observe(context.Background(), h.who, b.id)
	if err != nil {
		if !errors.Is(err, ErrUnknown) || b.generation > 0 {
			h.t.Fatalf("%s: a sandbox of generation %d is unknown: %v", when, b.generation, err)
		}
		return
	}
	if o.Generation < b.highest || o.Generation < b.generation {
		h.t.Fatalf("%s: generation fell from %d (accepted %d) to %d", when, b.highest, b.generation, o.Generation)
	}
	b.highest = o.Generation
	if b.dead && o.State != sandbox.Deleted {
		h.t.Fatalf("%s: risen from the dead: %+v", when, o)
	}
	b.dead = b.dead || o.State == sandbox.Deleted
	barred := ""
	switch {
	case b.dead:
		barred = "it is deleted"
	case b.desired == sandbox.Stopped || b.desired == sandbox.Deleted:
		barred = "it was told to be " + string(b.desired)
	case o.Pending != nil:
		barred = "the outcome " + o.Pending.Trigger + " was not absorbed"
	case o.Converged && (o.State == sandbox.Stopped || o.State == sandbox.Failed || o.State == sandbox.Quarantined):
		barred = "it rests as " + string(o.State)
	}
	if starts > b.starts && b.barred != "" && (barred != "" || !applied) {
		h.t.Fatalf("%s: started although %s, %s: %+v", when, b.barred, barred, o)
	}
	b.starts, b.barred = starts, barred
	// A jump of the clock is noticed when the step in flight ends.
	late := !o.Converged && o.Pending == nil && b.desired != sandbox.Deleted && b.generation > 0 && jump.Now().After(b.deadline)
	switch {
	case !late:
		b.lateSince = time.Time{}
	case b.lateSince.IsZero():
		b.lateSince = time.Now()
	case time.Since(b.lateSince) > 45*time.Second:
		h.t.Fatalf("%s: not ended %v after its deadline: %+v", when, jump.Now().Sub(b.deadline), o)
	}
	if o.Converged && o.State == sandbox.Running && o.BootID == "" {
		h.t.Fatalf("%s: running without a boot: %+v", when, o)
	}
}

// The node under random assignments, deaths, crashes, faults, jumps of the
// clock and expiry, against the promises of design.md 6, 9 and 10.
func TestRandomLives(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		actions := rapid.SliceOfN(genAction(4), 1, 60).Draw(rt, "actions")
		if broken := play(t, actions); broken != "" {
			rt.Fatalf("%s", broken)
		}
	})
}
