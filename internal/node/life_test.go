package node

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
)

func names(steps []operation.Step) (out []string) {
	for _, s := range steps {
		out = append(out, s.Name)
	}
	return out
}

func wantSteps(t *testing.T, o Observation, want ...string) {
	t.Helper()
	if got := names(o.Steps); !slices.Equal(got, want) {
		t.Fatalf("steps %q, want %q", got, want)
	}
	for _, s := range o.Steps {
		if s.StartedAt.IsZero() || s.EndedAt.Before(s.StartedAt) {
			t.Fatalf("step without times: %+v", s)
		}
	}
}

func TestLife(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		o := h.reach(id, 1, sandbox.Running)
		wantSteps(t, o, "create", "start", "configure")
		if o.Class != sandbox.ClassUserKernel || o.Runtime != "fake" || o.BootID == "" || o.Problem != nil {
			t.Fatalf("observation %+v", o)
		}
		boot := o.BootID
		conf := h.world.Daemon(id).Configured()
		if len(conf) != 1 {
			t.Fatalf("configured %d times", len(conf))
		}
		c := conf[0]
		if c.SandboxID != string(id) || c.Hostname != string(id) || c.User != "user" || c.WorkDir != "/home/user" ||
			len(c.Entropy) == 0 || !c.Now.Equal(time.Now()) || c.Env["TOKEN"] != "s3cret" || c.Env["LANG"] != "fr" || c.Env["PATH"] != "/bin" {
			t.Fatalf("configured with %+v", c)
		}

		o = h.reach(id, 2, sandbox.Paused)
		wantSteps(t, o, "pause")
		if h.condition(id) != runtime.Paused {
			t.Fatal("not paused on the host")
		}
		o = h.reach(id, 3, sandbox.Running)
		wantSteps(t, o, "resume", "configure")
		if o.BootID != boot {
			t.Fatal("resume booted anew")
		}
		if err := h.world.WriteFile(id, "kept", []byte("x")); err != nil {
			t.Fatal(err)
		}
		o = h.reach(id, 4, sandbox.Stopped)
		wantSteps(t, o, "stop")
		if o.BootID != "" || h.condition(id) != runtime.Created {
			t.Fatalf("stopped: %+v, %s", o, h.condition(id))
		}
		o = h.reach(id, 5, sandbox.Running)
		wantSteps(t, o, "start", "configure")
		if o.BootID == boot || o.BootID == "" {
			t.Fatal("start did not boot anew")
		}
		if _, err := h.world.ReadFile(id, "kept"); err != nil {
			t.Fatal(err)
		}
		o = h.reach(id, 6, sandbox.Deleted)
		if !o.Converged || o.Generation != 6 {
			t.Fatalf("%+v", o)
		}
		want := []string{"resumed", "paused", "resumed", "ended stopped", "resumed", "ended deleted", "erased"}
		if got := h.sessions.heard(id); !slices.Equal(got, want) {
			t.Fatalf("sessions heard %q, want %q", got, want)
		}
		h.balance()
	})
}

// Every pair of assigned states, from a settled one, and from one in progress.
func TestEveryTransition(t *testing.T) {
	states := []sandbox.State{sandbox.Running, sandbox.Paused, sandbox.Stopped, sandbox.Deleted}
	for _, settled := range []bool{true, false} {
		for _, from := range states[:3] {
			for _, to := range states {
				inBubble(t, nil, func(t *testing.T, h *host) {
					id := sandbox.NewID()
					if h.reach(id, 1, sandbox.Running); from != sandbox.Running {
						if settled {
							h.reach(id, 2, from)
						} else {
							h.apply(id, 2, from)
						}
					}
					o := h.reach(id, 3, to)
					if o.Problem != nil {
						t.Fatalf("%s to %s: %+v", from, to, o.Problem)
					}
					want := map[sandbox.State]runtime.Condition{sandbox.Running: runtime.Running, sandbox.Paused: runtime.Paused,
						sandbox.Stopped: runtime.Created, sandbox.Deleted: absent}[to]
					if got := h.condition(id); got != want {
						t.Fatalf("%s to %s (settled %v): machine is %s", from, to, settled, got)
					}
					if to != sandbox.Deleted {
						h.reach(id, 4, sandbox.Deleted)
					}
					h.balance()
				})
			}
		}
	}
}

// What was told to stop never goes on with its memory, however fast the start follows.
func TestStopThenStartBootsAnew(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		boot := h.reach(id, 1, sandbox.Running).BootID
		h.apply(id, 2, sandbox.Stopped)
		if o := h.reach(id, 3, sandbox.Running); o.BootID == boot {
			t.Fatal("the machine kept its memory over a stop")
		}
		if got := h.sessions.heard(id); !slices.Equal(got, []string{"resumed", "ended stopped", "resumed"}) {
			t.Fatalf("sessions heard %q", got)
		}
	})
}

