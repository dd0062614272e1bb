package runtimetest

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

func testCapabilities(e *env) {
	if e.caps.Name == "" || e.caps.Digest == "" {
		e.Errorf("capabilities %+v: name and digest are part of the pool key", e.caps)
	}
	classes := []sandbox.Class{sandbox.ClassMicroVM, sandbox.ClassUserKernel, sandbox.ClassEmulated}
	if !slices.Contains(classes, e.caps.Class) {
		e.Errorf("class %q is not one of %v", e.caps.Class, classes)
	}
	if e.f.Restart != nil && !e.caps.SurvivesCaller {
		e.Error("the factory can restart the caller, so the driver must say SurvivesCaller")
	}
}

func testCreate(e *env) {
	const edge = "absent→created (Create)"
	spec := e.spec()
	m := e.create(spec)
	if m.ID() != spec.ID {
		e.edge(edge, "machine has id %s, want %s", m.ID(), spec.ID)
	}
	s := e.is(m, runtime.Created, edge)
	if s.Spec != spec {
		e.edge(edge, "status has spec %+v, want %+v", s.Spec, spec)
	}
	if s.BootID != "" {
		e.edge(edge, "boot id %q before the first Start; nothing of the guest runs yet", s.BootID)
	}
	for _, c := range []runtime.Condition{runtime.Created, runtime.Running, runtime.Paused} {
		switch c {
		case runtime.Running:
			e.start(m)
		case runtime.Paused:
			e.must("Pause", m.Pause(e.ctx()))
		}
		again, err := e.rt.Create(e.ctx(), spec)
		if err != nil {
			e.broken(1, "Create of a machine that is %s: %v", c, err)
			continue
		}
		e.is(again, c, "Create again of a machine that is "+string(c))
	}
	if n := len(e.find(spec.ID)); n != 1 {
		e.broken(1, "List has the machine %d times after Create was repeated, want 1", n)
	}
}

func testCreateRefusals(e *env) {
	spec := e.spec()
	m := e.create(spec)
	for _, change := range []func(*runtime.Spec){
		func(s *runtime.Spec) { s.Resources.DiskBytes *= 2 },
		func(s *runtime.Spec) { s.Resources.MemoryBytes *= 2 },
		func(s *runtime.Spec) { s.TemplateDigest = absent },
	} {
		other := spec
		change(&other)
		_, err := e.rt.Create(e.ctx(), other)
		e.wants(fmt.Sprintf("Create of an existing machine as %+v", other), err, runtime.ErrSpecMismatch)
	}
	if s := e.is(m, runtime.Created, "Create with another spec"); s.Spec != spec {
		e.Errorf("Create with another spec changed the machine to %+v", s.Spec)
	}

	none := e.spec()
	none.TemplateDigest = absent
	_, err := e.rt.Create(e.ctx(), none)
	e.wants("Create from a template that is not on the host", err, runtime.ErrNoTemplate)
	if found := e.find(none.ID); len(found) > 0 {
		e.edge("absent→created (Create)", "a refused Create left %+v; it is all or nothing", found)
	}
}

var absent = "sha256:" + strings.Repeat("0", 64)

func testStart(e *env) {
	m := e.create(e.spec())
	e.start(m)
	first := e.is(m, runtime.Running, "created→running (Start)").BootID
	if first == "" {
		e.edge("created→running (Start)", "no boot id")
	}
	if err := m.Start(e.ctx()); err != nil {
		e.broken(1, "Start of a running machine: %v", err)
	}
	if again := e.is(m, runtime.Running, "running→running (Start)").BootID; again != first {
		e.broken(1, "Start of a running machine booted it anew (%s, then %s)", first, again)
	}
	e.must("edge running→created (Stop)", m.Stop(e.ctx()))
	e.start(m)
	if second := e.is(m, runtime.Running, "created→running (Start after Stop)").BootID; second == first || second == "" {
		e.edge("created→running (Start)", "boot id %q after %q; it changes with every Start", second, first)
	}
}

