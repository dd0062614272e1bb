package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
)

func (r AdoptionReport) of(id sandbox.ID) AdoptionResult {
	for _, a := range r {
		if a.ID == id {
			return a.Result
		}
	}
	return ""
}

// C-056 and its kin: killed at every failpoint of every step, once and again,
// the next process ends what was begun, and the books balance.
func TestC056KilledAtEveryFailpoint(t *testing.T) {
	// How to come to the step, and the states it leads through.
	paths := map[step][]sandbox.State{
		stepCreate: {sandbox.Running}, stepStart: {sandbox.Running}, stepConfigure: {sandbox.Running},
		stepPause: {sandbox.Running, sandbox.Paused}, stepResume: {sandbox.Running, sandbox.Paused, sandbox.Running},
		stepStop: {sandbox.Running, sandbox.Stopped}, stepDelete: {sandbox.Running, sandbox.Deleted},
	}
	if len(paths) != len(failpoints) {
		t.Fatalf("%d steps have failpoints, %d are tested", len(failpoints), len(paths))
	}
	for s, states := range paths {
		for _, point := range failpoints[s] {
			for _, times := range []int{1, 3} {
				for _, reboot := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/%d/%v", point, times, reboot), func(t *testing.T) {
						inBubble(t, nil, func(t *testing.T, h *host) {
							id := sandbox.NewID()
							last := len(states) - 1
							for i, state := range states[:last] {
								h.reach(id, uint64(i+1), state)
							}
							generation, want := uint64(last+1), states[last]
							disarm, err := failpoint.Arm(point, "hang")
							if err != nil {
								t.Fatal(err)
							}
							defer disarm()
							h.apply(id, generation, want)
							for round := range times {
								synctest.Wait()
								if o := h.observe(id); o.Converged && round == 0 {
									t.Fatalf("the point was not met: %+v", o)
								}
								if reboot {
									h.reboot()
								} else {
									h.crash()
								}
								h.boot()
							}
							disarm()
							if reboot && want != sandbox.Stopped && want != sandbox.Deleted && (s == stepPause || s == stepResume) {
								// Its memory is gone, and that is said.
								o := h.settled(id, generation, sandbox.Failed)
								if o.Problem.Code != "host_reboot" {
									t.Fatalf("%+v", o.Problem)
								}
							} else {
								// The hanging point let go of, it goes on where it was.
								h.crash()
								h.boot()
								h.settled(id, generation, want)
							}
							if want != sandbox.Deleted {
								if h.absorb(); !reboot {
									h.reach(id, generation+1, sandbox.Running)
								}
								h.reach(id, generation+2, sandbox.Deleted)
							}
							h.balance()
						})
					})
				}
			}
		}
	}
}

// An error at a failpoint is an error like any other: tried again.
func TestErrorsAtEveryFailpoint(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		for s, points := range failpoints {
			for _, point := range points {
				disarm, err := failpoint.Arm(point, "error(2)")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(disarm)
				id := sandbox.NewID()
				for i, state := range []sandbox.State{sandbox.Running, sandbox.Paused, sandbox.Running, sandbox.Stopped, sandbox.Running, sandbox.Deleted} {
					h.reach(id, uint64(i+1), state)
				}
				disarm()
				if n := testutil.CollectAndCount(h.n.metrics.steps, "space_node_step_seconds"); n == 0 {
					t.Fatalf("%s left no metric", s)
				}
			}
		}
		h.balance()
	})
}

