package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/test/e2e/server"
)

// lifeOps are the changes during which our processes are killed, with the states
// that they lead to. An expiry is a change that the node makes by itself.
var lifeOps = map[string]string{
	"create": "running", "session": "running", "pause": "paused", "resume": "running",
	"stop": "stopped", "start": "running", "expire": "stopped", "delete": "deleted",
}

// crash is one kill: at a point during an operation, of the process that passes
// it alone or of both.
type crash struct {
	point, op string
	both      bool
}

func (x crash) String() string {
	who := "alone"
	if x.both {
		who = "both"
	}
	return x.point + " in " + x.op + ", " + who
}

// opsOf names the operations that pass a point: the walk must meet each point.
func opsOf(point string) []string {
	area, rest, _ := strings.Cut(point, ".")
	step, _, _ := strings.Cut(rest, ".")
	switch {
	case area == "session":
		return []string{"session"}
	case step == "configure":
		return []string{"create", "start"}
	case step == "start":
		return []string{"start", "create"}
	case step == "destroy":
		return []string{"delete"}
	case step == "absorb":
		return []string{"expire"}
	case area == "gvisor", area == "node":
		return []string{step}
	}
	return []string{"create", "pause", "resume", "stop", "start", "delete"}
}

// crashes is the walk: every named point of the binary, in every operation that
// passes it. In normal mode either the one who passes it dies or both; in long
// mode each of it.
func crashes(points []string) (out []crash) {
	for _, p := range points {
		if strings.HasPrefix(p, "template.") {
			continue // no sandbox passes them; package template walks them
		}
		for _, op := range opsOf(p) {
			out = append(out, crash{p, op, len(out)%3 == 2})
			if long {
				out = append(out, crash{p, op, len(out)%3 != 2})
			}
		}
	}
	return out
}

// C-056: whoever of us is killed wherever, the next start finds or removes
// everything; answered changes come about, and nothing is left on the host.
func TestC056ChaosAtEveryFailpoint(t *testing.T) {
	server.Templates(t, false)
	const servers = 2
	var mu sync.Mutex
	met := map[string]bool{} // guarded by mu
	var all []crash
	t.Run("walk", func(t *testing.T) {
		for part := range servers {
			t.Run(strconv.Itoa(part), func(t *testing.T) {
				t.Parallel()
				s := server.Start(t, server.Options{Flags: []string{"--log-level", "debug"}})
				list := crashes(s.Points())
				if len(list) < 90 {
					t.Fatalf("only %d points", len(list))
				}
				mu.Lock()
				all = list
				mu.Unlock()
				for range scaled(1, 5) {
					for i, x := range list {
						if i%servers != part {
							continue
						}
						began := time.Now()
						hit := ride(t, s, x)
						t.Logf("%v: hit %v, %v", x, hit, time.Since(began).Round(time.Millisecond))
						mu.Lock()
						met[x.point] = met[x.point] || hit
						mu.Unlock()
					}
				}
			})
		}
	})
	for _, x := range all {
		if !met[x.point] {
			t.Errorf("nothing passed the point %s", x.point)
			met[x.point] = true
		}
	}
}

// ride makes one sandbox ready for the operation, has our processes die in it,
// and balances the books. It reports whether the point was passed.
func ride(t *testing.T, s *server.Server, x crash) (hit bool) {
	t.Helper()
	c := s.Client()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	fail := func(format string, args ...any) {
		t.Helper()
		t.Errorf("%v: %s", x, fmt.Sprintf(format, args...))
	}
	id := ""
	if x.op != "create" {
		var err error
		if id, err = born(ctx, c); err != nil {
			t.Fatalf("%v: %v", x, err)
		}
		for op, first := range map[string]string{"resume": "pause", "start": "stop"} {
			if op == x.op {
				ok(t, try(ctx, c, id, first))
			}
		}
	}
	room, serve := s.Room(), s.Serve()
	ok(t, s.Arm(x.point))
	times := []time.Time{time.Now()}
	lap := func() { times = append(times, time.Now()) }
	type result struct {
		id  string
		err error
	}
	done := make(chan result, 1)
	go func() {
		got, err := id, error(nil)
		switch x.op {
		case "create":
			got, err = born(ctx, c)
		case "session":
			err = counted(ctx, c, id)
		case "delete":
			err = unborn(ctx, c, id)
		case "expire":
			err = expired(ctx, c, id)
		default:
			err = try(ctx, c, id, x.op)
		}
		done <- result{got, err}
	}()
	var r *result
	for end := time.Now().Add(20 * time.Second); s.Armed(x.point) && time.Now().Before(end); {
		select {
		case got := <-done:
			// The reconciler may pass some points a moment after the answer.
			r, end = &got, time.Now().Add(300*time.Millisecond)
			done = nil
		case <-time.After(2 * time.Millisecond):
		}
	}
	lap()
	hit = !s.Armed(x.point)
	s.Disarm(x.point)
	if hit {
		for end := time.Now().Add(10 * time.Second); s.Room() == room && s.Serve() == serve; time.Sleep(2 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%v: nobody died", x)
			}
		}
		if s.Room() != room {
			server.Ended(room, 10*time.Second)
		}
		if x.both {
			s.Kill(room)
			s.Kill(serve)
		} else if s.Room() != room && s.Serve() != serve {
			fail("the death of one side took the other along")
		}
		if err := s.Up(); err != nil {
			t.Fatalf("%v: %v", x, err)
		}
	}
	lap()
	if r == nil {
		got := <-done
		r = &got
	}
	lap()
	if r.err != nil {
		fail("the caller got %v", r.err)
	}
	if r.id == "" {
		r.id = id
	}
	balance(ctx, t, s, x, r.id)
	lap()
	if times[len(times)-1].Sub(times[0]) > 5*time.Second {
		ops, err := c.Operations(ctx, client.ListOptions{Sandbox: r.id})
		t.Logf("%v took long: to the point %v, until it served again %v, until the answer %v, to balance %v; operations %+v, %v", x,
			times[1].Sub(times[0]), times[2].Sub(times[1]), times[3].Sub(times[2]), times[4].Sub(times[3]), ops.Items, err)
	}
	return hit
}

