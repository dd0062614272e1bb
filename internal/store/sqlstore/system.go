package sqlstore

import (
	"context"
	"database/sql"
	"time"

	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// system implements store.System.
type system struct{ s *Store }

var _ store.System = system{}

// refs runs a query for (tenant, sandbox) rows; repeated ones are given once.
func (y system) refs(ctx context.Context, query string, args ...any) ([]store.Ref, error) {
	var out []store.Ref
	seen := map[store.Ref]bool{}
	err := y.s.read().each(ctx, func(rows *sql.Rows) error {
		var name, id string
		if err := rows.Scan(&name, &id); err != nil {
			return err
		}
		t, err := tenant.Mint(name)
		if err != nil {
			return err
		}
		if r := (store.Ref{Tenant: t, ID: sandbox.ID(id)}); !seen[r] {
			seen[r] = true
			out = append(out, r)
		}
		return nil
	}, query, args...)
	return out, err
}

// Unsettled implements store.System. Each half is ordered and cut by itself, so
// that settled rows cost nothing; a row may be in both.
func (y system) Unsettled(ctx context.Context, limit int) ([]store.Ref, error) {
	limit = limits(limit)
	out, err := y.refs(ctx, `SELECT tenant, id FROM (
			SELECT * FROM (SELECT tenant, id, updated_at FROM sandboxes WHERE generation > converged ORDER BY updated_at, id`+limitSQL(limit)+`) u
			UNION ALL
			SELECT * FROM (SELECT DISTINCT s.tenant, s.id, s.updated_at FROM operations o JOIN sandboxes s ON s.id = o.sandbox AND s.tenant = o.tenant
				WHERE o.final = 0 ORDER BY s.updated_at, s.id`+limitSQL(limit)+`) u
		) u ORDER BY updated_at, id`+limitSQL(2*limit))
	return out[:min(limit, len(out))], err
}

// Living implements store.System.
func (y system) Living(ctx context.Context, after sandbox.ID, limit int) ([]store.Ref, error) {
	return y.refs(ctx, `SELECT tenant, id FROM sandboxes WHERE deleted_at IS NULL AND id > ? ORDER BY id`+limitSQL(limits(limit)), string(after))
}

// OverdueOperations implements store.System: the longest overdue first.
func (y system) OverdueOperations(ctx context.Context, now time.Time, limit int) ([]store.Ref, error) {
	return y.refs(ctx, `SELECT tenant, sandbox FROM operations WHERE final = 0 AND deadline_at < ? ORDER BY deadline_at, id`+limitSQL(limits(limit)), micro(now))
}

// FindSandbox implements store.System.
func (y system) FindSandbox(ctx context.Context, id sandbox.ID) (store.Sandbox, error) {
	if !possible(string(id)) {
		return store.Sandbox{}, notFound("sandbox", sql.ErrNoRows)
	}
	return oneSandbox(y.s.read().row(ctx, sandboxColumns+`sandboxes s WHERE s.id = ?`, string(id)))
}

// Purge implements store.System. A tombstone with an open operation stays: the
// operation must still end.
func (y system) Purge(ctx context.Context, before time.Time) (int, error) {
	total := 0
	for _, q := range []string{
		`DELETE FROM operations WHERE final = 1 AND updated_at < ?`,
		`DELETE FROM sandboxes WHERE deleted_at IS NOT NULL AND deleted_at < ?
			AND NOT EXISTS (SELECT 1 FROM operations o WHERE o.tenant = sandboxes.tenant AND o.sandbox = sandboxes.id AND o.final = 0)`,
		`DELETE FROM idempotency WHERE created_at < ?`,
	} {
		n, err := y.s.on(y.s.o.Write).exec(ctx, q, micro(before))
		if err != nil {
			return total, err
		}
		total += int(n)
	}
	return total, nil
}

// EnsureTenant implements store.System.
func (y system) EnsureTenant(ctx context.Context, name string) (tenant.ID, error) {
	t, err := tenant.Mint(name)
	if err != nil {
		return tenant.ID{}, err
	}
	_, err = y.s.on(y.s.o.Write).exec(ctx, `INSERT INTO tenants (name, created_at) VALUES (?, ?) ON CONFLICT DO NOTHING`, name, micro(y.s.o.Now()))
	if err != nil {
		return tenant.ID{}, err
	}
	return t, nil
}

// Counts implements store.System: living sandboxes by observed state.
func (y system) Counts(ctx context.Context) (store.Counts, error) {
	c := store.Counts{Sandboxes: map[sandbox.State]int{}}
	err := y.s.read().each(ctx, func(rows *sql.Rows) error {
		var state string
		var n int
		if err := rows.Scan(&state, &n); err != nil {
			return err
		}
		c.Sandboxes[sandbox.State(state)] = n
		return nil
	}, `SELECT observed, count(*) FROM sandboxes WHERE deleted_at IS NULL GROUP BY observed`)
	if err != nil {
		return store.Counts{}, err
	}
	err = y.s.read().row(ctx, `SELECT count(*) FROM operations WHERE final = 0`).Scan(&c.OpenOps)
	if err != nil {
		return store.Counts{}, notFound("counts", err)
	}
	return c, nil
}
