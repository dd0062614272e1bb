package control

import (
	"context"
	"crypto/hmac"
	"errors"
	"time"

	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store"
)

// Keys is what package auth does for the use cases; *auth.Authenticator is one.
type Keys interface {
	Mint(ctx context.Context, by auth.Principal, w auth.Wish) (store.Key, secret.Value, error)
	List(ctx context.Context, by auth.Principal, cursor string, limit int) (store.Page[store.Key], error)
	Revoke(ctx context.Context, by auth.Principal, id, request string) (store.Key, error)
}

var _ Keys = (*auth.Authenticator)(nil)

// MintKey implements API. A repeat with the same idempotency key answers the
// same key with a zero secret: a secret is never shown twice.
func (s *Service) MintKey(ctx context.Context, p Principal, req Request, c MintKey) (store.Key, secret.Value, error) {
	fail := func(err error) (store.Key, secret.Value, error) { return store.Key{}, secret.Value{}, err }
	if err := s.require(p, scopeKeys, "key.mint", "", req.ID); err != nil {
		return fail(err)
	}
	if err := checkRequest(req); err != nil {
		return fail(err)
	}
	if c.TTL < 0 {
		return fail(invalid("invalid_ttl", "the life of a key is not negative"))
	}
	w := auth.Wish{Name: c.Name, Request: req.ID}
	for _, sc := range c.Scopes {
		w.Scopes = append(w.Scopes, auth.Scope(sc))
	}
	if c.TTL > 0 {
		w.ExpiresAt = s.now().Add(c.TTL)
	}
	if req.IdempotencyKey != "" {
		w.Also = func(tx store.Tx, k store.Key) error {
			return tx.InsertIdempotency(store.Idempotency{
				Principal: p.KeyID, Key: req.IdempotencyKey, Method: req.Method, Route: req.Route,
				BodyHash: s.bodyHash(req), Resource: k.ID, CreatedAt: s.now(),
			})
		}
	}
	for try := 0; ; try++ {
		if k, found, err := s.mintedKey(ctx, p, req); found || err != nil {
			return k, secret.Value{}, err
		}
		k, value, err := s.keys.Mint(ctx, p, w)
		if errors.Is(err, store.ErrExists) && req.IdempotencyKey != "" && try < attempts {
			continue // another client with the same idempotency key was first
		}
		return k, value, storeFault(err)
	}
}

// mintedKey finds the key that an earlier request with the same idempotency key made.
func (s *Service) mintedKey(ctx context.Context, p Principal, req Request) (k store.Key, found bool, err error) {
	if req.IdempotencyKey == "" {
		return k, false, nil
	}
	err = s.store.Mutate(ctx, p.Tenant, func(tx store.Tx) error {
		found = false
		i, err := tx.Idempotency(p.KeyID, req.IdempotencyKey, req.Method, req.Route)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if !hmac.Equal(i.BodyHash, s.bodyHash(req)) {
			return mismatch()
		}
		found = true
		k, err = tx.Key(i.Resource)
		return err
	})
	return k, found, storeFault(err)
}

func mismatch() error {
	return fault.New(fault.Unprocessable, "idempotency_mismatch", "the idempotency key was used with another body").
		Do("use a new key for a new request")
}

// ListKeys implements API.
func (s *Service) ListKeys(ctx context.Context, p Principal, cursor string, limit int) (store.Page[store.Key], error) {
	if err := s.require(p, scopeKeys, "key.list", "", ""); err != nil {
		return store.Page[store.Key]{}, err
	}
	limit, err := s.pageLimit(limit)
	if err != nil {
		return store.Page[store.Key]{}, err
	}
	page, err := s.keys.List(ctx, p, cursor, limit)
	return page, storeFault(err)
}

// revokeTries bounds how often the cut of a revoked key's streams is tried.
const revokeTries = 3

// RevokeKey implements API. The key is dead once it returns nil; when only the
// cutting of its streams failed, the fault is Unavailable and a repeat tries it
// again.
func (s *Service) RevokeKey(ctx context.Context, p Principal, req Request, id string) (store.Key, error) {
	if p.KeyID != id { // a key may always end itself
		if err := s.require(p, scopeKeys, "key.revoke", id, req.ID); err != nil {
			return store.Key{}, err
		}
	}
	k, err := s.keys.Revoke(ctx, p, id, req.ID)
	if err != nil {
		return k, storeFault(err)
	}
	for try := 0; ; try++ {
		err = s.node.Sessions().RevokePrincipal(ctx, id)
		if err == nil || try == revokeTries || ctx.Err() != nil {
			return k, nodeFault(err)
		}
		select {
		case <-ctx.Done():
		case <-s.clock.After(100 * time.Millisecond):
		}
	}
}
