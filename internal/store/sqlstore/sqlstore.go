// Package sqlstore is the one implementation of store.Store over database/sql.
// Packages sqlite and postgres open a database, migrate it, and hand it over
// with a Dialect; nothing here asks which one it is.
//
// # How the guarantees of package store are kept
//
//  1. Mutate takes the tenant first (SQLite: BEGIN IMMEDIATE, so all tenants;
//     PostgreSQL: the tenant's row, FOR NO KEY UPDATE), so two Mutates of one
//     tenant never interleave and what one read is still true when it commits.
//     The audit head is locked last, just before the commit, always in that
//     order: no deadlock between Mutates.
//  2. A statement that failed poisons its transaction, also when fn swallowed the
//     error: it is rolled back, never half committed.
//  3. Every statement has the tenant in its condition, except those of System.
//  4. Free text never is an index key: names, metadata pairs and idempotency keys
//     are found by hash, so that any length and any character (NUL, which
//     PostgreSQL's text refuses, included) works the same on both databases.
package sqlstore

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// Failpoints of Mutate.
var (
	fpBeforeCommit = failpoint.Name("store.mutate.before-commit")
	fpAfterCommit  = failpoint.Name("store.mutate.after-commit")
)

const (
	// commitTimeout bounds a transaction once its context no longer does.
	commitTimeout = 60 * time.Second
	// attempts bounds how often Mutate runs fn when the database asks for a retry.
	attempts = 12
)

// Dialect is what differs between the databases.
type Dialect struct {
	// Numbered placeholders ($1) instead of question marks.
	Numbered bool
	// LockRow is appended to a SELECT that must keep others from the row until
	// commit; "" where the transaction already excludes every other writer.
	LockRow string
	// Retry reports whether the database chose this transaction as the one to
	// run again (serialisation failure, deadlock).
	Retry func(error) bool
}

// Options of a Store.
type Options struct {
	Dialect Dialect
	// Write runs transactions; Read runs everything else. They may be the same.
	Write, Read *sql.DB
	// Close closes both.
	Close func() error
	// Now defaults to time.Now; it stamps only tenants' rows.
	Now func() time.Time
}

// Store implements store.Store.
type Store struct {
	o         Options
	rebound   sync.Map // query with ? to query with $n
	cursorKey []byte
	trace     func(query string, args []any) // of tests, set before use
}

var _ store.Store = (*Store)(nil)

// New makes a Store over migrated databases, which it closes with Close.
func New(ctx context.Context, o Options) (*Store, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	s := &Store{o: o}
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails (crypto/rand)
	w := s.on(o.Write)
	if _, err := w.exec(ctx, `INSERT INTO meta (name, value) VALUES ('cursor-key', ?) ON CONFLICT DO NOTHING`, key); err != nil {
		return nil, err
	}
	if err := w.row(ctx, `SELECT value FROM meta WHERE name = 'cursor-key'`).Scan(&s.cursorKey); err != nil {
		return nil, fmt.Errorf("store: read cursor key: %w", err)
	}
	if _, err := w.exec(ctx, `INSERT INTO audit_head (chain, seq, hash) VALUES (?, 0, ?) ON CONFLICT DO NOTHING`, Chain, []byte{}); err != nil {
		return nil, err
	}
	return s, nil
}

// querier is *sql.DB or *sql.Tx.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// runner runs statements in the store's dialect.
type runner struct {
	q querier
	s *Store
}

func (s *Store) on(q querier) runner { return runner{q: q, s: s} }
func (s *Store) read() runner        { return runner{q: s.o.Read, s: s} }

