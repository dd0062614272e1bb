package guest

import (
	"bytes"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// marker is the variable by which every descendant of a session that keeps its
// environment is known, also after it left the process's session and lineage.
const marker = "SPACE_SESSION_ID"

const maxEnviron = 256 << 10

type task struct {
	pid, ppid, sid int
	zombie         bool
}

// tasks lists the processes that /proc shows, without the daemon.
func tasks() []task {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer func() { _ = dir.Close() }()
	names, _ := dir.Readdirnames(-1)
	out := make([]task, 0, len(names))
	self := os.Getpid()
	buf := make([]byte, 1024)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == self || pid == 1 {
			continue
		}
		if t, ok := stat(pid, buf); ok {
			out = append(out, t)
		}
	}
	return out
}

func stat(pid int, buf []byte) (task, bool) {
	n := slurp("/proc/"+strconv.Itoa(pid)+"/stat", buf)
	return parseStat(pid, buf[:n])
}

// parseStat reads "pid (name) state ppid pgrp sid ..."; the name may hold anything.
func parseStat(pid int, b []byte) (task, bool) {
	_, rest, ok := cutLast(string(b), ") ")
	f := strings.Fields(rest)
	if !ok || len(f) < 4 {
		return task{}, false
	}
	ppid, err1 := strconv.Atoi(f[1])
	sid, err2 := strconv.Atoi(f[3])
	return task{pid: pid, ppid: ppid, sid: sid, zombie: f[0] == "Z" || f[0] == "X"}, err1 == nil && err2 == nil
}

func cutLast(s, sep string) (string, string, bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

func slurp(path string, buf []byte) int {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	n, _ := io.ReadFull(f, buf)
	return n
}

// marked gives the session id in a process's first environment; "" when there is none.
func marked(pid int, buf []byte) string {
	env := buf[:slurp("/proc/"+strconv.Itoa(pid)+"/environ", buf)]
	for len(env) > 0 {
		var kv []byte
		kv, env, _ = bytes.Cut(env, []byte{0})
		if v, ok := bytes.CutPrefix(kv, []byte(marker+"=")); ok {
			return string(v)
		}
	}
	return ""
}

// family finds the living processes of one session: the main process, its
// descendants by lineage, its kernel session, and whoever carries the marker.
// known are members found before: they keep their descendants in the family
// after they died.
type family struct {
	id    string
	main  int
	ended bool // main is reaped: its number may belong to someone else
	known map[int]bool
}

func (f *family) scan() []int {
	all := tasks()
	member := map[int]bool{}
	if !f.ended {
		member[f.main] = true
	}
	buf := make([]byte, maxEnviron)
	marks := map[int]string{}
	for _, t := range all {
		marks[t.pid] = marked(t.pid, buf)
	}
	for grown := true; grown; {
		grown = false
		for _, t := range all {
			if member[t.pid] {
				continue
			}
			ours := marks[t.pid] == f.id || member[t.ppid] || f.known[t.ppid] || t.sid == f.main
			// Once main's number is free, only a process without a mark of another
			// session is taken for ours by number.
			if ours && f.ended && marks[t.pid] != "" && marks[t.pid] != f.id {
				ours = false
			}
			if ours {
				member[t.pid] = true
				grown = true
			}
		}
	}
	var out []int
	for _, t := range all {
		if member[t.pid] && !t.zombie {
			out = append(out, t.pid)
		}
	}
	return out
}

// signal sends sig to every member, and once more to those that were born
// meanwhile.
func (f *family) signal(sig syscall.Signal) {
	sent := map[int]bool{}
	for range 3 {
		fresh := false
		for _, pid := range f.scan() {
			if !sent[pid] {
				sent[pid], fresh = true, true
				_ = syscall.Kill(pid, sig)
				if sig == unix.SIGTERM || sig == unix.SIGHUP {
					_ = syscall.Kill(pid, unix.SIGCONT) // a stopped process would not see it
				}
			}
		}
		if !fresh {
			return
		}
	}
}

// kill ends every member. All are stopped first, until a scan finds no new one,
// so that nothing forks away between being seen and being killed. It gives up
// after within, and reports whether nothing is left.
func (f *family) kill(within time.Duration) bool {
	f.known = map[int]bool{}
	until := time.Now().Add(within)
	for time.Now().Before(until) {
		fresh := false
		for _, pid := range f.scan() {
			if !f.known[pid] {
				f.known[pid], fresh = true, true
				_ = syscall.Kill(pid, unix.SIGSTOP)
			}
		}
		if !fresh {
			break
		}
	}
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		left := f.scan()
		for _, pid := range left {
			_ = syscall.Kill(pid, unix.SIGKILL)
		}
		if len(left) == 0 {
			return true
		}
		if time.Now().After(until) {
			return false
		}
		time.Sleep(pause) // the kernel tells nobody when someone else's child is gone
	}
}
