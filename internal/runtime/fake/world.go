// Package fake is a runtime whose machines are values in memory. It passes the
// same conformance suite as the real drivers and can be told to fail, hang,
// delay or die at any step.
//
// A World is the host: it holds machines, their disks and the faults. A Driver
// (New) is one run of our process on that host. Driver.Kill ends the process at
// whatever instruction it is, and another New on the same World is the process
// after its restart; World.Reboot ends every driver and every machine.
//
// Everything blocks on channels and on the World's clock only, so it works in
// a testing/synctest bubble. Make the World inside the bubble and Close it
// before the bubble ends.
package fake

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// Census counts machines over all Worlds that share it, so that a test with
// several hosts notices a sandbox that has two machines.
type Census struct {
	mu       sync.Mutex
	boots    int
	starts   map[sandbox.ID]int
	resident map[sandbox.ID]int
	most     map[sandbox.ID]int
}

// NewCensus makes an empty one.
func NewCensus() *Census {
	return &Census{starts: map[sandbox.ID]int{}, resident: map[sandbox.ID]int{}, most: map[sandbox.ID]int{}}
}

func (c *Census) start(id sandbox.ID) (bootID string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.boots++
	c.starts[id]++
	c.resident[id]++
	c.most[id] = max(c.most[id], c.resident[id])
	return fmt.Sprintf("boot-%06d", c.boots)
}

func (c *Census) end(id sandbox.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resident[id]--
}

// Starts tells how often a machine of id was booted.
func (c *Census) Starts(id sandbox.ID) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.starts[id]
}

// Resident tells how many machines of id run or are paused now.
func (c *Census) Resident(id sandbox.ID) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resident[id]
}

// Doubles lists the ids that ever had more than one machine at once.
func (c *Census) Doubles() []sandbox.ID {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []sandbox.ID
	for _, id := range slices.Sorted(maps.Keys(c.most)) {
		if c.most[id] > 1 {
			out = append(out, id)
		}
	}
	return out
}

// World is one host. Its methods may be called from any goroutine.
type World struct {
	census *Census

	mu       sync.Mutex
	clock    clock.Clock
	caps     runtime.Capabilities
	guest    Guest
	programs map[string]Program
	boot     time.Duration
	room     int
	hostBoot int
	machines map[sandbox.ID]*machine
	turns    map[sandbox.ID]*turn
	// templates holds the digests on this host; nil means that any is there.
	templates map[string]bool
	faults    []*Armed
	drivers   map[*Driver]bool
	execs     map[string]int
}

// machine is all that the host has of one id.
type machine struct {
	spec runtime.Spec
	// has names what was made: record, disk, network, limits, channel.
	has    map[string]bool
	disk   map[string][]byte
	cond   runtime.Condition
	bootID string
	exit   *runtime.Exit
	run    *run
	mute   bool
	stats  *runtime.Stats
}

// parts are made by Create, in this order; a machine with fewer is half made.
var parts = []string{"record", "disk", "network", "limits", "channel"}

func (m *machine) whole() bool { return len(m.has) == len(parts) }

// turn serialises the calls that change one machine; it outlives drivers, as a
// file lock on the host would.
type turn struct {
	sem   chan struct{}
	users int
}

// Option sets up a World.
type Option func(*World)

// WithCensus shares c among several Worlds.
func WithCensus(c *Census) Option { return func(w *World) { w.census = c } }

// WithClock makes delays and boot times run on c instead of the system's clock.
func WithClock(c clock.Clock) Option { return func(w *World) { w.clock = c } }

// WithTemplates says which digests are on the host; without it any is.
func WithTemplates(digests ...string) Option {
	return func(w *World) {
		w.templates = map[string]bool{}
		for _, d := range digests {
			w.templates[d] = true
		}
	}
}

// WithBootTime makes the guest daemon answer only d after Start.
func WithBootTime(d time.Duration) Option { return func(w *World) { w.boot = d } }

// WithRoom limits the host to n machines; one more is refused with ErrNoSpace.
func WithRoom(n int) Option { return func(w *World) { w.room = n } }

// WithGuest replaces the guest daemon stub of every machine.
func WithGuest(g Guest) Option { return func(w *World) { w.guest = g } }

// WithCapabilities changes what the driver says it can do.
func WithCapabilities(change func(*runtime.Capabilities)) Option {
	return func(w *World) { change(&w.caps) }
}

// NewWorld makes a host without machines.
func NewWorld(options ...Option) *World {
	w := &World{
		clock: clock.System{},
		caps: runtime.Capabilities{
			Name: "fake", Class: sandbox.ClassUserKernel, Digest: "sha256:fake", SurvivesCaller: true,
		},
		machines: map[sandbox.ID]*machine{}, turns: map[sandbox.ID]*turn{},
		drivers: map[*Driver]bool{}, execs: map[string]int{},
		programs: maps.Clone(builtins),
	}
	for _, o := range options {
		o(w)
	}
	if w.census == nil {
		w.census = NewCensus()
	}
	return w
}

// Census gives the counters of this World (shared, when WithCensus was used).
func (w *World) Census() *Census { return w.census }

// AddTemplate puts one more template on the host.
func (w *World) AddTemplate(digest string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.templates == nil {
		w.templates = map[string]bool{}
	}
	w.templates[digest] = true
}

// HostBoot counts the boots of the host, from 0.
func (w *World) HostBoot() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.hostBoot
}

