package sqlitedb

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
)

func open(t *testing.T, path string) *DB {
	t.Helper()
	db, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

func exec(query string, args ...any) func(*sql.Tx) error {
	return func(tx *sql.Tx) error { _, err := tx.Exec(query, args...); return err }
}

func count(t *testing.T, db *sql.DB, table string) int {
	t.Helper()
	var n int
	if err := db.QueryRow("SELECT count(*) FROM " + table).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// Tenant data that was deleted is not found in the file again.
func TestDeletedContentIsOverwritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.db")
	db, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range []string{
		"CREATE TABLE a (n INTEGER PRIMARY KEY, t TEXT)",
		"INSERT INTO a SELECT value, 'PLANTED-' || value || hex(zeroblob(3000)) FROM (WITH RECURSIVE c(value) AS (SELECT 1 UNION ALL SELECT value+1 FROM c WHERE value<200) SELECT value FROM c)",
		"UPDATE a SET t = 'short' WHERE n % 2 = 0",
		"DELETE FROM a WHERE n % 2 = 1",
	} {
		if err := db.Update(t.Context(), exec(q)); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), "PLANTED"); n > 0 {
		t.Errorf("%d deleted values are still in the file", n)
	}
}

func TestSettings(t *testing.T) {
	path := filepath.Join(t.TempDir(), "odd name ?#%41&.db")
	db := open(t, path)
	for pragma, want := range map[string]string{"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1", "busy_timeout": "10000", "trusted_schema": "0"} {
		var got string
		if err := db.Write.QueryRow("PRAGMA " + pragma).Scan(&got); err != nil || got != want {
			t.Errorf("%s is %q (%v), want %s", pragma, got, err, want)
		}
	}
	if err := db.Update(t.Context(), exec("CREATE TABLE a (n INTEGER PRIMARY KEY)")); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Read.Exec("INSERT INTO a VALUES (1)"); err == nil {
		t.Error("the readers can write")
	}
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if info, err := os.Stat(path + suffix); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode of %q: %v, %v", suffix, info, err)
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), "missing", "db")); err == nil {
		t.Error("opened a file in a directory that is not there")
	}
}

func TestModeIsNarrowed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	open(t, path)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info, err)
	}
}

func TestUpdate(t *testing.T) {
	db := open(t, filepath.Join(t.TempDir(), "db"))
	if err := db.Update(t.Context(), exec("CREATE TABLE a (n INTEGER PRIMARY KEY)")); err != nil {
		t.Fatal(err)
	}
	stop := errors.New("stop")
	err := db.Update(t.Context(), func(tx *sql.Tx) error { return errors.Join(exec("INSERT INTO a VALUES (1)")(tx), stop) })
	if !errors.Is(err, stop) || count(t, db.Read, "a") != 0 {
		t.Errorf("after an error: %v, %d rows", err, count(t, db.Read, "a"))
	}
	ctx, cancel := context.WithCancel(t.Context())
	err = db.Update(ctx, func(tx *sql.Tx) error { cancel(); return exec("INSERT INTO a VALUES (1)")(tx) })
	if !errors.Is(err, context.Canceled) || count(t, db.Read, "a") != 0 {
		t.Errorf("after a cancel: %v, %d rows", err, count(t, db.Read, "a"))
	}
	func() {
		defer func() { _ = recover() }()
		_ = db.Update(t.Context(), func(tx *sql.Tx) error { _ = exec("INSERT INTO a VALUES (1)")(tx); panic("x") })
	}()
	// Read, add, write from many: none is lost, also over two handles of the file.
	other := open(t, filepath.Join(filepath.Dir(pathOf(t, db)), "db"))
	if err := db.Update(t.Context(), exec("INSERT INTO a VALUES (100)")); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 5 {
				if err := []*DB{db, other}[i%2].Update(t.Context(), func(tx *sql.Tx) error {
					var n int
					if err := tx.QueryRow("SELECT max(n) FROM a").Scan(&n); err != nil {
						return err
					}
					return exec("INSERT INTO a VALUES (?)", n+1)(tx)
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := count(t, db.Read, "a"); n != 41 {
		t.Errorf("%d rows, want 41", n)
	}
}

func pathOf(t *testing.T, db *DB) string {
	t.Helper()
	var n, name, file string
	if err := db.Read.QueryRow("PRAGMA database_list").Scan(&n, &name, &file); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestMigrate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	file := func(up string) *fstest.MapFile {
		return &fstest.MapFile{Data: []byte("-- +goose Up\n" + up + "\n-- +goose Down\nSELECT 1;\n")}
	}
	one := fstest.MapFS{"m/00001_a.sql": file("CREATE TABLE a (n INTEGER);")}
	two := fstest.MapFS{"m/00001_a.sql": one["m/00001_a.sql"], "m/00002_b.sql": file("CREATE TABLE b (n INTEGER);")}
	broken := fstest.MapFS{"m/00001_a.sql": file("CREATE TABLE c (n INTEGER); INSERT INTO nowhere VALUES (1);")}
	db := open(t, path)
	ctx := t.Context()
	for range 2 { // again is nothing
		if err := Migrate(ctx, db, one, "m", "one_version"); err != nil {
			t.Fatal(err)
		}
	}
	if err := Migrate(ctx, db, two, "m", "one_version"); err != nil {
		t.Fatal(err)
	}
	count(t, db.Read, "a")
	count(t, db.Read, "b")
	if err := Migrate(ctx, db, one, "m", "one_version"); err == nil || !strings.Contains(err.Error(), "newer program") {
		t.Errorf("an older program opened it: %v", err)
	}
	// Another package in the same file has a version of its own; a broken
	// migration leaves nothing.
	if err := Migrate(ctx, db, broken, "m", "other_version"); err == nil {
		t.Error("a broken migration went through")
	}
	if err := db.Read.QueryRow("SELECT n FROM c").Scan(new(int)); err == nil || errors.Is(err, sql.ErrNoRows) {
		t.Errorf("a broken migration left its table: %v", err)
	}
	fixed := fstest.MapFS{"m/00001_a.sql": file("CREATE TABLE c (n INTEGER);")}
	if err := Migrate(ctx, db, fixed, "m", "other_version"); err != nil {
		t.Fatal(err)
	}
}
