package fake

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/space-platform/space/internal/runtime"
)

// Guest is what answers a Dial instead of the stub: it returns the host's end
// of a stream to some guest daemon of that boot.
type Guest func(spec runtime.Spec, bootID string) (net.Conn, error)

// run is one life of a machine, from Start to its end.
type run struct {
	w      *World
	m      *machine
	bootID string
	since  time.Time
	booted chan struct{} // closed when the guest daemon would answer
	ended  chan struct{} // closed at the end, after exit is set
	exit   runtime.Exit
	conns  connSet // both ends of every stream
	daemon *Daemon

	// open is closed while the guest is scheduled and listens; change is closed
	// and replaced whenever that changes. Guarded by w.mu.
	open, change chan struct{}
	isOpen       bool
}

// newRun is called with w.mu held.
func newRun(w *World, m *machine) *run {
	r := &run{
		w: w, m: m, bootID: m.bootID, since: w.clock.Now(),
		booted: make(chan struct{}), ended: make(chan struct{}),
		open: make(chan struct{}), change: make(chan struct{}),
	}
	r.gate(!m.mute)
	if w.guest == nil {
		r.daemon = newDaemon(r)
	}
	if w.boot <= 0 {
		close(r.booted)
		return r
	}
	up := w.clock.After(w.boot)
	go func() {
		select {
		case <-up:
			close(r.booted)
		case <-r.ended:
		}
	}()
	return r
}

// gate lets the guest run, or not; w.mu is held.
func (r *run) gate(open bool) {
	if open != r.isOpen {
		r.isOpen = open
		if open {
			close(r.open)
		} else {
			r.open = make(chan struct{})
		}
	}
	close(r.change)
	r.change = make(chan struct{})
}

// finish ends everything of the run; w.mu is held.
func (r *run) finish(exit runtime.Exit) {
	r.exit = exit
	close(r.ended)
	if r.daemon != nil {
		r.daemon.end()
	}
	r.conns.closeAll()
	r.gate(false)
}

// scheduled blocks while the guest is paused or deaf; false when it ended.
func (r *run) scheduled() bool {
	r.w.mu.Lock()
	open := r.open
	r.w.mu.Unlock()
	select {
	case <-r.ended:
		return false
	default:
	}
	select {
	case <-open:
		return true
	case <-r.ended:
		return false
	}
}

func (r *run) streams() int { return r.conns.len() }

func (r *run) processes() int {
	if r.daemon == nil {
		return 0
	}
	return r.daemon.running()
}

// connect opens a stream of this process to the guest of r.
func (d *Driver) connect(r *run) (net.Conn, error) {
	var far, near net.Conn
	if r.w.guest != nil {
		var err error
		if near, err = r.w.guest(r.m.spec, r.bootID); err != nil {
			return nil, fmt.Errorf("fake: guest: %w", err)
		}
	} else {
		near, far = net.Pipe()
	}
	h := &hostConn{Conn: near, in: []*connSet{&d.conns, &r.conns}}
	if !d.conns.add(h) {
		_ = near.Close() // the process is gone, nobody reads the error
		return nil, errKilled
	}
	if !r.conns.add(h) {
		_ = h.Close()
		return nil, fmt.Errorf("fake: dial: %w", runtime.ErrNotRunning)
	}
	if far != nil {
		r.daemon.serve(&guestConn{Conn: far, r: r})
	}
	return h, nil
}

// hostConn is the host's end; it leaves the books when it is closed.
type hostConn struct {
	net.Conn
	in   []*connSet
	once sync.Once
}

func (c *hostConn) Close() error {
	c.once.Do(func() {
		for _, s := range c.in {
			s.remove(c)
		}
	})
	return c.Conn.Close()
}

// guestConn is the stub's end: it stands still while the machine does.
type guestConn struct {
	net.Conn
	r *run
}

func (c *guestConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if !c.r.scheduled() {
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *guestConn) Write(p []byte) (int, error) {
	if !c.r.scheduled() {
		return 0, net.ErrClosed
	}
	return c.Conn.Write(p)
}

// connSet is a set of open streams that can be closed for good.
type connSet struct {
	mu     sync.Mutex
	m      map[net.Conn]struct{}
	closed bool
}

func (s *connSet) add(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.m == nil {
		s.m = map[net.Conn]struct{}{}
	}
	s.m[c] = struct{}{}
	return true
}

func (s *connSet) remove(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.m, c)
}

func (s *connSet) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.m)
}

func (s *connSet) closeAll() {
	s.mu.Lock()
	all := s.m
	s.m, s.closed = nil, true
	s.mu.Unlock()
	for c := range all {
		_ = c.Close() // the end of a process: nobody reads the error
	}
}

// listener hands accepted streams to the stub's HTTP server.
type listener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

var errListenerClosed = errors.New("fake: guest daemon has ended")

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, errListenerClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *listener) Addr() net.Addr { return addr{} }

type addr struct{}

func (addr) Network() string { return "fake" }
func (addr) String() string  { return "guest" }
