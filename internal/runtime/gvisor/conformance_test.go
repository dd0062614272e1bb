package gvisor_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor"
	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
	"github.com/space-platform/space/internal/runtime/runtimetest"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template/templatetest"
)

// factory reaches the driver in this process.
func factory(t testing.TB) runtimetest.Factory {
	var mu sync.Mutex
	worlds := map[runtime.Runtime]*gvisortest.World{}
	of := func(rt runtime.Runtime) *gvisortest.World {
		mu.Lock()
		defer mu.Unlock()
		return worlds[rt]
	}
	opened := func(w *gvisortest.World, rt runtime.Runtime) runtime.Runtime {
		mu.Lock()
		defer mu.Unlock()
		worlds[rt] = w
		return rt
	}
	digest := templatetest.Tiny(t).Digest
	return runtimetest.Factory{
		Template: digest,
		New: func(t testing.TB) runtime.Runtime {
			w := gvisortest.Make(t, gvisortest.Options{
				Templates: templatetest.Store(t), Digest: digest,
				Change: func(c *gvisor.Config) {
					c.BootIDFile = filepath.Join(c.RunDir, "boot_id")
					ok(t, os.WriteFile(c.BootIDFile, []byte("boot 1"), 0o600))
				},
			})
			return opened(w, w.Runtime)
		},
		Restart: func(t testing.TB, old runtime.Runtime) runtime.Runtime {
			w := of(old)
			return opened(w, w.Open())
		},
		Reboot: func(t testing.TB, old runtime.Runtime) runtime.Runtime {
			w := of(old)
			b, err := os.ReadFile(w.Conf.BootIDFile)
			ok(t, err)
			ok(t, os.WriteFile(w.Conf.BootIDFile, append(b, '1'), 0o600))
			return opened(w, w.Open())
		},
		Kill: func(t testing.TB, rt runtime.Runtime, id sandbox.ID) {
			ok(t, unix.Kill(sandboxPID(t, of(rt).Conf, runtime.Spec{ID: id}), unix.SIGKILL))
		},
		KnownLeaks: func(t testing.TB, rt runtime.Runtime) []string {
			var out []string
			for _, l := range gvisortest.Left(of(rt).Conf) {
				if !strings.HasSuffix(l, "null-netns") { // one for all machines
					out = append(out, l)
				}
			}
			return out
		},
	}
}

func TestConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute: real machines")
	}
	runtimetest.Run(t, factory(t))
}