// C-057: 5 running and 5 paused sandboxes survive a clean stop and a kill.
func TestC057SandboxesSurviveARestart(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		var ids []sandbox.ID
		before := map[sandbox.ID]Observation{}
		for i := range 10 {
			id := sandbox.NewID()
			ids = append(ids, id)
			before[id] = h.reach(id, 1, sandbox.Running)
			if i%2 == 1 {
				before[id] = h.reach(id, 2, sandbox.Paused)
			}
		}
		for round := range 2 {
			if round == 0 {
				h.n.Close()
				if err := h.db.Close(); err != nil {
					t.Fatal(err)
				}
				h.drv.Kill()
			} else {
				h.crash()
			}
			h.boot()
			if c := h.report.Counts(); c[AdoptedRunning] != 5 || c[AdoptedPaused] != 5 || len(h.report) != 10 {
				t.Fatalf("%+v", c)
			}
			for i, id := range ids {
				o := h.observe(id)
				if b := before[id]; o.State != b.State || o.BootID != b.BootID || o.Generation != b.Generation || !o.Converged || !o.Since.Equal(b.Since) {
					t.Fatalf("%+v, before %+v", o, b)
				}
				if i%2 == 0 {
					if _, err := h.n.Guest(context.Background(), h.who, id); err != nil {
						t.Fatalf("at once after the restart: %v", err)
					}
				}
			}
			synctest.Wait()
			for i, id := range ids {
				if n := len(h.world.Daemon(id).Configured()); i%2 == 0 && n != round+2 {
					t.Fatalf("configured %d times", n)
				}
			}
		}
		// Deaths are still noticed.
		if err := h.world.KillMachine(ids[1], runtime.CauseOutOfMemory); err != nil {
			t.Fatal(err)
		}
		h.becomes(ids[1], sandbox.Failed, 5*time.Second)
		for _, id := range ids {
			h.apply(id, 9, sandbox.Deleted)
		}
		for _, id := range ids {
			h.settled(id, 9, sandbox.Deleted)
		}
		h.balance()
	})
}

// After a reboot every machine is off, every file is there, and start works.
func TestReboot(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		running, paused, stopped := sandbox.NewID(), sandbox.NewID(), sandbox.NewID()
		for _, id := range []sandbox.ID{running, paused, stopped} {
			h.reach(id, 1, sandbox.Running)
			if err := h.world.WriteFile(id, "kept", []byte(id)); err != nil {
				t.Fatal(err)
			}
		}
		h.reach(paused, 2, sandbox.Paused)
		h.reach(stopped, 2, sandbox.Stopped)
		h.reboot()
		h.boot()
		if c := h.report.Counts(); c[AdoptedDead] != 2 || c[AdoptedResting] != 1 {
			t.Fatalf("%+v", c)
		}
		out := h.absorb()
		if len(out) != 2 {
			t.Fatalf("%+v", out)
		}
		for _, o := range out {
			if o.Trigger != "adopted_dead" || o.State != sandbox.Failed || o.Problem.Code != "host_reboot" {
				t.Fatalf("%+v", o)
			}
		}
		synctest.Wait()
		if got := h.sessions.heard(running); got[len(got)-1] != "ended host_reboot" {
			t.Fatalf("sessions heard %q", got)
		}
		for _, id := range []sandbox.ID{running, paused, stopped} {
			h.reach(id, 3, sandbox.Running, restart)
			if data, err := h.world.ReadFile(id, "kept"); err != nil || string(data) != string(id) {
				t.Fatal(string(data), err)
			}
		}
	})
}

