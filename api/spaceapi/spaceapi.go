// Package spaceapi is the native API of SPACE in Go types: the JSON bodies of
// every request and answer. The server derives the OpenAPI document from them
// and the Go client speaks them, so that the two cannot differ.
//
// Conventions. Times are RFC 3339 in UTC. Durations are whole seconds, sizes
// whole MiB where the name says _mib, else bytes. Unknown request fields are
// refused. A field that is absent is not the same as an empty one only where
// its type is a pointer.
package spaceapi

import "time"

// Headers of the API.
const (
	HeaderIdempotencyKey = "Idempotency-Key"
	HeaderRequestID      = "X-Request-Id"
	HeaderLastEventID    = "Last-Event-ID"
)

// Resources are the limits of one sandbox; zero fields take the server's defaults.
type Resources struct {
	CPUs         float64 `json:"cpus,omitempty" minimum:"0" maximum:"64" doc:"CPU quota, in CPUs"`
	MemoryMiB    int64   `json:"memory_mib,omitempty" minimum:"0" doc:"memory of the machine, in MiB"`
	DiskMiB      int64   `json:"disk_mib,omitempty" minimum:"0" doc:"size of the writable disk, in MiB"`
	MaxProcesses int64   `json:"max_processes,omitempty" minimum:"0" doc:"processes per user in the sandbox"`
}

// CreateSandbox asks for a sandbox.
type CreateSandbox struct {
	Name               string            `json:"name,omitempty" maxLength:"63" doc:"unique per tenant among the living; accepted wherever an id is"`
	Template           string            `json:"template,omitempty" maxLength:"200" doc:"name:tag or digest; default base:latest"`
	AcceptIsolation    []string          `json:"accept_isolation,omitempty" maxItems:"3" enum:"microvm,userkernel,emulated" doc:"isolation classes the caller accepts; default microvm and userkernel. emulated only when named"`
	Resources          Resources         `json:"resources,omitzero"`
	TimeoutSeconds     int64             `json:"timeout_seconds,omitempty" minimum:"0" doc:"life from now; default and maximum are the server's"`
	OnTimeout          string            `json:"on_timeout,omitempty" enum:"delete,stop,pause" doc:"what happens at the end of life; default delete"`
	IdleSeconds        int64             `json:"idle_seconds,omitempty" minimum:"0" doc:"time without activity before on_idle; 0 is never"`
	OnIdle             string            `json:"on_idle,omitempty" enum:"pause,stop,delete" doc:"default pause"`
	MaxLifetimeSeconds int64             `json:"max_lifetime_seconds,omitempty" minimum:"0" doc:"hard end, counted from creation"`
	Metadata           map[string]string `json:"metadata,omitempty" maxProperties:"64"`
	Env                map[string]string `json:"env,omitempty" maxProperties:"512" doc:"environment of every command; tenant data, sealed at rest"`
}

// PatchSandbox changes policy and metadata. Absent fields stay.
type PatchSandbox struct {
	Name           *string            `json:"name,omitempty" maxLength:"63"`
	Metadata       *map[string]string `json:"metadata,omitempty" doc:"replaces all metadata"`
	TimeoutSeconds *int64             `json:"timeout_seconds,omitempty" minimum:"1" doc:"new end of life, counted from now; never past deadline_at"`
	OnTimeout      *string            `json:"on_timeout,omitempty" enum:"delete,stop,pause"`
	IdleSeconds    *int64             `json:"idle_seconds,omitempty" minimum:"0"`
	OnIdle         *string            `json:"on_idle,omitempty" enum:"pause,stop,delete"`
}

