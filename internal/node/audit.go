package node

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/space-platform/space/internal/audit"
)

// Auditor appends to this node's chain, in the transaction of the act itself:
// what cannot be recorded does not happen. The session manager, which keeps its
// tables in the same file, shares it.
type Auditor struct{ chain string }

// NewAuditor is the chain of the node called name. Its table comes from Migrate.
func NewAuditor(name string) *Auditor { return &Auditor{chain: "node:" + name} }

// Append chains e. tx must be a transaction of sqlitedb's writer, so that no
// two appends read the same end of the chain.
func (a *Auditor) Append(ctx context.Context, tx *sql.Tx, e audit.Entry) error {
	var seq int64
	var hash []byte
	err := tx.QueryRowContext(ctx, `SELECT seq, hash FROM node_audit ORDER BY seq DESC LIMIT 1`).Scan(&seq, &hash)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("node: read the end of the audit chain: %w", err)
	}
	r, err := audit.Next(a.chain, uint64(seq), hash, e)
	if err != nil {
		return fmt.Errorf("node: %w", err)
	}
	body, err := json.Marshal(r.Entry)
	if err != nil {
		return fmt.Errorf("node: audit entry: %w", err)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO node_audit (seq, chain, tenant, entry, prev, hash) VALUES (?,?,?,?,?,?)`,
		int64(r.Seq), r.Chain, r.Entry.Tenant, string(body), r.Prev, r.Hash)
	if err != nil {
		return fmt.Errorf("node: append to the audit chain: %w", err)
	}
	return nil
}

// Records walks the chain from seq (1-based), for verification; db is any
// handle of the node's file, so that a stopped node can be verified too.
func (a *Auditor) Records(ctx context.Context, db *sql.DB, from uint64, limit int) ([]audit.Record, error) {
	return a.query(ctx, db, `SELECT seq, chain, entry, prev, hash FROM node_audit WHERE seq >= ? ORDER BY seq LIMIT ?`,
		int64(from), limit)
}

// TenantRecords lists one tenant's records below seq before (0: from the
// newest), newest first.
func (a *Auditor) TenantRecords(ctx context.Context, db *sql.DB, tenant string, before uint64, limit int) ([]audit.Record, error) {
	return a.query(ctx, db, `SELECT seq, chain, entry, prev, hash FROM node_audit
		WHERE tenant = ? AND (? = 0 OR seq < ?) ORDER BY seq DESC LIMIT ?`, tenant, int64(before), int64(before), limit)
}

func (a *Auditor) query(ctx context.Context, db *sql.DB, query string, args ...any) (out []audit.Record, err error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, fmt.Errorf("node: read the audit chain: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var r audit.Record
		var seq int64
		var body string
		if err := rows.Scan(&seq, &r.Chain, &body, &r.Prev, &r.Hash); err != nil {
			return nil, fmt.Errorf("node: read the audit chain: %w", err)
		}
		if err := json.Unmarshal([]byte(body), &r.Entry); err != nil {
			return nil, fmt.Errorf("node: audit record %d: %w", seq, err)
		}
		r.Seq = uint64(seq)
		out = append(out, r)
	}
	return out, rows.Err()
}
