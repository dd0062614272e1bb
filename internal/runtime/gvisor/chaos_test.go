package gvisor_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor"
	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template/templatetest"
)

// The test binary is also the process that gets killed: with this variable set
// it does one life of a machine, with the failpoints of its environment.
const envVictim = "SPACE_TEST_VICTIM"

// order is what the victim is told.
type order struct {
	Conf victimConf
	Spec runtime.Spec
}

type victimConf struct{ DataDir, RunDir, Runsc, RunscDigest, GuestDaemon, CgroupParent, Tree string }

func TestMain(m *testing.M) {
	if text := os.Getenv(envVictim); text != "" {
		if err := victim(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type fixedTree string

func (f fixedTree) Mount(context.Context, string) (string, error) { return string(f), nil }

func victim(text string) error {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	if err := failpoint.FromEnv(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r, err := gvisor.New(gvisor.Config{
		DataDir: o.Conf.DataDir, RunDir: o.Conf.RunDir, Runsc: o.Conf.Runsc, RunscDigest: o.Conf.RunscDigest,
		GuestDaemon: o.Conf.GuestDaemon, CgroupParent: o.Conf.CgroupParent, Templates: fixedTree(o.Conf.Tree),
	})
	if err != nil {
		return err
	}
	defer r.Close()
	m, err := r.Create(ctx, o.Spec)
	if err != nil {
		return err
	}
	for _, f := range []func(context.Context) error{m.Start, m.Pause, m.Resume, m.Stop, m.Start, m.Destroy} {
		if err := f(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Our process is killed at every named place of a life. The next one finds the
// machine or nothing, can go on from there, and can remove it without a rest.
func TestKilledAtEveryFailpoint(t *testing.T) {
	templatetest.NeedRoot(t)
	self, err := os.Executable()
	ok(t, err)
	var points []string
	for _, p := range failpoint.Names() {
		if strings.HasPrefix(p, "gvisor.") {
			points = append(points, p)
		}
	}
	if len(points) < 24 {
		t.Fatalf("only %d points: %q", len(points), points)
	}
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	conf := victimConf{
		w.Conf.DataDir, w.Conf.RunDir, w.Conf.Runsc, w.Conf.RunscDigest, w.Conf.GuestDaemon, w.Conf.CgroupParent,
		filepath.Join(w.Conf.DataDir, "template"),
	}
	base := len(gvisortest.Left(w.Conf))
	ctx := limited(t)
	for i, point := range points {
		spec := w.Spec()
		ok(t, w.Runtime.Close()) // one owner of the directories at a time
		text, err := json.Marshal(order{conf, spec})
		ok(t, err)
		cmd := exec.Command(self)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), envVictim + "=" + string(text), "SPACE_FAILPOINTS=" + point + "=kill"}
		out, err := cmd.CombinedOutput()
		ended, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
		if err == nil || !ended.Signaled() || ended.Signal() != syscall.SIGKILL {
			t.Fatalf("%s: the victim was not killed there: %v\n%s", point, err, out)
		}
		r := w.Open()
		_, err = r.Adopt(ctx, spec.ID)
		found := err == nil
		switch {
		case i%3 == 0: // remove at once
			ok(t, r.Destroy(ctx, spec.ID))
		case i%3 == 1 && found && !strings.HasPrefix(point, "gvisor.destroy."): // go on
			m, err := r.Create(ctx, spec)
			if err != nil {
				t.Fatalf("%s: create again: %v", point, err)
			}
			if status(t, m).Condition == runtime.Paused {
				ok(t, m.Resume(ctx))
			}
			if err := m.Start(ctx); err != nil {
				t.Fatalf("%s: start again: %v", point, err)
			}
			must(t, m, "facts", "")
			ok(t, m.Destroy(ctx))
		default: // sweep, then remove what is a machine
			if _, err := r.Sweep(ctx); err != nil {
				t.Fatalf("%s: sweep: %v", point, err)
			}
			list, err := r.List(ctx)
			ok(t, err)
			for _, st := range list {
				ok(t, r.Destroy(ctx, st.Spec.ID))
			}
		}
		var left []string
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if left = gvisortest.Left(w.Conf); len(left) <= base+1 { // the null namespace comes with the first boot
				break
			}
		}
		if len(left) > base+1 || strings.Contains(strings.Join(left, "\n"), string(spec.ID)) {
			t.Fatalf("%s: left on the host: %q", point, left)
		}
	}
}

// Our process is killed at any instruction of a life, also while a command of the
// runtime is under way.
func TestKilledAtAnyTime(t *testing.T) {
	templatetest.NeedRoot(t)
	self, err := os.Executable()
	ok(t, err)
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	conf := victimConf{
		w.Conf.DataDir, w.Conf.RunDir, w.Conf.Runsc, w.Conf.RunscDigest, w.Conf.GuestDaemon, w.Conf.CgroupParent,
		filepath.Join(w.Conf.DataDir, "template"),
	}
	base := len(gvisortest.Left(w.Conf))
	ctx := limited(t)
	const rounds = 25
	for i := range rounds {
		spec := w.Spec()
		ok(t, w.Runtime.Close())
		text, err := json.Marshal(order{conf, spec})
		ok(t, err)
		cmd := exec.Command(self)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), envVictim + "=" + string(text)}
		ok(t, cmd.Start())
		time.Sleep(time.Duration(i) * 16 * time.Millisecond) // spread over a life
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		r := w.Open()
		if i%2 == 0 {
			_, err := r.Sweep(ctx)
			ok(t, err)
		}
		list, err := r.List(ctx)
		ok(t, err)
		for _, st := range list {
			ok(t, r.Destroy(ctx, st.Spec.ID))
		}
		if i%2 == 1 {
			_, err := r.Sweep(ctx)
			ok(t, err)
		}
		var left []string
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if left = gvisortest.Left(w.Conf); len(left) <= base+1 && !strings.Contains(strings.Join(left, "\n"), string(spec.ID)) {
				break
			}
		}
		if len(left) > base+1 || strings.Contains(strings.Join(left, "\n"), string(spec.ID)) {
			t.Fatalf("round %d: left on the host: %q", i, left)
		}
	}
}

// Each step fails once: nothing is left, and the same call then succeeds.
func TestErrorAtEveryFailpoint(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	ctx := limited(t)
	for _, point := range failpoint.Names() {
		if !strings.HasPrefix(point, "gvisor.") {
			continue
		}
		spec := w.Spec()
		disarm, err := failpoint.Arm(point, "error(1)")
		ok(t, err)
		again := func(what string, f func() error) {
			t.Helper()
			err := f()
			if err != nil && strings.HasPrefix(point, "gvisor.create.") {
				if left := gvisortest.Left(w.Conf); strings.Contains(strings.Join(left, "\n"), string(spec.ID)) {
					t.Fatalf("%s: a failed create left %q", point, left)
				}
			}
			if err != nil {
				err = f()
			}
			if err != nil {
				t.Fatalf("%s: %s again: %v", point, what, err)
			}
		}
		var m runtime.Machine
		again("create", func() (err error) { m, err = w.Runtime.Create(ctx, spec); return err })
		again("start", func() error { return m.Start(ctx) })
		again("pause", func() error { return m.Pause(ctx) })
		again("resume", func() error { return m.Resume(ctx) })
		must(t, m, "facts", "")
		again("stop", func() error { return m.Stop(ctx) })
		again("destroy", func() error { return m.Destroy(ctx) })
		disarm()
	}
}

// Sweep removes what belongs to no machine, and nothing else.
func TestSweep(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	ctx := limited(t)
	kept, lost := w.Spec(), w.Spec()
	m := started(t, w, kept)
	started(t, w, lost)
	ok(t, w.Runtime.Close())
	// The record of one is gone: its processes, mounts and groups are orphans.
	ok(t, os.Remove(filepath.Join(w.Conf.DataDir, "machines", string(lost.ID), "machine.json")))
	bare := sandbox.NewID()
	ok(t, os.Mkdir(filepath.Join(w.Conf.DataDir, "machines", string(bare)), 0o700))
	r := w.Open()
	did, err := r.Sweep(ctx)
	ok(t, err)
	if text := strings.Join(did, "\n"); !strings.Contains(text, string(lost.ID)) || !strings.Contains(text, string(bare)) || strings.Contains(text, string(kept.ID)) {
		t.Fatalf("sweep did %q", did)
	}
	for _, l := range gvisortest.Left(w.Conf) {
		if strings.Contains(l, string(lost.ID)) || strings.Contains(l, string(bare)) {
			t.Errorf("left: %s", l)
		}
	}
	m, err = r.Adopt(ctx, m.ID())
	ok(t, err)
	must(t, m, "facts", "")
	if did, err := r.Sweep(ctx); err != nil || len(did) != 0 {
		t.Errorf("a second sweep did %q, %v", did, err)
	}
}
