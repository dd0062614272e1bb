package node

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
)

// expires sets the end of life, from now.
func expires(in time.Duration, action sandbox.Action) func(*Assignment) {
	return func(a *Assignment) {
		a.Policy.ExpiresAt, a.Policy.OnExpire = time.Now().Add(in), action
	}
}

func TestExpiryActsByPolicy(t *testing.T) {
	for action, want := range map[sandbox.Action]sandbox.State{
		sandbox.ActionPause: sandbox.Paused, sandbox.ActionStop: sandbox.Stopped, sandbox.ActionDelete: sandbox.Deleted,
	} {
		t.Run(string(action), func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, h *host) {
				id := sandbox.NewID()
				h.reach(id, 1, sandbox.Running, expires(30*time.Second, action))
				time.Sleep(30*time.Second - time.Millisecond)
				if o := h.observe(id); o.State != sandbox.Running || o.Pending != nil {
					t.Fatalf("too early: %+v", o)
				}
				time.Sleep(time.Millisecond)
				synctest.Wait()
				o := h.observe(id)
				if o.State != want || o.Generation != 1 || o.Pending == nil || o.Pending.Trigger != "expired" || o.Pending.State != want {
					t.Fatalf("%+v", o)
				}
				// The outcome outlives a crash, and bars what does not know of it.
				h.crash()
				h.boot()
				select {
				case <-h.n.OutcomeSignal():
				default:
					t.Fatal("no signal for an outcome that waits")
				}
				if err := h.try(id, 2, sandbox.Running); !errors.Is(err, ErrOutcomePending) {
					t.Fatalf("before it was absorbed: %v", err)
				}
				out := h.absorb()
				if len(out) != 1 || out[0].State != want || out[0].ID != id || out[0].Tenant != "acme" || out[0].Generation != 1 {
					t.Fatalf("outcomes %+v", out)
				}
				h.absorb() // idempotent
				err := h.try(id, 3, sandbox.Running)
				if want == sandbox.Deleted {
					if !fault.IsCode(err, "sandbox_deleted") {
						t.Fatalf("after it was deleted: %v", err)
					}
					h.balance()
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				h.settled(id, 3, sandbox.Running)
				h.reach(id, 4, sandbox.Deleted)
				h.balance()
			})
		})
	}
}

// C-035: no assignment shortens life by itself: what is applied is in force,
// whatever the time of connecting.
func TestC035PolicyIsTakenAsItIs(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		end := time.Now().Add(30 * time.Minute)
		keep := func(a *Assignment) { a.Policy.ExpiresAt = end }
		h.reach(id, 1, sandbox.Running, keep)
		time.Sleep(10 * time.Minute)
		if _, err := h.n.Guest(context.Background(), h.who, id); err != nil {
			t.Fatal(err)
		}
		h.reach(id, 2, sandbox.Running, keep)
		time.Sleep(20*time.Minute - time.Second)
		if o := h.observe(id); o.State != sandbox.Running {
			t.Fatalf("cut short: %+v", o)
		}
		time.Sleep(time.Second)
		h.becomes(id, sandbox.Stopped, time.Second)
	})
}

// C-036: the action at expiry is the same after a resume.
func TestC036ActionSurvivesResume(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		generation := uint64(1)
		h.reach(id, generation, sandbox.Running, expires(30*time.Second, sandbox.ActionPause))
		boot := h.observe(id).BootID
		for range 3 {
			o := h.becomes(id, sandbox.Paused, 31*time.Second)
			if o.Problem == nil || o.Problem.Code != "sandbox_expired" {
				t.Fatalf("%+v", o.Problem)
			}
			h.absorb()
			generation++
			o = h.reach(id, generation, sandbox.Running, expires(30*time.Second, sandbox.ActionPause))
			if o.BootID != boot || o.Problem != nil {
				t.Fatalf("%+v", o)
			}
		}
	})
}

