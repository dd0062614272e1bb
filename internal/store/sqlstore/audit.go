package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// Chain is the name of the control plane's audit chain.
const Chain = "control"

// Audit keeps e for the end of the transaction: the head of the chain is locked
// for the shortest time, and always last.
func (x *tx) Audit(e audit.Entry) error {
	if err := x.usable(); err != nil {
		return err
	}
	if e.Tenant == "" {
		e.Tenant = x.t.String()
	}
	switch {
	case e.Tenant != x.t.String():
		return errOtherOwner
	case e.At.IsZero() || e.Actor == "" || e.Action == "":
		return errors.New("store: an audit entry needs time, actor and action")
	}
	x.entries = append(x.entries, e)
	return nil
}

func (x *tx) appendAudit() error {
	if len(x.entries) == 0 {
		return nil
	}
	var seq int64
	var hash []byte
	err := x.r.row(x.ctx, `SELECT seq, hash FROM audit_head WHERE chain = ?`+x.r.s.o.Dialect.LockRow, Chain).Scan(&seq, &hash)
	if err != nil {
		return fmt.Errorf("store: read audit head: %w", err)
	}
	for _, e := range x.entries {
		r, err := audit.Next(Chain, uint64(seq), hash, e)
		if err != nil {
			return err
		}
		body, err := encode(r.Entry)
		if err != nil {
			return err
		}
		if _, err := x.r.exec(x.ctx, `INSERT INTO audit (seq, tenant, entry, prev, hash) VALUES (?, ?, ?, ?, ?)`,
			int64(r.Seq), x.t.String(), body, r.Prev, r.Hash); err != nil {
			return err
		}
		seq, hash = int64(r.Seq), r.Hash
	}
	n, err := x.r.exec(x.ctx, `UPDATE audit_head SET seq = ?, hash = ? WHERE chain = ?`, seq, hash, Chain)
	if err != nil {
		return err
	}
	if n != 1 {
		return errors.New("store: the audit head is missing")
	}
	return nil
}

func scanRecord(scan func(...any) error) (audit.Record, error) {
	r := audit.Record{Chain: Chain}
	var seq int64
	var body string
	if err := scan(&seq, &body, &r.Prev, &r.Hash); err != nil {
		return audit.Record{}, err
	}
	r.Seq = uint64(seq)
	return r, decode(body, &r.Entry)
}

// AuditEntries implements store.Store: newest first.
func (s *Store) AuditEntries(ctx context.Context, t tenant.ID, cursor string, limit int) (store.Page[audit.Record], error) {
	if t.IsZero() {
		return store.Page[audit.Record]{}, errNoTenant
	}
	list := digest("audit")
	from, err := s.parseCursor(t, list, cursor)
	if err != nil {
		return store.Page[audit.Record]{}, err
	}
	limit = limits(limit)
	query, args := `SELECT seq, entry, prev, hash FROM audit WHERE tenant = ?`, []any{t.String()}
	if from != nil {
		query, args = query+` AND seq < ?`, append(args, from.at)
	}
	items, err := s.records(ctx, query+` ORDER BY seq DESC`+limitSQL(limit+1), args...)
	if err != nil {
		return store.Page[audit.Record]{}, err
	}
	return page(s, t, list, items, limit, func(r audit.Record) place { return place{at: int64(r.Seq)} }), nil
}

// AuditAll implements store.System.
func (y system) AuditAll(ctx context.Context, from uint64, limit int) ([]audit.Record, error) {
	n, err := number(from)
	if err != nil {
		return nil, err
	}
	return y.s.records(ctx, `SELECT seq, entry, prev, hash FROM audit WHERE seq >= ? ORDER BY seq`+limitSQL(limits(limit)), n)
}

func (s *Store) records(ctx context.Context, query string, args ...any) ([]audit.Record, error) {
	var out []audit.Record
	err := s.read().each(ctx, func(rows *sql.Rows) error {
		r, err := scanRecord(rows.Scan)
		out = append(out, r)
		return err
	}, query, args...)
	return out, err
}
