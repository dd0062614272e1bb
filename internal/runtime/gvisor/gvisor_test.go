package gvisor_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
)

// ask lets the probe in the machine do something.
func ask(ctx context.Context, m runtime.Machine, what, body string) (string, error) {
	c, err := m.Dial(ctx)
	if err != nil {
		return "", err
	}
	defer c.Close()
	tr := &http.Transport{
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return c, nil },
		DisableKeepAlives: true,
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/"+what, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", what, b)
	}
	return strings.TrimSpace(string(b)), nil
}

func must(t *testing.T, m runtime.Machine, what, body string) string {
	t.Helper()
	out, err := ask(limited(t), m, what, body)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	return out
}

func limited(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func status(t testing.TB, m runtime.Machine) runtime.Status {
	t.Helper()
	st, err := m.Status(context.Background())
	ok(t, err)
	return st
}

// started gives a running machine.
func started(t *testing.T, w *gvisortest.World, spec runtime.Spec) runtime.Machine {
	t.Helper()
	ctx := limited(t)
	m, err := w.Runtime.Create(ctx, spec)
	ok(t, err)
	ok(t, m.Start(ctx))
	return m
}

// within checks that the machine ends in time, and with which cause.
func within(t *testing.T, m runtime.Machine, d time.Duration, want runtime.Cause) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	exit, err := m.Wait(ctx)
	if err != nil {
		t.Fatalf("wait: %v", err)
	}
	if exit.Cause != want {
		t.Fatalf("cause %q (%s), want %q", exit.Cause, exit.Detail, want)
	}
	if st := status(t, m); want != runtime.CauseStopped && (st.Condition != runtime.Dead || st.Exit == nil || st.Exit.Cause != want) {
		t.Fatalf("status %+v, want dead by %s", st, want)
	}
}

func TestLife(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	ctx := limited(t)
	spec := w.Spec()
	m, err := w.Runtime.Create(ctx, spec)
	ok(t, err)
	if st := status(t, m); st.Condition != runtime.Created || st.BootID != "" {
		t.Fatalf("after create: %+v", st)
	}
	if _, err := m.Dial(ctx); !errors.Is(err, runtime.ErrNotRunning) {
		t.Fatalf("dial before start: %v", err)
	}
	ok(t, m.Start(ctx))
	first := status(t, m)
	if first.Condition != runtime.Running || first.BootID == "" {
		t.Fatalf("after start: %+v", first)
	}
	for _, dir := range []string{"/root", "/tmp"} {
		must(t, m, "write?path="+dir+"/kept", "of "+dir)
	}
	ok(t, m.Pause(ctx))
	ok(t, m.Pause(ctx))
	if st := status(t, m); st.Condition != runtime.Paused {
		t.Fatalf("after pause: %+v", st)
	}
	if _, err := m.Dial(ctx); !errors.Is(err, runtime.ErrPaused) {
		t.Fatalf("dial while paused: %v", err)
	}
	ok(t, m.Resume(ctx))
	ok(t, m.Resume(ctx))
	if got := must(t, m, "read?path=/root/kept", ""); got != `"of /root"` {
		t.Fatalf("after resume: %s", got)
	}
	ok(t, m.Stop(ctx))
	ok(t, m.Stop(ctx))
	if st := status(t, m); st.Condition != runtime.Created || st.BootID != first.BootID {
		t.Fatalf("after stop: %+v", st)
	}
	within(t, m, time.Second, runtime.CauseStopped)
	ok(t, m.Start(ctx))
	if st := status(t, m); st.BootID == first.BootID {
		t.Fatal("boot id did not change")
	}
	for _, dir := range []string{"/root", "/tmp"} {
		if got := must(t, m, "read?path="+dir+"/kept", ""); got != `"of `+dir+`"` {
			t.Fatalf("after stop and start: %s", got)
		}
	}
	st, err := m.Stats(ctx)
	ok(t, err)
	if st.CPUNanos == 0 || st.MemoryBytes == 0 || st.MemoryPeak < st.MemoryBytes/2 || st.Processes < 2 || st.DiskBytes == 0 {
		t.Fatalf("stats %+v", st)
	}
	ok(t, m.Destroy(ctx))
	ok(t, m.Destroy(ctx))
	if _, err := m.Status(ctx); !errors.Is(err, runtime.ErrNotFound) {
		t.Fatalf("status after destroy: %v", err)
	}
	if left := gvisortest.Left(w.Conf); !slices.ContainsFunc(left, func(s string) bool { return strings.HasPrefix(s, "control group") }) {
		t.Fatalf("the parent group should be all that is left: %q", left)
	}
}

// What the guest sees: its identity, limits and confinement.
func TestGuestView(t *testing.T) {
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	t.Setenv("SPACE_TEST_SECRET", "must-not-be-seen")
	spec := w.Spec()
	m := started(t, w, spec)
	var f struct {
		Hostname, Status, Mounts, Dir string
		Env, Args, Links              []string
		CPUs, PID                     int
	}
	ok(t, json.Unmarshal([]byte(must(t, m, "facts", "")), &f))
	if f.Hostname != string(spec.ID) || f.PID != 1 || f.Dir != "/" {
		t.Errorf("hostname %q, pid %d, dir %q", f.Hostname, f.PID, f.Dir)
	}
	if len(f.Args) != 1 || f.Args[0] != "/.space/guest" {
		t.Errorf("args %q", f.Args)
	}
	for _, e := range f.Env {
		if strings.Contains(e, "SPACE") || strings.Contains(e, "seen") {
			t.Errorf("environment %q", f.Env)
		}
	}
	if !slices.Equal(f.Links, []string{"lo"}) {
		t.Errorf("interfaces %q", f.Links)
	}
	if !strings.Contains(f.Status, "CapEff:\t00000000a80405fb") && !strings.Contains(f.Status, "CapEff:\t00000000a80425fb") {
		t.Errorf("capabilities: %s", f.Status)
	}
	if f.CPUs != 2 { // runsc shows at least two
		t.Errorf("%d cpus", f.CPUs)
	}
	if got := must(t, m, "suid", ""); got != `"1000 0"` {
		t.Errorf("set-uid program ran as %s", got)
	}
	if got := must(t, m, "loopback", ""); !strings.Contains(got, "unreachable") {
		t.Errorf("outside: %s", got)
	}
	if out, err := ask(limited(t), m, "write?path=/.space/guest", "evil"); err == nil {
		t.Errorf("the daemon's file could be written: %s", out)
	}
	if out, err := ask(limited(t), m, "write?path=/.space/channel/x", "evil"); err == nil {
		t.Errorf("the channel's directory could be written: %s", out)
	}
	b, err := os.ReadFile(filepath.Join(w.Conf.RunDir, "m", string(spec.ID), "bundle", "config.json"))
	ok(t, err)
	if strings.Contains(string(b), `"env"`) {
		t.Errorf("the bundle has an environment: %s", b)
	}
}