// C-037: a renewal at the moment of expiry is in force or is refused, never lost.
func TestC037RenewalAgainstExpiry(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		var ids []sandbox.ID
		for range 200 {
			id := sandbox.NewID()
			ids = append(ids, id)
			h.apply(id, 1, sandbox.Running, expires(5*time.Second, sandbox.ActionStop))
		}
		for _, id := range ids {
			h.settled(id, 1, sandbox.Running)
		}
		start := time.Now()
		renewed := map[sandbox.ID]bool{}
		time.Sleep(5*time.Second - 50*time.Millisecond)
		for i, id := range ids {
			if i == 100 {
				h.crash()
				h.boot()
			}
			err := h.try(id, 2, sandbox.Running, expires(time.Hour, sandbox.ActionStop))
			switch {
			case err == nil:
				renewed[id] = true
				if time.Since(start) >= 5*time.Second {
					t.Fatalf("renewed %v after the end", time.Since(start))
				}
			case !errors.Is(err, ErrOutcomePending):
				t.Fatalf("not a clear answer: %v", err)
			case time.Since(start) < 5*time.Second:
				t.Fatal("refused before the end")
			}
			time.Sleep(500 * time.Microsecond)
		}
		if n := len(renewed); n < 50 || n > 150 {
			t.Fatalf("%d of 200 renewed: the race was not met", n)
		}
		time.Sleep(time.Second)
		for _, id := range ids {
			want := sandbox.Stopped
			if renewed[id] {
				want = sandbox.Running
			}
			if o := h.observe(id); o.State != want {
				t.Fatalf("renewed %v: %+v", renewed[id], o)
			}
		}
	})
}

// A renewal that finds its timer late is decided by the clock, not by the timer.
func TestExpiryIsByTheClockNotTheTimer(t *testing.T) {
	jump := &jumpClock{}
	inBubble(t, func(c *Config) { c.Clock = jump }, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running, expires(time.Hour, sandbox.ActionPause))
		jump.add(2 * time.Hour)
		if err := h.try(id, 2, sandbox.Running, expires(24*time.Hour, sandbox.ActionPause)); !errors.Is(err, ErrOutcomePending) {
			t.Fatalf("renewed what had ended: %v", err)
		}
		h.becomes(id, sandbox.Paused, time.Second)
		// A jump is noticed without anybody asking.
		h.absorb()
		h.reach(id, 3, sandbox.Running, expires(30*time.Hour, sandbox.ActionPause),
			func(a *Assignment) { a.Deadline = jump.Now().Add(time.Minute) })
		jump.add(40 * time.Hour)
		h.becomes(id, sandbox.Paused, maxSleep+time.Second)
	})
}

// C-038: every acknowledged call counts at once.
func TestC038ActivityCountsAtOnce(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		idle := func(a *Assignment) { a.Policy.Idle, a.Policy.OnIdle = 10*time.Second, sandbox.ActionPause }
		var ids []sandbox.ID
		for range 50 {
			id := sandbox.NewID()
			ids = append(ids, id)
			h.reach(id, 1, sandbox.Running, idle)
		}
		for range 30 {
			time.Sleep(10*time.Second - time.Millisecond)
			for i, id := range ids {
				if i%2 == 0 {
					h.n.Activity(id)
				} else if _, err := h.n.Guest(context.Background(), h.who, id); err != nil {
					t.Fatal(err)
				}
			}
		}
		if out := h.absorb(); len(out) != 0 {
			t.Fatalf("paused although in use: %+v", out)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		for _, id := range ids {
			if o := h.observe(id); o.State != sandbox.Paused || o.Pending == nil || o.Pending.Trigger != "idle" {
				t.Fatalf("%+v", o)
			}
			if _, err := h.n.Guest(context.Background(), h.who, id); !fault.IsCode(err, "sandbox_paused") || !fault.Of(err).Retryable {
				t.Fatalf("%v", err)
			}
		}
	})
}

// C-039: a running command is not idleness, with or without a reader; a hard
// end comes all the same, and is announced.
func TestC039BusyIsNotIdle(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running, func(a *Assignment) {
			a.Policy.Idle, a.Policy.OnIdle = time.Minute, sandbox.ActionStop
			a.Policy.ExpiresAt = time.Now().Add(20 * time.Minute)
		})
		h.sessions.run(id, 1)
		time.Sleep(3 * time.Minute)
		if o := h.observe(id); o.State != sandbox.Running {
			t.Fatalf("stopped while busy: %+v", o)
		}
		h.sessions.run(id, 0) // unattended: nobody tells of the end
		time.Sleep(53 * time.Second)
		if o := h.observe(id); o.State != sandbox.Running {
			t.Fatalf("its idle time began before the command ended: %+v", o)
		}
		h.becomes(id, sandbox.Stopped, 8*time.Second)
		if got := h.sessions.heard(id); !slices.Contains(got, "ended sandbox_idle") {
			t.Fatalf("not announced: %q", got)
		}
		h.absorb()
		h.sessions.run(id, 1)
		h.reach(id, 2, sandbox.Running, expires(5*time.Minute, sandbox.ActionStop))
		o := h.becomes(id, sandbox.Stopped, 5*time.Minute+time.Second)
		if o.Pending.Trigger != "expired" {
			t.Fatalf("%+v", o.Pending)
		}
		if got := h.sessions.heard(id); !slices.Contains(got, "ended sandbox_expired") {
			t.Fatalf("not announced: %q", got)
		}
	})
}

