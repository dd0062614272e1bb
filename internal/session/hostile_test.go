package session

import (
	"context"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/space-platform/space/internal/guest/malicious"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session/journal"
)

// Whatever a guest says, the pump stays bounded, never invents an exit, and the
// session ends when the node says so.
func TestHostileGuest(t *testing.T) {
	// These are lies about other things, or about what comes after a true exit:
	// the first exit is a claim like any other.
	plausible := []malicious.Behaviour{malicious.Honest, malicious.OutputAfterExit, malicious.TwoExits, malicious.StdinBackwards, malicious.DoubleIDs,
		malicious.LongList, malicious.ShortFile, malicious.BadFileMode}
	// These break the protocol so that it can be told from a broken channel.
	liars := []malicious.Behaviour{malicious.AbsurdCode, malicious.SignalNoCode, malicious.UnknownCause, malicious.HugeFrame, malicious.UnknownFrame,
		malicious.Backwards, malicious.Hole, malicious.WrongTotal, malicious.GapOverflow, malicious.OtherID, malicious.BadOffsets, malicious.ExitedNoExit}
	for _, b := range malicious.HTTP {
		t.Run(string(b), func(t *testing.T) {
			t.Parallel()
			h := newHostOver(t, Limits{Backoff: 50 * time.Millisecond}, nil)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			must(t, err)
			life, die := context.WithCancel(context.Background())
			srv := &http.Server{Handler: malicious.Handler(b), BaseContext: func(net.Listener) context.Context { return life }}
			go func() { _ = srv.Serve(l) }()
			t.Cleanup(func() { die(); _ = srv.Close() })
			g := guestclient.New(func(ctx context.Context) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
			}, guestclient.Options{CallTimeout: 300 * time.Millisecond, IdleTimeout: 300 * time.Millisecond})
			t.Cleanup(g.Close)
			h.guests.known[h.box] = g
			var reported atomic.Int32
			h.Manager.ProtocolError = func(_ context.Context, id sandbox.ID) error {
				if id == h.box {
					reported.Add(1)
				}
				return nil
			}
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			s, _ := h.create(h.shell("true"))
			st, err := h.Attach(ctx, h.who, s.ID, journal.ID{})
			if err != nil {
				if slices.Contains(liars, b) || slices.Contains(plausible, b) {
					t.Fatal(err)
				}
				if got, gerr := h.Get(ctx, h.who, s.ID); gerr != nil || got.State != Created {
					t.Fatalf("after a refused attach (%v): %+v %v", err, got, gerr)
				}
				return // it does not even greet: nothing was started
			}
			defer st.Close()
			end := time.AfterFunc(1500*time.Millisecond, func() { h.SandboxEnded(h.box, "guest_unresponsive", "") })
			defer end.Stop()
			var bytes int
			var last journal.Event
			for {
				ev, err := st.Next(ctx)
				if err != nil {
					if !strings.Contains(err.Error(), "EOF") {
						t.Fatal(err)
					}
					break
				}
				if last.Kind.Final() {
					t.Fatalf("%s after the end", ev.Kind)
				}
				if ev.Kind.Output() {
					bytes += len(ev.Data)
				}
				last = ev
			}
			got, err := h.Get(ctx, h.who, s.ID)
			must(t, err)
			if bytes > 1<<20 {
				t.Fatalf("%d bytes were taken", bytes)
			}
			if slices.Contains(plausible, b) {
				if got.Exit.Cause != CauseExited || got.Exit.Code != 0 {
					t.Fatalf("%+v", got.Exit)
				}
				return
			}
			if got.Exit.Cause != CauseSandboxLost && got.Exit.Cause != CauseStartFailed || got.Exit.Code != -1 || last.Kind != journal.Error {
				t.Fatalf("an invented end: %+v, last event %s", got.Exit, last.Kind)
			}
			if slices.Contains(liars, b) && (!strings.HasPrefix(got.Exit.Reason, "guest_protocol_error") || reported.Load() == 0) {
				t.Fatalf("%+v, reported %d times", got.Exit, reported.Load())
			}
		})
	}
}