func TestApplyIsFencedAndIdempotent(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 5, sandbox.Running)
		if err := h.try(id, 4, sandbox.Deleted); !errors.Is(err, ErrStale) {
			t.Fatalf("older: %v", err)
		}
		// The same again, also with another content, changes nothing.
		h.reach(id, 5, sandbox.Running)
		h.apply(id, 5, sandbox.Stopped)
		synctest.Wait()
		if h.condition(id) != runtime.Running || h.world.Census().Starts(id) != 1 {
			t.Fatal("a repeated generation acted")
		}
		// A change of policy alone converges at once and touches nothing.
		o, err := h.n.Apply(context.Background(), h.assignment(id, 6, sandbox.Running))
		if err != nil || !o.Converged || o.Generation != 6 {
			t.Fatalf("%+v %v", o, err)
		}
		other, err := tenant.Mint("other")
		if err != nil {
			t.Fatal(err)
		}
		if err := h.try(id, 7, sandbox.Deleted, func(a *Assignment) { a.Tenant = other }); !fault.IsClass(err, fault.NotFound) {
			t.Fatalf("another tenant: %v", err)
		}
		if _, err := h.n.Observe(context.Background(), other, id); !errors.Is(err, ErrUnknown) {
			t.Fatalf("another tenant observes: %v", err)
		}
		if _, err := h.n.Guest(context.Background(), other, id); !fault.IsCode(err, "sandbox_not_found") {
			t.Fatalf("another tenant gets the guest: %v", err)
		}
		for _, bad := range []func(*Assignment){
			func(a *Assignment) { a.Desired = sandbox.Suspended },
			func(a *Assignment) { a.Desired = sandbox.Failed },
			func(a *Assignment) { a.ID = "../x" },
			func(a *Assignment) { a.Generation = 0 },
			func(a *Assignment) { a.Tenant = tenant.ID{} },
		} {
			if err := h.try(sandbox.NewID(), 1, sandbox.Running, bad); !fault.IsClass(err, fault.Invalid) {
				t.Fatalf("malformed assignment: %v", err)
			}
		}
		h.reach(id, 8, sandbox.Deleted)
		for _, late := range []uint64{7, 8, 9} {
			if err := h.try(id, late, sandbox.Running); !errors.Is(err, ErrStale) {
				t.Fatalf("generation %d after the delete: %v", late, err)
			}
		}
		// Deleting the deleted, and what never was, succeeds.
		h.reach(id, 9, sandbox.Deleted)
		h.reach(sandbox.NewID(), 1, sandbox.Deleted)
		if ids, _ := h.n.Known(context.Background()); len(ids) != 0 {
			t.Fatalf("known: %v", ids)
		}
		h.balance()
		h.crash()
		h.boot()
		if err := h.try(id, 8, sandbox.Running); !errors.Is(err, ErrStale) {
			t.Fatalf("after a restart: %v", err)
		}
	})
}

// C-040: pausing and resuming at once ends where the last wish was.
func TestC040PauseThenResumeAtOnce(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		var ids []sandbox.ID
		for range 20 {
			ids = append(ids, sandbox.NewID())
		}
		for _, id := range ids {
			h.reach(id, 1, sandbox.Running)
		}
		generation := uint64(1)
		for round := range 20 {
			for _, id := range ids {
				h.apply(id, generation+1, sandbox.Paused)
				if round%2 == 0 {
					synctest.Wait()
				}
				h.apply(id, generation+2, sandbox.Running)
			}
			generation += 2
			for _, id := range ids {
				h.settled(id, generation, sandbox.Running)
				if _, err := h.n.Guest(context.Background(), h.who, id); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, id := range ids {
			if h.condition(id) != runtime.Running || h.world.Census().Starts(id) != 1 {
				t.Fatalf("%s: %s after %d boots", id, h.condition(id), h.world.Census().Starts(id))
			}
			h.apply(id, generation+1, sandbox.Deleted)
		}
		for _, id := range ids {
			h.settled(id, generation+1, sandbox.Deleted)
		}
		h.balance()
	})
}