func TestDeadlineIsHard(t *testing.T) {
	for action, want := range map[sandbox.Action]sandbox.State{sandbox.ActionPause: sandbox.Stopped, sandbox.ActionDelete: sandbox.Deleted} {
		inBubble(t, nil, func(t *testing.T, h *host) {
			id := sandbox.NewID()
			h.sessions.run(id, 1)
			h.reach(id, 1, sandbox.Running, func(a *Assignment) {
				a.Policy.DeadlineAt = time.Now().Add(time.Minute)
				a.Policy.ExpiresAt, a.Policy.OnExpire = time.Now().Add(time.Hour), action
			})
			h.becomes(id, want, 61*time.Second)
			if o := h.observe(id); o.Pending == nil || o.Pending.Trigger != "deadline" {
				t.Fatalf("%+v", o)
			}
		})
	}
}

// A limit that passes while the node is away acts when it is back; so does one
// for a sandbox on its way up.
func TestLimitsWhileAway(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id, booting := sandbox.NewID(), sandbox.NewID()
		h.reach(id, 1, sandbox.Running, expires(time.Minute, sandbox.ActionPause))
		a := h.world.On(fake.OpStart, booting, fake.Fault{Hang: true})
		h.apply(booting, 1, sandbox.Running, expires(10*time.Second, sandbox.ActionStop))
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if o := h.observe(booting); o.State != sandbox.Stopped || a.Hanging() != 0 {
			t.Fatalf("%+v", o)
		}
		h.crash()
		time.Sleep(time.Hour)
		if h.condition(id) != runtime.Running {
			t.Fatal("the machine did not survive our process")
		}
		h.boot()
		h.becomes(id, sandbox.Paused, time.Second)
		if out := h.absorb(); len(out) != 2 || out[1].Trigger != "expired" {
			t.Fatalf("%+v", out)
		}
	})
}

func TestIdleTimeDoesNotRunWhileAway(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running, func(a *Assignment) { a.Policy.Idle, a.Policy.OnIdle = time.Minute, sandbox.ActionPause })
		h.crash()
		time.Sleep(time.Hour)
		h.boot()
		time.Sleep(59 * time.Second)
		if o := h.observe(id); o.State != sandbox.Running {
			t.Fatalf("%+v", o)
		}
		h.becomes(id, sandbox.Paused, 2*time.Second)
	})
}

// A crash between the durable outcome and the machine: it is done again.
func TestOutcomeBeforeTheMachine(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running, expires(time.Minute, sandbox.ActionStop))
		h.world.On(fake.OpStop, id, fake.Fault{Hang: true})
		time.Sleep(time.Minute)
		synctest.Wait()
		out, err := h.n.Outcomes(context.Background(), 10)
		if err != nil || len(out) != 1 || h.condition(id) != runtime.Running {
			t.Fatalf("%v %v, machine %s", out, err, h.condition(id))
		}
		h.crash()
		h.world.ClearFaults()
		h.boot()
		// Absorbed at once, and started again at once: it is a cold boot all the same.
		boot := h.observe(id).BootID
		h.absorb()
		if o := h.reach(id, 2, sandbox.Running); o.BootID == boot {
			t.Fatal("an expired machine went on with its memory")
		}
	})
}

func TestTimeLimitOnlyLeadsDown(t *testing.T) {
	now := time.Now()
	for _, target := range []sandbox.State{sandbox.Running, sandbox.Paused, sandbox.Stopped, sandbox.Failed, sandbox.Quarantined, sandbox.Deleted} {
		for _, action := range []sandbox.Action{sandbox.ActionPause, sandbox.ActionStop, sandbox.ActionDelete, ""} {
			for _, hard := range []time.Time{{}, now, now.Add(time.Hour)} {
				r := row{Target: target, Policy: sandbox.Policy{ExpiresAt: now, OnExpire: action, DeadlineAt: hard}}
				_, to, ok := timeLimit(&r, now)
				if ok && (depth(to) <= depth(target) || target == sandbox.Quarantined) {
					t.Errorf("%s moved to %s", target, to)
				}
				// The timer and the decision agree: never a timer that decides nothing.
				if at := nextLimit(&r, now); ok != (!at.IsZero() && !at.After(now)) {
					t.Errorf("%s, %q, %v: decided %v, timer %v", target, action, hard, ok, at)
				}
			}
		}
	}
}
