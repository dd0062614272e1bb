package session

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/internal/fault"
)

// Under an idempotency key a command runs once: over repeats, over a request
// that ended first, from several callers at once, and over a restart.
func TestExecOnceUnderAKey(t *testing.T) {
	t.Parallel()
	h, _ := world(t, Limits{})
	count := filepath.Join(t.TempDir(), "count")
	must(t, os.Chmod(filepath.Dir(count), 0o777))
	keyed := func(text, body string) ExecRequest {
		r := ExecRequest{CreateRequest: h.shell(text), StdinData: []byte("in\n")}
		r.IdempotencyKey, r.BodyHash = "key-1", []byte(body)
		return r
	}
	run := keyed("echo x >> "+count+"; cat; sleep 1; echo out; exit 4", "body")

	short, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if _, err := h.Exec(short, h.who, run); !fault.IsCode(err, "exec_goes_on") {
		t.Fatalf("a request that ended first: %v", err)
	}
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			out := h.execAs(run)
			if out.Exit.Cause != "exited" || out.Exit.Code != 4 || string(out.Stdout) != "in\nout\n" {
				t.Errorf("%+v %q", out.Exit, out.Stdout)
			}
		})
	}
	wg.Wait()
	h.reopen()
	if out := h.execAs(run); out.Exit.Code != 4 || string(out.Stdout) != "in\nout\n" {
		t.Errorf("after a restart: %+v %q", out.Exit, out.Stdout)
	}
	if _, err := h.Exec(context.Background(), h.who, keyed("true", "other body")); !fault.IsCode(err, "idempotency_mismatch") {
		t.Errorf("another body: %v", err)
	}
	b, err := os.ReadFile(count)
	must(t, err)
	if n := strings.Count(string(b), "x"); n != 1 {
		t.Errorf("it ran %d times", n)
	}
}
