package gvisor_test

import (
	"context"
	"fmt"
	"os"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
)

// BenchmarkLife prints medians of every call of a life.
func BenchmarkLife(b *testing.B) {
	w := gvisortest.Make(b, gvisortest.Options{Probe: true})
	ctx := context.Background()
	times := map[string][]time.Duration{}
	timed := func(name string, f func() error) {
		start := time.Now()
		if err := f(); err != nil {
			b.Fatalf("%s: %v", name, err)
		}
		times[name] = append(times[name], time.Since(start))
	}
	for b.Loop() {
		spec := w.Spec()
		timed("create", func() error { _, err := w.Runtime.Create(ctx, spec); return err })
		m, err := w.Runtime.Adopt(ctx, spec.ID)
		if err != nil {
			b.Fatal(err)
		}
		timed("start", func() error { return m.Start(ctx) })
		timed("first-call", func() error { _, err := ask(ctx, m, "read?path=/etc/x", ""); _ = err; return nil })
		timed("pause", func() error { return m.Pause(ctx) })
		timed("resume", func() error { return m.Resume(ctx) })
		timed("stop", func() error { return m.Stop(ctx) })
		timed("restart", func() error { return m.Start(ctx) })
		timed("destroy", func() error { return m.Destroy(ctx) })
	}
	for name, d := range times {
		sort.Slice(d, func(i, j int) bool { return d[i] < d[j] })
		b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, "ms-"+strings.ReplaceAll(name, " ", "-"))
		fmt.Fprintf(os.Stderr, "%-12s n=%d p50=%v p90=%v\n", name, len(d), d[len(d)/2], d[len(d)*9/10])
	}
}
