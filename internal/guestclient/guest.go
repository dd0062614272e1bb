// Package guestclient is the host's typed client of the guest daemon.
//
// The daemon runs beside a hostile root. The client bounds everything it reads
// in bytes and in time, checks every answer against what was asked, and turns
// the guest's errors into internal/fault errors with codes of a closed list;
// whatever does not fit is the fault guest_protocol_error. It holds no
// connection between calls: a call never meets a stale one.
package guestclient

import (
	"context"
	"io"
	"time"

	"github.com/space-platform/space/api/guestapi"
)

// Guest is the daemon of one sandbox. Methods are safe for concurrent use, and
// safe to repeat after any error: Start is idempotent by id, Stdin by offset,
// the others by nature. A context that ends makes a call return soon with an
// error that wraps ctx.Err().
//
// Errors are *fault.Error. Codes: those of guestapi (start failures have class
// invalid, except process_limit and no_memory: exhausted), guest_unavailable
// (no connection, or it broke: retry), guest_protocol_error (the guest lies or is broken),
// guest_timeout (it did not answer in time).
type Guest interface {
	// Hello makes sure that a daemon of a version we speak answers, and which boot.
	Hello(ctx context.Context) (guestapi.HelloReply, error)
	Configure(ctx context.Context, c guestapi.Configure) error
	Start(ctx context.Context, s guestapi.Start) (guestapi.Process, error)
	Processes(ctx context.Context) ([]guestapi.Process, error)
	Process(ctx context.Context, id string) (guestapi.Process, error)
	// Output streams the process's output from offset from until its exit. The
	// stream ends when ctx does, or by Close, which must be called.
	Output(ctx context.Context, id string, from uint64) (Output, error)
	// Ack lets the daemon forget output below offset.
	Ack(ctx context.Context, id string, offset uint64) error
	// Stdin offers p, whose first byte is at offset. It answers how much is
	// accepted in all, which may be less than offered when the process does not
	// read: offer the rest again. It waits at most StdinWait (or until shortly
	// before ctx's deadline) for a full pipe. Ahead of the accepted offset it fails
	// with stdin_offset_ahead, Expected set, and the reply filled.
	Stdin(ctx context.Context, id string, offset uint64, p []byte) (guestapi.StdinReply, error)
	CloseStdin(ctx context.Context, id string) (guestapi.StdinReply, error)
	// Signal sends sig to the process's group, or to its whole tree.
	Signal(ctx context.Context, id, sig string, tree bool) error
	Resize(ctx context.Context, id string, size guestapi.Size) error
	// Forget drops an ended process; nil when the daemon knows none with this id.
	Forget(ctx context.Context, id string) error
	Stats(ctx context.Context) (guestapi.Stats, error)
	// GetFile opens a file with the rights of user ("" = the configured one).
	GetFile(ctx context.Context, path, user string) (*File, error)
	// PutFile writes a whole file, atomically, with the rights of user. Mode 0
	// keeps the mode of the file that is there, or 0644. Size is the exact number
	// of bytes of r, or -1 when unknown.
	PutFile(ctx context.Context, path, user string, mode uint32, size int64, r io.Reader) error
	// Shutdown asks for an orderly end; the answer is a claim like any other.
	Shutdown(ctx context.Context) error
	// Close ends what is open.
	Close()
}

// Output is a stream of checked frames; guestapi.FrameReader tells what is
// checked. Not safe for concurrent use, except Close.
type Output interface {
	// Next waits for a frame; keepalives are returned too. io.EOF after the exit.
	Next() (guestapi.Frame, error)
	Close() error
}

// File is an open download.
type File struct {
	io.ReadCloser
	// Size in bytes; -1 when the guest does not know it (files of /proc).
	// Reading ends with an error, not io.EOF, when fewer bytes arrive.
	Size    int64
	Mode    uint32 // permission bits
	ModTime time.Time
}

// StdinWait is how long Stdin waits for a process that does not read.
const StdinWait = 5 * time.Second
