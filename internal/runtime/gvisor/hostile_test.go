package gvisor_test

import (
	"testing"
	"time"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
)

// A guest that made its own tree strange hurts nobody else, and at most itself.
func TestHostileTree(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	ctx := limited(t)
	m := started(t, w, w.Spec())
	must(t, m, "link?path=/tmp&to=/../../../../../../etc", "")
	ok(t, m.Stop(ctx))
	ok(t, m.Start(ctx))
	must(t, m, "facts", "")
	ok(t, m.Destroy(ctx))
}

// A guest that opens connections without end stalls only itself.
func TestHostileChannel(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	bad, good := started(t, w, w.Spec()), started(t, w, w.Spec())
	must(t, bad, "connect?n=40", "")
	start := time.Now()
	must(t, good, "facts", "")
	if d := time.Since(start); d > 2*time.Second {
		t.Fatalf("the other machine took %v", d)
	}
	if st := status(t, good); st.Condition != runtime.Running {
		t.Fatalf("status %+v", st)
	}
}
