// Package storetest is the one suite that every implementation of store.Store
// passes, a test for each guarantee of package store.
package storetest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// Opener opens the same database each time: a second call while the first
// store is open is a second client, after Close it is a restart.
type Opener func() (store.Store, error)

// Run runs the suite; fresh gives an Opener of an empty database.
func Run(t *testing.T, fresh func(t *testing.T) Opener) {
	for name, test := range map[string]func(*testing.T, *env){
		"atomic":                testAtomic,
		"panic rolls back":      testPanic,
		"swallowed error":       testSwallowed,
		"cancelled":             testCancelled,
		"used after its end":    testUsedAfterEnd,
		"read back equal":       testReadBack,
		"text refused":          testBadText,
		"compare and set":       testCompareAndSet,
		"race of updates":       testUpdateRace,
		"generation":            testGeneration,
		"names":                 testNames,
		"tombstones":            testTombstones,
		"counts":                testCounts,
		"operations":            testOperations,
		"idempotency":           testIdempotency,
		"idempotency race":      testIdempotencyRace,
		"keys":                  testKeys,
		"restart":               testRestart,
		"foreign tenant":        testForeignTenant,
		"no tenant":             testNoTenant,
		"C-062 pages":           testPages,
		"C-063 filters":         testFilters,
		"cursors":               testCursors,
		"audit chain":           testAudit,
		"audit of two clients":  testAuditRace,
		"unsettled and overdue": testUnsettled,
		"purge":                 testPurge,
	} {
		t.Run(name, func(t *testing.T) {
			test(t, newEnv(t, fresh(t)))
		})
	}
}

// env is one database with two tenants.
type env struct {
	open Opener
	s    store.Store
	a, b tenant.ID
	n    int
}

// epoch is the time of the suite: whole microseconds, UTC.
var epoch = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

func newEnv(t *testing.T, open Opener) *env {
	t.Helper()
	e := &env{open: open}
	e.s = e.another(t)
	var err1, err2 error
	e.a, err1 = e.s.System().EnsureTenant(t.Context(), "a")
	e.b, err2 = e.s.System().EnsureTenant(t.Context(), "b")
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return e
}

// another is one more client of the database.
func (e *env) another(t *testing.T) store.Store {
	t.Helper()
	s, err := e.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

// at gives times that differ, in order.
func (e *env) at() time.Time {
	e.n++
	return epoch.Add(time.Duration(e.n) * time.Second)
}

// sandbox is a plain row that is not stored yet.
func (e *env) sandbox(owner tenant.ID) store.Sandbox {
	now := e.at()
	return store.Sandbox{
		Tenant: owner, ID: sandbox.NewID(), Template: "base:latest", TemplateDigest: "sha256:1",
		Desired: sandbox.Running, Observed: sandbox.Creating, Generation: 1,
		CreatedAt: now, UpdatedAt: now, CreatedBy: "keyaaaaaaaaaaaaaaaa",
	}
}

func (e *env) operation(id sandbox.ID) operation.Operation {
	now := e.at()
	return operation.Operation{
		ID: operation.NewID(), Kind: operation.Create, Sandbox: id, Generation: 1, State: operation.Pending,
		CreatedAt: now, UpdatedAt: now, DeadlineAt: now.Add(time.Minute), RetrySafe: true, Principal: "keyaaaaaaaaaaaaaaaa",
	}
}

func (e *env) entry(action string) audit.Entry {
	return audit.Entry{At: e.at(), Actor: "keyaaaaaaaaaaaaaaaa", Action: action, Target: "x"}
}

// mutate fails the test when Mutate fails.
func (e *env) mutate(t *testing.T, owner tenant.ID, fn func(tx store.Tx) error) {
	t.Helper()
	if err := e.s.Mutate(t.Context(), owner, fn); err != nil {
		t.Fatal(err)
	}
}

// insert stores a new sandbox and gives it as stored.
func (e *env) insert(t *testing.T, owner tenant.ID, change func(*store.Sandbox)) store.Sandbox {
	t.Helper()
	s := e.sandbox(owner)
	if change != nil {
		change(&s)
	}
	e.mutate(t, owner, func(tx store.Tx) error { return tx.InsertSandbox(s) })
	return e.get(t, owner, s.ID)
}

func (e *env) get(t *testing.T, owner tenant.ID, id sandbox.ID) store.Sandbox {
	t.Helper()
	s, err := e.s.Sandbox(t.Context(), owner, id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// walk reads a whole list.
func walk[T any](t *testing.T, next func(cursor string) (store.Page[T], error)) []T {
	t.Helper()
	var all []T
	cursor := ""
	for range 10000 {
		p, err := next(cursor)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p.Items...)
		if p.Next == "" {
			return all
		}
		cursor = p.Next
	}
	t.Fatal("the list does not end")
	return nil
}

func want(t *testing.T, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("error is %v, want %v", err, target)
	}
}

func ids(list []store.Sandbox) string {
	out := ""
	for _, s := range list {
		out += fmt.Sprintln(s.ID)
	}
	return out
}
