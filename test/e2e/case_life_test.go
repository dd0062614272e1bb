package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/test/e2e/server"
)

// tiniest is for tests that need many.
func tiniest() spaceapi.CreateSandbox {
	in := small()
	in.Resources = spaceapi.Resources{CPUs: 0.1, MemoryMiB: 128, DiskMiB: 64, MaxProcesses: 32}
	return in
}

// several makes n sandboxes at once.
func several(t *testing.T, c *client.Client, n int, in spaceapi.CreateSandbox) []string {
	t.Helper()
	ids := make([]string, n)
	each(t, n, func(i int) error {
		m, err := c.CreateSandbox(within(t, 2*time.Minute), in)
		if err != nil {
			return err
		}
		ids[i] = m.Sandbox.ID
		_, err = c.AwaitOperation(within(t, 2*time.Minute), m.Operation)
		return err
	})
	t.Cleanup(func() {
		each(t, n, func(i int) error {
			if ids[i] == "" {
				return nil
			}
			return unborn(within(t, time.Minute), c, ids[i])
		})
	})
	return ids
}

// each runs f for 0 to n-1 at once, and collects the errors.
func each(t *testing.T, n int, f func(i int) error) {
	t.Helper()
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Add(1)
		go func() {
			defer wg.Done()
			errs[i] = f(i)
		}()
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// C-035: whoever connects does not shorten a life.
func TestC035ConnectingShortensNothing(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	in := small()
	in.TimeoutSeconds = 1800
	sb := create(t, c, in)
	end := sb.ExpiresAt
	if left := time.Until(end); left < 29*time.Minute || left > 31*time.Minute {
		t.Errorf("the end is in %v", left)
	}
	same := func(what string) {
		t.Helper()
		if got := state(t, c, sb.ID, 0, "running"); got.ExpiresAt.Before(end) {
			t.Errorf("%s moved the end from %v to %v", what, end, got.ExpiresAt)
		}
	}
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell("echo hi; sleep 60")})
	said(t, st, "hi")
	same("attach")
	tty := session(t, c, sb.ID, spaceapi.CreateSession{PTY: &spaceapi.Size{Rows: 24, Cols: 80}, Command: spaceapi.Command{Args: []string{"sh"}}})
	started(t, tty)
	same("a terminal")
	verb(t, c, sb.ID, "wake")
	same("wake")
	_, err := c.MintToken(within(t, 10*time.Second), sb.ID, spaceapi.MintToken{Scopes: []string{"exec"}})
	ok(t, err)
	same("a token")
	verb(t, c, sb.ID, "pause")
	verb(t, c, sb.ID, "resume")
	same("pause and resume")
	name := "renamed"
	_, err = c.PatchSandbox(within(t, 10*time.Second), sb.ID, spaceapi.PatchSandbox{Metadata: &map[string]string{"a": name}})
	ok(t, err)
	same("other settings")
	short := int64(60)
	_, err = c.PatchSandbox(within(t, 10*time.Second), sb.ID, spaceapi.PatchSandbox{TimeoutSeconds: &short})
	ok(t, err)
	if got := state(t, c, sb.ID, 0, "running"); time.Until(got.ExpiresAt) > 61*time.Second {
		t.Errorf("an explicit change left the end at %v", got.ExpiresAt)
	}
}

// C-036: what happens at the end of life is still so after it has happened.
func TestC036ActionSurvivesResume(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	in := small()
	in.OnTimeout, in.TimeoutSeconds = "pause", scaled(int64(2), 30)
	sb := create(t, c, in)
	out(t, c, sb.ID, "echo kept >~/marker")
	wait := scaled(15*time.Second, 60*time.Second)
	state(t, c, sb.ID, wait, "paused")
	verb(t, c, sb.ID, "resume")
	if got := state(t, c, sb.ID, 0, "running"); got.OnTimeout != "pause" || !got.ExpiresAt.After(time.Now()) {
		t.Errorf("after resume: on_timeout %q, end %v", got.OnTimeout, got.ExpiresAt)
	}
	if got := out(t, c, sb.ID, "cat ~/marker"); got != "kept\n" {
		t.Errorf("the file holds %q", got)
	}
	if got := state(t, c, sb.ID, wait, "paused"); got.OnTimeout != "pause" {
		t.Errorf("after the second end: %+v", got)
	}
}

