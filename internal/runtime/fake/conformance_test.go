package fake_test

import (
	"testing"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/runtime/runtimetest"
	"github.com/space-platform/space/internal/sandbox"
)

const digest = "sha256:template"

func factory(options ...fake.Option) runtimetest.Factory {
	world := func(rt runtime.Runtime) *fake.World { return rt.(*fake.Driver).World() }
	return runtimetest.Factory{
		New: func(t testing.TB) runtime.Runtime {
			w := fake.NewWorld(append([]fake.Option{fake.WithTemplates(digest)}, options...)...)
			t.Cleanup(w.Close)
			return fake.New(w)
		},
		Template: digest,
		Restart: func(_ testing.TB, old runtime.Runtime) runtime.Runtime {
			old.(*fake.Driver).Kill()
			return fake.New(world(old))
		},
		Reboot: func(_ testing.TB, old runtime.Runtime) runtime.Runtime {
			world(old).Reboot()
			return fake.New(world(old))
		},
		Kill: func(t testing.TB, rt runtime.Runtime, id sandbox.ID) {
			if err := world(rt).KillMachine(id, runtime.CauseKilled); err != nil {
				t.Fatal(err)
			}
		},
		KnownLeaks: func(_ testing.TB, rt runtime.Runtime) []string { return world(rt).Leaks() },
		GuestFiles: true,
	}
}

func TestConformance(t *testing.T) { runtimetest.Run(t, factory()) }

func BenchmarkColdCreate(b *testing.B)  { runtimetest.BenchColdCreate(b, factory()) }
func BenchmarkDial(b *testing.B)        { runtimetest.BenchDial(b, factory()) }
func BenchmarkPauseResume(b *testing.B) { runtimetest.BenchPauseResume(b, factory()) }
