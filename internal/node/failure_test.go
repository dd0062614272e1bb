package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
)

// Promise 10: what ends by itself is failed with its cause within 5 s, files
// kept, start works.
func TestMachineDeath(t *testing.T) {
	for cause, code := range map[runtime.Cause]string{
		runtime.CauseOutOfMemory: "out_of_memory", runtime.CauseProcesses: "process_limit", runtime.CauseKilled: "machine_killed",
		runtime.CausePoweroff: "machine_powered_off", runtime.CauseCrashed: "machine_crashed", runtime.CauseUnknown: "machine_died",
	} {
		for _, state := range []sandbox.State{sandbox.Running, sandbox.Paused} {
			inBubble(t, nil, func(t *testing.T, h *host) {
				id := sandbox.NewID()
				h.reach(id, 1, sandbox.Running)
				if state == sandbox.Paused {
					h.reach(id, 2, sandbox.Paused)
				}
				if err := h.world.WriteFile(id, "kept", nil); err != nil {
					t.Fatal(err)
				}
				if err := h.world.KillMachine(id, cause); err != nil {
					t.Fatal(err)
				}
				o := h.becomes(id, sandbox.Failed, 5*time.Second)
				if !o.Converged || o.Problem == nil || o.Problem.Code != code || o.Pending == nil || o.Pending.Trigger != "machine_died" || o.Pending.Problem.Code != code {
					t.Fatalf("%+v problem %+v", o, o.Problem)
				}
				synctest.Wait()
				if got := h.sessions.heard(id); got[len(got)-1] != "ended "+code {
					t.Fatalf("sessions heard %q", got)
				}
				if used, _ := h.n.ledger.totals(); used.memory != 0 || used.milliCPU != 0 || used.disk == 0 {
					t.Fatalf("books of a failed sandbox: %+v", used)
				}
				if _, err := h.n.Guest(context.Background(), h.who, id); !fault.IsCode(err, "sandbox_not_running") || fault.Of(err).Retryable {
					t.Fatalf("%v", err)
				}
				if err := h.try(id, 3, sandbox.Running, restart); !errors.Is(err, ErrOutcomePending) {
					t.Fatalf("%v", err)
				}
				h.absorb()
				if o := h.reach(id, 3, sandbox.Running, restart); o.Problem != nil {
					t.Fatalf("%+v", o)
				}
				if _, err := h.world.ReadFile(id, "kept"); err != nil {
					t.Fatal(err)
				}
				h.reach(id, 4, sandbox.Deleted)
				h.balance()
			})
		}
	}
}

// A machine that ends while it is asked to do something is failed, not retried
// into another life.
func TestDeathUnderAStep(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		h.world.On(fake.OpPause, id, fake.Fault{Call: func() { _ = h.world.KillMachine(id, runtime.CauseKilled) }})
		h.apply(id, 2, sandbox.Paused)
		if o := h.settled(id, 2, sandbox.Failed); o.Problem.Code != "machine_killed" {
			t.Fatalf("%+v", o.Problem)
		}
		if h.world.Census().Starts(id) != 1 {
			t.Fatal("booted again")
		}
	})
}

func TestDeathWhileBooting(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		// One that is out of memory would be so again.
		id := sandbox.NewID()
		kill := func(id sandbox.ID, cause runtime.Cause, times int) {
			h.world.On(fake.OpStart, id, fake.Fault{After: true, Times: times, Call: func() { _ = h.world.KillMachine(id, cause) }})
		}
		kill(id, runtime.CauseOutOfMemory, 0)
		h.apply(id, 1, sandbox.Running)
		if o := h.settled(id, 1, sandbox.Failed); o.Problem.Code != "out_of_memory" || h.world.Census().Starts(id) != 1 {
			t.Fatalf("%+v after %d boots", o.Problem, h.world.Census().Starts(id))
		}
		// Another cause gets more tries,
		lucky := sandbox.NewID()
		kill(lucky, runtime.CauseKilled, 2)
		h.reach(lucky, 1, sandbox.Running)
		if n := h.world.Census().Starts(lucky); n != 3 {
			t.Fatalf("%d boots", n)
		}
		// but not without end.
		never := sandbox.NewID()
		kill(never, runtime.CauseCrashed, 0)
		h.apply(never, 1, sandbox.Running)
		if o := h.settled(never, 1, sandbox.Failed); o.Problem.Code != "machine_crashed" || h.world.Census().Starts(never) != maxBootDeaths+1 {
			t.Fatalf("%+v after %d boots", o.Problem, h.world.Census().Starts(never))
		}
	}, fake.WithBootTime(time.Second))
}

