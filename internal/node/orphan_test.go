package node

import (
	"context"
	"errors"
	"testing"

	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
)

// A control store that was lost or set back knows neither sandbox nor tenant; it
// can still order deleted what the node has, and nothing else.
func TestDeleteOfAnOrphanNeedsNoTenant(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		nobody := Assignment{Tenant: tenant.ID{}, ID: id, Generation: 1 << 62}
		for _, want := range []sandbox.State{sandbox.Running, sandbox.Paused, sandbox.Stopped} {
			nobody.Desired = want
			if _, err := h.n.Apply(context.Background(), nobody); err == nil {
				t.Fatalf("%s without a tenant was accepted", want)
			}
		}
		nobody.Desired = sandbox.Deleted
		if _, err := h.n.Apply(context.Background(), nobody); err != nil {
			t.Fatal(err)
		}
		h.balance()
		if _, err := h.n.Apply(context.Background(), nobody); err != nil {
			t.Fatalf("again: %v", err)
		}
		nobody.ID = sandbox.NewID()
		if _, err := h.n.Apply(context.Background(), nobody); !errors.Is(err, ErrUnknown) {
			t.Fatalf("of an id nobody knows: %v", err)
		}
	})
}
