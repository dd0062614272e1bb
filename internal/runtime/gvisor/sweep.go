package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/space-platform/space/internal/disk"
	"github.com/space-platform/space/internal/netns"
	"github.com/space-platform/space/internal/sandbox"
)

// Sweep removes what belongs to our directories and control groups and to no
// machine, finishes destructions that were cut short, and says what it did, a
// line each. It touches nothing of a machine that has a record.
func (r *Runtime) Sweep(ctx context.Context) ([]string, error) {
	ctx, leave, err := r.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	var did []string
	var errs []error
	note := func(err error, format string, args ...any) {
		if err != nil {
			errs = append(errs, err)
			return
		}
		did = append(did, fmt.Sprintf(format, args...))
	}
	for id, why := range r.suspects() {
		unlock, err := r.lock(ctx, id)
		if err != nil {
			return did, err
		}
		if rec, ok := r.get(id); !ok || rec.Removing {
			note(r.destroy(ctx, id), "removed %s: %s", id, why)
		}
		unlock()
	}
	// Boots that were cut short: no caller was told that they run.
	for _, id := range r.cutShort() {
		unlock, err := r.lock(ctx, id)
		if err != nil {
			return did, err
		}
		if rec, ok := r.get(id); ok && rec.Boot != nil && !rec.Boot.Started && !rec.Removing {
			err := r.kill(ctx, id)
			if err == nil {
				rec.Boot = nil
				err = r.put(rec)
			}
			note(err, "ended the boot of %s: it was cut short", id)
		}
		unlock()
	}
	// Loop devices that kept their image after their mount went.
	loops, err := disk.Loops(r.paths.machines())
	if err != nil {
		errs = append(errs, err)
	}
	for _, l := range loops {
		id := sandbox.ID(filepath.Base(filepath.Dir(l.Backing)))
		if _, ok := r.get(id); !ok {
			note(disk.Detach(l.Device), "detached %s of %s", l.Device, id)
		}
	}
	return did, errors.Join(errs...)
}

func (r *Runtime) cutShort() []sandbox.ID {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []sandbox.ID
	for id, e := range r.entries {
		if e.rec.Boot != nil && !e.rec.Boot.Started {
			out = append(out, id)
		}
	}
	return out
}

// suspects lists ids that own something here but have no whole record.
func (r *Runtime) suspects() map[sandbox.ID]string {
	out := map[sandbox.ID]string{}
	see := func(name, why string) {
		id, err := sandbox.ParseID(name)
		if err != nil {
			return // not made by us
		}
		if rec, ok := r.get(id); ok {
			if rec.Removing {
				out[id] = "its destruction was cut short"
			}
			return
		}
		if out[id] == "" {
			out[id] = why
		}
	}
	list := func(dir, why string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return
		}
		for _, e := range entries {
			see(e.Name(), why)
		}
	}
	list(r.paths.machines(), "files without a record")
	list(r.paths.live(), "runtime state without a record")
	list(r.paths.namespaces(), "a network namespace without a record")
	if names, err := r.groups.Names(); err == nil {
		for _, n := range names {
			see(n, "a control group without a record")
		}
	}
	if mounts, err := disk.Mounts(r.paths.live()); err == nil {
		for _, m := range mounts {
			rest := strings.TrimPrefix(m, r.paths.live()+"/")
			name, _, _ := strings.Cut(rest, "/")
			see(name, "a mount without a record")
		}
	}
	return out
}

// Uninstall gives the host back what the driver itself holds outside of
// machines: the control group parent and the shared empty network namespace.
// All machines must be destroyed and the runtime closed.
func (r *Runtime) Uninstall(ctx context.Context) error {
	r.mu.Lock()
	left := len(r.entries)
	r.mu.Unlock()
	if left > 0 {
		return fmt.Errorf("gvisor: %d machines are still there", left)
	}
	return errors.Join(netns.Remove(r.paths.nullNetns()), r.groups.Close(ctx))
}