// Sandbox is one sandbox as seen by its tenant.
type Sandbox struct {
	ID             string            `json:"id"`
	Name           string            `json:"name,omitempty"`
	Template       string            `json:"template"`
	TemplateDigest string            `json:"template_digest"`
	State          string            `json:"state" doc:"observed state" enum:"creating,running,pausing,paused,resuming,suspending,suspended,restoring,stopping,stopped,starting,deleting,deleted,failed,quarantined"`
	DesiredState   string            `json:"desired_state" enum:"running,paused,suspended,stopped,deleted"`
	Isolation      string            `json:"isolation,omitempty" enum:"microvm,userkernel,emulated" doc:"isolation class, pinned by the first start"`
	Runtime        string            `json:"runtime,omitempty"`
	Generation     uint64            `json:"generation"`
	Resources      Resources         `json:"resources"`
	OnTimeout      string            `json:"on_timeout"`
	IdleSeconds    int64             `json:"idle_seconds"`
	OnIdle         string            `json:"on_idle,omitempty"`
	Metadata       map[string]string `json:"metadata,omitempty"`
	CreatedAt      time.Time         `json:"created_at"`
	UpdatedAt      time.Time         `json:"updated_at"`
	ExpiresAt      time.Time         `json:"expires_at"`
	DeadlineAt     time.Time         `json:"deadline_at"`
	Problem        *Problem          `json:"problem,omitempty" doc:"why it is failed or quarantined, or what moved it"`
}

// Problem is an error body (RFC 9457) and the reason inside records.
type Problem struct {
	Type      string  `json:"type,omitempty" doc:"URI reference of the code's page"`
	Title     string  `json:"title,omitempty"`
	Status    int     `json:"status,omitempty"`
	Code      string  `json:"code" doc:"stable, listed in docs/errors.md"`
	Detail    string  `json:"detail" doc:"what happened"`
	Cause     string  `json:"cause,omitempty" doc:"why"`
	Remedy    string  `json:"remedy,omitempty" doc:"what to do"`
	Retryable bool    `json:"retryable"`
	RequestID string  `json:"request_id,omitempty"`
	Expected  *uint64 `json:"expected,omitempty" doc:"for stdin_offset_ahead: the accepted offset"`
}

// Step is one stage of an operation.
type Step struct {
	Name      string    `json:"name"`
	StartedAt time.Time `json:"started_at"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
}

// Operation is the durable record of a life-cycle change.
type Operation struct {
	ID           string    `json:"id"`
	Kind         string    `json:"kind"`
	SandboxID    string    `json:"sandbox_id"`
	State        string    `json:"state" enum:"pending,running,succeeded,failed,cancelled"`
	Steps        []Step    `json:"steps,omitempty"`
	WaitingFor   string    `json:"waiting_for,omitempty"`
	CreatedAt    time.Time `json:"created_at"`
	UpdatedAt    time.Time `json:"updated_at"`
	DeadlineAt   time.Time `json:"deadline_at"`
	RetrySafe    bool      `json:"retry_safe"`
	SupersededBy string    `json:"superseded_by,omitempty"`
	Error        *Problem  `json:"error,omitempty"`
}

// Mutation answers every change of a sandbox.
type Mutation struct {
	Operation Operation `json:"operation"`
	Sandbox   Sandbox   `json:"sandbox"`
}

// List is one page.
type List[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next_cursor,omitempty" doc:"absent on the last page"`
}

// Size of a terminal.
type Size struct {
	Rows uint16 `json:"rows" minimum:"1"`
	Cols uint16 `json:"cols" minimum:"1"`
}

// Command is what to run: exactly one of args and shell.
type Command struct {
	Args           []string          `json:"args,omitempty" maxItems:"4096" doc:"argv, run without a shell"`
	Shell          string            `json:"shell,omitempty" maxLength:"524288" doc:"text for the shell"`
	User           string            `json:"user,omitempty" maxLength:"64" doc:"name or uid[:gid]; default the template's user"`
	Cwd            string            `json:"cwd,omitempty" maxLength:"4096"`
	Env            map[string]string `json:"env,omitempty" maxProperties:"4096" doc:"over the sandbox's environment"`
	TimeoutSeconds float64           `json:"timeout_seconds,omitempty" minimum:"0" doc:"time the machine may run it; 0 is no limit"`
}

// CreateSession asks for a command session; nothing runs until it is attached.
type CreateSession struct {
	Command
	Stdin           bool   `json:"stdin,omitempty" doc:"keep standard input open for the stdin call; else programs see its end at once"`
	PTY             *Size  `json:"pty,omitempty" doc:"run on a terminal of this size"`
	Overflow        string `json:"overflow,omitempty" enum:"block,drop" doc:"when the output window is full: block the process (default) or drop with a gap"`
	TokenTTLSeconds int64  `json:"token_ttl_seconds,omitempty" minimum:"0" maximum:"86400"`
}

