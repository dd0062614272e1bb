// Package runtimetest is what every driver must pass: one suite for the
// numbered guarantees of package runtime, the edges of its drawing, and the
// limits that a driver says it holds. It asks Capabilities, never names.
//
// A failure says which guarantee or edge is broken, so that the message alone
// tells where in the contract to read.
package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// Factory says how to reach the driver under test.
type Factory struct {
	// New gives a driver; it is called once for each sub-test and benchmark. Other
	// machines may be on its host, the suite looks only at its own.
	New func(t testing.TB) runtime.Runtime
	// Template is the digest of a template on the host, with /var/tmp, sh, and a
	// user "user" when the guest is real.
	Template string
	// Resources of the machines; zero fields get small defaults.
	Resources sandbox.Resources
	// Restart kills our process without warning and gives the driver of the next
	// one, on the same host. Nil: not possible.
	Restart func(t testing.TB, old runtime.Runtime) runtime.Runtime
	// Reboot restarts the host and gives the driver afterwards. Nil: not possible.
	Reboot func(t testing.TB, old runtime.Runtime) runtime.Runtime
	// Kill ends a running or paused machine from outside, as SIGKILL to its
	// process would. Nil: not possible.
	Kill func(t testing.TB, rt runtime.Runtime, id sandbox.ID)
	// KnownLeaks lists what is on the host of any machine: processes, mounts, loop
	// devices, cgroups, namespaces, files. The suite compares before and after.
	// Nil: not checked.
	KnownLeaks func(t testing.TB, rt runtime.Runtime) []string
	// GuestFiles says that Dial reaches something that serves hello, files and
	// shutdown although Capabilities.RealGuest is false (the fake's stub).
	GuestFiles bool
	// SmallDisk is the disk of the machine that gets filled; 0 = 32 MiB.
	SmallDisk int64
	// EndWithin bounds how long after its end Wait may return; 0 = the contract's 5 s.
	EndWithin time.Duration
}

func (f Factory) defaults() Factory {
	r := &f.Resources
	if r.MilliCPU == 0 {
		r.MilliCPU = 1000
	}
	if r.MemoryBytes == 0 {
		r.MemoryBytes = 256 << 20
	}
	if r.DiskBytes == 0 {
		r.DiskBytes = 128 << 20
	}
	if r.MaxProcesses == 0 {
		r.MaxProcesses = 128
	}
	if f.SmallDisk == 0 {
		f.SmallDisk = 32 << 20
	}
	if f.EndWithin == 0 {
		f.EndWithin = 5 * time.Second
	}
	return f
}

// callTimeout bounds one call of the driver that is expected to succeed.
const callTimeout = time.Minute

// soon is how fast a call must return that fails at once, or whose context ended.
const soon = 2 * time.Second

// Run runs the suite.
func Run(t *testing.T, f Factory) {
	f = f.defaults()
	caps := f.New(t).Capabilities()
	guest := caps.RealGuest || f.GuestFiles
	tests := []struct {
		name string
		when bool
		test func(*env)
	}{
		{"capabilities", true, testCapabilities},
		{"create", true, testCreate},
		{"create/refusals", true, testCreateRefusals},
		{"start", true, testStart},
		{"stop", true, testStop},
		{"pause", true, testPause},
		{"destroy", true, testDestroy},
		{"adopt", true, testAdopt},
		{"list", true, testList},
		{"unknown id", true, testUnknown},
		{"wait", true, testWait},
		{"dial/at once", true, testDialAtOnce},
		{"stats", true, testStats},
		{"capture", true, testCapture},
		{"concurrency/one machine", true, testOneMachine},
		{"concurrency/mixed", true, testMixed},
		{"concurrency/machines", true, testManyMachines},
		{"context/create", true, testContextCreate},
		{"context/start and stop", true, testContextStart},
		{"context/wait and dial", true, testContextWait},
		{"kill", f.Kill != nil, testKill},
		{"restart", f.Restart != nil, testRestart},
		{"restart/in create", f.Restart != nil, testRestartInCreate},
		{"reboot", f.Reboot != nil, testReboot},
		{"guest/answers", guest, testGuestAnswers},
		{"guest/files survive", guest, testFilesSurvive},
		{"guest/pause freezes", guest, testPauseFreezes},
		{"guest/streams", guest, testStreams},
		{"guest/poweroff", guest, testPoweroff},
		{"guest/isolation", guest, testIsolation},
		{"limit/disk", guest, testDiskLimit},
		{"limit/memory", caps.RealGuest, testMemoryLimit},
		{"limit/processes", caps.RealGuest, testProcessLimit},
		{"limit/process flood", caps.RealGuest, testProcessFlood},
		{"network is closed", caps.RealGuest, testNetworkClosed},
	}
	for _, tt := range tests {
		if tt.when {
			t.Run(tt.name, func(t *testing.T) { tt.test(newEnv(t, f)) })
		}
	}
}

// env is one sub-test: a driver and the machines that were made with it.
type env struct {
	testing.TB
	f    Factory
	rt   runtime.Runtime
	caps runtime.Capabilities
	ids  []sandbox.ID
}

