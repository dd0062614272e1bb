package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// memoryPeriod is how often the counters of running machines are looked at: a
// machine that broke its limit is ended within it.
const memoryPeriod = 500 * time.Millisecond

// watch observes one sandbox process.
type watch struct {
	pid   int
	ticks uint64
	fd    *os.File
	done  chan struct{} // closed when the process has ended and its exit is known, or by forget

	mu       sync.Mutex
	exit     *runtime.Exit // guarded by mu
	expected *runtime.Exit // guarded by mu: the cause that ended it, when that was us
	over     bool          // guarded by mu: done is closed
}

// expect states why the process is about to end; the first statement stays.
func (w *watch) expect(e runtime.Exit) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.expected == nil {
		w.expected = &e
	}
}

func (w *watch) expectation() *runtime.Exit {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.expected
}

// result is the exit once done is closed; not ok after forget.
func (w *watch) result() (runtime.Exit, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.exit == nil {
		return runtime.Exit{}, false
	}
	return *w.exit, true
}

func (w *watch) finish(e *runtime.Exit) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		w.over, w.exit = true, e
		close(w.done)
	}
}

// forget ends the watching of a process that goes on.
func (w *watch) forget() { w.finish(nil); w.close() }
func (w *watch) close()  { _ = w.fd.Close() }

// watchPID opens a process; ticks of 0 means there is none.
func watchPID(pid int) (*watch, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("gvisor: watch: %w", err)
	}
	// Non-blocking, so that the poller of the Go runtime waits for it and no
	// thread does. The descriptor was opened before the start time is read: if
	// that fits, it is this process's for ever.
	return &watch{pid: pid, ticks: ticks(pid), fd: os.NewFile(uintptr(fd), "pidfd"), done: make(chan struct{})}, nil
}

// openWatch opens the sandbox process that runsc run made.
func (r *Runtime) openWatch(id sandbox.ID) (*watch, error) {
	pid, err := r.readPID(id)
	if err != nil {
		return nil, err
	}
	return watchPID(pid)
}

// begin lets w observe the machine from now on.
func (r *Runtime) begin(id sandbox.ID, w *watch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entries[id]
	if e == nil || r.closed {
		w.forget()
		return
	}
	e.watch = w
	r.wg.Add(1)
	go func() {
		defer r.wg.Done()
		r.observe(id, w)
	}()
}

// observe waits for the end of the process and records it.
func (r *Runtime) observe(id sandbox.ID, w *watch) {
	defer w.close()
	if err := w.wait(); err != nil {
		return // forgotten
	}
	exit := w.expectation()
	if exit == nil {
		e := r.cause(id, w)
		exit = &e
	}
	r.mu.Lock()
	if e := r.entries[id]; e != nil && e.watch == w && e.rec.Boot != nil {
		e.rec = e.rec.clone()
		e.rec.Exit = exit
	}
	r.mu.Unlock()
	w.finish(exit)

	// Make it durable, and end what the sandbox process left.
	unlock, err := r.lock(r.life, id)
	if err != nil {
		return
	}
	defer unlock()
	r.mu.Lock()
	e := r.entries[id]
	ours := e != nil && e.watch == w
	var rec record
	if ours {
		rec = e.rec.clone()
	}
	r.mu.Unlock()
	if !ours || rec.Exit == nil || rec.Removing {
		return
	}
	kctx, kcancel := context.WithTimeout(r.life, patience)
	defer kcancel()
	if err := r.groups.Kill(kctx, string(id)); err != nil && r.life.Err() == nil {
		r.conf.Logf("gvisor: after the end of %s: %v", id, err)
	}
	if err := r.paths.save(rec); err != nil {
		r.conf.Logf("gvisor: end of %s: %v", id, err)
	}
}

// wait blocks until the process has ended. An error means w was forgotten.
func (w *watch) wait() error {
	rc, err := w.fd.SyscallConn()
	if err != nil {
		return err
	}
	var perr error
	err = rc.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		var n int
		for {
			n, perr = unix.Poll(p, 0)
			if !errors.Is(perr, unix.EINTR) {
				break
			}
		}
		return perr != nil || n > 0
	})
	return errors.Join(err, perr)
}

// cause finds the best cause that the host can prove, in this order: the
// memory limit, the status the process ended with, the limit of processes, what
// it left.
func (r *Runtime) cause(id sandbox.ID, w *watch) runtime.Exit {
	s := r.groups.Stats(string(id))
	if s.OOMKills > 0 {
		return outOfMemory
	}
	status, known := w.status()
	left := r.evidence(id)
	switch {
	case known && status.Signaled() && status.Signal() == unix.SIGKILL:
		return runtime.Exit{Cause: runtime.CauseKilled, Detail: "the sandbox process got SIGKILL"}
	case known && status.Exited() && status.ExitStatus() == 0:
		return runtime.Exit{Cause: runtime.CausePoweroff}
	case s.PIDsDenied > 0 && left.Cause != runtime.CausePoweroff:
		return runtime.Exit{Cause: runtime.CauseProcesses, Detail: "the hard limit of host tasks was reached"}
	case left.Cause == runtime.CauseCrashed:
		return left
	case known && status.Signaled():
		return runtime.Exit{Cause: runtime.CauseCrashed, Detail: "the sandbox process got signal " + status.Signal().String()}
	case known:
		return runtime.Exit{Cause: runtime.CauseCrashed, Detail: fmt.Sprintf("PID 1 of the guest exited with %d", status.ExitStatus())}
	}
	return left
}

