package storetest

import (
	"context"
	"errors"
	"math"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

var errStop = errors.New("stop")

// writeAll writes one row of each kind.
func (e *env) writeAll(tx store.Tx, s store.Sandbox, o operation.Operation, k store.Key) error {
	return errors.Join(
		tx.InsertSandbox(s), tx.InsertOperation(o), tx.InsertKey(k),
		tx.InsertIdempotency(store.Idempotency{Principal: "p", Key: "k", Method: "POST", Route: "/", CreatedAt: epoch}),
		tx.Audit(e.entry("sandbox.create")),
	)
}

// nothing fails the test when any of the rows of writeAll is there.
func (e *env) nothing(t *testing.T, s store.Sandbox, o operation.Operation, k store.Key) {
	t.Helper()
	ctx := t.Context()
	_, err := e.s.Sandbox(ctx, e.a, s.ID)
	want(t, err, store.ErrNotFound)
	_, err = e.s.Operation(ctx, e.a, o.ID)
	want(t, err, store.ErrNotFound)
	_, err = e.s.System().KeyByHash(ctx, k.Hash)
	want(t, err, store.ErrNotFound)
	e.mutate(t, e.a, func(tx store.Tx) error {
		_, err := tx.Idempotency("p", "k", "POST", "/")
		want(t, err, store.ErrNotFound)
		return nil
	})
	records, err := e.s.System().AuditAll(ctx, 1, 10)
	if err != nil || len(records) != 0 {
		t.Fatalf("audit has %d records (%v), want none", len(records), err)
	}
}

func (e *env) key(owner string) store.Key {
	return store.Key{ID: "key" + sandbox.Random(16), Hash: []byte(owner + sandbox.Random(20)), Scopes: []string{"exec"}, CreatedAt: e.at()}
}

func testAtomic(t *testing.T, e *env) {
	s := e.sandbox(e.a)
	o, k := e.operation(s.ID), e.key("a")
	k.Tenant = e.a
	err := e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error {
		if err := e.writeAll(tx, s, o, k); err != nil {
			return err
		}
		if _, err := tx.Sandbox(s.ID); err != nil {
			t.Errorf("a transaction does not see its own write: %v", err)
		}
		if got, err := tx.OpenOperations(s.ID); err != nil || len(got) != 1 {
			t.Errorf("open operations inside: %d, %v", len(got), err)
		}
		return errStop
	})
	want(t, err, errStop)
	e.nothing(t, s, o, k)
	e.mutate(t, e.a, func(tx store.Tx) error { return e.writeAll(tx, s, o, k) })
	e.get(t, e.a, s.ID)
}

func testPanic(t *testing.T, e *env) {
	s := e.sandbox(e.a)
	o, k := e.operation(s.ID), e.key("a")
	k.Tenant = e.a
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_ = e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error {
			if err := e.writeAll(tx, s, o, k); err != nil {
				t.Error(err)
			}
			panic("in fn")
		})
	}()
	e.nothing(t, s, o, k)
	e.insert(t, e.a, nil) // the store still works
}

// testSwallowed: the store's own answers leave a transaction usable; an audit
// entry that cannot be written fails it, also when fn ignores every error.
func testSwallowed(t *testing.T, e *env) {
	first := e.insert(t, e.a, func(s *store.Sandbox) { s.Name = "taken" })
	second := e.sandbox(e.a)
	e.mutate(t, e.a, func(tx store.Tx) error {
		clash := e.sandbox(e.a)
		clash.Name = first.Name
		want(t, tx.InsertSandbox(clash), store.ErrExists)
		clash = e.sandbox(e.a)
		clash.ID = first.ID
		want(t, tx.InsertSandbox(clash), store.ErrExists)
		_, err := tx.Sandbox("nowhere")
		want(t, err, store.ErrNotFound)
		return tx.InsertSandbox(second)
	})
	e.get(t, e.a, second.ID)

	third := e.sandbox(e.a)
	bad := e.entry("x")
	bad.At = time.Date(20000, 1, 1, 0, 0, 0, 0, time.UTC) // JSON has no such year
	err := e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error {
		_ = tx.Audit(bad)
		return tx.InsertSandbox(third)
	})
	if err == nil {
		t.Fatal("a mutation that could not be audited was committed")
	}
	_, err = e.s.Sandbox(t.Context(), e.a, third.ID)
	want(t, err, store.ErrNotFound)
}