func newEnv(t testing.TB, f Factory) *env {
	e := &env{TB: t, f: f, rt: f.New(t)}
	e.caps = e.rt.Capabilities()
	var before []string
	if f.KnownLeaks != nil {
		before = f.KnownLeaks(t, e.rt)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		for _, id := range e.ids {
			if err := e.rt.Destroy(ctx, id); err != nil {
				e.broken(1, "Destroy at the end of the test: %v", err)
			}
		}
		all, err := e.rt.List(ctx)
		if err != nil {
			t.Errorf("List at the end of the test: %v", err)
		}
		for _, s := range all {
			if slices.Contains(e.ids, s.Spec.ID) {
				t.Errorf("edge any→absent (Destroy): List still has %s as %s", s.Spec.ID, s.Condition)
			}
		}
		if f.KnownLeaks != nil {
			for _, l := range f.KnownLeaks(t, e.rt) {
				if !slices.Contains(before, l) {
					t.Errorf("edge any→absent (Destroy): left on the host: %s", l)
				}
			}
		}
	})
	return e
}

// texts are the guarantees in a few words, for messages.
var texts = map[int]string{
	1: "idempotent and safe to repeat",
	2: "concurrent calls are serialised, machines do not wait for each other",
	3: "an ended context returns soon and the machine can go on",
	4: "an unknown id is ErrNotFound",
	5: "Wait returns in time with the best cause",
	6: "no machine reaches another",
	7: "machines outlive the calling process",
}

func (e *env) broken(n int, format string, args ...any) {
	e.Helper()
	e.Errorf("guarantee %d broken (%s): %s", n, texts[n], fmt.Sprintf(format, args...))
}

func (e *env) edge(edge, format string, args ...any) {
	e.Helper()
	e.Errorf("edge %s broken: %s", edge, fmt.Sprintf(format, args...))
}

// ctx is the context of one call that should succeed.
func (e *env) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	e.Cleanup(cancel)
	return ctx
}

// must stops the test when a call that should succeed did not.
func (e *env) must(what string, err error) {
	e.Helper()
	if err != nil {
		e.Fatalf("%s: %v", what, err)
	}
}

// spec makes a new id; it is destroyed at the end.
func (e *env) spec() runtime.Spec {
	s := runtime.Spec{ID: sandbox.NewID(), TemplateDigest: e.f.Template, Resources: e.f.Resources}
	e.ids = append(e.ids, s.ID)
	return s
}

func (e *env) create(s runtime.Spec) runtime.Machine {
	e.Helper()
	m, err := e.rt.Create(e.ctx(), s)
	e.must("edge absent→created (Create)", err)
	return m
}

func (e *env) start(m runtime.Machine) {
	e.Helper()
	e.must("edge →running (Start)", m.Start(e.ctx()))
}

// boot makes a machine that runs.
func (e *env) boot() runtime.Machine {
	e.Helper()
	m := e.create(e.spec())
	e.start(m)
	return m
}

func (e *env) status(m runtime.Machine) runtime.Status {
	e.Helper()
	s, err := m.Status(e.ctx())
	e.must("Status", err)
	return s
}

// is checks where an edge has led.
func (e *env) is(m runtime.Machine, want runtime.Condition, edge string) runtime.Status {
	e.Helper()
	s := e.status(m)
	if s.Condition != want {
		e.edge(edge, "the machine is %s, want %s (exit %+v)", s.Condition, want, s.Exit)
	}
	if (s.Exit != nil) != (s.Condition == runtime.Dead) {
		e.edge(edge, "a machine that is %s has exit %+v; Exit is set exactly when it is dead", s.Condition, s.Exit)
	}
	return s
}

// to brings a new machine into a condition. Dead needs Kill or a guest.
func (e *env) to(c runtime.Condition) runtime.Machine {
	e.Helper()
	m := e.create(e.spec())
	if c == runtime.Created {
		return m
	}
	e.start(m)
	switch c {
	case runtime.Paused:
		e.must("edge running→paused (Pause)", m.Pause(e.ctx()))
	case runtime.Dead:
		e.f.Kill(e, e.rt, m.ID())
		if _, err := m.Wait(e.ctx()); err != nil {
			e.Fatalf("Wait after the machine was killed: %v", err)
		}
	}
	e.is(m, c, "→"+string(c))
	return m
}

// conditions are those that this factory can bring about.
func (e *env) conditions() []runtime.Condition {
	c := []runtime.Condition{runtime.Created, runtime.Running, runtime.Paused}
	if e.f.Kill != nil {
		c = append(c, runtime.Dead)
	}
	return c
}

// within runs f and complains when it takes longer than d.
func (e *env) within(n int, d time.Duration, what string, f func() error) error {
	e.Helper()
	done := make(chan error, 1)
	began := time.Now()
	go func() { done <- f() }()
	select {
	case err := <-done:
		if took := time.Since(began); took > d {
			e.broken(n, "%s took %v, want at most %v", what, took.Round(time.Millisecond), d)
		}
		return err
	case <-time.After(d + callTimeout):
		e.Fatalf("guarantee %d broken (%s): %s did not return for %v", n, texts[n], what, d+callTimeout)
		return nil
	}
}

// wants checks the class of an error.
func (e *env) wants(what string, err, want error) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Errorf("%s: error %v, want errors.Is %v", what, err, want)
	}
}

// find looks for id in List.
func (e *env) find(id sandbox.ID) (found []runtime.Status) {
	e.Helper()
	all, err := e.rt.List(e.ctx())
	e.must("List", err)
	for _, s := range all {
		if s.Spec.ID == id {
			found = append(found, s)
		}
	}
	return found
}
