package session

import (
	"context"
	"testing"

	"github.com/space-platform/space/internal/tenant"
)

func minted(t *testing.T, name string) tenant.ID {
	t.Helper()
	id, err := tenant.Mint(name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// Results of many execs hold bounded memory, and a result that got no more is
// an honest beginning.
func TestResultsHoldBoundedMemory(t *testing.T) {
	a, b, c := minted(t, "a"), minted(t, "b"), minted(t, "c")
	m := &Manager{}
	_, silent := m.share(t.Context(), a)
	silent() // a command that printed nothing
	chunk := make([]byte, freeOutput)
	fill := func(ctx context.Context, who tenant.ID) (kept int, done func()) {
		s, done := m.share(ctx, who)
		var out []byte
		var missing uint64
		for range 2 * maxHeldTenant / len(chunk) {
			take(&out, &missing, chunk, 1<<40, s)
		}
		if uint64(len(out))+missing != 2*maxHeldTenant {
			t.Errorf("kept %d, missing %d", len(out), missing)
		}
		return len(out) - freeOutput, done
	}
	held, release := Hold(t.Context())
	for _, who := range []tenant.ID{a, b} {
		kept, done := fill(held, who)
		if kept != maxHeldTenant {
			t.Errorf("%s kept %d", who, kept)
		}
		done() // the collector is done, the answer is not written
	}
	if kept, done := fill(held, c); kept != maxHeld-2*maxHeldTenant {
		t.Errorf("beyond what all may hold: kept %d", kept)
	} else {
		done()
	}
	release()
	release() // idempotent
	if kept, done := fill(t.Context(), c); kept != maxHeldTenant {
		t.Errorf("after the release: kept %d", kept)
	} else {
		done()
	}
	if m.holding.all != 0 || len(m.holding.tenants) != 0 {
		t.Errorf("still held: %+v", m.holding.all)
	}
}

// Once something was left out, nothing later is kept: no silent hole.
func TestResultIsABeginning(t *testing.T) {
	m := &Manager{}
	a := minted(t, "a")
	m.holding.take(a, maxHeldTenant-3)
	s, done := m.share(t.Context(), a)
	defer done()
	var out []byte
	var missing uint64
	small := make([]byte, freeOutput)
	for _, p := range []string{string(small), "12", "3456", "7"} {
		take(&out, &missing, []byte(p), 1<<20, s)
	}
	if string(out[len(small):]) != "12" || missing != 5 {
		t.Errorf("kept %d bytes and %q, missing %d", len(small), out[len(small):], missing)
	}
}
