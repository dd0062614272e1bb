package gvisor_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
	"github.com/space-platform/space/internal/sandbox"
)

// samples are times by name of what was timed.
type samples map[string][]time.Duration

func (s samples) time(b *testing.B, name string, f func() error) {
	b.Helper()
	start := time.Now()
	if err := f(); err != nil {
		b.Fatalf("%s: %v", name, err)
	}
	s[name] = append(s[name], time.Since(start))
}

func (s samples) quantile(name string, q float64) time.Duration {
	d := slices.Clone(s[name])
	slices.Sort(d)
	return d[int(q*float64(len(d)-1))]
}

func (s samples) report(b *testing.B) {
	b.Helper()
	for name := range s {
		b.ReportMetric(float64(s.quantile(name, 0.5).Microseconds())/1000, "ms-"+name)
		b.Logf("%-12s n=%d min=%v p50=%v p90=%v", name, len(s[name]), s.quantile(name, 0), s.quantile(name, 0.5), s.quantile(name, 0.9))
	}
}

// BenchmarkLife times every call of a life.
func BenchmarkLife(b *testing.B) {
	w := gvisortest.Make(b, gvisortest.Options{Probe: true})
	ctx := context.Background()
	s := samples{}
	for b.Loop() {
		spec := w.Spec()
		s.time(b, "create", func() error { _, err := w.Runtime.Create(ctx, spec); return err })
		m, err := w.Runtime.Adopt(ctx, spec.ID)
		if err != nil {
			b.Fatal(err)
		}
		s.time(b, "start", func() error { return m.Start(ctx) })
		s.time(b, "first-call", func() error { _, err := ask(ctx, m, "facts", ""); return err })
		s.time(b, "pause", func() error { return m.Pause(ctx) })
		s.time(b, "resume", func() error { return m.Resume(ctx) })
		s.time(b, "stop", func() error { return m.Stop(ctx) })
		s.time(b, "restart", func() error { return m.Start(ctx) })
		s.time(b, "destroy", func() error { return m.Destroy(ctx) })
	}
	s.report(b)
}

// BenchmarkFloor compares Create and Start with the same done by hand: mkfs,
// mounts, a network namespace, and the runtime's create and start.
func BenchmarkFloor(b *testing.B) {
	for _, p := range []string{"ip", "mount", "umount", "mkfs.ext4"} {
		if _, err := exec.LookPath(p); err != nil {
			b.Skipf("needs %s for the floor", p)
		}
	}
	w := gvisortest.Make(b, gvisortest.Options{Probe: true})
	ctx := context.Background()
	s := samples{}
	for b.Loop() {
		f := newFloor(b, w)
		s.time(b, "floor", f.make)
		s["floor-start"] = append(s["floor-start"], time.Since(f.prepared))
		f.remove()
		spec := w.Spec()
		s.time(b, "ours", func() error {
			var m runtime.Machine
			s.time(b, "create", func() (err error) { m, err = w.Runtime.Create(ctx, spec); return err })
			s.time(b, "start", func() error { return m.Start(ctx) })
			return nil
		})
		if err := w.Runtime.Destroy(ctx, spec.ID); err != nil {
			b.Fatal(err)
		}
	}
	s.report(b)
	b.ReportMetric(float64(s.quantile("ours", 0.5))/float64(s.quantile("floor", 0.5)), "ratio")
}

// floor is a machine made by hand.
type floor struct {
	b        *testing.B
	dir, id  string
	tree     string
	guest    string
	runsc    []string
	netns    string
	document string
	prepared time.Time // when the runtime's part began
}

func newFloor(b *testing.B, w *gvisortest.World) *floor {
	b.Helper()
	id := string(sandbox.NewID())
	f := &floor{b: b, id: id, dir: filepath.Join(w.Conf.RunDir, "f"), tree: filepath.Join(w.Conf.DataDir, "template"), guest: w.Conf.GuestDaemon, netns: "spt" + id[1:9]}
	for _, d := range []string{"", "disk", "root", "channel", "bundle", "s"} {
		if err := os.MkdirAll(filepath.Join(f.dir, d), 0o700); err != nil {
			b.Fatal(err)
		}
	}
	f.runsc = []string{w.Conf.Runsc, "--root=" + f.dir + "/s", "--shared-root=" + w.Conf.RunDir + "/shared", "--platform=systrap",
		"--network=sandbox", "--overlay2=none", "--host-uds=open", "--host-settings=ignore"}
	f.document = fmt.Sprintf(`{"ociVersion":"1.1.0","process":{"user":{"uid":0,"gid":0},"args":["/.space/guest"],"cwd":"/"},
"root":{"path":"%[1]s/root"},"hostname":"x","mounts":[{"destination":"/proc","type":"proc","source":"proc"},
{"destination":"/.space/guest","type":"bind","source":"%[2]s","options":["ro","bind"]},
{"destination":"/.space/channel","type":"bind","source":"%[1]s/channel","options":["ro","bind"]}],
"linux":{"cgroupsPath":"/%[3]s/%[4]s","resources":{"memory":{"limit":268435456},"cpu":{"quota":100000,"period":100000},"pids":{"limit":1536}},
"namespaces":[{"type":"pid"},{"type":"mount"},{"type":"ipc"},{"type":"uts"},{"type":"network","path":"/run/netns/%[5]s"}]}}`,
		f.dir, f.guest, w.Conf.CgroupParent, id, f.netns)
	return f
}

func (f *floor) run(args ...string) error {
	cmd := exec.Command(args[0], args[1:]...) // its streams are /dev/null
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func (f *floor) make() error {
	image, disk := f.dir+"/disk.img", f.dir+"/disk"
	for _, step := range [][]string{
		{"truncate", "-s", "64M", image},
		{"mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", image},
		{"mount", "-o", "loop,nosuid,nodev", image, disk},
		{"mkdir", disk + "/upper", disk + "/work"},
		{"mount", "-t", "overlay", "-o", "lowerdir=" + f.tree + ",upperdir=" + disk + "/upper,workdir=" + disk + "/work", "overlay", f.dir + "/root"},
		{"ip", "netns", "add", f.netns},
		{"ip", "netns", "exec", f.netns, "ip", "link", "set", "lo", "up"},
	} {
		if err := f.run(step...); err != nil {
			return err
		}
	}
	if err := os.WriteFile(f.dir+"/bundle/config.json", []byte(f.document), 0o600); err != nil {
		return err
	}
	f.prepared = time.Now()
	if err := f.run(append(slices.Clone(f.runsc), "create", "--bundle="+f.dir+"/bundle", f.id)...); err != nil {
		return err
	}
	return f.run(append(slices.Clone(f.runsc), "start", f.id)...)
}

func (f *floor) remove() {
	f.b.Helper()
	for _, step := range [][]string{
		append(slices.Clone(f.runsc), "delete", "--force", f.id),
		{"umount", f.dir + "/root", f.dir + "/disk"},
		{"ip", "netns", "del", f.netns},
		{"rm", "-rf", "--one-file-system", f.dir},
	} {
		if err := f.run(step...); err != nil {
			f.b.Fatal(err)
		}
	}
}
