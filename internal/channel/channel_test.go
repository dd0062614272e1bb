package channel_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/guest/malicious"
)

func listen(t testing.TB) (*channel.Acceptor, func(context.Context) (net.Conn, error)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	a := channel.NewAcceptor(l, channel.Options{})
	t.Cleanup(func() { _ = a.Close() })
	return a, func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "unix", path) }
}

func serve(t testing.TB, dial func(context.Context) (net.Conn, error), h http.Handler) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = channel.Serve(ctx, dial, h, channel.ServeOptions{}) }()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

func client(a *channel.Acceptor) *http.Client {
	return &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return a.Dial(ctx) },
	}}
}

func name(s string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) })
}

func get(t testing.TB, c *http.Client) string {
	t.Helper()
	r, err := c.Get("http://guest/")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for until := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("never:", what)
		}
	}
}

func TestDialWaitsForTheGuest(t *testing.T) {
	a, dial := listen(t)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := a.Dial(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	time.AfterFunc(50*time.Millisecond, func() { serve(t, dial, name("one")) })
	if got := get(t, client(a)); got != "one" {
		t.Fatal(got)
	}
}

func TestNewestConnectionWins(t *testing.T) {
	a, dial := listen(t)
	var dials atomic.Int32
	limited := func(ctx context.Context) (net.Conn, error) {
		if dials.Add(1) > 1 {
			return nil, errors.New("once only")
		}
		return dial(ctx)
	}
	serve(t, limited, name("old"))
	if got := get(t, client(a)); got != "old" {
		t.Fatal(got)
	}
	old, err := a.Dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	serve(t, dial, name("new"))
	eventually(t, "the newest answers", func() bool {
		r, err := client(a).Get("http://guest/")
		if err != nil {
			return false // the old session ended under it
		}
		defer func() { _ = r.Body.Close() }()
		b, _ := io.ReadAll(r.Body)
		return string(b) == "new"
	})
	if _, err := old.Read(make([]byte, 1)); err == nil {
		t.Fatal("a stream of the old session lives")
	}
}

func TestGuestRedialsWithinASecond(t *testing.T) {
	a, dial := listen(t)
	var conn atomic.Pointer[net.Conn]
	serve(t, func(ctx context.Context) (net.Conn, error) {
		c, err := dial(ctx)
		if err == nil {
			conn.Store(&c)
		}
		return c, err
	}, name("x"))
	for range 5 {
		get(t, client(a))
		_ = (*conn.Load()).Close()
		began := time.Now()
		eventually(t, "answers again", func() bool { r, err := client(a).Get("http://guest/"); return err == nil && r.Body.Close() == nil })
		if d := time.Since(began); d > 1500*time.Millisecond {
			t.Fatal(d)
		}
	}
}

// A host that vanished without closing (a checkpoint restored elsewhere) is
// noticed by the guest's ping.
func TestGuestNoticesASilentHost(t *testing.T) {
	_, dial := listen(t)
	path := filepath.Join(t.TempDir(), "mute")
	mute, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mute.Close() }()
	go func() {
		for {
			c, err := mute.Accept()
			if err != nil {
				return
			}
			_, _ = channel.LineHello(c) // and then never a word
		}
	}()
	var first atomic.Bool
	redialled := make(chan time.Time, 1)
	serve(t, func(ctx context.Context) (net.Conn, error) {
		if first.CompareAndSwap(false, true) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
		select {
		case redialled <- time.Now():
		default:
		}
		return dial(ctx)
	}, name("x"))
	began := time.Now()
	select {
	case at := <-redialled:
		if d := at.Sub(began); d > 5*time.Second {
			t.Fatal(d)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the guest sticks to a dead host")
	}
}

func TestStalledReaderStallsOnlyItself(t *testing.T) {
	a, dial := listen(t)
	serve(t, dial, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/flood" {
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					return
				}
			}
		}
		_, _ = io.WriteString(w, "ok")
	}))
	r, err := client(a).Get("http://guest/flood") // never read
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	for range 20 {
		if got := get(t, client(a)); got != "ok" {
			t.Fatal(got)
		}
	}
}

func TestCloseEndsEverything(t *testing.T) {
	before := runtime.NumGoroutine()
	a, dial := listen(t)
	stop := serve(t, dial, name("x"))
	get(t, client(a))
	c, err := a.Dial(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	_ = a.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Fatal("a stream lives after Close")
	}
	if _, err := a.Dial(context.Background()); !errors.Is(err, channel.ErrClosed) {
		t.Fatal(err)
	}
	stop()
	eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= before })
}

