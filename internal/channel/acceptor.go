package channel

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

// Options of an Acceptor; the zero value is right for a socket.
type Options struct {
	// Hello replaces LineHello.
	Hello Hello
}

// Acceptor is the host's end of the channel of one sandbox. It is safe for
// concurrent use.
type Acceptor struct {
	l     net.Listener
	hello Hello
	done  chan struct{}
	wg    sync.WaitGroup

	mu      sync.Mutex
	session *yamux.Session
	pending map[net.Conn]struct{}
	serial  uint64        // of the newest connection that was accepted
	current uint64        // serial of session
	arrived chan struct{} // closed and replaced when session changes
	closed  bool
}

// NewAcceptor accepts the guest's connections on l until Close, and owns l.
func NewAcceptor(l net.Listener, o Options) *Acceptor {
	a := &Acceptor{
		l: l, hello: o.Hello,
		done:    make(chan struct{}),
		pending: map[net.Conn]struct{}{},
		arrived: make(chan struct{}),
	}
	a.wg.Add(1)
	go a.accept()
	return a
}

// Dial opens a stream to the guest daemon, waiting until ctx ends for a guest
// that is booting or redialling. Errors: ctx.Err(), ErrClosed after Close,
// ErrBusy when maxStreams are open. The stream's reads and writes fail when the
// session ends.
func (a *Acceptor) Dial(ctx context.Context) (net.Conn, error) {
	for {
		s, changed, err := a.live()
		if err != nil {
			return nil, err
		}
		if s != nil {
			c, err := open(ctx, s)
			if err == nil || ctx.Err() != nil || errors.Is(err, ErrBusy) {
				return c, err
			}
			if !s.IsClosed() {
				_ = s.Close() // a session that cannot open streams is of no use
			}
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-a.done:
			return nil, ErrClosed
		}
	}
}

// Connected reports whether a guest is connected now.
func (a *Acceptor) Connected() bool {
	s, _, _ := a.live()
	return s != nil
}

func (a *Acceptor) live() (*yamux.Session, <-chan struct{}, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, nil, ErrClosed
	}
	if a.session != nil && a.session.IsClosed() {
		a.session = nil
	}
	return a.session, a.arrived, nil
}

// open opens a stream; the multiplexer's own call knows no context and may wait
// for the connection's writer.
func open(ctx context.Context, s *yamux.Session) (net.Conn, error) {
	if s.NumStreams() >= maxStreams {
		return nil, ErrBusy
	}
	type result struct {
		c   *yamux.Stream
		err error
	}
	got := make(chan result, 1)
	go func() {
		c, err := s.OpenStream()
		got <- result{c, err}
	}()
	select {
	case r := <-got:
		if r.err != nil {
			return nil, r.err
		}
		return stream{r.c, new(sync.Once)}, nil
	case <-ctx.Done():
		go func() {
			if r := <-got; r.err == nil {
				_ = r.c.Close()
			}
		}()
		return nil, ctx.Err()
	}
}

// stream is the host's end of one stream. The multiplexer's Close only says
// that we send no more, leaves our own readers waiting for the guest, and may
// itself wait for a guest that does not read.
type stream struct {
	*yamux.Stream
	once *sync.Once
}

func (s stream) Close() error {
	s.once.Do(func() {
		_ = s.SetDeadline(time.Unix(1, 0))
		go func() { _ = s.Stream.Close() }() // ends within writeTimeout
	})
	return nil
}

// Close ends the session, refuses new connections and waits for its goroutines.
func (a *Acceptor) Close() error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		a.wg.Wait()
		return nil
	}
	a.closed = true
	close(a.done)
	s := a.session
	a.session = nil
	for c := range a.pending {
		_ = c.Close()
	}
	a.mu.Unlock()
	err := a.l.Close()
	if s != nil {
		_ = s.Close()
	}
	a.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return err
}

func (a *Acceptor) accept() {
	defer a.wg.Done()
	limit := bucket{rate: 10, burst: 10}
	for {
		c, err := a.l.Accept()
		if err != nil {
			select {
			case <-a.done:
				return
			case <-time.After(100 * time.Millisecond): // out of descriptors, say
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		a.mu.Lock()
		if a.closed || len(a.pending) >= maxPending {
			a.mu.Unlock()
			_ = c.Close()
		} else {
			a.pending[c] = struct{}{}
			a.serial++
			n := a.serial
			a.mu.Unlock()
			a.wg.Add(1)
			go a.greet(c, n)
		}
		// A guest that dials in a loop waits here, in the kernel's backlog.
		for !limit.take(time.Now()) {
			select {
			case <-a.done:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
}

func (a *Acceptor) greet(c net.Conn, serial uint64) {
	defer a.wg.Done()
	mux, err := hello(c, a.hello)
	a.mu.Lock()
	delete(a.pending, c)
	if err != nil || a.closed || serial < a.current {
		a.mu.Unlock()
		_ = c.Close()
		return
	}
	s, err := yamux.Client(newGuard(&slowWriter{Conn: mux}, time.Now), config())
	if err != nil {
		a.mu.Unlock()
		_ = c.Close()
		return
	}
	old := a.session
	a.session, a.current = s, serial
	close(a.arrived)
	a.arrived = make(chan struct{})
	a.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
}
