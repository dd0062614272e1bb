package node

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
)

var _ Sessions = (*session.Manager)(nil)

// withSessions runs fn with a real session manager on the node.
func withSessions(t *testing.T, fn func(t *testing.T, h *host)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, nil, nil, func(h *host) { h.real = true })
		defer h.end()
		fn(t, h)
	})
}

// exec begins a command; its result comes on the channel.
func (h *host) exec(id sandbox.ID, args ...string) <-chan session.ExecResult {
	out := make(chan session.ExecResult, 1)
	go func() {
		r, err := h.manager.Exec(context.Background(), h.who, session.ExecRequest{CreateRequest: session.CreateRequest{
			Sandbox: id, Principal: "key1", Command: session.Command{Args: args}}})
		if err != nil {
			r.Exit.Cause, r.Exit.Reason = "error", err.Error()
		}
		out <- r
	}()
	synctest.Wait()
	return out
}

func TestCommandsOverTheLifeOfASandbox(t *testing.T) {
	withSessions(t, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		if r := <-h.exec(id, "echo", "hello"); r.Exit.Cause != "exited" || r.Exit.Code != 0 || string(r.Stdout) != "hello\n" {
			t.Fatalf("%+v", r)
		}
		// It goes on after a pause, and after a crash of ours.
		running := h.exec(id, "sleep", "60")
		h.reach(id, 2, sandbox.Paused)
		time.Sleep(10 * time.Minute)
		h.reach(id, 3, sandbox.Running)
		if r := <-running; r.Exit.Cause != "exited" || r.Exit.Code != 0 {
			t.Fatalf("over a pause: %+v", r)
		}
		running = h.exec(id, "sleep", "3600")
		h.crash()
		h.boot()
		<-running // its caller was cut off with us
		synctest.Wait()
		if n := h.manager.RunningSessions(id); n != 1 {
			t.Fatalf("%d sessions run after the restart", n)
		}
		// What ends the machine ends them, with the cause.
		generation := uint64(3)
		for _, how := range []struct {
			do            func(generation uint64)
			cause, reason string
		}{
			{func(g uint64) { h.reach(id, g, sandbox.Stopped) }, "sandbox_lost", "stopped"},
			{func(uint64) { _ = h.world.KillMachine(id, runtime.CauseKilled) }, "sandbox_lost", "machine_killed"},
			{func(uint64) { _ = h.world.KillMachine(id, runtime.CauseOutOfMemory) }, "out_of_memory", ""},
			{func(g uint64) { h.reach(id, g, sandbox.Running, expires(time.Second, sandbox.ActionStop)) }, "sandbox_lost", "sandbox_expired"},
		} {
			h.absorb()
			h.reach(id, generation+1, sandbox.Running, restart)
			running := h.exec(id, "sleep", "3600")
			generation += 2
			how.do(generation)
			if r := <-running; r.Exit.Cause != how.cause || r.Exit.Code == 0 || !strings.Contains(r.Exit.Reason, how.reason) {
				t.Fatalf("%+v, want %+v", r.Exit, how)
			}
			time.Sleep(time.Second)
		}
		h.absorb()
		h.reach(id, 1<<40, sandbox.Deleted)
		if items, _, err := h.manager.List(context.Background(), h.who, id, "", 100); err != nil || len(items) != 0 {
			t.Fatalf("after the delete: %d sessions, %v", len(items), err)
		}
		h.balance()
	})
}

// A command keeps its sandbox awake while it runs, and not a moment longer than idle.
func TestC039WithRealSessions(t *testing.T) {
	withSessions(t, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running, func(a *Assignment) { a.Policy.Idle, a.Policy.OnIdle = time.Minute, sandbox.ActionPause })
		running := h.exec(id, "sleep", "180")
		start := time.Now()
		if r := <-running; r.Exit.Cause != "exited" || r.Exit.Code != 0 {
			t.Fatalf("%+v", r.Exit)
		}
		h.becomes(id, sandbox.Paused, 70*time.Second)
		if d := time.Since(start); d < 230*time.Second {
			t.Fatalf("paused after %v", d)
		}
	})
}

