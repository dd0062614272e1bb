package fake

import (
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/space-platform/space/api/guestapi"
)

// Program is what a simulated process does; it returns its exit code. It must
// end soon after Proc.Done is closed or a write fails.
type Program func(p *Proc) int

// Proc is the inside of a simulated process.
type Proc struct {
	Start  guestapi.Start
	Args   []string
	Env    map[string]string
	Stdin  io.Reader
	Stdout io.Writer // blocks while the window is full
	Stderr io.Writer
	p      *process
}

// Done is closed when the process is killed or its machine ends.
func (p *Proc) Done() <-chan struct{} { return p.p.done }

// Sleep waits d of time that the machine runs; false when the process must end.
func (p *Proc) Sleep(d time.Duration) bool {
	select {
	case <-p.p.r.w.clock.After(d):
		return p.p.r.scheduled()
	case <-p.p.done:
		return false
	}
}

// Trap lets the program see signals; h returns true for those it survives.
// SIGKILL is never seen.
func (p *Proc) Trap(h func(signal int) bool) {
	p.p.mu.Lock()
	defer p.p.mu.Unlock()
	p.p.trap = h
}

// WriteFile puts a file on the machine's disk.
func (p *Proc) WriteFile(name string, data []byte) error {
	r := p.p.r
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	if r.m.run != r {
		return io.ErrClosedPipe
	}
	return r.m.write(name, data)
}

// Handle makes prog the program of that name, for argv and for the simple shell.
func (w *World) Handle(name string, prog Program) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.programs[name] = prog
}

// builtins are the programs that every World has.
var builtins = map[string]Program{
	"true":  func(*Proc) int { return 0 },
	"false": func(*Proc) int { return 1 },
	"echo": func(p *Proc) int {
		_, err := fmt.Fprintln(p.Stdout, strings.Join(p.Args[1:], " "))
		return status(err)
	},
	"cat": func(p *Proc) int {
		_, err := io.Copy(p.Stdout, p.Stdin)
		return status(err)
	},
	"exit": func(p *Proc) int { return int(argument(p, 0)) & 0xff },
	"sleep": func(p *Proc) int {
		if !p.Sleep(time.Duration(argument(p, 0) * float64(time.Second))) {
			return 1
		}
		return 0
	},
}

func status(err error) int {
	if err != nil {
		return 1
	}
	return 0
}

func argument(p *Proc, otherwise float64) float64 {
	if len(p.Args) < 2 {
		return otherwise
	}
	n, err := strconv.ParseFloat(p.Args[1], 64)
	if err != nil {
		return otherwise
	}
	return n
}

// program finds what Start names; w.mu is held. A Shell line is programs with
// plain words between ";", run in turn until "exit".
func (w *World) program(in guestapi.Start) (Program, []string) {
	if len(in.Args) > 0 {
		return w.programs[path.Base(in.Args[0])], in.Args
	}
	if prog := w.programs[in.Shell]; prog != nil {
		return prog, []string{in.Shell}
	}
	type command struct {
		prog Program
		args []string
	}
	var script []command
	for line := range strings.SplitSeq(in.Shell, ";") {
		args := strings.Fields(line)
		if len(args) == 0 {
			continue
		}
		script = append(script, command{w.programs[path.Base(args[0])], args})
	}
	return func(p *Proc) int {
		code := 0
		for _, c := range script {
			p.Args = c.args
			if c.prog == nil {
				_, _ = fmt.Fprintf(p.Stderr, "sh: %s: not found\n", c.args[0]) // a killed shell says nothing
				code = 127
				continue
			}
			code = c.prog(p)
			if c.args[0] == "exit" {
				return code
			}
		}
		return code
	}, []string{"sh", "-c", in.Shell}
}

type chunk struct {
	stream guestapi.FrameType
	data   []byte
}

// process is one session's process in the stub.
type process struct {
	r      *run
	start  guestapi.Start
	done   chan struct{} // closed when it must end
	window int

	mu       sync.Mutex
	d        guestapi.Process
	chunks   []chunk // from d.Base on
	changed  chan struct{}
	stdin    []byte // accepted and not yet read
	trap     func(int) bool
	killed   int // signal
	timedOut bool
	mustEnd  bool
}

var errEnded = errors.New("fake: process must end")

func newProcess(r *run, in guestapi.Start, pid int) *process {
	p := &process{
		r: r, start: in, done: make(chan struct{}), changed: make(chan struct{}), window: in.Window,
		d: guestapi.Process{
			ID: in.ID, PID: pid, State: guestapi.ProcessRunning, StartedAt: r.w.clock.Now(),
			StdinClosed: !in.Stdin && in.PTY == nil,
		},
	}
	if p.window <= 0 {
		p.window = guestapi.DefaultWindow
	}
	p.window = min(p.window, guestapi.MaxWindow)
	return p
}

func (p *process) launch(prog Program, args []string, env map[string]string) {
	if p.start.TimeLimit > 0 {
		limit := p.r.w.clock.After(p.start.TimeLimit)
		go func() {
			select {
			case <-limit:
				p.mu.Lock()
				p.timedOut = true
				p.mu.Unlock()
				p.kill(int(syscall.SIGKILL))
			case <-p.done:
			}
		}()
	}
	proc := &Proc{
		Start: p.start, Args: args, Env: env, p: p,
		Stdin:  stdinReader{p},
		Stdout: output{p, guestapi.FrameStdout}, Stderr: output{p, guestapi.FrameStderr},
	}
	if p.start.PTY != nil {
		proc.Stderr = proc.Stdout
	}
	go func() {
		code := prog(proc)
		if p.r.scheduled() {
			p.exit(code)
		}
		p.vanish() // ends the timer
	}()
}

