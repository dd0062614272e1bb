// Package cgroup finds, measures, empties and removes the control groups of
// machines, in version 1 and version 2 hierarchies. The runtime binary makes
// them and sets their limits.
package cgroup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultRoot is where hosts mount their control groups.
const DefaultRoot = "/sys/fs/cgroup"

// Tree is a group that is the parent of one group per machine.
type Tree struct {
	v2     bool
	parent string
	// dirs are the parent's directories, one per hierarchy.
	dirs map[string]string
}

// Open finds the hierarchies mounted under root (DefaultRoot) and makes the
// group parent in them. parent is one path element.
func Open(root, parent string) (*Tree, error) {
	if parent == "" || strings.ContainsAny(parent, "/ \n") || strings.HasPrefix(parent, ".") {
		return nil, fmt.Errorf("cgroup: bad parent name %q", parent)
	}
	t := &Tree{parent: parent, dirs: map[string]string{}}
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		t.v2 = true
		t.dirs[""] = filepath.Join(root, parent)
		if err := enable(root, t.dirs[""]); err != nil {
			return nil, err
		}
		return t, nil
	}
	names, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	for _, n := range names {
		dir := filepath.Join(root, n.Name())
		if unix.Statfs(dir, &st) != nil || st.Type != unix.CGROUP_SUPER_MAGIC {
			continue // the empty version 2 mount of a hybrid host, or a file
		}
		t.dirs[n.Name()] = filepath.Join(dir, parent)
	}
	if t.dirs["memory"] == "" || t.dirs["pids"] == "" || t.dirs["cpu"] == "" {
		return nil, fmt.Errorf("cgroup: the host has no memory, cpu or pids controller")
	}
	for name, dir := range t.dirs {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
		if name == "cpuset" {
			if err := inheritCPUSet(dir); err != nil {
				return nil, err
			}
		}
	}
	return t, nil
}

// enable makes the parent of a version 2 hierarchy and hands it the controllers.
func enable(root, dir string) error {
	const controllers = "+cpu +memory +pids +io +cpuset"
	set := func(d string) {
		for c := range strings.FieldsSeq(controllers) {
			_ = os.WriteFile(filepath.Join(d, "cgroup.subtree_control"), []byte(c), 0) // checked below
		}
	}
	set(root)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("cgroup: %w", err)
	}
	set(dir)
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	for _, c := range []string{"cpu", "memory", "pids"} {
		if !strings.Contains(" "+strings.TrimSpace(string(b))+" ", " "+c+" ") {
			return fmt.Errorf("cgroup: the host does not hand out the %s controller", c)
		}
	}
	return nil
}

// inheritCPUSet fills the two files without which no process may enter.
func inheritCPUSet(dir string) error {
	for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
		own, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
		if len(bytes.TrimSpace(own)) > 0 {
			continue
		}
		up, err := os.ReadFile(filepath.Join(filepath.Dir(dir), f))
		if err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
		if err := os.WriteFile(filepath.Join(dir, f), bytes.TrimSpace(up), 0); err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
	}
	return nil
}

// V2 reports whether the host uses the unified hierarchy.
func (t *Tree) V2() bool { return t.v2 }

// Path is the group of name as an OCI document names it.
func (t *Tree) Path(name string) string { return "/" + t.parent + "/" + name }

// SwapLimit reports whether a limit of memory and swap together can be set.
func (t *Tree) SwapLimit() bool {
	if t.v2 {
		return true
	}
	_, err := os.Stat(filepath.Join(t.dirs["memory"], "memory.memsw.limit_in_bytes"))
	return err == nil
}

// Names lists the groups under the parent, over all hierarchies.
func (t *Tree) Names() ([]string, error) {
	seen := map[string]bool{}
	var out []string
	for _, dir := range t.dirs {
		entries, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("cgroup: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() && !seen[e.Name()] {
				seen[e.Name()] = true
				out = append(out, e.Name())
			}
		}
	}
	return out, nil
}

// Procs lists the processes of name in any hierarchy.
func (t *Tree) Procs(name string) []int {
	seen := map[int]bool{}
	var out []int
	for _, dir := range t.dirs {
		_ = filepath.WalkDir(filepath.Join(dir, name), func(p string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil // gone meanwhile
			}
			b, _ := os.ReadFile(filepath.Join(p, "cgroup.procs"))
			for f := range strings.FieldsSeq(string(b)) {
				if pid, err := strconv.Atoi(f); err == nil && pid > 1 && !seen[pid] {
					seen[pid] = true
					out = append(out, pid)
				}
			}
			return nil
		})
	}
	return out
}

