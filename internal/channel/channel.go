// Package channel carries byte streams between the host and the guest daemon
// of one sandbox over a single connection.
//
// # Shape
//
//	host                                          guest
//	Acceptor(listener) ◄── one connection ──────── Serve(dial, handler)
//	   Dial ───────────────── yamux streams ─────► http.Handler
//
// The guest dials (gVisor: a socket in a fixed read-only mount) and redials
// within a second of losing the host; the host opens streams. The connection
// names the sandbox: an Acceptor belongs to one.
//
// # Promises of the host side
//
//  1. Newest connection wins; the older session ends.
//  2. The guest never opens a stream: a frame that tries ends the session.
//  3. What arrives is checked frame by frame before the multiplexer sees it
//     (guard): lengths, types, and the rate of pings and other frames that cost
//     the host more than they cost the guest.
//  4. Connections that have not said hello are few (maxPending) and short-lived
//     (helloTimeout); accepts are rate limited.
//  5. A guest that stops reading makes writes fail after writeTimeout and ends
//     its own session; nothing is shared between Acceptors.
//  6. The host sends no keepalive: a paused machine keeps its session. A stream
//     that the guest does not acknowledge within openTimeout ends the session.
//
// # Other transports
//
// Hello runs on each new connection before the multiplexer, on both ends, and
// is replaceable (Options.Hello, ServeOptions.Hello). A transport whose
// reconnects the guest cannot see (QEMU's virtio-serial) puts its
// resynchronisation there: on the host 68 KiB of 0xFF, then magic and nonce
// each 20 ms until the guest echoes it, then a GO marker, both ends discarding
// everything before the echo; and it splits writes to 32 KiB in the net.Conn
// that it returns. Where the host dials, the driver wraps its dial loop as a
// net.Listener.
package channel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/hashicorp/yamux"
)

// Errors of the package.
var (
	ErrClosed   = errors.New("channel: closed")
	ErrProtocol = errors.New("channel: the far end does not keep to the protocol")
	ErrBusy     = errors.New("channel: too many open streams")
)

const (
	magic        = "SPACE-CHANNEL 1\n"
	helloTimeout = 5 * time.Second
	writeTimeout = 10 * time.Second
	openTimeout  = 30 * time.Second
	closeTimeout = 10 * time.Second
	window       = 256 << 10 // yamux's least; bytes unread that one stream can hold
	maxStreams   = 128       // open streams of one session
	maxPending   = 4         // connections that have not said hello

	pingEvery   = time.Second
	pingTimeout = 2 * time.Second
)

// Hello prepares a fresh connection, on either end, and returns what the
// multiplexer shall use. It must respect the deadline already set on conn.
type Hello func(conn net.Conn) (net.Conn, error)

// LineHello sends the magic line and expects the same from the far end.
func LineHello(conn net.Conn) (net.Conn, error) {
	if _, err := io.WriteString(conn, magic); err != nil {
		return nil, err
	}
	got := make([]byte, len(magic))
	if _, err := io.ReadFull(conn, got); err != nil {
		return nil, err
	}
	if string(got) != magic {
		return nil, fmt.Errorf("%w: hello is %q", ErrProtocol, got)
	}
	return conn, nil
}

func hello(conn net.Conn, h Hello) (net.Conn, error) {
	if h == nil {
		h = LineHello
	}
	_ = conn.SetDeadline(time.Now().Add(helloTimeout))
	c, err := h(conn)
	if err != nil {
		return nil, fmt.Errorf("channel: hello: %w", err)
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("channel: hello: %w", err)
	}
	return c, nil
}

func config() *yamux.Config {
	c := yamux.DefaultConfig()
	c.AcceptBacklog = 2 * maxStreams
	c.EnableKeepAlive = false
	c.ConnectionWriteTimeout = writeTimeout
	c.MaxStreamWindowSize = window
	c.StreamOpenTimeout = openTimeout
	c.StreamCloseTimeout = closeTimeout
	// The multiplexer's log would let a guest write to the host's log at will.
	c.LogOutput = io.Discard
	return c
}

// slowWriter gives every write a deadline, so that an end that stops reading
// cannot hold the multiplexer's sender for ever. It also joins the header of a
// data frame with its body, which the multiplexer writes apart: half the system
// calls, which are dear in gVisor. Only the multiplexer's sender writes to it.
type slowWriter struct {
	net.Conn
	hdr  [muxHeader]byte
	held bool
}

func (c *slowWriter) Write(p []byte) (int, error) {
	if !c.held && len(p) == muxHeader && p[1] == muxData && binary.BigEndian.Uint32(p[8:]) > 0 {
		c.held = true
		return copy(c.hdr[:], p), nil // its body follows at once
	}
	_ = c.SetWriteDeadline(time.Now().Add(writeTimeout))
	if !c.held {
		return c.Conn.Write(p)
	}
	c.held = false
	n, err := (&net.Buffers{c.hdr[:], p}).WriteTo(c.Conn)
	return int(max(0, n-muxHeader)), err
}
