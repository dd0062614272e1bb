package auth

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store"
)

// maxName bounds a key's name in bytes.
const maxName = 128

// Wish is a key to be minted.
type Wish struct {
	Name   string
	Scopes []Scope
	// ExpiresAt zero is never, unless the minting key expires: then with it.
	ExpiresAt time.Time
	Request   string // request id, for audit
	// Also, if not nil, runs in the same transaction, such as for an idempotency row.
	Also func(tx store.Tx, k store.Key) error
}

// Mint makes a key of by's tenant. The secret is given here and never again.
// Faults: "scope_missing", "scope_too_wide", "expiry_too_late", "invalid_key",
// and those of by's own end.
func (a *Authenticator) Mint(ctx context.Context, by Principal, w Wish) (store.Key, secret.Value, error) {
	if err := by.Require(KeysWrite); err != nil {
		return store.Key{}, secret.Value{}, err
	}
	now := a.c.Clock.Now()
	scopes, err := w.check(now)
	if err != nil {
		return store.Key{}, secret.Value{}, err
	}
	value := generate()
	h := a.hash(value.Reveal())
	k := store.Key{
		Tenant: by.Tenant, ID: newKeyID(), Name: w.Name, Hash: h[:], Scopes: scopes,
		CreatedAt: now.UTC().Truncate(time.Microsecond), CreatedBy: by.KeyID,
		ExpiresAt: w.ExpiresAt.UTC().Truncate(time.Microsecond),
	}
	var stored store.Key
	err = a.c.Store.Mutate(ctx, by.Tenant, func(tx store.Tx) error {
		k := k // may run again
		own, err := a.own(tx, by, now)
		if err != nil {
			return err
		}
		me := principalOf(own, keyHash{})
		if err := me.Require(KeysWrite); err != nil {
			return err
		}
		for _, s := range w.Scopes {
			if !me.Can(s) {
				return fault.New(fault.Denied, "scope_too_wide", "a key cannot mint one with scope %s, which it lacks itself", s).
					Do("leave the scope out, or mint with a key that has it")
			}
		}
		switch {
		case own.ExpiresAt.IsZero():
		case k.ExpiresAt.IsZero():
			k.ExpiresAt = own.ExpiresAt
		case k.ExpiresAt.After(own.ExpiresAt):
			return fault.New(fault.Denied, "expiry_too_late", "a key cannot mint one that outlives it").
				Do("ask for an expiry not after %s", own.ExpiresAt.Format(time.RFC3339))
		}
		stored = k
		return a.insert(tx, k, w, by.KeyID, now)
	})
	if err != nil {
		return store.Key{}, secret.Value{}, keyFault(err)
	}
	return stored, value, nil
}

func newKeyID() string { return "key" + sandbox.Random(16) }

// check gives the scopes as kept: sorted, each once.
func (w Wish) check(now time.Time) ([]string, error) {
	bad := func(why string, args ...any) error {
		return fault.New(fault.Invalid, "invalid_key", "the key cannot be made as asked").Because(why, args...)
	}
	switch {
	case len(w.Name) > maxName || !utf8.ValidString(w.Name) || strings.ContainsFunc(w.Name, unicode.IsControl):
		return nil, bad("a name is at most %d bytes of printable text", maxName)
	case len(w.Scopes) == 0:
		return nil, bad("it has no scope")
	case !w.ExpiresAt.IsZero() && !w.ExpiresAt.After(now):
		return nil, bad("its expiry is in the past")
	case w.ExpiresAt.Year() > 9999:
		return nil, bad("its expiry is too far away")
	}
	var out []string
	for _, s := range w.Scopes {
		if !slices.Contains(Scopes(), s) {
			return nil, bad("there is no scope %.40q; the scopes are %v", string(s), Scopes())
		}
		out = append(out, string(s))
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func (a *Authenticator) insert(tx store.Tx, k store.Key, w Wish, actor string, now time.Time) error {
	if err := tx.InsertKey(k); err != nil {
		return err
	}
	detail := map[string]string{"name": k.Name, "scopes": strings.Join(k.Scopes, " ")}
	if !k.ExpiresAt.IsZero() {
		detail["expires_at"] = k.ExpiresAt.Format(time.RFC3339)
	}
	if err := tx.Audit(audit.Entry{At: now, Actor: actor, Action: "key.create", Target: k.ID, Request: w.Request, Detail: detail}); err != nil {
		return err
	}
	if w.Also != nil {
		return w.Also(tx, k)
	}
	return nil
}

// own reads by's key inside the transaction: it may have ended meanwhile.
func (a *Authenticator) own(tx store.Tx, by Principal, now time.Time) (store.Key, error) {
	k, err := tx.Key(by.KeyID)
	if errors.Is(err, store.ErrNotFound) {
		return store.Key{}, errUnknown
	}
	if err != nil {
		return store.Key{}, err
	}
	return k, a.ended(k, now)
}

// List lists the keys of by's tenant, newest first, revoked ones included.
func (a *Authenticator) List(ctx context.Context, by Principal, cursor string, limit int) (store.Page[store.Key], error) {
	if err := by.Require(KeysWrite); err != nil {
		return store.Page[store.Key]{}, err
	}
	p, err := a.c.Store.Keys(ctx, by.Tenant, cursor, limit)
	if err != nil {
		return store.Page[store.Key]{}, keyFault(err)
	}
	return p, nil
}

// Revoke ends a key of by's tenant and cuts what it has open. Revoking a revoked
// one succeeds. A key may revoke itself and those that it covers, so that a
// narrow one cannot lock out the administrator. Faults: "scope_missing",
// "scope_too_wide", "key_not_found".
func (a *Authenticator) Revoke(ctx context.Context, by Principal, id, request string) (store.Key, error) {
	if by.KeyID != id {
		if err := by.Require(KeysWrite); err != nil {
			return store.Key{}, err
		}
	}
	now := a.c.Clock.Now().UTC().Truncate(time.Microsecond)
	var k store.Key
	err := a.c.Store.Mutate(ctx, by.Tenant, func(tx store.Tx) error {
		own, err := a.own(tx, by, now)
		if err != nil {
			return err
		}
		if k, err = tx.Key(id); err != nil {
			return err
		}
		me := principalOf(own, keyHash{})
		for _, s := range k.Scopes {
			if by.KeyID != id && !me.Can(Scope(s)) {
				return fault.New(fault.Denied, "scope_too_wide", "a key cannot revoke one with scope %s, which it lacks itself", s)
			}
		}
		if !k.RevokedAt.IsZero() {
			return nil
		}
		k.RevokedAt = now
		if err := tx.UpdateKey(k); err != nil {
			return err
		}
		return tx.Audit(audit.Entry{At: now, Actor: by.KeyID, Action: "key.revoke", Target: k.ID, Request: request})
	})
	if err != nil {
		return store.Key{}, keyFault(err)
	}
	a.revokedHere(k)
	return k, nil
}

// keyFault gives what a user may see of a store's error.
func keyFault(err error) error {
	var f *fault.Error
	switch {
	case errors.As(err, &f):
		return err
	case errors.Is(err, store.ErrNotFound):
		return fault.New(fault.NotFound, "key_not_found", "there is no such key").Wrap(err)
	case errors.Is(err, store.ErrBadCursor):
		return fault.New(fault.Invalid, "bad_cursor", "the cursor is not of this list").Do("begin without a cursor").Wrap(err)
	}
	return fmt.Errorf("auth: %w", err)
}
