// Package gvisor is the runtime driver that makes machines with gVisor's runsc.
// It runs as root, in the host room or in tests.
//
// # Parts of a machine
//
//   - DataDir/machines/<id>/machine.json: the record, written before any other part
//   - DataDir/machines/<id>/disk.img: the writable disk, ext4, as large as its limit
//   - RunDir/m/<id>/disk, root: the disk's mount, and the overlay over the template
//   - RunDir/netns/<id>: the network namespace, loopback only
//   - RunDir/m/<id>/channel/host.sock: where the guest daemon dials us
//   - RunDir/m/<id>/s, bundle: runsc's state and the OCI document
//   - <cgroup parent>/<id> in every hierarchy
//
// Everything under RunDir may vanish (a reboot); Start makes it again.
//
// # Locks
//
// One lock per id (Runtime.lock) is held by every call that changes a machine, for
// its whole length. Runtime.mu guards the map and the entries, is held for
// moments, and is taken after the lock of the id.
//
// # Trust
//
// Nothing the guest wrote is parsed here. The disk's structure is only ever
// written by the host's kernel. Of the sandbox process only its end is
// observed, through a pidfd, and its control group's counters.
package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/space-platform/space/internal/cgroup"
	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/disk"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// Templates gives the read-only file tree of a template.
type Templates interface {
	// Mount makes the tree of digest available and returns its directory. It is
	// called often and must be cheap when the tree is there. An unknown digest
	// gives template.ErrNotFound or runtime.ErrNoTemplate.
	Mount(ctx context.Context, digest string) (lowerDir string, err error)
}

// Config is what the driver needs. All paths are absolute.
type Config struct {
	// DataDir keeps records and disks over reboots.
	DataDir string
	// RunDir keeps mounts, sockets and state of running machines; at most 46
	// characters, best on a tmpfs.
	RunDir string
	// Runsc is the runtime's binary, RunscDigest its "sha256:<hex>".
	Runsc, RunscDigest string
	// GuestDaemon is the static binary that is PID 1 of every machine.
	GuestDaemon string
	Templates   Templates
	// CgroupParent is the name of the group that holds one group per machine.
	CgroupParent string
	// CgroupRoot is cgroup.DefaultRoot unless set.
	CgroupRoot string
	// BootIDFile tells which boot of the host this is; the kernel's file unless set.
	BootIDFile string
	// Creates bounds how many machines are made at the same time; 4 unless set.
	Creates int
	// Clock is the system's unless set.
	Clock clock.Clock
	// Logf gets what an operator should know and no call can report; may be nil.
	Logf func(format string, args ...any)
}

// Runtime implements runtime.Runtime.
type Runtime struct {
	conf   Config
	paths  paths
	groups *cgroup.Tree
	hostID string
	slots  chan struct{}
	// life ends with Close, and with it every call.
	life context.Context
	end  context.CancelFunc
	wg   sync.WaitGroup // of our goroutines and of calls

	mu      sync.Mutex
	entries map[sandbox.ID]*entry // guarded by mu
	locks   map[sandbox.ID]*lock  // guarded by mu
	closed  bool                  // guarded by mu
}

// entry is one known machine; its fields are guarded by Runtime.mu, and changed
// by holders of the id's lock or, for the end of a boot, by its watch.
type entry struct {
	rec      record
	watch    *watch // the running process; nil when there is none
	listener int    // socket of the channel; -1 when there is none
	acceptor *channel.Acceptor
}

var _ runtime.Runtime = (*Runtime)(nil)