func testCancelled(t *testing.T, e *env) {
	s := e.sandbox(e.a)
	ctx, cancel := context.WithCancel(t.Context())
	err := e.s.Mutate(ctx, e.a, func(tx store.Tx) error {
		if err := tx.InsertSandbox(s); err != nil {
			return err
		}
		cancel()
		return nil
	})
	want(t, err, context.Canceled)
	_, err = e.s.Sandbox(t.Context(), e.a, s.ID)
	want(t, err, store.ErrNotFound)
	e.insert(t, e.a, nil)
}

func testUsedAfterEnd(t *testing.T, e *env) {
	var kept store.Tx
	e.mutate(t, e.a, func(tx store.Tx) error { kept = tx; return nil })
	if err := kept.InsertSandbox(e.sandbox(e.a)); err == nil {
		t.Error("InsertSandbox works after the end of its transaction")
	}
	if err := kept.Audit(e.entry("x")); err == nil {
		t.Error("Audit works after the end of its transaction")
	}
}

// hostile are texts that have broken stores.
var hostile = []string{
	"plain", "", " ", "'; DROP TABLE sandboxes; --", `"quoted" \back\ %s ? $1 :a`, "emoji 👩‍👩‍👧‍👦 \U0001F9EA",
	"nul\x00inside", "line\nfeed\r\t", "ünïcödé \u200b\u202e\ufeff \ufffd", "e\u0301", strings.Repeat("long ", 4000), `\ufffd`, "<&>", "null",
}

func testReadBack(t *testing.T, e *env) {
	zone := time.FixedZone("east", 3*3600)
	for i, text := range hostile {
		s := e.sandbox(e.a)
		s.Name, s.Template, s.TemplateDigest, s.Runtime, s.Node, s.CreatedBy = text, text, text, text, text, text
		s.Metadata = map[string]string{text: text, text + "2": "", "": text}
		s.Accept = []sandbox.Class{sandbox.ClassUserKernel, sandbox.Class(text)}
		s.Class = sandbox.ClassUserKernel
		s.SealedEnv = []byte{0, 255, byte(i)}
		s.Resources = sandbox.Resources{MilliCPU: 1000, MemoryBytes: math.MaxInt64, DiskBytes: 1, MaxProcesses: -1}
		s.Policy = sandbox.Policy{ExpiresAt: epoch, OnExpire: sandbox.ActionStop, DeadlineAt: epoch.Add(time.Hour), Idle: time.Minute, OnIdle: sandbox.ActionPause}
		s.Problem = &operation.Problem{Code: "c", What: text, Why: text, Remedy: text, Retryable: true}
		s.OutcomeSeq, s.Generation, s.Converged = math.MaxUint64, math.MaxInt64, 7
		s.Observed, s.Desired = sandbox.Failed, sandbox.Deleted
		o := e.operation(s.ID)
		o.Steps = []operation.Step{{Name: text, StartedAt: epoch, EndedAt: epoch.Add(time.Second)}, {Name: "two", StartedAt: epoch}}
		o.WaitingFor, o.Superseded, o.Problem, o.Principal = text, text, s.Problem, text
		k := e.key("a")
		k.Tenant, k.Name, k.CreatedBy, k.Scopes = e.a, text, text, []string{text, "exec"}
		k.ExpiresAt, k.LastUsedAt = epoch, epoch.Add(time.Second)
		idem := store.Idempotency{Principal: text, Key: text, Method: text, Route: text, BodyHash: []byte{1, 0}, Operation: o.ID, Resource: string(s.ID), CreatedAt: epoch}
		local := s
		local.CreatedAt = s.CreatedAt.In(zone).Add(999) // stored in UTC, whole microseconds
		e.mutate(t, e.a, func(tx store.Tx) error {
			return errors.Join(tx.InsertSandbox(local), tx.InsertOperation(o), tx.InsertKey(k), tx.InsertIdempotency(idem))
		})
		s.Revision = 1
		equal(t, e.get(t, e.a, s.ID), s)
		if text != "" {
			named, err := e.s.SandboxByName(t.Context(), e.a, text)
			if err != nil {
				t.Fatalf("name %q: %v", text, err)
			}
			equal(t, named, s)
		}
		gotOp, err := e.s.Operation(t.Context(), e.a, o.ID)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, gotOp, o)
		gotKey, err := e.s.System().KeyByHash(t.Context(), k.Hash)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, gotKey, k)
		e.mutate(t, e.a, func(tx store.Tx) error {
			got, err := tx.Idempotency(text, text, text, text)
			equal(t, got, idem)
			return err
		})
	}
	// Empty and nil maps and slices are different things.
	for _, m := range []map[string]string{nil, {}} {
		s := e.insert(t, e.a, func(s *store.Sandbox) { s.Metadata = m })
		if (s.Metadata == nil) != (m == nil) {
			t.Errorf("metadata %#v reads back as %#v", m, s.Metadata)
		}
	}
}

