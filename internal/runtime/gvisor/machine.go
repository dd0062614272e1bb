package gvisor

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/space-platform/space/internal/disk"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// machine is a handle: the id and nothing else.
type machine struct {
	r  *Runtime
	id sandbox.ID
}

var _ runtime.Machine = machine{}

// ID implements runtime.Machine.
func (m machine) ID() sandbox.ID { return m.id }

// locked runs f with the lock of the machine and its record.
func (m machine) locked(ctx context.Context, f func(ctx context.Context, rec record) error) error {
	ctx, leave, err := m.r.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	unlock, err := m.r.lock(ctx, m.id)
	if err != nil {
		return err
	}
	defer unlock()
	rec, ok := m.r.get(m.id)
	if !ok || rec.Removing {
		return notFound(m.id)
	}
	return f(ctx, rec)
}

// Status implements runtime.Machine.
func (m machine) Status(context.Context) (runtime.Status, error) {
	rec, ok := m.r.get(m.id)
	if !ok {
		return runtime.Status{}, notFound(m.id)
	}
	return rec.status(), nil
}

// Start implements runtime.Machine. A paused machine is to be resumed: ErrPaused.
func (m machine) Start(ctx context.Context) error {
	return m.locked(ctx, func(ctx context.Context, rec record) error { return m.r.start(ctx, rec) })
}

// Pause implements runtime.Machine.
func (m machine) Pause(ctx context.Context) error {
	return m.locked(ctx, func(ctx context.Context, rec record) error {
		return m.r.freeze(ctx, rec, true, verbPause, fpPause, fpPauseCommit)
	})
}

// Resume implements runtime.Machine.
func (m machine) Resume(ctx context.Context) error {
	return m.locked(ctx, func(ctx context.Context, rec record) error {
		return m.r.freeze(ctx, rec, false, verbResume, fpResume, fpResumeCommit)
	})
}

// freeze pauses or resumes. The command is not killed with us or with ctx:
// half done, runsc's state and the sandbox would disagree for ever.
func (r *Runtime) freeze(ctx context.Context, rec record, paused bool, v verb, before, commit string) error {
	id := rec.Spec.ID
	if !rec.resident() || rec.Exit != nil {
		return fmt.Errorf("%w: %s", runtime.ErrNotRunning, id)
	}
	if rec.Boot.Paused == paused {
		return nil
	}
	return run(ctx, []step{
		{before, func() error {
			cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTimeout)
			defer cancel()
			_, err := r.command(cctx, v, id, false)
			if err == nil {
				return nil
			}
			if now, ok := r.get(id); ok && now.Exit != nil {
				return fmt.Errorf("%w: %s", runtime.ErrNotRunning, id)
			}
			want := "running"
			if paused {
				want = "paused"
			}
			if st, serr := r.state(cctx, id); serr == nil && st == want {
				return nil // done before, by a process that was killed then
			}
			return err
		}},
		{commit, func() error {
			// The boot may have ended meanwhile: its end must not be lost.
			r.mu.Lock()
			if e := r.entries[id]; e != nil {
				rec = e.rec.clone()
			}
			r.mu.Unlock()
			if !rec.resident() || rec.Exit != nil {
				return fmt.Errorf("%w: %s", runtime.ErrNotRunning, id)
			}
			rec.Boot.Paused = paused
			return r.putAlive(rec)
		}},
	})
}

// Capture implements runtime.Machine.
func (m machine) Capture(context.Context, runtime.CaptureKind) (runtime.Artifacts, error) {
	return runtime.Artifacts{}, fmt.Errorf("%w: capture", runtime.ErrUnsupported)
}

// Stop implements runtime.Machine.
func (m machine) Stop(ctx context.Context) error {
	return m.locked(ctx, func(ctx context.Context, rec record) error { return m.r.halt(ctx, rec) })
}

// Destroy implements runtime.Machine.
func (m machine) Destroy(ctx context.Context) error { return m.r.Destroy(ctx, m.id) }

// Dial implements runtime.Machine.
func (m machine) Dial(ctx context.Context) (net.Conn, error) {
	w, err := m.r.running(m.id)
	if err != nil {
		return nil, err
	}
	a, err := m.r.acceptor(ctx, m.id)
	if err != nil {
		return nil, err
	}
	dctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-w.done:
			cancel(runtime.ErrNotRunning)
		case <-dctx.Done():
		}
	}()
	c, err := a.Dial(dctx)
	if err == nil {
		return c, nil
	}
	if errors.Is(context.Cause(dctx), runtime.ErrNotRunning) {
		return nil, fmt.Errorf("%w: %s", runtime.ErrNotRunning, m.id)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if _, rerr := m.r.running(m.id); rerr != nil {
		return nil, rerr // destroyed or ended while we dialled
	}
	return nil, err
}

// running gives the watch of a machine that can be dialled.
func (r *Runtime) running(id sandbox.ID) (*watch, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.entries[id]
	switch {
	case e == nil || e.rec.Removing:
		return nil, notFound(id)
	case e.watch == nil || e.rec.Exit != nil || !e.rec.resident():
		return nil, fmt.Errorf("%w: %s", runtime.ErrNotRunning, id)
	case e.rec.Boot.Paused:
		return nil, fmt.Errorf("%w: %s", runtime.ErrPaused, id)
	}
	return e.watch, nil
}

// Stats implements runtime.Machine.
func (m machine) Stats(context.Context) (runtime.Stats, error) {
	if _, ok := m.r.get(m.id); !ok {
		return runtime.Stats{}, notFound(m.id)
	}
	s := m.r.groups.Stats(string(m.id))
	used, err := disk.Allocated(m.r.paths.image(m.id))
	if err != nil {
		used = 0 // half-made
	}
	return runtime.Stats{
		CPUNanos: s.CPUNanos, MemoryBytes: s.MemoryBytes, MemoryPeak: s.MemoryPeak,
		Processes: s.Processes, OOMKills: s.OOMKills, DiskBytes: used,
	}, nil
}

// Wait implements runtime.Machine. A machine that never ran, or was stopped,
// gives CauseStopped at once.
func (m machine) Wait(ctx context.Context) (runtime.Exit, error) {
	for {
		m.r.mu.Lock()
		e := m.r.entries[m.id]
		if e == nil {
			m.r.mu.Unlock()
			return runtime.Exit{}, notFound(m.id)
		}
		rec, w := e.rec.clone(), e.watch
		m.r.mu.Unlock()
		if rec.Exit != nil {
			return *rec.Exit, nil
		}
		if !rec.resident() {
			return runtime.Exit{Cause: runtime.CauseStopped}, nil
		}
		if w == nil {
			return runtime.Exit{}, fmt.Errorf("gvisor: %s is not watched", m.id)
		}
		select {
		case <-w.done:
			if exit, ok := w.result(); ok {
				return exit, nil
			}
			return runtime.Exit{}, errors.New("gvisor: the runtime was closed")
		case <-ctx.Done():
			return runtime.Exit{}, ctx.Err()
		}
	}
}
