package session

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/session/journal"
)

// FramesType is the content type of the binary-framed form of a stream, over
// plain HTTP (Accept: application/vnd.space.frames) and in WebSocket messages.
//
// A frame is, in big endian,
//
//	kind    1 byte   0 keepalive, 1 started, 2 stdout, 3 stderr, 4 gap, 5 rewound,
//	                 6 suspended, 7 exit, 8 error; WebSocket only: 9 accepted, 10 problem
//	epoch   8 bytes  together the event id "epoch.offset"; zero for kinds 0, 9
//	offset  8 bytes  and 10, which have none
//	length  4 bytes  of the payload, at most 64 KiB
//	payload          bytes of output for 2 and 3; JSON for the others, as in SSE
//
// A WebSocket message from the server holds one or more whole frames. One from
// the client holds one request: its kind and what belongs to it,
//
//	1 stdin        offset 8 bytes (2^64-1: where the accepted input ends), then the bytes
//	2 close-stdin
//	3 signal       the name; a "+" before it sends it to the whole tree
//	4 resize       rows 2 bytes, columns 2 bytes
//
// Requests are done in order. Stdin and close-stdin are answered by a frame
// "accepted" ({"accepted":N,"closed":bool}), a request that failed by a frame
// "problem" (a problem document); the stream goes on.
const FramesType = "application/vnd.space.frames"

const (
	frameKeepalive  = 0
	frameAccepted   = 9
	frameProblem    = 10
	frameHeaderSize = 1 + 8 + 8 + 4
)

// Requests of a WebSocket client.
const (
	requestStdin      = 1
	requestCloseStdin = 2
	requestSignal     = 3
	requestResize     = 4
)

func appendFrame(b []byte, kind byte, id journal.ID, payload []byte) []byte {
	b = append(b, kind)
	b = binary.BigEndian.AppendUint64(b, id.Epoch)
	b = binary.BigEndian.AppendUint64(b, id.Offset)
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// Frame is one decoded frame of the binary form.
type Frame struct {
	Kind    byte
	ID      journal.ID
	Payload []byte // valid until the next call of Next
}

// FrameReader decodes the binary form; for clients and tests.
type FrameReader struct {
	r   io.Reader
	buf []byte
	hdr [frameHeaderSize]byte
}

// NewFrameReader reads frames from r.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: r} }

// Next gives the next frame; io.EOF between two frames.
func (r *FrameReader) Next() (Frame, error) {
	if _, err := io.ReadFull(r.r, r.hdr[:]); err != nil {
		return Frame{}, err
	}
	n := binary.BigEndian.Uint32(r.hdr[17:])
	if n > journal.MaxPayload {
		return Frame{}, fmt.Errorf("session: frame of %d bytes", n)
	}
	if cap(r.buf) < int(n) {
		r.buf = make([]byte, n)
	}
	if _, err := io.ReadFull(r.r, r.buf[:n]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, err
	}
	return Frame{Kind: r.hdr[0], ID: journal.ID{Epoch: binary.BigEndian.Uint64(r.hdr[1:]), Offset: binary.BigEndian.Uint64(r.hdr[9:])}, Payload: r.buf[:n]}, nil
}

// encoder turns events into one of the two forms of a stream.
type encoder interface {
	event(b []byte, id journal.ID, ev journal.Event) []byte
	keepalive(b []byte) []byte
	// failure ends a stream that cannot go on, when it is not the session's end.
	failure(b []byte, e *fault.Error) []byte
}

type binaryEncoder struct{}

func (binaryEncoder) event(b []byte, id journal.ID, ev journal.Event) []byte {
	return appendFrame(b, byte(ev.Kind), id, ev.Data)
}
func (binaryEncoder) keepalive(b []byte) []byte {
	return appendFrame(b, frameKeepalive, journal.ID{}, nil)
}

func (binaryEncoder) failure(b []byte, e *fault.Error) []byte {
	return appendFrame(b, frameProblem, journal.ID{}, problemJSON(e))
}

// sseEncoder writes server-sent events. Data is one line of JSON, so whatever a
// program prints cannot end the event or begin another: output is
// {"b64":"…"}, whose alphabet has no line break.
type sseEncoder struct{}

func (sseEncoder) event(b []byte, id journal.ID, ev journal.Event) []byte {
	b = append(b, "id: "...)
	b = append(b, id.String()...)
	b = append(b, "\nevent: "...)
	b = append(b, ev.Kind.String()...)
	b = append(b, "\ndata: "...)
	if ev.Kind.Output() {
		b = append(b, `{"b64":"`...)
		b = base64.StdEncoding.AppendEncode(b, ev.Data)
		b = append(b, `"}`...)
	} else {
		b = append(b, ev.Data...) // encoded by us: one line
	}
	return append(b, "\n\n"...)
}

func (sseEncoder) keepalive(b []byte) []byte { return append(b, ": keepalive\n\n"...) }

// failure has no id: a client that reconnects goes on after its last event.
func (sseEncoder) failure(b []byte, e *fault.Error) []byte {
	b = append(b, "event: interrupted\ndata: "...)
	b = append(b, problemJSON(e)...)
	return append(b, "\n\n"...)
}
