package guestapi

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// FrameType is the first byte of an output frame.
type FrameType uint8

// The frame types; any other is a protocol error.
const (
	FrameStdout    FrameType = 1 // payload: bytes of standard output (a terminal has only this one)
	FrameStderr    FrameType = 2 // payload: bytes of standard error
	FrameGap       FrameType = 3 // payload: 8 bytes, big endian, count of missing bytes from Offset on
	FrameExit      FrameType = 4 // payload: JSON ExitStatus; Offset is the total; nothing follows
	FrameKeepalive FrameType = 5 // no payload; Offset is where the stream stands
)

// String names the type for logs.
func (t FrameType) String() string {
	switch t {
	case FrameStdout:
		return "stdout"
	case FrameStderr:
		return "stderr"
	case FrameGap:
		return "gap"
	case FrameExit:
		return "exit"
	case FrameKeepalive:
		return "keepalive"
	}
	return fmt.Sprintf("frame(%d)", uint8(t))
}

// FrameHeader is the length of a frame without its payload.
const FrameHeader = 1 + 8 + 4

const (
	frameHeader = FrameHeader
	maxExit     = 4 << 10 // bytes of an exit frame's JSON
	maxCode     = 255
)

// ErrProtocol is wrapped by every error of a FrameReader that means that the
// far end does not keep to the protocol. A broken stream is io.ErrUnexpectedEOF
// or the transport's own error instead.
var ErrProtocol = errors.New("guestapi: protocol error")

// Frame is one decoded frame of an output stream.
type Frame struct {
	Type FrameType
	// Offset of the first byte of Payload in the process's combined output; for
	// a gap the first missing byte, for exit the total.
	Offset uint64
	// Payload of stdout and stderr; valid until the next call of Next.
	Payload []byte
	// Missing bytes of a gap.
	Missing uint64
	// Exit of an exit frame, validated.
	Exit *ExitStatus
}

// End is the offset after the frame.
func (f Frame) End() uint64 { return f.Offset + uint64(len(f.Payload)) + f.Missing }

// FrameReader decodes an output stream strictly: known types, bounded lengths,
// offsets that join without hole or overlap, nothing after exit. It holds at
// most MaxFramePayload bytes. Not safe for concurrent use.
type FrameReader struct {
	r    io.Reader
	next uint64
	hdr  [frameHeader]byte
	buf  []byte
	err  error
}

// NewFrameReader reads the stream r that was asked for from offset from.
func NewFrameReader(r io.Reader, from uint64) *FrameReader {
	return &FrameReader{r: r, next: from}
}

// Offset is the offset after the last frame that Next returned.
func (r *FrameReader) Offset() uint64 { return r.next }

// Next returns the next frame. After the exit frame it returns io.EOF without
// reading on, so that what a hostile end sends later is never seen. Errors
// stay: io.ErrUnexpectedEOF when the stream broke off before the exit,
// ErrProtocol (wrapped) when it is not well formed.
func (r *FrameReader) Next() (Frame, error) {
	if r.err != nil {
		return Frame{}, r.err
	}
	f, err := r.read()
	if err != nil {
		r.err = err
		return Frame{}, err
	}
	r.next = f.End()
	if f.Type == FrameExit {
		r.err = io.EOF
	}
	return f, nil
}