// Rows and machines that do not fit each other.
func TestAdoptionMatrix(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		ctx := context.Background()
		id := map[string]sandbox.ID{}
		for _, name := range []string{"lost", "lost-stopped", "unmade", "spec", "reborn", "died", "oom-paused", "deleting", "failed", "expired", "half"} {
			id[name] = sandbox.NewID()
		}
		for _, name := range []string{"lost", "lost-stopped", "spec", "reborn", "died", "oom-paused", "deleting", "failed"} {
			h.reach(id[name], 1, sandbox.Running)
		}
		h.reach(id["expired"], 1, sandbox.Running, expires(time.Minute, sandbox.ActionDelete))
		h.reach(id["lost-stopped"], 2, sandbox.Stopped)
		h.reach(id["oom-paused"], 2, sandbox.Paused)
		if err := h.world.KillMachine(id["failed"], runtime.CauseCrashed); err != nil {
			t.Fatal(err)
		}
		h.becomes(id["failed"], sandbox.Failed, time.Second)
		h.absorb()
		hang := h.world.On(fake.OpCreateBegin, id["unmade"], fake.Fault{Hang: true})
		half := h.world.On(fake.OpCreateDone, id["half"], fake.Fault{Hang: true})
		destroy := h.world.On(fake.OpDestroy, id["deleting"], fake.Fault{Hang: true})
		h.apply(id["unmade"], 1, sandbox.Running)
		h.apply(id["half"], 1, sandbox.Running)
		h.apply(id["deleting"], 2, sandbox.Deleted)
		synctest.Wait()
		h.crash()
		hang.Off()
		half.Off()
		destroy.Off()

		// What happens on the host while we are away.
		other := fake.New(h.world)
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		must(other.Destroy(ctx, id["lost"]))
		must(other.Destroy(ctx, id["lost-stopped"]))
		must(other.Destroy(ctx, id["spec"]))
		spec := h.assignment(id["spec"], 1, sandbox.Running)
		m, err := other.Create(ctx, runtime.Spec{ID: id["spec"], TemplateDigest: digest, Resources: sandbox.Resources{MemoryBytes: spec.Resources.MemoryBytes * 2}})
		must(err)
		must(m.Start(ctx))
		m, err = other.Adopt(ctx, id["reborn"])
		must(err)
		must(m.Stop(ctx))
		must(m.Start(ctx))
		must(h.world.KillMachine(id["died"], runtime.CauseKilled))
		must(h.world.KillMachine(id["oom-paused"], runtime.CauseOutOfMemory))
		orphan := sandbox.NewID()
		m, err = other.Create(ctx, runtime.Spec{ID: orphan, TemplateDigest: digest})
		must(err)
		must(m.Start(ctx))
		other.Kill()
		time.Sleep(2 * time.Minute)

		h.boot()
		want := map[string]AdoptionResult{"lost": AdoptedLost, "lost-stopped": AdoptedLost, "unmade": AdoptedResumed, "half": AdoptedResumed,
			"spec": AdoptedMismatch, "reborn": AdoptedMismatch, "died": AdoptedDead, "oom-paused": AdoptedDead, "deleting": AdoptedResumed,
			"failed": AdoptedResting, "expired": AdoptedRunning}
		for name, result := range want {
			if got := h.report.of(id[name]); got != result {
				t.Errorf("%s: %s, want %s", name, got, result)
			}
			if v := testutil.ToFloat64(h.n.metrics.adopted.WithLabelValues(string(result))); v == 0 {
				t.Errorf("%s is not counted", result)
			}
		}
		if h.report.of(orphan) != AdoptedOrphan || len(h.report) != len(want)+1 {
			t.Errorf("report %+v", h.report)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		for name, code := range map[string]string{"lost": "machine_lost", "lost-stopped": "machine_lost", "spec": "adoption_mismatch",
			"reborn": "adoption_mismatch", "died": "machine_killed", "oom-paused": "out_of_memory", "failed": "machine_crashed"} {
			o := h.observe(id[name])
			state := sandbox.Failed
			if code == "adoption_mismatch" {
				state = sandbox.Quarantined
			}
			if o.State != state || o.Problem == nil || o.Problem.Code != code || (o.Pending == nil) != (name == "failed") {
				t.Errorf("%s: %+v %+v", name, o, o.Problem)
			}
		}
		for _, name := range []string{"unmade", "half"} {
			// Its deadline passed while we were away: that is said, or it is there.
			if o := h.observe(id[name]); !o.Converged {
				t.Errorf("%s: %+v", name, o)
			}
		}
		for _, name := range []string{"deleting", "expired"} {
			if o := h.observe(id[name]); o.State != sandbox.Deleted {
				t.Errorf("%s: %+v", name, o)
			}
		}
		if c := h.condition(orphan); c != absent {
			t.Errorf("the orphan is %s", c)
		}
		if err := h.try(orphan, 8, sandbox.Running); !errors.Is(err, ErrStale) {
			t.Errorf("an orphan's id is taken again: %v", err)
		}
		for _, name := range []string{"spec", "reborn"} {
			if c := h.condition(id[name]); c != runtime.Paused {
				t.Errorf("%s is %s", name, c)
			}
		}
		// A lost sandbox never comes back with an empty disk.
		h.absorb()
		h.apply(id["lost"], 5, sandbox.Running, restart)
		if o := h.settled(id["lost"], 5, sandbox.Failed); o.Problem.Code != "machine_lost" || h.condition(id["lost"]) != absent {
			t.Errorf("%+v", o)
		}
		if t.Failed() {
			return
		}
		h.crash()
		h.boot()
		if len(h.report) != len(want)-2 {
			t.Errorf("after that: %+v", h.report)
		}
		known, err := h.n.Known(ctx)
		must(err)
		for _, id := range known {
			h.reach(id, 9, sandbox.Deleted)
		}
		h.balance()
	})
}

