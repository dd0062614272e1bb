package guest

import (
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper owns every child of the daemon: those it started and, as PID 1 or
// subreaper, orphans. Nothing else in the program may wait for a child.
type reaper struct {
	// mu is held for reading from fork until the pid is registered, and for
	// writing around each wait4, so that a pid can neither be reaped before it is
	// known nor be reused between wait4 and the lookup.
	mu       sync.RWMutex
	lock     sync.Mutex // guards children among starters
	children map[int]func(syscall.WaitStatus, syscall.Rusage)
}

func newReaper() *reaper {
	return &reaper{children: map[int]func(syscall.WaitStatus, syscall.Rusage){}}
}

// run reaps until stop is closed.
func (r *reaper) run(stop <-chan struct{}) {
	if os.Getpid() != 1 {
		_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	}
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGCHLD)
	defer signal.Stop(c)
	for {
		r.sweep()
		select {
		case <-c:
		case <-stop:
			return
		}
	}
}

func (r *reaper) sweep() {
	for {
		var ws syscall.WaitStatus
		var ru syscall.Rusage
		r.mu.Lock()
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, &ru)
		if err == syscall.EINTR {
			r.mu.Unlock()
			continue
		}
		if err != nil || pid <= 0 {
			r.mu.Unlock()
			return
		}
		ended := r.children[pid]
		delete(r.children, pid)
		r.mu.Unlock()
		if ended != nil {
			ended(ws, ru)
		}
	}
}

// start runs fork and registers the pid that it gives; ended is called once,
// from the reaper's goroutine, and must not block.
func (r *reaper) start(fork func() (int, error), ended func(syscall.WaitStatus, syscall.Rusage)) (int, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	pid, err := fork()
	if err != nil {
		return 0, err
	}
	r.lock.Lock()
	r.children[pid] = ended
	r.lock.Unlock()
	return pid, nil
}

// alive calls f while pid is known to be our unreaped child, so that f can
// signal it without hitting a process that got its number later.
func (r *reaper) alive(pid int, f func() error) (bool, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	r.lock.Lock()
	_, ok := r.children[pid]
	r.lock.Unlock()
	if !ok {
		return false, nil
	}
	return true, f()
}