// Every step that fails for a while is retried; one that fails for good ends the
// assignment at its deadline, with a cause, and nothing stays booked (C-067).
func TestRetriesUntilTheDeadline(t *testing.T) {
	ops := []fake.Op{fake.OpCreateBegin, fake.OpCreateDisk, fake.OpCreateDone, fake.OpStart, fake.OpDial, fake.OpPause, fake.OpResume, fake.OpStop, fake.OpAdopt, fake.OpStatus}
	boom := errors.New("boom at /host/path")
	for _, op := range ops {
		for _, f := range []fake.Fault{{Err: boom}, {Err: boom, After: true}, {Hang: true}, {Hang: true, After: true}} {
			for _, forever := range []bool{false, true} {
				inBubble(t, func(c *Config) { c.StepTimeout, c.CreateTimeout = 5*time.Second, 5*time.Second }, func(t *testing.T, h *host) {
					id := sandbox.NewID()
					generation, want := uint64(1), sandbox.Running
					prepare := func(states ...sandbox.State) {
						for _, s := range states {
							h.reach(id, generation, s)
							generation++
						}
					}
					switch op {
					case fake.OpPause, fake.OpAdopt:
						prepare(sandbox.Running)
						want = sandbox.Paused
					case fake.OpResume:
						prepare(sandbox.Running, sandbox.Paused)
					case fake.OpStop:
						prepare(sandbox.Running)
						want = sandbox.Stopped
					}
					g := f
					if !forever {
						g.Times = 3
					}
					if op == fake.OpDial && g.Hang && !forever {
						g.Times = 0 // one hang takes all of the boot's time
					}
					a := h.world.On(op, id, g)
					if op == fake.OpAdopt { // a look is needed after a restart
						h.crash()
						h.boot()
					}
					start := time.Now()
					h.apply(id, generation, want, func(a *Assignment) { a.Deadline = time.Now().Add(time.Minute) })
					if !forever && !(op == fake.OpDial && g.Hang) {
						h.settled(id, generation, want)
						if a.Struck() == 0 {
							t.Fatalf("%s: the fault was not met", op)
						}
						a.Off()
					} else if o := h.observeEnd(id, generation); o.State == sandbox.Failed {
						if time.Since(start) > time.Minute+6*time.Second {
							t.Fatalf("%s: failed after %v", op, time.Since(start))
						}
						if o.Problem == nil || o.Problem.What == "" || strings.Contains(o.Problem.Why+o.Problem.What, "/host") {
							t.Fatalf("%s: problem %+v", op, o.Problem)
						}
						a.Off()
						time.Sleep(time.Minute)
						synctest.Wait()
						if used, _ := h.n.ledger.totals(); used.memory != 0 {
							t.Fatalf("%s: a failed sandbox keeps its memory booked: %+v", op, used)
						}
					} else if !f.After {
						// A step whose effect came and whose answer did not may be seen to have worked.
						t.Fatalf("%s %+v: %s", op, f, o.State)
					} else {
						a.Off()
					}
					h.reach(id, generation+1, sandbox.Deleted)
					h.balance()
				})
			}
		}
	}
}

