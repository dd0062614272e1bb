package session

import (
	"context"
	"fmt"
	"testing"

	"github.com/space-platform/space/api/guestapi"
)

var terminalSize = &guestapi.Size{Rows: 24, Cols: 80}

func BenchmarkExec(b *testing.B) {
	h := newHost(b, Limits{})
	h.exec("true")
	for b.Loop() {
		h.execAs(ExecRequest{CreateRequest: CreateRequest{Sandbox: h.box, Command: Command{Args: []string{"/bin/true"}}}})
	}
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