// C-041: delete wins against any step that hangs.
func TestC041DeleteWins(t *testing.T) {
	for _, op := range []fake.Op{fake.OpCreateBegin, fake.OpCreateDisk, fake.OpCreateDone, fake.OpStart, fake.OpDial, fake.OpResume, fake.OpPause, fake.OpStop, fake.OpAdopt, fake.OpStatus} {
		t.Run(string(op), func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, h *host) {
				id := sandbox.NewID()
				generation := uint64(0)
				next := func() uint64 { generation++; return generation }
				arm := func() *fake.Armed { return h.world.On(op, id, fake.Fault{Hang: true}) }
				var a *fake.Armed
				switch op {
				case fake.OpResume:
					h.reach(id, next(), sandbox.Running)
					h.reach(id, next(), sandbox.Paused)
					a = arm()
					h.apply(id, next(), sandbox.Running)
				case fake.OpPause:
					h.reach(id, next(), sandbox.Running)
					a = arm()
					h.apply(id, next(), sandbox.Paused)
				case fake.OpAdopt:
					h.reach(id, next(), sandbox.Running)
					a = arm()
					h.crash()
					h.boot()
				case fake.OpStop:
					h.reach(id, next(), sandbox.Running)
					a = arm()
					h.apply(id, next(), sandbox.Stopped)
				default:
					a = arm()
					h.apply(id, next(), sandbox.Running)
				}
				synctest.Wait()
				if a.Hanging() != 1 && op != fake.OpDial {
					t.Fatalf("%d steps hang, want 1", a.Hanging())
				}
				before := time.Now()
				if op == fake.OpAdopt || op == fake.OpStatus {
					defer a.Off() // the delete itself must look, too
					h.apply(id, next(), sandbox.Deleted)
					a.Off()
				} else {
					h.apply(id, next(), sandbox.Deleted)
				}
				h.settled(id, generation, sandbox.Deleted)
				if d := time.Since(before); d > time.Second {
					t.Fatalf("delete waited %v for the hanging step", d)
				}
				time.Sleep(10 * time.Minute)
				h.balance()
				if err := h.try(id, generation-1, sandbox.Running); !errors.Is(err, ErrStale) {
					t.Fatalf("the resume caller got %v", err)
				}
			})
		})
	}
}

// C-042: what is paused can be deleted, without waking it.
func TestC042PausedCanBeDeleted(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		var ids []sandbox.ID
		for range 80 {
			id := sandbox.NewID()
			ids = append(ids, id)
			h.reach(id, 1, sandbox.Running)
			h.reach(id, 2, sandbox.Paused)
		}
		a := h.world.On(fake.OpResume, fake.Any, fake.Fault{Err: errors.New("must not be called")})
		for _, id := range ids {
			h.apply(id, 3, sandbox.Deleted)
		}
		for _, id := range ids {
			h.settled(id, 3, sandbox.Deleted)
		}
		if a.Struck() > 0 {
			t.Fatal("a delete resumed a machine")
		}
		h.balance()
	})
}

// C-054: running is said only after the guest has answered and taken its configuration.
func TestC054ReadyMeansUsable(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.apply(id, 1, sandbox.Running)
		time.Sleep(6 * time.Second)
		if o := h.observe(id); o.State != sandbox.Creating || o.Converged {
			t.Fatalf("while booting: %+v", o)
		}
		start := time.Now()
		if _, err := h.n.Guest(context.Background(), h.who, id); err != nil {
			t.Fatalf("Guest did not wait for the boot: %v", err)
		}
		if time.Since(start) != 2*time.Second {
			t.Fatalf("the guest came after %v", time.Since(start))
		}
		h.settled(id, 1, sandbox.Running)
		// One that stays silent is failed, not running, and its machine is off.
		h.reach(id, 2, sandbox.Stopped)
		h.world.Mute(id, true)
		start = time.Now()
		h.apply(id, 3, sandbox.Running)
		o := h.settled(id, 3, sandbox.Failed)
		if o.Problem.Code != "guest_unresponsive" || time.Since(start) < runtime.BootTimeout || time.Since(start) > runtime.BootTimeout+2*time.Second {
			t.Fatalf("%+v after %v", o.Problem, time.Since(start))
		}
		synctest.Wait()
		if h.condition(id) != runtime.Created {
			t.Fatalf("machine is %s", h.condition(id))
		}
		if len(h.absorb()) != 0 {
			t.Fatal("the answer to an assignment came as an outcome, too")
		}
		// An update leaves it failed; only Restart leads out.
		h.world.Mute(id, false)
		h.apply(id, 4, sandbox.Running)
		if o := h.settled(id, 4, sandbox.Failed); o.Problem == nil || h.condition(id) != runtime.Created {
			t.Fatalf("%+v, machine %s", o, h.condition(id))
		}
		o = h.reach(id, 5, sandbox.Running, restart)
		if o.Problem != nil || o.BootID == "" {
			t.Fatalf("%+v", o)
		}
	}, fake.WithBootTime(8*time.Second))
}

func restart(a *Assignment) { a.Restart = true }