// observeEnd waits for the end of an assignment, whatever it is.
func (h *host) observeEnd(id sandbox.ID, generation uint64) Observation {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	for {
		o, err := h.n.Await(ctx, h.who, id, generation)
		if err != nil {
			h.t.Fatalf("await %s: %v, last %+v", id, err, o)
		}
		if o.Converged && o.Generation >= generation {
			return o
		}
	}
}

// A delayed assignment says what it waits for.
func TestDelayedIsNotFailed(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.world.On(fake.OpStart, id, fake.Fault{Err: runtime.ErrNoSpace})
		h.apply(id, 1, sandbox.Running)
		time.Sleep(20 * time.Second)
		o := h.observe(id)
		if o.State != sandbox.Creating || o.Converged || !strings.Contains(o.WaitingFor, "start the machine") || o.Problem == nil || o.Problem.Code != "capacity" {
			t.Fatalf("%+v %+v", o, o.Problem)
		}
		wantSteps(t, o, "create", "start")
		h.world.ClearFaults()
		if o := h.settled(id, 1, sandbox.Running); o.WaitingFor != "" || o.Problem != nil {
			t.Fatalf("%+v", o)
		}
	})
}

// Await ends at its context with what is known, and at every change of state.
func TestAwait(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		a := h.world.On(fake.OpStart, id, fake.Fault{Hang: true})
		h.apply(id, 1, sandbox.Running)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		o, err := h.n.Await(ctx, h.who, id, 1)
		if !errors.Is(err, context.DeadlineExceeded) || o.State != sandbox.Creating {
			t.Fatalf("%+v %v", o, err)
		}
		go func() { time.Sleep(time.Second); a.Release() }()
		if o, err = h.n.Await(context.Background(), h.who, id, 7); err != nil || o.State != sandbox.Running || o.Generation != 1 {
			t.Fatalf("a change of state did not wake: %+v %v", o, err)
		}
		if _, err := h.n.Await(context.Background(), h.who, sandbox.NewID(), 1); !errors.Is(err, ErrUnknown) {
			t.Fatal(err)
		}
	})
}

// A delete that cannot be done is never given up, and never reported as done.
func TestDeleteNeverGivesUp(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		a := h.world.On(fake.OpDestroy, id, fake.Fault{Err: errors.New("busy")})
		h.apply(id, 2, sandbox.Deleted)
		time.Sleep(time.Hour)
		o := h.observe(id)
		if o.State != sandbox.Deleting || o.Converged || o.Problem == nil || o.Problem.Code != "machine_delete_failed" {
			t.Fatalf("%+v", o)
		}
		if a.Struck() < 100 {
			t.Fatalf("%d tries in an hour", a.Struck())
		}
		h.sessions.mu.Lock()
		h.sessions.erase = errors.New("journal is busy")
		h.sessions.mu.Unlock()
		a.Off()
		time.Sleep(time.Minute)
		if o := h.observe(id); o.State != sandbox.Deleting {
			t.Fatalf("deleted although its journals are there: %+v", o)
		}
		h.sessions.mu.Lock()
		h.sessions.erase = nil
		h.sessions.mu.Unlock()
		h.settled(id, 2, sandbox.Deleted)
		h.balance()
	})
}

func TestTemplateIsMissing(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		start := time.Now()
		h.apply(id, 1, sandbox.Running, func(a *Assignment) { a.TemplateDigest = "sha256:" + strings.Repeat("b", 64) })
		if o := h.settled(id, 1, sandbox.Failed); o.Problem.Code != "template_not_found" || time.Since(start) > time.Second {
			t.Fatalf("%+v", o.Problem)
		}
		if _, err := h.n.Resolve(context.Background(), "none:latest"); !fault.IsCode(err, "template_not_found") {
			t.Fatal(err)
		}
		if i, err := h.n.Resolve(context.Background(), "base:latest"); err != nil || i.Digest != digest {
			t.Fatal(i, err)
		}
	})
}