func (r *FrameReader) read() (Frame, error) {
	if _, err := io.ReadFull(r.r, r.hdr[:]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	f := Frame{Type: FrameType(r.hdr[0]), Offset: binary.BigEndian.Uint64(r.hdr[1:9])}
	n := binary.BigEndian.Uint32(r.hdr[9:13])
	var low, high uint32
	switch f.Type {
	case FrameStdout, FrameStderr:
		low, high = 1, MaxFramePayload
	case FrameGap:
		low, high = 8, 8
	case FrameExit:
		low, high = 2, maxExit
	case FrameKeepalive:
	default:
		return Frame{}, fmt.Errorf("%w: unknown frame type %d", ErrProtocol, uint8(f.Type))
	}
	if n < low || n > high {
		return Frame{}, fmt.Errorf("%w: %s frame of %d bytes", ErrProtocol, f.Type, n)
	}
	if f.Offset != r.next {
		return Frame{}, fmt.Errorf("%w: %s frame at offset %d where %d was due", ErrProtocol, f.Type, f.Offset, r.next)
	}
	p, err := r.payload(int(n))
	if err != nil {
		return Frame{}, err
	}
	switch f.Type {
	case FrameStdout, FrameStderr:
		f.Payload = p
	case FrameGap:
		f.Missing = binary.BigEndian.Uint64(p)
		if f.Missing == 0 {
			return Frame{}, fmt.Errorf("%w: empty gap", ErrProtocol)
		}
	case FrameExit:
		f.Exit = new(ExitStatus)
		if err := json.Unmarshal(p, f.Exit); err != nil {
			return Frame{}, fmt.Errorf("%w: exit is not JSON", ErrProtocol)
		}
		if err := f.Exit.Validate(); err != nil {
			return Frame{}, err
		}
	}
	// Offsets stay below 2^63, so that they fit signed columns and never wrap.
	if rest := uint64(math.MaxInt64) - min(f.Offset, math.MaxInt64); f.Missing+uint64(n) > rest || f.Missing > rest {
		return Frame{}, fmt.Errorf("%w: offset overflow", ErrProtocol)
	}
	return f, nil
}

// payload reads n bytes; the buffer grows with what has arrived, so that a
// claimed length alone costs nothing.
func (r *FrameReader) payload(n int) ([]byte, error) {
	for have := 0; have < n; {
		step := min(n-have, max(4<<10, have))
		if cap(r.buf) < have+step {
			grown := make([]byte, have+step)
			copy(grown, r.buf[:have])
			r.buf = grown
		}
		r.buf = r.buf[:cap(r.buf)]
		if _, err := io.ReadFull(r.r, r.buf[have:have+step]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		have += step
	}
	return r.buf[:n], nil
}

// Validate checks a claimed exit: a known cause, a code that a process can
// have, and for signals the matching name and 128+n. It wraps ErrProtocol.
func (e *ExitStatus) Validate() error {
	if e.Code < 0 || e.Code > maxCode {
		return fmt.Errorf("%w: exit code %d", ErrProtocol, e.Code)
	}
	if e.UserNanos < 0 || e.SystemNanos < 0 || e.MaxRSSBytes < 0 {
		return fmt.Errorf("%w: negative resource use", ErrProtocol)
	}
	switch e.Cause {
	case ExitExited:
		if e.Signal != "" {
			return fmt.Errorf("%w: an exit by itself with a signal", ErrProtocol)
		}
	case ExitSignal:
		if n := SignalNumber(e.Signal); n == 0 || e.Code != 128+n {
			return fmt.Errorf("%w: signal %.16q with code %d", ErrProtocol, e.Signal, e.Code)
		}
	case ExitTimeLimit:
		if e.Signal != "" && SignalNumber(e.Signal) == 0 {
			return fmt.Errorf("%w: signal %.16q", ErrProtocol, e.Signal)
		}
	default:
		return fmt.Errorf("%w: exit cause %.16q", ErrProtocol, string(e.Cause))
	}
	return nil
}

// FrameWriter encodes an output stream. Not safe for concurrent use. The
// caller keeps to the order that FrameReader checks.
type FrameWriter struct {
	w   io.Writer
	buf []byte
}

// NewFrameWriter writes frames to w, one Write call each.
func NewFrameWriter(w io.Writer) *FrameWriter { return &FrameWriter{w: w} }

// Data writes output; p has 1 to MaxFramePayload bytes.
func (w *FrameWriter) Data(t FrameType, offset uint64, p []byte) error {
	return w.Raw(t, offset, p)
}

// InPlace writes output without copying it: frame has FrameHeader bytes to
// overwrite, then the payload.
func (w *FrameWriter) InPlace(t FrameType, offset uint64, frame []byte) error {
	frame[0] = byte(t)
	binary.BigEndian.PutUint64(frame[1:], offset)
	binary.BigEndian.PutUint32(frame[9:], uint32(len(frame)-FrameHeader))
	_, err := w.w.Write(frame)
	return err
}

// Gap says that missing bytes from offset on are lost.
func (w *FrameWriter) Gap(offset, missing uint64) error {
	return w.Raw(FrameGap, offset, binary.BigEndian.AppendUint64(nil, missing))
}

// Keepalive says that the stream stands at offset.
func (w *FrameWriter) Keepalive(offset uint64) error { return w.Raw(FrameKeepalive, offset, nil) }

// Exit ends the stream at total bytes.
func (w *FrameWriter) Exit(total uint64, e ExitStatus) error {
	p, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("guestapi: exit: %w", err)
	}
	return w.Raw(FrameExit, total, p)
}

// Raw writes any frame unchecked (fixtures lie with it).
func (w *FrameWriter) Raw(t FrameType, offset uint64, p []byte) error {
	w.buf = append(w.buf[:0], byte(t))
	w.buf = binary.BigEndian.AppendUint64(w.buf, offset)
	w.buf = binary.BigEndian.AppendUint32(w.buf, uint32(len(p)))
	w.buf = append(w.buf, p...)
	_, err := w.w.Write(w.buf)
	return err
}