func testStop(e *env) {
	for _, c := range e.conditions() {
		edge := string(c) + "→created (Stop)"
		m := e.to(c)
		for i := range 2 {
			if err := m.Stop(e.ctx()); err != nil {
				if i > 0 {
					e.broken(1, "second Stop: %v", err)
				} else {
					e.edge(edge, "%v", err)
				}
			}
			e.is(m, runtime.Created, edge)
		}
		e.start(m)
		e.is(m, runtime.Running, "created→running (Start after Stop of "+string(c)+")")
	}
}

func testPause(e *env) {
	m := e.create(e.spec())
	e.wants("Pause of a created machine", m.Pause(e.ctx()), runtime.ErrNotRunning)
	e.wants("Resume of a created machine", m.Resume(e.ctx()), runtime.ErrNotRunning)
	e.start(m)
	boot := e.status(m).BootID
	if err := m.Resume(e.ctx()); err != nil {
		e.broken(1, "Resume of a running machine: %v", err)
	}
	for range 2 {
		for range 2 {
			if err := m.Pause(e.ctx()); err != nil {
				e.broken(1, "Pause: %v", err)
			}
			e.is(m, runtime.Paused, "running→paused (Pause)")
		}
		// The contract has no edge for Start of a paused machine: it may refuse or do
		// nothing, but not boot a second time.
		if err := m.Start(e.ctx()); err != nil && !errors.Is(err, runtime.ErrPaused) {
			e.Errorf("Start of a paused machine: %v, want nil or ErrPaused", err)
		}
		e.is(m, runtime.Paused, "Start of a paused machine")
		for range 2 {
			if err := m.Resume(e.ctx()); err != nil {
				e.broken(1, "Resume: %v", err)
			}
			e.is(m, runtime.Running, "paused→running (Resume)")
		}
	}
	if now := e.status(m).BootID; now != boot {
		e.edge("paused→running (Resume)", "boot id went from %s to %s; memory was lost", boot, now)
	}
	if e.f.Kill != nil {
		m := e.to(runtime.Dead)
		e.wants("Pause of a dead machine", m.Pause(e.ctx()), runtime.ErrNotRunning)
		e.wants("Resume of a dead machine", m.Resume(e.ctx()), runtime.ErrNotRunning)
	}
}

func testDestroy(e *env) {
	for _, c := range e.conditions() {
		edge := string(c) + "→absent (Destroy)"
		m := e.to(c)
		if err := m.Destroy(e.ctx()); err != nil {
			e.edge(edge, "%v", err)
		}
		if found := e.find(m.ID()); len(found) > 0 {
			e.edge(edge, "List still has %+v", found)
		}
		if _, err := m.Status(e.ctx()); !errors.Is(err, runtime.ErrNotFound) {
			e.edge(edge, "Status answers %v, want ErrNotFound", err)
		}
		if err := m.Destroy(e.ctx()); err != nil {
			e.broken(1, "second Destroy through the handle: %v", err)
		}
		if err := e.rt.Destroy(e.ctx(), m.ID()); err != nil {
			e.broken(1, "second Destroy by id: %v", err)
		}
	}
	if err := e.rt.Destroy(e.ctx(), sandbox.NewID()); err != nil {
		e.edge("absent→absent (Destroy)", "an id nobody knows: %v", err)
	}
	// The id may be used again.
	spec := e.spec()
	e.must("Destroy", e.create(spec).Destroy(e.ctx()))
	e.is(e.create(spec), runtime.Created, "absent→created (Create after Destroy)")
}

func testAdopt(e *env) {
	for _, c := range e.conditions() {
		m := e.to(c)
		before := e.status(m)
		other, err := e.rt.Adopt(e.ctx(), m.ID())
		if err != nil {
			e.broken(1, "Adopt of a %s machine: %v", c, err)
			continue
		}
		if after := e.is(other, c, "Adopt"); after.BootID != before.BootID || after.Spec != before.Spec {
			e.broken(1, "Adopt changed the machine from %+v to %+v", before, after)
		}
		e.must("Destroy through the adopted handle", other.Destroy(e.ctx()))
		_, err = m.Status(e.ctx())
		e.wants("Status through the first handle; handles of one id are interchangeable", err, runtime.ErrNotFound)
	}
}

