package control

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/store"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// stepped is a world moved by hand.
func stepped(t *testing.T) (*world, *hand) {
	h := &hand{now: start}
	w := newWorld(t, t.TempDir(), h)
	t.Cleanup(func() { w.sound(t); w.close(t) })
	return w, h
}

// live runs fn in a world whose reconciler runs on virtual time; the node takes
// delay for each assignment.
func live(t *testing.T, delay time.Duration, fn func(t *testing.T, w *world)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir, clock.System{})
		w.node.delay = delay
		t.Cleanup(func() { w.sound(t); w.close(t) })
		w.running(t)
		fn(t, w)
	})
}

func ptr[T any](v T) *T { return &v }

func TestC035(t *testing.T) { // connecting never shortens life
	w, h := stepped(t)
	s := w.up(t, CreateSandbox{Timeout: 30 * time.Minute})
	before := s.Policy.ExpiresAt
	for _, v := range []sandbox.Verb{sandbox.Wake, sandbox.Start, sandbox.Resume} {
		w.verb(t, s.ID, v, 0)
	}
	if _, err := w.svc.Lifecycle(t.Context(), w.p, Request{}, string(s.ID), Lifecycle{Verb: sandbox.Wake, Timeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.svc.CreateSession(t.Context(), w.p, Request{}, string(s.ID), CreateSession{Command: session.Command{Shell: "true"}}); err != nil {
		t.Fatal(err)
	}
	w.settle(t)
	if got := w.get(t, s.ID).Policy.ExpiresAt; got.Before(before) {
		t.Errorf("end of life went from %s to %s", before, got)
	}
	// A wake may lengthen, and only an explicit patch shortens.
	if _, err := w.svc.Lifecycle(t.Context(), w.p, Request{}, string(s.ID), Lifecycle{Verb: sandbox.Wake, Timeout: time.Hour}); err != nil {
		t.Fatal(err)
	}
	if got := w.get(t, s.ID).Policy.ExpiresAt; !got.Equal(h.Now().Add(time.Hour)) {
		t.Errorf("a longer wake gives %s", got)
	}
	if _, err := w.svc.PatchSandbox(t.Context(), w.p, Request{}, string(s.ID), PatchSandbox{Timeout: ptr(time.Minute)}); err != nil {
		t.Fatal(err)
	}
	if got := w.get(t, s.ID).Policy.ExpiresAt; !got.Equal(h.Now().Add(time.Minute)) {
		t.Errorf("a patch gives %s", got)
	}
	// And a renewal never goes past the hard deadline.
	if _, err := w.svc.PatchSandbox(t.Context(), w.p, Request{}, string(s.ID), PatchSandbox{Timeout: ptr(48 * time.Hour)}); err != nil {
		t.Fatal(err)
	}
	if got := w.get(t, s.ID).Policy; !got.ExpiresAt.Equal(got.DeadlineAt) {
		t.Errorf("renewed to %s, deadline %s", got.ExpiresAt, got.DeadlineAt)
	}
}

func TestC036(t *testing.T) { // life-cycle settings survive resume
	w, h := stepped(t)
	s := w.up(t, CreateSandbox{Timeout: 30 * time.Second, OnTimeout: sandbox.ActionPause})
	for round := range 2 {
		h.add(31 * time.Second)
		w.node.expire()
		w.settle(t)
		got := w.get(t, s.ID)
		if got.Observed != sandbox.Paused || got.Desired != sandbox.Paused || got.Problem == nil || got.Problem.Code != "sandbox_expired" {
			t.Fatalf("round %d: %+v", round, got)
		}
		w.verb(t, s.ID, sandbox.Wake, 0)
		w.settle(t)
		got = w.get(t, s.ID)
		if got.Observed != sandbox.Running || got.Policy.OnExpire != sandbox.ActionPause || !got.Policy.ExpiresAt.Equal(h.Now().Add(30*time.Second)) {
			t.Fatalf("after wake %d: %+v", round, got)
		}
	}
}

func TestC037(t *testing.T) { // renewal against expiry
	// Every order of the node's expiry, the renewal and their meeting, with a
	// restart of control in between.
	for _, absorbed := range []bool{false, true} {
		for _, blind := range []bool{false, true} {
			t.Run(fmt.Sprintf("absorbed=%v,blind=%v", absorbed, blind), func(t *testing.T) {
				w, h := stepped(t)
				s := w.up(t, CreateSandbox{Timeout: 5 * time.Second, OnTimeout: sandbox.ActionStop})
				h.add(5 * time.Second)
				w.node.expire()
				if absorbed {
					if err := w.turn(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				w.node.down = blind // the request cannot see what the node did
				res, err := w.svc.PatchSandbox(t.Context(), w.p, Request{}, string(s.ID), PatchSandbox{Timeout: ptr(time.Minute)})
				if err != nil {
					t.Fatal(err)
				}
				w.node.down = false
				w.restart(t)
				w.settle(t)
				got, op := w.get(t, s.ID), w.op(t, res.Operation.ID)
				if got.Observed != sandbox.Stopped || w.node.state(s.ID) != sandbox.Stopped {
					t.Errorf("expired, then renewed: is %s, node has %s", got.Observed, w.node.state(s.ID))
				}
				if op.State != operation.Succeeded {
					t.Errorf("the renewal ended as %+v", op)
				}
			})
		}
	}
	t.Run("many at once", func(t *testing.T) {
		live(t, 5*time.Millisecond, func(t *testing.T, w *world) {
			stop := make(chan struct{})
			var ticks sync.WaitGroup
			ticks.Go(func() { // the node's own timers
				for {
					select {
					case <-stop:
						return
					case <-time.After(3 * time.Millisecond):
						w.node.expire()
					}
				}
			})
			var all sync.WaitGroup
			for i := range 60 {
				all.Go(func() {
					res, err := w.svc.CreateSandbox(context.Background(), w.p, Request{Wait: time.Minute}, CreateSandbox{Timeout: 5 * time.Second, OnTimeout: sandbox.ActionStop})
					if err != nil {
						t.Error(err)
						return
					}
					time.Sleep(time.Until(res.Sandbox.Policy.ExpiresAt) + time.Duration(i-30)*1500*time.Microsecond)
					renewed, err := w.svc.PatchSandbox(context.Background(), w.p, Request{Wait: time.Minute}, string(res.Sandbox.ID), PatchSandbox{Timeout: ptr(time.Hour)})
					if err != nil || renewed.Operation.State != operation.Succeeded {
						t.Errorf("renewal: %+v, %v", renewed.Operation, err)
					}
					time.Sleep(10 * time.Second)
					got := w.get(t, res.Sandbox.ID)
					if got.Observed != got.Desired || w.node.state(got.ID) != got.Observed ||
						got.Observed != sandbox.Running && (got.Observed != sandbox.Stopped || got.Problem.Code != "sandbox_expired") {
						t.Errorf("renewed at %d: row %s, node %s, %+v", i, got.Observed, w.node.state(got.ID), got.Problem)
					}
				})
			}
			all.Wait()
			close(stop)
			ticks.Wait()
		})
	})
	t.Run("renewed in time", func(t *testing.T) {
		w, h := stepped(t)
		s := w.up(t, CreateSandbox{Timeout: 5 * time.Second})
		h.add(4900 * time.Millisecond)
		if _, err := w.svc.PatchSandbox(t.Context(), w.p, Request{}, string(s.ID), PatchSandbox{Timeout: ptr(time.Minute)}); err != nil {
			t.Fatal(err)
		}
		w.settle(t)
		h.add(10 * time.Second)
		w.node.expire()
		w.settle(t)
		if got := w.get(t, s.ID); got.Observed != sandbox.Running {
			t.Errorf("renewed, yet %s", got.Observed)
		}
	})
	for action, want := range map[sandbox.Action]sandbox.State{
		sandbox.ActionDelete: sandbox.Deleted, sandbox.ActionStop: sandbox.Stopped, sandbox.ActionPause: sandbox.Paused,
	} {
		t.Run("a wake that crossed "+string(action), func(t *testing.T) {
			w, h := stepped(t)
			s := w.up(t, CreateSandbox{Timeout: 5 * time.Second, OnTimeout: action})
			h.add(5 * time.Second)
			w.node.expire()
			w.node.down = true
			res := w.verb(t, s.ID, sandbox.Wake, 0)
			w.node.down = false
			w.settle(t)
			if got := w.get(t, s.ID); got.Observed != want || w.node.state(s.ID) != want {
				t.Errorf("an expired sandbox is %s", got.Observed)
			}
			if op := w.op(t, res.Operation.ID); op.State != operation.Failed || op.Problem.Code != "sandbox_expired" {
				t.Errorf("the wake ended as %+v", op)
			}
		})
	}
}

func TestC040(t *testing.T) { // pause then resume at once
	live(t, 30*time.Millisecond, func(t *testing.T, w *world) {
		var ids []sandbox.ID
		for range 4 {
			res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{Wait: time.Minute}, CreateSandbox{Timeout: time.Hour})
			if err != nil || res.Operation.State != operation.Succeeded {
				t.Fatal(err, res.Operation)
			}
			ids = append(ids, res.Sandbox.ID)
		}
		var all sync.WaitGroup
		for i, id := range ids {
			all.Go(func() {
				for round := range 10 {
					pause := w.verb(t, id, sandbox.Pause, 0)
					time.Sleep(time.Duration(i*round) * 5 * time.Millisecond)
					resume := w.verb(t, id, sandbox.Resume, time.Minute)
					if resume.Operation.State != operation.Succeeded || resume.Sandbox.Observed != sandbox.Running {
						t.Errorf("resume: %+v of %s", resume.Operation, resume.Sandbox.Observed)
					}
					switch op := w.op(t, pause.Operation.ID); op.State {
					case operation.Succeeded:
					case operation.Cancelled:
						if op.Superseded != resume.Operation.ID {
							t.Errorf("overtaken by %q", op.Superseded)
						}
					default:
						t.Errorf("pause: %+v", op)
					}
					out, err := w.svc.Exec(t.Context(), w.p, Request{}, string(id), Exec{Command: session.Command{Shell: "echo $((6*7))"}})
					if err != nil || string(out.Stdout) != "42\n" {
						t.Errorf("exec: %q, %v", out.Stdout, err)
					}
				}
				if res := w.verb(t, id, sandbox.Delete, time.Minute); res.Operation.State != operation.Succeeded {
					t.Errorf("delete: %+v", res.Operation)
				}
			})
		}
		all.Wait()
	})
	t.Run("reached before it was overtaken", func(t *testing.T) {
		w, _ := stepped(t)
		s := w.up(t, CreateSandbox{})
		pause := w.verb(t, s.ID, sandbox.Pause, 0)
		if err := w.turn(t.Context()); err != nil { // applied
			t.Fatal(err)
		}
		w.node.step(s.ID) // carried out, not yet seen
		resume := w.verb(t, s.ID, sandbox.Resume, 0)
		w.settle(t)
		if a, b := w.op(t, pause.Operation.ID), w.op(t, resume.Operation.ID); a.State != operation.Succeeded || b.State != operation.Succeeded {
			t.Errorf("pause %+v, resume %+v", a, b)
		}
	})
	t.Run("overtaken", func(t *testing.T) {
		w, _ := stepped(t)
		s := w.up(t, CreateSandbox{})
		pause := w.verb(t, s.ID, sandbox.Pause, 0)
		resume := w.verb(t, s.ID, sandbox.Resume, 0)
		w.settle(t)
		a, b := w.op(t, pause.Operation.ID), w.op(t, resume.Operation.ID)
		if a.State != operation.Cancelled || a.Superseded != b.ID || b.State != operation.Succeeded {
			t.Errorf("pause %+v, resume %+v", a, b)
		}
	})
}

func TestC041(t *testing.T) { // delete wins
	live(t, 100*time.Millisecond, func(t *testing.T, w *world) {
		for i := range 20 {
			res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{Wait: time.Minute}, CreateSandbox{Timeout: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			id := res.Sandbox.ID
			w.verb(t, id, sandbox.Pause, time.Minute)
			resume := w.verb(t, id, sandbox.Resume, 0)
			time.Sleep(time.Duration(i) * 10 * time.Millisecond)
			del := w.verb(t, id, sandbox.Delete, time.Minute)
			if del.Operation.State != operation.Succeeded {
				t.Fatalf("delete: %+v", del.Operation)
			}
			_, err = w.svc.GetSandbox(t.Context(), w.p, string(id))
			wantCode(t, err, "sandbox_deleted")
			if st := w.node.state(id); st != sandbox.Deleted {
				t.Errorf("the node has it %s", st)
			}
			switch op := w.op(t, resume.Operation.ID); op.State {
			case operation.Succeeded: // it was done before the delete came
			case operation.Cancelled:
				if op.Superseded != del.Operation.ID {
					t.Errorf("overtaken by %q", op.Superseded)
				}
			default:
				t.Errorf("resume: %+v", op)
			}
			_, err = w.ask(id, sandbox.Resume, 0)
			wantCode(t, err, "sandbox_deleted")
			if again := w.verb(t, id, sandbox.Delete, 0); again.Operation.State != operation.Succeeded {
				t.Errorf("a second delete: %+v", again.Operation)
			}
		}
	})
}

func TestC055(t *testing.T) { // calls during a transition
	live(t, 400*time.Millisecond, func(t *testing.T, w *world) {
		res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{Timeout: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		id := string(res.Sandbox.ID)
		// While it is being made: waited for.
		if _, err := w.svc.Exec(t.Context(), w.p, Request{}, id, Exec{Command: session.Command{Shell: "true"}}); err != nil {
			t.Fatalf("exec of a sandbox that is being made: %v", err)
		}
		stop := make(chan struct{})
		var all sync.WaitGroup
		all.Go(func() {
			defer close(stop)
			for range 5 {
				w.verb(t, res.Sandbox.ID, sandbox.Pause, time.Minute)
				time.Sleep(2 * time.Second)
				w.verb(t, res.Sandbox.ID, sandbox.Resume, time.Minute)
				time.Sleep(2 * time.Second)
			}
		})
		served, refused := 0, 0
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(70 * time.Millisecond):
				}
				_, err := w.svc.Exec(t.Context(), w.p, Request{}, id, Exec{Command: session.Command{Shell: "true"}})
				if err == nil {
					served++
				} else if f := fault.Of(err); f.Retryable && f.Remedy+f.What != "" {
					refused++
				} else {
					t.Errorf("a refusal that is not retryable: %v", err)
				}
			}
		})
		all.Wait()
		if served == 0 || refused == 0 {
			t.Errorf("served %d, refused %d: the test has seen one side only", served, refused)
		}
		// Bounded: a machine that does not come.
		w.node.mu.Lock()
		w.node.down = true
		w.node.mu.Unlock()
		late, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{})
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		_, err = w.svc.Exec(t.Context(), w.p, Request{}, string(late.Sandbox.ID), Exec{Command: session.Command{Shell: "true"}})
		if !fault.Of(err).Retryable {
			t.Errorf("refusal: %v", err)
		}
		wantCode(t, err, "sandbox_in_transition")
		if took := time.Since(begun); took < 29*time.Second || took > 31*time.Second {
			t.Errorf("after %s: %v", took, err)
		}
	})
}

