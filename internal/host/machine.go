package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// machine is a handle: the id and nothing else.
type machine struct {
	c  *Client
	id sandbox.ID
}

// ID implements runtime.Machine.
func (m machine) ID() sandbox.ID { return m.id }

func (m machine) do(ctx context.Context, o op) (reply, error) {
	return m.c.one(ctx, request{Op: o, ID: string(m.id)})
}

// Status implements runtime.Machine.
func (m machine) Status(ctx context.Context) (runtime.Status, error) {
	r, err := m.do(ctx, opStatus)
	if err == nil && r.Status == nil {
		err = errAnswer
	}
	if err != nil {
		return runtime.Status{}, err
	}
	return *r.Status, nil
}

// Start implements runtime.Machine.
func (m machine) Start(ctx context.Context) error {
	r, err := m.do(ctx, opStart)
	if err != nil {
		return err
	}
	// A room that started again has made a new socket for the new boot.
	m.c.mu.Lock()
	l := m.c.channels[m.id]
	m.c.mu.Unlock()
	if l != nil && r.Status != nil {
		select {
		case <-l.ready:
			if l.room != r.Room && l.bootID != r.Status.BootID {
				m.c.drop(m.id, l)
			}
		default: // it is being made, by the room that answered or a later one
		}
	}
	return nil
}

// Pause implements runtime.Machine.
func (m machine) Pause(ctx context.Context) error { _, err := m.do(ctx, opPause); return err }

// Resume implements runtime.Machine.
func (m machine) Resume(ctx context.Context) error { _, err := m.do(ctx, opResume); return err }

// Stop implements runtime.Machine.
func (m machine) Stop(ctx context.Context) error {
	if _, err := m.do(ctx, opStop); err != nil {
		return err
	}
	m.c.drop(m.id, nil)
	return nil
}

// Destroy implements runtime.Machine.
func (m machine) Destroy(ctx context.Context) error { return m.c.Destroy(ctx, m.id) }

// Capture implements runtime.Machine.
func (m machine) Capture(context.Context, runtime.CaptureKind) (runtime.Artifacts, error) {
	return runtime.Artifacts{}, fmt.Errorf("%w: capture", runtime.ErrUnsupported)
}

// Stats implements runtime.Machine.
func (m machine) Stats(ctx context.Context) (runtime.Stats, error) {
	r, err := m.do(ctx, opStats)
	if err == nil && r.Stats == nil {
		err = errAnswer
	}
	if err != nil {
		return runtime.Stats{}, err
	}
	return *r.Stats, nil
}

// Wait implements runtime.Machine; it goes on over restarts of the room.
func (m machine) Wait(ctx context.Context) (runtime.Exit, error) {
	r, err := m.do(ctx, opWait)
	if err == nil && r.Exit == nil {
		err = errAnswer
	}
	if err != nil {
		return runtime.Exit{}, err
	}
	return *r.Exit, nil
}

// patience is how long a Dial waits for the guest before it also looks whether
// the machine ends.
const patience = 100 * time.Millisecond

// Dial implements runtime.Machine.
func (m machine) Dial(ctx context.Context) (net.Conn, error) {
	if err := m.dialable(ctx); err != nil {
		return nil, err
	}
	dctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		if sleep(dctx, patience) != nil {
			return
		}
		if _, err := m.Wait(dctx); err == nil || errors.Is(err, runtime.ErrNotFound) {
			cancel(errEnded)
		}
	}()
	for {
		l, err := m.c.link(dctx, m.id)
		if err == nil {
			var conn net.Conn
			if conn, err = l.acceptor.Dial(dctx); err == nil {
				return conn, nil
			}
			if errors.Is(err, channel.ErrClosed) && dctx.Err() == nil {
				// Stop or a new socket took it from under us.
				m.c.drop(m.id, l)
				if err := m.dialable(dctx); err == nil {
					continue
				}
			}
		}
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(context.Cause(dctx), errEnded):
			return nil, fmt.Errorf("%w: %s", runtime.ErrNotRunning, m.id)
		}
		if serr := m.dialable(ctx); serr != nil {
			return nil, serr
		}
		return nil, err
	}
}

var errEnded = errors.New("host: the machine ended")

func (m machine) dialable(ctx context.Context) error {
	st, err := m.Status(ctx)
	if err != nil {
		return err
	}
	switch st.Condition {
	case runtime.Running:
		return nil
	case runtime.Paused:
		return fmt.Errorf("%w: %s", runtime.ErrPaused, m.id)
	}
	return fmt.Errorf("%w: %s", runtime.ErrNotRunning, m.id)
}

// link gives the accepted side of the channel of id, asking the room for the
// listening socket once.
func (c *Client) link(ctx context.Context, id sandbox.ID) (*link, error) {
	for {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return nil, errors.New("host: the client is closed")
		}
		l := c.channels[id]
		mine := l == nil
		if mine {
			l = &link{ready: make(chan struct{})}
			c.channels[id] = l
		}
		c.mu.Unlock()
		if mine {
			l.err = c.open(ctx, id, l)
			close(l.ready)
			if l.err != nil {
				c.drop(id, l)
				return nil, l.err
			}
			return l, nil
		}
		select {
		case <-l.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if l.err == nil {
			return l, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		c.drop(id, l) // whoever made it failed, perhaps by its own context: we try
	}
}

// open asks the room for the listening socket of id.
func (c *Client) open(ctx context.Context, id sandbox.ID, l *link) error {
	st, err := machine{c, id}.Status(ctx)
	if err != nil {
		return err
	}
	q, err := json.Marshal(request{Version: Version, Op: opListen, ID: string(id)})
	if err != nil {
		return fmt.Errorf("host: %w", err)
	}
	var r reply
	var f *os.File
	for start := time.Now(); ; {
		r, f, err = c.try(ctx, q, func(reply) {})
		if err == nil || (!errors.Is(err, ErrAway) && !errors.Is(err, ErrBusy)) || time.Since(start) > retryFor {
			break
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	if f != nil {
		defer f.Close()
	}
	if err != nil {
		return err
	}
	if f == nil {
		return errAnswer
	}
	ln, err := net.FileListener(f)
	if err != nil {
		return fmt.Errorf("host: channel: %w", err)
	}
	l.acceptor = channel.NewAcceptor(ln, channel.Options{})
	l.room, l.bootID = r.Room, st.BootID
	return nil
}

// drop closes the channel of id; with only, unless it is another one by now.
func (c *Client) drop(id sandbox.ID, only *link) {
	c.mu.Lock()
	l := c.channels[id]
	if l == nil || (only != nil && l != only) {
		c.mu.Unlock()
		if only != nil {
			go only.close() // idempotent; not to leave its socket open
		}
		return
	}
	delete(c.channels, id)
	c.mu.Unlock()
	go l.close() // it may still be being made
}
