package control

import (
	"sync"

	"github.com/space-platform/space/internal/sandbox"
)

// hub tells waiters in this process that a sandbox or one of its operations
// changed. A hint: waiters look at the store, and also look by themselves.
type hub struct {
	mu      sync.Mutex
	waiters map[sandbox.ID]*bell // guarded by mu
}

type bell struct {
	rung chan struct{}
	refs int
}

func newHub() *hub { return &hub{waiters: map[sandbox.ID]*bell{}} }

// watch gives a channel that closes at the next change of id. release must be
// called once.
func (h *hub) watch(id sandbox.ID) (changed <-chan struct{}, release func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.waiters[id]
	if b == nil {
		b = &bell{rung: make(chan struct{})}
		h.waiters[id] = b
	}
	b.refs++
	return b.rung, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if b.refs--; b.refs == 0 && h.waiters[id] == b {
			delete(h.waiters, id)
		}
	}
}

func (h *hub) publish(id sandbox.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if b := h.waiters[id]; b != nil {
		close(b.rung)
		delete(h.waiters, id)
	}
}
