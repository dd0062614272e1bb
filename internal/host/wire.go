// Package host is the host room: the small process with root's rights that makes
// machines, and its client, which is a runtime.Runtime for the processes without.
//
// # Protocol
//
// A SOCK_SEQPACKET socket, one connection for one call: the peer sends one
// message, the room answers with one or more and closes. Messages are JSON of
// at most MaxMessage bytes; a field the room does not know is refused. Closing
// the connection cancels the call. All calls are idempotent, so a client repeats
// one whose answer it did not get.
//
// # What a peer can say
//
// The kernel tells the peer's uid. A request holds an operation's name, a
// sandbox id, sizes within the room's bounds, a template's digest or name, the
// number and hash of an audit record to sign, once and never a lower one. There is no field for a path, an argument list, a document,
// an environment or a rule, so nothing of that kind can be smuggled in.
// Descriptors sent by a peer are never received.
//
// # What a peer can do to others
//
// Every call has a goroutine and a connection of its own; silence and overlong
// messages end it; the number of connections is bounded; writes have deadlines.
package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
)

// Version is of the protocol; the room refuses another one.
const Version = 1

// MaxMessage bounds a message in both directions, in bytes.
const MaxMessage = 64 << 10

// op names an operation.
type op string

const (
	opHello     op = "hello"     // → hello
	opCreate    op = "create"    // id, template, resources → status
	opStart     op = "start"     // id → status
	opPause     op = "pause"     // id
	opResume    op = "resume"    // id
	opStop      op = "stop"      // id
	opDestroy   op = "destroy"   // id
	opStatus    op = "status"    // id → status
	opList      op = "list"      // → status, many times
	opStats     op = "stats"     // id → stats
	opWait      op = "wait"      // id → exit, when it ends
	opListen    op = "listen"    // id → a descriptor: the channel's listening socket
	opTemplates op = "templates" // → template, many times
	opResolve   op = "resolve"   // template → template
	opBuild     op = "build"     // template → progress, many times, then template
	opSign      op = "sign"      // chain, seq, hash → head
	opFacts     op = "facts"     // → facts
	opSweep     op = "sweep"     // → lines
)

// request is all that a peer can say.
type request struct {
	Version int    `json:"version"`
	Op      op     `json:"op"`
	ID      string `json:"id,omitempty"`
	// Template is a digest ("sha256:<hex>") or a name ("base:latest").
	Template  string             `json:"template,omitempty"`
	Resources *sandbox.Resources `json:"resources,omitempty"`
	// Chain, Seq and Hash (32 bytes) name the end of an audit chain to sign.
	Chain string `json:"chain,omitempty"`
	Seq   uint64 `json:"seq,omitempty"`
	Hash  []byte `json:"hash,omitempty"`
}

// reply is one message of an answer; the last one has Done.
type reply struct {
	Done  bool  `json:"done,omitempty"`
	Error *fail `json:"error,omitempty"`
	// Room is random for each run of the room: what was handed out by another
	// one may be stale.
	Room string `json:"room,omitempty"`

	Hello    *hello          `json:"hello,omitempty"`
	Status   *runtime.Status `json:"status,omitempty"`
	Stats    *runtime.Stats  `json:"stats,omitempty"`
	Exit     *runtime.Exit   `json:"exit,omitempty"`
	Template *template.Info  `json:"template,omitempty"`
	Progress string          `json:"progress,omitempty"`
	Head     *audit.Head     `json:"head,omitempty"`
	Facts    *Facts          `json:"facts,omitempty"`
	Lines    []string        `json:"lines,omitempty"`
}

type hello struct {
	Version      int                  `json:"version"`
	Capabilities runtime.Capabilities `json:"capabilities"`
	PublicKey    []byte               `json:"public_key"`
}

// Facts are what the host has.
type Facts struct {
	CPUs        int    `json:"cpus"`
	MemoryBytes int64  `json:"memory_bytes"`
	MemoryFree  int64  `json:"memory_free"` // what could be given to programs now
	DiskBytes   int64  `json:"disk_bytes"`  // of the file system of the machines' disks
	DiskFree    int64  `json:"disk_free"`
	Kernel      string `json:"kernel"`
	Machines    int    `json:"machines"`
	// MaxMachines and MaxResources are the room's bounds.
	MaxMachines  int               `json:"max_machines"`
	MaxResources sandbox.Resources `json:"max_resources"`
}

// fail is an error on the wire.
type fail struct {
	Code string `json:"code"`
	Text string `json:"text"`
}

// Errors of the room itself.
var (
	// ErrRefused: the room does not do such a thing for this peer.
	ErrRefused = errors.New("host: refused")
	// ErrAway: the room does not answer; repeat later.
	ErrAway = errors.New("host: the host room is away")
	// ErrBusy: the room has as many calls as it takes at once; repeat later.
	ErrBusy = errors.New("host: the host room is busy")
)

// errorCodes maps the errors that callers ask for with errors.Is, both ways.
var errorCodes = []struct {
	code string
	err  error
}{
	{"not_found", runtime.ErrNotFound},
	{"not_running", runtime.ErrNotRunning},
	{"paused", runtime.ErrPaused},
	{"unsupported", runtime.ErrUnsupported},
	{"no_template", runtime.ErrNoTemplate},
	{"no_space", runtime.ErrNoSpace},
	{"spec_mismatch", runtime.ErrSpecMismatch},
	{"template_not_found", template.ErrNotFound},
	{"template_invalid", template.ErrInvalid},
	{"template_corrupt", template.ErrCorrupt},
	{"template_host", template.ErrHost},
	{"signed", audit.ErrSigned},
	{"refused", ErrRefused},
	{"busy", ErrBusy},
	{"canceled", context.Canceled},
	{"deadline", context.DeadlineExceeded},
}

const maxErrorText = 2000

func toWire(err error) *fail {
	text := err.Error()
	if len(text) > maxErrorText {
		text = text[:maxErrorText]
	}
	for _, c := range errorCodes {
		if errors.Is(err, c.err) {
			return &fail{c.code, strings.ToValidUTF8(text, "?")}
		}
	}
	return &fail{"internal", strings.ToValidUTF8(text, "?")}
}

// remote is an error of the room: its text, and what it is.
type remote struct {
	text string
	is   error
}

func (r *remote) Error() string { return r.text }
func (r *remote) Unwrap() error { return r.is }

func fromWire(f *fail) error {
	for _, c := range errorCodes {
		if c.code == f.Code {
			return &remote{f.Text, c.err}
		}
	}
	return &remote{"host: " + f.Text, nil}
}

// parse reads a request strictly: one JSON value, no unknown field, nothing after it.
func parse(b []byte) (request, error) {
	var q request
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&q); err != nil {
		return request{}, fmt.Errorf("%w: bad request: %w", ErrRefused, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return request{}, fmt.Errorf("%w: bad request: something follows it", ErrRefused)
	}
	if q.Version != Version {
		return request{}, fmt.Errorf("%w: the room speaks version %d, the peer %d", ErrRefused, Version, q.Version)
	}
	return q, nil
}
