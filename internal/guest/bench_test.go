package guest_test

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/guest/guesttest"
)

// BenchmarkExec is start, output to the exit, and forget, over the channel.
func BenchmarkExec(b *testing.B) {
	g := guesttest.Start(b)
	for b.Loop() {
		run(b, g, guestapi.Start{Args: []string{"/bin/true"}})
	}
}

// BenchmarkHello is the smallest call.
func BenchmarkHello(b *testing.B) {
	g := guesttest.Start(b)
	ctx := within(b, time.Minute)
	for b.Loop() {
		if _, err := g.Hello(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkStream is a process's output with acknowledgements, sent beside the
// reading as a journal does.
func BenchmarkStream(b *testing.B) {
	g := guesttest.Start(b)
	const size = 64 << 20
	b.SetBytes(size)
	before := cpu(b, g.PID())
	defer func() { b.ReportMetric(float64(cpu(b, g.PID())-before)/float64(b.N), "daemon-ms/op") }()
	for b.Loop() {
		id := start(b, g, sh(fmt.Sprintf("head -c %d /dev/zero", size)))
		o, err := g.Output(within(b, time.Minute), id, 0)
		if err != nil {
			b.Fatal(err)
		}
		var at atomic.Uint64
		kick := make(chan struct{}, 1)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range kick {
				if err := g.Ack(within(b, time.Minute), id, at.Load()); err != nil {
					b.Error(err)
				}
			}
		}()
		for acked := uint64(0); ; {
			f, err := o.Next()
			if err != nil {
				b.Fatal(err)
			}
			if f.Type == guestapi.FrameExit {
				break
			}
			if at.Store(f.End()); f.End()-acked > 128<<10 {
				acked = f.End()
				select {
				case kick <- struct{}{}:
				default:
				}
			}
		}
		_ = o.Close()
		close(kick)
		<-done
	}
}

func BenchmarkPutFile(b *testing.B) {
	g := guesttest.Start(b)
	const size = 64 << 20
	name := b.TempDir() + "/f"
	b.SetBytes(size)
	for b.Loop() {
		if err := g.PutFile(within(b, time.Minute), name, "", 0, size, io.LimitReader(zero{}, size)); err != nil {
			b.Fatal(err)
		}
	}
}

// cpu is the time in ms that a process has used.
func cpu(tb testing.TB, pid int) int {
	tb.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		tb.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')'):]))
	var user, sys int
	_, _ = fmt.Sscan(f[12], &user)
	_, _ = fmt.Sscan(f[13], &sys)
	return 10 * (user + sys)
}

type zero struct{}

func (zero) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestIdleMemoryOfTheDaemon(t *testing.T) {
	g := guesttest.Start(t)
	for range 20 {
		run(t, g, sh("echo x"))
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", g.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var kib int
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &kib); n == 1 {
			t.Logf("%d KiB resident after 20 commands", kib)
			if kib > 24<<10 && !guesttest.Raced {
				t.Fatalf("%d KiB", kib)
			}
		}
	}
}