// C-037: a renewal at the last moment counts, or is refused clearly; nothing is
// left over past its end.
func TestC037RenewalMeetsExpiry(t *testing.T) {
	t.Parallel()
	s := server.Start(t, server.Options{})
	c := s.Client()
	one := client.New("http://"+s.API, s.Key(), client.WithAttempts(14))
	for round := range scaled(2, 50) {
		n := scaled(6, 20)
		life := scaled(int64(2), 5)
		in := tiniest()
		in.TimeoutSeconds = life
		ids := make([]string, n)
		ends := make([]time.Time, n)
		each(t, n, func(i int) error {
			m, err := c.CreateSandbox(within(t, time.Minute), in)
			ids[i], ends[i] = m.Sandbox.ID, m.Sandbox.ExpiresAt
			return err
		})
		hour := int64(3600)
		renewed := make([]bool, n)
		each(t, n, func(i int) error {
			time.Sleep(time.Until(ends[i].Add(time.Duration(rand.Int64N(100)-50) * time.Millisecond)))
			m, err := one.PatchSandbox(within(t, time.Minute), ids[i], spaceapi.PatchSandbox{TimeoutSeconds: &hour})
			if err == nil { // the intent is durable; whether it came in time its operation tells
				_, err = one.AwaitOperation(within(t, time.Minute), m.Operation)
			}
			switch {
			case err == nil:
				renewed[i] = true
				return nil
			case gone(err) || client.Code(err) == "state_conflict" || client.Code(err) == "sandbox_expired":
				return nil
			}
			return err
		})
		if round == 0 {
			s.Kill(s.Serve())
			ok(t, s.Ready(20*time.Second))
		}
		each(t, n, func(i int) error {
			if renewed[i] {
				sb, err := c.Sandbox(within(t, 10*time.Second), ids[i])
				if err != nil || time.Until(sb.ExpiresAt) < 50*time.Minute || sb.State != "running" {
					return fmt.Errorf("renewed, and is now %+v, %w", sb, err)
				}
				return unborn(within(t, time.Minute), c, ids[i])
			}
			for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
				if _, err := c.Sandbox(within(t, 10*time.Second), ids[i]); gone(err) {
					return nil
				}
			}
			return fmt.Errorf("%s is past its end and still there", ids[i])
		})
	}
}

// C-038: one cheap call just before the idle limit keeps a sandbox alive.
func TestC038CallsKeepAlive(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	in := tiniest()
	idle := scaled(int64(2), 10)
	in.IdleSeconds, in.OnIdle, in.TimeoutSeconds = idle, "stop", 3600
	ids := several(t, c, scaled(4, 50), in)
	every := time.Duration(idle)*time.Second - scaled(400*time.Millisecond, 100*time.Millisecond)
	each(t, len(ids), func(i int) error {
		for end := time.Now().Add(scaled(7*time.Second, 5*time.Minute)); time.Now().Before(end); time.Sleep(every) {
			if _, err := c.Exec(within(t, 10*time.Second), ids[i], spaceapi.Exec{Command: shell("true")}); err != nil {
				return err
			}
		}
		return nil
	})
	each(t, len(ids), func(i int) error { // and without calls they stop
		for end := time.Now().Add(time.Duration(idle)*time.Second + 10*time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			if sb, err := c.Sandbox(within(t, 10*time.Second), ids[i]); err != nil || sb.State == "stopped" {
				return err
			}
		}
		return fmt.Errorf("not stopped though idle")
	})
}

// C-039: a running command is no idleness, with a reader or without.
func TestC039RunningIsNotIdle(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	in := tiniest()
	in.OnIdle, in.TimeoutSeconds = "pause", 3600
	ids := several(t, c, 2, in)
	idle := scaled(int64(1), 60)
	text := fmt.Sprintf("sleep %g; echo ok", scaled(3.5, 180))
	read := session(t, c, ids[0], spaceapi.CreateSession{Command: shell(text)})
	unread := session(t, c, ids[1], spaceapi.CreateSession{Command: shell(text)})
	started(t, unread)
	unread.Close()
	started(t, read)
	for _, id := range ids { // only now: a busy host takes longer than this to start them
		_, err := c.PatchSandbox(within(t, 10*time.Second), id, spaceapi.PatchSandbox{IdleSeconds: &idle}, client.Wait(10*time.Second))
		ok(t, err)
	}
	if w := exited(t, read, 0); w.Out.String() != "ok\n" {
		t.Errorf("printed %q", w.Out.String())
	}
	for _, id := range ids { // both go idle after their commands, the second was not cut
		state(t, c, id, scaled(15*time.Second, 90*time.Second), "paused")
	}
	got, err := c.Session(within(t, 10*time.Second), unread.Session())
	ok(t, err)
	if got.Exit == nil || got.Exit.Code != 0 {
		t.Errorf("the unread command: %+v", got)
	}
}

// C-040: what pause and resume answer is true at once.
func TestC040PauseResumeRounds(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	ids := several(t, c, scaled(4, 20), tiniest())
	each(t, len(ids), func(i int) error {
		ctx := within(t, 20*time.Minute)
		for round := range scaled(5, 50) {
			for _, x := range []struct{ verb, state string }{{"pause", "paused"}, {"resume", "running"}} {
				if err := try(ctx, c, ids[i], x.verb); err != nil {
					return err
				}
				if sb, err := c.Sandbox(ctx, ids[i]); err != nil || sb.State != x.state {
					return fmt.Errorf("round %d: %s after %s, %w", round, sb.State, x.verb, err)
				}
			}
			r, err := c.Exec(ctx, ids[i], spaceapi.Exec{Command: shell("echo $((6*7))")})
			if err != nil || output(r.Stdout) != "42\n" {
				return fmt.Errorf("round %d: %q %+v, %w", round, output(r.Stdout), r.Exit, err)
			}
		}
		return unborn(ctx, c, ids[i])
	})
}

