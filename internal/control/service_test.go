package control

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlite"
)

func TestCreateIsChecked(t *testing.T) {
	w, _ := stepped(t)
	many := map[string]string{}
	for i := range 65 {
		many[strings.Repeat("k", i+1)] = ""
	}
	for code, c := range map[string]CreateSandbox{
		"invalid_name":          {Name: "-x"},
		"invalid_isolation":     {Accept: []sandbox.Class{"docker"}},
		"isolation_unavailable": {Accept: []sandbox.Class{sandbox.ClassMicroVM}},
		"template_not_found":    {Template: "none:latest"},
		"invalid_template":      {Template: strings.Repeat("x", 201)},
		"invalid_cpu":           {Resources: sandbox.Resources{MilliCPU: 1}},
		"invalid_memory":        {Resources: sandbox.Resources{MemoryBytes: 1 << 50}},
		"invalid_disk":          {Resources: sandbox.Resources{DiskBytes: -1}},
		"invalid_processes":     {Resources: sandbox.Resources{MaxProcesses: 1}},
		"invalid_timeout":       {Timeout: time.Hour, MaxLifetime: time.Minute},
		"invalid_max_lifetime":  {MaxLifetime: 1000 * time.Hour},
		"invalid_action":        {OnTimeout: "explode"},
		"invalid_idle":          {IdleTimeout: time.Millisecond},
		"too_many_pairs":        {Metadata: many},
		"pairs_too_large":       {Metadata: map[string]string{"a": strings.Repeat("x", 20<<10)}},
		"invalid_pair":          {Metadata: map[string]string{"a": "\x00"}},
		"invalid_env":           {Env: map[string]string{"1A": ""}},
	} {
		_, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, c)
		wantCode(t, err, code)
		if f := fault.Of(err); f.What == "" || strings.Contains(f.Error(), "%!") {
			t.Errorf("%s says %q", code, f.Error())
		}
	}
	// A name that has the form of an id would hide one.
	_, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{Name: "i234567890123456789a"})
	wantCode(t, err, "invalid_name")
	// An emulated node satisfies only a request that names it.
	w.conf.NodeInfo.Class = sandbox.ClassEmulated
	w.restart(t)
	_, err = w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{})
	wantCode(t, err, "isolation_unavailable")
	if _, err = w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{Accept: []sandbox.Class{sandbox.ClassEmulated}}); err != nil {
		t.Error(err)
	}
	w.node.capacity = fault.New(fault.Exhausted, "capacity", "full")
	_, err = w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{Accept: []sandbox.Class{sandbox.ClassEmulated}})
	wantCode(t, err, "capacity")
	if page, _ := w.svc.ListSandboxes(t.Context(), w.p, store.Filter{}); len(page.Items) != 1 {
		t.Errorf("refused requests left %d sandboxes", len(page.Items)-1)
	}
}

func TestNames(t *testing.T) {
	w, _ := stepped(t)
	a := w.up(t, CreateSandbox{Name: "box"})
	_, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{Name: "box"})
	wantCode(t, err, "name_taken")
	got, err := w.svc.GetSandbox(t.Context(), w.p, "box")
	if err != nil || got.ID != a.ID {
		t.Fatal(got, err)
	}
	b := w.up(t, CreateSandbox{})
	_, err = w.svc.PatchSandbox(t.Context(), w.p, Request{}, string(b.ID), PatchSandbox{Name: ptr("box")})
	wantCode(t, err, "name_taken")
	if _, err := w.svc.DeleteSandbox(t.Context(), w.p, Request{}, "box"); err != nil {
		t.Fatal(err)
	}
	w.settle(t)
	_, err = w.svc.GetSandbox(t.Context(), w.p, "box")
	wantCode(t, err, "sandbox_not_found")
	res, err := w.svc.PatchSandbox(t.Context(), w.p, Request{}, string(b.ID), PatchSandbox{Name: ptr("box"), Metadata: ptr(map[string]string{"a": "b"})})
	if err != nil || res.Sandbox.Name != "box" || res.Operation.State != operation.Succeeded || res.Sandbox.Generation != b.Generation {
		t.Errorf("a change that no node needs to know: %+v, %v", res, err)
	}
}

