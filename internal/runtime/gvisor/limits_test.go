package gvisor_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor"
	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
)

// A machine that breaks its memory limit ends within 5 s with that cause, also
// when the kernel killed only a part of it; its files stay and it starts again.
func TestMemoryBreach(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	ctx := limited(t)
	spec := w.Spec()
	spec.Resources.MemoryBytes = 128 << 20
	m := started(t, w, spec)
	must(t, m, "write?path=/root/kept", "still here")
	if out, err := ask(ctx, m, "alloc?mib=400", ""); err == nil {
		t.Fatalf("400 MiB fit into 128: %s", out)
	}
	within(t, m, 5*time.Second, runtime.CauseOutOfMemory)
	if _, err := m.Dial(ctx); err == nil {
		t.Fatal("a dead machine can be dialled")
	}
	ok(t, m.Start(ctx))
	if got := must(t, m, "read?path=/root/kept", ""); got != `"still here"` {
		t.Fatalf("file: %s", got)
	}
}

func TestDiskFull(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	spec := w.Spec()
	m := started(t, w, spec)
	var got struct {
		Mib   int
		Full  bool
		Error string
	}
	ok(t, json.Unmarshal([]byte(must(t, m, "fill?path=/root/big", "")), &got))
	if !got.Full || got.Mib < 16 || got.Mib > 64 {
		t.Fatalf("a disk of 64 MiB took %d MiB, then %s", got.Mib, got.Error)
	}
	ok(t, m.Stop(limited(t)))
	ok(t, m.Start(limited(t))) // a full disk does not keep a machine from starting
	st, err := m.Stats(limited(t))
	ok(t, err)
	if st.DiskBytes > 66<<20 {
		t.Fatalf("the image takes %d bytes of the host", st.DiskBytes)
	}
}

// The soft limit refuses forks and the machine lives on.
func TestForkStorm(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	spec := w.Spec()
	spec.Resources.MaxProcesses = 20
	m := started(t, w, spec)
	for _, uid := range []string{"0", "1000"} {
		var got struct {
			Started int
			Again   bool
			Error   string
		}
		ok(t, json.Unmarshal([]byte(must(t, m, "fork?n=500&uid="+uid, "")), &got))
		if got.Started > 20 || !got.Again {
			t.Fatalf("uid %s started %d processes, then %q", uid, got.Started, got.Error)
		}
	}
	if st := status(t, m); st.Condition != runtime.Running {
		t.Fatalf("status %+v", st)
	}
	ok(t, m.Destroy(limited(t)))
}

// The limits are on the host, not only in the document.
func TestHostLimits(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	spec := w.Spec()
	spec.Resources.MilliCPU = 500
	started(t, w, spec)
	group := func(v1, v2 string) string {
		for _, p := range []string{"*/", ""} {
			for _, f := range []string{v1, v2} {
				files, _ := filepath.Glob("/sys/fs/cgroup/" + p + w.Conf.CgroupParent + "/" + string(spec.ID) + "/" + f)
				if len(files) > 0 {
					b, err := os.ReadFile(files[0])
					ok(t, err)
					return strings.TrimSpace(string(b))
				}
			}
		}
		t.Fatalf("no %s or %s", v1, v2)
		return ""
	}
	if got := group("memory.limit_in_bytes", "memory.max"); got != strconv.Itoa(256<<20) {
		t.Errorf("memory %s", got)
	}
	if got := group("cpu.cfs_quota_us", "cpu.max"); got != "50000" && got != "50000 100000" {
		t.Errorf("cpu %s", got)
	}
	if got := group("pids.max", "pids.max"); got != strconv.Itoa(8*64+1024) {
		t.Errorf("pids %s", got)
	}
	if got := group("memory.memsw.limit_in_bytes", "memory.swap.max"); got != strconv.Itoa(256<<20) && got != "0" {
		t.Errorf("swap %s", got)
	}
}

func sandboxPID(t testing.TB, c gvisor.Config, spec runtime.Spec) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(c.RunDir, "m", string(spec.ID), "pid"))
	ok(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	ok(t, err)
	return pid
}

