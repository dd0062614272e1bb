package cgroup

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Both kinds of hierarchies give the same numbers.
func TestStats(t *testing.T) {
	want := Stats{CPUNanos: 5_000_000, MemoryBytes: 100, MemoryPeak: 200, Processes: 7, OOMKills: 2, PIDsDenied: 3}
	root := t.TempDir()
	v1 := &Tree{parent: "p", dirs: map[string]string{}}
	for _, c := range []string{"cpuacct", "memory", "pids"} {
		v1.dirs[c] = filepath.Join(root, c, "p")
	}
	write(t, filepath.Join(v1.dirs["cpuacct"], "m"), map[string]string{"cpuacct.usage": "5000000\n"})
	write(t, filepath.Join(v1.dirs["memory"], "m"), map[string]string{
		"memory.usage_in_bytes": "100\n", "memory.max_usage_in_bytes": "200\n",
		"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
	})
	write(t, filepath.Join(v1.dirs["pids"], "m"), map[string]string{"pids.current": "7\n", "pids.events": "max 3\n"})
	if got := v1.Stats("m"); got != want {
		t.Errorf("version 1: %+v", got)
	}
	v2 := &Tree{v2: true, parent: "p", dirs: map[string]string{"": filepath.Join(root, "p")}}
	write(t, filepath.Join(root, "p", "m"), map[string]string{
		"cpu.stat": "usage_usec 5000\nuser_usec 1\n", "memory.current": "100\n", "memory.peak": "200\n", "pids.current": "7\n",
		"memory.events": "low 0\noom 5\noom_kill 2\noom_group_kill 1\n", "pids.events": "max 3\n",
	})
	if got := v2.Stats("m"); got != want {
		t.Errorf("version 2: %+v", got)
	}
	if got := v2.Stats("nobody"); got != (Stats{}) {
		t.Errorf("a group that is not there: %+v", got)
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, parent := range []string{"", ".", "..", "a/b", "a b"} {
		if _, err := Open(DefaultRoot, parent); err == nil {
			t.Errorf("parent %q is accepted", parent)
		}
	}
	if _, err := Open(t.TempDir(), "p"); err == nil {
		t.Error("a directory without hierarchies is accepted")
	}
}

// trees gives a real tree of each kind that this host has.
func trees(t *testing.T) map[string]*Tree {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes control groups")
	}
	name := "space-test-" + strconv.Itoa(os.Getpid())
	host, err := Open(DefaultRoot, name)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*Tree{"host": host}
	var st unix.Statfs_t
	const hybrid = DefaultRoot + "/unified"
	if unix.Statfs(hybrid, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
		dir := filepath.Join(hybrid, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		out["version 2"] = &Tree{v2: true, parent: name, dirs: map[string]string{"": dir}}
	}
	t.Cleanup(func() {
		for kind, tree := range out {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			if err := tree.Close(ctx); err != nil {
				t.Errorf("%s: %v", kind, err)
			}
			cancel()
		}
	})
	return out
}

// Everything in a group dies, what it started too, and the group goes.
func TestKillAndRemove(t *testing.T) {
	for kind, tree := range trees(t) {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		for _, dir := range tree.dirs {
			if err := os.MkdirAll(filepath.Join(dir, "m", "inner"), 0o755); err != nil {
				t.Fatal(err)
			}
			if filepath.Base(filepath.Dir(dir)) == "cpuset" {
				for _, d := range []string{filepath.Join(dir, "m"), filepath.Join(dir, "m", "inner")} {
					if err := inheritCPUSet(d); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		cmd := exec.Command("sh", "-c", "read x; for i in 1 2 3 4 5; do setsid sleep 1000 & done; wait")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for _, dir := range tree.dirs {
			if err := os.WriteFile(filepath.Join(dir, "m", "inner", "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
				t.Fatal(err)
			}
		}
		in.Write([]byte("go\n"))
		for len(tree.Procs("m")) < 6 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		if names, err := tree.Names(); err != nil || !slices.Equal(names, []string{"m"}) {
			t.Errorf("%s: names %q %v", kind, names, err)
		}
		if err := tree.Kill(ctx, "m"); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		if err := cmd.Wait(); err == nil {
			t.Errorf("%s: the process ended by itself", kind)
		}
		if procs := tree.Procs("m"); len(procs) != 0 {
			t.Errorf("%s: left %v", kind, procs)
		}
		for range 2 { // twice: nothing there is fine
			if err := tree.Remove(ctx, "m"); err != nil {
				t.Fatalf("%s: %v", kind, err)
			}
		}
		for _, dir := range tree.dirs {
			if _, err := os.Stat(filepath.Join(dir, "m")); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: %s is left", kind, dir)
			}
		}
		if err := tree.Remove(ctx, ""); err == nil {
			t.Errorf("%s: no name removes everything", kind)
		}
	}
}