func TestC060(t *testing.T) { // create can be retried
	w, _ := stepped(t)
	c := CreateSandbox{Name: "once"}
	first, err := w.svc.CreateSandbox(t.Context(), w.p, request("k", "body"), c)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if i == 2 {
			w.restart(t)
		}
		if i == 3 {
			w.settle(t)
			w.node.capacity = fault.New(fault.Exhausted, "capacity", "full")
		}
		again, err := w.svc.CreateSandbox(t.Context(), w.p, request("k", "body"), c)
		if err != nil || again.Sandbox.ID != first.Sandbox.ID || again.Operation.ID != first.Operation.ID || !again.Replayed {
			t.Fatalf("repeat %d: %+v, %v", i, again, err)
		}
	}
	_, err = w.svc.CreateSandbox(t.Context(), w.p, request("k", "other"), c)
	wantCode(t, err, "idempotency_mismatch")
	if !fault.IsClass(err, fault.Unprocessable) {
		t.Errorf("class of %v", err)
	}
	// Another principal or route is another request; one that may not is refused anew.
	w.node.capacity = nil
	other, err := w.svc.CreateSandbox(t.Context(), w.principal(t, "default", "key2"), request("k", "body"), CreateSandbox{})
	if err != nil || other.Sandbox.ID == first.Sandbox.ID {
		t.Errorf("another principal got %+v, %v", other, err)
	}
	_, err = w.svc.CreateSandbox(t.Context(), w.principal(t, "default", "key1", auth.SandboxesRead), request("k", "body"), c)
	if !fault.IsClass(err, fault.Denied) {
		t.Errorf("a replay without the scope: %v", err)
	}
	// Two clients at once: one sandbox, one answer.
	var all sync.WaitGroup
	ids := make([]sandbox.ID, 8)
	var meet sync.WaitGroup // all have looked for an earlier request before one is recorded
	meet.Add(len(ids))
	w.node.onAdmit = func() { meet.Done(); meet.Wait() }
	for i := range ids {
		all.Go(func() {
			res, err := w.svc.CreateSandbox(context.Background(), w.p, request("both", "b"), CreateSandbox{})
			if err != nil {
				t.Error(err)
			}
			ids[i] = res.Sandbox.ID
		})
	}
	all.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("two sandboxes of one key: %v", ids)
		}
	}
	page, err := w.svc.ListSandboxes(t.Context(), w.p, store.Filter{})
	if err != nil || len(page.Items) != 3 {
		t.Errorf("%d sandboxes, %v; want 3", len(page.Items), err)
	}
}

