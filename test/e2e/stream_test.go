package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/test/e2e/server"
)

// The unprivileged side is killed at random places of a long output; the reader
// that comes back has every byte once, in order.
func TestStreamSurvivesKills(t *testing.T) {
	t.Parallel()
	s := server.Start(t, server.Options{})
	c := s.Client()
	in := small()
	in.Resources.DiskMiB = 512
	sb := create(t, c, in)
	mib, kills := scaled(20, 100), scaled(3, 50)
	sum := strings.Fields(out(t, c, sb.ID, fmt.Sprintf("head -c %d /dev/urandom >~/f && sha256sum ~/f", mib<<20)))[0]
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell("cat ~/f")})
	at := make([]int64, kills)
	for i := range at {
		at[i] = (int64(i)*int64(mib)<<20 + rand.Int64N(int64(mib)<<20)) / int64(kills)
	}
	ctx := within(t, scaled(2*time.Minute, 30*time.Minute))
	h := sha256.New()
	got := int64(0)
	for {
		if len(at) > 0 && got >= at[0] {
			at = at[1:]
			s.Kill(s.Serve())
			if len(at)%4 == 3 { // a room that starts anew forgets that it waits longer each time
				s.Kill(s.Room())
				ok(t, s.Up())
			}
		}
		ev, err := st.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("after %d bytes: %v", got, err)
		}
		switch ev.Type {
		case spaceapi.EventStdout:
			h.Write(ev.Data)
			got += int64(len(ev.Data))
		case spaceapi.EventGap, spaceapi.EventStderr, spaceapi.EventError:
			t.Fatalf("after %d bytes: %s %s", got, ev.Type, ev.Raw)
		case spaceapi.EventExit:
			if ev.Exit.Code != 0 {
				t.Errorf("exit %+v", ev.Exit)
			}
		}
	}
	if len(at) > 0 || got != int64(mib)<<20 || hex.EncodeToString(h.Sum(nil)) != sum {
		t.Errorf("%d bytes with hash %x, not %d with %s; %d kills left", got, h.Sum(nil), mib<<20, sum, len(at))
	}
	if st.Reconnects() == 0 {
		t.Error("the stream never broke")
	}
}

// The unprivileged side dies between the guest's start of a command and the
// record of it: the command started once, whatever the client does.
func TestStartedOnce(t *testing.T) {
	t.Parallel()
	s := server.Start(t, server.Options{})
	c := s.Client()
	sb := create(t, c, small())
	n := scaled(10, 200)
	for i := range n {
		const point = "session.start.after_guest"
		ok(t, s.Arm(point))
		st := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell(fmt.Sprintf("echo %d >>~/count; echo done", i))})
		if i%3 == 2 { // see TestStreamSurvivesKills
			room := s.Room()
			go func() {
				for end := time.Now().Add(20 * time.Second); s.Armed(point) && time.Now().Before(end); time.Sleep(time.Millisecond) {
				}
				s.Kill(room)
				_ = s.Up() // the stream fails otherwise
			}()
		}
		if w := exited(t, st, 0); w.Out.String() != "done\n" {
			t.Fatalf("round %d printed %q", i, w.Out.String())
		}
		if s.Armed(point) {
			t.Fatalf("round %d: nobody died", i)
		}
	}
	var want strings.Builder
	for i := range n {
		fmt.Fprintln(&want, i)
	}
	if got := out(t, c, sb.ID, "cat ~/count"); got != want.String() {
		t.Errorf("commands started:\n%s", got)
	}
}