func testList(e *env) {
	want := map[sandbox.ID]runtime.Condition{}
	for _, c := range e.conditions() {
		want[e.to(c).ID()] = c
	}
	for id, c := range want {
		found := e.find(id)
		if len(found) != 1 {
			e.Errorf("List has the %s machine %d times, want 1", c, len(found))
			continue
		}
		s := found[0]
		if s.Condition != c || s.Spec.TemplateDigest != e.f.Template || (s.Exit != nil) != (c == runtime.Dead) {
			e.Errorf("List tells %+v of a machine that is %s", s, c)
		}
	}
}

func testUnknown(e *env) {
	check := func(what string, err error) {
		e.Helper()
		if !errors.Is(err, runtime.ErrNotFound) {
			e.broken(4, "%s: error %v", what, err)
		}
	}
	_, err := e.rt.Adopt(e.ctx(), sandbox.NewID())
	check("Adopt", err)
	m := e.create(e.spec())
	e.must("Destroy", m.Destroy(e.ctx()))
	_, err = m.Status(e.ctx())
	check("Status", err)
	check("Start", m.Start(e.ctx()))
	check("Pause", m.Pause(e.ctx()))
	check("Resume", m.Resume(e.ctx()))
	check("Stop", m.Stop(e.ctx()))
	check("Dial", e.within(4, soon, "Dial of an unknown machine", func() error { return dial(e, m) }))
	_, err = m.Stats(e.ctx())
	check("Stats", err)
	check("Wait", e.within(4, soon, "Wait for an unknown machine", func() error {
		_, err := m.Wait(e.ctx())
		return err
	}))
}

func testStats(e *env) {
	m := e.boot()
	first, err := m.Stats(e.ctx())
	e.must("Stats of a running machine", err)
	r := e.f.Resources
	// A cgroup may stand a little above its limit while it reclaims.
	if over := uint64(r.MemoryBytes + r.MemoryBytes/4); first.MemoryBytes > over || first.MemoryPeak > over {
		e.Errorf("stats %+v: memory above the limit of %d", first, r.MemoryBytes)
	}
	if first.MemoryPeak != 0 && first.MemoryPeak < first.MemoryBytes {
		e.Errorf("stats %+v: the peak is below what is used", first)
	}
	if over := uint64(r.DiskBytes + 16<<20); first.DiskBytes > over {
		e.Errorf("stats %+v: disk above the limit of %d", first, r.DiskBytes)
	}
	if first.OOMKills != 0 {
		e.Errorf("stats %+v: out-of-memory kills of a machine that did nothing", first)
	}
	second, err := m.Stats(e.ctx())
	e.must("Stats again", err)
	if second.CPUNanos < first.CPUNanos {
		e.Errorf("CPU time went back from %d to %d", first.CPUNanos, second.CPUNanos)
	}
	e.must("Pause", m.Pause(e.ctx()))
	if _, err := m.Stats(e.ctx()); err != nil {
		e.Errorf("Stats of a paused machine: %v", err)
	}
	e.must("Stop", m.Stop(e.ctx()))
	if _, err := m.Stats(e.ctx()); err != nil && !errors.Is(err, runtime.ErrNotRunning) {
		e.Errorf("Stats of a stopped machine: %v, want nil or ErrNotRunning", err)
	}
}

func testCapture(e *env) {
	m := e.boot()
	able := map[runtime.CaptureKind]bool{
		runtime.CaptureFull: e.caps.CaptureFull, runtime.CaptureDisk: e.caps.CaptureDisk,
	}
	for kind, ok := range able {
		if ok {
			continue
		}
		_, err := m.Capture(e.ctx(), kind)
		e.wants("Capture "+string(kind)+", which Capabilities denies", err, runtime.ErrUnsupported)
		_, err = e.rt.Restore(e.ctx(), runtime.Artifacts{Kind: kind, Ref: "none"}, e.spec())
		e.wants("Restore "+string(kind)+", which Capabilities denies", err, runtime.ErrUnsupported)
	}
	e.is(m, runtime.Running, "Capture")
}