func TestEnvironmentIsSealed(t *testing.T) {
	w, _ := stepped(t)
	var seen map[string]string
	w.node.onApply = func(a node.Assignment) error { seen = a.Env; return nil }
	s := w.up(t, CreateSandbox{Env: map[string]string{"TOKEN": "hunter2hunter2"}})
	if seen["TOKEN"] != "hunter2hunter2" {
		t.Errorf("the node got %v", seen)
	}
	row, err := w.store.Sandbox(t.Context(), w.p.Tenant, s.ID)
	if err != nil || len(row.SealedEnv) == 0 || strings.Contains(string(row.SealedEnv), "hunter2") {
		t.Errorf("row has %q, %v", row.SealedEnv, err)
	}
	// Sealed with a key that is gone: said, not hidden, and delete still works.
	if w.conf.Sealer, err = secret.NewSealer([]byte("another another another another!")); err != nil {
		t.Fatal(err)
	}
	w.restart(t)
	w.verb(t, s.ID, sandbox.Stop, 0)
	w.settle(t)
	got := w.get(t, s.ID)
	if got.Observed != sandbox.Failed || got.Problem.Code != "env_unreadable" {
		t.Errorf("is %s, %+v", got.Observed, got.Problem)
	}
	w.verb(t, s.ID, sandbox.Delete, 0)
	w.settle(t)
	row, _ = w.store.Sandbox(t.Context(), w.p.Tenant, s.ID)
	if row.DeletedAt.IsZero() || len(row.SealedEnv) != 0 || len(row.Metadata) != 0 {
		t.Errorf("after delete: %+v", row)
	}
}

