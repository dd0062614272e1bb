package failpoint

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"
)

var fpTest = Name("failpoint.test")

func TestErrorCountsAndDisarms(t *testing.T) {
	ctx := context.Background()
	if err := Hit(ctx, fpTest); err != nil {
		t.Fatalf("nothing is armed: %v", err)
	}
	disarm, err := Arm(fpTest, "error(2)")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{true, true, false} {
		if err := Hit(ctx, fpTest); errors.Is(err, ErrInjected) != want {
			t.Errorf("pass %d: %v", i+1, err)
		}
	}
	disarm()
	if err := Hit(ctx, fpTest); err != nil {
		t.Errorf("disarmed: %v", err)
	}
	if !slices.Contains(Names(), fpTest) {
		t.Errorf("%v does not name it", Names())
	}
}

func TestHangEndsWithItsContext(t *testing.T) {
	disarm, err := Arm(fpTest, "hang")
	if err != nil {
		t.Fatal(err)
	}
	defer disarm()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := Hit(ctx, fpTest); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestBadActions(t *testing.T) {
	for _, a := range []string{"", "explode", "error(0)", "error(x)", "kill(-1)"} {
		if _, err := Arm(fpTest, a); err == nil {
			t.Errorf("%q was armed", a)
		}
	}
	t.Setenv("SPACE_FAILPOINTS", fpTest+"=nonsense")
	if err := FromEnv(); err == nil {
		t.Error("nonsense in the environment was armed")
	}
}

// Kill is SIGKILL at the point, at the n-th pass and not before.
func TestKill(t *testing.T) {
	if os.Getenv("FAILPOINT_CHILD") == "1" {
		if err := FromEnv(); err != nil {
			os.Exit(3)
		}
		_ = Hit(context.Background(), fpTest)
		_, _ = os.Stdout.WriteString("once")
		_ = Hit(context.Background(), fpTest)
		_, _ = os.Stdout.WriteString("twice")
		os.Exit(0)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
	cmd.Env = append(os.Environ(), "FAILPOINT_CHILD=1", "SPACE_FAILPOINTS="+fpTest+"=kill(2)")
	out, err := cmd.Output()
	var e *exec.ExitError
	if !errors.As(err, &e) || e.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL || string(out) != "once" {
		t.Errorf("%q, %v", out, err)
	}
}
