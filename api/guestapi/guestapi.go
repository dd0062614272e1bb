// Package guestapi is the contract between the host and the guest daemon:
// message types, paths, limits and the output frame. It imports nothing of
// ours and is compiled into both ends.
//
// # Transport
//
// HTTP/1.1 over byte streams that the channel gives (yamux streams where the
// channel is a single stream). The guest daemon is the HTTP server. Unary
// calls carry JSON; bulk data (output, stdin, files) are plain bodies. Why not
// Connect and protobuf: with them the daemon does not fit 8 MiB (ADR 0003).
//
// # Trust
//
// The daemon runs beside a hostile root. Everything it says is a claim: the
// host bounds every length with the constants here, refuses unknown frame
// types, never uses a path or an id from the guest, and takes the sandbox from
// the connection, never from a frame.
//
// # Versions
//
// Hello carries the protocol version of both ends. The host speaks Version and
// Version-1; fields are only ever added.
package guestapi

import "time"

// Version is the protocol version of this source.
const Version = 1

// Limits that both ends enforce.
const (
	MaxMessage      = 1 << 20   // bytes of one JSON body
	MaxList         = 4 << 20   // bytes of the list of processes, the one larger body
	MaxFramePayload = 64 << 10  // bytes of payload of one output frame
	MaxStdinChunk   = 1 << 20   // bytes of one stdin call
	DefaultWindow   = 512 << 10 // bytes of unacknowledged output the guest keeps for a process
	MaxWindow       = 4 << 20
	MaxProcesses    = 4096 // processes (sessions) known to one daemon at once
	MaxArgs         = 4096
	MaxEnv          = 4096
)

// Paths, relative to the daemon's root. {id} is a session id.
const (
	PathHello      = "/v1/hello"                      // POST Hello → HelloReply
	PathConfigure  = "/v1/configure"                  // POST Configure → {}
	PathProcesses  = "/v1/processes"                  // POST Start → Process; GET → ProcessList
	PathProcess    = "/v1/processes/{id}"             // GET → Process; DELETE forgets an ended one
	PathOutput     = "/v1/processes/{id}/output"      // GET ?from=N → frames until exit
	PathAck        = "/v1/processes/{id}/ack"         // POST Ack → {}
	PathStdin      = "/v1/processes/{id}/stdin"       // POST ?offset=N&wait=5s raw body → StdinReply
	PathCloseStdin = "/v1/processes/{id}/close-stdin" // POST → StdinReply
	PathSignal     = "/v1/processes/{id}/signal"      // POST Signal → {}
	PathResize     = "/v1/processes/{id}/resize"      // POST Size → {}
	PathStats      = "/v1/stats"                      // GET → Stats
	PathFiles      = "/v1/files"                      // GET|PUT ?path=&user=&mode= plain body
	PathShutdown   = "/v1/shutdown"                   // POST → {} : sync and power off
)

// Hello opens a relation. Nonce is echoed, so that a stale stream is noticed.
type Hello struct {
	Version int    `json:"version"`
	Nonce   string `json:"nonce"`
}

// HelloReply tells who answers. BootEpoch is random per boot of the daemon: a
// host that finds another one knows that every process it knew is gone.
type HelloReply struct {
	Version   int    `json:"version"`
	Nonce     string `json:"nonce"`
	BootEpoch string `json:"boot_epoch"`
	Daemon    string `json:"daemon"` // build version, for logs
	PID       int    `json:"pid"`
}

// Configure binds identity late: after every start, resume and restore.
type Configure struct {
	SandboxID string            `json:"sandbox_id"`
	Hostname  string            `json:"hostname"`
	Now       time.Time         `json:"now"`     // wall clock of the host; set when it differs by more than 100 ms and the guest may
	Entropy   []byte            `json:"entropy"` // mixed into the kernel's pool where there is one
	Env       map[string]string `json:"env"`     // sandbox-wide environment, below each process's own
	User      string            `json:"user"`    // default user of processes
	WorkDir   string            `json:"work_dir"`
}

