// Package e2e tests the whole of SPACE: the real binary, real machines, as root,
// from outside. In normal mode counts and intervals are scaled; SPACE_LONG=1
// takes them literally.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/test/e2e/server"
)

// long says that counts and intervals are to be taken literally.
var long = os.Getenv("SPACE_LONG") != ""

// scaled is n, or in long mode literal.
func scaled[T any](n, literal T) T {
	if long {
		return literal
	}
	return n
}

var (
	sharedOnce sync.Once
	sharedOne  *server.Server
	sharedErr  error
)

func TestMain(m *testing.M) {
	code := m.Run()
	if sharedOne != nil {
		log := sharedOne.Log()
		trouble := sharedOne.Close()
		for _, s := range trouble {
			fmt.Fprintln(os.Stderr, "the shared server:", s)
		}
		if len(trouble) > 0 && code == 0 {
			code = 1
		}
		if code != 0 {
			fmt.Fprintf(os.Stderr, "log of the shared server:\n%s\n", log)
		}
	}
	server.RemoveBinary()
	os.Exit(code)
}

// shared is one server for all tests that do it no harm. It logs at debug level
// and has base:latest.
func shared(t *testing.T) *server.Server {
	t.Helper()
	server.Templates(t, true)
	sharedOnce.Do(func() {
		if sharedOne, sharedErr = server.New(server.Options{Base: true, Flags: []string{"--log-level", "debug"}}); sharedErr == nil {
			sharedErr = sharedOne.Up()
		}
	})
	if sharedErr != nil {
		t.Fatal(sharedErr)
	}
	return sharedOne
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// small is a sandbox of tiny:latest that a busy machine has room for.
func small() spaceapi.CreateSandbox {
	// The literal cases take longer than a sandbox lives by default.
	return spaceapi.CreateSandbox{Template: "tiny:latest", TimeoutSeconds: 3600, Resources: spaceapi.Resources{CPUs: 1, MemoryMiB: 256, DiskMiB: 128, MaxProcesses: 64}}
}

// create makes a sandbox, waits until it runs, and deletes it with the test.
func create(t testing.TB, c *client.Client, in spaceapi.CreateSandbox) spaceapi.Sandbox {
	t.Helper()
	ctx := within(t, time.Minute)
	m, err := c.CreateSandbox(ctx, in, client.Wait(30*time.Second))
	ok(t, err)
	t.Cleanup(func() { remove(t, c, m.Sandbox.ID) })
	_, err = c.AwaitOperation(ctx, m.Operation)
	ok(t, err)
	sb, err := c.Sandbox(ctx, m.Sandbox.ID)
	ok(t, err)
	if sb.State != "running" {
		t.Fatalf("the sandbox is %s after creation: %+v", sb.State, sb.Problem)
	}
	return sb
}

// remove deletes a sandbox that may be gone already.
func remove(t testing.TB, c *client.Client, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	m, err := c.DeleteSandbox(ctx, id, client.Wait(30*time.Second))
	if err == nil {
		_, err = c.AwaitOperation(ctx, m.Operation)
	}
	if err != nil && !gone(err) {
		t.Errorf("delete %s: %v", id, err)
	}
}

// gone reports that a sandbox is deleted or was never there.
func gone(err error) bool {
	return client.Code(err) == "sandbox_deleted" || client.Code(err) == "sandbox_not_found"
}

// verb does a life-cycle change and waits for its end.
func verb(t testing.TB, c *client.Client, id, what string) {
	t.Helper()
	ok(t, try(within(t, time.Minute), c, id, what))
}

func try(ctx context.Context, c *client.Client, id, what string) error {
	m, err := c.Lifecycle(ctx, id, what, client.Wait(30*time.Second))
	if err == nil {
		_, err = c.AwaitOperation(ctx, m.Operation)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", what, id, err)
	}
	return nil
}

// state awaits one of the states and gives the sandbox.
func state(t testing.TB, c *client.Client, id string, d time.Duration, want ...string) spaceapi.Sandbox {
	t.Helper()
	var sb spaceapi.Sandbox
	var err error
	for end := time.Now().Add(d); ; time.Sleep(20 * time.Millisecond) {
		sb, err = c.Sandbox(within(t, 10*time.Second), id)
		ok(t, err)
		for _, w := range want {
			if sb.State == w {
				return sb
			}
		}
		if time.Now().After(end) {
			t.Fatalf("%s is %s after %v, not %v: %+v", id, sb.State, d, want, sb.Problem)
		}
	}
}

func shell(text string) spaceapi.Command { return spaceapi.Command{Shell: text} }

// run executes a command, of which nothing is expected.
func run(t testing.TB, c *client.Client, id string, cmd spaceapi.Command) spaceapi.ExecResult {
	t.Helper()
	r, err := c.Exec(within(t, time.Minute), id, spaceapi.Exec{Command: cmd})
	ok(t, err)
	return r
}

// out executes a shell text that must exit 0, and gives what it printed.
func out(t testing.TB, c *client.Client, id, text string) string {
	t.Helper()
	r := run(t, c, id, shell(text))
	if r.Exit.Cause != "exited" || r.Exit.Code != 0 {
		t.Fatalf("%q ended with %+v: %s", text, r.Exit, output(r.Stderr))
	}
	return output(r.Stdout)
}

func output(o spaceapi.Output) string {
	if o.Text != nil {
		return *o.Text
	}
	return string(o.B64)
}

// session makes and attaches a session, which starts its command.
func session(t testing.TB, c *client.Client, id string, in spaceapi.CreateSession) *client.Stream {
	t.Helper()
	s, err := c.CreateSession(within(t, 20*time.Second), id, in)
	ok(t, err)
	st := c.Attach(s)
	t.Cleanup(st.Close)
	return st
}

// until reads events until f is content.
func until(ctx context.Context, t testing.TB, st *client.Stream, f func(client.Event) bool) {
	t.Helper()
	for {
		ev, err := st.Next(ctx)
		if err != nil {
			t.Fatalf("session %s after %q: %v", st.Session(), st.Last(), err)
		}
		if f(ev) {
			return
		}
	}
}

// started reads until the command runs.
func started(t testing.TB, st *client.Stream) {
	t.Helper()
	until(within(t, 20*time.Second), t, st, func(ev client.Event) bool { return ev.Type == spaceapi.EventStarted })
}

// said reads until standard output so far holds text.
func said(t testing.TB, st *client.Stream, text string) {
	t.Helper()
	var b strings.Builder
	until(within(t, 30*time.Second), t, st, func(ev client.Event) bool {
		b.Write(ev.Data)
		return strings.Contains(b.String(), text)
	})
}

// whole is all that a stream gives until its end.
type whole struct {
	Out, Err strings.Builder
	Gaps     int
	Missing  uint64
	Exit     *spaceapi.Exit // nil when there was none
	Ended    *spaceapi.Ended
}

// drain reads a stream to its end. After the last event there must be nothing.
func drain(ctx context.Context, st *client.Stream) (*whole, error) {
	w := &whole{}
	for {
		ev, err := st.Next(ctx)
		if errors.Is(err, io.EOF) {
			return w, nil
		}
		if err != nil {
			return w, fmt.Errorf("session %s after %q: %w", st.Session(), st.Last(), err)
		}
		if w.Exit != nil || w.Ended != nil {
			return w, fmt.Errorf("%s came after the end", ev.Type)
		}
		switch ev.Type {
		case spaceapi.EventStdout:
			w.Out.Write(ev.Data)
		case spaceapi.EventStderr:
			w.Err.Write(ev.Data)
		case spaceapi.EventGap:
			w.Gaps++
			w.Missing += ev.Gap.Missing
		case spaceapi.EventExit:
			w.Exit = ev.Exit
		case spaceapi.EventError:
			w.Ended = ev.Ended
		}
	}
}

// exited reads a stream that must end with this code.
func exited(t testing.TB, st *client.Stream, code int) *whole {
	t.Helper()
	w, err := drain(within(t, scaled(time.Minute, 20*time.Minute)), st)
	ok(t, err)
	if w.Exit == nil || w.Exit.Cause != "exited" || w.Exit.Code != code {
		t.Fatalf("the session ended with %+v, %+v, not with exit code %d", w.Exit, w.Ended, code)
	}
	return w
}
