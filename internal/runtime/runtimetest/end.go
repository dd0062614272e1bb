package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/space-platform/space/internal/runtime"
)

type ended struct {
	exit runtime.Exit
	err  error
	at   time.Time
}

// waiting calls Wait in the background.
func (e *env) waiting(m runtime.Machine) <-chan ended {
	ctx := e.ctx()
	c := make(chan ended, 1)
	go func() {
		exit, err := m.Wait(ctx)
		c <- ended{exit, err, time.Now()}
	}()
	return c
}

// returns checks that a Wait comes back in time after since, with one of causes.
func (e *env) returns(c <-chan ended, since time.Time, what string, causes ...runtime.Cause) {
	e.Helper()
	select {
	case r := <-c:
		if r.err != nil {
			e.broken(5, "Wait %s: %v", what, r.err)
			return
		}
		if late := r.at.Sub(since); late > e.f.EndWithin {
			e.broken(5, "Wait %s returned after %v, want at most %v", what, late.Round(time.Millisecond), e.f.EndWithin)
		}
		for _, cause := range causes {
			if r.exit.Cause == cause {
				return
			}
		}
		e.broken(5, "Wait %s says %q (%s), want one of %q", what, r.exit.Cause, r.exit.Detail, causes)
	case <-time.After(e.f.EndWithin + soon):
		e.broken(5, "Wait %s has not returned after %v", what, e.f.EndWithin+soon)
	}
}

// silent checks that a Wait goes on while the machine is resident.
func (e *env) silent(c <-chan ended, what string) {
	e.Helper()
	select {
	case r := <-c:
		e.Fatalf("Wait returned %+v, %v %s; it blocks until the machine is neither running nor paused", r.exit, r.err, what)
	case <-time.After(100 * time.Millisecond):
	}
}

func testWait(e *env) {
	m := e.create(e.spec())
	if err := e.within(5, soon, "Wait for a machine that was never started", func() error {
		_, err := m.Wait(e.ctx())
		return err
	}); err != nil {
		e.broken(5, "Wait for a machine that was never started: %v", err)
	}
	e.start(m)
	first, second := e.waiting(m), e.waiting(m)
	e.silent(first, "while the machine runs")
	e.must("Pause", m.Pause(e.ctx()))
	e.silent(first, "while the machine is paused")
	e.must("Resume", m.Resume(e.ctx()))
	began := time.Now()
	e.must("Stop", m.Stop(e.ctx()))
	stopped := time.Now()
	e.returns(first, stopped, "for Stop", runtime.CauseStopped)
	e.returns(second, stopped, "of a second waiter for Stop", runtime.CauseStopped)
	e.returns(e.waiting(m), time.Now(), "called after Stop", runtime.CauseStopped)
	if took := stopped.Sub(began); took > 30*time.Second {
		e.edge("running→created (Stop)", "took %v", took)
	}

	// The next life has an end of its own.
	e.start(m)
	third := e.waiting(m)
	e.silent(third, "in the second life")
	if err := m.Destroy(e.ctx()); err != nil {
		e.edge("running→absent (Destroy)", "while somebody waits: %v", err)
	}
	destroyed := time.Now()
	select {
	case r := <-third:
		if r.err != nil && !errors.Is(r.err, runtime.ErrNotFound) {
			e.broken(5, "Wait while the machine was destroyed: %v, want an exit or ErrNotFound", r.err)
		}
		if late := r.at.Sub(destroyed); late > e.f.EndWithin {
			e.broken(5, "Wait returned %v after Destroy", late)
		}
	case <-time.After(e.f.EndWithin + soon):
		e.broken(5, "Wait has not returned %v after Destroy", e.f.EndWithin+soon)
	}
}

func testKill(e *env) {
	for _, c := range []runtime.Condition{runtime.Running, runtime.Paused} {
		edge := string(c) + "→dead (killed)"
		m := e.to(c)
		boot := e.status(m).BootID
		w := e.waiting(m)
		e.silent(w, "before the machine was killed")
		e.f.Kill(e, e.rt, m.ID())
		e.returns(w, time.Now(), "for a kill while "+string(c), runtime.CauseKilled)
		s := e.is(m, runtime.Dead, edge)
		if s.Exit != nil && s.Exit.Cause != runtime.CauseKilled {
			e.broken(5, "status of a killed machine says %+v", s.Exit)
		}
		e.start(m)
		if again := e.is(m, runtime.Running, "dead→running (Start)"); again.BootID == boot {
			e.edge("dead→running (Start)", "boot id is still %s", boot)
		}
	}
}

