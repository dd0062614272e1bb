package guest

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/api/guestapi"
)

const (
	defaultGrace = 2 * time.Second
	killWithin   = 5 * time.Second
	ttyDrain     = 1 << 20 // bytes still taken from a terminal after its process ended
)

// process is one started command.
type process struct {
	server  *Server
	id      string
	pid     int
	started time.Time
	ends    *ends
	out     *output
	sources []*source
	files   []*os.File // of sources

	reaped chan struct{} // closed by the reaper
	done   chan struct{} // closed when the exit is published

	stdin chan struct{} // semaphore of one: stdin calls go one after another

	mu          sync.Mutex
	stdinOffset uint64
	stdinClosed bool
	limited     bool // the time limit was reached while it ran
	ended       time.Time
}

func (s *Server) launch(r guestapi.Start) (*process, error) {
	c, err := s.resolve(r)
	if err != nil {
		return nil, err
	}
	e, err := openEnds(r, c.who)
	if err != nil {
		return nil, startFailure(guestapi.CodeStartFailed, "pipes or terminal: %s", reason(err))
	}
	p := &process{
		server: s, id: r.ID, ends: e,
		out:         newOutput(r.Window, r.Overflow == "drop"),
		reaped:      make(chan struct{}),
		done:        make(chan struct{}),
		stdin:       make(chan struct{}, 1),
		stdinClosed: e.stdin == nil,
	}
	for _, end := range []struct {
		f   *os.File
		typ guestapi.FrameType
	}{{e.stdout, guestapi.FrameStdout}, {e.stderr, guestapi.FrameStderr}} {
		if end.f != nil {
			p.sources = append(p.sources, &source{typ: end.typ, left: -1})
			p.files = append(p.files, end.f)
		}
	}
	p.started = time.Now()
	p.pid, err = s.reaper.start(
		func() (int, error) { return c.fork(e, r.PTY != nil) },
		func(ws syscall.WaitStatus, ru syscall.Rusage) {
			close(p.reaped)
			go p.finish(ws, ru)
		})
	if err != nil {
		e.closeAll()
		return nil, forkFailure(err, c.argv[0])
	}
	e.closeChild()
	for i := range p.sources {
		go p.pump(i)
	}
	if r.TimeLimit > 0 {
		grace := r.Grace
		if grace <= 0 {
			grace = defaultGrace
		}
		go p.enforce(r.TimeLimit, grace)
	}
	return p, nil
}

// pump moves output into the buffer until the last writer is gone. After the
// exit it goes on reading to nowhere, so that background jobs neither block nor
// die of a closed pipe.
func (p *process) pump(i int) {
	f, src := p.files[i], p.sources[i]
	defer func() { _ = f.Close() }()
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	for {
		var full bool
		var rerr error
		n := 0
		err := rc.Read(func(fd uintptr) bool {
			n, full, rerr = p.out.read(int(fd), src)
			return rerr != unix.EAGAIN
		})
		switch {
		case full:
			<-p.out.spaceWait(src.typ)
		case err != nil || n == 0:
			return
		}
	}
}

// finish runs once the main process is gone: first all that it wrote goes into
// the buffer, then the exit.
func (p *process) finish(ws syscall.WaitStatus, ru syscall.Rusage) {
	for i, src := range p.sources {
		p.drain(p.files[i], src)
	}
	e := guestapi.ExitStatus{
		Cause: guestapi.ExitExited, Code: ws.ExitStatus(),
		UserNanos: ru.Utime.Nano(), SystemNanos: ru.Stime.Nano(), MaxRSSBytes: ru.Maxrss << 10,
		At: time.Now(),
	}
	if ws.Signaled() {
		n := int(ws.Signal())
		e.Cause, e.Code, e.Signal = guestapi.ExitSignal, 128+n, guestapi.SignalName(n)
	}
	p.mu.Lock()
	if p.limited {
		e.Cause = guestapi.ExitTimeLimit
	}
	p.stdinClosed = true
	p.ended = e.At
	p.mu.Unlock()
	p.out.publish(e)
	close(p.done)
	switch {
	case p.ends.tty != nil:
		// The pump closes the outer side once the last inner side is closed.
		_ = p.ends.tty.Close()
		_ = p.ends.stdin.SetWriteDeadline(time.Unix(1, 0)) // a blocked stdin call ends
	case p.ends.stdin != nil:
		_ = p.ends.stdin.Close()
	}
}

