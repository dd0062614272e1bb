package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
)

// running reports whether the guest has a process whose command line holds text.
func running(t *testing.T, c *client.Client, id, text string) bool {
	t.Helper()
	// The brackets keep the search from finding itself.
	pattern := "[" + text[:1] + "]" + text[1:]
	return run(t, c, id, shell("ps -o args | grep -q '"+pattern+"'")).Exit.Code == 0
}

// C-004: a limit of one second takes one second, and what was printed is there.
func TestC004TimeLimitMeansWhatItSays(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	sb := create(t, c, small())
	cmd := spaceapi.Command{Shell: "echo partial; sleep 61", TimeoutSeconds: 1}
	began := time.Now()
	r := run(t, c, sb.ID, cmd)
	if took := time.Since(began); took < time.Second || took > 3*time.Second {
		t.Errorf("it took %v", took)
	}
	if r.Exit.Cause != "time_limit" || output(r.Stdout) != "partial\n" {
		t.Errorf("result %+v %q", r.Exit, output(r.Stdout))
	}
	if running(t, c, sb.ID, "sleep 61") {
		t.Error("the command is still there")
	}
	if got := state(t, c, sb.ID, 0, "running"); !got.ExpiresAt.Equal(sb.ExpiresAt) {
		t.Errorf("the command's limit moved the sandbox's end from %v to %v", sb.ExpiresAt, got.ExpiresAt)
	}
}

// C-016: a background job does not hold the command that started it.
func TestC016BackgroundJobHoldsNothing(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	sb := create(t, c, small())
	began := time.Now()
	if got := out(t, c, sb.ID, "sleep 121 & echo started"); got != "started\n" {
		t.Errorf("printed %q", got)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("the first took %v", took)
	}
	began = time.Now()
	if got := out(t, c, sb.ID, "echo next"); got != "next\n" || time.Since(began) > 2*time.Second {
		t.Errorf("the second printed %q after %v", got, time.Since(began))
	}
	if !running(t, c, sb.ID, "sleep 121") {
		t.Error("the job is gone")
	}
}

// C-017: the end of a command is the end of its children.
func TestC017TheWholeTreeEnds(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	sb := create(t, c, small())
	bystander := session(t, c, sb.ID, spaceapi.CreateSession{Stdin: true, Command: shell("read x; echo $x")})
	started(t, bystander)
	text := func(file string) string {
		return "(while :; do date >>" + file + "; sleep 0.1; done) & setsid sh -c 'while :; do date >>" + file + "; sleep 0.1; done' & wait"
	}
	still := func(file, how string) {
		t.Helper()
		size := func() string { return out(t, c, sb.ID, "stat -c %s "+file) }
		began := size()
		time.Sleep(400 * time.Millisecond) // four rounds of a survivor
		if now := size(); now != began || began == "0\n" {
			t.Errorf("after %s the file went from %s to %s", how, began, now)
		}
	}
	r := run(t, c, sb.ID, spaceapi.Command{Shell: text("~/a"), TimeoutSeconds: scaled(0.7, 3.0)})
	if r.Exit.Cause != "time_limit" {
		t.Errorf("exit %+v", r.Exit)
	}
	still("~/a", "the time limit")
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell(text("~/b"))})
	started(t, st)
	for run(t, c, sb.ID, shell("test -s ~/b")).Exit.Code != 0 {
		time.Sleep(20 * time.Millisecond)
	}
	_, err := c.KillSession(within(t, 10*time.Second), st.Session())
	ok(t, err)
	w, err := drain(within(t, 10*time.Second), st)
	ok(t, err)
	if w.Exit == nil || w.Exit.Code == 0 {
		t.Errorf("killed: %+v %+v", w.Exit, w.Ended)
	}
	still("~/b", "the kill")
	ok(t, bystander.Write(within(t, 10*time.Second), []byte("fine\n")))
	if w := exited(t, bystander, 0); w.Out.String() != "fine\n" {
		t.Errorf("the bystander printed %q", w.Out.String())
	}
}

