package session

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/space-platform/space/api/guestapi"
)

const benchBytes = 128 << 20

// BenchmarkStreamRaw is the floor: output read from the daemon's channel and
// acknowledged, nothing else.
func BenchmarkStreamRaw(b *testing.B) {
	h := newHost(b, Limits{})
	ctx := context.Background()
	b.SetBytes(benchBytes)
	for b.Loop() {
		const id = "raw"
		_, err := h.machine.Start(ctx, guestapi.Start{ID: id, Shell: "head -c 134217728 /dev/zero", Window: guestWindow})
		must(b, err)
		out, err := h.machine.Output(ctx, id, 0)
		must(b, err)
		acks := make(chan uint64, 1)
		go func() {
			for n := range acks {
				_ = h.machine.Ack(ctx, id, n)
			}
		}()
		var got, acked uint64
		for {
			f, err := out.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			must(b, err)
			if got += uint64(len(f.Payload)); got-acked >= ackBytes {
				select {
				case acks <- got:
					acked = got
				default:
				}
			}
			if f.Type == guestapi.FrameExit {
				break
			}
		}
		close(acks)
		_ = out.Close()
		must(b, h.machine.Forget(ctx, id))
		if got != benchBytes {
			b.Fatal(got)
		}
	}
}

func benchStream(b *testing.B, accept string) {
	h := newHost(b, Limits{JournalBytes: 2 * benchBytes, Sweep: time.Second})
	p := newPlane(b, h)
	b.SetBytes(benchBytes)
	for b.Loop() {
		s, tok := h.create(h.shell("head -c 134217728 /dev/zero"))
		resp := p.do(context.Background(), "POST", "/d/sessions/"+string(s.ID)+"/attach", tok.Token, nil, "Accept", accept)
		n, err := io.Copy(io.Discard, resp.Body)
		must(b, err)
		if n < benchBytes {
			b.Fatal(n)
		}
		_, err = h.Kill(context.Background(), h.who, s.ID)
		must(b, err)
	}
}

func BenchmarkStreamSSE(b *testing.B)    { benchStream(b, "text/event-stream") }
func BenchmarkStreamBinary(b *testing.B) { benchStream(b, FramesType) }