// Status tells what the host has of id; ok is false when that is nothing.
func (w *World) Status(id sandbox.ID) (s runtime.Status, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.machines[id]
	if m == nil {
		return runtime.Status{}, false
	}
	return m.status(), true
}

func (m *machine) status() runtime.Status {
	s := runtime.Status{Spec: m.spec, Condition: m.cond, BootID: m.bootID}
	if m.cond == runtime.Dead && m.exit != nil {
		e := *m.exit
		s.Exit = &e
	}
	return s
}

// KillMachine ends a running or paused machine from outside, with the cause
// the driver will report.
func (w *World) KillMachine(id sandbox.ID, cause runtime.Cause) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.machines[id]
	switch {
	case m == nil:
		return fmt.Errorf("fake: kill %s: %w", id, runtime.ErrNotFound)
	case m.run == nil:
		return fmt.Errorf("fake: kill %s: %w", id, runtime.ErrNotRunning)
	}
	w.endLocked(m, runtime.Dead, runtime.Exit{Cause: cause, Detail: "ended by the test"})
	return nil
}

// endLocked ends the run of m; its condition becomes cond.
func (w *World) endLocked(m *machine, cond runtime.Condition, exit runtime.Exit) {
	m.cond = cond
	m.exit = &exit
	if m.run == nil {
		return
	}
	r := m.run
	m.run = nil
	w.census.end(m.spec.ID)
	r.finish(exit)
}

// Reboot restarts the host: every driver and every machine ends, disks are
// kept. Use New for the driver afterwards.
func (w *World) Reboot() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hostBoot++
	for d := range w.drivers {
		d.killLocked()
	}
	for _, m := range w.machines {
		if m.run != nil {
			w.endLocked(m, runtime.Dead, runtime.Exit{Cause: runtime.CauseReboot, Detail: "the host restarted"})
		}
	}
}

// Close ends every driver and machine and with them every goroutine. The World
// stays readable.
func (w *World) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for d := range w.drivers {
		d.killLocked()
	}
	for _, m := range w.machines {
		if m.run != nil {
			w.endLocked(m, runtime.Dead, runtime.Exit{Cause: runtime.CauseKilled, Detail: "the test ended"})
		}
	}
}

// Leaks lists what is on the host and does not belong to the ids in keep, one
// line each: for "the books balance".
func (w *World) Leaks(keep ...sandbox.ID) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for id, m := range w.machines {
		if slices.Contains(keep, id) {
			continue
		}
		for part := range m.has {
			out = append(out, fmt.Sprintf("%s: %s", id, part))
		}
		if m.run != nil {
			out = append(out, fmt.Sprintf("%s: machine %s", id, m.cond))
			if n := m.run.streams(); n > 0 {
				out = append(out, fmt.Sprintf("%s: %d streams", id, n))
			}
		}
	}
	for id, t := range w.turns {
		if !slices.Contains(keep, id) {
			out = append(out, fmt.Sprintf("%s: %d calls in progress", id, t.users))
		}
	}
	slices.Sort(out)
	return out
}

// WriteFile changes the disk of a machine behind the guest's back.
func (w *World) WriteFile(id sandbox.ID, name string, data []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.machines[id]
	if m == nil || m.disk == nil {
		return fmt.Errorf("fake: disk of %s: %w", id, runtime.ErrNotFound)
	}
	return m.write(name, data)
}

// ReadFile reads the disk of a machine in any condition.
func (w *World) ReadFile(id sandbox.ID, name string) ([]byte, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.machines[id]
	if m == nil {
		return nil, fmt.Errorf("fake: disk of %s: %w", id, runtime.ErrNotFound)
	}
	data, ok := m.disk[name]
	if !ok {
		return nil, fmt.Errorf("fake: no file %q on the disk of %s", name, id)
	}
	return slices.Clone(data), nil
}

// write puts a file on the disk, within the disk's size.
func (m *machine) write(name string, data []byte) error {
	if limit := m.spec.Resources.DiskBytes; limit > 0 {
		if m.diskUsed()-uint64(len(m.disk[name]))+uint64(len(data)) > uint64(limit) {
			return errDiskFull
		}
	}
	m.disk[name] = slices.Clone(data)
	return nil
}

func (m *machine) diskUsed() uint64 {
	var n uint64
	for _, b := range m.disk {
		n += uint64(len(b))
	}
	return n
}

// SetStats fixes what Stats says of a machine; nil lets the World make it up.
func (w *World) SetStats(id sandbox.ID, s *runtime.Stats) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.machines[id]; m != nil {
		m.stats = s
	}
}

// Mute makes the guest of a machine deaf: new streams wait, open ones stall.
// It outlasts restarts of the machine.
func (w *World) Mute(id sandbox.ID, mute bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.machines[id]
	if m == nil {
		return
	}
	m.mute = mute
	if m.run != nil {
		m.run.gate(m.cond == runtime.Running && !mute)
	}
}

// Executions tells how often the guests of this World really started the
// process of a session; above 1 the promise "exactly once" is broken.
func (w *World) Executions(session string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.execs[session]
}

// Daemon gives the guest daemon stub of a running or paused machine, nil
// otherwise or where WithGuest replaced it.
func (w *World) Daemon(id sandbox.ID) *Daemon {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.machines[id]; m != nil && m.run != nil {
		return m.run.daemon
	}
	return nil
}
