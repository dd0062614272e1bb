package control

import (
	"testing"
	"time"

	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

// TestLostSettles: a sandbox that its node has lost is failed once; the
// reconciler does not come back to it for ever.
func TestLostSettles(t *testing.T) {
	live(t, 10*time.Millisecond, func(t *testing.T, w *world) {
		res, err := w.svc.CreateSandbox(t.Context(), w.p, Request{Wait: time.Minute}, CreateSandbox{Timeout: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		id := res.Sandbox.ID
		w.node.mu.Lock()
		delete(w.node.machines, id)
		w.node.mu.Unlock()
		time.Sleep(2 * time.Minute) // a sweep passes
		lost := w.get(t, id)
		if lost.Observed != sandbox.Failed {
			t.Fatalf("%+v", lost)
		}
		settled, err := w.svc.rec.reconcile(t.Context(), store.Ref{Tenant: w.p.Tenant, ID: id}, nil)
		if err != nil || !settled {
			t.Errorf("a pass over the lost sandbox gave settled=%v, %v", settled, err)
		}
		if got := w.get(t, id); got.Generation != lost.Generation {
			t.Errorf("it was failed again: generation %d, then %d", lost.Generation, got.Generation)
		}
	})
}
