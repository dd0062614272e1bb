package e2e

import (
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
)

// C-082: a fork storm meets a limit; the daemon and the neighbours do not notice.
func TestC082ForkStorms(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	in := small()
	in.Resources = spaceapi.Resources{CPUs: 1, MemoryMiB: 1024, DiskMiB: 128, MaxProcesses: 100}
	sb, neighbour := create(t, c, in), create(t, c, small())
	// gVisor shows a quota's number of CPUs, but never less than two.
	if got := number(t, out(t, c, sb.ID, "grep -c ^processor /proc/cpuinfo")); got > 2 {
		t.Errorf("the guest sees %d CPUs", got)
	}
	quick := func(id, who string) {
		t.Helper()
		began := time.Now()
		r := run(t, c, id, spaceapi.Command{Shell: "echo here", User: who})
		if took := time.Since(began); output(r.Stdout) != "here\n" || took > scaled(10*time.Second, 5*time.Second) {
			t.Errorf("echo as %q: %+v %q after %v", who, r.Exit, output(r.Stdout), took)
		}
	}
	bomb := session(t, c, sb.ID, spaceapi.CreateSession{Overflow: "drop", Command: shell("f() { f | f & }; f; sleep 60")})
	started(t, bomb)
	for end := time.Now().Add(scaled(2*time.Second, 15*time.Second)); time.Now().Before(end); {
		quick(neighbour.ID, "")
		quick(sb.ID, "root")
	}
	if got := state(t, c, sb.ID, 0, "running"); got.Problem != nil {
		t.Errorf("problem %+v", got.Problem)
	}
	_, err := c.KillSession(within(t, 20*time.Second), bomb.Session())
	ok(t, err)
	_, err = drain(within(t, 30*time.Second), bomb)
	ok(t, err)
	quick(sb.ID, "") // there is room again

	// More memory than there is, by many: the machine goes on, or it fails and says
	// why in time.
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: shell("for i in $(seq 64); do head -c 50000000 /dev/zero | tail -c 50000000 | sleep 20 & done; wait")})
	started(t, st)
	quick(neighbour.ID, "")
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		got, err := c.Sandbox(within(t, 10*time.Second), sb.ID)
		ok(t, err)
		if got.State == "failed" {
			if got.Problem == nil || got.Problem.Code != "out_of_memory" {
				t.Errorf("failed with %+v", got.Problem)
			}
			return
		}
	}
	quick(sb.ID, "root")
}

// C-083: a machine that ends for its memory says so, on the stream and in get.
func TestC083MemoryKillsAreNamed(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	in := small()
	in.Template = "base:latest"
	sb := create(t, c, in)
	out(t, c, sb.ID, "echo kept >~/marker; sync")
	began := time.Now()
	st := session(t, c, sb.ID, spaceapi.CreateSession{Command: spaceapi.Command{Args: []string{"python3", "-c", "x = bytearray(b'x') * (900 << 20); print(len(x))"}}})
	w, err := drain(within(t, 30*time.Second), st)
	ok(t, err)
	told := w.Exit
	if w.Ended != nil {
		told = &w.Ended.Exit
	}
	if told == nil || told.Cause != "out_of_memory" && !strings.Contains(told.Reason, "memory") {
		t.Errorf("the command ended with %+v %+v", w.Exit, w.Ended)
	}
	got := state(t, c, sb.ID, 5*time.Second, "failed")
	if got.Problem == nil || got.Problem.Code != "out_of_memory" {
		t.Errorf("problem %+v", got.Problem)
	}
	if got.UpdatedAt.Before(began.Add(-time.Second)) || got.UpdatedAt.After(time.Now().Add(time.Second)) {
		t.Errorf("known since %v", got.UpdatedAt)
	}
	verb(t, c, sb.ID, "start")
	if got := out(t, c, sb.ID, "cat ~/marker"); got != "kept\n" {
		t.Errorf("the file holds %q", got)
	}
}

// C-084: endless output fills no disk of ours, and a full disk of its own leaves a
// sandbox usable.
func TestC084FullDisks(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	sb := create(t, c, small())
	st := session(t, c, sb.ID, spaceapi.CreateSession{Overflow: "drop", Command: shell("yes 0123456789012345678901234567890123456789")})
	started(t, st)
	st.Close()
	time.Sleep(scaled(3*time.Second, 10*time.Minute)) // the time is the test
	_, err := c.KillSession(within(t, 20*time.Second), st.Session())
	ok(t, err)
	var kept int64
	_ = filepath.WalkDir(filepath.Join(s.Layout.Journals(), sb.ID, st.Session()), func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if fi, err := d.Info(); err == nil {
				kept += fi.Size()
			}
		}
		return nil
	})
	if kept == 0 || kept > 80<<20 {
		t.Errorf("the journal takes %d bytes", kept)
	}

	r := run(t, c, sb.ID, shell("dd if=/dev/zero of=$HOME/full bs=65536"))
	if r.Exit.Code == 0 || !strings.Contains(strings.ToLower(output(r.Stderr)), "no space") {
		t.Errorf("filling ended with %+v %q", r.Exit, output(r.Stderr))
	}
	if got := out(t, c, sb.ID, "echo still here; ls ~ | head -1"); !strings.HasPrefix(got, "still here\n") {
		t.Errorf("printed %q", got)
	}
	verb(t, c, sb.ID, "pause")
	verb(t, c, sb.ID, "resume")
	out(t, c, sb.ID, "test -s ~/full && rm ~/full && echo again >~/small && grep -q again ~/small")
	if next := create(t, c, small()); out(t, c, next.ID, "ls ~/full 2>/dev/null || echo clean") != "clean\n" {
		t.Error("the next sandbox has its neighbour's file")
	}
	verb(t, c, sb.ID, "stop")
	verb(t, c, sb.ID, "start")
	out(t, c, sb.ID, "grep -q again ~/small")
}