func testDialAtOnce(e *env) {
	for _, c := range e.conditions() {
		want := runtime.ErrNotRunning
		switch c {
		case runtime.Running:
			continue
		case runtime.Paused:
			want = runtime.ErrPaused
		}
		m := e.to(c)
		err := e.within(3, soon, "Dial of a "+string(c)+" machine (it fails at once)", func() error { return dial(e, m) })
		e.wants("Dial of a "+string(c)+" machine", err, want)
	}
}

func dial(e *env, m runtime.Machine) error {
	c, err := m.Dial(e.ctx())
	if err == nil {
		_ = c.Close() // only whether it opened is of interest
	}
	return err
}

// together calls f n times at once.
func together(n int, f func(i int) error) []error {
	errs := make([]error, n)
	gate := make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			<-gate
			errs[i] = f(i)
		})
	}
	close(gate)
	wg.Wait()
	return errs
}

func testOneMachine(e *env) {
	spec := e.spec()
	var m runtime.Machine
	boots := make([]string, 4)
	steps := []struct {
		name string
		call func(i int) error
		want runtime.Condition
	}{
		{"Create", func(int) error { _, err := e.rt.Create(e.ctx(), spec); return err }, runtime.Created},
		{"Start", func(i int) error {
			if err := m.Start(e.ctx()); err != nil {
				return err
			}
			s, err := m.Status(e.ctx())
			boots[i] = s.BootID
			return err
		}, runtime.Running},
		{"Pause", func(int) error { return m.Pause(e.ctx()) }, runtime.Paused},
		{"Resume", func(int) error { return m.Resume(e.ctx()) }, runtime.Running},
		{"Stop", func(int) error { return m.Stop(e.ctx()) }, runtime.Created},
	}
	for _, step := range steps {
		for i, err := range together(len(boots), step.call) {
			if err != nil {
				e.broken(2, "%s from several goroutines, number %d: %v", step.name, i, err)
			}
		}
		var err error
		if m, err = e.rt.Adopt(e.ctx(), spec.ID); err != nil {
			e.Fatalf("Adopt after %s: %v", step.name, err)
		}
		e.is(m, step.want, step.name+" from several goroutines")
	}
	for _, b := range boots {
		if b != boots[0] {
			e.broken(2, "Start from several goroutines booted more than once: %q", boots)
			break
		}
	}
	for i, err := range together(4, func(int) error { return e.rt.Destroy(e.ctx(), spec.ID) }) {
		if err != nil {
			e.broken(2, "Destroy from several goroutines, number %d: %v", i, err)
		}
	}
}

func testMixed(e *env) {
	m := e.boot()
	ops := []struct {
		name string
		call func(context.Context) error
	}{
		{"Start", m.Start},
		{"Stop", m.Stop},
		{"Pause", m.Pause},
		{"Resume", m.Resume},
		{"Status", func(ctx context.Context) error { _, err := m.Status(ctx); return err }},
		{"Stats", func(ctx context.Context) error { _, err := m.Stats(ctx); return err }},
		{"List", func(ctx context.Context) error { _, err := e.rt.List(ctx); return err }},
	}
	errs := together(4, func(i int) error {
		rnd := rand.New(rand.NewPCG(1, uint64(i)))
		for range 8 {
			op := ops[rnd.IntN(len(ops))]
			err := op.call(e.ctx())
			if err != nil && !errors.Is(err, runtime.ErrNotRunning) && !errors.Is(err, runtime.ErrPaused) {
				return fmt.Errorf("%s: %w", op.name, err)
			}
		}
		return nil
	})
	for _, err := range errs {
		if err != nil {
			e.broken(2, "calls crossing each other may only lose by condition, but: %v", err)
		}
	}
	e.must("Stop after the storm", m.Stop(e.ctx()))
	e.start(m)
	e.is(m, runtime.Running, "Start after the storm")
}

