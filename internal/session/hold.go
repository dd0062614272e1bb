package session

import (
	"context"
	"sync"

	"github.com/space-platform/space/internal/tenant"
)

// What results of Exec may keep in memory, in bytes of output: of one tenant,
// and in all. A result is several times as large while it is encoded.
const (
	maxHeldTenant = 64 << 20
	maxHeld       = 128 << 20

	// freeOutput is the beginning of each stream that is not counted: small
	// results are whole however much others hold.
	freeOutput = 16 << 10
)

// holding counts the output that results of Exec keep in memory. Many large
// results at once, or callers that do not read their answers, would otherwise
// take the memory of all tenants.
type holding struct {
	mu      sync.Mutex
	all     int64
	tenants map[tenant.ID]int64
}

// take grants n bytes to t, or false.
func (h *holding) take(t tenant.ID, n int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all+n > maxHeld || h.tenants[t]+n > maxHeldTenant {
		return false
	}
	if h.tenants == nil {
		h.tenants = map[tenant.ID]int64{}
	}
	h.all += n
	h.tenants[t] += n
	return true
}

func (h *holding) give(t tenant.ID, n int64) {
	if n == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all -= n
	if h.tenants[t] -= n; h.tenants[t] == 0 {
		delete(h.tenants, t)
	}
}

type holdKey struct{}

// hold is a request's share.
type hold struct {
	mu      sync.Mutex
	release []func()
}

// Hold lets results of Exec under the returned context count against the memory
// of all until release is called: when the answer is written. Without it they
// count until Exec returns.
func Hold(ctx context.Context) (_ context.Context, release func()) {
	h := &hold{}
	return context.WithValue(ctx, holdKey{}, h), func() {
		h.mu.Lock()
		all := h.release
		h.release = nil
		h.mu.Unlock()
		for _, f := range all {
			f()
		}
	}
}

// share is what one collector holds.
type share struct {
	h *holding
	t tenant.ID
	n int64
}

func (s *share) take(n int64) bool {
	if !s.h.take(s.t, n) {
		return false
	}
	s.n += n
	return true
}

// share makes an empty share; done is to be deferred by who collects.
func (m *Manager) share(ctx context.Context, t tenant.ID) (s *share, done func()) {
	s = &share{h: &m.holding, t: t}
	give := func() { s.h.give(s.t, s.n); s.n = 0 }
	h, ok := ctx.Value(holdKey{}).(*hold)
	if !ok {
		return s, give
	}
	return s, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.release = append(h.release, give)
	}
}
