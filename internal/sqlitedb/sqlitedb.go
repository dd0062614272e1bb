// Package sqlitedb opens SQLite files the one way SPACE uses them: write-ahead
// log, every commit on the disk before it is acknowledged (synchronous=FULL),
// foreign keys on, one writer, several readers, mode 0600.
//
// # Rules for callers
//
//  1. Everything that writes goes through DB.Write or DB.Update; DB.Read refuses
//     to write. A reader that opens after a commit returned sees that commit.
//  2. Write has one connection. Code that holds a transaction on it must not ask
//     Write for another one: it would wait for itself.
//  3. Transactions on Write begin IMMEDIATE, so a read inside one is never
//     overtaken by another writer, and commit never meets a stale snapshot.
//  4. What is deleted is overwritten in the file with zeros, so that it does not
//     stay in free pages. The log still has it until a checkpoint has passed and
//     the log begins again: after some 4 MiB more of writing, or at the next Close.
//  5. Each package that keeps tables in a file has its own migrations and its own
//     version table (Migrate).
package sqlitedb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/pressly/goose/v3"
	"github.com/space-platform/space/internal/migration"
	_ "modernc.org/sqlite" // the driver "sqlite"
)

// BusyTimeout is how long a statement waits for another process's lock.
const BusyTimeout = 10 * time.Second

// readers bounds the read connections of one file; each holds a few hundred KiB.
const readers = 4

// DB is one open file.
type DB struct {
	// Write has exactly one connection; its transactions begin IMMEDIATE.
	Write *sql.DB
	// Read has several connections that refuse to write.
	Read *sql.DB
}

// Open opens the file at path and makes it (mode 0600) when it is missing. The
// directory must exist.
func Open(path string) (*DB, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("sqlitedb: %w", err)
	}
	if err := prepare(abs); err != nil {
		return nil, fmt.Errorf("sqlitedb: prepare database file: %w", err)
	}
	write, err := sql.Open("sqlite", dsn(abs, "rw", "immediate", "journal_mode(WAL)", "synchronous(FULL)", "secure_delete(1)"))
	if err != nil {
		return nil, fmt.Errorf("sqlitedb: %w", err)
	}
	write.SetMaxOpenConns(1)
	write.SetMaxIdleConns(1)
	read, err := sql.Open("sqlite", dsn(abs, "rw", "deferred", "query_only(1)"))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("sqlitedb: %w", err), write.Close())
	}
	read.SetMaxOpenConns(readers)
	read.SetMaxIdleConns(readers)
	db := &DB{Write: write, Read: read}
	// The writer first: it turns the log on, which readers then find.
	var mode string
	if err := write.QueryRow("PRAGMA journal_mode").Scan(&mode); err != nil {
		return nil, errors.Join(fmt.Errorf("sqlitedb: open: %w", err), db.Close())
	}
	if mode != "wal" {
		return nil, errors.Join(fmt.Errorf("sqlitedb: journal mode is %q, want wal: the file system may not support shared memory", mode), db.Close())
	}
	if err := read.Ping(); err != nil {
		return nil, errors.Join(fmt.Errorf("sqlitedb: open: %w", err), db.Close())
	}
	return db, nil
}

// prepare makes the file with its final mode before SQLite sees it (the log and
// shared-memory files inherit it), and makes its directory entry durable.
func prepare(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Chmod(0o600), f.Close()); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func dsn(path, mode, lock string, pragmas ...string) string {
	q := url.Values{"mode": {mode}, "_txlock": {lock}}
	for _, p := range append([]string{
		fmt.Sprintf("busy_timeout(%d)", BusyTimeout.Milliseconds()),
		"foreign_keys(1)",
		"trusted_schema(0)",
	}, pragmas...) {
		q.Add("_pragma", p)
	}
	// "file://" keeps an absolute path absolute; url escapes ?, # and %.
	return (&url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}).String()
}

// Update runs fn in one transaction on the writer: all of it is durable when it
// returns nil, none of it otherwise. ctx bounds the wait for the writer and the
// statements; once fn has returned nil the commit is not abandoned.
func (d *DB) Update(ctx context.Context, fn func(tx *sql.Tx) error) error {
	conn, err := d.Write.Conn(ctx)
	if err != nil {
		return fmt.Errorf("sqlitedb: wait for the writer: %w", err)
	}
	defer func() { _ = conn.Close() }() // gives it back; a broken one is dropped by database/sql
	tx, err := conn.BeginTx(context.WithoutCancel(ctx), nil)
	if err != nil {
		return fmt.Errorf("sqlitedb: begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // after a commit this does nothing
	if err := fn(tx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("sqlitedb: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("sqlitedb: commit: %w", err)
	}
	return nil
}

// Close closes the readers, then the writer, which folds the log into the file.
func (d *DB) Close() error {
	return errors.Join(d.Read.Close(), d.Write.Close())
}

// Migrate brings the tables up to the newest migration in dir of fsys;
// versionTable keeps this package's version, apart from those of other packages
// in the same file. See migration.Up.
func Migrate(ctx context.Context, db *DB, fsys fs.FS, dir, versionTable string) error {
	return migration.Up(ctx, goose.DialectSQLite3, db.Write, fsys, dir, versionTable)
}