// C-001: no exit event before the exit, whatever breaks on the way.
func TestC001StreamEndsAreTrue(t *testing.T) {
	t.Parallel()
	s := server.Start(t, server.Options{})
	c := s.Client()
	sb := create(t, c, small())
	const sessions = 20
	n, pause := scaled(40, 300), scaled(100*time.Millisecond, time.Second)
	streams := make([]*client.Stream, sessions)
	for i := range streams {
		streams[i] = session(t, c, sb.ID, spaceapi.CreateSession{Command: shell(fmt.Sprintf("i=0; while [ $i -lt %d ]; do i=$((i+1)); echo $i; sleep %g; done", n, pause.Seconds()))})
	}
	ctx := within(t, 20*time.Minute)
	results := make(chan error, sessions)
	began := time.Now()
	for _, st := range streams {
		go func() {
			w, err := drain(ctx, st)
			switch {
			case err != nil:
			case w.Exit == nil || w.Exit.Cause != "exited" || w.Exit.Code != 0 || w.Gaps > 0:
				err = fmt.Errorf("ended with %+v %+v, %d gaps", w.Exit, w.Ended, w.Gaps)
			case time.Since(began) < time.Duration(n)*pause:
				err = fmt.Errorf("ended after %v", time.Since(began))
			default:
				err = isSequence(w.Out.String(), n)
			}
			results <- err
		}()
	}
	wait := func(part int) { time.Sleep(time.Until(began.Add(time.Duration(n) * pause * time.Duration(part) / 4))) }
	wait(1)
	s.Kill(s.Serve()) // the link to the guest breaks, and the API daemon restarts
	wait(2)
	for _, st := range streams {
		st.Drop() // the client's own connection breaks
	}
	wait(3)
	s.Kill(s.Room())
	ok(t, s.Up())
	for range streams {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

func isSequence(text string, n int) error {
	i := 0
	for line := range strings.Lines(text) {
		if i++; line != fmt.Sprintln(i) {
			return fmt.Errorf("line %d is %.40q", i, line)
		}
	}
	if i != n {
		return fmt.Errorf("%d lines, not %d", i, n)
	}
	return nil
}

// C-005: a command goes on alone, and is found again with all that it printed.
func TestC005ReconnectLater(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	sb := create(t, c, small())
	st := session(t, c, sb.ID, spaceapi.CreateSession{Stdin: true, Command: shell(
		fmt.Sprintf(`i=0; while [ $i -lt %d ]; do i=$((i+1)); echo $i; sleep %g; done; read x; echo "got $x"; trap 'exit 4' USR1; while :; do sleep 0.05; done`,
			scaled(20, 600), scaled(0.1, 1.0)))})
	said(t, st, "3\n")
	last := st.Last()
	st.Close()
	time.Sleep(scaled(1200*time.Millisecond, 180*time.Second))
	got, err := c.Session(within(t, 10*time.Second), st.Session())
	ok(t, err)
	if got.State != "running" {
		t.Errorf("the session is %s", got.State)
	}
	again, err := c.Follow(within(t, 10*time.Second), st.Session(), last)
	ok(t, err)
	t.Cleanup(again.Close)
	var text strings.Builder
	ok(t, again.Write(within(t, 10*time.Second), []byte("word\n")))
	ctx := within(t, 20*time.Minute)
	until(ctx, t, again, func(ev client.Event) bool {
		text.Write(ev.Data)
		return strings.HasSuffix(text.String(), "got word\n")
	})
	if err := isSequence("1\n2\n3\n"+strings.TrimSuffix(text.String(), "got word\n"), scaled(20, 600)); err != nil {
		t.Errorf("after coming back: %v", err)
	}
	ok(t, again.Signal(within(t, 10*time.Second), "USR1"))
	exited(t, again, 4)
}

// C-008: who does not read delays nobody.
func TestC008SlowReader(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	sb := create(t, c, small())
	a := session(t, c, sb.ID, spaceapi.CreateSession{Stdin: true, Command: spaceapi.Command{Args: []string{"cat"}}})
	started(t, a) // and never reads again
	reader := func() (*client.Stream, hash.Hash, chan int64) {
		st, err := c.Follow(within(t, 10*time.Second), a.Session(), "")
		ok(t, err)
		t.Cleanup(st.Close)
		return st, sha256.New(), make(chan int64, 1<<20)
	}
	ctx := within(t, 2*time.Minute)
	follow := func(st *client.Stream, h hash.Hash, seen chan int64) {
		total := int64(0)
		for {
			ev, err := st.Next(ctx)
			if err != nil {
				close(seen)
				return
			}
			if ev.Type == spaceapi.EventStdout {
				total += int64(len(ev.Data))
				h.Write(ev.Data)
				seen <- total
			}
		}
	}
	reaches := func(who string, seen chan int64, want int64) {
		t.Helper()
		for end := time.After(20 * time.Second); ; {
			select {
			case got, open := <-seen:
				if !open {
					t.Fatalf("%s was cut", who)
				}
				if got >= want {
					return
				}
			case <-end:
				t.Fatalf("%s did not see %d bytes in time", who, want)
			}
		}
	}
	b, bh, bSeen := reader()
	go follow(b, bh, bSeen)
	block := make([]byte, 5<<20)
	for i := range block {
		block[i] = "0123456789abcdef\n"[i%17]
	}
	send := func() { ok(t, a.Write(within(t, time.Minute), block)) }
	send()
	reaches("B", bSeen, 5<<20)
	verb(t, c, sb.ID, "pause")
	verb(t, c, sb.ID, "resume")
	x, xh, xSeen := reader()
	go follow(x, xh, xSeen)
	send()
	reaches("B", bSeen, 10<<20)
	reaches("C", xSeen, 10<<20)
	ok(t, a.CloseStdin(within(t, 10*time.Second)))
	for range bSeen { // until the end
	}
	for range xSeen {
	}
	want := sha256.New()
	want.Write(block)
	want.Write(block)
	if w := want.Sum(nil); string(bh.Sum(nil)) != string(w) || string(xh.Sum(nil)) != string(w) {
		t.Error("the readers' bytes differ from what was sent")
	}
}

// C-010: nobody reads, the command finishes, and its code can be had later.
func TestC010NobodyReads(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	sb := create(t, c, small())
	st := session(t, c, sb.ID, spaceapi.CreateSession{Overflow: "drop", Command: shell(fmt.Sprintf("seq 1 %d; touch ~/finished; exit 6", scaled(500_000, 3_000_000)))})
	started(t, st)
	st.Close()
	plain := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell(fmt.Sprintf("seq 1 %d; touch ~/finished2; exit 6", scaled(500_000, 3_000_000)))})
	started(t, plain)
	plain.Close()
	for _, x := range []struct {
		st   *client.Stream
		file string
	}{{st, "~/finished"}, {plain, "~/finished2"}} {
		for end := time.Now().Add(scaled(30*time.Second, 2*time.Minute)); run(t, c, sb.ID, shell("test -e "+x.file)).Exit.Code != 0; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s does not come", x.file)
			}
		}
		var got spaceapi.Session
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			var err error
			got, err = c.Session(within(t, 10*time.Second), x.st.Session())
			ok(t, err)
			if got.Exit != nil || time.Now().After(end) {
				break
			}
		}
		if got.Exit == nil || got.Exit.Code != 6 || got.State != "exited" {
			t.Errorf("the session is %+v", got)
		}
	}
	again, err := c.Follow(within(t, 10*time.Second), plain.Session(), "")
	ok(t, err)
	t.Cleanup(again.Close)
	w, err := drain(within(t, time.Minute), again)
	ok(t, err)
	if w.Exit == nil || w.Exit.Code != 6 || (w.Gaps == 0) != (isSequence(w.Out.String(), scaled(500_000, 3_000_000)) == nil) {
		t.Errorf("later: exit %+v, %d gaps, %d bytes", w.Exit, w.Gaps, w.Out.Len())
	}
}