// Kill kills every process in name until there is none, or ctx ends.
func (t *Tree) Kill(ctx context.Context, name string) error {
	for wait := 200 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		if t.v2 {
			_ = os.WriteFile(filepath.Join(t.dirs[""], name, "cgroup.kill"), []byte("1"), 0)
		}
		pids := t.Procs(name)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL) // ESRCH: it is gone, what we want
		}
		if err := pause(ctx, wait); err != nil {
			return fmt.Errorf("cgroup: %d processes of %s do not end: %w", len(pids), name, err)
		}
	}
}

// Remove removes name from every hierarchy, waiting for ending processes until
// ctx ends. Nil when there is none.
func (t *Tree) Remove(ctx context.Context, name string) error {
	if name == "" || strings.Contains(name, "/") {
		return fmt.Errorf("cgroup: bad name %q", name)
	}
	for _, dir := range t.dirs {
		if err := remove(ctx, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// Close removes the parent when it is empty.
func (t *Tree) Close(ctx context.Context) error {
	for _, dir := range t.dirs {
		if err := remove(ctx, dir); err != nil {
			return err
		}
	}
	return nil
}

func remove(ctx context.Context, dir string) error {
	for wait := 200 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		err := unix.Rmdir(dir)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			return nil
		case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY):
			entries, _ := os.ReadDir(dir)
			for _, e := range entries {
				if e.IsDir() {
					if err := remove(ctx, filepath.Join(dir, e.Name())); err != nil {
						return err
					}
				}
			}
		default:
			return fmt.Errorf("cgroup: %w", err)
		}
		if perr := pause(ctx, wait); perr != nil {
			return fmt.Errorf("cgroup: remove %s: %w", filepath.Base(dir), err)
		}
	}
}

// pause waits for the kernel; it is no part of anybody's logic of time.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// Stats are the counters of one group; zero means not known.
type Stats struct {
	CPUNanos    uint64
	MemoryBytes uint64
	MemoryPeak  uint64
	Processes   uint64
	// OOMKills counts processes that the kernel killed for the memory limit.
	OOMKills uint64
	// PIDsDenied counts forks that the limit of processes refused.
	PIDsDenied uint64
}

// Stats reads the counters of name. Missing files leave zeros.
func (t *Tree) Stats(name string) Stats {
	if t.v2 {
		dir := filepath.Join(t.dirs[""], name)
		return Stats{
			CPUNanos:    1000 * key(filepath.Join(dir, "cpu.stat"), "usage_usec"),
			MemoryBytes: number(filepath.Join(dir, "memory.current")),
			MemoryPeak:  number(filepath.Join(dir, "memory.peak")),
			Processes:   number(filepath.Join(dir, "pids.current")),
			OOMKills:    t.OOMKills(name),
			PIDsDenied:  key(filepath.Join(dir, "pids.events"), "max"),
		}
	}
	at := func(controller, file string) string {
		if t.dirs[controller] == "" {
			return ""
		}
		return filepath.Join(t.dirs[controller], name, file)
	}
	return Stats{
		CPUNanos:    number(at("cpuacct", "cpuacct.usage")),
		MemoryBytes: number(at("memory", "memory.usage_in_bytes")),
		MemoryPeak:  number(at("memory", "memory.max_usage_in_bytes")),
		Processes:   number(at("pids", "pids.current")),
		OOMKills:    t.OOMKills(name),
		PIDsDenied:  key(at("pids", "pids.events"), "max"),
	}
}

// OOMKills reads only that counter.
func (t *Tree) OOMKills(name string) uint64 {
	if t.v2 {
		return key(filepath.Join(t.dirs[""], name, "memory.events"), "oom_kill")
	}
	return key(filepath.Join(t.dirs["memory"], name, "memory.oom_control"), "oom_kill")
}

func number(file string) uint64 {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	return n
}

func key(file, name string) uint64 {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0
	}
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		if v, ok := strings.CutPrefix(sc.Text(), name+" "); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(v), 10, 64)
			return n
		}
	}
	return 0
}
