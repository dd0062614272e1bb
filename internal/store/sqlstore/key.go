package sqlstore

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// touchEvery is how often the use of a key is written at most.
const touchEvery = time.Minute

const keyColumns = `SELECT tenant, id, hash, created_at, revoked_at, last_used_at, doc FROM keys `

func scanKey(scan func(...any) error) (store.Key, error) {
	var k store.Key
	var name, doc string
	var created int64
	var revoked, used sql.NullInt64
	if err := scan(&name, &k.ID, &k.Hash, &created, &revoked, &used, &doc); err != nil {
		return store.Key{}, err
	}
	var d keyDoc
	if err := decode(doc, &d); err != nil {
		return store.Key{}, err
	}
	t, err := tenant.Mint(name)
	if err != nil {
		return store.Key{}, err
	}
	k.Tenant, k.Name, k.Scopes, k.CreatedBy, k.ExpiresAt = t, d.Name, d.Scopes, d.CreatedBy, d.ExpiresAt
	k.CreatedAt, k.RevokedAt, k.LastUsedAt = unmicro(created), unstamp(revoked), unstamp(used)
	return k, nil
}

func (x *tx) Key(id string) (store.Key, error) {
	if err := x.usable(); err != nil {
		return store.Key{}, err
	}
	if !possible(id) {
		return store.Key{}, notFound("key", sql.ErrNoRows)
	}
	k, err := scanKey(x.r.row(x.ctx, keyColumns+`WHERE tenant = ? AND id = ?`, x.t.String(), id).Scan)
	if err != nil {
		return store.Key{}, x.note(notFound("key", err))
	}
	return k, nil
}

func (x *tx) InsertKey(k store.Key) error {
	if err := x.usable(); err != nil {
		return err
	}
	if k.Tenant != x.t {
		return errOtherOwner
	}
	if k.ID == "" || !possible(k.ID) || len(k.Hash) == 0 {
		return fmt.Errorf("store: key needs an id and a hash")
	}
	doc, err := encode(keyDoc{k.Name, k.Scopes, k.CreatedBy, norm(k.ExpiresAt)})
	if err != nil {
		return err
	}
	n, err := x.r.exec(x.ctx, `INSERT INTO keys (id, tenant, hash, created_at, revoked_at, last_used_at, doc) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
		k.ID, x.t.String(), k.Hash, micro(k.CreatedAt), stamp(k.RevokedAt), stamp(k.LastUsedAt), doc)
	if err != nil {
		return x.note(err)
	}
	if n == 0 {
		return fmt.Errorf("key: %w", store.ErrExists)
	}
	return nil
}

// UpdateKey refuses to make a revoked key valid again, and to change what a key
// is (hash, creation time).
func (x *tx) UpdateKey(k store.Key) error {
	if k.Tenant != x.t {
		return notFound("key", sql.ErrNoRows)
	}
	old, err := x.Key(k.ID)
	if err != nil {
		return err
	}
	switch {
	case !old.RevokedAt.IsZero() && !norm(k.RevokedAt).Equal(old.RevokedAt):
		return fmt.Errorf("key %s is revoked: %w", k.ID, store.ErrConflict)
	case !bytes.Equal(k.Hash, old.Hash) || !norm(k.CreatedAt).Equal(old.CreatedAt):
		return fmt.Errorf("store: hash and creation time of a key never change")
	}
	doc, err := encode(keyDoc{k.Name, k.Scopes, k.CreatedBy, norm(k.ExpiresAt)})
	if err != nil {
		return err
	}
	_, err = x.r.exec(x.ctx, `UPDATE keys SET revoked_at = ?, last_used_at = ?, doc = ? WHERE tenant = ? AND id = ?`,
		stamp(k.RevokedAt), stamp(k.LastUsedAt), doc, x.t.String(), k.ID)
	return x.note(err)
}

// Keys implements store.Store.
func (s *Store) Keys(ctx context.Context, t tenant.ID, cursor string, limit int) (store.Page[store.Key], error) {
	if t.IsZero() {
		return store.Page[store.Key]{}, errNoTenant
	}
	list := digest("keys")
	from, err := s.parseCursor(t, list, cursor)
	if err != nil {
		return store.Page[store.Key]{}, err
	}
	limit = limits(limit)
	cond, args := before(from, "created_at", "id")
	var items []store.Key
	err = s.read().each(ctx, func(rows *sql.Rows) error {
		k, err := scanKey(rows.Scan)
		items = append(items, k)
		return err
	}, keyColumns+`WHERE tenant = ?`+cond+` ORDER BY created_at DESC, id DESC`+limitSQL(limit+1), append([]any{t.String()}, args...)...)
	if err != nil {
		return store.Page[store.Key]{}, err
	}
	return page(s, t, list, items, limit, func(k store.Key) place { return place{micro(k.CreatedAt), k.ID} }), nil
}

// KeyByHash implements store.System.
func (y system) KeyByHash(ctx context.Context, hash []byte) (store.Key, error) {
	k, err := scanKey(y.s.read().row(ctx, keyColumns+`WHERE hash = ?`, hash).Scan)
	if err != nil {
		return store.Key{}, notFound("key", err)
	}
	return k, nil
}

// TouchKey implements store.System.
func (y system) TouchKey(ctx context.Context, k store.Key, at time.Time) error {
	if k.Tenant.IsZero() {
		return errNoTenant
	}
	if !possible(k.ID) {
		return nil
	}
	_, err := y.s.on(y.s.o.Write).exec(ctx, `UPDATE keys SET last_used_at = ? WHERE tenant = ? AND id = ? AND (last_used_at IS NULL OR last_used_at <= ?)`,
		micro(at), k.Tenant.String(), k.ID, micro(at.Add(-touchEvery)))
	return err
}
