package fake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

var (
	errKilled   = errors.New("fake: the calling process was killed")
	errHalfMade = errors.New("fake: machine is half made; repeat Create or Destroy")
	errDiskFull = errors.New("fake: disk is full")
)

// Driver is one run of our process on a World. It implements runtime.Runtime.
type Driver struct {
	w    *World
	dead chan struct{}
	// conns are the host ends this process holds.
	conns connSet
}

// New starts our process on the host w. Drivers of one World see the same
// machines.
func New(w *World) *Driver {
	d := &Driver{w: w, dead: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drivers[d] = true
	return d
}

// World gives the host that the driver runs on.
func (d *Driver) World() *World { return d.w }

// Kill is kill -9 of the process: calls in progress end where they are, without
// any clean-up, its streams are cut, and later calls fail. Machines go on.
func (d *Driver) Kill() {
	d.w.mu.Lock()
	defer d.w.mu.Unlock()
	d.killLocked()
}

func (d *Driver) killLocked() {
	if !d.w.drivers[d] {
		return
	}
	delete(d.w.drivers, d)
	close(d.dead)
	d.conns.closeAll()
}

// Capabilities implements runtime.Runtime.
func (d *Driver) Capabilities() runtime.Capabilities { return d.w.caps }

// Create implements runtime.Runtime.
func (d *Driver) Create(ctx context.Context, spec runtime.Spec) (runtime.Machine, error) {
	give, err := d.take(ctx, spec.ID)
	if err != nil {
		return nil, err
	}
	defer give()
	w := d.w
	var made bool // by this call
	err = d.step(ctx, OpCreateBegin, spec.ID, func() error {
		if m := w.machines[spec.ID]; m != nil {
			if m.spec != spec {
				return fmt.Errorf("fake: machine %s: %w", spec.ID, runtime.ErrSpecMismatch)
			}
			return nil
		}
		if w.templates != nil && !w.templates[spec.TemplateDigest] {
			return fmt.Errorf("fake: template %s: %w", spec.TemplateDigest, runtime.ErrNoTemplate)
		}
		if w.room > 0 && len(w.machines) >= w.room {
			return fmt.Errorf("fake: %d machines: %w", w.room, runtime.ErrNoSpace)
		}
		w.machines[spec.ID] = &machine{spec: spec, cond: runtime.Created, has: map[string]bool{"record": true}}
		made = true
		return nil
	})
	if err == nil {
		err = d.step(ctx, OpCreateDisk, spec.ID, func() error {
			if m := w.machines[spec.ID]; !m.has["disk"] {
				m.has["disk"] = true
				m.disk = map[string][]byte{}
			}
			return nil
		})
	}
	if err == nil {
		err = d.step(ctx, OpCreateDone, spec.ID, func() error {
			m := w.machines[spec.ID]
			for _, p := range parts {
				m.has[p] = true
			}
			return nil
		})
	}
	if err != nil {
		// All or nothing for errors; a killed process and an ended context leave
		// what there is to a repeated Create or a Destroy.
		var after *afterError
		if made && !errors.As(err, &after) && d.alive(ctx) == nil {
			w.mu.Lock()
			delete(w.machines, spec.ID)
			w.mu.Unlock()
		}
		return nil, err
	}
	return &handle{d: d, id: spec.ID}, nil
}

// Adopt implements runtime.Runtime.
func (d *Driver) Adopt(ctx context.Context, id sandbox.ID) (runtime.Machine, error) {
	err := d.step(ctx, OpAdopt, id, func() error {
		if d.w.machines[id] == nil {
			return notFound(id)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &handle{d: d, id: id}, nil
}

// List implements runtime.Runtime; it is sorted by id.
func (d *Driver) List(ctx context.Context) ([]runtime.Status, error) {
	var out []runtime.Status
	err := d.step(ctx, OpList, Any, func() error {
		for _, m := range d.w.machines {
			out = append(out, m.status())
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(out, func(a, b runtime.Status) int { return cmp.Compare(a.Spec.ID, b.Spec.ID) })
	return out, nil
}

// Restore implements runtime.Runtime.
func (d *Driver) Restore(ctx context.Context, _ runtime.Artifacts, spec runtime.Spec) (runtime.Machine, error) {
	if err := d.alive(ctx); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("fake: restore %s: %w", spec.ID, runtime.ErrUnsupported)
}

// Destroy implements runtime.Runtime.
func (d *Driver) Destroy(ctx context.Context, id sandbox.ID) error {
	give, err := d.take(ctx, id)
	if err != nil {
		return err
	}
	defer give()
	return d.step(ctx, OpDestroy, id, func() error {
		if m := d.w.machines[id]; m != nil {
			d.w.endLocked(m, runtime.Created, runtime.Exit{Cause: runtime.CauseStopped, Detail: "destroyed"})
			delete(d.w.machines, id)
		}
		return nil
	})
}

// handle implements runtime.Machine; it holds nothing but the id.
type handle struct {
	d  *Driver
	id sandbox.ID
}

func (h *handle) ID() sandbox.ID { return h.id }

// change runs one step that changes the machine, in its turn.
func (h *handle) change(ctx context.Context, op Op, effect func(m *machine) error) error {
	give, err := h.d.take(ctx, h.id)
	if err != nil {
		return err
	}
	defer give()
	return h.look(ctx, op, effect)
}

// look runs one step without the turn.
func (h *handle) look(ctx context.Context, op Op, effect func(m *machine) error) error {
	return h.d.step(ctx, op, h.id, func() error {
		m := h.d.w.machines[h.id]
		if m == nil {
			return notFound(h.id)
		}
		return effect(m)
	})
}

func (h *handle) Status(ctx context.Context) (runtime.Status, error) {
	var s runtime.Status
	err := h.look(ctx, OpStatus, func(m *machine) error { s = m.status(); return nil })
	return s, err
}

func (h *handle) Start(ctx context.Context) error {
	return h.change(ctx, OpStart, func(m *machine) error {
		switch {
		case m.cond == runtime.Running:
			return nil
		case m.cond == runtime.Paused:
			return fmt.Errorf("fake: start %s: %w", h.id, runtime.ErrPaused)
		case !m.whole():
			return errHalfMade
		}
		w := h.d.w
		m.bootID = w.census.start(h.id)
		m.cond, m.exit = runtime.Running, nil
		m.run = newRun(w, m)
		return nil
	})
}

func (h *handle) Pause(ctx context.Context) error {
	return h.change(ctx, OpPause, func(m *machine) error {
		switch m.cond {
		case runtime.Paused:
		case runtime.Running:
			m.cond = runtime.Paused
			m.run.gate(false)
		default:
			return fmt.Errorf("fake: pause %s: %w", h.id, runtime.ErrNotRunning)
		}
		return nil
	})
}

func (h *handle) Resume(ctx context.Context) error {
	return h.change(ctx, OpResume, func(m *machine) error {
		switch m.cond {
		case runtime.Running:
		case runtime.Paused:
			m.cond = runtime.Running
			m.run.gate(!m.mute)
		default:
			return fmt.Errorf("fake: resume %s: %w", h.id, runtime.ErrNotRunning)
		}
		return nil
	})
}

func (h *handle) Capture(ctx context.Context, kind runtime.CaptureKind) (runtime.Artifacts, error) {
	if err := h.d.alive(ctx); err != nil {
		return runtime.Artifacts{}, err
	}
	return runtime.Artifacts{}, fmt.Errorf("fake: capture %s of %s: %w", kind, h.id, runtime.ErrUnsupported)
}

func (h *handle) Stop(ctx context.Context) error {
	return h.change(ctx, OpStop, func(m *machine) error {
		if m.bootID == "" || m.cond == runtime.Created {
			return nil
		}
		h.d.w.endLocked(m, runtime.Created, runtime.Exit{Cause: runtime.CauseStopped})
		return nil
	})
}

func (h *handle) Destroy(ctx context.Context) error { return h.d.Destroy(ctx, h.id) }

func (h *handle) Dial(ctx context.Context) (net.Conn, error) {
	var r *run
	resident := func(m *machine) error {
		switch m.cond {
		case runtime.Running:
			r = m.run
			return nil
		case runtime.Paused:
			return fmt.Errorf("fake: dial %s: %w", h.id, runtime.ErrPaused)
		default:
			return fmt.Errorf("fake: dial %s: %w", h.id, runtime.ErrNotRunning)
		}
	}
	if err := h.look(ctx, OpDial, resident); err != nil {
		return nil, err
	}
	select {
	case <-r.booted:
	case <-r.ended:
		return nil, fmt.Errorf("fake: dial %s: %w", h.id, runtime.ErrNotRunning)
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-h.d.dead:
		return nil, errKilled
	}
	for { // until the guest runs and listens
		h.d.w.mu.Lock()
		m := h.d.w.machines[h.id]
		if m == nil || m.run != r {
			h.d.w.mu.Unlock()
			return nil, fmt.Errorf("fake: dial %s: %w", h.id, runtime.ErrNotRunning)
		}
		err := resident(m)
		open, changed := r.open, r.change
		h.d.w.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-open:
			return h.d.connect(r)
		case <-changed:
		case <-r.ended:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-h.d.dead:
			return nil, errKilled
		}
	}
}

func (h *handle) Stats(ctx context.Context) (runtime.Stats, error) {
	var s runtime.Stats
	err := h.look(ctx, OpStats, func(m *machine) error {
		if m.stats != nil {
			s = *m.stats
			return nil
		}
		s.DiskBytes = m.diskUsed()
		if m.run != nil {
			s.MemoryBytes = 16 << 20
			if l := m.spec.Resources.MemoryBytes; l > 0 {
				s.MemoryBytes = min(s.MemoryBytes, uint64(l))
			}
			s.MemoryPeak = s.MemoryBytes
			s.Processes = uint64(1 + m.run.processes())
			s.CPUNanos = uint64(h.d.w.clock.Now().Sub(m.run.since)) / 100
		}
		return nil
	})
	return s, err
}

func (h *handle) Wait(ctx context.Context) (runtime.Exit, error) {
	var r *run
	var exit runtime.Exit
	err := h.look(ctx, OpWait, func(m *machine) error {
		r = m.run
		if m.exit != nil {
			exit = *m.exit
		} else {
			exit = runtime.Exit{Cause: runtime.CauseUnknown, Detail: "never started"}
		}
		return nil
	})
	if err != nil || r == nil {
		return exit, err
	}
	select {
	case <-r.ended:
		return r.exit, nil
	case <-ctx.Done():
		return runtime.Exit{}, ctx.Err()
	case <-h.d.dead:
		return runtime.Exit{}, errKilled
	}
}
