package fake_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/runtime/runtimetest"
	"github.com/space-platform/space/internal/sandbox"
)

// sabotages are drivers that break one promise each, and what the suite must say.
var sabotages = map[string]struct {
	runtime func(broken) runtime.Runtime
	machine func(broken, runtime.Machine) runtime.Machine
	test    string // sub-test that notices
	says    string
}{
	"stop loses files": {
		test: "guest/files_survive", says: "edge running→created→running (Stop, Start) broken",
		machine: func(b broken, m runtime.Machine) runtime.Machine { return forgetful{m, b} },
	},
	"wait lies": {
		test: "kill", says: "guarantee 5 broken",
		machine: func(_ broken, m runtime.Machine) runtime.Machine { return liar{m} },
	},
	"wait ignores its context": {
		test: "context", says: "guarantee 3 broken",
		machine: func(_ broken, m runtime.Machine) runtime.Machine { return deaf{m} },
	},
	"pause twice fails": {
		test: "pause", says: "guarantee 1 broken",
		machine: func(_ broken, m runtime.Machine) runtime.Machine { return once{m} },
	},
	"start boots again": {
		test: "start", says: "guarantee 1 broken",
		machine: func(_ broken, m runtime.Machine) runtime.Machine { return eager{m} },
	},
	"dial reaches a paused machine": {
		test: "dial", says: "Dial of a paused machine",
		machine: func(_ broken, m runtime.Machine) runtime.Machine { return open{m} },
	},
	"another spec is taken": {
		test: "create", says: "want errors.Is runtime: machine exists with another spec",
		runtime: func(b broken) runtime.Runtime { return lax{b} },
	},
	"destroy leaves the machine": {
		test: "destroy", says: "edge created→absent (Destroy) broken",
		machine: func(_ broken, m runtime.Machine) runtime.Machine { return sticky{m} },
	},
	"unknown ids are found": {
		test: "unknown_id", says: "guarantee 4 broken",
		runtime: func(b broken) runtime.Runtime { return knowing{b} },
	},
	"guests share files": {
		test: "guest/isolation", says: "guarantee 6 broken",
		machine: func(_ broken, m runtime.Machine) runtime.Machine { return &crossed{Machine: m} },
	},
	"machines die with the caller": {
		test: "restart", says: "guarantee 7 broken",
	},
}

// broken is a fake whose machines are wrapped.
type broken struct {
	*fake.Driver
	wrap func(broken, runtime.Machine) runtime.Machine
}

func (b broken) Create(ctx context.Context, s runtime.Spec) (runtime.Machine, error) {
	return b.wrapped(b.Driver.Create(ctx, s))
}

func (b broken) Adopt(ctx context.Context, id sandbox.ID) (runtime.Machine, error) {
	return b.wrapped(b.Driver.Adopt(ctx, id))
}

func (b broken) wrapped(m runtime.Machine, err error) (runtime.Machine, error) {
	if err != nil || b.wrap == nil {
		return m, err
	}
	return b.wrap(b, m), nil
}

type forgetful struct {
	runtime.Machine
	b broken
}

func (m forgetful) Stop(ctx context.Context) error {
	s, err := m.Status(ctx)
	if err != nil {
		return err
	}
	if err := m.b.Destroy(ctx, s.Spec.ID); err != nil {
		return err
	}
	_, err = m.b.Driver.Create(ctx, s.Spec)
	return err
}

type liar struct{ runtime.Machine }

func (m liar) Wait(ctx context.Context) (runtime.Exit, error) {
	_, err := m.Machine.Wait(ctx)
	return runtime.Exit{Cause: runtime.CausePoweroff}, err
}

type deaf struct{ runtime.Machine }

func (m deaf) Wait(ctx context.Context) (runtime.Exit, error) {
	exit, err := m.Machine.Wait(ctx)
	if err != nil {
		time.Sleep(3 * time.Second) // the defect itself: late by more than "soon"
	}
	return exit, err
}

