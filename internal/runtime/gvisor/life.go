package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/disk"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/netns"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
)

// The places where tests fail, hang or kill us.
var (
	fpCreateRecord  = failpoint.Name("gvisor.create.record")
	fpCreateDisk    = failpoint.Name("gvisor.create.disk")
	fpCreateMount   = failpoint.Name("gvisor.create.mount")
	fpCreateOverlay = failpoint.Name("gvisor.create.overlay")
	fpCreateNetns   = failpoint.Name("gvisor.create.netns")
	fpCreateChannel = failpoint.Name("gvisor.create.channel")
	fpCreateSpec    = failpoint.Name("gvisor.create.spec")
	fpCreateCommit  = failpoint.Name("gvisor.create.commit")

	fpStartPrepare = failpoint.Name("gvisor.start.prepare")
	fpStartRun     = failpoint.Name("gvisor.start.run")
	fpStartWatch   = failpoint.Name("gvisor.start.watch")
	fpStartCommit  = failpoint.Name("gvisor.start.commit")

	fpPause        = failpoint.Name("gvisor.pause.pause")
	fpPauseCommit  = failpoint.Name("gvisor.pause.commit")
	fpResume       = failpoint.Name("gvisor.resume.resume")
	fpResumeCommit = failpoint.Name("gvisor.resume.commit")

	fpStopKill    = failpoint.Name("gvisor.stop.kill")
	fpStopSync    = failpoint.Name("gvisor.stop.sync")
	fpStopUnmount = failpoint.Name("gvisor.stop.unmount")
	fpStopCommit  = failpoint.Name("gvisor.stop.commit")

	fpDestroyMark    = failpoint.Name("gvisor.destroy.mark")
	fpDestroyKill    = failpoint.Name("gvisor.destroy.kill")
	fpDestroyUnmount = failpoint.Name("gvisor.destroy.unmount")
	fpDestroyNetns   = failpoint.Name("gvisor.destroy.netns")
	fpDestroyFiles   = failpoint.Name("gvisor.destroy.files")
	fpDestroyRecord  = failpoint.Name("gvisor.destroy.record")
)

// step is one idempotent part of making or ending a machine, named by the
// failpoint before it.
type step struct {
	point string
	do    func() error
}

func run(ctx context.Context, steps []step) error {
	for _, s := range steps {
		if err := failpoint.Hit(ctx, s.point); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.do(); err != nil {
			return err
		}
	}
	return nil
}

// make does all of Create; it may be repeated from any point.
func (r *Runtime) make(ctx context.Context, spec runtime.Spec) error {
	id := spec.ID
	lower, err := r.lower(ctx, spec)
	if err != nil {
		return err
	}
	rec := record{Version: recordVersion, Spec: spec}
	err = run(ctx, []step{
		{fpCreateRecord, func() error {
			if err := os.Mkdir(r.paths.keep(id), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("gvisor: %w", err)
			}
			return r.put(rec)
		}},
		{fpCreateDisk, func() error { return disk.Make(ctx, r.paths.image(id), spec.Resources.DiskBytes) }},
		{fpCreateMount, func() error { return r.mountDisk(id) }},
		{fpCreateOverlay, func() error { return disk.Overlay(lower, r.paths.disk(id), r.paths.rootfs(id)) }},
		{fpCreateNetns, func() error { return netns.Create(r.paths.netns(id)) }},
		{fpCreateChannel, func() error { return r.listen(id) }},
		{fpCreateSpec, func() error { return r.writeSpec(spec) }},
		{fpCreateCommit, func() error {
			rec.Made = true
			if err := r.put(rec); err != nil {
				return err
			}
			return syncDir(r.paths.machines())
		}},
	})
	return hostRoom(err)
}

// hostRoom gives a full host the contract's name.
func hostRoom(err error) error {
	if errors.Is(err, disk.ErrNoSpace) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: %w", runtime.ErrNoSpace, err)
	}
	return err
}

func (r *Runtime) lower(ctx context.Context, spec runtime.Spec) (string, error) {
	lower, err := r.conf.Templates.Mount(ctx, spec.TemplateDigest)
	if errors.Is(err, template.ErrNotFound) {
		return "", fmt.Errorf("%w: %w", runtime.ErrNoTemplate, err)
	}
	if err != nil {
		return "", fmt.Errorf("gvisor: template: %w", err)
	}
	return lower, nil
}