func TestMaliciousLinks(t *testing.T) {
	for _, l := range malicious.Links {
		t.Run(string(l), func(t *testing.T) {
			a, dial := listen(t)
			other, otherDial := listen(t)
			serve(t, otherDial, name("fine"))
			before := runtime.NumGoroutine()
			heap := memory()
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan struct{})
			conn, err := dial(ctx)
			if err != nil {
				t.Fatal(err)
			}
			go func() { defer close(ended); l.Run(ctx, conn) }()
			until := time.Now().Add(2 * time.Second)
			for time.Now().Before(until) {
				dctx, dcancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
				c, err := a.Dial(dctx)
				if err == nil {
					_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
					_, _ = c.Write(make([]byte, 64<<10))
					_, _ = c.Read(make([]byte, 1))
					_ = c.Close()
				}
				dcancel()
				if got := get(t, client(other)); got != "fine" {
					t.Fatal("another sandbox is hurt")
				}
			}
			if n := runtime.NumGoroutine() - before; n > 400 {
				t.Errorf("%d goroutines", n)
			}
			if m := memory() - heap; m > 48<<20 {
				t.Errorf("%d MiB", m>>20)
			}
			cancel()
			<-ended
			// An honest guest gets its turn afterwards.
			serve(t, dial, name("honest"))
			eventually(t, "an honest guest answers", func() bool {
				r, err := client(a).Get("http://guest/")
				if err != nil {
					return false
				}
				return r.Body.Close() == nil && r.StatusCode == 200
			})
		})
	}
}

func memory() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

func TestConnectionsThatSayNothingAreFew(t *testing.T) {
	a, dial := listen(t)
	var conns []net.Conn
	for range 20 {
		c, err := dial(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	closed := 0
	for _, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
		_, err := io.Copy(io.Discard, c)
		if err == nil {
			closed++
		}
		_ = c.Close()
	}
	if closed < 10 {
		t.Fatalf("only %d of 20 were refused", closed)
	}
	serve(t, dial, name("x"))
	get(t, client(a))
}

// Memory of the host per idle sandbox: what design.md's budget of 1 MiB leaves
// for the channel.
func TestIdleMemory(t *testing.T) {
	const n = 100
	run := func(client bool) int64 {
		before := memory()
		var keep []any
		for range n {
			h, g := pair(t)
			l := &oneConn{c: make(chan net.Conn, 1), done: make(chan struct{})}
			if client {
				l.c <- h
				a := channel.NewAcceptor(l, channel.Options{})
				go func() { _, _ = channel.LineHello(g); _, _ = io.Copy(io.Discard, g) }()
				eventually(t, "connected", a.Connected)
				t.Cleanup(func() { _ = a.Close(); _ = g.Close() })
				keep = append(keep, a)
			} else {
				go func() { _, _ = io.Copy(io.Discard, g) }()
				t.Cleanup(func() { _ = h.Close(); _ = g.Close() })
			}
			keep = append(keep, l, h, g)
		}
		used := memory() - before
		runtime.KeepAlive(keep)
		return used
	}
	floor := run(false)
	each := (run(true) - floor) / n
	t.Logf("%d KiB for each idle sandbox", each>>10)
	if each > 100<<10 {
		t.Fatalf("%d bytes", each)
	}
}

func pair(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var c [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if c[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
	}
	return c[0], c[1]
}

type oneConn struct {
	c    chan net.Conn
	done chan struct{}
}

func (l *oneConn) Accept() (net.Conn, error) {
	select {
	case c := <-l.c:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *oneConn) Close() error   { close(l.done); return nil }
func (l *oneConn) Addr() net.Addr { return &net.UnixAddr{} }

func BenchmarkDownload(b *testing.B) {
	a, dial := listen(b)
	buf := bytes.Repeat([]byte("x"), 64<<10)
	serve(b, dial, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var size int64
		_, _ = fmt.Sscan(r.URL.Query().Get("n"), &size)
		for ; size > 0; size -= int64(len(buf)) {
			if _, err := w.Write(buf); err != nil {
				return
			}
		}
	}))
	const size = 64 << 20
	b.SetBytes(size)
	for b.Loop() {
		r, err := client(a).Get(fmt.Sprintf("http://guest/?n=%d", size))
		if err != nil {
			b.Fatal(err)
		}
		_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, r.Body, make([]byte, 64<<10))
		_ = r.Body.Close()
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	a, dial := listen(b)
	serve(b, dial, name("x"))
	c := client(a)
	get(b, c)
	for b.Loop() {
		get(b, c)
	}
}
