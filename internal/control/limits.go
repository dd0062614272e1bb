package control

import (
	"time"

	"github.com/space-platform/space/internal/sandbox"
)

// Defaults fill what a request leaves out. A zero field takes the value in
// brackets.
type Defaults struct {
	Template    string            // [base:latest]
	Accept      []sandbox.Class   // [microvm, userkernel]
	Resources   sandbox.Resources // [1 CPU, 512 MiB, 2 GiB disk, 1024 processes]
	Timeout     time.Duration     // [5 min]
	OnTimeout   sandbox.Action    // [delete]
	OnIdle      sandbox.Action    // [pause]
	MaxLifetime time.Duration     // [24 h]
}

// Limits bound what a request may ask for. A zero field takes the value in brackets.
type Limits struct {
	MinResources, MaxResources sandbox.Resources // [50 mCPU, 32 MiB, 16 MiB, 16] [64 CPU, 256 GiB, 1 TiB, 1 Mi]
	MinTimeout                 time.Duration     // [1 s]
	MaxLifetime                time.Duration     // [30 days]
	MinIdle                    time.Duration     // [1 s]
	MaxSandboxes               int               // living ones per tenant [1000]
	MaxMetadata                int               // pairs [64]
	MaxMetadataBytes           int               // of all keys and values [16 KiB]
	MaxEnv                     int               // variables [512]
	MaxEnvBytes                int               // of all names and values [128 KiB]
	MaxWait                    time.Duration     // of one request for an operation [60 s]
	TransitionWait             time.Duration     // of a session for its machine [30 s]
	// OperationTimeout is when an operation ends as failed at the latest [2 min].
	OperationTimeout time.Duration
	MaxPage          int // rows per page [1000]
}

// Tuning is the pace of the reconciler. A zero field takes the value in brackets.
type Tuning struct {
	Workers    int           // sandboxes worked on at once [64]
	Queue      int           // triggers kept beside the periodic pass [4096]
	Period     time.Duration // of the periodic pass [2 s]
	Sweep      time.Duration // of the walk over all sandboxes and the node's list [60 s]
	PurgeEvery time.Duration // [10 min]
	Keep       time.Duration // of tombstones, final operations, idempotency rows [48 h]
	AwaitSlice time.Duration // one wait for the node [10 s]
	CallLimit  time.Duration // of other node calls [10 s]
	Backoff    time.Duration // first pause after a failed pass of one sandbox; doubles to 30 s [250 ms]
}

func or[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func orResources(v *sandbox.Resources, d sandbox.Resources) {
	or(&v.MilliCPU, d.MilliCPU)
	or(&v.MemoryBytes, d.MemoryBytes)
	or(&v.DiskBytes, d.DiskBytes)
	or(&v.MaxProcesses, d.MaxProcesses)
}

const mib = int64(1) << 20

func (d Defaults) filled() Defaults {
	or(&d.Template, "base:latest")
	if len(d.Accept) == 0 {
		d.Accept = []sandbox.Class{sandbox.ClassMicroVM, sandbox.ClassUserKernel}
	}
	orResources(&d.Resources, sandbox.Resources{MilliCPU: 1000, MemoryBytes: 512 * mib, DiskBytes: 2048 * mib, MaxProcesses: 1024})
	or(&d.Timeout, 5*time.Minute)
	or(&d.OnTimeout, sandbox.ActionDelete)
	or(&d.OnIdle, sandbox.ActionPause)
	or(&d.MaxLifetime, 24*time.Hour)
	return d
}

func (l Limits) filled() Limits {
	orResources(&l.MinResources, sandbox.Resources{MilliCPU: 50, MemoryBytes: 32 * mib, DiskBytes: 16 * mib, MaxProcesses: 16})
	orResources(&l.MaxResources, sandbox.Resources{MilliCPU: 64_000, MemoryBytes: 256 << 30, DiskBytes: 1 << 40, MaxProcesses: 1 << 20})
	or(&l.MinTimeout, time.Second)
	or(&l.MaxLifetime, 30*24*time.Hour)
	or(&l.MinIdle, time.Second)
	or(&l.MaxSandboxes, 1000)
	or(&l.MaxMetadata, 64)
	or(&l.MaxMetadataBytes, 16<<10)
	or(&l.MaxEnv, 512)
	or(&l.MaxEnvBytes, 128<<10)
	or(&l.MaxWait, 60*time.Second)
	or(&l.TransitionWait, 30*time.Second)
	or(&l.OperationTimeout, 2*time.Minute)
	or(&l.MaxPage, 1000)
	return l
}

func (t Tuning) filled() Tuning {
	or(&t.Workers, 64)
	or(&t.Queue, 4096)
	or(&t.Period, 2*time.Second)
	or(&t.Sweep, time.Minute)
	or(&t.PurgeEvery, 10*time.Minute)
	or(&t.Keep, 48*time.Hour)
	or(&t.AwaitSlice, 10*time.Second)
	or(&t.CallLimit, 10*time.Second)
	or(&t.Backoff, 250*time.Millisecond)
	return t
}