func (r runner) exec(ctx context.Context, query string, args ...any) (int64, error) {
	r.s.traced(query, args)
	res, err := r.q.ExecContext(ctx, r.s.rebind(query), args...)
	if err != nil {
		return 0, fmt.Errorf("store: %w", err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return 0, fmt.Errorf("store: %w", err)
	}
	return n, nil
}

func (r runner) row(ctx context.Context, query string, args ...any) *sql.Row {
	r.s.traced(query, args)
	return r.q.QueryRowContext(ctx, r.s.rebind(query), args...)
}

// each calls scan for every row.
func (r runner) each(ctx context.Context, scan func(*sql.Rows) error, query string, args ...any) error {
	r.s.traced(query, args)
	rows, err := r.q.QueryContext(ctx, r.s.rebind(query), args...)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	defer func() { _ = rows.Close() }() // rows.Err below has what matters
	for rows.Next() {
		if err := scan(rows); err != nil {
			return fmt.Errorf("store: %w", err)
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	return nil
}

func (s *Store) traced(query string, args []any) {
	if s.trace != nil {
		s.trace(query, args)
	}
}

func (s *Store) rebind(query string) string {
	if !s.o.Dialect.Numbered {
		return query
	}
	if q, ok := s.rebound.Load(query); ok {
		return q.(string)
	}
	// No statement has a question mark in a literal.
	var b strings.Builder
	n := 0
	for _, c := range query {
		if c == '?' {
			n++
			b.WriteByte('$')
			b.WriteString(strconv.Itoa(n))
			continue
		}
		b.WriteRune(c)
	}
	s.rebound.Store(query, b.String())
	return b.String()
}

// Mutate implements store.Store. fn must not call Mutate: it would wait for itself.
func (s *Store) Mutate(ctx context.Context, t tenant.ID, fn func(tx store.Tx) error) error {
	if t.IsZero() {
		return errNoTenant
	}
	for try := 1; ; try++ {
		err := s.mutate(ctx, t, fn)
		if err == nil || try == attempts || s.o.Dialect.Retry == nil || !s.o.Dialect.Retry(err) {
			return err
		}
		if err := sleep(ctx, time.Duration(try)*5*time.Millisecond); err != nil {
			return err
		}
	}
}

func (s *Store) mutate(ctx context.Context, t tenant.ID, fn func(tx store.Tx) error) error {
	conn, err := s.o.Write.Conn(ctx)
	if err != nil {
		return fmt.Errorf("store: wait for the database: %w", err)
	}
	defer func() { _ = conn.Close() }() // gives it back; database/sql drops a broken one
	// The caller's context bounds the statements, not the commit: a commit that is
	// cut half way would leave nobody knowing whether it happened.
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	sqltx, err := conn.BeginTx(bounded, nil)
	if err != nil {
		return fmt.Errorf("store: begin: %w", err)
	}
	defer func() { _ = sqltx.Rollback() }() // nothing after a commit
	x := &tx{ctx: ctx, t: t, r: s.on(sqltx)}
	defer func() { x.done = true }()
	var one int
	err = x.r.row(ctx, `SELECT 1 FROM tenants WHERE name = ?`+s.o.Dialect.LockRow, t.String()).Scan(&one)
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("tenant %s: %w", t, store.ErrNotFound)
	}
	if err != nil {
		return fmt.Errorf("store: lock tenant: %w", err)
	}
	if err := fn(x); err != nil {
		return err
	}
	if x.broken != nil {
		return x.broken
	}
	if err := x.appendAudit(); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, fpBeforeCommit); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	if err := sqltx.Commit(); err != nil {
		return fmt.Errorf("store: commit: %w", err)
	}
	return failpoint.Hit(ctx, fpAfterCommit)
}

func sleep(ctx context.Context, d time.Duration) error {
	if n, err := rand.Int(rand.Reader, big.NewInt(int64(d)+1)); err == nil {
		d += time.Duration(n.Int64()) // so that two losers do not meet again
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("store: %w", ctx.Err())
	}
}

// Ping implements store.Store: the database answers and can begin to write.
func (s *Store) Ping(ctx context.Context) error {
	var n int
	if err := s.read().row(ctx, `SELECT 1`).Scan(&n); err != nil {
		return fmt.Errorf("store: ping: %w", err)
	}
	return nil
}

// Close implements store.Store.
func (s *Store) Close() error { return s.o.Close() }

// System implements store.Store.
func (s *Store) System() store.System { return system{s} }