func TestC061(t *testing.T) { // a client leaving does not leak
	live(t, 200*time.Millisecond, func(t *testing.T, w *world) {
		var all sync.WaitGroup
		for i := range 40 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*10*time.Millisecond)
				defer cancel()
				_, _ = w.svc.CreateSandbox(ctx, w.p, Request{Wait: time.Minute}, CreateSandbox{Timeout: time.Hour})
			})
		}
		all.Wait()
		time.Sleep(10 * time.Second)
		page, err := w.svc.ListSandboxes(t.Context(), w.p, store.Filter{Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		listed := map[sandbox.ID]bool{}
		for _, s := range page.Items {
			listed[s.ID] = true
			if s.Observed != sandbox.Running || s.Policy.ExpiresAt.IsZero() {
				t.Errorf("%s is %s until %s", s.ID, s.Observed, s.Policy.ExpiresAt)
			}
		}
		known, _ := w.node.Known(t.Context())
		for _, id := range known {
			if !listed[id] {
				t.Errorf("the node has %s, the list does not", id)
			}
		}
		if len(known) != len(listed) || len(known) == 0 {
			t.Errorf("node %d, list %d", len(known), len(listed))
		}
	})
}

func TestC062(t *testing.T) { // pages cover the whole list
	w, h := stepped(t)
	want := map[sandbox.ID]bool{}
	for range 25 {
		h.add(time.Millisecond)
		want[w.create(t, CreateSandbox{Metadata: map[string]string{"a": "1"}}).ID] = true
	}
	seen := map[sandbox.ID]int{}
	f := store.Filter{Limit: 10}
	for {
		page, err := w.svc.ListSandboxes(t.Context(), w.p, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range page.Items {
			seen[s.ID]++
		}
		h.add(time.Millisecond)
		w.verb(t, w.create(t, CreateSandbox{}).ID, sandbox.Delete, 0)
		w.settle(t)
		if f.Cursor = page.Next; f.Cursor == "" {
			break
		}
	}
	for id := range want {
		if seen[id] != 1 {
			t.Errorf("%s was seen %d times", id, seen[id])
		}
	}
	_, err := w.svc.ListSandboxes(t.Context(), w.p, store.Filter{Cursor: "nonsense"})
	wantCode(t, err, "bad_cursor")
	_, err = w.svc.ListOperations(t.Context(), w.p, "", "nonsense", 0)
	wantCode(t, err, "bad_cursor")
	_, err = w.svc.ListSandboxes(t.Context(), w.p, store.Filter{Limit: 5000})
	wantCode(t, err, "invalid_limit")
}

func TestC063(t *testing.T) { // a filter never widens
	w, _ := stepped(t)
	w.create(t, CreateSandbox{Metadata: map[string]string{"team": "red"}})
	w.create(t, CreateSandbox{Metadata: map[string]string{"team": "blue"}})
	for name, c := range map[string]struct {
		f    store.Filter
		want int
		code string
	}{
		"match":         {f: store.Filter{Metadata: map[string]string{"team": "red"}}, want: 1},
		"unknown value": {f: store.Filter{Metadata: map[string]string{"team": "green"}}},
		"unknown key":   {f: store.Filter{Metadata: map[string]string{"squad": "red"}}},
		"malformed":     {f: store.Filter{Metadata: map[string]string{"team": "\xff"}}, code: "invalid_pair"},
		"empty key":     {f: store.Filter{Metadata: map[string]string{"": "red"}}, code: "invalid_pair"},
		"no word":       {f: store.Filter{States: []sandbox.State{"sleepy"}}, code: "invalid_state"},
		"nobody there":  {f: store.Filter{States: []sandbox.State{sandbox.Paused}}},
	} {
		page, err := w.svc.ListSandboxes(t.Context(), w.p, c.f)
		if c.code != "" {
			wantCode(t, err, c.code)
		} else if err != nil || len(page.Items) != c.want {
			t.Errorf("%s: %d items, %v; want %d", name, len(page.Items), err, c.want)
		}
	}
}

func TestC067(t *testing.T) { // failures give resources back
	w, _ := stepped(t)
	w.conf.Limits.MaxSandboxes = 5
	w.restart(t)
	// Phases: refused at apply, failed at the node, lost answer then failed.
	var failed []Result
	for i := range 5 {
		w.node.onApply, w.node.fail, w.node.loseReply = nil, nil, nil
		phase := i % 3
		switch phase {
		case 0:
			w.node.onApply = func(a node.Assignment) error {
				if a.Desired == sandbox.Running {
					return fault.New(fault.Conflict, "template_broken", "cannot be mounted")
				}
				return nil
			}
		case 2:
			lost := false
			w.node.loseReply = func(node.Assignment) bool { lost = !lost; return lost }
			fallthrough
		case 1:
			w.node.fail = func(a node.Assignment) (string, bool) { return "boot_failed", a.Desired == sandbox.Running }
		}
		res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{Name: "same"})
		if err != nil {
			t.Fatalf("create %d: %v", i, err)
		}
		if i == 3 {
			w.restart(t)
		}
		w.settle(t)
		failed = append(failed, res)
	}
	w.node.onApply, w.node.fail, w.node.loseReply = nil, nil, nil
	for i, res := range failed {
		if op := w.op(t, res.Operation.ID); op.State != operation.Failed || op.Problem == nil || op.Problem.Code != []string{"template_broken", "boot_failed"}[min(i%3, 1)] {
			t.Errorf("failed create %d: %+v %+v", i, op, op.Problem)
		}
	}
	for range 5 {
		w.up(t, CreateSandbox{})
	}
	_, err := w.svc.CreateSandbox(t.Context(), w.p, Request{}, CreateSandbox{})
	wantCode(t, err, "quota_exceeded")
	if n := w.node.living(); n != 5 {
		t.Errorf("the node holds %d machines", n)
	}
}