// mountDisk makes the machine's directories and mounts its image.
func (r *Runtime) mountDisk(id sandbox.ID) error {
	for _, d := range []string{r.paths.dir(id), r.paths.disk(id), r.paths.rootfs(id), r.paths.bundle(id), r.paths.channel(id), r.paths.state(id)} {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("gvisor: %w", err)
		}
	}
	return disk.MountImage(r.paths.image(id), r.paths.disk(id))
}

func (r *Runtime) writeSpec(spec runtime.Spec) error {
	id := spec.ID
	return writeBundle(r.paths.bundle(id), ociDocument(spec, bundle{
		root: r.paths.rootfs(id), netns: r.paths.netns(id), channel: r.paths.channel(id),
		daemon: r.conf.GuestDaemon, cgroup: r.groups.Path(string(id)),
		v2: r.groups.V2(), swap: r.groups.SwapLimit(),
	}))
}

// start does all of Start. The caller holds the lock.
func (r *Runtime) start(ctx context.Context, rec record) error {
	id := rec.Spec.ID
	switch {
	case rec.damaged:
		return fmt.Errorf("gvisor: the record of %s cannot be read; destroy it", id)
	case rec.resident() && rec.Exit == nil && rec.Boot.Paused:
		return fmt.Errorf("%w: %s", runtime.ErrPaused, id)
	case rec.resident() && rec.Exit == nil:
		return nil
	case !rec.Made: // Create was killed in its middle
		if err := r.make(ctx, rec.Spec); err != nil {
			return err
		}
		rec.Made = true
	}
	lower, err := r.lower(ctx, rec.Spec)
	if err != nil {
		return err
	}
	var w *watch
	err = run(ctx, []step{
		{fpStartPrepare, func() error {
			if err := r.kill(ctx, id); err != nil { // what an earlier boot left
				return err
			}
			if err := r.mountDisk(id); err != nil {
				return err
			}
			if err := disk.Overlay(lower, r.paths.disk(id), r.paths.rootfs(id)); err != nil {
				return err
			}
			if err := keepPlaces(r.paths.rootfs(id)); err != nil {
				return err
			}
			if err := netns.Create(r.paths.netns(id)); err != nil {
				return err
			}
			if err := netns.Reset(r.paths.netns(id)); err != nil {
				return err
			}
			if err := r.listen(id); err != nil {
				return err
			}
			if err := r.writeSpec(rec.Spec); err != nil {
				return err
			}
			rec.BootID, rec.Exit = sandbox.Random(20), nil
			rec.Boot = &boot{Host: r.hostID}
			return r.put(rec)
		}},
		{fpStartRun, func() error {
			_, err := r.command(ctx, verbRun, id, true)
			return err
		}},
		{fpStartWatch, func() (err error) {
			w, err = r.openWatch(id)
			return err
		}},
		{fpStartCommit, func() error {
			rec.Boot.PID, rec.Boot.Ticks, rec.Boot.Started = w.pid, w.ticks, true
			if err := r.put(rec); err != nil {
				return err
			}
			r.begin(id, w)
			return nil
		}},
	})
	if err != nil {
		if w != nil {
			w.close()
		}
		undo := context.WithoutCancel(ctx)
		if kerr := r.kill(undo, id); kerr != nil {
			r.conf.Logf("gvisor: undo of start %s: %v", id, kerr)
		}
		rec.Boot = nil
		if perr := r.put(rec); perr != nil {
			r.conf.Logf("gvisor: undo of start %s: %v", id, perr)
		}
	}
	return hostRoom(err)
}

// kill ends every process of id and removes its control groups and runsc's
// state. It needs nothing but the id.
func (r *Runtime) kill(ctx context.Context, id sandbox.ID) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	r.mu.Lock()
	var w *watch
	if e := r.entries[id]; e != nil {
		w = e.watch
	}
	r.mu.Unlock()
	if w != nil {
		w.expect(runtime.Exit{Cause: runtime.CauseStopped})
	}
	if err := r.groups.Kill(ctx, string(id)); err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	if w != nil {
		// Its end is known before its control group and counters go.
		select {
		case <-w.done:
		case <-ctx.Done():
			return fmt.Errorf("gvisor: the sandbox process of %s does not end: %w", id, ctx.Err())
		}
	}
	if err := r.groups.Remove(ctx, string(id)); err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	entries, err := os.ReadDir(r.paths.state(id))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("gvisor: %w", err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(r.paths.state(id) + "/" + e.Name()); err != nil {
			return fmt.Errorf("gvisor: %w", err)
		}
	}
	for _, f := range []string{r.paths.pid(id), r.paths.panicLog(id), r.paths.endLog(id), r.paths.log(id)} {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("gvisor: %w", err)
		}
	}
	return nil
}