func TestDeniedWithoutScope(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	p := w.principal(t, "default", "narrow", auth.SandboxesRead)
	ctx, id := t.Context(), string(s.ID)
	for name, err := range map[string]error{
		"create":     second(w.svc.CreateSandbox(ctx, p, Request{}, CreateSandbox{})),
		"patch":      second(w.svc.PatchSandbox(ctx, p, Request{}, id, PatchSandbox{})),
		"delete":     second(w.svc.DeleteSandbox(ctx, p, Request{}, id)),
		"wake":       second(w.svc.Lifecycle(ctx, p, Request{}, id, Lifecycle{Verb: sandbox.Wake})),
		"release":    second(w.svc.Release(ctx, p, Request{}, id)),
		"quarantine": second(w.svc.ListQuarantine(ctx, p, "", 0)),
		"cancel":     second(w.svc.CancelOperation(ctx, p, Request{}, operation.NewID())),
		"exec":       second(w.svc.Exec(ctx, p, Request{}, id, Exec{Command: session.Command{Shell: "true"}})),
		"token":      second(w.svc.MintDataToken(ctx, p, Request{}, id, []string{"exec"}, 0)),
		"keys":       second(w.svc.ListKeys(ctx, p, "", 0)),
		"audit":      second(w.svc.ListAudit(ctx, p, "", "", 0)),
		"nodes":      second(w.svc.ListNodes(ctx, p)),
	} {
		if !fault.IsClass(err, fault.Denied) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := w.svc.GetSandbox(ctx, p, id); err != nil {
		t.Error(err)
	}
	_, err := w.svc.GetSandbox(ctx, Principal{}, id)
	wantCode(t, err, "unauthenticated")
}

// A key mints no data token that is wider than itself.
func TestDataTokensAreNoWiderThanTheirKey(t *testing.T) {
	w, _ := stepped(t)
	id := string(w.up(t, CreateSandbox{}).ID)
	for _, c := range []struct {
		key    auth.Scope
		wish   []string
		denied bool
	}{
		{auth.Exec, []string{"exec", "port"}, false},
		{auth.Exec, []string{"files:r"}, true},
		{auth.Exec, []string{"exec", "files:rw"}, true},
		{auth.FilesRead, []string{"files:r"}, false},
		{auth.FilesRead, []string{"files:rw"}, true},
		{auth.FilesWrite, []string{"files:r", "files:rw"}, false},
		{auth.FilesWrite, []string{"exec"}, true},
		{auth.Admin, []string{"exec", "files:rw", "port"}, false},
	} {
		p := w.principal(t, "default", "key-"+string(c.key), c.key)
		if _, err := w.svc.MintDataToken(t.Context(), p, Request{}, id, c.wish, 0); fault.IsClass(err, fault.Denied) != c.denied || !c.denied && err != nil {
			t.Errorf("%s asks for %v: %v", c.key, c.wish, err)
		}
	}
}

func second[A any](_ A, err error) error { return err }

func TestVerbsAreLevelTriggered(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	res := w.verb(t, s.ID, sandbox.Resume, 0)
	if res.Operation.State != operation.Succeeded || res.Sandbox.Generation != s.Generation {
		t.Errorf("resume of a running one: %+v", res)
	}
	a, b := w.verb(t, s.ID, sandbox.Pause, 0), w.verb(t, s.ID, sandbox.Pause, 0)
	if a.Operation.Generation != b.Operation.Generation {
		t.Errorf("two pauses at generations %d and %d", a.Operation.Generation, b.Operation.Generation)
	}
	w.settle(t)
	for _, r := range []Result{a, b} {
		if op := w.op(t, r.Operation.ID); op.State != operation.Succeeded {
			t.Errorf("pause: %+v", op)
		}
	}
	_, err := w.ask(s.ID, sandbox.Start, 0)
	wantCode(t, err, "state_conflict")
	_, err = w.ask(s.ID, sandbox.Suspend, 0)
	wantCode(t, err, "not_supported")
	_, err = w.ask(s.ID, "explode", 0)
	wantCode(t, err, "invalid_verb")
}

func TestStartAfterFailure(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	w.node.move(s.ID, sandbox.Failed, "machine_died")
	w.settle(t)
	if got := w.get(t, s.ID); got.Observed != sandbox.Failed || got.Problem.Code != "machine_died" {
		t.Fatalf("%+v", got)
	}
	// A change of policy does not start it.
	if _, err := w.svc.PatchSandbox(t.Context(), w.p, Request{}, string(s.ID), PatchSandbox{Timeout: ptr(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	w.settle(t)
	if got := w.get(t, s.ID); got.Observed != sandbox.Failed || w.node.state(s.ID) != sandbox.Failed {
		t.Fatalf("a patch made it %s", got.Observed)
	}
	_, err := w.svc.Exec(t.Context(), w.p, Request{}, string(s.ID), Exec{Command: session.Command{Shell: "true"}})
	wantCode(t, err, "sandbox_failed")
	start := w.verb(t, s.ID, sandbox.Start, 0)
	w.settle(t)
	if op, got := w.op(t, start.Operation.ID), w.get(t, s.ID); op.State != operation.Succeeded || got.Observed != sandbox.Running || got.Problem != nil {
		t.Errorf("start: %+v, %+v", op, got)
	}
	if boots := w.node.machines[s.ID].boots; boots != 2 {
		t.Errorf("%d boots", boots)
	}
}

func TestQuarantine(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	w.node.move(s.ID, sandbox.Quarantined, "limit")
	w.settle(t)
	_, err := w.ask(s.ID, sandbox.Wake, 0)
	wantCode(t, err, "state_conflict")
	_, err = w.svc.Exec(t.Context(), w.p, Request{}, string(s.ID), Exec{Command: session.Command{Shell: "true"}})
	wantCode(t, err, "sandbox_quarantined")
	page, err := w.svc.ListQuarantine(t.Context(), w.p, "", 0)
	if err != nil || len(page.Items) != 1 {
		t.Fatal(page, err)
	}
	res, err := w.svc.Release(t.Context(), w.p, Request{}, string(s.ID))
	if err != nil {
		t.Fatal(err)
	}
	w.settle(t)
	if got := w.get(t, s.ID); got.Observed != sandbox.Stopped || w.op(t, res.Operation.ID).State != operation.Succeeded {
		t.Errorf("released to %s", got.Observed)
	}
}

func TestCancel(t *testing.T) {
	w, _ := stepped(t)
	t.Run("create", func(t *testing.T) {
		res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.svc.CancelOperation(t.Context(), w.p, Request{}, res.Operation.ID); err != nil {
			t.Fatal(err)
		}
		w.settle(t)
		if got := w.get(t, res.Sandbox.ID); got.DeletedAt.IsZero() {
			t.Errorf("%+v", got)
		}
	})
	s := w.up(t, CreateSandbox{})
	t.Run("pause", func(t *testing.T) {
		other, res := w.verb(t, s.ID, sandbox.Pause, 0), w.verb(t, s.ID, sandbox.Pause, 0)
		got, err := w.svc.CancelOperation(t.Context(), w.p, Request{}, res.Operation.ID)
		if err != nil || got.Operation.State != operation.Cancelled {
			t.Fatal(got, err)
		}
		w.settle(t)
		if got := w.get(t, s.ID); got.Observed != sandbox.Running {
			t.Errorf("%+v", got)
		}
		if op := w.op(t, other.Operation.ID); op.State != operation.Cancelled || op.Superseded != res.Operation.ID {
			t.Errorf("the other pause: %+v", op)
		}
	})
	t.Run("too late", func(t *testing.T) {
		res := w.verb(t, s.ID, sandbox.Pause, 0)
		if err := w.turn(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.node.step(s.ID) // carried out; control has not seen it
		_, err := w.svc.CancelOperation(t.Context(), w.p, Request{}, res.Operation.ID)
		wantCode(t, err, "operation_not_cancellable")
		w.settle(t)
	})
	t.Run("stop and delete", func(t *testing.T) {
		for _, v := range []sandbox.Verb{sandbox.Stop, sandbox.Delete} {
			res := w.verb(t, s.ID, v, 0)
			_, err := w.svc.CancelOperation(t.Context(), w.p, Request{}, res.Operation.ID)
			wantCode(t, err, "operation_not_cancellable")
		}
		_, err := w.svc.CancelOperation(t.Context(), w.p, Request{}, "nonsense")
		wantCode(t, err, "operation_not_found")
	})
}

func TestOperationsEndAndDelayIsSaid(t *testing.T) {
	w, h := stepped(t)
	w.node.down = true
	res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{Timeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	_ = w.turn(t.Context())
	op := w.op(t, res.Operation.ID)
	if op.State.Final() || !strings.Contains(op.WaitingFor, "node") {
		t.Errorf("while the node is away: %+v", op)
	}
	h.add(3 * time.Minute)
	_ = w.turn(t.Context())
	op = w.op(t, res.Operation.ID)
	if op.State != operation.Failed || op.Problem.Code != "operation_timeout" || !strings.Contains(op.Problem.Why, "node") || op.WaitingFor != "" {
		t.Fatalf("past its deadline: %+v %+v", op, op.Problem)
	}
	// Delayed is not failed: what was wanted is converged to later.
	w.node.down = false
	w.settle(t)
	if got := w.get(t, res.Sandbox.ID); got.Observed != sandbox.Running {
		t.Errorf("later it is %s", got.Observed)
	}
	// Room on the node: waited for, and said.
	w.node.onApply = func(a node.Assignment) error { return fault.New(fault.Exhausted, "capacity", "full") }
	stop := w.verb(t, res.Sandbox.ID, sandbox.Stop, 0)
	_ = w.turn(t.Context())
	if op := w.op(t, stop.Operation.ID); op.State.Final() || !strings.Contains(op.WaitingFor, "room") {
		t.Errorf("without room: %+v", op)
	}
	w.node.onApply = nil
	w.settle(t)
}

func TestDeleteGoesOnWhenTheNodeGivesUp(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	tries := 0
	w.node.fail = func(a node.Assignment) (string, bool) { tries++; return "stuck", tries < 4 }
	res := w.verb(t, s.ID, sandbox.Delete, 0)
	w.settle(t)
	if got := w.get(t, s.ID); got.DeletedAt.IsZero() || w.op(t, res.Operation.ID).State != operation.Succeeded || tries != 4 {
		t.Errorf("after %d tries: %+v", tries, got)
	}
}

func TestMachineLost(t *testing.T) {
	live(t, 10*time.Millisecond, func(t *testing.T, w *world) {
		res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{Wait: time.Minute}, CreateSandbox{Timeout: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		id := res.Sandbox.ID
		w.node.mu.Lock()
		delete(w.node.machines, id)
		w.node.mu.Unlock()
		time.Sleep(2 * time.Minute) // a sweep passes
		if got := w.get(t, id); got.Observed != sandbox.Failed || got.Problem.Code != "machine_lost" {
			t.Fatalf("%+v", got)
		}
		// Starting it cannot pass off an empty machine as the old one.
		start := w.verb(t, id, sandbox.Start, time.Minute)
		if op := start.Operation; op.State != operation.Failed || op.Problem.Code != "machine_lost" || w.node.state(id) != "" {
			t.Errorf("start: %+v; the node has %q", op, w.node.state(id))
		}
		if del := w.verb(t, id, sandbox.Delete, time.Minute); del.Operation.State != operation.Succeeded {
			t.Errorf("delete: %+v", del.Operation)
		}
	})
}

func TestSweepFindsWhatNobodyReported(t *testing.T) {
	live(t, 10*time.Millisecond, func(t *testing.T, w *world) {
		res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{Wait: time.Minute}, CreateSandbox{Timeout: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		w.node.mu.Lock()
		w.node.machines[res.Sandbox.ID].state = sandbox.Paused // without an outcome
		w.node.mu.Unlock()
		time.Sleep(2 * time.Minute)
		if got := w.get(t, res.Sandbox.ID); got.Observed != sandbox.Running || w.node.state(res.Sandbox.ID) != sandbox.Running {
			t.Errorf("row %s, node %s", got.Observed, w.node.state(res.Sandbox.ID))
		}
	})
}

func TestOrphansAndSweep(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	ghost := sandbox.NewID()
	w.node.machines[ghost] = &machine{state: sandbox.Running, converged: true, a: node.Assignment{ID: ghost, Generation: 7, Desired: sandbox.Running}}
	ctx := t.Context()
	if err := w.svc.rec.orphans(ctx); err != nil {
		t.Fatal(err)
	}
	if w.node.state(ghost) != sandbox.Running {
		t.Error("seen once, and ended: it may be one that is being made")
	}
	if err := w.svc.rec.orphans(ctx); err != nil {
		t.Fatal(err)
	}
	w.node.step(ghost)
	if w.node.state(ghost) != sandbox.Deleted || w.node.state(s.ID) != sandbox.Running {
		t.Errorf("ghost %s, living %s", w.node.state(ghost), w.node.state(s.ID))
	}
}

func TestLateReportsChangeNothing(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	w.verb(t, s.ID, sandbox.Pause, 0)
	w.settle(t)
	before := w.get(t, s.ID)
	ref := store.Ref{Tenant: w.p.Tenant, ID: s.ID}
	for _, late := range []node.Observation{
		{ID: s.ID, Generation: 1, State: sandbox.Creating},
		{ID: s.ID, Generation: 1, State: sandbox.Running, Converged: true},
		{ID: s.ID, Generation: 1, State: sandbox.Failed, Converged: true},
		{ID: s.ID, Generation: before.Generation, State: sandbox.Pausing},
	} {
		if _, err := w.svc.rec.record(t.Context(), ref, late); err != nil {
			t.Fatal(err)
		}
		if got := w.get(t, s.ID); got.Observed != before.Observed || got.Generation != before.Generation || got.Converged != before.Converged || got.Desired != before.Desired {
			t.Errorf("%+v made it %+v", late, got)
		}
	}
	// A delete is final whatever comes late.
	w.verb(t, s.ID, sandbox.Delete, 0)
	w.settle(t)
	gone := w.get(t, s.ID)
	if _, err := w.svc.rec.record(t.Context(), ref, node.Observation{ID: s.ID, Generation: gone.Generation, State: sandbox.Running, Converged: true}); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.rec.absorb(t.Context(), node.Outcome{Seq: 99, ID: s.ID, Generation: gone.Generation, State: sandbox.Stopped, Trigger: "expired"}); err != nil {
		t.Fatal(err)
	}
	if got := w.get(t, s.ID); got.DeletedAt.IsZero() || got.Observed != sandbox.Deleted || got.Generation != gone.Generation {
		t.Errorf("it came back: %+v", got)
	}
}

func TestAnOutcomeIsAbsorbedOnce(t *testing.T) {
	w, h := stepped(t)
	s := w.up(t, CreateSandbox{Timeout: 5 * time.Second, OnTimeout: sandbox.ActionPause})
	h.add(6 * time.Second)
	w.node.expire()
	o := w.node.outcomes[0]
	if err := w.svc.rec.absorb(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	wake := w.verb(t, s.ID, sandbox.Wake, 0)
	if err := w.svc.rec.absorb(t.Context(), o); err != nil { // told again, after the wake
		t.Fatal(err)
	}
	w.settle(t)
	if op, got := w.op(t, wake.Operation.ID), w.get(t, s.ID); op.State != operation.Succeeded || got.Observed != sandbox.Running {
		t.Errorf("wake: %+v, sandbox %s", op, got.Observed)
	}
}

func TestRequestsThatCrossAMove(t *testing.T) {
	for _, c := range []struct {
		to      sandbox.State
		trigger string
		verb    sandbox.Verb
		want    sandbox.State
		code    string // of the operation's problem; "" is success
	}{
		{sandbox.Paused, "idle", sandbox.Wake, sandbox.Running, ""},
		{sandbox.Paused, "idle", sandbox.Stop, sandbox.Stopped, ""},
		{sandbox.Paused, "expired", sandbox.Stop, sandbox.Stopped, ""},
		{sandbox.Stopped, "expired", sandbox.Delete, sandbox.Deleted, ""},
		{sandbox.Stopped, "expired", sandbox.Pause, sandbox.Stopped, "sandbox_expired"},
		{sandbox.Failed, "machine_died", sandbox.Pause, sandbox.Failed, "machine_died"},
		{sandbox.Failed, "machine_died", sandbox.Stop, sandbox.Stopped, ""},
		{sandbox.Quarantined, "limit", sandbox.Stop, sandbox.Quarantined, "limit_exceeded"},
		{sandbox.Quarantined, "limit", sandbox.Delete, sandbox.Deleted, ""},
	} {
		t.Run(string(c.to)+" and "+string(c.verb), func(t *testing.T) {
			w, _ := stepped(t)
			s := w.up(t, CreateSandbox{})
			w.node.move(s.ID, c.to, c.trigger)
			w.node.down = true
			var res Result
			var err error
			if c.verb == sandbox.Delete {
				res = w.verb(t, s.ID, c.verb, 0)
			} else {
				l := Lifecycle{Verb: c.verb}
				if c.verb == sandbox.Wake { // so that it is not answered at once: it changes policy
					l.Timeout = time.Hour
				}
				if res, err = w.svc.Lifecycle(t.Context(), w.p, Request{}, string(s.ID), l); err != nil {
					t.Fatal(err)
				}
			}
			w.node.down = false
			w.settle(t)
			got, op := w.get(t, s.ID), w.op(t, res.Operation.ID)
			if got.Observed != c.want || w.node.state(s.ID) != c.want {
				t.Errorf("is %s, node has %s, want %s", got.Observed, w.node.state(s.ID), c.want)
			}
			switch {
			case c.code == "" && op.State != operation.Succeeded:
				t.Errorf("ended as %+v %+v", op, op.Problem)
			case c.code != "" && (op.State != operation.Failed || op.Problem.Code != c.code):
				t.Errorf("ended as %+v %+v", op, op.Problem)
			}
		})
	}
}

func TestDeleteEndsOthersAtOnce(t *testing.T) {
	w, h := stepped(t)
	s := w.up(t, CreateSandbox{Timeout: time.Hour})
	w.node.down = true
	pause := w.verb(t, s.ID, sandbox.Pause, 0)
	h.add(time.Second)
	del := w.verb(t, s.ID, sandbox.Delete, 0)
	if op := w.op(t, pause.Operation.ID); op.State != operation.Cancelled || op.Superseded != del.Operation.ID {
		t.Errorf("pause: %+v", op)
	}
	w.node.down = false
	var deadline time.Time
	w.node.onApply = func(a node.Assignment) error { deadline = a.Deadline; return nil }
	w.settle(t)
	if !deadline.Equal(del.Operation.DeadlineAt) {
		t.Errorf("the node may try until %s, the operation lasts until %s", deadline, del.Operation.DeadlineAt)
	}
}

func TestARequestSeesWhatTheNodeDid(t *testing.T) {
	w, h := stepped(t)
	s := w.up(t, CreateSandbox{Timeout: 5 * time.Second, OnTimeout: sandbox.ActionPause})
	h.add(6 * time.Second)
	w.node.expire() // nobody has absorbed it
	wake := w.verb(t, s.ID, sandbox.Wake, 0)
	w.settle(t)
	if op, got := w.op(t, wake.Operation.ID), w.get(t, s.ID); op.State != operation.Succeeded || got.Observed != sandbox.Running || !got.Policy.ExpiresAt.After(h.Now()) {
		t.Errorf("wake: %+v %+v; %s until %s", op, op.Problem, got.Observed, got.Policy.ExpiresAt)
	}
}

func TestWhatTheNodeDeletedStaysDeleted(t *testing.T) { // also when its outcome was lost
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	w.verb(t, s.ID, sandbox.Stop, 0) // a later generation does not help it
	w.node.machines[s.ID].state = sandbox.Deleted
	w.node.onApply = func(a node.Assignment) error {
		if a.Desired != sandbox.Deleted {
			return node.ErrStale
		}
		return nil
	}
	if _, err := w.svc.rec.reconcile(t.Context(), store.Ref{Tenant: w.p.Tenant, ID: s.ID}, nil); err != nil {
		t.Fatal(err)
	}
	w.settle(t)
	if got := w.get(t, s.ID); got.DeletedAt.IsZero() || w.node.state(s.ID) != sandbox.Deleted {
		t.Errorf("%+v", got)
	}
}

func TestTheNodeIsAhead(t *testing.T) { // the store was set back
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	w.node.machines[s.ID].a.Generation = 40
	w.verb(t, s.ID, sandbox.Pause, 0)
	w.settle(t)
	if got := w.get(t, s.ID); got.Observed != sandbox.Paused || got.Generation <= 40 || w.node.state(s.ID) != sandbox.Paused {
		t.Errorf("%+v", got)
	}
}

func TestTwoControlProcesses(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir, clock.System{})
		w.node.delay = 20 * time.Millisecond
		t.Cleanup(func() { w.sound(t); w.close(t) })
		w.running(t)
		other := *w
		st, err := sqlite.Open(filepath.Join(dir, "control.db"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { other.close(t) })
		other.store, other.conf.Store = st, st
		other.restart(t)
		other.running(t)
		var all sync.WaitGroup
		for i := range 6 {
			all.Go(func() {
				a, b := w, &other
				if i%2 == 1 {
					a, b = b, a
				}
				res, err := a.svc.CreateSandbox(context.Background(), a.p, Request{Wait: time.Minute}, CreateSandbox{Timeout: time.Hour})
				if err != nil || res.Operation.State != operation.Succeeded {
					t.Errorf("create: %+v, %v", res.Operation, err)
					return
				}
				for _, v := range []sandbox.Verb{sandbox.Pause, sandbox.Wake, sandbox.Stop, sandbox.Start, sandbox.Delete} {
					a, b = b, a
					if res := a.verb(t, res.Sandbox.ID, v, time.Minute); res.Operation.State != operation.Succeeded {
						t.Errorf("%s: %+v", v, res.Operation)
					}
				}
			})
		}
		all.Wait()
	})
}

// TestCrashAtEveryFailpoint: whatever is cut off where, a later process ends it.
func TestCrashAtEveryFailpoint(t *testing.T) {
	for _, fp := range failpoints {
		for n := range 3 {
			t.Run(fp, func(t *testing.T) {
				w, h := stepped(t)
				s := w.up(t, CreateSandbox{Timeout: 10 * time.Second, OnTimeout: sandbox.ActionPause})
				disarm, err := failpoint.Arm(fp, []string{"error(1)", "error(2)", "error(5)"}[n])
				if err != nil {
					t.Fatal(err)
				}
				defer disarm()
				h.add(11 * time.Second)
				w.node.expire()
				key := 0
				for range 7 { // the client repeats; control dies each time
					_, err := w.svc.Lifecycle(t.Context(), w.p, request("key", "wake"), string(s.ID), Lifecycle{Verb: sandbox.Wake})
					_ = w.turn(t.Context())
					w.node.step(s.ID)
					w.restart(t)
					if err == nil {
						key++
					}
				}
				w.settle(t)
				if key == 0 {
					t.Error("no repeat was ever answered")
				}
				ops, err := w.svc.ListOperations(t.Context(), w.p, string(s.ID), "", 0)
				if err != nil || len(ops.Items) != 2 {
					t.Errorf("%d operations of a create and one wake, %v", len(ops.Items), err)
				}
				if got := w.get(t, s.ID); got.Observed != got.Desired || w.node.state(s.ID) != got.Observed {
					t.Errorf("wants %s, is %s, node %s", got.Desired, got.Observed, w.node.state(s.ID))
				}
			})
		}
	}
}

func TestEveryMutationIsAudited(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	w.verb(t, s.ID, sandbox.Pause, 0)
	if _, err := w.svc.PatchSandbox(t.Context(), w.p, Request{ID: "r2"}, string(s.ID), PatchSandbox{Metadata: ptr(map[string]string{})}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.svc.MintDataToken(t.Context(), w.p, Request{ID: "r3"}, string(s.ID), []string{"exec"}, 0); err == nil {
		t.Error("a token of one that pauses")
	}
	w.settle(t)
	w.verb(t, s.ID, sandbox.Delete, 0)
	w.settle(t)
	page, err := w.svc.ListAudit(t.Context(), w.p, "", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range slices.Backward(page.Items) {
		got = append(got, r.Entry.Action+" "+r.Entry.Actor)
		if r.Entry.Target != string(s.ID) {
			t.Errorf("target %q", r.Entry.Target)
		}
	}
	want := []string{"sandbox.create key1", "sandbox.pause key1", "sandbox.update key1", "sandbox.delete key1", "sandbox.deleted reconciler"}
	if !slices.Equal(got, want) {
		t.Errorf("audit has %q, want %q", got, want)
	}
}

func TestKeys(t *testing.T) {
	w, _ := stepped(t)
	a, err := auth.New(auth.Config{Store: w.store, HashKey: w.conf.HashKey, Clock: w.clock})
	if err != nil {
		t.Fatal(err)
	}
	w.conf.Keys = a
	w.restart(t)
	if _, err := a.FirstKey(t.Context(), t.TempDir()); err != nil {
		t.Fatal(err)
	}
	keys, err := w.store.Keys(t.Context(), w.p.Tenant, "", 0)
	if err != nil || len(keys.Items) != 1 {
		t.Fatal(keys, err)
	}
	p := w.principal(t, "default", keys.Items[0].ID)
	req := request("k", "mint")
	c := MintKey{Name: "ci", Scopes: []string{string(auth.SandboxesRead)}, TTL: time.Hour}
	k, sec, err := w.svc.MintKey(t.Context(), p, req, c)
	if err != nil || sec.IsZero() {
		t.Fatal(k, err)
	}
	again, sec, err := w.svc.MintKey(t.Context(), p, req, c)
	if err != nil || again.ID != k.ID || !sec.IsZero() {
		t.Errorf("a repeat answers %s, secret shown: %v, %v", again.ID, !sec.IsZero(), err)
	}
	req.BodyHash = []byte("other")
	_, _, err = w.svc.MintKey(t.Context(), p, req, c)
	wantCode(t, err, "idempotency_mismatch")
	if _, err := w.svc.RevokeKey(t.Context(), p, Request{}, k.ID); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(w.node.sessions.revoked, k.ID) {
		t.Error("the key's tokens were not cut")
	}
}

func TestHealthAndMetrics(t *testing.T) {
	w, _ := stepped(t)
	w.conf.Registry = prometheus.NewRegistry()
	w.restart(t)
	w.up(t, CreateSandbox{})
	if checks, ok := w.svc.Health(t.Context()); !ok {
		t.Error(checks)
	}
	w.node.down = true
	if checks, ok := w.svc.Health(t.Context()); ok || checks["node"] == "ok" {
		t.Error(checks)
	}
	fams, err := w.conf.Registry.(*prometheus.Registry).Gather()
	if err != nil || len(fams) == 0 {
		t.Fatal(err)
	}
	var names []string
	for _, f := range fams {
		names = append(names, f.GetName())
	}
	if !slices.Contains(names, "space_control_operation_seconds") || !slices.Contains(names, "space_control_intent_seconds") {
		t.Errorf("metrics: %q", names)
	}
}
