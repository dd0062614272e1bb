package main

import (
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/privilege"
)

// The room ends the process that holds the lock of the unprivileged side. Which
// one that is, a file of user space says: it must not make root kill others.
func TestOnlyProcessesOfUserSpaceAreWatched(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: starts processes of other users")
	}
	const ours, others = 64321, 64322
	dir := t.TempDir()
	l := layout.Layout{Data: dir, Run: dir}
	if err := os.Mkdir(l.State(), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		uid     int
		watched bool
	}{{ours, true}, {others, false}, {0, false}} {
		cmd := exec.Command("/bin/sleep", "60")
		var err error
		if x.uid == 0 {
			err = cmd.Start()
		} else {
			err = privilege.Start(cmd, x.uid, x.uid)
		}
		if err != nil {
			t.Fatal(err)
		}
		pid := cmd.Process.Pid
		lock, err := layout.TakeLock(l.ServeLock())
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(l.ServeLock(), []byte(strconv.Itoa(pid)), 0o600); err != nil {
			t.Fatal(err)
		}
		ready := make(chan struct{}, 1)
		c := &child{l: l, uid: ours, gid: ours, log: slog.New(slog.DiscardHandler), ready: func() { ready <- struct{}{} }}
		done := make(chan error, 1)
		go func() { done <- c.watch(t.Context(), pid) }()
		select {
		case <-ready:
			if !x.watched {
				t.Errorf("a process of user %d is watched, and would be killed", x.uid)
			}
		case err := <-done:
			if x.watched || err == nil {
				t.Errorf("a process of user %d: %v", x.uid, err)
			}
			done <- err
		}
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("the process of user %d is gone: %v", x.uid, err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		<-done
		lock.Release()
	}
}
