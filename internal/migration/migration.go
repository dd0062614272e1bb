// Package migration brings database tables to the form this program expects.
package migration

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"

	"github.com/pressly/goose/v3"
)

// Up applies what is missing of the migrations in dir of fsys (files
// NNNNN_name.sql in goose's format), each in its own transaction. table keeps
// the version. It refuses tables that a newer program has migrated.
func Up(ctx context.Context, dialect goose.Dialect, db *sql.DB, fsys fs.FS, dir, table string, opts ...goose.ProviderOption) error {
	sub, err := fs.Sub(fsys, dir)
	if err != nil {
		return fmt.Errorf("migration: %w", err)
	}
	opts = append([]goose.ProviderOption{goose.WithTableName(table), goose.WithDisableGlobalRegistry(true)}, opts...)
	// The provider is not closed: closing it would close db.
	p, err := goose.NewProvider(dialect, db, sub, opts...)
	if err != nil {
		return fmt.Errorf("migration: %w", err)
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("migration: %s: %w", table, err)
	}
	have, want, err := p.GetVersions(ctx)
	if err != nil {
		return fmt.Errorf("migration: read version of %s: %w", table, err)
	}
	if have > want {
		return fmt.Errorf("migration: %s is at version %d and this program knows %d: it was written by a newer program", table, have, want)
	}
	return nil
}
