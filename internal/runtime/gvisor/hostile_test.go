package gvisor_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/disk"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
)

// A guest that made its own tree strange hurts nobody else, and at most itself.
func TestHostileTree(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	ctx := limited(t)
	m := started(t, w, w.Spec())
	must(t, m, "link?path=/tmp&to=/../../../../../../etc", "")
	ok(t, m.Stop(ctx))
	ok(t, m.Start(ctx))
	must(t, m, "facts", "")
	ok(t, m.Destroy(ctx))
}

// A guest that moves our places away, or puts other things there, starts again
// all the same, and gets our daemon.
func TestHostilePlaces(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	ctx := limited(t)
	m := started(t, w, w.Spec())
	for _, place := range []string{"/.space", "/proc", "/sys", "/dev"} {
		if _, err := ask(ctx, m, "rename?path="+place+"&to=/moved"+place[1:], ""); err != nil {
			continue // the kernel of the machine refuses
		}
		must(t, m, "link?path="+place+"&to=/etc", "")
	}
	ok(t, m.Stop(ctx))
	ok(t, m.Start(ctx))
	must(t, m, "facts", "")
	ok(t, m.Destroy(ctx))

	// The parts under it, changed here while nothing runs, on a machine whose
	// place is still a directory: a test must not follow a guest's links either.
	m = started(t, w, w.Spec())
	root := filepath.Join(w.Conf.RunDir, "m", string(m.ID()), "root", ".space")
	ok(t, m.Stop(ctx))
	for _, bad := range []func(p string) error{
		func(p string) error { return os.Symlink("/etc/passwd", p) },
		func(p string) error { return os.Mkdir(p, 0o755) },
		func(p string) error { return os.WriteFile(p, nil, 0o600) },
		func(p string) error { return unix.Mkfifo(p, 0o600) },
	} {
		upper := filepath.Join(w.Conf.RunDir, "m", string(m.ID()), "disk")
		ok(t, disk.MountImage(filepath.Join(w.Conf.DataDir, "machines", string(m.ID()), "disk.img"), upper))
		ok(t, disk.Overlay(filepath.Join(w.Conf.DataDir, "template"), upper, filepath.Dir(root)))
		if fi, err := os.Lstat(root); err != nil || !fi.IsDir() {
			t.Fatalf("%v %v", fi, err)
		}
		for _, name := range []string{"guest", "channel"} {
			ok(t, os.RemoveAll(filepath.Join(root, name)))
			ok(t, bad(filepath.Join(root, name)))
		}
		ok(t, m.Start(ctx))
		must(t, m, "facts", "")
		ok(t, m.Stop(ctx))
	}
}

// A guest that opens connections without end stalls only itself.
func TestHostileChannel(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	bad, good := started(t, w, w.Spec()), started(t, w, w.Spec())
	must(t, bad, "connect?n=40", "")
	start := time.Now()
	must(t, good, "facts", "")
	if d := time.Since(start); d > 2*time.Second {
		t.Fatalf("the other machine took %v", d)
	}
	if st := status(t, good); st.Condition != runtime.Running {
		t.Fatalf("status %+v", st)
	}
}