// New finds the machines on this host and watches those that run. It starts
// and ends none. Close gives everything in this process back.
func New(conf Config) (*Runtime, error) {
	if conf.CgroupRoot == "" {
		conf.CgroupRoot = cgroup.DefaultRoot
	}
	if conf.BootIDFile == "" {
		conf.BootIDFile = "/proc/sys/kernel/random/boot_id"
	}
	if conf.Creates <= 0 {
		conf.Creates = 4
	}
	if conf.Clock == nil {
		conf.Clock = clock.System{}
	}
	if conf.Logf == nil {
		conf.Logf = func(string, ...any) {}
	}
	p := paths{data: conf.DataDir, run: conf.RunDir}
	if err := p.check(); err != nil {
		return nil, err
	}
	for _, f := range []string{conf.Runsc, conf.GuestDaemon} {
		if st, err := os.Stat(f); err != nil {
			return nil, fmt.Errorf("gvisor: %w", err)
		} else if !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			return nil, fmt.Errorf("gvisor: %s is not a program", f)
		}
	}
	if conf.Templates == nil {
		return nil, errors.New("gvisor: no templates")
	}
	for _, d := range []string{p.data, p.run, p.machines(), p.live(), p.namespaces(), p.shared()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("gvisor: %w", err)
		}
	}
	hostID, err := os.ReadFile(conf.BootIDFile)
	if err != nil {
		return nil, fmt.Errorf("gvisor: %w", err)
	}
	groups, err := cgroup.Open(conf.CgroupRoot, conf.CgroupParent)
	if err != nil {
		return nil, fmt.Errorf("gvisor: %w", err)
	}
	r := &Runtime{
		conf: conf, paths: p, groups: groups,
		hostID:  strings.TrimSpace(string(hostID)),
		slots:   make(chan struct{}, conf.Creates),
		entries: map[sandbox.ID]*entry{},
		locks:   map[sandbox.ID]*lock{},
	}
	r.life, r.end = context.WithCancel(context.Background())
	if err := r.find(); err != nil {
		_ = r.Close()
		return nil, err
	}
	r.wg.Add(1)
	go r.watchMemory()
	return r, nil
}

// Close ends the watching, the calls that are under way and the channels, and
// waits for them. Machines go on running.
func (r *Runtime) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	r.end()
	var acceptors []*channel.Acceptor
	for _, e := range r.entries {
		if e.watch != nil {
			e.watch.forget()
		}
		if a := e.closeChannel(); a != nil {
			acceptors = append(acceptors, a)
		}
	}
	r.mu.Unlock()
	for _, a := range acceptors {
		_ = a.Close()
	}
	r.wg.Wait()
	return nil
}

// Capabilities implements runtime.Runtime.
func (r *Runtime) Capabilities() runtime.Capabilities {
	return runtime.Capabilities{
		Name:           "gvisor",
		Class:          sandbox.ClassUserKernel,
		Digest:         r.conf.RunscDigest,
		SurvivesCaller: true,
		RealGuest:      true,
	}
}

var digestRE = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// Valid checks the form of a spec, not whether this host has room for it.
func Valid(spec runtime.Spec) error {
	if _, err := sandbox.ParseID(string(spec.ID)); err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	if !digestRE.MatchString(spec.TemplateDigest) {
		return fmt.Errorf("gvisor: bad digest of a template: %w", runtime.ErrNoTemplate)
	}
	switch s := spec.Resources; {
	case s.MilliCPU < 10, s.MilliCPU > 1_000_000:
		return fmt.Errorf("gvisor: %d thousandths of a CPU are not between 10 and 1000000", s.MilliCPU)
	case s.MemoryBytes < MinMemory, s.MemoryBytes > 1<<46:
		return fmt.Errorf("gvisor: %d bytes of memory are not between %d and 64 TiB", s.MemoryBytes, int64(MinMemory))
	case s.DiskBytes < disk.MinBytes, s.DiskBytes > 1<<44:
		return fmt.Errorf("gvisor: %d bytes of disk are not between %d and 16 TiB", s.DiskBytes, int64(disk.MinBytes))
	case s.MaxProcesses < 4, s.MaxProcesses > 1<<20:
		return fmt.Errorf("gvisor: %d processes are not between 4 and %d", s.MaxProcesses, 1<<20)
	}
	return nil
}

// MinMemory is the least memory a machine can have: the runtime itself needs
// about half of it.
const MinMemory = 48 << 20

// Create implements runtime.Runtime.
func (r *Runtime) Create(ctx context.Context, spec runtime.Spec) (runtime.Machine, error) {
	if err := Valid(spec); err != nil {
		return nil, err
	}
	ctx, leave, err := r.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	unlock, err := r.lock(ctx, spec.ID)
	if err != nil {
		return nil, err
	}
	defer unlock()
	rec, known := r.get(spec.ID)
	if known && rec.Removing {
		if err := r.destroy(ctx, spec.ID); err != nil {
			return nil, err
		}
		known = false
	}
	if known {
		if rec.Spec != spec {
			return nil, fmt.Errorf("%w: %s", runtime.ErrSpecMismatch, spec.ID)
		}
		if rec.Made {
			return machine{r, spec.ID}, nil
		}
	}
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err := r.make(ctx, spec); err != nil {
		if !known { // all or nothing
			if derr := r.destroy(context.WithoutCancel(ctx), spec.ID); derr != nil {
				r.conf.Logf("gvisor: undo of create %s: %v", spec.ID, derr)
			}
		}
		return nil, err
	}
	return machine{r, spec.ID}, nil
}