func TestKilledFromOutside(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	spec := w.Spec()
	m := started(t, w, spec)
	must(t, m, "write?path=/root/kept", "written")
	ok(t, unix.Kill(sandboxPID(t, w.Conf, spec), unix.SIGKILL))
	within(t, m, 5*time.Second, runtime.CauseKilled)
	ok(t, m.Start(limited(t)))
	if got := must(t, m, "read?path=/root/kept", ""); got != `"written"` {
		t.Fatalf("file: %s", got)
	}
}

func TestGuestEnds(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	m := started(t, w, w.Spec())
	_, _ = ask(limited(t), m, "exit?code=0", "")
	within(t, m, 5*time.Second, runtime.CausePoweroff)
	ok(t, m.Stop(limited(t))) // a dead machine can be stopped
	ok(t, m.Start(limited(t)))
	_, _ = ask(limited(t), m, "exit?code=3", "")
	within(t, m, 5*time.Second, runtime.CauseCrashed)
}

// After a reboot everything but the data directory is gone.
func TestReboot(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true, Change: func(c *gvisor.Config) {
		c.BootIDFile = filepath.Join(c.RunDir, "boot_id")
		ok(t, os.WriteFile(c.BootIDFile, []byte("first\n"), 0o600))
	}})
	spec := w.Spec()
	m := started(t, w, spec)
	must(t, m, "write?path=/root/kept", "over the reboot")
	ok(t, os.WriteFile(w.Conf.BootIDFile, []byte("second\n"), 0o600))
	r := w.Open()
	m, err := r.Adopt(limited(t), spec.ID)
	ok(t, err)
	within(t, m, time.Second, runtime.CauseReboot)
	ok(t, m.Start(limited(t)))
	if got := must(t, m, "read?path=/root/kept", ""); got != `"over the reboot"` {
		t.Fatalf("file: %s", got)
	}
}

// A process of ours that starts again finds its machines, what they are, and
// what happened meanwhile.
func TestAdopt(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	ctx := limited(t)
	running, paused, dead, off, stopped := w.Spec(), w.Spec(), w.Spec(), w.Spec(), w.Spec()
	started(t, w, running)
	ok(t, started(t, w, paused).Pause(ctx))
	started(t, w, dead)
	ok(t, started(t, w, stopped).Stop(ctx))
	ends := started(t, w, off)
	must(t, ends, "exit-soon", "")
	ok(t, w.Runtime.Close())
	ok(t, unix.Kill(sandboxPID(t, w.Conf, dead), unix.SIGKILL))
	for _, spec := range []runtime.Spec{dead, off} {
		stat := fmt.Sprintf("/proc/%d/stat", sandboxPID(t, w.Conf, spec))
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if b, err := os.ReadFile(stat); err != nil || strings.Contains(string(b), ") Z ") {
				break
			}
		}
	}
	r := w.Open()
	list, err := r.List(ctx)
	ok(t, err)
	got := map[string]runtime.Condition{}
	for _, st := range list {
		got[string(st.Spec.ID)] = st.Condition
	}
	for spec, want := range map[runtime.Spec]runtime.Condition{
		running: runtime.Running, paused: runtime.Paused, dead: runtime.Dead, off: runtime.Dead, stopped: runtime.Created,
	} {
		if got[string(spec.ID)] != want {
			t.Errorf("%s is %q, want %q", spec.ID, got[string(spec.ID)], want)
		}
	}
	for spec, want := range map[runtime.Spec]runtime.Cause{dead: runtime.CauseKilled, off: runtime.CausePoweroff} {
		m, err := r.Adopt(ctx, spec.ID)
		ok(t, err)
		within(t, m, time.Second, want)
	}
	m, err := r.Adopt(ctx, running.ID)
	ok(t, err)
	must(t, m, "facts", "") // the guest has dialled the new socket
	m, err = r.Adopt(ctx, paused.ID)
	ok(t, err)
	ok(t, m.Resume(ctx))
	must(t, m, "facts", "")
	ok(t, unix.Kill(sandboxPID(t, w.Conf, paused), unix.SIGKILL))
	within(t, m, 5*time.Second, runtime.CauseKilled)
}
