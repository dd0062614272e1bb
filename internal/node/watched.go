package node

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guestclient"
)

// A guest daemon that breaks its protocol maxBreaches times within breachWindow
// is taken for what it then is, not ours any more: its sandbox is quarantined.
// One or two may be the accident of a machine that was just ended.
const (
	maxBreaches  = 3
	breachWindow = time.Minute
)

// watched is the guest client that sessions get: it counts breaches of protocol.
type watched struct {
	guestclient.Guest
	b *box

	mu       sync.Mutex
	breaches []time.Time // the latest ones; guarded by mu
}

func isBreach(err error) bool {
	return errors.Is(err, guestapi.ErrProtocol) || fault.IsCode(err, "guest_protocol_error")
}

// note takes in how a call ended.
func (w *watched) note(err error) {
	if err == nil || !isBreach(err) {
		return
	}
	now := w.b.n.clock.Now()
	w.mu.Lock()
	w.breaches = append(w.breaches, now)
	if n := len(w.breaches); n > maxBreaches {
		w.breaches = w.breaches[n-maxBreaches:]
	}
	enough := len(w.breaches) == maxBreaches && now.Sub(w.breaches[0]) <= breachWindow
	if enough {
		w.breaches = nil
	}
	w.mu.Unlock()
	if !enough {
		return
	}
	// Not in the caller's goroutine: it may hold what the database needs.
	w.b.n.spawn(func() {
		if err := w.b.n.ReportProtocolError(w.b.n.ctx, w.b.id); err != nil {
			w.b.n.log.Error("cannot quarantine a sandbox", slog.String("sandbox", string(w.b.id)), slog.Any("error", err))
		}
	})
}

func (w *watched) Start(ctx context.Context, s guestapi.Start) (guestapi.Process, error) {
	p, err := w.Guest.Start(ctx, s)
	w.note(err)
	return p, err
}

func (w *watched) Processes(ctx context.Context) ([]guestapi.Process, error) {
	p, err := w.Guest.Processes(ctx)
	w.note(err)
	return p, err
}

func (w *watched) Process(ctx context.Context, id string) (guestapi.Process, error) {
	p, err := w.Guest.Process(ctx, id)
	w.note(err)
	return p, err
}

func (w *watched) Output(ctx context.Context, id string, from uint64) (guestclient.Output, error) {
	o, err := w.Guest.Output(ctx, id, from)
	w.note(err)
	if err != nil {
		return nil, err
	}
	return &watchedOutput{o, w}, nil
}

func (w *watched) Stdin(ctx context.Context, id string, offset uint64, p []byte) (guestapi.StdinReply, error) {
	r, err := w.Guest.Stdin(ctx, id, offset, p)
	w.note(err)
	return r, err
}

type watchedOutput struct {
	guestclient.Output
	w *watched
}

func (o *watchedOutput) Next() (guestapi.Frame, error) {
	f, err := o.Output.Next()
	o.w.note(err)
	return f, err
}
