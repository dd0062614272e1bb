package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// tx implements store.Tx; one goroutine at a time.
type tx struct {
	ctx     context.Context
	t       tenant.ID
	r       runner
	entries []audit.Entry
	broken  error // a statement failed: the transaction cannot be committed
	done    bool
}

var _ store.Tx = (*tx)(nil)

func (x *tx) usable() error {
	if x.done {
		return errTxDone
	}
	return x.broken
}

// note remembers an error of the database; the store's own answers leave the
// transaction usable.
func (x *tx) note(err error) error {
	switch {
	case err == nil, errors.Is(err, store.ErrNotFound), errors.Is(err, store.ErrExists), errors.Is(err, store.ErrConflict):
		return err
	}
	x.broken = err
	return err
}

func (x *tx) InsertOperation(o operation.Operation) error {
	if err := x.usable(); err != nil {
		return err
	}
	if o.ID == "" || !possible(o.ID) || !possible(string(o.Sandbox)) {
		return fmt.Errorf("store: operation id is not valid")
	}
	o = normOperation(o)
	doc, err := encode(o)
	if err != nil {
		return err
	}
	n, err := x.r.exec(x.ctx, `INSERT INTO operations (id, tenant, sandbox, final, created_at, updated_at, deadline_at, doc)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		o.ID, x.t.String(), string(o.Sandbox), flag(o.State.Final()), micro(o.CreatedAt), micro(o.UpdatedAt), stamp(o.DeadlineAt), doc)
	if err != nil {
		return x.note(err)
	}
	if n == 0 {
		return fmt.Errorf("operation: %w", store.ErrExists)
	}
	return nil
}

func (x *tx) Operation(id string) (operation.Operation, error) {
	if err := x.usable(); err != nil {
		return operation.Operation{}, err
	}
	o, err := x.r.operation(x.ctx, x.t, id)
	return o, x.note(err)
}

func (x *tx) UpdateOperation(o operation.Operation) error {
	old, err := x.Operation(o.ID)
	if err != nil {
		return err
	}
	o = normOperation(o)
	switch {
	case old.State.Final():
		return fmt.Errorf("operation %s is %s: %w", o.ID, old.State, store.ErrConflict)
	case !o.CreatedAt.Equal(old.CreatedAt) || o.Sandbox != old.Sandbox:
		return fmt.Errorf("store: creation time and sandbox of an operation never change")
	}
	doc, err := encode(o)
	if err != nil {
		return err
	}
	n, err := x.r.exec(x.ctx, `UPDATE operations SET final = ?, updated_at = ?, deadline_at = ?, doc = ? WHERE tenant = ? AND id = ? AND final = 0`,
		flag(o.State.Final()), micro(o.UpdatedAt), stamp(o.DeadlineAt), doc, x.t.String(), o.ID)
	if err != nil {
		return x.note(err)
	}
	if n == 0 {
		return fmt.Errorf("operation %s: %w", o.ID, store.ErrConflict)
	}
	return nil
}

func (x *tx) OpenOperations(id sandbox.ID) ([]operation.Operation, error) {
	if err := x.usable(); err != nil {
		return nil, err
	}
	if !possible(string(id)) {
		return nil, nil
	}
	var out []operation.Operation
	err := x.r.each(x.ctx, func(rows *sql.Rows) error {
		o, err := scanOperation(rows.Scan)
		out = append(out, o)
		return err
	}, `SELECT doc FROM operations WHERE tenant = ? AND sandbox = ? AND final = 0 ORDER BY created_at, id`, x.t.String(), string(id))
	return out, x.note(err)
}

func (x *tx) Idempotency(principal, key, method, route string) (store.Idempotency, error) {
	if err := x.usable(); err != nil {
		return store.Idempotency{}, err
	}
	var doc string
	var at int64
	err := x.r.row(x.ctx, `SELECT created_at, doc FROM idempotency WHERE tenant = ? AND digest = ?`,
		x.t.String(), digest(principal, key, method, route)).Scan(&at, &doc)
	if err != nil {
		return store.Idempotency{}, x.note(notFound("idempotency key", err))
	}
	var d idempotencyDoc
	if err := decode(doc, &d); err != nil {
		return store.Idempotency{}, err
	}
	return store.Idempotency{
		Principal: d.Principal, Key: d.Key, Method: d.Method, Route: d.Route,
		BodyHash: d.BodyHash, Operation: d.Operation, Resource: d.Resource, CreatedAt: unmicro(at),
	}, nil
}

func (x *tx) InsertIdempotency(i store.Idempotency) error {
	if err := x.usable(); err != nil {
		return err
	}
	doc, err := encode(idempotencyDoc{i.Principal, i.Key, i.Method, i.Route, i.BodyHash, i.Operation, i.Resource})
	if err != nil {
		return err
	}
	n, err := x.r.exec(x.ctx, `INSERT INTO idempotency (tenant, digest, created_at, doc) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		x.t.String(), digest(i.Principal, i.Key, i.Method, i.Route), micro(i.CreatedAt), doc)
	if err != nil {
		return x.note(err)
	}
	if n == 0 {
		return fmt.Errorf("idempotency key: %w", store.ErrExists)
	}
	return nil
}
