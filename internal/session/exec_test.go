package session

import (
	"context"
	"fmt"
	"testing"

	"github.com/space-platform/space/api/guestapi"
)

func TestC012StdoutAndStderrStayApart(t *testing.T) {
	h := newHost(t, Limits{})
	r := h.exec("echo out; echo err >&2; exit 7")
	if string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" || r.Exit.Cause != CauseExited || r.Exit.Code != 7 {
		t.Fatal(r)
	}
}

func BenchmarkExec(b *testing.B) {
	h := newHost(b, Limits{})
	h.exec("true")
	b.Run("session", func(b *testing.B) {
		for b.Loop() {
			h.execAs(ExecRequest{CreateRequest: CreateRequest{Sandbox: h.box, Command: Command{Args: []string{"/bin/true"}}}})
		}
	})
}

// BenchmarkExecDirect is the floor: the guest daemon called over its channel.
func BenchmarkExecDirect(b *testing.B) {
	h := newHost(b, Limits{})
	ctx := context.Background()
	i := 0
	for b.Loop() {
		i++
		id := fmt.Sprintf("p%d", i)
		_, err := h.machine.Start(ctx, guestapi.Start{ID: id, Args: []string{"/bin/true"}})
		must(b, err)
		out, err := h.machine.Output(ctx, id, 0)
		must(b, err)
		for {
			if _, err := out.Next(); err != nil {
				break
			}
		}
		_ = out.Close()
		must(b, h.machine.Forget(ctx, id))
	}
}
