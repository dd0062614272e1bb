package node

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/space-platform/space/internal/sandbox"
)

// BenchmarkPerSandbox tells what the node holds per running sandbox, the fake
// machine and its guest included.
func BenchmarkPerSandbox(b *testing.B) {
	for b.Loop() {
		h := newHost(b, nil, nil)
		used := func() (heap uint64, goroutines int) {
			debug.FreeOSMemory()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			return m.HeapAlloc + m.StackInuse, runtime.NumGoroutine()
		}
		m0, g0 := used()
		start := time.Now()
		const n = 500
		var ids []sandbox.ID
		for range n {
			id := sandbox.NewID()
			ids = append(ids, id)
			h.apply(id, 1, sandbox.Running)
		}
		for _, id := range ids {
			if o, err := h.n.Await(context.Background(), h.who, id, 1); err != nil || (!o.Converged && o.State != sandbox.Running) {
				b.Fatal(o, err)
			}
		}
		took := time.Since(start)
		m1, g1 := used()
		b.ReportMetric(float64(m1-m0)/n/1024, "KiB/sandbox")
		b.ReportMetric(float64(g1-g0)/n, "goroutines/sandbox")
		b.ReportMetric(float64(took.Microseconds())/n, "µs/create")
		h.n.Close()
		_ = h.db.Close()
		h.world.Close()
		_ = os.RemoveAll(h.dir)
	}
}
