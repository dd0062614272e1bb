package host

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
)

// retryFor is how long a call waits for a room that is away, as in a restart.
const retryFor = 5 * time.Second

// Client calls the room. It is a runtime.Runtime whose machines the room makes,
// while the streams to their guest daemons are held here, without privileges.
// It is safe for concurrent use, and lives on when the room restarts.
type Client struct {
	socket string
	hello  hello

	mu       sync.Mutex
	channels map[sandbox.ID]*link // guarded by mu
	closed   bool                 // guarded by mu
}

// link is the accepted side of one machine's channel.
type link struct {
	ready    chan struct{} // closed when the fields below are set
	err      error
	acceptor *channel.Acceptor
	room     string // that gave the listener
	bootID   string // of the machine when the listener was given
}

var (
	_ runtime.Runtime = (*Client)(nil)
	_ runtime.Machine = machine{}
)

// Connect asks the room at socket who it is.
func Connect(ctx context.Context, socket string) (*Client, error) {
	c := &Client{socket: socket, channels: map[sandbox.ID]*link{}}
	r, err := c.one(ctx, request{Op: opHello})
	if err != nil {
		return nil, err
	}
	if r.Hello == nil || r.Hello.Version != Version || len(r.Hello.PublicKey) != ed25519.PublicKeySize {
		return nil, fmt.Errorf("host: the room at %s speaks another language", socket)
	}
	c.hello = *r.Hello
	return c, nil
}

// Close ends the channels; machines go on running.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	links := c.channels
	c.channels = map[sandbox.ID]*link{}
	c.mu.Unlock()
	for _, l := range links {
		l.close()
	}
	return nil
}

func (l *link) close() {
	<-l.ready
	if l.acceptor != nil {
		_ = l.acceptor.Close()
	}
}

// Capabilities implements runtime.Runtime.
func (c *Client) Capabilities() runtime.Capabilities { return c.hello.Capabilities }

// PublicKey verifies what SignHead signs.
func (c *Client) PublicKey() ed25519.PublicKey { return ed25519.PublicKey(c.hello.PublicKey) }

// SignHead lets the room sign; see audit.Signer.
func (c *Client) SignHead(ctx context.Context, chain string, seq uint64, hash []byte) (audit.Head, error) {
	r, err := c.one(ctx, request{Op: opSign, Chain: chain, Seq: seq, Hash: hash})
	if err == nil && r.Head == nil {
		err = errAnswer
	}
	if err != nil {
		return audit.Head{}, err
	}
	return *r.Head, nil
}

// Facts tells what the host has.
func (c *Client) Facts(ctx context.Context) (Facts, error) {
	r, err := c.one(ctx, request{Op: opFacts})
	if err == nil && r.Facts == nil {
		err = errAnswer
	}
	if err != nil {
		return Facts{}, err
	}
	return *r.Facts, nil
}

// Sweep lets the room remove what belongs to no machine, and tells what it was.
func (c *Client) Sweep(ctx context.Context) ([]string, error) {
	r, err := c.one(ctx, request{Op: opSweep})
	return r.Lines, err
}

// TemplateClient asks the room about templates.
type TemplateClient struct{ c *Client }

// Templates gives the room's templates.
func (c *Client) Templates() TemplateClient { return TemplateClient{c} }

// List tells all of them.
func (t TemplateClient) List(ctx context.Context) ([]template.Info, error) {
	var out []template.Info
	_, err := t.c.call(ctx, request{Op: opTemplates}, func() { out = nil }, func(r reply) {
		if r.Template != nil {
			out = append(out, *r.Template)
		}
	})
	return out, err
}

// Resolve finds one by name:tag or digest; template.ErrNotFound otherwise.
func (t TemplateClient) Resolve(ctx context.Context, ref string) (template.Info, error) {
	r, err := t.c.one(ctx, request{Op: opResolve, Template: ref})
	if err == nil && r.Template == nil {
		err = errAnswer
	}
	if err != nil {
		return template.Info{}, err
	}
	return *r.Template, nil
}

// Build builds a built-in recipe, or finds that it is built. Progress may be nil.
func (t TemplateClient) Build(ctx context.Context, ref string, progress func(step string)) (template.Info, error) {
	r, err := t.c.call(ctx, request{Op: opBuild, Template: ref}, func() {}, func(r reply) {
		if r.Progress != "" && progress != nil {
			progress(r.Progress)
		}
	})
	if err == nil && r.Template == nil {
		err = errAnswer
	}
	if err != nil {
		return template.Info{}, err
	}
	return *r.Template, nil
}

// Create implements runtime.Runtime.
func (c *Client) Create(ctx context.Context, spec runtime.Spec) (runtime.Machine, error) {
	_, err := c.one(ctx, request{Op: opCreate, ID: string(spec.ID), Template: spec.TemplateDigest, Resources: &spec.Resources})
	if err != nil {
		return nil, err
	}
	return machine{c, spec.ID}, nil
}