func testManyMachines(e *env) {
	specs := make([]runtime.Spec, 4)
	for i := range specs {
		specs[i] = e.spec()
	}
	for i, err := range together(len(specs), func(i int) error {
		m, err := e.rt.Create(e.ctx(), specs[i])
		if err != nil {
			return err
		}
		if err := m.Start(e.ctx()); err != nil {
			return err
		}
		if err := m.Pause(e.ctx()); err != nil {
			return err
		}
		return m.Resume(e.ctx())
	}) {
		if err != nil {
			e.broken(2, "machine %d of several made at once: %v", i, err)
		}
	}
	for _, s := range specs {
		if found := e.find(s.ID); len(found) != 1 || found[0].Condition != runtime.Running {
			e.broken(2, "List of machines made at once has %+v", found)
		}
	}
	for i, err := range together(len(specs), func(i int) error { return e.rt.Destroy(e.ctx(), specs[i].ID) }) {
		if err != nil {
			e.broken(2, "Destroy of machine %d of several: %v", i, err)
		}
	}
}

// cuts are how long a call is let run before its context ends.
var cuts = []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 60 * time.Millisecond, 150 * time.Millisecond}

// cut runs call with a context that ends after d.
func (e *env) cut(what string, d time.Duration, call func(context.Context) error) {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	what = fmt.Sprintf("%s cut after %v", what, d)
	err := e.within(3, d+soon, what, func() error { return call(ctx) })
	if err != nil && !errors.Is(err, ctx.Err()) {
		e.broken(3, "%s: error %v, want %v", what, err, ctx.Err())
	}
}

func testContextCreate(e *env) {
	for i, d := range cuts {
		spec := e.spec()
		e.cut("Create", d, func(ctx context.Context) error { _, err := e.rt.Create(ctx, spec); return err })
		if i%2 == 0 { // go on
			m, err := e.rt.Create(e.ctx(), spec)
			if err != nil {
				e.broken(3, "Create again after a cut at %v: %v", d, err)
				continue
			}
			e.start(m)
			e.is(m, runtime.Running, "created→running (Start after a cut Create)")
		}
		if err := e.rt.Destroy(e.ctx(), spec.ID); err != nil {
			e.broken(3, "Destroy after a Create cut at %v: %v", d, err)
		}
	}
}

func testContextStart(e *env) {
	m := e.create(e.spec())
	for _, d := range cuts {
		e.cut("Start", d, m.Start)
		if err := m.Start(e.ctx()); err != nil {
			e.broken(3, "Start again after a cut at %v: %v", d, err)
		}
		e.is(m, runtime.Running, "Start after a cut Start")
		e.cut("Pause", d, m.Pause)
		if err := m.Pause(e.ctx()); err != nil {
			e.broken(3, "Pause again after a cut at %v: %v", d, err)
		}
		e.cut("Resume", d, m.Resume)
		if err := m.Resume(e.ctx()); err != nil {
			e.broken(3, "Resume again after a cut at %v: %v", d, err)
		}
		e.cut("Stop", d, m.Stop)
		if err := m.Stop(e.ctx()); err != nil {
			e.broken(3, "Stop again after a cut at %v: %v", d, err)
		}
		e.is(m, runtime.Created, "Stop after a cut Stop")
	}
	e.start(m)
	for _, d := range cuts {
		e.cut("Destroy", d, m.Destroy)
	}
	if err := m.Destroy(e.ctx()); err != nil {
		e.broken(3, "Destroy again after it was cut: %v", err)
	}
}

func testContextWait(e *env) {
	m := e.boot()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err := e.within(3, soon, "Wait with a context that ends", func() error { _, err := m.Wait(ctx); return err })
	if !errors.Is(err, context.DeadlineExceeded) {
		e.broken(3, "Wait with a context that ends: %v", err)
	}
	e.cut("Dial", 0, func(ctx context.Context) error {
		c, err := m.Dial(ctx)
		if err == nil {
			return c.Close()
		}
		return err
	})
	e.is(m, runtime.Running, "Wait and Dial with contexts that end")
}

