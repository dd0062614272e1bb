package control

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlite"
)

// testingT is what a world needs of testing.T and rapid.T.
type testingT interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
}

// hand is a clock moved by hand; waiting on it returns at once, so that stepped
// code never blocks.
type hand struct {
	mu  sync.Mutex
	now time.Time
}

func (h *hand) Now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

func (h *hand) add(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.now = h.now.Add(d)
}

func (h *hand) After(time.Duration) <-chan time.Time {
	c := make(chan time.Time, 1)
	c <- h.Now()
	return c
}

// world is one installation: a store, a node, and the service before it.
type world struct {
	clock clock.Clock
	store store.Store
	node  *fakeNode
	svc   *Service
	p     Principal
	conf  Config
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func newWorld(t testingT, dir string, c clock.Clock) *world {
	t.Helper()
	st, err := sqlite.Open(filepath.Join(dir, "control.db"))
	if err != nil {
		t.Fatalf("open store: %v", err)
	}
	sealer, err := secret.NewSealer([]byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		t.Fatalf("sealer: %v", err)
	}
	w := &world{clock: c, store: st, node: newFakeNode(c)}
	w.conf = Config{
		Store: st, Node: w.node, NodeInfo: NodeInfo{Name: "n1", Runtime: "fake", Class: sandbox.ClassUserKernel},
		Sealer: sealer, HashKey: []byte("0123456789abcdef"), Clock: c, Log: quiet,
	}
	w.p = w.principal(t, "default", "key1")
	w.restart(t)
	return w
}

// restart drops the service, as a crash does, and makes another one.
func (w *world) restart(t testingT) {
	t.Helper()
	svc, err := New(w.conf)
	if err != nil {
		t.Fatalf("new: %v", err)
	}
	w.svc = svc
}

func (w *world) principal(t testingT, name, key string, scopes ...auth.Scope) Principal {
	t.Helper()
	id, err := w.store.System().EnsureTenant(context.Background(), name)
	if err != nil {
		t.Fatalf("tenant: %v", err)
	}
	if len(scopes) == 0 {
		scopes = []auth.Scope{auth.Admin}
	}
	return Principal{Tenant: id, KeyID: key, Scopes: scopes}
}

// running starts the reconciler for the time of a synctest bubble.
func (w *world) running(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	rec := w.svc.rec
	go func() {
		defer close(done)
		_ = rec.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}

// turn does one round of what the reconciler does, without waiting.
func (w *world) turn(ctx context.Context) error {
	if err := w.svc.rec.overdue(ctx); err != nil {
		return err
	}
	_ = w.svc.rec.outcomes(ctx)
	refs, err := w.store.System().Unsettled(ctx, 1000)
	if err != nil {
		return err
	}
	for _, ref := range refs {
		_, _ = w.svc.rec.reconcile(ctx, ref, nil)
	}
	return nil
}

// settle takes turns, and lets the node do its work, until nothing is open.
func (w *world) settle(t testingT) {
	t.Helper()
	ctx := context.Background()
	for range 60 {
		if err := w.turn(ctx); err != nil {
			t.Fatalf("turn: %v", err)
		}
		w.node.mu.Lock()
		for id := range w.node.machines {
			w.node.converge(id)
		}
		pending := len(w.node.outcomes)
		w.node.mu.Unlock()
		refs, err := w.store.System().Unsettled(ctx, 1000)
		if err != nil {
			t.Fatalf("unsettled: %v", err)
		}
		if len(refs) == 0 && pending == 0 {
			return
		}
	}
	t.Fatalf("does not settle:%s", w.unsettled())
}

// unsettled tells what is still open, on both sides.
func (w *world) unsettled() (out string) {
	ctx := context.Background()
	refs, _ := w.store.System().Unsettled(ctx, 10)
	for _, ref := range refs {
		row, _ := w.store.Sandbox(ctx, ref.Tenant, ref.ID)
		out += fmt.Sprintf("\nrow %s wants %s is %s, generation %d, converged %d", row.ID, row.Desired, row.Observed, row.Generation, row.Converged)
		ops, _ := w.store.Operations(ctx, ref.Tenant, ref.ID, "", 10)
		for _, o := range ops.Items {
			out += fmt.Sprintf("\n  %s %s generation %d superseded %q waiting %q deadline %s", o.Kind, o.State, o.Generation, o.Superseded, o.WaitingFor, o.DeadlineAt)
		}
		w.node.mu.Lock()
		if m := w.node.machines[row.ID]; m != nil {
			out += fmt.Sprintf("\n  node: %+v", w.node.observation(row.ID, m))
		}
		w.node.mu.Unlock()
		_, err := w.svc.rec.reconcile(ctx, ref, nil)
		out += fmt.Sprintf("\n  reconcile: %v", err)
	}
	return out
}

func request(key, body string) Request {
	return Request{ID: "req", IdempotencyKey: key, BodyHash: []byte(body), Method: "POST", Route: "/v1/sandboxes"}
}

func (w *world) create(t testingT, c CreateSandbox) Sandbox {
	t.Helper()
	res, err := w.svc.CreateSandbox(context.Background(), w.p, Request{ID: "req"}, c)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	return res.Sandbox
}

// up makes a sandbox that runs, by stepping.
func (w *world) up(t testingT, c CreateSandbox) Sandbox {
	t.Helper()
	s := w.create(t, c)
	w.settle(t)
	return w.get(t, s.ID)
}

func (w *world) get(t testingT, id sandbox.ID) Sandbox {
	t.Helper()
	row, err := w.store.Sandbox(context.Background(), w.p.Tenant, id)
	if err != nil {
		t.Fatalf("get %s: %v", id, err)
	}
	return viewOf(row)
}

func (w *world) op(t testingT, id string) operation.Operation {
	t.Helper()
	o, err := w.store.Operation(context.Background(), w.p.Tenant, id)
	if err != nil {
		t.Fatalf("operation %s: %v", id, err)
	}
	return o
}

func (w *world) verb(t testingT, id sandbox.ID, v sandbox.Verb, wait time.Duration) Result {
	t.Helper()
	res, err := w.ask(id, v, wait)
	if err != nil {
		t.Fatalf("%s: %v", v, err)
	}
	return res
}

func (w *world) ask(id sandbox.ID, v sandbox.Verb, wait time.Duration) (Result, error) {
	ctx, req := context.Background(), Request{ID: "req", Wait: wait}
	if v == sandbox.Delete {
		return w.svc.DeleteSandbox(ctx, w.p, req, string(id))
	}
	return w.svc.Lifecycle(ctx, w.p, req, string(id), Lifecycle{Verb: v})
}

func wantCode(t testingT, err error, code string) {
	t.Helper()
	if !fault.IsCode(err, code) {
		t.Errorf("error is %v, want code %s", err, code)
	}
}

func (w *world) sound(t testingT) {
	t.Helper()
	w.node.mu.Lock()
	defer w.node.mu.Unlock()
	for _, v := range w.node.violations {
		t.Errorf("the node saw: %s", v)
	}
}

func (w *world) close(t testingT) {
	t.Helper()
	if err := w.store.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}
