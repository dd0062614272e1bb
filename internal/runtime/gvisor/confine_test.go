package gvisor_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/space-platform/space/internal/runtime/gvisor/gvisortest"
)

// The host processes of a machine cannot gain rights, see nothing of our
// environment, and the one that runs the guest's kernel has file capabilities of
// its own user namespace and no other.
func TestHostProcesses(t *testing.T) {
	t.Setenv("SPACE_TEST_SECRET", "must-not-be-seen")
	w := gvisortest.Make(t, gvisortest.Options{Probe: true})
	started(t, w, w.Spec())
	ours, err := os.Readlink("/proc/self/ns/user")
	ok(t, err)
	seen := map[string]int{}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	ok(t, err)
	for _, f := range files {
		line, err := os.ReadFile(f)
		if err != nil || !strings.Contains(string(line), "--root="+w.Conf.RunDir+"/") {
			continue
		}
		name, _, _ := strings.Cut(string(line), "\x00")
		seen[name]++
		dir := filepath.Dir(f)
		env, err := os.ReadFile(filepath.Join(dir, "environ"))
		ok(t, err)
		if strings.Contains(string(env), "SPACE") {
			t.Errorf("%s has the environment %q", name, env)
		}
		text, err := os.ReadFile(filepath.Join(dir, "status"))
		ok(t, err)
		field := func(key string) string {
			_, rest, _ := strings.Cut(string(text), "\n"+key+":")
			v, _, _ := strings.Cut(rest, "\n")
			return strings.TrimSpace(v)
		}
		if field("NoNewPrivs") != "1" || field("Seccomp") != "2" {
			t.Errorf("%s: no_new_privs %s, seccomp %s", name, field("NoNewPrivs"), field("Seccomp"))
		}
		if name != "runsc-sandbox" {
			continue
		}
		caps, err := strconv.ParseUint(field("CapEff"), 16, 64)
		ok(t, err)
		const allowed = 1<<0 | 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<19 // chown, dac_*, fowner, fsetid; ptrace of its own stubs
		if caps&^allowed != 0 {
			t.Errorf("%s has capabilities %x", name, caps)
		}
		if ns, err := os.Readlink(filepath.Join(dir, "ns", "user")); err != nil || ns == ours {
			t.Errorf("%s is in our user namespace: %v", name, err)
		}
		fds, err := filepath.Glob(filepath.Join(dir, "fd", "*"))
		ok(t, err)
		for _, fd := range fds {
			if to, _ := os.Readlink(fd); strings.HasPrefix(to, w.Conf.DataDir) {
				t.Errorf("%s holds %s", name, to)
			}
		}
	}
	if seen["runsc-sandbox"] == 0 || seen["runsc-gofer"] == 0 {
		t.Fatalf("found only %v", seen)
	}
}