// halt does all of Stop. The caller holds the lock.
func (r *Runtime) halt(ctx context.Context, rec record) error {
	id := rec.Spec.ID
	if rec.damaged || !rec.Made || rec.Boot == nil {
		return nil
	}
	return run(ctx, []step{
		{fpStopKill, func() error { return r.kill(ctx, id) }},
		{fpStopSync, func() error { return disk.Sync(r.paths.disk(id), r.paths.image(id)) }},
		{fpStopUnmount, func() error { return r.unmount(ctx, id, patience) }},
		{fpStopCommit, func() error {
			rec.Boot, rec.Exit = nil, &runtime.Exit{Cause: runtime.CauseStopped}
			if err := r.put(rec); err != nil {
				return err
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if e := r.entries[id]; e != nil {
				e.watch = nil
			}
			return nil
		}},
	})
}

func (r *Runtime) unmount(ctx context.Context, id sandbox.ID, patience time.Duration) error {
	if err := disk.Unmount(r.paths.rootfs(id)); err != nil {
		return err
	}
	if err := disk.Unmount(r.paths.disk(id)); err != nil {
		return err
	}
	// A sandbox process that is just starting may have a copy of our mounts for
	// a moment, and any process of the host with a mount namespace of its own for
	// as long as it lives. The disk is not free before that is gone.
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if !disk.Released(ctx, r.paths.image(id)) && ctx.Err() != nil {
		r.conf.Logf("gvisor: the disk of %s is still used by somebody", id)
	}
	return nil
}

// destroy does all of Destroy, from any condition. The caller holds the lock.
func (r *Runtime) destroy(ctx context.Context, id sandbox.ID) error {
	rec, known := r.get(id)
	err := run(ctx, []step{
		{fpDestroyMark, func() error {
			if !known || rec.Removing || rec.damaged {
				return nil
			}
			rec.Removing = true
			return r.put(rec)
		}},
		{fpDestroyKill, func() error { return r.kill(ctx, id) }},
		// Nobody will use this disk again: what still holds it may let it go later.
		{fpDestroyUnmount, func() error { return r.unmount(ctx, id, time.Second) }},
		{fpDestroyNetns, func() error {
			r.unlisten(id)
			return netns.Remove(r.paths.netns(id))
		}},
		{fpDestroyFiles, func() error {
			if err := r.removeLive(id); err != nil {
				return err
			}
			// The record goes last: as long as anything is there, so is it.
			for _, f := range []string{r.paths.image(id), r.paths.image(id) + ".new"} {
				if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("gvisor: %w", err)
				}
			}
			return nil
		}},
		{fpDestroyRecord, func() error {
			if err := os.RemoveAll(r.paths.keep(id)); err != nil {
				return fmt.Errorf("gvisor: %w", err)
			}
			return syncDir(r.paths.machines())
		}},
	})
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.entries, id)
	return nil
}

// removeLive removes RunDir/m/<id>, but never through something that is still
// mounted there: that could be a guest's whole tree.
func (r *Runtime) removeLive(id sandbox.ID) error {
	for _, d := range []string{r.paths.rootfs(id), r.paths.disk(id)} {
		if mounted, err := disk.Mounted(d); err != nil {
			return err
		} else if mounted {
			return fmt.Errorf("gvisor: %s is still mounted", id)
		}
		if err := os.Remove(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("gvisor: %w", err)
		}
	}
	if err := os.RemoveAll(r.paths.dir(id)); err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	return nil
}

// readPID reads the file that runsc run wrote.
func (r *Runtime) readPID(id sandbox.ID) (int, error) {
	b, err := os.ReadFile(r.paths.pid(id))
	if err != nil {
		return 0, fmt.Errorf("gvisor: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return 0, fmt.Errorf("gvisor: bad pid file of %s", id)
	}
	return pid, nil
}
