package privilege

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestStartDropsEverything(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to give privileges away")
	}
	var out bytes.Buffer
	cmd := exec.Command("/bin/sh", "-c", "cat /proc/self/status; id -G; env")
	cmd.Stdout, cmd.Stderr = &out, &out
	t.Setenv("SPACE_PLANTED", "planted")
	if err := Start(cmd, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	for _, want := range []string{"Uid:\t65534\t65534\t65534\t65534", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "\n65534\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("child lacks %q in:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "planted") {
		t.Error("our environment reached the child")
	}
	self, err := Of(0)
	if err != nil {
		t.Fatal(err)
	}
	if self.NoNewPrivs || self.CapEff == 0 {
		t.Errorf("the parent lost privileges: %+v", self)
	}
	if self.Dropped() == nil {
		t.Error("Dropped accepts a root process")
	}
}
