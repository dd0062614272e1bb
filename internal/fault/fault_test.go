package fault

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestErrorKeepsItsCauseFromUsers(t *testing.T) {
	base := New(Conflict, "state_conflict", "cannot %s", "pause").Do("wake it")
	err := fmt.Errorf("outer: %w", base.Because("it is %s", "stopped").Wrap(io.ErrUnexpectedEOF))
	e := Of(err)
	if e.Code != "state_conflict" || e.What != "cannot pause" || e.Why != "it is stopped" || e.Remedy != "wake it" || e.Retryable {
		t.Errorf("%+v", e)
	}
	if !errors.Is(err, io.ErrUnexpectedEOF) || !errors.Is(err, base) || !IsClass(err, Conflict) || !IsCode(err, "state_conflict") {
		t.Errorf("%v lost what it wraps", err)
	}
	if base.Why != "" || base.Unwrap() != nil {
		t.Error("a template was changed by its use")
	}
	if strings.Contains(e.What+e.Why+e.Remedy, "EOF") || !strings.Contains(e.Error(), "EOF") {
		t.Error("the cause belongs into the log, and only there")
	}
}

func TestOfForeignErrors(t *testing.T) {
	if Of(nil) != nil {
		t.Error("nil became an error")
	}
	e := Of(errors.New("secret inside"))
	if e.Class != Internal || e.Code != "internal" || strings.Contains(e.What+e.Why+e.Remedy, "secret") || e.Remedy == "" {
		t.Errorf("%+v", e)
	}
	for c, want := range map[Class]bool{Exhausted: true, Unavailable: true, Conflict: false, Invalid: false, Internal: false} {
		if New(c, "x", "y").Retryable != want {
			t.Errorf("%s: retryable is not %v", c, want)
		}
	}
}
