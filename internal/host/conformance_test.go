package host_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/host"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor"
	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
	"github.com/space-platform/space/internal/runtime/runtimetest"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template/templatetest"
)

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// room is a host room of the test's own, with real machines.
type room struct {
	*gvisortest.World
	templates host.Templates
	socket    string

	stop func() // ends the serving
}

// open starts the room again, as after a restart.
func (r *room) open(t testing.TB) {
	t.Helper()
	if r.stop != nil {
		r.stop()
		r.Open()
	}
	s, err := host.NewServer(host.Config{
		Driver: r.Runtime, Templates: r.templates, KeyDir: filepath.Join(r.Conf.DataDir, "room"),
		DiskDir: r.Conf.DataDir, UIDs: []uint32{uint32(os.Getuid())},
	})
	ok(t, err)
	l, err := host.Listen(r.socket, os.Getgid())
	ok(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(ctx, l) }()
	r.stop = func() { cancel(); <-done }
}

func newRoom(t testing.TB) *room {
	t.Helper()
	digest := templatetest.Tiny(t).Digest
	store := templatetest.Store(t)
	w := gvisortest.Make(t, gvisortest.Options{
		Templates: store, Digest: digest,
		Change: func(c *gvisor.Config) {
			c.BootIDFile = filepath.Join(c.RunDir, "boot_id")
			ok(t, os.WriteFile(c.BootIDFile, []byte("boot 1"), 0o600))
		},
	})
	r := &room{World: w, templates: store, socket: filepath.Join(w.Conf.RunDir, "hostd.sock")}
	r.open(t)
	t.Cleanup(func() { r.stop() })
	return r
}

func connect(t testing.TB, r *room) *host.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := host.Connect(ctx, r.socket)
	ok(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// The client of the room is as good a runtime as the driver inside it.
func TestConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute: real machines")
	}
	var mu sync.Mutex
	rooms := map[runtime.Runtime]*room{}
	of := func(rt runtime.Runtime) *room {
		mu.Lock()
		defer mu.Unlock()
		return rooms[rt]
	}
	client := func(t testing.TB, r *room) runtime.Runtime {
		c := connect(t, r)
		mu.Lock()
		defer mu.Unlock()
		rooms[c] = r
		return c
	}
	runtimetest.Run(t, runtimetest.Factory{
		Template: templatetest.Tiny(t).Digest,
		New:      func(t testing.TB) runtime.Runtime { return client(t, newRoom(t)) },
		// Both sides at once; each alone is below.
		Restart: func(t testing.TB, old runtime.Runtime) runtime.Runtime {
			r := of(old)
			ok(t, old.(*host.Client).Close())
			r.open(t)
			return client(t, r)
		},
		Reboot: func(t testing.TB, old runtime.Runtime) runtime.Runtime {
			r := of(old)
			ok(t, old.(*host.Client).Close())
			b, err := os.ReadFile(r.Conf.BootIDFile)
			ok(t, err)
			ok(t, os.WriteFile(r.Conf.BootIDFile, append(b, '1'), 0o600))
			r.open(t)
			return client(t, r)
		},
		Kill: func(t testing.TB, rt runtime.Runtime, id sandbox.ID) {
			b, err := os.ReadFile(filepath.Join(of(rt).Conf.RunDir, "m", string(id), "pid"))
			ok(t, err)
			pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
			ok(t, err)
			ok(t, unix.Kill(pid, unix.SIGKILL))
		},
		KnownLeaks: func(t testing.TB, rt runtime.Runtime) []string {
			var out []string
			for _, l := range gvisortest.Left(of(rt).Conf) {
				if !strings.HasSuffix(l, "null-netns") { // one for all machines
					out = append(out, l)
				}
			}
			return out
		},
	})
}

// hello shows that a machine's guest daemon answers.
func hello(t *testing.T, m runtime.Machine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), runtime.BootTimeout)
	defer cancel()
	var err error
	for ctx.Err() == nil { // a stream of a session that just broke may fail: dial again
		var c net.Conn
		if c, err = m.Dial(ctx); err != nil {
			continue
		}
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		body := `{"version":1,"nonce":"n"}`
		_, err = c.Write([]byte("POST /v1/hello HTTP/1.1\r\nHost: guest\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body))
		b := make([]byte, 4096)
		n := 0
		if err == nil {
			n, err = c.Read(b)
		}
		c.Close()
		if err == nil && strings.HasPrefix(string(b[:n]), "HTTP/1.1 200") {
			return
		}
	}
	t.Fatalf("the guest daemon does not answer: %v", err)
}

// Either side may restart alone, and a client that waits or dials goes on.
func TestRestarts(t *testing.T) {
	r := newRoom(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := connect(t, r)
	m, err := c.Create(ctx, r.Spec())
	ok(t, err)
	ok(t, m.Start(ctx))
	hello(t, m)
	waited := make(chan error, 1)
	go func() {
		exit, err := m.Wait(ctx)
		if err == nil && exit.Cause != runtime.CauseStopped {
			err = errors.New(string(exit.Cause))
		}
		waited <- err
	}()

	r.open(t) // the room alone
	hello(t, m)
	ok(t, m.Pause(ctx))
	ok(t, m.Resume(ctx))
	hello(t, m)

	ok(t, c.Close()) // the client alone
	c = connect(t, r)
	m, err = c.Adopt(ctx, m.ID())
	ok(t, err)
	hello(t, m)

	// A boot by a room that has made another socket.
	r.open(t)
	ok(t, m.Stop(ctx))
	if err := <-waited; err != nil {
		t.Fatalf("wait over two restarts: %v", err)
	}
	ok(t, m.Start(ctx))
	hello(t, m)
	ok(t, m.Destroy(ctx))
}