// evidence is what the files of a sandbox process tell about its end, for when
// its status is lost: it writes one when the guest ends in order, another when
// it panics, and nothing when it is killed.
func (r *Runtime) evidence(id sandbox.ID) runtime.Exit {
	size := func(path string) int64 {
		st, err := os.Lstat(path)
		if err != nil {
			return -1
		}
		return st.Size()
	}
	switch end := size(r.paths.endLog(id)); {
	case size(r.paths.panicLog(id)) > 0:
		return runtime.Exit{Cause: runtime.CauseCrashed, Detail: "the sandbox kernel panicked"}
	case end > 0:
		return runtime.Exit{Cause: runtime.CausePoweroff}
	case end == 0:
		return runtime.Exit{Cause: runtime.CauseKilled, Detail: "the sandbox process ended without a word"}
	}
	return runtime.Exit{Cause: runtime.CauseUnknown, Detail: "nothing tells how the sandbox process ended"}
}

var outOfMemory = runtime.Exit{Cause: runtime.CauseOutOfMemory, Detail: "the machine used more memory than its limit"}

// pidfdInfo is struct pidfd_info of the kernel, first version.
type pidfdInfo struct {
	Mask, CgroupID uint64
	_              [11]uint32
	ExitCode       int32
}

const (
	pidfdGetInfo  = 0xc0000000 | 64<<16 | 0xff<<8 | 11 // _IOWR(0xFF, 11, 64 bytes)
	pidfdInfoExit = 1 << 3
	reapTries     = 50
	reapWait      = 4 * time.Millisecond
)

// status asks the kernel how the process ended; it is not our child. Until
// its parent has collected it, /proc tells; after that the pidfd does, on kernels
// from 6.15 on. On older ones a quick parent leaves us without an answer.
func (w *watch) status() (unix.WaitStatus, bool) {
	rc, err := w.fd.SyscallConn()
	if err != nil {
		return 0, false
	}
	for range reapTries {
		if st, err := readStat(w.pid); err == nil && st.ended && (st.ticks == w.ticks || w.ticks == 0) {
			return unix.WaitStatus(st.exit), true
		}
		info := pidfdInfo{Mask: pidfdInfoExit}
		var errno unix.Errno
		if err := rc.Control(func(fd uintptr) {
			_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, pidfdGetInfo, uintptr(unsafe.Pointer(&info)))
		}); err != nil {
			return 0, false
		}
		if errno == 0 && info.Mask&pidfdInfoExit != 0 {
			return unix.WaitStatus(info.ExitCode), true
		}
		if errno != 0 && errno != unix.ESRCH {
			return 0, false
		}
		time.Sleep(reapWait) // for the kernel, not for logic
	}
	return 0, false
}

// watchMemory ends machines that broke their limit of memory. The kernel may
// have killed only a part of such a machine; what is left is not to be trusted to work.
func (r *Runtime) watchMemory() {
	defer r.wg.Done()
	for {
		select {
		case <-r.life.Done():
			return
		case <-r.conf.Clock.After(memoryPeriod):
		}
		running := map[sandbox.ID]*watch{}
		r.mu.Lock()
		for id, e := range r.entries {
			if e.watch != nil && e.rec.Exit == nil {
				running[id] = e.watch
			}
		}
		r.mu.Unlock()
		for id, w := range running {
			if r.groups.OOMKills(string(id)) == 0 {
				continue
			}
			w.expect(outOfMemory)
			w.kill()
		}
	}
}

// kill ends the sandbox process, and with it the machine.
func (w *watch) kill() {
	rc, err := w.fd.SyscallConn()
	if err != nil {
		return
	}
	_ = rc.Control(func(fd uintptr) { _ = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
}

// readopt takes up a machine that an earlier process of ours started.
func (r *Runtime) readopt(id sandbox.ID, rec record) {
	ended := func(e runtime.Exit) {
		rec = rec.clone()
		rec.Exit = &e
		if err := r.put(rec); err != nil {
			r.conf.Logf("gvisor: adopt %s: %v", id, err)
		}
	}
	if rec.Boot.Host != r.hostID {
		ended(runtime.Exit{Cause: runtime.CauseReboot})
		return
	}
	w, err := watchPID(rec.Boot.PID)
	if err != nil || w.ticks == 0 || w.ticks != rec.Boot.Ticks {
		if err == nil {
			w.close()
		}
		e := r.evidence(id)
		if s := r.groups.Stats(string(id)); s.OOMKills > 0 {
			e = outOfMemory
		} else if s.PIDsDenied > 0 && e.Cause != runtime.CausePoweroff {
			e = runtime.Exit{Cause: runtime.CauseProcesses, Detail: "the hard limit of host tasks was reached"}
		}
		ended(e)
		return
	}
	// We may have been killed between pausing and recording it.
	if st, err := r.state(context.Background(), id); err != nil {
		r.conf.Logf("gvisor: adopt %s: %v", id, err)
	} else if paused := st == "paused"; paused != rec.Boot.Paused && (paused || st == "running") {
		rec = rec.clone()
		rec.Boot.Paused = paused
		if err := r.put(rec); err != nil {
			r.conf.Logf("gvisor: adopt %s: %v", id, err)
		}
	}
	r.begin(id, w)
}

// putAlive saves a record unless the boot's end was recorded meanwhile.
func (r *Runtime) putAlive(rec record) error {
	if err := r.paths.save(rec); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.entries[rec.Spec.ID]; e != nil {
		exit := e.rec.Exit
		e.rec = rec.clone()
		if exit != nil {
			e.rec.Exit = exit // observe saves it when it gets the lock
		}
	}
	return nil
}
