package e2e

import (
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/test/e2e/server"
)

// A whole life through the API: files and memory are kept where they should be.
func TestLife(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	sb := create(t, c, small())
	if sb.Isolation != "userkernel" || sb.Template != "tiny:latest" {
		t.Errorf("sandbox %+v", sb)
	}
	out(t, c, sb.ID, "echo kept >~/marker")
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell("while :; do echo tick; sleep 0.1; done")})
	said(t, st, "tick")

	verb(t, c, sb.ID, "pause")
	if got := state(t, c, sb.ID, 0, "paused"); got.DesiredState != "paused" {
		t.Errorf("desired %s", got.DesiredState)
	}
	verb(t, c, sb.ID, "pause") // asking for the state one has succeeds
	verb(t, c, sb.ID, "resume")
	said(t, st, "tick") // the same process goes on

	verb(t, c, sb.ID, "stop")
	w, err := drain(within(t, 20*time.Second), st)
	ok(t, err)
	if w.Ended == nil || w.Ended.Code != "sandbox_lost" || w.Ended.Exit.Cause != "sandbox_lost" {
		t.Errorf("a session of a stopped machine ended with %+v %+v", w.Exit, w.Ended)
	}
	if _, err := c.Exec(within(t, 20*time.Second), sb.ID, spaceapi.Exec{Command: shell("true")}); client.Code(err) == "" {
		t.Errorf("exec in a stopped sandbox: %v", err)
	}
	verb(t, c, sb.ID, "start")
	if got := out(t, c, sb.ID, "cat ~/marker"); got != "kept\n" {
		t.Errorf("after stop and start the file holds %q", got)
	}
	for _, from := range []string{"pause", "stop"} {
		verb(t, c, sb.ID, from)
		verb(t, c, sb.ID, "wake")
		if got := out(t, c, sb.ID, "cat ~/marker"); got != "kept\n" {
			t.Errorf("after %s and wake the file holds %q", from, got)
		}
	}
	remove(t, c, sb.ID)
	if _, err := c.Sandbox(within(t, 10*time.Second), sb.ID); !gone(err) {
		t.Errorf("a deleted sandbox is answered with %v", err)
	}
	for _, l := range s.Gone(sb.ID, 5*time.Second) {
		t.Errorf("left: %s", l)
	}
}

// C-003: the death of the machine is told to all who wait, with its reason, and
// the files that the guest was told are written survive it.
func TestC003LossOfTheMachine(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	sb := create(t, c, small())
	out(t, c, sb.ID, "echo kept >~/marker && sync")
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell("echo here; sleep 600")})
	said(t, st, "here")
	killed := 0
	for pid, line := range server.Processes(sb.ID) {
		if isSandbox(line) {
			s.Kill(pid)
			killed++
		}
	}
	if killed == 0 {
		t.Fatalf("no sentry of %s among %v", sb.ID, server.Processes(sb.ID))
	}
	began := time.Now()
	w, err := drain(within(t, 20*time.Second), st)
	ok(t, err)
	if w.Ended == nil || w.Ended.Code != "sandbox_lost" {
		t.Errorf("the session ended with %+v %+v", w.Exit, w.Ended)
	}
	got := state(t, c, sb.ID, 5*time.Second, "failed")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %v until the loss was told", took)
	}
	if got.Problem == nil || got.Problem.Code == "" || got.Problem.Detail == "" {
		t.Errorf("failed without a reason: %+v", got.Problem)
	}
	verb(t, c, sb.ID, "start")
	if got := out(t, c, sb.ID, "cat ~/marker"); got != "kept\n" {
		t.Errorf("after the death the file holds %q", got)
	}

	// Its end of life comes while somebody calls: a clear answer at once.
	one := int64(1)
	_, err = c.PatchSandbox(within(t, 10*time.Second), sb.ID, spaceapi.PatchSandbox{TimeoutSeconds: &one})
	ok(t, err)
	st = session(t, c, sb.ID, spaceapi.CreateSession{Command: shell("sleep 600")})
	w, err = drain(within(t, 20*time.Second), st)
	ok(t, err)
	if w.Ended == nil {
		t.Errorf("a session over the end of life ended with %+v", w.Exit)
	}
	_, err = c.Exec(within(t, 5*time.Second), sb.ID, spaceapi.Exec{Command: shell("true")})
	if !gone(err) && client.Code(err) != "sandbox_expired" {
		t.Errorf("exec after the end of life: %v", err)
	}
}
