package lease

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/space-platform/space/internal/clock"
)

// fast is a clock whose waits are over at once.
type fast struct{ clock.System }

func (fast) After(time.Duration) <-chan time.Time {
	ch := make(chan time.Time, 1)
	ch <- time.Time{}
	return ch
}

func TestServerLivesAsLongAsItsLeases(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lease.sock")
	k, err := Listen(path, clock.System{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	k.Progress("building\nthings")
	ctx := t.Context()
	said := make(chan string, 8)
	go func() { <-said; k.Ready() }()
	a, err := Take(ctx, path, func(s string) { said <- s })
	if err != nil {
		t.Fatal(err)
	}
	b, err := Take(ctx, path, nil)
	if err != nil {
		t.Fatal(err)
	}
	idle := make(chan error, 1)
	go func() { idle <- k.Idle(ctx) }()
	_ = a.Close()
	select {
	case <-idle:
		t.Fatal("idle while a lease is held")
	case <-time.After(2*Linger + 100*time.Millisecond):
	}
	_ = b.Close()
	if err := <-idle; err != nil {
		t.Fatal(err)
	}
	if _, err := Take(ctx, path, nil); !errors.Is(err, ErrEnded) {
		t.Errorf("a lease on a server that ends: %v", err)
	}
}

func TestNoFirstLease(t *testing.T) {
	k, err := Listen(filepath.Join(t.TempDir(), "l.sock"), fast{})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if err := k.Idle(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Take(ctx, filepath.Join(t.TempDir(), "none"), nil); err == nil {
		t.Error("lease on nothing")
	}
}
