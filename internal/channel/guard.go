package channel

import (
	"encoding/binary"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// yamux's wire format: version u8, type u8, flags u16, stream u32, length u32.
const (
	muxHeader = 12

	muxData         = 0
	muxWindowUpdate = 1
	muxPing         = 2
	muxGoAway       = 3

	flagSYN = 1
)

// guard stands between a guest's connection and the host's multiplexer and
// refuses what only a hostile guest sends. The multiplexer trusts its peer too
// much: it starts a goroutine for every ping, queues a reply for every stream
// opened, and grows windows without end.
type guard struct {
	net.Conn
	now func() time.Time

	hdr  [muxHeader]byte
	have int    // bytes of hdr seen
	skip uint32 // bytes of the body still to pass
	err  error

	pings  bucket
	frames bucket // frames without payload
}

func newGuard(c net.Conn, now func() time.Time) *guard {
	return &guard{
		Conn:   c,
		now:    now,
		pings:  bucket{rate: 10, burst: 20},
		frames: bucket{rate: 50_000, burst: 50_000},
	}
}

// Read implements net.Conn; after the first bad frame it fails for good.
func (g *guard) Read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	n, err := g.Conn.Read(p)
	ok, bad := g.check(p[:n])
	if bad != nil {
		// Whole frames before the bad one are passed on; the bad one never is.
		g.err = bad
		if ok == 0 {
			return 0, bad
		}
		return ok, nil
	}
	return n, err
}

// check walks over p and returns how many of its bytes may pass.
func (g *guard) check(p []byte) (int, error) {
	for at := 0; at < len(p); {
		if g.skip > 0 {
			n := min(uint32(len(p)-at), g.skip)
			g.skip -= n
			at += int(n)
			continue
		}
		n := copy(g.hdr[g.have:], p[at:])
		g.have += n
		if g.have < muxHeader {
			return len(p), nil
		}
		if err := g.header(); err != nil {
			return at, err
		}
		g.have = 0
		at += n
	}
	return len(p), nil
}

func (g *guard) header() error {
	h := g.hdr
	flags, length := binary.BigEndian.Uint16(h[2:]), binary.BigEndian.Uint32(h[8:])
	if h[0] != 0 || flags > 15 {
		return fmt.Errorf("%w: frame version %d, flags %d", ErrProtocol, h[0], flags)
	}
	switch h[1] {
	case muxData, muxWindowUpdate:
		if flags&flagSYN != 0 {
			return fmt.Errorf("%w: the guest opens a stream", ErrProtocol)
		}
		// Our window is never larger; nor is what a peer may grant at once.
		if length > window {
			return fmt.Errorf("%w: frame of %d bytes", ErrProtocol, length)
		}
		if h[1] == muxData {
			g.skip = length
		}
		if g.skip == 0 && !g.frames.take(g.now()) {
			return fmt.Errorf("%w: flood of empty frames", ErrProtocol)
		}
	case muxPing:
		if !g.pings.take(g.now()) {
			return fmt.Errorf("%w: flood of pings", ErrProtocol)
		}
	case muxGoAway:
	default:
		return fmt.Errorf("%w: frame type %d", ErrProtocol, h[1])
	}
	return nil
}

// bucket is a token bucket; the zero time starts it full.
type bucket struct {
	rate, burst float64
	tokens      float64
	last        time.Time
}

func (b *bucket) take(now time.Time) bool {
	if b.last.IsZero() {
		b.tokens = b.burst
	} else {
		b.tokens = min(b.burst, b.tokens+b.rate*now.Sub(b.last).Seconds())
	}
	b.last = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// heard notes when bytes last arrived; for the guest's liveness check.
type heard struct {
	net.Conn
	at atomic.Int64
}

func (h *heard) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	if n > 0 {
		h.at.Store(time.Now().UnixNano())
	}
	return n, err
}
