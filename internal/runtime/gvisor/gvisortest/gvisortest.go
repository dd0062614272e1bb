// Package gvisortest gives tests real machines: the real runsc, built once per
// host, a template, directories and control groups of the test's own. When a test ends
// everything is destroyed, and the test fails when anything is left on the host.
package gvisortest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/cgroup"
	"github.com/space-platform/space/internal/disk"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor"
	"github.com/space-platform/space/internal/sandbox"
)

// EnvCache names the directory that keeps runsc between runs; the user's cache
// directory unless set.
const EnvCache = "SPACE_TEST_CACHE"

// Options of a World; the zero value gives the real guest daemon.
type Options struct {
	// Probe puts this package's probe into the machine instead of the guest daemon.
	Probe bool
	// Templates and Digest replace the tree that holds nothing but the probe.
	Templates gvisor.Templates
	Digest    string
	// Change may alter the configuration before the runtime is made.
	Change func(*gvisor.Config)
}

// World is a host of the test's own.
type World struct {
	T       testing.TB
	Conf    gvisor.Config
	Runtime *gvisor.Runtime
	// Digest is of the template that is there.
	Digest string
}

// New gives a runtime with the real guest daemon.
func New(t testing.TB) *gvisor.Runtime { return Make(t, Options{}).Runtime }

// Make makes a World, and takes it away with the test.
func Make(t testing.TB, o Options) *World {
	t.Helper()
	w := &World{T: t, Conf: Config(t, o), Digest: o.Digest}
	if w.Digest == "" {
		w.Digest = ProbeDigest
	}
	t.Cleanup(func() {
		if w.Runtime != nil {
			_ = w.Runtime.Close()
		}
		Clean(t, w.Conf)
	})
	w.Open()
	return w
}

// Open (re)opens the runtime, as a process that starts again does.
func (w *World) Open() *gvisor.Runtime {
	w.T.Helper()
	if w.Runtime != nil {
		if err := w.Runtime.Close(); err != nil {
			w.T.Fatal(err)
		}
	}
	r, err := gvisor.New(w.Conf)
	if err != nil {
		w.T.Fatal(err)
	}
	w.Runtime = r
	return r
}

// Spec is a small machine with a new id.
func (w *World) Spec() runtime.Spec {
	return runtime.Spec{ID: sandbox.NewID(), TemplateDigest: w.Digest, Resources: sandbox.Resources{
		MilliCPU: 1000, MemoryBytes: 256 << 20, DiskBytes: 64 << 20, MaxProcesses: 64,
	}}
}

// Config makes a configuration with directories of its own; Clean takes them away.
func Config(t testing.TB, o Options) gvisor.Config {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: machines need mounts, namespaces and control groups")
	}
	runsc, digest := Runsc(t)
	run, err := os.MkdirTemp("/run", "spt-") // short: socket addresses are
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.MkdirTemp("", "space-data-")
	if err != nil {
		t.Fatal(err)
	}
	daemon := "./cmd/space-guest"
	if o.Probe {
		daemon = "./internal/runtime/gvisor/gvisortest/probe"
	}
	c := gvisor.Config{
		DataDir: data, RunDir: run, Runsc: runsc, RunscDigest: digest,
		GuestDaemon:  Build(t, daemon),
		Templates:    o.Templates,
		CgroupParent: filepath.Base(run),
		Logf:         t.Logf,
	}
	if c.Templates == nil {
		c.Templates = probeTree(t, filepath.Join(data, "template"))
	}
	if o.Change != nil {
		o.Change(&c)
	}
	return c
}

// Clean destroys every machine of c and fails the test when anything is left.
func Clean(t testing.TB, c gvisor.Config) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c.Logf = nil
	r, err := gvisor.New(c)
	if err != nil {
		t.Errorf("clean: %v", err)
		return
	}
	list, err := r.List(ctx)
	if err != nil {
		t.Errorf("clean: %v", err)
	}
	for _, st := range list {
		if err := r.Destroy(ctx, st.Spec.ID); err != nil {
			t.Errorf("clean: destroy %s: %v", st.Spec.ID, err)
		}
	}
	_ = r.Close()
	if err := r.Uninstall(ctx); err != nil {
		t.Errorf("clean: %v", err)
	}
	// What the kernel takes away after its last user may need a moment.
	var left []string
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if left = Left(c); len(left) == 0 || time.Now().After(end) {
			break
		}
	}
	for _, l := range left {
		t.Errorf("left on the host: %s", l)
	}
	if len(left) == 0 {
		_ = os.RemoveAll(c.RunDir)
		_ = os.RemoveAll(c.DataDir)
	}
}