type once struct{ runtime.Machine }

func (m once) Pause(ctx context.Context) error {
	if s, err := m.Status(ctx); err == nil && s.Condition == runtime.Paused {
		return runtime.ErrNotRunning
	}
	return m.Machine.Pause(ctx)
}

type eager struct{ runtime.Machine }

func (m eager) Start(ctx context.Context) error {
	if err := m.Stop(ctx); err != nil {
		return err
	}
	return m.Machine.Start(ctx)
}

type open struct{ runtime.Machine }

func (m open) Dial(ctx context.Context) (net.Conn, error) {
	if s, err := m.Status(ctx); err == nil && s.Condition == runtime.Paused {
		near, far := net.Pipe()
		return near, far.Close()
	}
	return m.Machine.Dial(ctx)
}

type lax struct{ broken }

func (b lax) Create(ctx context.Context, s runtime.Spec) (runtime.Machine, error) {
	if m, err := b.Adopt(ctx, s.ID); err == nil {
		return m, nil
	}
	return b.broken.Create(ctx, s)
}

type sticky struct{ runtime.Machine }

func (m sticky) Destroy(ctx context.Context) error { return m.Stop(ctx) }

type knowing struct{ broken }

func (b knowing) Adopt(ctx context.Context, id sandbox.ID) (runtime.Machine, error) {
	return b.broken.Create(ctx, runtime.Spec{ID: id, TemplateDigest: digest})
}

// crossed sends every stream to the machine that was dialled first.
type crossed struct{ runtime.Machine }

var first runtime.Machine

func (m *crossed) Dial(ctx context.Context) (net.Conn, error) {
	if first == nil {
		first = m.Machine
	}
	return first.Dial(ctx)
}

const sabotageEnv = "FAKE_SABOTAGE"

// TestSabotaged is the suite over a broken driver; it runs only as the child of
// TestSuiteNoticesSabotage, where it must fail.
func TestSabotaged(t *testing.T) {
	name := os.Getenv(sabotageEnv)
	s, ok := sabotages[name]
	if !ok {
		return
	}
	f := factory()
	unwrap := func(rt runtime.Runtime) *fake.Driver { return rt.(interface{ inner() *fake.Driver }).inner() }
	wrap := func(d *fake.Driver) runtime.Runtime {
		b := broken{Driver: d, wrap: s.machine}
		if s.runtime != nil {
			return s.runtime(b)
		}
		return b
	}
	sane := f
	f.New = func(t testing.TB) runtime.Runtime { return wrap(sane.New(t).(*fake.Driver)) }
	f.Kill = func(t testing.TB, rt runtime.Runtime, id sandbox.ID) { sane.Kill(t, unwrap(rt), id) }
	f.KnownLeaks = func(t testing.TB, rt runtime.Runtime) []string { return sane.KnownLeaks(t, unwrap(rt)) }
	f.Reboot = func(t testing.TB, rt runtime.Runtime) runtime.Runtime {
		return wrap(sane.Reboot(t, unwrap(rt)).(*fake.Driver))
	}
	f.Restart = func(t testing.TB, rt runtime.Runtime) runtime.Runtime {
		if name == "machines die with the caller" {
			return f.Reboot(t, rt)
		}
		return wrap(sane.Restart(t, unwrap(rt)).(*fake.Driver))
	}
	runtimetest.Run(t, f)
}

func (b broken) inner() *fake.Driver { return b.Driver }

func TestSuiteNoticesSabotage(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, s := range sabotages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestSabotaged$/^"+strings.ReplaceAll(s.test, "/", "$/^")+"$")
			cmd.Env = append(os.Environ(), sabotageEnv+"="+name)
			out, err := cmd.CombinedOutput()
			if err == nil {
				t.Fatalf("the suite passes a driver where %s:\n%s", name, out)
			}
			if !strings.Contains(string(out), s.says) {
				t.Errorf("the suite does not say %q, it says:\n%s", s.says, out)
			}
		})
	}
}
