package sqlite_test

import (
	"path/filepath"
	"testing"

	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlite"
	"github.com/space-platform/space/internal/store/storetest"
)

func TestStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Opener {
		path := filepath.Join(t.TempDir(), "control.db")
		return func() (store.Store, error) { return sqlite.Open(path) }
	})
}

func BenchmarkStore(b *testing.B) {
	storetest.Bench(b, func(b *testing.B) (storetest.Opener, func() error) {
		path := filepath.Join(b.TempDir(), "control.db")
		return func() (store.Store, error) { return sqlite.Open(path) }, func() error { return nil }
	})
}