func testRestart(e *env) {
	before := map[runtime.Condition]runtime.Status{}
	for _, c := range e.conditions() {
		before[c] = e.status(e.to(c))
	}
	e.rt = e.f.Restart(e, e.rt)
	for c, was := range before {
		m, err := e.rt.Adopt(e.ctx(), was.Spec.ID)
		if err != nil {
			e.broken(7, "Adopt of a %s machine after a restart: %v", c, err)
			continue
		}
		now := e.status(m)
		if now.Condition != c || now.BootID != was.BootID || now.Spec != was.Spec {
			e.broken(7, "a %s machine is after a restart %+v, was %+v", c, now, was)
		}
		if found := e.find(was.Spec.ID); len(found) != 1 || found[0].Condition != c {
			e.broken(7, "List after a restart has %+v of a %s machine", found, c)
		}
		if _, err := e.rt.Create(e.ctx(), was.Spec); err != nil {
			e.broken(1, "Create of a %s machine again after a restart: %v", c, err)
		}
		switch c {
		case runtime.Paused:
			if err := m.Resume(e.ctx()); err != nil {
				e.broken(7, "Resume after a restart: %v", err)
			}
			e.is(m, runtime.Running, "paused→running (Resume after a restart)")
		case runtime.Created, runtime.Dead:
			if err := m.Start(e.ctx()); err != nil {
				e.broken(7, "Start of a %s machine after a restart: %v", c, err)
			}
			e.is(m, runtime.Running, string(c)+"→running (Start after a restart)")
		}
		w := e.waiting(m)
		e.silent(w, "after a restart, while the machine runs")
		if e.f.Kill != nil {
			e.f.Kill(e, e.rt, m.ID())
			// Who is not the parent may not learn the signal.
			e.returns(w, time.Now(), "for a kill after a restart", runtime.CauseKilled, runtime.CauseUnknown)
			continue
		}
		e.must("Stop after a restart", m.Stop(e.ctx()))
		e.returns(w, time.Now(), "for Stop after a restart", runtime.CauseStopped)
	}
}

func testRestartInCreate(e *env) {
	for i, d := range cuts {
		spec := e.spec()
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		done := make(chan error, 1)
		old := e.rt
		go func() { _, err := old.Create(ctx, spec); done <- err }()
		select {
		case <-done:
		case <-time.After(d):
		}
		e.rt = e.f.Restart(e, e.rt)
		cancel()
		for _, s := range e.find(spec.ID) {
			if s.Condition != runtime.Created {
				e.broken(1, "a machine that is half made is listed as %s", s.Condition)
			}
			if _, err := e.rt.Adopt(e.ctx(), spec.ID); err != nil {
				e.broken(1, "Adopt of what Create left: %v", err)
			}
		}
		if i%2 == 0 {
			m, err := e.rt.Create(e.ctx(), spec)
			if err != nil {
				e.broken(1, "Create again after the caller was killed in it at %v: %v", d, err)
				continue
			}
			e.start(m)
		}
		if err := e.rt.Destroy(e.ctx(), spec.ID); err != nil {
			e.broken(1, "Destroy after the caller was killed in Create at %v: %v", d, err)
		}
	}
}

func testReboot(e *env) {
	before := map[runtime.Condition]runtime.Status{}
	for _, c := range e.conditions() {
		before[c] = e.status(e.to(c))
	}
	e.rt = e.f.Reboot(e, e.rt)
	for c, was := range before {
		m, err := e.rt.Adopt(e.ctx(), was.Spec.ID)
		if err != nil {
			e.broken(1, "Adopt of a machine that was %s before the reboot: %v", c, err)
			continue
		}
		switch c {
		case runtime.Created:
			e.is(m, runtime.Created, "created→created (reboot)")
		case runtime.Dead:
			e.is(m, runtime.Dead, "dead→dead (reboot)")
		default:
			s := e.is(m, runtime.Dead, string(c)+"→dead (reboot)")
			if s.Exit != nil && s.Exit.Cause != runtime.CauseReboot {
				e.broken(5, "a machine that was %s before the reboot ended as %+v, want %s", c, s.Exit, runtime.CauseReboot)
			}
			e.returns(e.waiting(m), time.Now(), "after the reboot", runtime.CauseReboot)
		}
		e.start(m)
		if s := e.is(m, runtime.Running, "→running (Start after the reboot)"); s.BootID == was.BootID {
			e.edge("dead→running (Start)", "boot id is still %s after the reboot", s.BootID)
		}
	}
}