// Start starts a process. It is idempotent by ID: a second Start with the same
// ID answers the process that exists and starts nothing, also long after it
// ended (until it was forgotten).
type Start struct {
	ID string `json:"id"`
	// Args is the argv; Shell, when set instead, is run as sh -c through the
	// user's... /bin/sh (bash -c where /bin/bash exists). Exactly one is set.
	Args  []string          `json:"args,omitempty"`
	Shell string            `json:"shell,omitempty"`
	User  string            `json:"user,omitempty"` // name or uid[:gid]; "" = Configure.User
	Cwd   string            `json:"cwd,omitempty"`  // "" = Configure.WorkDir, else the user's home
	Env   map[string]string `json:"env,omitempty"`
	// Stdin: false = /dev/null (programs see end of input at once).
	Stdin bool  `json:"stdin,omitempty"`
	PTY   *Size `json:"pty,omitempty"`
	// TimeLimit counts time the machine runs; 0 = none. The daemon enforces it
	// too: TERM to the tree, KILL after Grace.
	TimeLimit time.Duration `json:"time_limit,omitempty"`
	Grace     time.Duration `json:"grace,omitempty"` // default 2 s
	// Window is the bytes of output kept until acknowledged; 0 = DefaultWindow.
	Window int `json:"window,omitempty"`
	// Overflow "block" (default): the process waits when the window is full.
	// "drop": the oldest bytes go, and the stream says so with a gap frame.
	Overflow string `json:"overflow,omitempty"`
}

// Size of a terminal, in cells.
type Size struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// ProcessState of a process.
type ProcessState string

// The states.
const (
	ProcessRunning ProcessState = "running"
	ProcessExited  ProcessState = "exited"
)

// Process describes one started process.
type Process struct {
	ID        string       `json:"id"`
	PID       int          `json:"pid"`
	State     ProcessState `json:"state"`
	StartedAt time.Time    `json:"started_at"`
	// Base is the first offset still held, Next the offset after the last byte read.
	Base        uint64      `json:"base"`
	Next        uint64      `json:"next"`
	StdinOffset uint64      `json:"stdin_offset"` // bytes of stdin accepted
	StdinClosed bool        `json:"stdin_closed"`
	Exit        *ExitStatus `json:"exit,omitempty"`
}

// ProcessList is what GET of PathProcesses answers.
type ProcessList struct {
	Processes []Process `json:"processes"`
}

// ExitCause says how a process ended.
type ExitCause string

// The causes the daemon can claim.
const (
	ExitExited    ExitCause = "exited"     // Code is its own
	ExitSignal    ExitCause = "signal"     // Signal is set, Code is 128+n
	ExitTimeLimit ExitCause = "time_limit" // ended by its own limit; Code is 128+n or its own
)

// ExitStatus is how a process ended.
type ExitStatus struct {
	Cause  ExitCause `json:"cause"`
	Code   int       `json:"code"`
	Signal string    `json:"signal,omitempty"` // "SIGKILL"
	// Core use and time, as claims.
	UserNanos   int64     `json:"user_nanos,omitempty"`
	SystemNanos int64     `json:"system_nanos,omitempty"`
	MaxRSSBytes int64     `json:"max_rss_bytes,omitempty"`
	At          time.Time `json:"at"`
}

// Ack releases output below Offset.
type Ack struct {
	Offset uint64 `json:"offset"`
}

// StdinReply tells how much stdin is accepted in all. A call whose offset lies
// below is skipped to there; one that lies ahead is refused with 409 and this
// body (beside Error's fields). A process that does not read makes the call
// answer after the query's wait (default 5 s, at most 60 s) with what was
// accepted until then. Closed: the process reads no more (or never had stdin).
type StdinReply struct {
	Accepted uint64 `json:"accepted"`
	Closed   bool   `json:"closed"`
}

// Signal sends a signal to the process's whole tree (Tree) or its process
// group leader's group.
type Signal struct {
	Signal string `json:"signal"` // name with or without SIG, or number
	Tree   bool   `json:"tree"`
}

// Stats are claims about the inside.
type Stats struct {
	MemoryTotal     uint64 `json:"memory_total"`
	MemoryAvailable uint64 `json:"memory_available"`
	DiskTotal       uint64 `json:"disk_total"`
	DiskFree        uint64 `json:"disk_free"`
	Processes       int    `json:"processes"`
	CPUs            int    `json:"cpus"`
	DaemonRSS       uint64 `json:"daemon_rss"`
}

// Error is the JSON body of every status >= 400.
type Error struct {
	Code    string `json:"code"` // e.g. start_failed, no_such_process, stdin_offset_ahead, no_such_user, bad_cwd, not_executable, no_space, permission_denied, not_found, process_limit
	Message string `json:"message"`
}

// Headers of a file's download, besides Content-Length (absent when the size is
// not known, as for files of /proc).
const (
	HeaderMode    = "Space-Mode"     // permission bits, octal
	HeaderModTime = "Space-Mod-Time" // nanoseconds since 1970
)
