package channel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

type bytesConn struct {
	net.Conn
	r io.Reader
}

func (c bytesConn) Read(p []byte) (int, error) { return c.r.Read(p) }

func muxFrame(typ byte, flags uint16, stream, length uint32, body int) []byte {
	h := []byte{0, typ}
	h = binary.BigEndian.AppendUint16(h, flags)
	h = binary.BigEndian.AppendUint32(h, stream)
	h = binary.BigEndian.AppendUint32(h, length)
	return append(h, make([]byte, body)...)
}

func TestGuardPassesAndRefuses(t *testing.T) {
	now := func() time.Time { return time.Unix(1, 0) }
	fine := bytes.Join([][]byte{
		muxFrame(muxWindowUpdate, 2, 1, 0, 0), muxFrame(muxData, 0, 1, 1000, 1000), muxFrame(muxPing, 1, 0, 7, 0),
		muxFrame(muxData, 4, 1, 0, 0), muxFrame(muxGoAway, 0, 0, 0, 0), muxFrame(muxData, 0, 3, window, window),
	}, nil)
	for _, size := range []int{1, 5, 12, 13, 4096, 1 << 20} {
		g := newGuard(bytesConn{r: bytes.NewReader(fine)}, now)
		got, err := io.ReadAll(&chunked{g, size})
		if err != nil || !bytes.Equal(got, fine) {
			t.Fatalf("reads of %d: %d of %d bytes, %v", size, len(got), len(fine), err)
		}
	}
	for name, bad := range map[string][]byte{
		"opens a stream":      muxFrame(muxWindowUpdate, flagSYN, 2, 0, 0),
		"opens one with data": muxFrame(muxData, flagSYN, 2, 4, 4),
		"long":                muxFrame(muxData, 0, 1, window+1, 0),
		"huge grant":          muxFrame(muxWindowUpdate, 0, 1, 1<<31, 0),
		"type":                muxFrame(9, 0, 1, 0, 0),
		"flags":               muxFrame(muxData, 1<<15, 1, 0, 0),
		"version":             append([]byte{1}, make([]byte, 11)...),
		"pings":               bytes.Repeat(muxFrame(muxPing, 1, 0, 7, 0), 100),
		"empty frames":        bytes.Repeat(muxFrame(muxWindowUpdate, 0, 1, 1, 0), 60_000),
	} {
		g := newGuard(bytesConn{r: bytes.NewReader(append(bytes.Clone(fine), bad...))}, now)
		got, err := io.ReadAll(g)
		if !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
		if !bytes.HasPrefix(got, fine) {
			t.Errorf("%s: what came before was lost", name)
		}
	}
}

type chunked struct {
	r io.Reader
	n int
}

func (c *chunked) Read(p []byte) (int, error) { return c.r.Read(p[:min(len(p), c.n)]) }

func FuzzGuard(f *testing.F) {
	f.Add(muxFrame(muxData, 0, 1, 10, 10), uint8(3))
	f.Add(muxFrame(muxPing, 1, 0, 7, 0), uint8(12))
	f.Add(muxFrame(muxWindowUpdate, flagSYN, 2, 0, 0), uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, step uint8) {
		g := newGuard(bytesConn{r: bytes.NewReader(b)}, func() time.Time { return time.Unix(1, 0) })
		got, err := io.ReadAll(&chunked{g, int(step) + 1})
		if err != nil && !errors.Is(err, ErrProtocol) {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(b, got) {
			t.Fatal("bytes were changed")
		}
		// Walk what was passed: no frame in it opens a stream or is too long.
		for rest := got; len(rest) >= muxHeader; {
			length := binary.BigEndian.Uint32(rest[8:])
			if rest[1] <= muxWindowUpdate && (binary.BigEndian.Uint16(rest[2:])&flagSYN != 0 || length > window) {
				if len(rest) == muxHeader && err != nil {
					break
				}
				t.Fatalf("passed a bad header % x", rest[:muxHeader])
			}
			n := uint64(muxHeader)
			if rest[1] == muxData {
				n += uint64(length)
			}
			if n > uint64(len(rest)) {
				break
			}
			rest = rest[n:]
		}
	})
}