func equal[T any](t *testing.T, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("read back\n%+v\nwant\n%+v", got, want)
	}
}

func testBadText(t *testing.T, e *env) {
	for _, change := range []func(*store.Sandbox){
		func(s *store.Sandbox) { s.Name = "\xff" },
		func(s *store.Sandbox) { s.Metadata = map[string]string{"k\xc3": "v"} },
		func(s *store.Sandbox) { s.Metadata = map[string]string{"k": "v\xc3"} },
		func(s *store.Sandbox) { s.Generation = math.MaxUint64 },
		func(s *store.Sandbox) { s.Observed = "dreaming" },
	} {
		s := e.sandbox(e.a)
		change(&s)
		if err := e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.InsertSandbox(s) }); err == nil {
			t.Errorf("stored a row that cannot read back equal: %+v", s)
		}
	}
	// Texts that cannot be ids are simply not found.
	for _, id := range []string{"nul\x00", "\xff", strings.Repeat("x", 100000), "", "'"} {
		_, err := e.s.Sandbox(t.Context(), e.a, sandbox.ID(id))
		want(t, err, store.ErrNotFound)
		_, err = e.s.SandboxByName(t.Context(), e.a, id)
		want(t, err, store.ErrNotFound)
		_, err = e.s.Operation(t.Context(), e.a, id)
		want(t, err, store.ErrNotFound)
		_, err = e.s.System().FindSandbox(t.Context(), sandbox.ID(id))
		want(t, err, store.ErrNotFound)
		if p, err := e.s.Operations(t.Context(), e.a, sandbox.ID(id), "", 0); err != nil || len(p.Items) != 0 {
			t.Errorf("operations of %.10q: %d, %v", id, len(p.Items), err)
		}
	}
}

func testCompareAndSet(t *testing.T, e *env) {
	s := e.insert(t, e.a, nil)
	if s.Revision != 1 {
		t.Fatalf("revision %d after insert, want 1", s.Revision)
	}
	stale := s
	s.Observed = sandbox.Running
	e.mutate(t, e.a, func(tx store.Tx) error { return tx.UpdateSandbox(s) })
	if got := e.get(t, e.a, s.ID); got.Revision != 2 || got.Observed != sandbox.Running {
		t.Fatalf("after update: revision %d, observed %s", got.Revision, got.Observed)
	}
	stale.Observed = sandbox.Failed
	err := e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.UpdateSandbox(stale) })
	want(t, err, store.ErrConflict)
	if got := e.get(t, e.a, s.ID); got.Observed != sandbox.Running {
		t.Fatalf("a stale update went through: %s", got.Observed)
	}
	missing := e.sandbox(e.a)
	err = e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.UpdateSandbox(missing) })
	want(t, err, store.ErrNotFound)
	moved := e.get(t, e.a, s.ID)
	moved.CreatedAt = moved.CreatedAt.Add(time.Second)
	if err := e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.UpdateSandbox(moved) }); err == nil {
		t.Fatal("the creation time changed: lists would miss rows")
	}
}

