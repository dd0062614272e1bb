package e2e

import (
	"context"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/test/e2e/server"
)

// unique is a value that no other test has.
func unique(prefix string) string { return prefix + strconv.FormatInt(time.Now().UnixNano(), 36) }

// C-057: sandboxes survive a clean restart and a crash, with all that is known of
// them, and their commands go on.
func TestC057SurviveRestarts(t *testing.T) {
	t.Parallel()
	s := server.Start(t, server.Options{})
	c := s.Client()
	n := scaled(2, 5)
	in := tiniest()
	in.TimeoutSeconds, in.OnTimeout, in.Metadata = 1800, "stop", map[string]string{"case": "57"}
	ids := several(t, c, 2*n, in)
	before := map[string]spaceapi.Sandbox{}
	streams := map[string]*client.Stream{}
	for i, id := range ids {
		st := session(t, c, id, spaceapi.CreateSession{Command: shell("i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done")})
		said(t, st, "2\n")
		streams[id] = st
		if i >= n {
			verb(t, c, id, "pause")
		}
		sb, err := c.Sandbox(within(t, 10*time.Second), id)
		ok(t, err)
		before[id] = sb
	}
	for _, how := range []string{"cleanly", "by a crash"} {
		if how == "cleanly" {
			ok(t, s.Down())
		} else {
			room, serve := s.Room(), s.Serve()
			s.Kill(room)
			s.Kill(serve)
		}
		ok(t, s.Up())
		l, err := c.Sandboxes(within(t, 10*time.Second), client.ListOptions{Metadata: map[string]string{"case": "57"}})
		ok(t, err)
		if len(l.Items) != len(ids) {
			t.Fatalf("restarted %s: %d sandboxes, not %d", how, len(l.Items), len(ids))
		}
		for _, sb := range l.Items {
			was := before[sb.ID]
			if sb.State != was.State || !sb.ExpiresAt.Equal(was.ExpiresAt) || sb.OnTimeout != was.OnTimeout || !maps.Equal(sb.Metadata, was.Metadata) || sb.Problem != nil {
				t.Errorf("restarted %s: %+v, before: %+v", how, sb, was)
			}
		}
		for i, id := range ids {
			if i >= n {
				verb(t, c, id, "resume")
			}
			said(t, streams[id], "\n") // the same stream, over the restart
			if i >= n {
				verb(t, c, id, "pause")
				sb, err := c.Sandbox(within(t, 10*time.Second), id)
				ok(t, err)
				before[id] = sb // resume gave it a new life
			}
		}
	}
}

// lossy lets requests through and loses their answers.
type lossy struct {
	under http.RoundTripper
	lose  int
}

func (l *lossy) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := l.under.RoundTrip(r)
	if err != nil || l.lose == 0 {
		return resp, err
	}
	l.lose--
	_, _ = io.Copy(io.Discard, resp.Body) // the server has done its part
	_ = resp.Body.Close()
	return nil, errors.New("the answer is lost")
}

// C-060: a create whose answer is lost can be repeated.
func TestC060CreateIsRetried(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	mark := unique("c060-")
	in := tiniest()
	in.Metadata = map[string]string{"case": mark}
	t.Cleanup(func() {
		l, err := c.Sandboxes(within(t, 10*time.Second), client.ListOptions{Metadata: in.Metadata})
		ok(t, err)
		for _, sb := range l.Items {
			remove(t, c, sb.ID)
		}
	})
	key := client.IdempotencyKey(mark)
	ids := map[string]bool{}
	for range 5 {
		hc := &http.Client{Transport: &lossy{under: http.DefaultTransport, lose: 2}}
		lc := client.New("http://"+s.API, s.Key(), client.WithHTTPClient(hc), client.WithAttempts(3))
		m, err := lc.CreateSandbox(within(t, 20*time.Second), in, key)
		ok(t, err)
		ids[m.Sandbox.ID] = true
	}
	l, err := c.Sandboxes(within(t, 10*time.Second), client.ListOptions{Metadata: in.Metadata})
	ok(t, err)
	if len(ids) != 1 || len(l.Items) != 1 {
		t.Errorf("%d ids, %d sandboxes", len(ids), len(l.Items))
	}
	in.Resources.CPUs = 0.2
	if _, err := c.CreateSandbox(within(t, 10*time.Second), in, key); client.Code(err) != "idempotency_mismatch" {
		t.Errorf("another body with the same key: %v", err)
	}
}

