package sqlstore_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/postgres"
	"github.com/space-platform/space/internal/store/postgres/postgrestest"
	"github.com/space-platform/space/internal/store/sqlite"
	"github.com/space-platform/space/internal/store/sqlstore"
)

var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// partial are the indices that hold only the few rows that a walk of all of them wants.
var partial = map[string]bool{"sandboxes_unsettled": true, "operations_open": true, "operations_deadline": true}

// TestPlans: with 10 000 rows, no statement of the store but the counts reads a
// whole table, and no list sorts more than what it shows.
func TestPlans(t *testing.T) {
	t.Run("sqlite", func(t *testing.T) {
		s, err := sqlite.Open(filepath.Join(t.TempDir(), "db"))
		if err != nil {
			t.Fatal(err)
		}
		testPlans(t, s, regexp.MustCompile(`(?m)^SCAN (\w+)(?: USING (?:COVERING )?INDEX (\w+))?$`), regexp.MustCompile(`TEMP B-TREE FOR (LAST TERM OF )?ORDER BY`))
	})
	t.Run("postgres", func(t *testing.T) {
		// Where an index can be used at all it is: small tables do not hide a missing one.
		s, err := postgres.Open(postgrestest.Start(t).Database(t) + ` options='-c enable_seqscan=off -c enable_sort=off -c enable_bitmapscan=off'`)
		if err != nil {
			t.Fatal(err)
		}
		testPlans(t, s, regexp.MustCompile(`Seq Scan on (\w+)()`), regexp.MustCompile(`(?m)^ *(->)? *(Incremental )?Sort `))
	})
}