// drain takes what the ended process can have written: as many bytes as the
// pipe holds now. A background job that goes on writing cannot hold up the exit.
func (p *process) drain(f *os.File, src *source) {
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = rc.Control(func(fd uintptr) {
		p.out.mu.Lock()
		defer p.out.mu.Unlock()
		src.left = ttyDrain
		if p.ends.tty == nil {
			if n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
				src.left = n
			}
		}
	})
	for {
		var full bool
		var rerr error
		finished := false
		err := rc.Control(func(fd uintptr) {
			p.out.mu.Lock()
			finished = src.left <= 0 || src.eof
			p.out.mu.Unlock()
			if !finished {
				_, full, rerr = p.out.read(int(fd), src)
			}
		})
		if err != nil || finished || rerr != nil {
			return
		}
		if full {
			<-p.out.spaceWait(src.typ)
		}
	}
}

// enforce ends the tree when the process has run for limit. Time is counted in
// steps, so that the time in which the machine was not scheduled counts for at
// most one step.
func (p *process) enforce(limit, grace time.Duration) {
	const step = time.Second
	for left := limit; left > 0; {
		d := min(left, step)
		select {
		case <-p.reaped:
			return
		case <-time.After(d):
			left -= d
		}
	}
	p.mu.Lock()
	p.limited = true
	p.mu.Unlock()
	p.family().signal(unix.SIGTERM)
	until := time.Now().Add(grace)
	for pause := time.Millisecond; time.Now().Before(until); pause = min(2*pause, 50*time.Millisecond) {
		if len(p.family().scan()) == 0 {
			return
		}
		time.Sleep(pause) // nobody tells when a grandchild is gone
	}
	p.family().kill(killWithin)
}

func (p *process) family() *family {
	f := &family{id: p.id, main: p.pid}
	select {
	case <-p.reaped:
		f.ended = true
	default:
	}
	return f
}

func (p *process) running() bool {
	select {
	case <-p.reaped:
		return false
	default:
		return true
	}
}

// signal implements guestapi.Signal.
func (p *process) signal(sig syscall.Signal, tree bool) error {
	if tree {
		if sig == unix.SIGKILL {
			p.family().kill(killWithin)
		} else {
			p.family().signal(sig)
		}
		return nil
	}
	alive, err := p.server.reaper.alive(p.pid, func() error { return syscall.Kill(-p.pid, sig) })
	if !alive || errors.Is(err, unix.ESRCH) {
		return refuse(409, guestapi.CodeProcessEnded, "the process has ended")
	}
	if err != nil {
		return refuse(403, guestapi.CodePermissionDenied, "signal: %s", reason(err))
	}
	return nil
}

func (p *process) describe() guestapi.Process {
	base, next, exit := p.out.bounds()
	p.mu.Lock()
	defer p.mu.Unlock()
	d := guestapi.Process{
		ID: p.id, PID: p.pid, State: guestapi.ProcessRunning, StartedAt: p.started,
		Base: base, Next: next, StdinOffset: p.stdinOffset, StdinClosed: p.stdinClosed, Exit: exit,
	}
	if exit != nil {
		d.State = guestapi.ProcessExited
	}
	return d
}

// lockStdin waits for its turn; false when ctx ended first.
func (p *process) lockStdin(ctx context.Context) bool {
	select {
	case p.stdin <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}
