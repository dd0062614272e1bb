// Package runtime is the contract between the node and whatever makes
// machines: gVisor, QEMU, Firecracker, or the fake of the tests.
//
// # Words
//
// A machine is one isolated Linux machine with a writable disk over a
// read-only template. It is named by the id of its sandbox. A driver keeps all
// that it needs to find a machine again on the host, so that Adopt and List
// work after our processes were killed at any instruction and after a reboot.
//
// # Life of a machine
//
//		         Create            Start             Pause
//		absent ─────────► created ───────► running ─────────► paused
//		   ▲                 ▲   ◄───────   │  ▲    Resume      │
//		   │                 │     Stop     │  └────────────────┘
//		   │ Destroy         │              ▼ dies by itself
//		   └── any ──        └────────── dead (files kept; Start or Stop work)
//
//	  - Create makes disk, closed network namespace (loopback only), limits and
//	    channel, all or nothing; nothing of the guest runs yet.
//	  - Start is a cold boot. When it returns the machine executes; that the guest
//	    daemon answers is learned by Dial and the guest protocol, not promised here.
//	  - Stop powers off: memory is lost, every file the guest was told is written
//	    is kept. It succeeds on a machine that is dead or created.
//	  - Destroy removes everything: processes, disk, mounts, loop devices, cgroups,
//	    namespaces, sockets. It works from any condition, also a half-made one, and
//	    on an id nobody knows.
//
// # Guarantees every driver gives (runtimetest proves them)
//
//  1. Every method is idempotent, and safe to repeat after the process that
//     called it was killed in the middle.
//  2. Methods of one machine may be called from several goroutines; the driver
//     serialises what must be. Methods of different machines do not wait for
//     each other, except for a bounded number of slots at Create.
//  3. A context that ends makes the call return soon with ctx.Err(); the machine
//     is then in some condition that the same call, or Destroy, can go on from.
//  4. An unknown id gives an error for which errors.Is(err, ErrNotFound).
//  5. Wait returns within 5 s of the machine's end, with the best cause the host
//     can prove. Nothing that the guest says is used for it.
//  6. What a guest does never reaches another machine or a host path.
//  7. After the calling process is killed, running machines go on running.
//
// # Channel
//
// The privileged half of a driver opens one exclusive transport to the guest
// daemon and hands its descriptor to the unprivileged node; everything above it
// (hello, resynchronisation, yamux, HTTP) is package channel and runs in the
// node, the same for every driver. The host is always the multiplexer's client
// and the guest its server, whoever dialled the transport; a guest may not open
// streams. Node death, Restore and Adopt end a transport; Pause and Resume do
// not, so the host keeps no keepalive of its own. See ADR 0002.
//
// # Not promised
//
// That a stream from Dial means a ready guest (only an answered hello does);
// half-close of a stream; that a call given up by its deadline did not happen
// (calls are idempotent by id or offset for that reason). The order of Wait against Stats or Dial errors; that a paused machine answers
// Dial (it fails with ErrPaused); anything about time inside the guest after
// Resume (a machine with its own kernel wakes with the old wall clock: the
// caller sets clock and identity through the guest daemon after every Start,
// Resume and Restore, whatever the driver).
package runtime

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/space-platform/space/internal/sandbox"
)

// Errors of the contract; drivers wrap them.
var (
	ErrNotFound     = errors.New("runtime: no such machine")
	ErrNotRunning   = errors.New("runtime: machine is not running")
	ErrPaused       = errors.New("runtime: machine is paused")
	ErrUnsupported  = errors.New("runtime: not supported by this driver")
	ErrNoTemplate   = errors.New("runtime: template is not on this host")
	ErrNoSpace      = errors.New("runtime: host has no room for this machine")
	ErrSpecMismatch = errors.New("runtime: machine exists with another spec")
)

// Spec is what a machine is made from. It holds no secret and no environment:
// those travel over the channel to the guest daemon.
type Spec struct {
	ID sandbox.ID `json:"id"`
	// TemplateDigest is "sha256:<hex>" of a template that is on the host.
	TemplateDigest string            `json:"template_digest"`
	Resources      sandbox.Resources `json:"resources"`
}

// Condition is what a machine is on the host.
type Condition string

// The conditions; see the drawing in the package comment.
const (
	Created Condition = "created"
	Running Condition = "running"
	Paused  Condition = "paused"
	Dead    Condition = "dead"
)

// Cause says why a machine is not running.
type Cause string

// The causes a host can prove.
const (
	CauseStopped     Cause = "stopped"       // by Stop
	CausePoweroff    Cause = "poweroff"      // PID 1 of the guest ended in order
	CauseOutOfMemory Cause = "out_of_memory" // the host's memory limit ended it
	CauseKilled      Cause = "killed"        // its process was killed by a signal from outside
	CauseCrashed     Cause = "crashed"       // it failed by itself
	CauseProcesses   Cause = "process_limit" // the hard limit of processes ended it
	CauseReboot      Cause = "host_reboot"   // the host restarted under it
	CauseUnknown     Cause = "unknown"
)

