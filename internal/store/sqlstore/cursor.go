package sqlstore

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"strconv"

	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// A cursor is base64url of version 1, the key of the last row seen (an int64 and
// an id), and an HMAC over them, the tenant and the list with its filter. So it
// works only for the list that made it, and nobody can make one.
const (
	cursorVersion = 1
	cursorMAC     = 16
	maxCursor     = 512
)

// place is the key of a row in a list's order.
type place struct {
	at int64
	id string
}

func (s *Store) cursor(t tenant.ID, list []byte, p place) string {
	b := binary.BigEndian.AppendUint64([]byte{cursorVersion}, uint64(p.at))
	b = append(b, p.id...)
	return base64.RawURLEncoding.EncodeToString(append(b, s.cursorSum(t, list, b)...))
}

// parseCursor gives nil for "", the begin of the list.
func (s *Store) parseCursor(t tenant.ID, list []byte, cursor string) (*place, error) {
	if cursor == "" {
		return nil, nil
	}
	if len(cursor) > maxCursor {
		return nil, store.ErrBadCursor
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(cursor)
	if err != nil || len(b) < 1+8+cursorMAC || b[0] != cursorVersion {
		return nil, store.ErrBadCursor
	}
	body, mac := b[:len(b)-cursorMAC], b[len(b)-cursorMAC:]
	if !hmac.Equal(mac, s.cursorSum(t, list, body)) {
		return nil, store.ErrBadCursor
	}
	return &place{at: int64(binary.BigEndian.Uint64(body[1:9])), id: string(body[9:])}, nil
}

func (s *Store) cursorSum(t tenant.ID, list, body []byte) []byte {
	m := hmac.New(sha256.New, s.cursorKey)
	m.Write(digest(t.String(), string(list), string(body)))
	return m.Sum(nil)[:cursorMAC]
}

// limits gives the page size that n asks for.
func limits(n int) int {
	switch {
	case n <= 0:
		return 100
	case n > 1000:
		return 1000
	}
	return n
}

// page cuts items (one more than limit were asked for) and makes the cursor.
func page[T any](s *Store, t tenant.ID, list []byte, items []T, limit int, at func(T) place) store.Page[T] {
	if len(items) <= limit {
		return store.Page[T]{Items: items}
	}
	items = items[:limit]
	return store.Page[T]{Items: items, Next: s.cursor(t, list, at(items[limit-1]))}
}

// before is the condition "after the cursor in descending order" and its arguments.
func before(p *place, at, id string) (string, []any) {
	if p == nil {
		return "", nil
	}
	return " AND (" + at + ", " + id + ") < (?, ?)", []any{p.at, p.id}
}

func limitSQL(n int) string { return " LIMIT " + strconv.Itoa(n) }