// Adopt implements runtime.Runtime.
func (r *Runtime) Adopt(_ context.Context, id sandbox.ID) (runtime.Machine, error) {
	if _, ok := r.get(id); !ok {
		return nil, notFound(id)
	}
	return machine{r, id}, nil
}

// List implements runtime.Runtime.
func (r *Runtime) List(context.Context) ([]runtime.Status, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]runtime.Status, 0, len(r.entries))
	for _, e := range r.entries {
		out = append(out, e.rec.status())
	}
	return out, nil
}

// Restore implements runtime.Runtime.
func (r *Runtime) Restore(context.Context, runtime.Artifacts, runtime.Spec) (runtime.Machine, error) {
	return nil, fmt.Errorf("%w: restore", runtime.ErrUnsupported)
}

// Destroy implements runtime.Runtime.
func (r *Runtime) Destroy(ctx context.Context, id sandbox.ID) error {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	ctx, leave, err := r.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	unlock, err := r.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	return r.destroy(ctx, id)
}

// find reads all records and watches what runs.
func (r *Runtime) find() error {
	dirs, err := os.ReadDir(r.paths.machines())
	if err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, d := range dirs {
		id, err := sandbox.ParseID(d.Name())
		if err != nil {
			continue // not ours
		}
		rec, err := r.paths.load(id)
		if errors.Is(err, fs.ErrNotExist) {
			continue // less than half-made; Sweep removes it
		}
		if err != nil {
			return fmt.Errorf("gvisor: %w", err)
		}
		if rec.damaged {
			r.conf.Logf("gvisor: the record of machine %s cannot be read", id)
		}
		e := &entry{rec: rec, listener: -1}
		r.mu.Lock()
		r.entries[id] = e
		r.mu.Unlock()
		if rec.resident() && rec.Exit == nil {
			r.slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-r.slots }()
				r.readopt(id, rec)
			})
		}
	}
	return nil
}

// get gives a snapshot of the record of id.
func (r *Runtime) get(id sandbox.ID) (record, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.entries[id]
	if !ok {
		return record{}, false
	}
	return e.rec.clone(), true
}

// put saves rec durably and makes it the one others see. The caller holds the
// lock of the id.
func (r *Runtime) put(rec record) error {
	if err := r.paths.save(rec); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entries[rec.Spec.ID]
	if e == nil {
		e = &entry{listener: -1}
		r.entries[rec.Spec.ID] = e
	}
	e.rec = rec.clone()
	return nil
}

// errClosed: the runtime of this process was closed.
var errClosed = errors.New("gvisor: the runtime is closed")

// enter registers a call: it ends when the runtime is closed, and Close waits for it.
func (r *Runtime) enter(ctx context.Context) (context.Context, func(), error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, nil, errClosed
	}
	r.wg.Add(1)
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(r.life, cancel)
	return ctx, func() { stop(); cancel(); r.wg.Done() }, nil
}

// lock is the lock of one id, counted so that it goes with its last user.
type lock struct {
	held  chan struct{}
	users int
}

func (r *Runtime) lock(ctx context.Context, id sandbox.ID) (unlock func(), err error) {
	r.mu.Lock()
	l := r.locks[id]
	if l == nil {
		l = &lock{held: make(chan struct{}, 1)}
		r.locks[id] = l
	}
	l.users++
	r.mu.Unlock()
	leave := func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(r.locks, id)
		}
	}
	if err := ctx.Err(); err != nil {
		leave()
		return nil, err
	}
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}

func notFound(id sandbox.ID) error { return fmt.Errorf("%w: %.32q", runtime.ErrNotFound, string(id)) }

// patience is how long we wait for the kernel to end what we have killed.
const patience = 10 * time.Second
