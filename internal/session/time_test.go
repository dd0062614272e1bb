package session

import (
	"context"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/quota"
)

// lazyGuest forgets time limits.
type lazyGuest struct{ guestclient.Guest }

func (g lazyGuest) Start(ctx context.Context, s guestapi.Start) (guestapi.Process, error) {
	s.TimeLimit = 0
	return g.Guest.Start(ctx, s)
}

// A guest that does not end a command at its limit does not prolong it, and
// paused time does not count.
func TestHostEnforcesTheLimit(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{LimitSlack: 300 * time.Millisecond, Sweep: 20 * time.Millisecond})
	h.guests.known[h.box] = lazyGuest{h.guests.known[h.box]}
	r := h.shell("echo up; sleep 100")
	r.Command.TimeLimit = 200 * time.Millisecond
	s, tok := h.create(r)
	start := time.Now()
	st := p.attach(s.ID, tok.Token, "")
	st.prints("up\n")
	h.SandboxPaused(h.box)
	time.Sleep(700 * time.Millisecond) // longer than limit and slack together
	h.SandboxResumed(h.box)
	x := st.end()
	if x.Cause != CauseTimeLimit || x.Code != 137 {
		t.Fatalf("%+v", x)
	}
	if took := time.Since(start); took < 1200*time.Millisecond || took > 10*time.Second {
		t.Fatalf("ended after %s", took)
	}
}

func TestEndedSessionsGoAfterTheirTime(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{Retain: 300 * time.Millisecond})
	r := h.exec("echo kept")
	if _, err := h.Get(context.Background(), h.who, r.Session); err != nil {
		t.Fatal(err)
	}
	until(t, 10*time.Second, "the session goes", func() bool {
		_, err := h.Get(context.Background(), h.who, r.Session)
		return fault.IsCode(err, "session_not_found")
	})
	until(t, 5*time.Second, "its output goes", func() bool { return dirBytes(h.dir(r.Session)) == 0 })
	for _, k := range []quota.Kind{quota.Sessions, quota.JournalBytes} {
		until(t, 5*time.Second, "its charges go", func() bool { return h.Config.Ledger.Used(h.who, h.box, k) == 0 })
	}
}

// After a power loss the end of a journal may be gone, also what readers saw of
// it: the session is lost, no id comes twice, and the gap is told.
func TestHostRebootLosesSessionsWithoutReusingIDs(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	s, tok := h.create(h.shell("echo up; sleep 100"))
	st := p.attach(s.ID, tok.Token, "")
	st.prints("up\n")
	st.close()
	h.conf.HostBoot = "another-boot"
	h.reopen()
	// One reader saw more than what is left.
	for _, after := range []string{st.last, "1.5000"} {
		st := p.events(s.ID, tok.Token, after)
		e, err := st.next()
		must(t, err)
		if _, reason := e.gap(t); e.kind != "gap" || reason != "host_restarted" || offset(t, e.id) < 1<<32 {
			t.Fatalf("%+v", e)
		}
		e, err = st.next()
		must(t, err)
		if e.kind != "error" || !strings.Contains(e.data, "the host was restarted") {
			t.Fatalf("%+v", e)
		}
		if _, err := st.next(); err != io.EOF {
			t.Fatal(err)
		}
	}
	got, err := h.Get(context.Background(), h.who, s.ID)
	must(t, err)
	if got.State != Lost || got.Exit.Cause != CauseSandboxLost {
		t.Fatalf("%+v", got)
	}
}

// Overflow "drop": what the guest had to drop is one explicit gap with its size.
func TestDropGivesAGapWithItsSize(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	r := h.shell("echo up; sleep 0.3; head -c 5000000 /dev/zero; echo; echo END; exit 4")
	r.Command.Overflow = "drop"
	s, tok := h.create(r)
	st := p.attach(s.ID, tok.Token, "")
	st.prints("up\n")
	h.link.cut()
	time.Sleep(time.Second) // the link is away while more than a window is printed
	h.link.mend()
	var missing uint64
	for {
		e, err := st.next()
		must(t, err)
		if e.kind == "gap" {
			n, reason := e.gap(t)
			if reason != "overflow" {
				t.Fatalf("%+v", e)
			}
			missing += n
		}
		if e.kind == "exit" {
			break
		}
	}
	if total := uint64(st.out.Len()) + missing; missing == 0 || total != 5000000+8 || !strings.HasSuffix(st.out.String(), "\nEND\n") {
		t.Fatalf("%d bytes and %d missing", st.out.Len(), missing)
	}
}

// Closing does not wait for commands, and the next manager goes on with them.
func TestCloseLeavesCommandsRunning(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	r := h.shell("cat")
	r.Command.Stdin = true
	s, tok := h.create(r)
	st := p.attach(s.ID, tok.Token, "")
	st.until("started")
	exec := make(chan error)
	go func() {
		_, err := h.Manager.Exec(context.Background(), h.who, ExecRequest{CreateRequest: h.shell("cat; sleep 100"), StdinData: []byte("x")})
		exec <- err
	}()
	until(t, 5*time.Second, "both run", func() bool { return h.RunningSessions(h.box) == 2 })
	old := h.Manager
	within(t, 5*time.Second, "close", old.Close)
	if err := <-exec; !fault.IsClass(err, fault.Unavailable) {
		t.Fatal(err)
	}
	if e := st.until("interrupted"); !strings.Contains(e.data, "shutting_down") {
		t.Fatalf("%+v", e)
	}
	h.reopen()
	st = p.events(s.ID, tok.Token, st.last)
	p.json("POST", "/d/sessions/"+string(s.ID)+"/stdin?offset=0", tok.Token, "on", 200, nil)
	st.prints("on")
	p.json("POST", "/d/sessions/"+string(s.ID)+"/close-stdin", tok.Token, "", 200, nil)
	if x := st.end(); x.Code != 0 {
		t.Fatalf("%+v", x)
	}
}

// ackless loses every acknowledgement while it is told to.
type ackless struct {
	guestclient.Guest
	lose atomic.Bool
}

func (g *ackless) Ack(ctx context.Context, id string, n uint64) error {
	if g.lose.Load() {
		return fault.New(fault.Unavailable, "guest_unavailable", "the link is cut")
	}
	return g.Guest.Ack(ctx, id, n)
}

// The host dies with all of a full window in its journal and none of it
// acknowledged: the next one acknowledges it, or the process waits for ever.
func TestFullWindowIsAcknowledgedAfterARestart(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	g := &ackless{Guest: h.guests.known[h.box]}
	g.lose.Store(true)
	h.guests.known[h.box] = g
	s, tok := h.create(h.shell("head -c 3000000 /dev/zero; exit 6"))
	st := p.attach(s.ID, tok.Token, "")
	for st.out.Len() < guestWindow {
		if _, err := st.next(); err != nil {
			t.Fatal(err)
		}
	}
	h.reopen()
	g.lose.Store(false)
	st2 := p.events(s.ID, tok.Token, st.last)
	within(t, 10*time.Second, "the rest", func() {
		if x := st2.end(); x.Code != 6 {
			t.Fatalf("%+v", x)
		}
	})
	if n := st.out.Len() + st2.out.Len(); n != 3000000 {
		t.Fatalf("%d bytes", n)
	}
}