// Adopt implements runtime.Runtime.
func (c *Client) Adopt(ctx context.Context, id sandbox.ID) (runtime.Machine, error) {
	m := machine{c, id}
	if _, err := m.Status(ctx); err != nil {
		return nil, err
	}
	return m, nil
}

// List implements runtime.Runtime.
func (c *Client) List(ctx context.Context) ([]runtime.Status, error) {
	var out []runtime.Status
	_, err := c.call(ctx, request{Op: opList}, func() { out = nil }, func(r reply) {
		if r.Status != nil {
			out = append(out, *r.Status)
		}
	})
	return out, err
}

// Restore implements runtime.Runtime.
func (c *Client) Restore(context.Context, runtime.Artifacts, runtime.Spec) (runtime.Machine, error) {
	return nil, fmt.Errorf("%w: restore", runtime.ErrUnsupported)
}

// Destroy implements runtime.Runtime.
func (c *Client) Destroy(ctx context.Context, id sandbox.ID) error {
	if _, err := c.one(ctx, request{Op: opDestroy, ID: string(id)}); err != nil {
		return err
	}
	c.drop(id, nil)
	return nil
}

var errAnswer = errors.New("host: the room's answer lacks what was asked for")

// one makes a call whose answer is one message.
func (c *Client) one(ctx context.Context, q request) (reply, error) {
	return c.call(ctx, q, func() {}, func(reply) {})
}

// call makes a call, again when the room went away in its middle. again is
// called before each try, each with every message but the last.
func (c *Client) call(ctx context.Context, q request, again func(), each func(reply)) (reply, error) {
	q.Version = Version
	b, err := json.Marshal(q)
	if err != nil {
		return reply{}, fmt.Errorf("host: %w", err)
	}
	var away time.Time
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 250*time.Millisecond) {
		again()
		r, f, err := c.try(ctx, b, each)
		if f != nil {
			f.Close() // nobody asked for a descriptor
		}
		if !errors.Is(err, ErrAway) && !errors.Is(err, ErrBusy) {
			return r, err
		}
		if away.IsZero() {
			away = time.Now()
		}
		if q.Op != opWait && time.Since(away) > retryFor {
			return reply{}, err
		}
		if err := sleep(ctx, wait); err != nil {
			return reply{}, err
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// try makes a call once. ErrAway: the room cannot be reached or did not answer.
func (c *Client) try(ctx context.Context, q []byte, each func(reply)) (last reply, fd *os.File, err error) {
	if err := ctx.Err(); err != nil {
		return reply{}, nil, err
	}
	fail := func(err error) (reply, *os.File, error) {
		if ctx.Err() != nil {
			return reply{}, nil, ctx.Err()
		}
		return reply{}, nil, fmt.Errorf("%w: %w", ErrAway, err)
	}
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: c.socket, Net: "unixpacket"})
	if err != nil {
		if errors.Is(err, unix.EACCES) {
			return reply{}, nil, fmt.Errorf("%w: the room's socket is not for this user", ErrRefused)
		}
		return fail(err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() }) // this cancels the call
	defer stop()
	if _, err := conn.Write(q); err != nil && !errors.Is(err, unix.EPIPE) { // a refusal may wait to be read
		return fail(err)
	}
	b, oob := make([]byte, MaxMessage), make([]byte, unix.CmsgSpace(4))
	for {
		n, oobn, flags, _, err := conn.ReadMsgUnix(b, oob)
		if err != nil {
			return fail(err)
		}
		if oobn > 0 {
			f, err := descriptor(oob[:oobn])
			if err != nil {
				return fail(err)
			}
			if fd != nil {
				fd.Close()
			}
			fd = f
		}
		var r reply
		if flags&unix.MSG_TRUNC != 0 {
			return reply{}, fd, fmt.Errorf("host: the room's answer is too long")
		}
		if err := json.NewDecoder(bytes.NewReader(b[:n])).Decode(&r); err != nil {
			return reply{}, fd, fmt.Errorf("host: the room's answer: %w", err)
		}
		switch {
		case r.Error != nil && ctx.Err() != nil:
			return reply{}, fd, ctx.Err()
		case r.Error != nil && (r.Error.Code == "canceled" || r.Error.Code == "deadline"):
			// Not our context but the room's: it is stopping.
			return reply{}, fd, fmt.Errorf("%w: it ended the call", ErrAway)
		case r.Error != nil:
			return r, fd, fromWire(r.Error)
		case r.Done:
			return r, fd, nil
		}
		each(r)
	}
}

func descriptor(oob []byte) (*os.File, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil || len(fds) == 0 {
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
		}
		for _, extra := range fds[1:] {
			unix.Close(extra)
		}
		return os.NewFile(uintptr(fds[0]), "channel"), nil
	}
	return nil, errors.New("no descriptor")
}
