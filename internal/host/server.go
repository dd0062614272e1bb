package host

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
)

// Driver is what the room makes machines with; *gvisor.Runtime is one.
type Driver interface {
	runtime.Runtime
	// ListenFD gives a new descriptor of the socket that the guest daemon dials.
	ListenFD(ctx context.Context, id sandbox.ID) (*os.File, error)
	// Sweep removes what belongs to no machine and says what that was.
	Sweep(ctx context.Context) ([]string, error)
}

// Templates is what the room builds machines from; *template.Store is one.
type Templates interface {
	List() ([]template.Info, error)
	Resolve(ref string) (template.Info, error)
	Build(ctx context.Context, r template.Recipe, progress func(step string)) (template.Info, error)
}

// Config of a Server.
type Config struct {
	Driver    Driver
	Templates Templates
	// KeyDir holds the signing key; made with mode 0700.
	KeyDir string
	// DiskDir is on the file system of the machines' disks.
	DiskDir string
	// UIDs are the users that may call; nobody else, root neither.
	UIDs []uint32
	// MaxMachines and MaxResources (of one machine) are what a peer can ask for at
	// most; a zero field is no bound but the driver's.
	MaxMachines  int
	MaxResources sandbox.Resources
	// MaxCalls bounds calls at the same time; 4096 unless set. A machine that is
	// waited for takes one.
	MaxCalls int
	// FirstMessage is how long a peer may be silent after connecting; 5 s unless set.
	FirstMessage time.Duration
	// Log may be nil.
	Log *slog.Logger
}

const (
	writeTimeout    = 10 * time.Second
	progressTimeout = 50 * time.Millisecond
	callTimeout     = 5 * time.Minute // of a call about one machine, but wait
)

// Server is the room.
type Server struct {
	conf  Config
	key   ed25519.PrivateKey
	heads *heads
	room  string
	wg    sync.WaitGroup

	mu       sync.Mutex
	calls    int                 // guarded by mu
	creating map[sandbox.ID]bool // guarded by mu: admitted, not yet on the driver's list
}

// NewServer makes a room; at the first start it makes the signing key.
func NewServer(conf Config) (*Server, error) {
	if conf.Driver == nil || conf.Templates == nil || len(conf.UIDs) == 0 {
		return nil, errors.New("host: driver, templates and users are needed")
	}
	if conf.MaxCalls <= 0 {
		conf.MaxCalls = 4096
	}
	if conf.FirstMessage <= 0 {
		conf.FirstMessage = 5 * time.Second
	}
	if conf.Log == nil {
		conf.Log = slog.New(slog.DiscardHandler)
	}
	key, err := loadKey(conf.KeyDir)
	if err != nil {
		return nil, err
	}
	heads, err := loadHeads(conf.KeyDir, key)
	if err != nil {
		return nil, err
	}
	return &Server{conf: conf, key: key, heads: heads, room: sandbox.Random(16), creating: map[sandbox.ID]bool{}}, nil
}

// PublicKey verifies what the room signs.
func (s *Server) PublicKey() ed25519.PublicKey { return s.key.Public().(ed25519.PublicKey) }

// Listen makes the room's socket at path, for members of group gid (a socket
// file of a room that died is replaced).
func Listen(path string, gid int) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("host: %w", err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("host: %w", err)
	}
	// Until here only root gets in: the mode is that of the umask at most 0755,
	// and connecting needs the right to write.
	if err := errors.Join(os.Chown(path, 0, gid), os.Chmod(path, 0o660)); err != nil {
		l.Close()
		return nil, fmt.Errorf("host: %w", err)
	}
	return l, nil
}

// Serve answers calls on l until ctx ends, and then waits for the running ones,
// whose contexts have ended too. It owns l. Beside the first calls it sweeps once
// and logs what an earlier room had left.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	defer s.wg.Wait()
	s.wg.Go(func() {
		lines, err := s.conf.Driver.Sweep(ctx)
		for _, line := range lines {
			s.conf.Log.Info("host room: sweep", "did", line)
		}
		if err != nil && ctx.Err() == nil {
			s.conf.Log.Error("host room: sweep", "error", err)
		}
	})
	defer l.Close()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	for {
		c, err := l.AcceptUnix()
		if ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return ctx.Err()
		}
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ECONNABORTED) {
			s.conf.Log.Warn("host room: accept", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("host: accept: %w", err)
		}
		s.ServeConn(ctx, c)
	}
}

