package gvisor

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/sandbox"
)

// backlog bounds connections of a guest that nobody has accepted yet.
const backlog = 16

// listen makes the socket that the guest daemon of id dials, unless this
// process has it already. The caller holds the lock of the id. Only root may reach the
// socket's directory; who gets the descriptor may accept.
func (r *Runtime) listen(id sandbox.ID) error {
	r.mu.Lock()
	e := r.entries[id]
	have := e != nil && e.listener >= 0
	r.mu.Unlock()
	path := filepath.Join(r.paths.channel(id), socketName)
	if have {
		if _, err := os.Lstat(path); err == nil {
			return nil
		}
		r.unlisten(id) // the run directory was emptied under us
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("gvisor: channel: %w", err)
	}
	// Under a new name first: a guest never finds a socket that nobody listens on.
	tmp := path + ".new"
	_ = os.Remove(tmp)
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: tmp})
	if err == nil {
		err = os.Chmod(tmp, 0o600)
	}
	if err == nil {
		err = unix.Listen(fd, backlog)
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		unix.Close(fd)
		return fmt.Errorf("gvisor: channel: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.entries[id]; e != nil && !r.closed {
		e.listener = fd
		return nil
	}
	unix.Close(fd)
	return fmt.Errorf("gvisor: channel of %s: closed", id)
}

func (r *Runtime) unlisten(id sandbox.ID) {
	r.mu.Lock()
	var a *channel.Acceptor
	if e := r.entries[id]; e != nil {
		a = e.closeChannel()
	}
	r.mu.Unlock()
	if a != nil {
		_ = a.Close()
	}
}

// closeChannel takes the channel out of e; the caller holds mu and closes the
// acceptor without it.
func (e *entry) closeChannel() *channel.Acceptor {
	if e.listener >= 0 {
		unix.Close(e.listener)
		e.listener = -1
	}
	a := e.acceptor
	e.acceptor = nil
	return a
}

// ListenFD gives a new descriptor of the listening socket that the guest
// daemon of id dials, for a process without privileges that accepts there. The
// socket stays the same as long as this process lives; only one process may
// accept.
func (r *Runtime) ListenFD(ctx context.Context, id sandbox.ID) (*os.File, error) {
	var f *os.File
	err := machine{r, id}.locked(ctx, func(_ context.Context, rec record) (err error) {
		f, err = r.listenFD(rec)
		return err
	})
	return f, err
}

// listenFD is ListenFD for holders of the lock.
func (r *Runtime) listenFD(rec record) (*os.File, error) {
	id := rec.Spec.ID
	if !rec.Made || rec.damaged {
		return nil, fmt.Errorf("gvisor: %s is only half-made", id)
	}
	if err := os.MkdirAll(r.paths.channel(id), 0o700); err != nil {
		return nil, fmt.Errorf("gvisor: %w", err)
	}
	if err := r.listen(id); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entries[id]
	if e == nil || e.listener < 0 {
		return nil, notFound(id)
	}
	fd, err := unix.FcntlInt(uintptr(e.listener), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("gvisor: channel: %w", err)
	}
	return os.NewFile(uintptr(fd), "channel"), nil
}

// acceptor gives this process's end of the channel.
func (r *Runtime) acceptor(ctx context.Context, id sandbox.ID) (*channel.Acceptor, error) {
	r.mu.Lock()
	if e := r.entries[id]; e != nil && e.acceptor != nil {
		defer r.mu.Unlock()
		return e.acceptor, nil
	}
	r.mu.Unlock()
	var a *channel.Acceptor
	err := machine{r, id}.locked(ctx, func(_ context.Context, rec record) error {
		r.mu.Lock()
		if e := r.entries[id]; e != nil && e.acceptor != nil {
			a = e.acceptor
			r.mu.Unlock()
			return nil
		}
		r.mu.Unlock()
		f, err := r.listenFD(rec)
		if err != nil {
			return err
		}
		defer f.Close()
		l, err := net.FileListener(f)
		if err != nil {
			return fmt.Errorf("gvisor: channel: %w", err)
		}
		a = channel.NewAcceptor(l, channel.Options{})
		r.mu.Lock()
		defer r.mu.Unlock()
		if e := r.entries[id]; e != nil && !r.closed {
			e.acceptor = a
			return nil
		}
		_ = a.Close()
		return notFound(id)
	})
	return a, err
}