// touch wakes everyone who waits; p.mu is held.
func (p *process) touch() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *process) describe() guestapi.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.d
}

func (p *process) exit(code int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := &guestapi.ExitStatus{Cause: guestapi.ExitExited, Code: code & 0xff, At: p.r.w.clock.Now()}
	if p.killed != 0 {
		e.Cause, e.Code, e.Signal = guestapi.ExitSignal, 128+p.killed, guestapi.SignalName(p.killed)
	}
	if p.timedOut {
		e.Cause = guestapi.ExitTimeLimit
	}
	p.d.State, p.d.Exit = guestapi.ProcessExited, e
	p.touch()
}

// vanish makes the process end without an exit, as the machine's death does.
func (p *process) vanish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLocked()
}

func (p *process) endLocked() {
	if !p.mustEnd {
		p.mustEnd = true
		close(p.done)
		p.touch()
	}
}

// kill delivers a signal; false when the process has ended.
func (p *process) kill(n int) bool {
	p.mu.Lock()
	exited, ending, trap := p.d.Exit != nil, p.mustEnd, p.trap
	p.mu.Unlock()
	if exited || ending {
		return !exited
	}
	switch syscall.Signal(n) {
	case syscall.SIGCONT, syscall.SIGWINCH, syscall.SIGCHLD, syscall.SIGURG, syscall.SIGSTOP, syscall.SIGTSTP:
		return true
	case syscall.SIGKILL:
	default:
		if trap != nil && trap(n) {
			return true
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.killed == 0 {
		p.killed = n
	}
	p.endLocked()
	return true
}

// output is stdout or stderr of the process.
type output struct {
	p      *process
	stream guestapi.FrameType
}

func (o output) Write(b []byte) (int, error) {
	written := 0
	for len(b) > 0 {
		if !o.p.r.scheduled() {
			return written, errEnded
		}
		n, err := o.p.append(o.stream, b)
		if err != nil {
			return written, err
		}
		written += n
		b = b[n:]
	}
	return written, nil
}

// append keeps as much of b as the window takes, at least one byte.
func (p *process) append(stream guestapi.FrameType, b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if p.mustEnd {
			return 0, errEnded
		}
		room := p.window - int(p.d.Next-p.d.Base)
		if room <= 0 && p.start.Overflow == "drop" {
			drop := uint64(len(p.chunks[0].data))
			p.chunks = p.chunks[1:]
			p.d.Base += drop
			continue
		}
		if room > 0 {
			n := min(room, len(b), guestapi.MaxFramePayload)
			p.chunks = append(p.chunks, chunk{stream, slices.Clone(b[:n])})
			p.d.Next += uint64(n)
			p.touch()
			return n, nil
		}
		changed := p.changed
		p.mu.Unlock()
		<-changed
		p.mu.Lock()
	}
}

// read gives what follows offset at: a chunk, or a gap, or the exit, or a
// channel that is closed at the next change.
func (p *process) read(at uint64) (c chunk, gap uint64, exit *guestapi.ExitStatus, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at < p.d.Base {
		return chunk{}, p.d.Base - at, nil, nil
	}
	pos := p.d.Base
	for _, c := range p.chunks {
		end := pos + uint64(len(c.data))
		if at < end {
			return chunk{c.stream, c.data[at-pos:]}, 0, nil, nil
		}
		pos = end
	}
	return chunk{}, 0, p.d.Exit, p.changed
}

// release forgets output below offset.
func (p *process) release(offset uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if offset > p.d.Next {
		return false
	}
	for p.d.Base < offset {
		c := &p.chunks[0]
		n := min(uint64(len(c.data)), offset-p.d.Base)
		p.d.Base += n
		if c.data = c.data[n:]; len(c.data) == 0 {
			p.chunks = p.chunks[1:]
		}
	}
	p.touch()
	return true
}

func (p *process) feed(offset uint64, data []byte) (reply guestapi.StdinReply, ahead bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if offset > p.d.StdinOffset {
		return guestapi.StdinReply{Accepted: p.d.StdinOffset, Closed: p.d.StdinClosed}, true
	}
	if skip := p.d.StdinOffset - offset; !p.d.StdinClosed && skip < uint64(len(data)) {
		p.stdin = append(p.stdin, data[skip:]...)
		p.d.StdinOffset = offset + uint64(len(data))
		p.touch()
	}
	return guestapi.StdinReply{Accepted: p.d.StdinOffset, Closed: p.d.StdinClosed}, false
}

func (p *process) closeStdin() guestapi.StdinReply {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.d.StdinClosed = true
	p.touch()
	return guestapi.StdinReply{Accepted: p.d.StdinOffset, Closed: true}
}

type stdinReader struct{ p *process }

func (s stdinReader) Read(b []byte) (int, error) {
	p := s.p
	for {
		p.mu.Lock()
		n := copy(b, p.stdin)
		p.stdin = p.stdin[n:]
		closed, changed := p.d.StdinClosed, p.changed
		p.mu.Unlock()
		if n > 0 || len(b) == 0 {
			return n, nil
		}
		if closed {
			return 0, io.EOF
		}
		select {
		case <-changed:
		case <-p.done:
			return 0, errEnded
		}
	}
}