// Exit tells how a machine ended.
type Exit struct {
	Cause  Cause  `json:"cause"`
	Detail string `json:"detail,omitempty"` // one line, no stack, no host path
}

// Status is one machine as found on the host.
type Status struct {
	Spec      Spec      `json:"spec"`
	Condition Condition `json:"condition"`
	// BootID changes with every Start; "" before the first.
	BootID string `json:"boot_id"`
	// Exit is set when Condition is Dead.
	Exit *Exit `json:"exit,omitempty"`
}

// Stats are host-side measurements; zero means not known.
type Stats struct {
	CPUNanos    uint64 `json:"cpu_nanos"`
	MemoryBytes uint64 `json:"memory_bytes"`
	MemoryPeak  uint64 `json:"memory_peak"`
	Processes   uint64 `json:"processes"`  // host tasks in the machine's cgroup
	DiskBytes   uint64 `json:"disk_bytes"` // allocated on the host
	OOMKills    uint64 `json:"oom_kills"`
}

// Capabilities tells what a driver can do, so that callers and tests ask
// instead of switching on names.
type Capabilities struct {
	Name  string        `json:"name"`
	Class sandbox.Class `json:"class"`
	// Digest identifies the runtime's own binary; part of the pool key.
	Digest string `json:"digest"`
	// CaptureFull and CaptureDisk say which Capture kinds work.
	CaptureFull bool `json:"capture_full"`
	CaptureDisk bool `json:"capture_disk"`
	// GuestOOM: a memory breach ends a process in the guest, not the machine.
	GuestOOM bool `json:"guest_oom"`
	// SurvivesCaller: machines outlive the process that made them (the fake's do not
	// outlive its World).
	SurvivesCaller bool `json:"survives_caller"`
	// OwnKernel: the guest has a kernel of its own, with clock and entropy to set.
	OwnKernel bool `json:"own_kernel"`
	// RealGuest: Dial reaches a guest daemon that runs real programs.
	RealGuest bool `json:"real_guest"`
}

// CaptureKind is what Capture persists.
type CaptureKind string

// The kinds.
const (
	CaptureFull CaptureKind = "full"
	CaptureDisk CaptureKind = "disk"
)

// Artifacts names the stored parts of a capture, opaque to callers.
type Artifacts struct {
	Kind CaptureKind `json:"kind"`
	Ref  string      `json:"ref"`
}

// Runtime makes and finds machines.
type Runtime interface {
	Capabilities() Capabilities
	// Create makes the machine of spec, or returns the one that exists with the
	// same spec. Errors: ErrNoTemplate, ErrNoSpace, ErrSpecMismatch.
	Create(ctx context.Context, spec Spec) (Machine, error)
	// Adopt finds a machine on the host, whatever its condition, also a half-made
	// one (condition Created; repeat Create or Destroy). Error: ErrNotFound.
	Adopt(ctx context.Context, id sandbox.ID) (Machine, error)
	// List tells every machine on the host, half-made ones included.
	List(ctx context.Context) ([]Status, error)
	// Restore makes a machine from a capture. Error: ErrUnsupported.
	Restore(ctx context.Context, from Artifacts, spec Spec) (Machine, error)
	// Destroy removes whatever there is of id; nil when there is nothing.
	Destroy(ctx context.Context, id sandbox.ID) error
}

// Machine is a handle; handles of the same id are interchangeable.
type Machine interface {
	ID() sandbox.ID
	Status(ctx context.Context) (Status, error)
	Start(ctx context.Context) error
	// Pause keeps the machine in memory, not scheduled. ErrNotRunning when it is not running.
	Pause(ctx context.Context) error
	// Resume undoes Pause. ErrNotRunning when the machine is not resident.
	Resume(ctx context.Context) error
	// Capture persists state. ErrUnsupported unless Capabilities says so.
	Capture(ctx context.Context, kind CaptureKind) (Artifacts, error)
	Stop(ctx context.Context) error
	Destroy(ctx context.Context) error
	// Dial opens a fresh byte stream to the guest daemon, waiting until ctx ends
	// for a guest that is booting or redialling. At once: ErrNotRunning, ErrPaused.
	// The far end is hostile. Streams of one machine share a bounded buffer each;
	// a reader that stops reading stalls only its own stream.
	Dial(ctx context.Context) (net.Conn, error)
	Stats(ctx context.Context) (Stats, error)
	// Wait blocks until the machine is neither running nor paused.
	Wait(ctx context.Context) (Exit, error)
}

// BootTimeout bounds how long callers wait for a guest daemon after Start.
const BootTimeout = 30 * time.Second