// testUpdateRace: of many clients that update what they have read, each step of
// the revision has exactly one winner.
func testUpdateRace(t *testing.T, e *env) {
	s := e.insert(t, e.a, nil)
	clients := []store.Store{e.s, e.another(t)}
	var wins, losses atomic.Int64
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 10 {
				err := clients[i%2].Mutate(t.Context(), e.a, func(tx store.Tx) error {
					mine := s // all of them hold the first revision, but for the winner's
					mine.Generation++
					return tx.UpdateSandbox(mine)
				})
				switch {
				case err == nil:
					wins.Add(1)
				case errors.Is(err, store.ErrConflict):
					losses.Add(1)
				default:
					t.Errorf("update: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if wins.Load() != 1 || losses.Load() != 79 {
		t.Fatalf("%d winners and %d losers of one compare-and-set, want 1 and 79", wins.Load(), losses.Load())
	}
	// Read, add, write: no update is lost.
	for i := range 8 {
		wg.Go(func() {
			for range 5 {
				if err := clients[i%2].Mutate(t.Context(), e.a, func(tx store.Tx) error {
					got, err := tx.Sandbox(s.ID)
					if err != nil {
						return err
					}
					got.Generation++
					return tx.UpdateSandbox(got)
				}); err != nil {
					t.Errorf("read and update: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if got := e.get(t, e.a, s.ID); got.Generation != 42 || got.Revision != 42 {
		t.Fatalf("generation %d, revision %d; want 42 of both", got.Generation, got.Revision)
	}
}

func testGeneration(t *testing.T, e *env) {
	s := e.insert(t, e.a, func(s *store.Sandbox) { s.Generation = 5 })
	lower := s
	lower.Generation = 4
	err := e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.UpdateSandbox(lower) })
	want(t, err, store.ErrConflict)
	s.Observed = sandbox.Running // the same generation is fine
	e.mutate(t, e.a, func(tx store.Tx) error { return tx.UpdateSandbox(s) })
}

func testNames(t *testing.T, e *env) {
	s := e.insert(t, e.a, func(s *store.Sandbox) { s.Name = "web" })
	again := func(who tenant.ID) error {
		return e.s.Mutate(t.Context(), who, func(tx store.Tx) error {
			n := e.sandbox(who)
			n.Name = "web"
			return tx.InsertSandbox(n)
		})
	}
	want(t, again(e.a), store.ErrExists)
	if err := again(e.b); err != nil {
		t.Fatalf("another tenant cannot use the name: %v", err)
	}
	e.insert(t, e.a, nil) // no name is never taken
	e.insert(t, e.a, nil)
	s.DeletedAt = e.at()
	s.Observed, s.Desired = sandbox.Deleted, sandbox.Deleted
	e.mutate(t, e.a, func(tx store.Tx) error { return tx.UpdateSandbox(s) })
	_, err := e.s.SandboxByName(t.Context(), e.a, "web")
	want(t, err, store.ErrNotFound)
	if err := again(e.a); err != nil {
		t.Fatalf("the name of a tombstone is still taken: %v", err)
	}
	other := e.insert(t, e.a, func(s *store.Sandbox) { s.Name = "api" })
	other.Name = "web"
	err = e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error {
		want(t, tx.UpdateSandbox(other), store.ErrExists)
		return tx.Audit(e.entry("still.usable"))
	})
	if err != nil {
		t.Fatalf("after a taken name the transaction is unusable: %v", err)
	}
	// A tombstone that would come back to life takes its name only if it is free.
	dead := e.get(t, e.a, s.ID)
	dead.DeletedAt = time.Time{}
	err = e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.UpdateSandbox(dead) })
	want(t, err, store.ErrExists)
}

func testTombstones(t *testing.T, e *env) {
	s := e.insert(t, e.a, func(s *store.Sandbox) { s.Metadata = map[string]string{"k": "v"} })
	s.DeletedAt = e.at()
	s.Observed = sandbox.Deleted
	e.mutate(t, e.a, func(tx store.Tx) error { return tx.UpdateSandbox(s) })
	if got := e.get(t, e.a, s.ID); !got.DeletedAt.Equal(s.DeletedAt) {
		t.Fatalf("tombstone has deleted_at %v", got.DeletedAt)
	}
	for _, f := range []store.Filter{{}, {Metadata: s.Metadata}, {States: []sandbox.State{sandbox.Deleted}}} {
		p, err := e.s.Sandboxes(t.Context(), e.a, f)
		if err != nil || len(p.Items) != 0 {
			t.Errorf("filter %+v lists %d tombstones (%v)", f, len(p.Items), err)
		}
		f.Deleted = true
		p, err = e.s.Sandboxes(t.Context(), e.a, f)
		if err != nil || len(p.Items) != 1 {
			t.Errorf("filter %+v lists %d tombstones (%v), want 1", f, len(p.Items), err)
		}
	}
	refs, err := e.s.System().Living(t.Context(), "", 10)
	if err != nil || len(refs) != 0 {
		t.Errorf("living: %v, %v", refs, err)
	}
}

func testCounts(t *testing.T, e *env) {
	for range 3 {
		e.insert(t, e.a, func(s *store.Sandbox) { s.Observed = sandbox.Running })
	}
	e.insert(t, e.b, nil)
	e.insert(t, e.a, func(s *store.Sandbox) { s.Observed = sandbox.Deleted; s.DeletedAt = epoch })
	e.mutate(t, e.a, func(tx store.Tx) error {
		if n, err := tx.CountSandboxes(); err != nil || n != 3 {
			t.Errorf("count %d, %v; want 3", n, err)
		}
		if err := tx.InsertSandbox(e.sandbox(e.a)); err != nil {
			return err
		}
		if n, err := tx.CountSandboxes(); err != nil || n != 4 {
			t.Errorf("count with own insert %d, %v; want 4", n, err)
		}
		return nil
	})
	e.mutate(t, e.b, func(tx store.Tx) error { return tx.InsertOperation(e.operation("x")) })
	got, err := e.s.System().Counts(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	equal(t, got, store.Counts{Sandboxes: map[sandbox.State]int{sandbox.Running: 3, sandbox.Creating: 2}, OpenOps: 1})
}

func testOperations(t *testing.T, e *env) {
	s := e.insert(t, e.a, nil)
	first, second, other := e.operation(s.ID), e.operation(s.ID), e.operation("iother")
	e.mutate(t, e.a, func(tx store.Tx) error {
		return errors.Join(tx.InsertOperation(second), tx.InsertOperation(first), tx.InsertOperation(other))
	})
	err := e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.InsertOperation(first) })
	want(t, err, store.ErrExists)
	e.mutate(t, e.a, func(tx store.Tx) error {
		open, err := tx.OpenOperations(s.ID)
		if err != nil || len(open) != 2 || open[0].ID != first.ID {
			t.Errorf("open: %+v, %v; want the oldest first", open, err)
		}
		done := first
		done.State, done.UpdatedAt = operation.Succeeded, e.at()
		if err := tx.UpdateOperation(done); err != nil {
			return err
		}
		open, err = tx.OpenOperations(s.ID)
		if err != nil || len(open) != 1 || open[0].ID != second.ID {
			t.Errorf("open after the first ended: %+v, %v", open, err)
		}
		return nil
	})
	err = e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error {
		again := first
		again.State = operation.Failed
		return tx.UpdateOperation(again)
	})
	want(t, err, store.ErrConflict)
	err = e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.UpdateOperation(e.operation(s.ID)) })
	want(t, err, store.ErrNotFound)
	all := walk(t, func(c string) (store.Page[operation.Operation], error) {
		return e.s.Operations(t.Context(), e.a, "", c, 1)
	})
	if len(all) != 3 || all[0].ID != other.ID || all[2].ID != first.ID {
		t.Errorf("operations: %+v; want 3, newest first", all)
	}
	of := walk(t, func(c string) (store.Page[operation.Operation], error) {
		return e.s.Operations(t.Context(), e.a, s.ID, c, 1)
	})
	if len(of) != 2 || of[0].ID != second.ID {
		t.Errorf("operations of one sandbox: %+v", of)
	}
}

