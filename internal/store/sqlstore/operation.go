package sqlstore

import (
	"context"
	"database/sql"

	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

func scanOperation(scan func(...any) error) (operation.Operation, error) {
	var doc string
	if err := scan(&doc); err != nil {
		return operation.Operation{}, err
	}
	var o operation.Operation
	return o, decode(doc, &o)
}

func (r runner) operation(ctx context.Context, t tenant.ID, id string) (operation.Operation, error) {
	if t.IsZero() {
		return operation.Operation{}, errNoTenant
	}
	if !possible(id) {
		return operation.Operation{}, notFound("operation", sql.ErrNoRows)
	}
	o, err := scanOperation(r.row(ctx, `SELECT doc FROM operations WHERE tenant = ? AND id = ?`, t.String(), id).Scan)
	if err != nil {
		return operation.Operation{}, notFound("operation", err)
	}
	return o, nil
}

// Operation implements store.Store.
func (s *Store) Operation(ctx context.Context, t tenant.ID, id string) (operation.Operation, error) {
	return s.read().operation(ctx, t, id)
}

// Operations implements store.Store.
func (s *Store) Operations(ctx context.Context, t tenant.ID, id sandbox.ID, cursor string, limit int) (store.Page[operation.Operation], error) {
	if t.IsZero() {
		return store.Page[operation.Operation]{}, errNoTenant
	}
	list := digest("operations", string(id))
	from, err := s.parseCursor(t, list, cursor)
	if err != nil {
		return store.Page[operation.Operation]{}, err
	}
	if !possible(string(id)) {
		return store.Page[operation.Operation]{}, nil
	}
	limit = limits(limit)
	query, args := `SELECT doc FROM operations WHERE tenant = ?`, []any{t.String()}
	if id != "" {
		query, args = query+` AND sandbox = ?`, append(args, string(id))
	}
	cond, condArgs := before(from, "created_at", "id")
	var items []operation.Operation
	err = s.read().each(ctx, func(rows *sql.Rows) error {
		o, err := scanOperation(rows.Scan)
		items = append(items, o)
		return err
	}, query+cond+` ORDER BY created_at DESC, id DESC`+limitSQL(limit+1), append(args, condArgs...)...)
	if err != nil {
		return store.Page[operation.Operation]{}, err
	}
	return page(s, t, list, items, limit, func(o operation.Operation) place {
		return place{micro(o.CreatedAt), o.ID}
	}), nil
}