// A host that cannot list its machines is asked again; nothing is decided without it.
func TestStartWaitsForTheHost(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		h.crash()
		h.world.On(fake.OpList, fake.Any, fake.Fault{Err: errors.New("not yet"), Times: 5})
		h.boot()
		if h.report.of(id) != AdoptedRunning {
			t.Fatalf("%+v", h.report)
		}
	})
}

// The chain holds the node's acts, and no secret.
func TestAudit(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running, expires(time.Minute, sandbox.ActionDelete))
		h.becomes(id, sandbox.Deleted, time.Hour)
		h.crash()
		h.boot()
		h.balance()
		records, err := h.n.Auditor().Records(context.Background(), h.db.Read, 1, 100)
		if err != nil {
			t.Fatal(err)
		}
		var acts []string
		for _, r := range records {
			acts = append(acts, r.Entry.Action)
			if r.Chain != "node:n1" || strings.Contains(fmt.Sprint(r), "s3cret") {
				t.Fatalf("%+v", r)
			}
		}
		if !slices.Equal(acts, []string{"node.start", "sandbox.expired", "sandbox.gone", "node.start"}) {
			t.Fatalf("%q", acts)
		}
		mine, err := h.n.Auditor().TenantRecords(context.Background(), h.db.Read, "acme", 0, 100)
		if err != nil || len(mine) != 2 || mine[0].Entry.Action != "sandbox.gone" {
			t.Fatalf("%+v %v", mine, err)
		}
		older, err := h.n.Auditor().TenantRecords(context.Background(), h.db.Read, "acme", mine[0].Seq, 100)
		if err != nil || len(older) != 1 || older[0].Entry.Action != "sandbox.expired" {
			t.Fatalf("%+v %v", older, err)
		}
	})
}

// A tenant's environment is sealed at rest and not in the log; it goes with the sandbox.
func TestEnvironmentStaysSealed(t *testing.T) {
	var log bytes.Buffer
	handler := slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})
	inBubble(t, func(c *Config) { c.Log = slog.New(handler) }, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.world.On(fake.OpStart, id, fake.Fault{Err: errors.New("boom"), Times: 3})
		h.world.On(fake.OpDial, id, fake.Fault{Err: errors.New("boom"), Times: 3})
		h.reach(id, 1, sandbox.Running)
		h.crash()
		h.boot()
		synctest.Wait()
		conf := h.world.Daemon(id).Configured()
		if len(conf) != 2 || conf[1].Env["TOKEN"] != "s3cret" {
			t.Fatalf("the environment did not survive the restart: %+v", conf)
		}
		found := false
		for _, suffix := range []string{"", "-wal"} {
			data, err := os.ReadFile(h.path + suffix)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(data, []byte("s3cret")) {
				t.Fatalf("in clear in node.db%s", suffix)
			}
			found = found || bytes.Contains(data, []byte(id))
		}
		if !found {
			t.Fatal("the wrong files were searched")
		}
		h.reach(id, 2, sandbox.Deleted)
		var rows int
		if err := h.db.Read.QueryRow(`SELECT count(*) FROM node_machines`).Scan(&rows); err != nil || rows != 0 {
			t.Fatal(rows, err)
		}
	})
	if s := log.String(); strings.Contains(s, "s3cret") || !strings.Contains(s, "step failed") {
		t.Fatal(s)
	}
}