// ServeConn answers the one call of c in a goroutine of its own. It owns c.
func (s *Server) ServeConn(ctx context.Context, c *net.UnixConn) {
	s.mu.Lock()
	full := s.calls >= s.conf.MaxCalls
	if !full {
		s.calls++
	}
	s.mu.Unlock()
	if full {
		s.conf.Log.Warn("host room: too many calls at once", "max", s.conf.MaxCalls)
		s.send(c, reply{Done: true, Error: toWire(ErrBusy)}, progressTimeout)
		c.Close()
		return
	}
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.calls--
		}()
		defer c.Close()
		s.call(ctx, c)
	}()
}

// call does one call, whatever the peer does.
func (s *Server) call(ctx context.Context, c *net.UnixConn) {
	uid, err := peer(c)
	if err != nil || !slices.Contains(s.conf.UIDs, uid) {
		s.conf.Log.Warn("host room: refused a peer", "uid", uid, "error", err)
		s.finish(c, fmt.Errorf("%w: user %d may not call", ErrRefused, uid))
		// Closing with a message unread would take the answer from the peer. What
		// is read here is thrown away.
		_ = c.SetReadDeadline(time.Now().Add(progressTimeout))
		_, _ = c.Read(make([]byte, 1))
		return
	}
	_ = c.SetReadDeadline(time.Now().Add(s.conf.FirstMessage))
	b, err := receive(c)
	if err != nil {
		if !errors.Is(err, io.EOF) {
			s.finish(c, err)
		}
		return
	}
	q, err := parse(b)
	if err != nil {
		s.finish(c, err)
		return
	}
	h, ok := handlers[q.Op]
	if !ok {
		s.finish(c, fmt.Errorf("%w: no operation %.32q", ErrRefused, string(q.Op)))
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !h.unbounded {
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	// The peer has nothing more to say: what it sends, like its end, cancels.
	_ = c.SetReadDeadline(time.Time{})
	go func() {
		var one [1]byte
		_, _ = c.Read(one[:])
		cancel()
	}()
	defer func() {
		if p := recover(); p != nil {
			s.conf.Log.Error("host room: panic", "op", string(q.Op), "panic", p, "stack", string(debug.Stack()))
			s.finish(c, errors.New("host: the call failed inside the room"))
		}
	}()
	s.finish(c, h.do(s, ctx, c, q))
}

// finish sends the last message, unless a handler did (errSent).
func (s *Server) finish(c *net.UnixConn, err error) {
	switch {
	case errors.Is(err, errSent):
	case err != nil:
		s.send(c, reply{Done: true, Room: s.room, Error: toWire(err)}, writeTimeout)
	default:
		s.send(c, reply{Done: true, Room: s.room}, writeTimeout)
	}
}

var errSent = errors.New("host: the answer is sent")

// send writes one message; a peer that does not take it in time loses it.
func (s *Server) send(c *net.UnixConn, r reply, within time.Duration) {
	b, err := json.Marshal(r)
	if err != nil || len(b) > MaxMessage {
		s.conf.Log.Error("host room: an answer cannot be sent", "bytes", len(b), "error", err)
		b, _ = json.Marshal(reply{Done: true, Room: s.room, Error: &fail{"internal", "the answer is too large"}})
	}
	_ = c.SetWriteDeadline(time.Now().Add(within))
	_, _ = c.Write(b)
}

// receive reads one whole message. Descriptors that come with it are not
// received: the kernel closes them, for there is no room for them.
func receive(c *net.UnixConn) ([]byte, error) {
	b := make([]byte, MaxMessage)
	n, _, flags, _, err := c.ReadMsgUnix(b, nil)
	if err != nil {
		return nil, err
	}
	if flags&unix.MSG_TRUNC != 0 {
		return nil, fmt.Errorf("%w: a message of more than %d bytes", ErrRefused, MaxMessage)
	}
	return b[:n], nil
}

// peer asks the kernel who is on the other end.
func peer(c *net.UnixConn) (uint32, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return ^uint32(0), err
	}
	var cred *unix.Ucred
	var cerr error
	if err := rc.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return ^uint32(0), err
	}
	if cerr != nil {
		return ^uint32(0), cerr
	}
	return cred.Uid, nil
}