// C-061: a client that leaves during create leaves nothing that nobody knows.
func TestC061ClientLeaves(t *testing.T) {
	t.Parallel()
	s := server.Start(t, server.Options{})
	c := s.Client()
	n := scaled(12, 100)
	each(t, n, func(i int) error {
		time.Sleep(time.Duration(i) * scaled(20*time.Millisecond, 100*time.Millisecond))
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.Int64N(int64(scaled(120*time.Millisecond, 450*time.Millisecond))))+scaled(time.Millisecond, 50*time.Millisecond))
		defer cancel()
		one := client.New("http://"+s.API, s.Key(), client.WithAttempts(1))
		_, err := one.CreateSandbox(ctx, tiniest(), client.Wait(20*time.Second))
		if err != nil && ctx.Err() == nil {
			return err
		}
		return nil
	})
	var l spaceapi.List[spaceapi.Sandbox]
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		var err error
		l, err = c.Sandboxes(within(t, 10*time.Second), client.ListOptions{Limit: 500})
		ok(t, err)
		if !slices.ContainsFunc(l.Items, func(sb spaceapi.Sandbox) bool { return sb.State != "running" }) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("not all run: %+v", l.Items)
		}
	}
	var listed, there []string
	for _, sb := range l.Items {
		listed = append(listed, sb.ID)
		if sb.ExpiresAt.Before(time.Now()) {
			t.Errorf("no life time: %+v", sb)
		}
	}
	entries, err := os.ReadDir(filepath.Join(s.Layout.Host(), "gvisor", "machines"))
	ok(t, err)
	for _, e := range entries {
		there = append(there, e.Name())
	}
	slices.Sort(listed)
	if !slices.Equal(listed, there) {
		t.Errorf("listed %v, on the host %v", listed, there)
	}
}

// C-062: pages cover the whole list, also while others come and go.
func TestC062PagesCoverAll(t *testing.T) {
	t.Parallel()
	c := shared(t).Client()
	n, limit := scaled(8, 25), scaled(3, 10)
	in := tiniest()
	in.Metadata = map[string]string{"case": unique("c062-")}
	ids := several(t, c, n, in)
	seen := map[string]int{}
	pages := 0
	for o := (client.ListOptions{Limit: limit, Metadata: in.Metadata}); ; {
		l, err := c.Sandboxes(within(t, 10*time.Second), o)
		ok(t, err)
		pages++
		for _, sb := range l.Items {
			seen[sb.ID]++
		}
		if len(l.Items) > limit {
			t.Errorf("a page of %d", len(l.Items))
		}
		if o.Cursor = l.Next; o.Cursor == "" {
			break
		}
		m, err := c.CreateSandbox(within(t, 10*time.Second), tiniest()) // another comes and goes
		ok(t, err)
		ok(t, unborn(within(t, time.Minute), c, m.Sandbox.ID))
	}
	for _, id := range ids {
		if seen[id] != 1 {
			t.Errorf("%s is on %d pages", id, seen[id])
		}
	}
	if len(seen) != n || pages < n/limit {
		t.Errorf("%d sandboxes on %d pages", len(seen), pages)
	}
	if _, err := c.Sandboxes(within(t, 10*time.Second), client.ListOptions{Cursor: "bad"}); client.Code(err) != "bad_cursor" {
		t.Errorf("a bad cursor: %v", err)
	}
}

