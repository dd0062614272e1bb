// Package lease keeps a server alive for as long as commands need it.
//
// `space run` without a server starts one for the time of the command. Several
// commands at once share it: each holds a lease, an open connection to the
// lease socket, which the kernel closes however the command ends. A server that
// was started so ends when no lease has been held for Linger.
//
// The server sends lines: "progress TEXT" while it gets ready, then "ready". It
// reads nothing.
package lease

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/space-platform/space/internal/clock"
)

// Linger is how long a server without leases waits for another one.
const Linger = 1500 * time.Millisecond

// FirstWithin is how long a server waits for its first lease.
const FirstWithin = 30 * time.Second

// Keeper is the server's side.
type Keeper struct {
	ln    net.Listener
	clock clock.Clock

	mu       sync.Mutex
	held     map[net.Conn]struct{} // guarded by mu
	ready    bool                  // guarded by mu
	last     string                // guarded by mu; the latest progress line
	changed  chan struct{}         // guarded by mu; closed and replaced at each change
	granted  bool                  // guarded by mu
	shutting bool                  // guarded by mu
}

// Listen opens the lease socket at path, mode 0600, replacing one that is left
// from a process that is gone; the caller holds the lock that proves it.
func Listen(path string, c clock.Clock) (*Keeper, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("lease: %w", err)
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("lease: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = ln.Close()
		return nil, fmt.Errorf("lease: %w", err)
	}
	k := &Keeper{ln: ln, clock: c, held: map[net.Conn]struct{}{}, changed: make(chan struct{})}
	go k.accept()
	return k, nil
}

func (k *Keeper) accept() {
	for {
		c, err := k.ln.Accept()
		if err != nil {
			return
		}
		k.mu.Lock()
		if k.shutting || len(k.held) >= 4096 {
			k.mu.Unlock()
			_ = c.Close()
			continue
		}
		k.held[c] = struct{}{}
		k.granted = true
		k.tellLocked(c)
		k.bumpLocked()
		k.mu.Unlock()
		go func() {
			_, _ = io.Copy(io.Discard, c) // ends when the holder does
			k.mu.Lock()
			delete(k.held, c)
			k.bumpLocked()
			k.mu.Unlock()
			_ = c.Close()
		}()
	}
}

func (k *Keeper) bumpLocked() { close(k.changed); k.changed = make(chan struct{}) }

func (k *Keeper) tellLocked(c net.Conn) {
	line := "ready\n"
	if !k.ready {
		if k.last == "" {
			return
		}
		line = "progress " + k.last + "\n"
	}
	_ = c.SetWriteDeadline(time.Now().Add(time.Second)) // a stuck holder loses the line, not our time
	_, _ = io.WriteString(c, line)
}

// Progress tells all holders what the server is doing.
func (k *Keeper) Progress(text string) { k.tell(false, text) }

// Ready tells all holders that the server serves.
func (k *Keeper) Ready() { k.tell(true, "") }

func (k *Keeper) tell(ready bool, text string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ready, k.last = k.ready || ready, strings.ReplaceAll(text, "\n", " ")
	for c := range k.held {
		k.tellLocked(c)
	}
}

// Idle returns nil once no lease has been held for Linger (or none came within
// FirstWithin). From then on new leases are refused. It ends with ctx's error
// when ctx ends first.
func (k *Keeper) Idle(ctx context.Context) error {
	for {
		k.mu.Lock()
		wait, held, ch := Linger, len(k.held), k.changed
		if !k.granted {
			wait = FirstWithin
		}
		k.mu.Unlock()
		var after <-chan time.Time
		if held == 0 {
			after = k.clock.After(wait)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ch:
		case <-after:
			k.mu.Lock()
			if len(k.held) == 0 {
				k.shutting = true
				k.mu.Unlock()
				return nil
			}
			k.mu.Unlock()
		}
	}
}

// Close ends the socket and every lease.
func (k *Keeper) Close() {
	_ = k.ln.Close()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shutting = true
	for c := range k.held {
		_ = c.Close()
	}
}

// ErrEnded means that the server ended before it was ready.
var ErrEnded = errors.New("lease: the server ended before it was ready")

// Take holds a lease on the server at path, waiting until it is ready. Progress
// lines are handed to progress. The lease ends with Close.
func Take(ctx context.Context, path string, progress func(string)) (io.Closer, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("lease: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	r := bufio.NewReader(io.LimitReader(c, 1<<20))
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			_ = c.Close()
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, ErrEnded
		}
		line = strings.TrimSuffix(line, "\n")
		if line == "ready" {
			return c, nil
		}
		if text, ok := strings.CutPrefix(line, "progress "); ok && progress != nil {
			progress(text)
		}
	}
}