func TestC069(t *testing.T) { // tenants cannot reach each other
	w, _ := stepped(t)
	a := w.up(t, CreateSandbox{Name: "mine"})
	res := w.verb(t, a.ID, sandbox.Pause, 0)
	ses := string(sandbox.NewSessionID(a.ID))
	b := w.principal(t, "other", "keyB")
	ctx := t.Context()
	unknown, noOp := string(sandbox.NewID()), operation.NewID()
	noSes := string(sandbox.NewSessionID(sandbox.ID(unknown)))
	cmd := session.Command{Shell: "true"}
	// Each call with A's id and with an unknown one: the same answer.
	for name, call := range map[string]func(id, op, ses string) error{
		"get": func(id, _, _ string) error { _, err := w.svc.GetSandbox(ctx, b, id); return err },
		"patch": func(id, _, _ string) error {
			_, err := w.svc.PatchSandbox(ctx, b, Request{}, id, PatchSandbox{Name: ptr("x")})
			return err
		},
		"delete": func(id, _, _ string) error { _, err := w.svc.DeleteSandbox(ctx, b, Request{}, id); return err },
		"wake": func(id, _, _ string) error {
			_, err := w.svc.Lifecycle(ctx, b, Request{}, id, Lifecycle{Verb: sandbox.Wake})
			return err
		},
		"release":    func(id, _, _ string) error { _, err := w.svc.Release(ctx, b, Request{}, id); return err },
		"stats":      func(id, _, _ string) error { _, err := w.svc.SandboxStats(ctx, b, id); return err },
		"operations": func(id, _, _ string) error { _, err := w.svc.ListOperations(ctx, b, id, "", 0); return err },
		"operation":  func(_, op, _ string) error { _, err := w.svc.GetOperation(ctx, b, op, 0); return err },
		"cancel":     func(_, op, _ string) error { _, err := w.svc.CancelOperation(ctx, b, Request{}, op); return err },
		"exec": func(id, _, _ string) error {
			_, err := w.svc.Exec(ctx, b, Request{}, id, Exec{Command: cmd})
			return err
		},
		"session": func(id, _, _ string) error {
			_, _, err := w.svc.CreateSession(ctx, b, Request{}, id, CreateSession{Command: cmd})
			return err
		},
		"sessions": func(id, _, _ string) error { _, err := w.svc.ListSessions(ctx, b, id, "", 0); return err },
		"token": func(id, _, _ string) error {
			_, err := w.svc.MintDataToken(ctx, b, Request{}, id, []string{"exec"}, 0)
			return err
		},
		"revoke":        func(id, _, _ string) error { return w.svc.RevokeDataTokens(ctx, b, Request{}, id) },
		"get session":   func(_, _, s string) error { _, err := w.svc.GetSession(ctx, b, s); return err },
		"kill":          func(_, _, s string) error { _, err := w.svc.KillSession(ctx, b, Request{}, s); return err },
		"attach token":  func(_, _, s string) error { _, err := w.svc.MintAttachToken(ctx, b, Request{}, s, 0); return err },
		"revoke attach": func(_, _, s string) error { return w.svc.RevokeAttachTokens(ctx, b, Request{}, s) },
	} {
		theirs, none := fault.Of(call(string(a.ID), res.Operation.ID, ses)), fault.Of(call(unknown, noOp, noSes))
		if theirs == nil || none == nil || theirs.Class != fault.NotFound || none.Class != fault.NotFound || theirs.Code != none.Code || theirs.Remedy != none.Remedy {
			t.Errorf("%s: foreign %v, unknown %v", name, theirs, none)
		}
	}
	_, err := w.svc.GetSandbox(ctx, b, "mine")
	wantCode(t, err, "sandbox_not_found")
	if page, err := w.svc.ListSandboxes(ctx, b, store.Filter{}); err != nil || len(page.Items) != 0 {
		t.Errorf("B lists %v, %v", page.Items, err)
	}
	// A cursor of A's list is not one of B's.
	w.create(t, CreateSandbox{})
	page, err := w.svc.ListSandboxes(ctx, w.p, store.Filter{Limit: 1})
	if err != nil || page.Next == "" {
		t.Fatal(page, err)
	}
	_, err = w.svc.ListSandboxes(ctx, b, store.Filter{Limit: 1, Cursor: page.Next})
	wantCode(t, err, "bad_cursor")
	if w.get(t, a.ID).DeletedAt != (time.Time{}) {
		t.Error("B deleted it")
	}
}