// Exit is the true end of a command.
type Exit struct {
	Cause  string    `json:"cause" enum:"exited,signal,time_limit,out_of_memory,sandbox_lost,expired,start_failed"`
	Code   int       `json:"code" doc:"exit code; 128+n for signals; -1 when not known"`
	Signal string    `json:"signal,omitempty"`
	Reason string    `json:"reason,omitempty"`
	At     time.Time `json:"at"`
}

// Started is the data of a started event.
type Started struct {
	PID int       `json:"pid" doc:"inside the sandbox, as its guest daemon claims"`
	At  time.Time `json:"at"`
}

// Chunk is the data of stdout and stderr events.
type Chunk struct {
	B64 []byte `json:"b64"`
}

// Gap is the data of a gap event: output that is not here.
type Gap struct {
	Reason  string `json:"reason" doc:"why: window, overflow, erased, host_restarted, …"`
	Missing uint64 `json:"missing" doc:"bytes that are missing, at most; 0 when that is not known"`
}

// Ended is the data of an error event: the session is over without an exit of
// its process.
type Ended struct {
	Code    string `json:"code" doc:"sandbox_lost, session_expired, start_failed, …"`
	Message string `json:"message"`
	Exit    Exit   `json:"exit"`
}

// StdinReply answers stdin and close-stdin.
type StdinReply struct {
	Accepted uint64 `json:"accepted" doc:"bytes accepted in all: send the next from here"`
	Closed   bool   `json:"closed" doc:"the process takes no more"`
}

