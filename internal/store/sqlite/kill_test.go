package sqlite_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlite"
)

const childEnv = "SPACE_STORE_TEST_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		fmt.Fprintln(os.Stderr, commitForEver(path)) // until killed
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// commitForEver commits rows and prints the id of each once it is acknowledged.
func commitForEver(path string) error {
	s, err := sqlite.Open(path)
	if err != nil {
		return err
	}
	ctx := context.Background()
	t, err := s.System().EnsureTenant(ctx, "a")
	if err != nil {
		return err
	}
	for n := range 1 << 30 {
		at := time.Unix(int64(n), 0).UTC()
		row := store.Sandbox{Tenant: t, ID: sandbox.NewID(), Observed: sandbox.Creating, Generation: 1, CreatedAt: at, UpdatedAt: at}
		err := s.Mutate(ctx, t, func(tx store.Tx) error {
			return errors.Join(tx.InsertSandbox(row),
				tx.InsertOperation(operation.Operation{ID: "op-" + string(row.ID), Sandbox: row.ID, State: operation.Pending, CreatedAt: at, UpdatedAt: at}),
				tx.InsertIdempotency(store.Idempotency{Key: string(row.ID), CreatedAt: at}),
				tx.Audit(audit.Entry{At: at, Actor: "k", Action: "sandbox.create", Target: string(row.ID)}))
		})
		if err != nil {
			return err
		}
		fmt.Println(row.ID)
	}
	return nil
}

// TestKill: kill -9 at any time loses nothing that was acknowledged, and leaves
// no half of a transaction.
func TestKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	acknowledged := map[string]bool{}
	for round := range 5 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+path)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		sc := bufio.NewScanner(out)
		for n := 0; sc.Scan(); n++ {
			acknowledged[sc.Text()] = true
			if n == 20+13*round {
				if err := cmd.Process.Kill(); err != nil { // somewhere in a later commit
					t.Fatal(err)
				}
			}
		}
		if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Fatalf("the child ended by itself: %v", err)
		}
	}
	s, err := sqlite.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	ctx := t.Context()
	owner, err := s.System().EnsureTenant(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	audited := map[string]bool{}
	rep, err := audit.Verify("control", audit.Pages(func(from uint64) ([]audit.Record, error) {
		part, err := s.System().AuditAll(ctx, from, 100)
		for _, r := range part {
			audited[r.Entry.Target] = true
		}
		return part, err
	}), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	refs := 0
	var after sandbox.ID
	for {
		part, err := s.System().Living(ctx, after, 1000)
		if err != nil {
			t.Fatal(err)
		}
		if len(part) == 0 {
			break
		}
		for _, r := range part {
			refs++
			after = r.ID
			if _, err := s.Operation(ctx, owner, "op-"+string(r.ID)); err != nil || !audited[string(r.ID)] {
				t.Errorf("%s is there in part: operation %v, audited %v", r.ID, err, audited[string(r.ID)])
			}
			delete(acknowledged, string(r.ID))
		}
	}
	if len(acknowledged) != 0 {
		t.Errorf("%d acknowledged rows are lost", len(acknowledged))
	}
	if refs < 5*20 || uint64(refs) != rep.Records {
		t.Errorf("%d rows, %d audit records", refs, rep.Records)
	}
}