// A flood read slowly does not grow the host's memory, and another session is
// untouched.
func TestC009OutputMemoryIsBounded(t *testing.T) {
	h := newHost(t, Limits{JournalBytes: 8 << 20})
	p := newPlane(t, h)
	other, otok := h.create(h.shell("echo up; sleep 100"))
	ost := p.attach(other.ID, otok.Token, "")
	ost.prints("up\n")
	s, tok := h.create(h.shell("yes | head -c " + pick("200000000", "2000000000")))
	st := p.attach(s.ID, tok.Token, "")
	st.until("started")
	runtime.GC()
	var before, now runtime.MemStats
	runtime.ReadMemStats(&before)
	var most uint64
	until(t, 300*time.Second, "the flood ends", func() bool {
		if _, err := st.next(); err != nil { // one event at a time: a slow reader
			t.Fatal(err)
		}
		st.out.Reset() // the client's, not ours
		runtime.ReadMemStats(&now)
		most = max(most, now.HeapInuse+now.StackInuse)
		got, err := h.Get(context.Background(), h.who, s.ID)
		must(t, err)
		return got.Exit != nil
	})
	grown := int64(most) - int64(before.HeapInuse+before.StackInuse)
	t.Logf("grown by %d KiB", grown>>10)
	if grown > 64<<20 {
		t.Fatalf("grown by %d bytes", grown)
	}
	gap := false
	for {
		e, err := st.next()
		if err != nil {
			t.Fatal(err)
		}
		gap = gap || e.kind == "gap"
		if e.kind == "exit" {
			break
		}
	}
	if !gap {
		t.Fatal("a reader behind the window saw no gap")
	}
	if got, err := h.Get(context.Background(), h.who, other.ID); err != nil || got.State != Running {
		t.Fatalf("%+v %v", got, err)
	}
}

// What an idle session costs the host: running, attached by nobody.
func TestMemoryOfIdleSessions(t *testing.T) {
	h := newHost(t, Limits{Keepalive: time.Minute})
	n := pick(100, 120) // a channel carries 128 streams, one per running command
	use := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	h.exec("true")
	before := use()
	for range n {
		s, _ := h.create(CreateRequest{Sandbox: h.box, Command: Command{Args: []string{"/bin/sleep", "300"}}})
		st, err := h.Attach(context.Background(), h.who, s.ID, journal.ID{})
		must(t, err)
		if _, err := st.Next(context.Background()); err != nil {
			t.Fatal(err)
		}
		st.Close()
	}
	until(t, 10*time.Second, "journals rest", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.dirty) == 0 && len(h.resting) == 0
	})
	per := (int64(use()) - int64(before)) / int64(n)
	t.Logf("%d bytes per idle session, the guest's client included", per)
	if per > 128<<10 {
		t.Fatalf("%d bytes per idle session", per)
	}
	must(t, h.Erase(context.Background(), h.box))
}

// The disk refuses: the process waits, nothing is lost, and it goes on.
func TestFullDiskHoldsTheProcess(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{JournalBytes: 64 << 20, SegmentBytes: 64 << 10})
	s, tok := h.create(h.shell("seq 1 400000"))
	st := p.attach(s.ID, tok.Token, "")
	st.until("started")
	dir := h.dir(s.ID)
	must(t, os.Rename(dir, dir+".away")) // new segments cannot be made
	time.Sleep(300 * time.Millisecond)   // how long the disk refuses
	must(t, os.Rename(dir+".away", dir))
	for {
		e, err := st.next()
		if err != nil || e.kind == "error" || e.kind == "gap" {
			t.Fatalf("%+v %v", e, err)
		}
		if e.kind == "exit" {
			break
		}
	}
	if !strings.Contains(h.logs.String(), "output cannot be written") {
		t.Fatal("the disk did not refuse: the test shows nothing")
	}
	if n := strings.Count(st.out.String(), "\n"); n != 400000 {
		t.Fatalf("%d lines", n)
	}
}
