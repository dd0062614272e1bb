package control

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/template"
)

const jointDigest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

type jointTemplates struct{}

func (jointTemplates) List(context.Context) ([]template.Info, error) { return nil, nil }

func (jointTemplates) Resolve(_ context.Context, ref string) (template.Info, error) {
	if ref != jointDigest && ref != "base:latest" {
		return template.Info{}, fmt.Errorf("%w: %s", template.ErrNotFound, ref)
	}
	return template.Info{Reference: "base:latest", Digest: jointDigest, Config: template.Config{User: "user", WorkDir: "/", Shell: "/bin/sh"}}, nil
}

// jointSessions hears what a node tells its sessions.
type jointSessions struct{ session.Service }

func (jointSessions) SandboxEnded(sandbox.ID, string, string) {}
func (jointSessions) SandboxPaused(sandbox.ID)                {}
func (jointSessions) SandboxResumed(sandbox.ID)               {}
func (jointSessions) Erase(context.Context, sandbox.ID) error { return nil }
func (jointSessions) RunningSessions(sandbox.ID) int          { return 0 }

// TestWithTheRealNode runs control and node together on the fake runtime: the
// scripted node of the other tests is only what we believe of a node.
func TestWithTheRealNode(t *testing.T) {
	dir := scratch(t)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, dir, clock.System{})
		t.Cleanup(func() { w.close(t) })
		world := fake.NewWorld(fake.WithTemplates(jointDigest))
		t.Cleanup(world.Close)
		db, err := sqlitedb.Open(filepath.Join(dir, "node.db"))
		if err != nil {
			t.Fatal(err)
		}
		n, err := node.New(t.Context(), node.Config{
			Name: "n1", DB: db, Runtime: fake.New(world), Templates: jointTemplates{}, Sealer: w.conf.Sealer,
			NewGuest: func(m runtime.Machine) guestclient.Guest { return guestclient.New(m.Dial, guestclient.Options{}) },
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close(); _ = db.Close() })
		n.Bind(jointSessions{})
		if _, err := n.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.conf.Node = n
		w.restart(t)
		w.running(t)

		do := func(v sandbox.Verb, id sandbox.ID, want sandbox.State) {
			t.Helper()
			res := w.verb(t, id, v, time.Minute)
			if res.Operation.State != operation.Succeeded || (v != sandbox.Delete && res.Sandbox.Observed != want) {
				t.Fatalf("%s: %+v %+v, sandbox %s, want %s", v, res.Operation, res.Operation.Problem, res.Sandbox.Observed, want)
			}
		}
		create := func(c CreateSandbox) sandbox.ID {
			t.Helper()
			res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{Wait: time.Minute}, c)
			if err != nil || res.Operation.State != operation.Succeeded {
				t.Fatalf("create: %+v %+v, %v", res.Operation, res.Operation.Problem, err)
			}
			return res.Sandbox.ID
		}
		is := func(id sandbox.ID, want sandbox.State) {
			t.Helper()
			got := w.get(t, id)
			obs, err := n.Observe(t.Context(), w.p.Tenant, id)
			if err != nil || got.Observed != want || obs.State != want || obs.Pending != nil {
				t.Fatalf("row %s, node %s pending %+v, %v; want %s", got.Observed, obs.State, obs.Pending, err, want)
			}
		}

		id := create(CreateSandbox{Timeout: time.Hour, Env: map[string]string{"A": "b"}, OnTimeout: sandbox.ActionPause})
		if got := w.get(t, id); got.Class == "" || got.Runtime == "" {
			t.Errorf("class %q, runtime %q", got.Class, got.Runtime)
		}
		for range 5 {
			w.verb(t, id, sandbox.Pause, 0)
			do(sandbox.Resume, id, sandbox.Running)
		}
		do(sandbox.Pause, id, sandbox.Paused)
		do(sandbox.Wake, id, sandbox.Running)
		do(sandbox.Stop, id, sandbox.Stopped)
		do(sandbox.Start, id, sandbox.Running)
		// The node's own timer, absorbed, and the way back.
		for range 2 {
			if _, err := w.svc.PatchSandbox(t.Context(), w.p, Request{Wait: time.Minute}, string(id), PatchSandbox{Timeout: ptr(30 * time.Second)}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(40 * time.Second)
			is(id, sandbox.Paused)
			do(sandbox.Wake, id, sandbox.Running)
		}
		time.Sleep(40 * time.Second) // the wake gave the same 30 s again
		is(id, sandbox.Paused)
		do(sandbox.Wake, id, sandbox.Running)
		// A machine that dies, the reason, and the way back with its files.
		if err := world.WriteFile(id, "/kept", []byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := world.KillMachine(id, runtime.CauseOutOfMemory); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		is(id, sandbox.Failed)
		if p := w.get(t, id).Problem; p == nil || p.What == "" {
			t.Errorf("problem %+v", p)
		}
		do(sandbox.Start, id, sandbox.Running)
		if b, err := world.ReadFile(id, "/kept"); err != nil || string(b) != "x" {
			t.Errorf("kept %q, %v", b, err)
		}
		do(sandbox.Delete, id, "")
		// A create that cannot start says why and leaves nothing.
		bad := world.On(fake.OpStart, fake.Any, fake.Fault{Err: errors.New("no such luck")})
		res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{Wait: time.Minute}, CreateSandbox{Name: "bad"})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Minute)
		if op, got := w.op(t, res.Operation.ID), w.get(t, res.Sandbox.ID); op.State != operation.Failed || op.Problem == nil || got.DeletedAt.IsZero() {
			t.Errorf("a create that cannot start: %+v %+v, sandbox %s wants %s", op, op.Problem, got.Observed, got.Desired)
		}
		bad.Off()
		// Delete against resume, and expiry by delete.
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				id := create(CreateSandbox{Timeout: 20 * time.Second})
				if i%2 == 0 {
					do(sandbox.Pause, id, sandbox.Paused)
					w.verb(t, id, sandbox.Resume, 0)
					do(sandbox.Delete, id, "")
				} else {
					time.Sleep(30 * time.Second)
				}
				if got := w.get(t, id); got.DeletedAt.IsZero() {
					t.Errorf("%d: wants %s, is %s", i, got.Desired, got.Observed)
				}
			})
		}
		all.Wait()
		time.Sleep(3 * time.Minute) // sweeps pass: nothing is left, nothing is taken for an orphan
		known, err := n.Known(t.Context())
		if err != nil || len(known) != 0 {
			t.Errorf("the node still knows %v, %v", known, err)
		}
		if leaks := world.Leaks(); len(leaks) != 0 {
			t.Errorf("left on the host: %v", leaks)
		}
		refs, err := w.store.System().Unsettled(t.Context(), 100)
		if err != nil || len(refs) != 0 {
			t.Errorf("unsettled: %v, %v%s", refs, err, w.unsettled())
		}
	})
}
