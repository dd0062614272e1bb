package auth

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/space-platform/space/internal/store"
)

// watch is one key that something is open under; all of them share it.
type watch struct {
	refs  int // guarded by Authenticator.mu
	done  chan struct{}
	once  sync.Once
	cause error // set before done closes
	stop  context.CancelFunc
}

func (w *watch) end(cause error) {
	w.once.Do(func() {
		w.cause = cause
		close(w.done)
	})
}

// Watch gives a context that ends when ctx does, or when the key of p is revoked
// (context.Cause is ErrRevoked) or expires (ErrExpired). The caller calls cancel
// when it is done. While the store is away a watched key is believed: an outage
// does not cut streams. p must be from Verify.
func (a *Authenticator) Watch(ctx context.Context, p Principal) (context.Context, context.CancelFunc) {
	out, cancel := context.WithCancelCause(ctx)
	if p.hash == (keyHash{}) {
		cancel(errUnknown)
		return out, func() {}
	}
	w := a.acquire(p)
	// The watch is in place: a revocation from here on ends it. One between Verify
	// and now is found by asking once more.
	if err := a.recheck(ctx, p.hash, p.expires); err != nil {
		cancel(err)
	}
	go func() {
		defer a.release(p.hash, w)
		select {
		case <-w.done:
			cancel(w.cause)
		case <-out.Done():
		}
	}()
	return out, func() { cancel(context.Canceled) }
}

func (a *Authenticator) acquire(p Principal) *watch {
	h := p.hash
	a.mu.Lock()
	defer a.mu.Unlock()
	if w := a.watches[h]; w != nil {
		w.refs++
		return w
	}
	ctx, stop := context.WithCancel(context.Background())
	w := &watch{refs: 1, done: make(chan struct{}), stop: stop}
	a.watches[h] = w
	go a.poll(ctx, h, p.expires, w)
	return w
}

func (a *Authenticator) release(h keyHash, w *watch) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w.refs--; w.refs == 0 {
		w.stop()
		delete(a.watches, h)
	}
}

// poll finds what this process is not told: expiry, and revocation by another
// control process.
func (a *Authenticator) poll(ctx context.Context, h keyHash, expires time.Time, w *watch) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.done:
			return
		case <-a.c.Clock.After(a.c.CacheFor):
		}
		// Bounded, so that a store that hangs does not stop the looking at the clock.
		bounded, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := a.recheck(bounded, h, expires)
		cancel()
		if err != nil {
			w.end(err)
			return
		}
	}
}

// recheck gives how the key has ended. While the store does not answer, it is
// judged by the expiry that was known.
func (a *Authenticator) recheck(ctx context.Context, h keyHash, expires time.Time) error {
	k, err := a.lookup(ctx, h)
	switch {
	case errors.Is(err, errUnknown):
		return ErrRevoked // it was valid once: its row is gone
	case err != nil:
		k = store.Key{ExpiresAt: expires}
	}
	return a.ended(k, a.c.Clock.Now())
}