func testIdempotency(t *testing.T, e *env) {
	base := store.Idempotency{Principal: "p", Key: "k", Method: "POST", Route: "/v1/sandboxes", CreatedAt: epoch, Operation: "op1"}
	put := func(i store.Idempotency) error {
		return e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.InsertIdempotency(i) })
	}
	if err := put(base); err != nil {
		t.Fatal(err)
	}
	want(t, put(base), store.ErrExists)
	for _, change := range []func(*store.Idempotency){
		func(i *store.Idempotency) { i.Principal = "q" },
		func(i *store.Idempotency) { i.Key = "l" },
		func(i *store.Idempotency) { i.Method = "PATCH" },
		func(i *store.Idempotency) { i.Route = "/v1/sandboxes/x" },
		func(i *store.Idempotency) { i.Principal, i.Key = "pk", "" }, // not one run of text
	} {
		i := base
		change(&i)
		if err := put(i); err != nil {
			t.Errorf("%+v: %v", i, err)
		}
	}
	e.mutate(t, e.b, func(tx store.Tx) error { return tx.InsertIdempotency(base) })
}

// testIdempotencyRace: two clients and two goroutines each ask for the same thing
// at once, many times: one does it, the others find what it did.
func testIdempotencyRace(t *testing.T, e *env) {
	clients := []store.Store{e.s, e.another(t)}
	for round := range 15 {
		key := sandbox.Random(8)
		var made atomic.Int64
		results := make([]string, 4)
		var wg sync.WaitGroup
		for i := range results {
			wg.Go(func() {
				ask := func(tx store.Tx) error {
					if got, err := tx.Idempotency("p", key, "POST", "/"); err == nil {
						results[i] = got.Resource
						return nil
					}
					s := sandboxAt(e.a, epoch.Add(time.Duration(round)*time.Second))
					results[i] = string(s.ID)
					return errors.Join(tx.InsertSandbox(s), tx.InsertIdempotency(store.Idempotency{
						Principal: "p", Key: key, Method: "POST", Route: "/", Resource: string(s.ID), CreatedAt: epoch}))
				}
				for range 5 {
					err := clients[i%2].Mutate(t.Context(), e.a, ask)
					if errors.Is(err, store.ErrExists) {
						continue // somebody was faster: find it
					}
					if err != nil {
						t.Errorf("mutate: %v", err)
					}
					return
				}
				made.Add(100)
			})
		}
		wg.Wait()
		for _, r := range results {
			if r != results[0] || r == "" {
				t.Fatalf("round %d: one key gave %v (%d gave up)", round, results, made.Load())
			}
		}
	}
	p, err := e.s.Sandboxes(t.Context(), e.a, store.Filter{Limit: 1000})
	if err != nil || len(p.Items) != 15 {
		t.Fatalf("15 keys made %d sandboxes (%v)", len(p.Items), err)
	}
}

// sandboxAt is sandbox for goroutines.
func sandboxAt(owner tenant.ID, at time.Time) store.Sandbox {
	return store.Sandbox{
		Tenant: owner, ID: sandbox.NewID(), Desired: sandbox.Running, Observed: sandbox.Creating,
		Generation: 1, CreatedAt: at, UpdatedAt: at,
	}
}
