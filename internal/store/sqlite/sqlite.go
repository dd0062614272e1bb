// Package sqlite is the store in one SQLite file: the control plane's state on
// one machine, without another service.
package sqlite

import (
	"context"
	"embed"
	"errors"

	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlstore"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Open opens the store in the file at path, makes it (mode 0600) when it is
// missing, and migrates it.
func Open(path string) (store.Store, error) {
	db, err := sqlitedb.Open(path)
	if err != nil {
		return nil, err
	}
	ctx := context.Background()
	if err := sqlitedb.Migrate(ctx, db, migrations, "migrations", "store_version"); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	s, err := sqlstore.New(ctx, sqlstore.Options{Write: db.Write, Read: db.Read, Close: db.Close})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return s, nil
}