// C-020: `exit` ends that shell, and nothing hangs on it.
func TestC020ExitEndsOneShell(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	sb := create(t, c, small())
	in := spaceapi.CreateSession{Stdin: true, Command: spaceapi.Command{Args: []string{"sh"}}}
	st := session(t, c, sb.ID, in)
	started(t, st)
	ok(t, st.Write(within(t, 10*time.Second), []byte("echo a; exit 3\n")))
	if w := exited(t, st, 3); w.Out.String() != "a\n" {
		t.Errorf("printed %q", w.Out.String())
	}
	began := time.Now()
	if err := st.Write(within(t, 10*time.Second), []byte("echo b\n")); err == nil || time.Since(began) > 2*time.Second {
		t.Errorf("input to an ended shell: %v after %v", err, time.Since(began))
	}
	fresh := session(t, c, sb.ID, in)
	started(t, fresh)
	ok(t, fresh.Write(within(t, 10*time.Second), []byte("echo b\n")))
	ok(t, fresh.CloseStdin(within(t, 10*time.Second)))
	if w := exited(t, fresh, 0); w.Out.String() != "b\n" {
		t.Errorf("a fresh shell printed %q", w.Out.String())
	}
}

// C-021: a command that ignores every request is ended, and hinders no other.
func TestC021StuckCommandEnds(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	sb := create(t, c, small())
	limit := scaled(1.0, 5.0)
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: spaceapi.Command{
		Shell: "trap '' TERM INT HUP; echo up; while :; do sleep 1001; done", TimeoutSeconds: limit,
	}})
	said(t, st, "up")
	began := time.Now()
	echo := func() {
		t.Helper()
		at := time.Now()
		if got := out(t, c, sb.ID, "echo ok"); got != "ok\n" || time.Since(at) > 2*time.Second {
			t.Errorf("echo printed %q after %v", got, time.Since(at))
		}
	}
	for range 5 {
		echo()
	}
	w, err := drain(within(t, 30*time.Second), st)
	ok(t, err)
	if took := time.Since(began).Seconds(); took > limit+5 || w.Exit == nil || w.Exit.Cause != "time_limit" {
		t.Errorf("ended after %.1f s with %+v %+v", took, w.Exit, w.Ended)
	}
	for range 5 {
		echo()
	}
	if running(t, c, sb.ID, "sleep 1001") {
		t.Error("its child is still there")
	}
}

// Commands that cannot start say so at once, and shell text that is missing ends
// as in every shell.
func TestC013EveryCommandEndsAtOnce(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	sb := create(t, c, small())
	if r := run(t, c, sb.ID, shell("no-such-program")); r.Exit.Code != 127 || r.Exit.Cause != "exited" {
		t.Errorf("shell: %+v", r.Exit)
	}
	for _, cmd := range []spaceapi.Command{
		{Args: []string{"/no/such/program"}},
		{Args: []string{"true"}, Cwd: "/no/such/directory"},
		{Args: []string{"true"}, User: "nosuchuser"},
	} {
		began := time.Now()
		r, err := c.Exec(within(t, 20*time.Second), sb.ID, spaceapi.Exec{Command: cmd})
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%+v took %v", cmd, took)
		}
		if err == nil && r.Exit.Cause != "start_failed" {
			t.Errorf("%+v ended with %+v", cmd, r.Exit)
		}
		if text := fmt.Sprint(err, r.Exit.Reason); strings.Contains(text, "internal") {
			t.Errorf("%+v: %s", cmd, text)
		}
	}
}

// C-030, commands: what is larger than a kernel's own bound works, or is refused
// as the caller's mistake at once. (Files of any size are step 2.)
func TestC030LargeCommands(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	sb := create(t, c, small())
	big := strings.Repeat("0123456789", 20_000) // 200 kB
	for what, cmd := range map[string]spaceapi.Command{
		"text":        {Shell: "echo fine; : " + big},
		"environment": {Shell: "echo fine", Env: map[string]string{"BIG": big}},
		"argument":    {Args: []string{"echo", "fine", big}},
		"arguments":   {Args: append([]string{"echo", "fine"}, strings.Fields(strings.Repeat("x ", 4000))...)},
	} {
		began := time.Now()
		r, err := c.Exec(within(t, 20*time.Second), sb.ID, spaceapi.Exec{Command: cmd})
		switch {
		case time.Since(began) > 5*time.Second:
			t.Errorf("%s took %v", what, time.Since(began))
		case err == nil && r.Exit.Code == 0 && strings.HasPrefix(output(r.Stdout), "fine"):
			t.Logf("%s works", what)
		case err == nil && r.Exit.Cause == "start_failed" && strings.Contains(r.Exit.Reason, "args_too_long"):
			t.Logf("%s: %s", what, r.Exit.Reason)
		default:
			var e *client.Error
			if !errors.As(err, &e) || e.Status < 400 || e.Status >= 500 {
				t.Errorf("%s: %+v, %v", what, r.Exit, err)
			}
			t.Logf("%s: %v", what, err)
		}
	}
	out(t, c, sb.ID, "true")
}
