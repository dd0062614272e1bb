// Package privilege starts the unprivileged side and proves that it is.
package privilege

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// User is the name of the unprivileged user.
const User = "space"

// Lookup gives the uid and gid of User.
func Lookup() (uid, gid int, err error) {
	u, err := user.Lookup(User)
	if err != nil {
		return 0, 0, fmt.Errorf("privilege: user %q does not exist: run `space doctor` or scripts/setup.sh: %w", User, err)
	}
	if uid, err = strconv.Atoi(u.Uid); err != nil {
		return 0, 0, err
	}
	if gid, err = strconv.Atoi(u.Gid); err != nil {
		return 0, 0, err
	}
	if uid == 0 || gid == 0 {
		return 0, 0, fmt.Errorf("privilege: user %q is root", User)
	}
	return uid, gid, nil
}

// Start starts cmd as uid and gid with no supplementary groups, no capability
// in any set, no_new_privs, its own process group and a clean environment (the
// caller sets cmd.Env; nil becomes empty, never ours).
//
// no_new_privs and the bounding set belong to a thread and are inherited over
// fork, so they are set on a thread that forks and is then thrown away.
func Start(cmd *exec.Cmd, uid, gid int) error {
	if cmd.Env == nil {
		cmd.Env = []string{}
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), Groups: []uint32{}}
	done := make(chan error, 1)
	go onThrowAwayThread(func() { done <- startLocked(cmd) })
	return <-done
}

// onThrowAwayThread runs f on a thread that ends with the calling goroutine.
// The main thread never ends, and /proc/self speaks of it, so it is held back
// while another goroutine is given another thread.
func onThrowAwayThread(f func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		f()
		return // locked on purpose
	}
	done := make(chan struct{})
	go func() { defer close(done); onThrowAwayThread(f) }()
	<-done
	runtime.UnlockOSThread()
}

func startLocked(cmd *exec.Cmd) error {
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("privilege: drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("privilege: no_new_privs: %w", err)
	}
	return cmd.Start()
}

// Status is what /proc says of a process's privileges.
type Status struct {
	UIDs       [4]int // real, effective, saved, fs
	CapEff     uint64
	CapPrm     uint64
	CapBnd     uint64
	NoNewPrivs bool
}

// Of reads the privileges of pid (0 means this process).
func Of(pid int) (Status, error) {
	p := "self"
	if pid != 0 {
		p = strconv.Itoa(pid)
	}
	f, err := os.Open("/proc/" + p + "/status")
	if err != nil {
		return Status{}, err
	}
	defer f.Close()
	var s Status
	for sc := bufio.NewScanner(f); sc.Scan(); {
		k, v, _ := strings.Cut(sc.Text(), ":")
		v = strings.TrimSpace(v)
		switch k {
		case "Uid":
			_, err = fmt.Sscan(v, &s.UIDs[0], &s.UIDs[1], &s.UIDs[2], &s.UIDs[3])
		case "CapEff":
			s.CapEff, err = strconv.ParseUint(v, 16, 64)
		case "CapPrm":
			s.CapPrm, err = strconv.ParseUint(v, 16, 64)
		case "CapBnd":
			s.CapBnd, err = strconv.ParseUint(v, 16, 64)
		case "NoNewPrivs":
			s.NoNewPrivs = v == "1"
		}
		if err != nil {
			return Status{}, fmt.Errorf("privilege: %s: %w", k, err)
		}
	}
	return s, nil
}

// Dropped returns nil when s is what the unprivileged side must be.
func (s Status) Dropped() error {
	for _, u := range s.UIDs {
		if u == 0 {
			return fmt.Errorf("privilege: uids %v contain root", s.UIDs)
		}
	}
	if s.CapEff != 0 || s.CapPrm != 0 || s.CapBnd != 0 {
		return fmt.Errorf("privilege: capabilities eff=%x prm=%x bnd=%x, want none", s.CapEff, s.CapPrm, s.CapBnd)
	}
	if !s.NoNewPrivs {
		return errors.New("privilege: no_new_privs is not set")
	}
	return nil
}