// A guest that falls silent is found out, and what happens is configured.
func TestGuestFallsSilent(t *testing.T) {
	for _, to := range []sandbox.State{sandbox.Failed, sandbox.Quarantined} {
		inBubble(t, func(c *Config) { c.OnUnresponsive = to }, func(t *testing.T, h *host) {
			id, paused := sandbox.NewID(), sandbox.NewID()
			h.reach(id, 1, sandbox.Running)
			h.reach(paused, 1, sandbox.Running)
			h.reach(paused, 2, sandbox.Paused)
			h.world.Mute(id, true)
			time.Sleep(20 * time.Second)
			h.world.Mute(id, false) // a short silence is forgiven
			time.Sleep(5 * time.Minute)
			if o := h.observe(id); o.State != sandbox.Running {
				t.Fatalf("%+v", o)
			}
			h.world.Mute(id, true)
			o := h.becomes(id, to, 2*time.Minute)
			if o.Pending == nil || o.Pending.Trigger != "guest_unresponsive" || o.Problem.Code != "guest_unresponsive" {
				t.Fatalf("%+v", o)
			}
			synctest.Wait()
			want := map[sandbox.State]runtime.Condition{sandbox.Failed: runtime.Created, sandbox.Quarantined: runtime.Paused}[to]
			if got := h.condition(id); got != want {
				t.Fatalf("machine is %s", got)
			}
			if o := h.observe(paused); o.State != sandbox.Paused {
				t.Fatalf("a paused machine was taken for silent: %+v", o)
			}
		})
	}
}

// What lies is cut off and kept, until an operator decides.
func TestQuarantine(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running, expires(time.Minute, sandbox.ActionDelete))
		if err := h.n.ReportProtocolError(context.Background(), id); err != nil {
			t.Fatal(err)
		}
		if _, err := h.n.Guest(context.Background(), h.who, id); !fault.IsCode(err, "sandbox_quarantined") {
			t.Fatal(err)
		}
		synctest.Wait()
		o := h.observe(id)
		if o.State != sandbox.Quarantined || o.Pending == nil || o.Pending.State != sandbox.Quarantined || h.condition(id) != runtime.Paused {
			t.Fatalf("%+v, machine %s", o, h.condition(id))
		}
		h.absorb()
		// It outlasts its expiry, a restart, and the wish to have it running.
		time.Sleep(time.Hour)
		h.crash()
		h.boot()
		if len(h.report) != 1 || h.report[0].Result != AdoptedHeld {
			t.Fatalf("%+v", h.report)
		}
		h.apply(id, 2, sandbox.Running, restart)
		if o := h.settled(id, 2, sandbox.Quarantined); o.Problem == nil || h.condition(id) != runtime.Paused {
			t.Fatalf("%+v", o)
		}
		// Release is stopped: its memory is gone, its files are there.
		if o := h.reach(id, 3, sandbox.Stopped, expires(time.Hour, sandbox.ActionStop)); o.Problem != nil || h.condition(id) != runtime.Created {
			t.Fatalf("%+v, machine %s", o, h.condition(id))
		}
		h.reach(id, 4, sandbox.Running)
		if err := h.n.ReportProtocolError(context.Background(), id); err != nil {
			t.Fatal(err)
		}
		h.reach(id, 5, sandbox.Deleted) // also with an outcome that nobody absorbed
		if out := h.absorb(); len(out) != 0 {
			t.Fatalf("a delete left %+v", out)
		}
		h.balance()
	})
}

func TestQuarantineWithoutPauseStops(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		h.world.On(fake.OpPause, id, fake.Fault{Err: errors.New("cannot")})
		if err := h.n.ReportProtocolError(context.Background(), id); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if h.condition(id) != runtime.Created || h.observe(id).State != sandbox.Quarantined {
			t.Fatalf("machine is %s", h.condition(id))
		}
	})
}

