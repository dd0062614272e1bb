// Package postgres is the store in a PostgreSQL database, for control planes of
// more than one process.
package postgres

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"github.com/space-platform/space/internal/migration"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlstore"
)

//go:embed migrations/*.sql
var migrations embed.FS

// connections bounds the pool of one process.
const connections = 16

// Open connects to the database that dsn (URL or key=value) names and migrates
// it; several processes may do so at once. Errors never contain the password.
func Open(dsn string) (store.Store, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("postgres: %w", err) // pgx redacts the password
	}
	// The guarantees need them whatever the server's or the role's defaults are.
	cfg.RuntimeParams["synchronous_commit"] = "on"
	cfg.RuntimeParams["default_transaction_isolation"] = "read committed"
	db := stdlib.OpenDB(*cfg)
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	db.SetConnMaxIdleTime(5 * time.Minute)
	ctx := context.Background()
	locker, err := lock.NewPostgresSessionLocker()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("postgres: %w", err), db.Close())
	}
	if err := migration.Up(ctx, goose.DialectPostgres, db, migrations, "migrations", "store_version", goose.WithSessionLocker(locker)); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	s, err := sqlstore.New(ctx, sqlstore.Options{
		Dialect: sqlstore.Dialect{Numbered: true, LockRow: " FOR NO KEY UPDATE", Retry: retry},
		Write:   db, Read: db, Close: db.Close,
	})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return s, nil
}

// retry: serialization_failure and deadlock_detected, nothing was done.
func retry(err error) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && (e.Code == "40001" || e.Code == "40P01")
}