// Ticket opens one WebSocket, for browsers, which cannot send headers there.
type Ticket struct {
	Ticket    string    `json:"ticket"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Signal asks for a signal to a session's process group, or to its whole tree.
type Signal struct {
	Signal string `json:"signal" doc:"TERM, SIGINT, 9, …"`
	Tree   bool   `json:"tree,omitempty"`
}

// Session is one command session.
type Session struct {
	ID          string    `json:"id"`
	SandboxID   string    `json:"sandbox_id"`
	CreatedBy   string    `json:"created_by" doc:"key id; who reads another's output needs activity:read"`
	State       string    `json:"state" enum:"created,starting,running,exited,lost,expired"`
	Args        []string  `json:"args,omitempty"`
	Shell       string    `json:"shell,omitempty"`
	User        string    `json:"user,omitempty"`
	Cwd         string    `json:"cwd,omitempty"`
	PTY         bool      `json:"pty,omitempty"`
	Epoch       uint64    `json:"epoch"`
	CreatedAt   time.Time `json:"created_at"`
	StartedAt   time.Time `json:"started_at,omitzero"`
	PID         int       `json:"pid,omitempty"`
	Exit        *Exit     `json:"exit,omitempty"`
	FirstID     string    `json:"first_event_id,omitempty"`
	LastID      string    `json:"last_event_id,omitempty"`
	StdinOffset uint64    `json:"stdin_offset"`
}

// Attach is how to open a session's stream.
type Attach struct {
	URL       string    `json:"url" doc:"base of the session on the data plane; POST {url}/attach starts and streams"`
	Token     string    `json:"token" doc:"shown once; send it as a bearer token"`
	TokenID   string    `json:"token_id"`
	ExpiresAt time.Time `json:"expires_at"`
}

// SessionCreated answers CreateSession.
type SessionCreated struct {
	Session Session `json:"session"`
	Attach  Attach  `json:"attach"`
}

// Exec runs a command and waits for its whole result.
type Exec struct {
	Command
	StdinB64       []byte `json:"stdin_b64,omitempty" doc:"standard input, base64"`
	MaxOutputBytes int64  `json:"max_output_bytes,omitempty" minimum:"0" maximum:"16777216" doc:"bound of each of stdout and stderr in the answer; default 1 MiB"`
}

// Output is what one stream printed. Exactly one of Text and B64 is set; Text
// when the kept bytes are valid UTF-8 and not in large part control characters.
type Output struct {
	Text           *string `json:"text,omitempty"`
	B64            []byte  `json:"b64,omitempty"`
	TruncatedBytes uint64  `json:"truncated_bytes" doc:"printed but not in this answer"`
}

// ExecResult answers Exec.
type ExecResult struct {
	SessionID string `json:"session_id"`
	Exit      Exit   `json:"exit"`
	Stdout    Output `json:"stdout"`
	Stderr    Output `json:"stderr"`
	GapBytes  uint64 `json:"gap_bytes" doc:"lost before they could be collected; 0 unless overflow is drop"`
}

// MintToken asks for a data token of a sandbox.
type MintToken struct {
	Scopes     []string `json:"scopes" minItems:"1" maxItems:"4" enum:"files:r,files:rw,exec,port"`
	TTLSeconds int64    `json:"ttl_seconds,omitempty" minimum:"0" maximum:"86400"`
}

// Token is a data-plane credential, shown once.
type Token struct {
	ID        string    `json:"id"`
	Token     string    `json:"token"`
	Scopes    []string  `json:"scopes,omitempty"`
	ExpiresAt time.Time `json:"expires_at"`
	URL       string    `json:"url" doc:"base of the data plane"`
}

// MintKey asks for an API key; it cannot be wider than the caller's.
type MintKey struct {
	Name       string   `json:"name" minLength:"1" maxLength:"100"`
	Scopes     []string `json:"scopes" minItems:"1"`
	TTLSeconds int64    `json:"ttl_seconds,omitempty" minimum:"0" doc:"0 is no expiry"`
}

// Key is an API key; Secret only in the answer that made it.
type Key struct {
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	Scopes     []string  `json:"scopes"`
	Secret     string    `json:"secret,omitempty"`
	CreatedAt  time.Time `json:"created_at"`
	CreatedBy  string    `json:"created_by,omitempty"`
	ExpiresAt  time.Time `json:"expires_at,omitzero"`
	RevokedAt  time.Time `json:"revoked_at,omitzero"`
	LastUsedAt time.Time `json:"last_used_at,omitzero"`
}

// Template is a starting file system on this installation.
type Template struct {
	Reference string            `json:"reference" doc:"name:tag"`
	Digest    string            `json:"digest"`
	SizeBytes int64             `json:"size_bytes"`
	User      string            `json:"user"`
	WorkDir   string            `json:"work_dir"`
	Env       map[string]string `json:"env,omitempty"`
	BuiltAt   time.Time         `json:"built_at"`
}

// Stats of one sandbox as the host measures them.
type Stats struct {
	CPUSeconds  float64 `json:"cpu_seconds"`
	MemoryBytes uint64  `json:"memory_bytes"`
	MemoryPeak  uint64  `json:"memory_peak_bytes"`
	DiskBytes   uint64  `json:"disk_bytes"`
	Processes   uint64  `json:"processes"`
}

// Node is what an operator sees of a node.
type Node struct {
	Name         string    `json:"name"`
	Runtime      string    `json:"runtime"`
	Isolation    string    `json:"isolation" enum:"microvm,userkernel,emulated"`
	Total        Resources `json:"total"`
	Used         Resources `json:"used"`
	Sandboxes    int       `json:"sandboxes"`
	MaxSandboxes int       `json:"max_sandboxes"`
}

// AuditRecord is one chained audit entry.
type AuditRecord struct {
	Chain   string            `json:"chain"`
	Seq     uint64            `json:"seq"`
	At      time.Time         `json:"at"`
	Actor   string            `json:"actor"`
	Action  string            `json:"action"`
	Target  string            `json:"target"`
	Request string            `json:"request,omitempty"`
	Detail  map[string]string `json:"detail,omitempty"`
	Hash    string            `json:"hash"`
}

// Health answers the health check.
type Health struct {
	Status  string            `json:"status" enum:"ok,degraded"`
	Version string            `json:"version"`
	Checks  map[string]string `json:"checks,omitempty"`
}

// Names of the data plane's event types.
const (
	EventStarted   = "started"
	EventStdout    = "stdout"
	EventStderr    = "stderr"
	EventGap       = "gap"
	EventRewound   = "rewound"
	EventSuspended = "suspended"
	EventExit      = "exit"
	EventError     = "error"
)
