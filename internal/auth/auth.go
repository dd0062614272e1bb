// Package auth proves who asks: API keys, their scopes, and their end.
//
// A key is "spk_" and 40 random characters (200 bits). The store keeps a keyed
// hash of it; the key itself is shown once, when it is minted, and is in no
// error, log or audit record.
//
// # Guarantees
//
//  1. Verify answers for a key only while it is neither revoked nor expired.
//     This process's own revocations hold at once; those of another control
//     process within Config.CacheFor.
//  2. A context of Watch ends when the key does, with the same bound, so that
//     what a key opened ends with it.
//  3. A key never mints a wider one: neither in scopes nor in time. Whether it
//     may is decided inside the transaction that writes the new key.
//  4. Minting and revoking are audited in their own transaction.
//
// Only this package and the stores prove tenants (package tenant).
package auth

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"log/slog"
	"regexp"
	"sync"
	"time"

	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// Prefix begins every key, so that scanners of leaked secrets can find them.
const Prefix = "spk_"

const (
	keyLen   = 40
	maxCache = 4096
)

var keyRE = regexp.MustCompile(`^spk_[a-z2-7]{40}$`)

// Causes that end a context of Watch (context.Cause).
var (
	ErrRevoked = fault.New(fault.Unauthenticated, "key_revoked", "the API key is revoked").Do("use another key")
	ErrExpired = fault.New(fault.Unauthenticated, "key_expired", "the API key has expired").Do("mint a new key")
)

type keyHash [sha256.Size]byte

// Config is what an Authenticator is made of; Store and HashKey are needed.
type Config struct {
	Store store.Store
	// HashKey keys the hashes of API keys: at least 16 bytes, the same after a
	// restart (secret.Sealer.Derive). Without it, whoever writes to the database
	// could put in a key of theirs.
	HashKey []byte
	Clock   clock.Clock // default: the system's
	Log     *slog.Logger
	// CacheFor is how long a verified key is believed without asking the store,
	// and how often watched keys are looked up again; default 3 s.
	CacheFor time.Duration
	// OnRevoke is called after a revocation is durable, for ending what the key
	// has minted elsewhere. It must not block.
	OnRevoke func(t tenant.ID, keyID string)
}

// Authenticator verifies keys. Safe for concurrent use.
type Authenticator struct {
	c Config

	mu      sync.Mutex
	cache   map[keyHash]cached  // guarded by mu
	watches map[keyHash]*watch  // guarded by mu
	revoked map[string]struct{} // ids revoked by this process; guarded by mu
}

type cached struct {
	key   store.Key
	until time.Time
}

// New makes an Authenticator.
func New(c Config) (*Authenticator, error) {
	if c.Store == nil || len(c.HashKey) < 16 {
		return nil, errors.New("auth: needs a store and a hash key of at least 16 bytes")
	}
	if c.Clock == nil {
		c.Clock = clock.System{}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.CacheFor <= 0 {
		c.CacheFor = 3 * time.Second
	}
	return &Authenticator{c: c, cache: map[keyHash]cached{}, watches: map[keyHash]*watch{}, revoked: map[string]struct{}{}}, nil
}

func generate() secret.Value { return secret.New(Prefix + sandbox.Random(keyLen)) }

func (a *Authenticator) hash(bearer string) keyHash {
	m := hmac.New(sha256.New, a.c.HashKey)
	m.Write([]byte(bearer))
	return keyHash(m.Sum(nil))
}

var errUnknown = fault.New(fault.Unauthenticated, "unauthenticated", "the API key is missing or not valid").
	Do("send a valid key as 'Authorization: Bearer spk_…'")

// Verify proves who bears the key (without "Bearer "). Faults: "unauthenticated",
// "key_revoked", "key_expired", "auth_unavailable" when the store does not answer.
func (a *Authenticator) Verify(ctx context.Context, bearer string) (Principal, error) {
	if !keyRE.MatchString(bearer) {
		return Principal{}, errUnknown
	}
	h := a.hash(bearer)
	now := a.c.Clock.Now()
	a.mu.Lock()
	hit, ok := a.cache[h]
	a.mu.Unlock()
	if ok && now.Before(hit.until) {
		return a.principal(hit.key, h, now)
	}
	k, err := a.lookup(ctx, h)
	if err != nil {
		return Principal{}, err
	}
	p, err := a.principal(k, h, now)
	if err != nil {
		return Principal{}, err
	}
	a.remember(h, k, now)
	if now.Sub(k.LastUsedAt) >= time.Minute {
		if err := a.c.Store.System().TouchKey(ctx, k, now); err != nil {
			// Last use is a courtesy; the request does not depend on it.
			a.c.Log.Warn("auth: last use of a key was not recorded", "key", k.ID, "error", err)
		}
	}
	return p, nil
}

// lookup reads the key from the store.
func (a *Authenticator) lookup(ctx context.Context, h keyHash) (store.Key, error) {
	k, err := a.c.Store.System().KeyByHash(ctx, h[:])
	switch {
	case errors.Is(err, store.ErrNotFound):
		return store.Key{}, errUnknown
	case err != nil:
		return store.Key{}, unavailable(err)
	case !hmac.Equal(k.Hash, h[:]): // constant time, whatever the index did
		return store.Key{}, errUnknown
	}
	return k, nil
}

// principal judges k at now.
func (a *Authenticator) principal(k store.Key, h keyHash, now time.Time) (Principal, error) {
	if err := a.ended(k, now); err != nil {
		return Principal{}, err
	}
	return principalOf(k, h), nil
}

func principalOf(k store.Key, h keyHash) Principal {
	p := Principal{Tenant: k.Tenant, KeyID: k.ID, hash: h, expires: k.ExpiresAt}
	for _, s := range k.Scopes {
		p.Scopes = append(p.Scopes, Scope(s))
	}
	return p
}

// ended says how k has ended, nil if it has not.
func (a *Authenticator) ended(k store.Key, now time.Time) error {
	a.mu.Lock()
	_, here := a.revoked[k.ID]
	a.mu.Unlock()
	switch {
	case here || !k.RevokedAt.IsZero():
		return ErrRevoked
	case !k.ExpiresAt.IsZero() && !now.Before(k.ExpiresAt):
		return ErrExpired
	}
	return nil
}

// remember caches k. A revocation that happened since it was read is in revoked,
// which is asked each time.
func (a *Authenticator) remember(h keyHash, k store.Key, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.cache) >= maxCache {
		for h, c := range a.cache {
			if !now.Before(c.until) {
				delete(a.cache, h)
			}
		}
	}
	for h := range a.cache { // still full of valid ones: any may go
		if len(a.cache) < maxCache {
			break
		}
		delete(a.cache, h)
	}
	a.cache[h] = cached{k, now.Add(a.c.CacheFor)}
}

// revokedHere makes a revocation hold at once in this process.
func (a *Authenticator) revokedHere(k store.Key) {
	a.mu.Lock()
	a.revoked[k.ID] = struct{}{}
	if len(k.Hash) == sha256.Size {
		h := keyHash(k.Hash)
		delete(a.cache, h)
		if w := a.watches[h]; w != nil {
			w.end(ErrRevoked)
		}
	}
	a.mu.Unlock()
	if a.c.OnRevoke != nil {
		a.c.OnRevoke(k.Tenant, k.ID)
	}
}

func unavailable(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fault.New(fault.Unavailable, "auth_unavailable", "keys cannot be checked now").Do("retry").Wrap(err)
}
