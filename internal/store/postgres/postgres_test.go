package postgres_test

import (
	"database/sql"
	"errors"
	"testing"

	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/postgres"
	"github.com/space-platform/space/internal/store/postgres/postgrestest"
	"github.com/space-platform/space/internal/store/storetest"
)

func TestStore(t *testing.T) {
	server := postgrestest.Start(t)
	storetest.Run(t, func(t *testing.T) storetest.Opener {
		dsn := server.Database(t)
		return func() (store.Store, error) { return postgres.Open(dsn) }
	})
}

func BenchmarkStore(b *testing.B) {
	server := postgrestest.Start(b)
	storetest.Bench(b, func(b *testing.B) (storetest.Opener, func() error) {
		dsn := server.Database(b)
		return func() (store.Store, error) { return postgres.Open(dsn) }, func() error {
			db, err := sql.Open("pgx", dsn)
			if err != nil {
				return err
			}
			_, err = db.Exec("ANALYZE")
			return errors.Join(err, db.Close())
		}
	})
}