// C-009: however much a command prints, nobody's memory grows with it.
func TestC009MemoryIsBounded(t *testing.T) {
	t.Parallel()
	s := server.Start(t, server.Options{})
	c := s.Client()
	in := small()
	in.Resources.MemoryMiB = 512
	sb := create(t, c, in)
	other := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell("sleep " + scaled("2", "100") + "; echo untouched")})
	started(t, other)
	serve := s.Serve()
	guest := func() int64 { return number(t, out(t, c, sb.ID, "grep VmRSS /proc/1/status")) << 10 }
	host := func() int64 { return resident(t, serve) }
	guest0, host0 := guest(), host()
	size := uint64(scaled(100<<20, 2<<30))
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell(fmt.Sprintf("yes | head -c %d", size))})
	slow, err := c.Follow(within(t, 10*time.Second), st.Session(), "")
	ok(t, err)
	t.Cleanup(slow.Close)
	ctx, cancel := context.WithCancel(within(t, time.Hour))
	defer cancel()
	go func() { // reads 100 kB a second
		for {
			ev, err := slow.Next(ctx)
			if err != nil {
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Duration(len(ev.Data)) * 10 * time.Microsecond):
			}
		}
	}()
	var top, topGuest int64
	watchEnd := make(chan struct{})
	go func() {
		defer close(watchEnd)
		for ctx.Err() == nil {
			top = max(top, residentOr0(serve))
			time.Sleep(20 * time.Millisecond)
		}
	}()
	var total uint64
	until(within(t, time.Hour), t, st, func(ev client.Event) bool {
		if ev.Type == spaceapi.EventStdout {
			total += uint64(len(ev.Data))
		}
		if ev.Type == spaceapi.EventGap {
			total += ev.Gap.Missing
		}
		return ev.Type == spaceapi.EventExit
	})
	topGuest = guest()
	cancel()
	<-watchEnd
	if total != size {
		t.Errorf("%d bytes were printed or declared missing, not %d", total, size)
	}
	const limit = 64 << 20
	if top-host0 > limit || topGuest-guest0 > limit {
		t.Errorf("memory grew: host %d to %d MiB, guest daemon %d to %d MiB", host0>>20, top>>20, guest0>>20, topGuest>>20)
	}
	t.Logf("host %d to %d MiB, guest daemon %d to %d MiB", host0>>20, top>>20, guest0>>20, topGuest>>20)
	if s.Serve() != serve {
		t.Error("the unprivileged side died")
	}
	if w := exited(t, other, 0); w.Out.String() != "untouched\n" {
		t.Errorf("the other session printed %q", w.Out.String())
	}
}