// balance checks that the only sandbox is where the operation was to lead, with
// its data, that all operations ended, and that it can be deleted without a rest.
func balance(ctx context.Context, t *testing.T, s *server.Server, x crash, id string) {
	t.Helper()
	c := s.Client()
	l, err := c.Sandboxes(ctx, client.ListOptions{})
	ok(t, err)
	for _, sb := range l.Items {
		if sb.ID != id {
			t.Errorf("%v: a sandbox that nobody asked for: %+v", x, sb)
			_ = unborn(ctx, c, sb.ID)
		}
	}
	if id == "" {
		return
	}
	want := lifeOps[x.op]
	sb, err := c.Sandbox(ctx, id)
	switch {
	case gone(err):
		sb.State = "deleted"
	case err != nil:
		t.Fatalf("%v: %v", x, err)
	}
	if sb.State != want {
		t.Errorf("%v: the sandbox is %s, not %s: %+v", x, sb.State, want, sb.Problem)
	}
	if sb.State != "deleted" {
		if err := try(ctx, c, id, "wake"); err != nil {
			t.Errorf("%v: %v", x, err)
		} else if r, err := c.Exec(ctx, id, spaceapi.Exec{Command: shell("cat ~/marker")}); err != nil || output(r.Stdout) != "kept\n" {
			t.Errorf("%v: the data is %q %q, %v", x, output(r.Stdout), output(r.Stderr), err)
		}
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		ops, err := c.Operations(ctx, client.ListOptions{Sandbox: id})
		ok(t, err)
		open := slices.DeleteFunc(ops.Items, func(o spaceapi.Operation) bool { return o.State != "pending" && o.State != "running" })
		if len(open) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Errorf("%v: operations that do not end: %+v", x, open)
			break
		}
	}
	if sb.State != "deleted" {
		if err := unborn(ctx, c, id); err != nil {
			t.Errorf("%v: %v", x, err)
		}
	}
	for _, left := range s.Gone(id, 10*time.Second) {
		t.Errorf("%v: left on the host: %s", x, left)
	}
}

// born makes a sandbox with a marker file.
func born(ctx context.Context, c *client.Client) (string, error) {
	in := small()
	in.OnTimeout = "stop"
	m, err := c.CreateSandbox(ctx, in, client.Wait(30*time.Second))
	if err != nil {
		return "", err
	}
	if _, err = c.AwaitOperation(ctx, m.Operation); err != nil {
		return m.Sandbox.ID, err
	}
	for { // see counted
		r, err := c.Exec(ctx, m.Sandbox.ID, spaceapi.Exec{Command: shell("echo kept >~/marker")})
		switch {
		case err == nil && r.Exit.Code != 0:
			return m.Sandbox.ID, fmt.Errorf("marker: %+v %s", r.Exit, output(r.Stderr))
		case err == nil || ctx.Err() != nil || client.Code(err) != "":
			return m.Sandbox.ID, err
		}
	}
}

// unborn deletes a sandbox.
func unborn(ctx context.Context, c *client.Client, id string) error {
	m, err := c.DeleteSandbox(ctx, id, client.Wait(30*time.Second))
	if err == nil {
		_, err = c.AwaitOperation(ctx, m.Operation)
	}
	if gone(err) {
		return nil
	}
	return err
}

// expired lets the life of a sandbox end, and waits until control knows it.
func expired(ctx context.Context, c *client.Client, id string) error {
	one := int64(1)
	if _, err := c.PatchSandbox(ctx, id, spaceapi.PatchSandbox{TimeoutSeconds: &one}); err != nil {
		return err
	}
	for {
		sb, err := c.Sandbox(ctx, id)
		if err != nil || sb.State == "stopped" {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("still %s", sb.State)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// counted runs a session that counts its starts in a file and prints a sequence;
// both must be right at the end.
func counted(ctx context.Context, c *client.Client, id string) error {
	s, err := c.CreateSession(ctx, id, spaceapi.CreateSession{Command: shell("echo x >>~/starts; seq 1 5000; exit 3")})
	if err != nil {
		return err
	}
	st := c.Attach(s)
	defer st.Close()
	w, err := drain(ctx, st)
	if err != nil {
		return err
	}
	if w.Exit == nil || w.Exit.Code != 3 || w.Gaps != 0 {
		return fmt.Errorf("session ended with %+v %+v, %d gaps", w.Exit, w.Ended, w.Gaps)
	}
	if n := strings.Count(w.Out.String(), "\n"); n != 5000 || !strings.HasPrefix(w.Out.String(), "1\n2\n") || !strings.HasSuffix(w.Out.String(), "\n5000\n") {
		return fmt.Errorf("session printed %d lines", n)
	}
	for { // a blocking exec is not repeated by itself: its connection may break where the server dies late
		r, err := c.Exec(ctx, id, spaceapi.Exec{Command: shell("cat ~/starts")})
		switch {
		case err == nil && output(r.Stdout) != "x\n":
			return fmt.Errorf("the command started %q times", output(r.Stdout))
		case err == nil || ctx.Err() != nil || client.Code(err) != "":
			return err
		}
	}
}