func TestCapacity(t *testing.T) {
	inBubble(t, func(c *Config) {
		c.Capacity = sandbox.Resources{MilliCPU: 1000, MemoryBytes: 256 << 20, DiskBytes: 1 << 30}
		c.CPUOvercommit, c.MaxSandboxes = 4, 6
	}, func(t *testing.T, h *host) {
		var ids []sandbox.ID
		for range 4 {
			id := sandbox.NewID()
			ids = append(ids, id)
			h.reach(id, 1, sandbox.Running)
		}
		full := func(err error, why string) {
			t.Helper()
			if f := fault.Of(err); f == nil || f.Code != "capacity" || f.Class != fault.Exhausted || f.Remedy == "" || !strings.Contains(f.What+f.Why, why) {
				t.Fatalf("%v, want capacity: %s", err, why)
			}
		}
		one := h.assignment("", 1, sandbox.Running).Resources
		full(h.n.Admit(context.Background(), one), "memory")
		extra := sandbox.NewID()
		full(h.try(extra, 1, sandbox.Running), "memory")
		if _, err := h.n.Observe(context.Background(), h.who, extra); !errors.Is(err, ErrUnknown) {
			t.Fatalf("a refused sandbox left a row: %v", err)
		}
		huge := one
		huge.MemoryBytes = 1 << 40
		if err := h.n.Admit(context.Background(), huge); fault.Of(err).Retryable {
			t.Fatal("what never fits is said to be retryable")
		}
		// Pausing keeps memory, stopping gives it back, disk stays booked.
		h.reach(ids[0], 2, sandbox.Paused)
		full(h.try(extra, 1, sandbox.Running), "memory")
		h.reach(ids[0], 3, sandbox.Stopped)
		h.reach(extra, 1, sandbox.Running)
		full(h.try(ids[0], 4, sandbox.Running), "memory")
		if o := h.observe(ids[0]); o.Generation != 3 || o.State != sandbox.Stopped {
			t.Fatalf("a refused start changed %+v", o)
		}
		c, err := h.n.Capacity(context.Background())
		if err != nil || c.Sandboxes != 5 || c.Used.MemoryBytes != 256<<20 || c.Used.DiskBytes != 5*128<<20 || c.Total.MilliCPU != 4000 || c.Used.MilliCPU != 2000 {
			t.Fatalf("%+v %v", c, err)
		}
		// The books made anew from the rows are the same.
		h.crash()
		h.boot()
		if again, _ := h.n.Capacity(context.Background()); again != c {
			t.Fatalf("%+v after the restart, %+v before", again, c)
		}
		h.reach(sandbox.NewID(), 1, sandbox.Stopped)
		full(h.try(sandbox.NewID(), 1, sandbox.Stopped), "6 of 6")
		ids, _ = h.n.Known(context.Background())
		for _, id := range ids {
			h.reach(id, 9, sandbox.Deleted)
		}
		h.balance()
	})
}

// C-067: creates that fail in every phase give back what they had.
func TestC067FailuresGiveBack(t *testing.T) {
	inBubble(t, func(c *Config) { c.Capacity.MemoryBytes = 5 * 64 << 20 }, func(t *testing.T, h *host) {
		var bad []sandbox.ID
		for _, op := range []fake.Op{fake.OpCreateBegin, fake.OpCreateDisk, fake.OpCreateDone, fake.OpStart, fake.OpDial} {
			id := sandbox.NewID()
			bad = append(bad, id)
			h.world.On(op, id, fake.Fault{Err: errors.New("boom")})
			h.apply(id, 1, sandbox.Running, func(a *Assignment) { a.Deadline = time.Now().Add(10 * time.Second) })
		}
		for _, id := range bad {
			h.settled(id, 1, sandbox.Failed)
		}
		h.crash()
		h.boot()
		synctest.Wait()
		var good []sandbox.ID
		for range 5 {
			id := sandbox.NewID()
			good = append(good, id)
			h.reach(id, 1, sandbox.Running)
		}
		h.world.ClearFaults()
		for _, id := range slices.Concat(bad, good) {
			h.reach(id, 2, sandbox.Deleted)
		}
		h.balance()
	})
}