// C-041: a delete wins over the resume that is under way.
func TestC041DeleteWinsOverResume(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	for range scaled(2, 10) {
		ids := several(t, c, scaled(5, 20), tiniest())
		each(t, len(ids), func(i int) error { return try(within(t, time.Minute), c, ids[i], "pause") })
		each(t, len(ids), func(i int) error {
			ctx := within(t, 2*time.Minute)
			resumed := make(chan error, 1)
			go func() { resumed <- try(ctx, c, ids[i], "resume") }()
			time.Sleep(time.Duration(rand.Int64N(int64(scaled(60*time.Millisecond, 2*time.Second)))))
			if err := unborn(ctx, c, ids[i]); err != nil {
				return err
			}
			if _, err := c.Sandbox(ctx, ids[i]); !gone(err) {
				return fmt.Errorf("after delete: %w", err)
			}
			err := <-resumed // it came before, or it is told
			if err != nil && !gone(err) && !slices.Contains([]string{"operation_cancelled", "state_conflict"}, client.Code(err)) {
				return fmt.Errorf("resume: %w", err)
			}
			if left := s.Gone(ids[i], 10*time.Second); len(left) > 0 {
				return fmt.Errorf("left: %q", left)
			}
			return nil
		})
	}
}

// C-042: paused sandboxes are deleted as they are.
func TestC042PausedCanBeDeletedAtOnce(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	ids := several(t, c, scaled(6, 80), tiniest())
	each(t, len(ids), func(i int) error { return try(within(t, 2*time.Minute), c, ids[i], "pause") })
	each(t, len(ids), func(i int) error { return unborn(within(t, 2*time.Minute), c, ids[i]) })
	for _, id := range ids {
		if left := s.Gone(id, 10*time.Second); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}
}

// C-054: running means that the first command works.
func TestC054RunningMeansUsable(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	for range scaled(2, 20) {
		each(t, scaled(4, 10), func(int) error {
			ctx := within(t, time.Minute)
			m, err := c.CreateSandbox(ctx, tiniest())
			if err != nil {
				return err
			}
			defer func() { _ = unborn(within(t, time.Minute), c, m.Sandbox.ID) }() // the server's end tells of what is left
			for {
				sb, err := c.Sandbox(ctx, m.Sandbox.ID)
				if err != nil || sb.Problem != nil {
					return fmt.Errorf("%+v, %w", sb.Problem, err)
				}
				if sb.State == "running" {
					break
				}
				time.Sleep(2 * time.Millisecond)
			}
			// The network comes with step 3; a name that needs none is looked up.
			text := `grep -q "^127.0.0.1.*localhost" /etc/hosts && wget -O- http://localhost:1 2>&1 | grep -q refused && echo $(hostname) >~/f && test -s ~/f`
			r, err := c.Exec(ctx, m.Sandbox.ID, spaceapi.Exec{Command: shell(text)})
			if err != nil || r.Exit.Code != 0 {
				return fmt.Errorf("the first command: %+v %q, %w", r.Exit, output(r.Stderr), err)
			}
			return nil
		})
	}
}

// C-055: calls that meet a transition are served, or may be repeated.
func TestC055CallsMeetTransitions(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	sb := create(t, c, small())
	ctx, cancel := context.WithCancel(within(t, 10*time.Minute))
	defer cancel()
	var mu sync.Mutex
	served, refused := 0, map[string]int{} // guarded by mu
	var wg sync.WaitGroup
	for range 3 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			plain := client.New("http://"+s.API, s.Key(), client.WithAttempts(1))
			for ctx.Err() == nil {
				r, err := plain.Exec(within(t, 30*time.Second), sb.ID, spaceapi.Exec{Command: shell("echo ok")})
				mu.Lock()
				switch code := client.Code(err); {
				case err == nil && output(r.Stdout) == "ok\n":
					served++
				case err == nil:
					refused[fmt.Sprintf("result %+v", r.Exit)]++
				default:
					refused[code]++
					// There is no waking by calls yet: a sandbox that is paused refuses.
					if code != "sandbox_not_running" && code != "sandbox_paused" && code != "sandbox_in_transition" || !strings.Contains(err.Error(), "retry") {
						t.Errorf("a call failed with %v", err)
					}
				}
				mu.Unlock()
			}
		}()
	}
	for range scaled(8, 60) {
		for _, v := range []string{"pause", "resume"} {
			ok(t, try(within(t, time.Minute), c, sb.ID, v))
			time.Sleep(scaled(100*time.Millisecond, 2*time.Second))
		}
	}
	cancel()
	wg.Wait()
	if served == 0 {
		t.Error("no call was served")
	}
	t.Logf("served %d, refused %v", served, refused)
}