// C-055: a call during a transition is served before or after it, or refused
// with an answer that says to retry.
func TestC055CallsDuringTransitions(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		ctx, cancel := context.WithCancel(context.Background())
		var mu sync.Mutex
		served, refused := 0, 0 // guarded by mu
		done := make(chan error)
		for range 4 {
			go func() {
				var bad error
				for ctx.Err() == nil && bad == nil {
					time.Sleep(7 * time.Millisecond)
					g, err := h.n.Guest(context.Background(), h.who, id)
					if err == nil {
						_, err = g.Processes(context.Background())
					}
					if f := fault.Of(err); f != nil && !f.Retryable {
						bad = err
					}
					mu.Lock()
					if err == nil {
						served++
					} else {
						refused++
					}
					mu.Unlock()
				}
				done <- bad
			}()
		}
		generation := uint64(1)
		for range 100 {
			time.Sleep(11 * time.Millisecond)
			generation++
			h.apply(id, generation, sandbox.Paused)
			time.Sleep(3 * time.Millisecond)
			generation++
			h.apply(id, generation, sandbox.Running)
		}
		h.settled(id, generation, sandbox.Running)
		cancel()
		for range 4 {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		if served < 100 || refused == 0 {
			t.Fatalf("%d served, %d refused: the transitions were not met", served, refused)
		}
	})
}

// breacher breaks the protocol whenever it is told to.
type breacher struct {
	guestclient.Guest
	breach bool
}

func (b *breacher) Processes(context.Context) ([]guestapi.Process, error) {
	if b.breach {
		return nil, guestapi.ErrProtocol
	}
	return nil, nil
}

// A guest that lies again and again is cut off; one slip is forgiven.
func TestBreachesOfProtocolQuarantine(t *testing.T) {
	lies := &breacher{}
	inBubble(t, func(c *Config) {
		c.NewGuest = func(m runtime.Machine) guestclient.Guest {
			lies.Guest = guestclient.New(m.Dial, guestclient.Options{})
			return lies
		}
	}, func(t *testing.T, h *host) {
		id := sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		g, err := h.n.Guest(context.Background(), h.who, id)
		if err != nil {
			t.Fatal(err)
		}
		call := func(breach bool) {
			lies.breach = breach
			if _, err := g.Processes(context.Background()); errors.Is(err, guestapi.ErrProtocol) != breach {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		for range 5 {
			call(true)
			call(false)
			time.Sleep(breachWindow)
		}
		if o := h.observe(id); o.State != sandbox.Running {
			t.Fatalf("%+v", o)
		}
		time.Sleep(breachWindow)
		call(true)
		call(true)
		call(true)
		if o := h.observe(id); o.State != sandbox.Quarantined || o.Pending == nil || o.Pending.Trigger != "guest_protocol_error" {
			t.Fatalf("%+v", o)
		}
	})
}

// A daemon that answers nonsense is quarantined before anybody meets it.
func TestNonsenseAtBootQuarantines(t *testing.T) {
	nonsense := func(runtime.Spec, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() {
			defer func() { _ = theirs.Close() }()
			buf := make([]byte, 4096)
			if _, err := theirs.Read(buf); err != nil {
				return
			}
			_, _ = theirs.Write([]byte("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 17\r\n\r\n{\"nonce\":\"other\"}"))
		}()
		return ours, nil
	}
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, nil, []fake.Option{fake.WithGuest(nonsense)})
		defer h.end()
		id := sandbox.NewID()
		h.apply(id, 1, sandbox.Running)
		if o := h.settled(id, 1, sandbox.Quarantined); o.Problem.Code != "guest_protocol_error" {
			t.Fatalf("%+v", o.Problem)
		}
		synctest.Wait()
		if h.condition(id) != runtime.Paused {
			t.Fatalf("machine is %s", h.condition(id))
		}
		h.reach(id, 2, sandbox.Deleted)
		h.balance()
	})
}

// The ids of the deleted are not kept for ever.
func TestTombstonesEnd(t *testing.T) {
	inBubble(t, func(c *Config) { c.TombstoneKeep = 48 * time.Hour }, func(t *testing.T, h *host) {
		id, expired := sandbox.NewID(), sandbox.NewID()
		h.reach(id, 1, sandbox.Running)
		h.reach(id, 2, sandbox.Deleted)
		h.reach(expired, 1, sandbox.Running, expires(time.Second, sandbox.ActionDelete))
		time.Sleep(40 * time.Hour)
		h.observe(id)
		time.Sleep(40 * time.Hour)
		if _, err := h.n.Observe(context.Background(), h.who, id); !errors.Is(err, ErrUnknown) {
			t.Fatal(err)
		}
		if o := h.observe(expired); o.Pending == nil { // nobody has taken its outcome yet
			t.Fatalf("%+v", o)
		}
	})
}