func testPlans(t *testing.T, st store.Store, scan, sort *regexp.Regexp) {
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	s := st.(*sqlstore.Store)
	ctx := t.Context()
	a, err := s.System().EnsureTenant(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	const n = 10000
	rows := make([]store.Sandbox, n)
	ops := make([]operation.Operation, n)
	err = s.Mutate(ctx, a, func(tx store.Tx) error {
		for i := range rows {
			at := epoch.Add(time.Duration(i) * time.Second)
			rows[i] = store.Sandbox{
				Tenant: a, ID: sandbox.NewID(), Name: fmt.Sprint("n", i), Observed: sandbox.Running, Desired: sandbox.Running,
				Generation: 1, Converged: 1, CreatedAt: at, UpdatedAt: at, Metadata: map[string]string{"app": "x"},
			}
			ops[i] = operation.Operation{ID: operation.NewID(), Sandbox: rows[i].ID, State: operation.Succeeded, CreatedAt: at, UpdatedAt: at, DeadlineAt: at}
			if i%100 == 0 {
				ops[i].State = operation.Running
			}
			if err := errors.Join(tx.InsertSandbox(rows[i]), tx.InsertOperation(ops[i])); err != nil {
				return err
			}
			if i%10 == 0 {
				if err := tx.Audit(audit.Entry{At: at, Actor: "a", Action: "b"}); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	type statement struct {
		query string
		args  []any
	}
	var seen []statement
	s.Trace(func(query string, args []any) { seen = append(seen, statement{query, args}) })
	key := store.Key{Tenant: a, ID: "key1", Hash: []byte("h"), CreatedAt: epoch}
	one, op := rows[n/2], ops[100]
	one.Revision = 1
	// Every method, lists in every form and on their second page.
	err = errors.Join(
		s.Mutate(ctx, a, func(tx store.Tx) error {
			_, err1 := tx.Sandbox(one.ID)
			_, err2 := tx.SandboxByName(one.Name)
			renamed := one
			renamed.Name, renamed.Metadata = "new", map[string]string{"app": "y"}
			err3 := tx.UpdateSandbox(renamed)
			_, err4 := tx.OpenOperations(one.ID)
			op.State = operation.Failed
			err5 := tx.UpdateOperation(op)
			i := store.Idempotency{Principal: "p", CreatedAt: epoch}
			err6 := tx.InsertIdempotency(i)
			_, err7 := tx.Idempotency("p", "", "", "")
			err8 := tx.InsertKey(key)
			err9 := tx.UpdateKey(key)
			_, err10 := tx.CountSandboxes()
			return errors.Join(err1, err2, err3, err4, err5, err6, err7, err8, err9, err10, tx.Audit(audit.Entry{At: epoch, Actor: "a", Action: "b"}))
		}),
		everyRead(ctx, s, one, op, key),
	)
	if err != nil {
		t.Fatal(err)
	}
	s.Trace(nil)
	checked := 0
	for _, st := range seen {
		if strings.HasPrefix(st.query, "INSERT") {
			continue
		}
		plan, err := s.Explain(ctx, st.query, st.args)
		if err != nil {
			t.Fatalf("%s: %v", st.query, err)
		}
		checked++
		counts := strings.Contains(st.query, "count(*)")
		for _, m := range scan.FindAllStringSubmatch(plan, -1) {
			if !counts && m[1] != "u" && !partial[m[2]] {
				t.Errorf("reads all of %s:\n%s\n%s", m[1], st.query, plan)
			}
		}
		// Unsettled sorts what is unsettled; a list of several states sorts one page of each.
		small := strings.Contains(st.query, "UNION")
		if sort.MatchString(plan) && !counts && !small {
			t.Errorf("sorts:\n%s\n%s", st.query, plan)
		}
	}
	if checked < 30 {
		t.Fatalf("only %d statements were seen", checked)
	}
}

func everyRead(ctx context.Context, s store.Store, one store.Sandbox, op operation.Operation, key store.Key) error {
	a := one.Tenant
	_, err1 := s.Sandbox(ctx, a, one.ID)
	_, err2 := s.SandboxByName(ctx, a, "n1")
	errs := []error{err1, err2}
	meta := map[string]string{"app": "x"}
	for _, f := range []store.Filter{
		{}, {Deleted: true}, {States: []sandbox.State{sandbox.Running}}, {States: []sandbox.State{sandbox.Running, sandbox.Failed}},
		{States: []sandbox.State{sandbox.Running}, Deleted: true}, {Metadata: meta}, {Metadata: meta, Deleted: true},
		{Metadata: meta, States: []sandbox.State{sandbox.Running}}, {Metadata: map[string]string{"app": "x", "b": "c"}},
	} {
		f.Limit = 10
		p, err := s.Sandboxes(ctx, a, f)
		f.Cursor = p.Next
		_, err2 := s.Sandboxes(ctx, a, f)
		errs = append(errs, err, err2)
	}
	for _, id := range []sandbox.ID{"", one.ID} {
		p, err := s.Operations(ctx, a, id, "", 10)
		_, err2 := s.Operations(ctx, a, id, p.Next, 10)
		errs = append(errs, err, err2)
	}
	_, err3 := s.Operation(ctx, a, op.ID)
	_, err4 := s.Keys(ctx, a, "", 10)
	p, err5 := s.AuditEntries(ctx, a, "", 10)
	_, err6 := s.AuditEntries(ctx, a, p.Next, 10)
	y := s.System()
	_, err7 := y.Unsettled(ctx, 10)
	_, err8 := y.Living(ctx, one.ID, 10)
	_, err9 := y.OverdueOperations(ctx, epoch.Add(time.Hour), 10)
	_, err10 := y.FindSandbox(ctx, one.ID)
	_, err11 := y.KeyByHash(ctx, key.Hash)
	err12 := y.TouchKey(ctx, key, epoch)
	_, err13 := y.Purge(ctx, epoch)
	_, err14 := y.AuditAll(ctx, 5, 10)
	_, err15 := y.Counts(ctx)
	return errors.Join(append(errs, err3, err4, err5, err6, err7, err8, err9, err10, err11, err12, err13, err14, err15)...)
}