// Left lists what c still has on the host outside of its files: processes,
// mounts, loop devices, control groups, network namespaces.
func Left(c gvisor.Config) []string {
	var left []string
	for _, dir := range []string{c.RunDir, c.DataDir} {
		mounts, err := disk.Mounts(dir)
		if err != nil {
			left = append(left, err.Error())
		}
		for _, m := range mounts {
			left = append(left, "mount "+m)
		}
		loops, err := disk.Loops(dir)
		if err != nil {
			left = append(left, err.Error())
		}
		for _, l := range loops {
			left = append(left, "loop device "+l.Device+" of "+l.Backing)
		}
	}
	for _, pattern := range []string{"*/", ""} {
		groups, _ := filepath.Glob(filepath.Join(cgroup.DefaultRoot, pattern+c.CgroupParent))
		for _, g := range groups {
			left = append(left, "control group "+g)
		}
	}
	for _, dir := range []string{"netns", "m"} {
		entries, _ := os.ReadDir(filepath.Join(c.RunDir, dir))
		for _, e := range entries {
			left = append(left, "file "+filepath.Join(c.RunDir, dir, e.Name()))
		}
	}
	entries, _ := os.ReadDir(filepath.Join(c.DataDir, "machines"))
	for _, e := range entries {
		left = append(left, "file "+filepath.Join(c.DataDir, "machines", e.Name()))
	}
	cmdlines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range cmdlines {
		b, err := os.ReadFile(f)
		if err == nil && strings.Contains(string(b), "--root="+c.RunDir+"/") {
			left = append(left, "process "+filepath.Base(filepath.Dir(f)))
		}
	}
	return left
}

// ProbeDigest names the tree that holds nothing but the probe.
const ProbeDigest = "sha256:0000000000000000000000000000000000000000000000000000000000000001"

type tree string

func (d tree) Mount(_ context.Context, digest string) (string, error) {
	if digest != ProbeDigest {
		return "", fmt.Errorf("%w: %s", runtime.ErrNoTemplate, digest)
	}
	return string(d), nil
}

func probeTree(t testing.TB, dir string) gvisor.Templates {
	t.Helper()
	for _, d := range []string{"bin", "etc", "root", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(Build(t, "./internal/runtime/gvisor/gvisortest/probe"))
	if err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]os.FileMode{"probe": 0o755, "suid": 0o755 | os.ModeSetuid} {
		if err := os.WriteFile(filepath.Join(dir, "bin", name), b, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(dir, "bin", name), mode); err != nil {
			t.Fatal(err)
		}
	}
	return tree(dir)
}

func cacheDir(t testing.TB) string {
	t.Helper()
	dir := os.Getenv(EnvCache)
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			base = "/var/cache"
		}
		dir = filepath.Join(base, "space-test")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func repository(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "scripts", "build-runsc.sh")); err == nil {
			return dir
		}
		if dir == "/" {
			t.Fatal("gvisortest: not inside the repository")
		}
	}
}

// exclusively runs f while no other test process builds into the cache.
func exclusively(t testing.TB, f func(cache string)) {
	t.Helper()
	cache := cacheDir(t)
	l, err := os.OpenFile(filepath.Join(cache, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := unix.Flock(int(l.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	f(cache)
}

var (
	mu    sync.Mutex
	built = map[string]string{} // guarded by mu
)

// Runsc gives the real runtime and its digest, building it when the cache has none.
func Runsc(t testing.TB) (path, digest string) {
	t.Helper()
	mu.Lock()
	defer mu.Unlock()
	if built["runsc"] == "" {
		root := repository(t)
		exclusively(t, func(cache string) {
			out := filepath.Join(cache, "runsc")
			if b, err := exec.Command("sh", filepath.Join(root, "scripts", "build-runsc.sh"), out).CombinedOutput(); err != nil {
				t.Fatalf("gvisortest: build runsc: %v\n%s", err, b)
			}
			f, err := os.Open(out)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			h := sha256.New()
			if _, err := io.Copy(h, f); err != nil {
				t.Fatal(err)
			}
			built["runsc"], built["digest"] = out, "sha256:"+hex.EncodeToString(h.Sum(nil))
		})
	}
	return built["runsc"], built["digest"]
}

// Build builds a static program of the repository, once per test process.
func Build(t testing.TB, pkg string) string {
	t.Helper()
	mu.Lock()
	defer mu.Unlock()
	if built[pkg] == "" {
		root := repository(t)
		exclusively(t, func(cache string) {
			out := filepath.Join(cache, filepath.Base(pkg))
			cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out+".new", pkg)
			cmd.Dir = root
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
			if b, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("gvisortest: build %s: %v\n%s", pkg, err, b)
			}
			// Machines of other tests go on with the file they have open.
			if err := os.Rename(out+".new", out); err != nil {
				t.Fatal(err)
			}
			built[pkg] = out
		})
	}
	return built[pkg]
}