// C-063: a filter narrows, or is refused.
func TestC063FiltersNarrow(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	mark := unique("c063-")
	for _, colour := range []string{"red", "blue"} {
		in := tiniest()
		in.Metadata = map[string]string{"colour": mark + colour}
		create(t, c, in)
	}
	count := func(o client.ListOptions) int {
		t.Helper()
		l, err := c.Sandboxes(within(t, 10*time.Second), o)
		ok(t, err)
		return len(l.Items)
	}
	if n := count(client.ListOptions{Metadata: map[string]string{"colour": mark + "red"}}); n != 1 {
		t.Errorf("a matching value: %d", n)
	}
	if n := count(client.ListOptions{Metadata: map[string]string{"colour": mark}}); n != 0 {
		t.Errorf("an unknown value: %d", n)
	}
	if n := count(client.ListOptions{Metadata: map[string]string{mark: "red"}}); n != 0 {
		t.Errorf("an unknown key: %d", n)
	}
	if n := count(client.ListOptions{States: []string{"suspended"}}); n != 0 {
		t.Errorf("a state that nobody is in: %d", n)
	}
	if _, err := c.Sandboxes(within(t, 10*time.Second), client.ListOptions{States: []string{"dreaming"}}); client.Code(err) == "" {
		t.Errorf("a state that is none: %v", err)
	}
	req, err := http.NewRequestWithContext(within(t, 10*time.Second), "GET", "http://"+s.API+"/v1/sandboxes?metadata=nonsense", nil)
	ok(t, err)
	req.Header.Set("Authorization", "Bearer "+s.Key())
	resp, err := http.DefaultClient.Do(req)
	ok(t, err)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusBadRequest && resp.StatusCode != http.StatusUnprocessableEntity {
		t.Errorf("malformed text: %d", resp.StatusCode)
	}
}

// C-067: what could not be made uses nothing up.
func TestC067FailuresCostNothing(t *testing.T) {
	t.Parallel()
	s := server.Start(t, server.Options{Flags: []string{"--max-sandboxes-per-tenant", "5"}})
	c := client.New("http://"+s.API, s.Key(), client.WithAttempts(1)) // refusals are expected, and not to be waited out
	bad := func(change func(*spaceapi.CreateSandbox)) spaceapi.CreateSandbox {
		in := tiniest()
		change(&in)
		return in
	}
	for i, in := range []spaceapi.CreateSandbox{
		bad(func(in *spaceapi.CreateSandbox) { in.Template = "nosuch:latest" }),
		bad(func(in *spaceapi.CreateSandbox) { in.Resources.MemoryMiB = 1 << 20 }),
		bad(func(in *spaceapi.CreateSandbox) { in.Resources.DiskMiB = 1 << 30 }),
		bad(func(in *spaceapi.CreateSandbox) { in.AcceptIsolation = []string{"microvm"} }),
		bad(func(in *spaceapi.CreateSandbox) { in.TimeoutSeconds = 1 << 40 }),
	} {
		m, err := c.CreateSandbox(within(t, 20*time.Second), in, client.Wait(20*time.Second))
		if err == nil {
			_, err = c.AwaitOperation(within(t, 20*time.Second), m.Operation)
			remove(t, c, m.Sandbox.ID)
		}
		if client.Code(err) == "" || client.Code(err) == "quota_exceeded" {
			t.Errorf("bad create %d: %v", i, err)
		}
	}
	var ids []string
	fill := func(free int, when string) {
		t.Helper()
		for range free {
			m, err := c.CreateSandbox(within(t, 20*time.Second), tiniest(), client.Wait(20*time.Second))
			ok(t, err)
			_, err = c.AwaitOperation(within(t, 20*time.Second), m.Operation)
			ok(t, err)
			ids = append(ids, m.Sandbox.ID)
		}
		if _, err := c.CreateSandbox(within(t, 20*time.Second), tiniest()); client.Code(err) != "quota_exceeded" {
			t.Errorf("the sixth %s: %v", when, err)
		}
	}
	used := func(n int) {
		t.Helper()
		l, err := c.Nodes(within(t, 10*time.Second))
		ok(t, err)
		if l.Items[0].Sandboxes != n || l.Items[0].Used.MemoryMiB != int64(n)*128 {
			t.Errorf("the node counts %d sandboxes with %d MiB, not %d", l.Items[0].Sandboxes, l.Items[0].Used.MemoryMiB, n)
		}
	}
	fill(5, "at first")
	used(5)
	serve := s.Serve()
	s.Kill(s.Room())
	s.Kill(serve)
	ok(t, s.Up())
	fill(0, "after a crash")
	used(5)
	for _, id := range ids[:2] {
		remove(t, c, id)
	}
	used(3)
	fill(2, "after two deletes")
	used(5)
	ok(t, s.DeleteAll())
	used(0)
	if left := s.Gone("/gvisor/machines/", 5*time.Second); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
