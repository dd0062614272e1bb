package runtimetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// maxAnswer bounds what is read of any answer: the far end is hostile.
const maxAnswer = 4 << 20

// keep is a path in every template's scratch space on the disk.
const keep = "/var/tmp/runtimetest"

// request sends one request over a fresh stream.
func request(ctx context.Context, m runtime.Machine, method, target string, body io.Reader) (int, []byte, error) {
	// The stream is written to and read from directly: a transport's retries would
	// hide what the driver does.
	c, err := m.Dial(ctx)
	if err != nil {
		return 0, nil, fmt.Errorf("dial: %w", err)
	}
	defer c.Close()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return c, nil
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+target, body)
	if err != nil {
		return 0, nil, err
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return resp.StatusCode, b, err
}

// hello waits until the guest daemon answers, at most BootTimeout.
func (e *env) hello(m runtime.Machine) guestapi.HelloReply {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), runtime.BootTimeout)
	defer cancel()
	for {
		r, err := e.helloOnce(ctx, m)
		if err == nil {
			return r
		}
		if ctx.Err() != nil || errors.Is(err, runtime.ErrNotRunning) || errors.Is(err, runtime.ErrPaused) {
			e.Fatalf("the guest daemon of a running machine does not answer: %v", err)
		}
		// A stream that broke while the daemon comes up is tried again.
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func (e *env) helloOnce(ctx context.Context, m runtime.Machine) (guestapi.HelloReply, error) {
	var r guestapi.HelloReply
	nonce := sandbox.Random(16)
	in, err := json.Marshal(guestapi.Hello{Version: guestapi.Version, Nonce: nonce})
	if err != nil {
		return r, err
	}
	code, b, err := request(ctx, m, http.MethodPost, guestapi.PathHello, bytes.NewReader(in))
	if err != nil {
		return r, err
	}
	if code != http.StatusOK {
		return r, fmt.Errorf("hello: %d %.200s", code, b)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("hello: %w", err)
	}
	if r.Nonce != nonce {
		return r, fmt.Errorf("hello: nonce %.40q, sent %q: a stale stream", r.Nonce, nonce)
	}
	return r, nil
}

func (e *env) ready() runtime.Machine {
	e.Helper()
	m := e.boot()
	e.hello(m)
	return m
}

func fileTarget(path string) string {
	return guestapi.PathFiles + "?" + url.Values{"path": {path}, "user": {"root"}, "mode": {"0644"}}.Encode()
}

func (e *env) put(m runtime.Machine, path, text string) {
	e.Helper()
	code, b, err := request(e.ctx(), m, http.MethodPut, fileTarget(path), strings.NewReader(text))
	if err != nil || code/100 != 2 {
		e.Fatalf("put %s: %d %.200s, %v", path, code, b, err)
	}
}

func (e *env) get(m runtime.Machine, path string) (string, bool) {
	e.Helper()
	code, b, err := request(e.ctx(), m, http.MethodGet, fileTarget(path), nil)
	if err != nil || (code != http.StatusOK && code != http.StatusNotFound) {
		e.Fatalf("get %s: %d %.200s, %v", path, code, b, err)
	}
	return string(b), code == http.StatusOK
}

func (e *env) kept(m runtime.Machine, text, edge string) {
	e.Helper()
	e.hello(m)
	if got, ok := e.get(m, keep); !ok || got != text {
		e.edge(edge, "a file that the guest was told is written reads %q (exists: %v), want %q", got, ok, text)
	}
}

// launch starts a process in the guest.
func (e *env) launch(m runtime.Machine, s guestapi.Start) {
	e.Helper()
	in, err := json.Marshal(s)
	e.must("marshal", err)
	code, b, err := request(e.ctx(), m, http.MethodPost, guestapi.PathProcesses, bytes.NewReader(in))
	if err != nil || code/100 != 2 {
		e.Fatalf("start %q: %d %.200s, %v", s.Shell, code, b, err)
	}
}

// finish reads the output of a process until its exit.
func finish(ctx context.Context, m runtime.Machine, id string) (string, *guestapi.ExitStatus, error) {
	code, b, err := request(ctx, m, http.MethodGet, strings.Replace(guestapi.PathOutput, "{id}", id, 1)+"?from=0", nil)
	if err != nil {
		return "", nil, err
	}
	if code != http.StatusOK {
		return "", nil, fmt.Errorf("output: %d %.200s", code, b)
	}
	r := guestapi.NewFrameReader(bytes.NewReader(b), 0)
	var text strings.Builder
	for {
		f, err := r.Next()
		if err != nil {
			return text.String(), nil, fmt.Errorf("output after %.200q: %w", text.String(), err)
		}
		if f.Exit != nil {
			return text.String(), f.Exit, nil
		}
		text.Write(f.Payload)
	}
}

func (e *env) exec(m runtime.Machine, user, shell string) (string, *guestapi.ExitStatus) {
	e.Helper()
	id := string(sandbox.NewSessionID(m.ID()))
	e.launch(m, guestapi.Start{ID: id, Shell: shell, User: user, Cwd: "/"})
	text, exit, err := finish(e.ctx(), m, id)
	e.must("output of "+shell, err)
	return text, exit
}

func testGuestAnswers(e *env) {
	m := e.create(e.spec())
	e.start(m)
	// Dial right after Start waits for the guest, it does not fail.
	ctx, cancel := context.WithTimeout(context.Background(), runtime.BootTimeout)
	defer cancel()
	c, err := m.Dial(ctx)
	if err != nil {
		e.Fatalf("Dial right after Start: %v; it waits for a guest that is booting", err)
	}
	e.must("close", c.Close())
	first := e.hello(m)
	if again := e.hello(m); again.BootEpoch != first.BootEpoch || first.BootEpoch == "" {
		e.Errorf("boot epochs %q and %q in one life", first.BootEpoch, again.BootEpoch)
	}
	e.must("Stop", m.Stop(e.ctx()))
	e.start(m)
	if next := e.hello(m); next.BootEpoch == first.BootEpoch {
		e.edge("created→running (Start)", "the guest still has boot epoch %q: no cold boot", next.BootEpoch)
	}
	if e.f.Restart == nil {
		return
	}
	epoch := e.hello(m).BootEpoch
	e.rt = e.f.Restart(e, e.rt)
	m, err = e.rt.Adopt(e.ctx(), m.ID())
	e.must("Adopt after a restart", err)
	if now := e.hello(m).BootEpoch; now != epoch {
		e.broken(7, "the guest has boot epoch %q after a restart of the caller, was %q", now, epoch)
	}
}

func testFilesSurvive(e *env) {
	m := e.ready()
	e.put(m, keep, "by stop")
	e.must("Stop", m.Stop(e.ctx()))
	e.start(m)
	e.kept(m, "by stop", "running→created→running (Stop, Start)")
	if e.f.Kill != nil {
		e.put(m, keep, "by kill")
		e.f.Kill(e, e.rt, m.ID())
		if _, err := m.Wait(e.ctx()); err != nil {
			e.broken(5, "Wait after a kill: %v", err)
		}
		e.start(m)
		e.kept(m, "by kill", "dead→running (Start)")

		e.f.Kill(e, e.rt, m.ID())
		if _, err := m.Wait(e.ctx()); err != nil {
			e.broken(5, "Wait after a kill: %v", err)
		}
		e.must("Stop", m.Stop(e.ctx()))
		e.start(m)
		e.kept(m, "by kill", "dead→created→running (Stop, Start)")
	}
	if e.f.Reboot != nil {
		e.put(m, keep, "by reboot")
		e.rt = e.f.Reboot(e, e.rt)
		var err error
		m, err = e.rt.Adopt(e.ctx(), m.ID())
		e.must("Adopt after the reboot", err)
		e.start(m)
		e.kept(m, "by reboot", "dead→running (Start after a reboot)")
	}
	s := e.status(m)
	e.must("Destroy", m.Destroy(e.ctx()))
	m = e.create(s.Spec)
	e.start(m)
	e.hello(m)
	if got, ok := e.get(m, keep); ok {
		e.broken(6, "a new machine with the id of a destroyed one reads its file: %q", got)
	}
}

func testPauseFreezes(e *env) {
	m := e.ready()
	epoch := e.hello(m).BootEpoch
	c, err := m.Dial(e.ctx())
	e.must("Dial", err)
	defer c.Close()
	e.must("Pause", m.Pause(e.ctx()))
	heard := make(chan error, 1)
	go func() {
		if _, err := io.WriteString(c, "GET "+guestapi.PathProcesses+" HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n"); err != nil {
			heard <- err
			return
		}
		_, err := io.ReadFull(c, make([]byte, len("HTTP/1.1 200")))
		heard <- err
	}()
	select {
	case err := <-heard:
		// Cutting the stream is allowed; answering is not.
		if err == nil {
			e.edge("running→paused (Pause)", "the guest answered while paused")
		}
		heard = nil
	case <-time.After(300 * time.Millisecond):
	}
	e.must("Resume", m.Resume(e.ctx()))
	if now := e.hello(m).BootEpoch; now != epoch {
		e.edge("paused→running (Resume)", "boot epoch went from %q to %q: memory was lost", epoch, now)
	}
	if heard != nil {
		select {
		case <-heard: // answered, or cut: either ends the stream
		case <-time.After(10 * time.Second):
			e.edge("paused→running (Resume)", "a request that was sent while paused is neither answered nor cut")
		}
	}
}

func testStreams(e *env) {
	m := e.ready()
	// A stream that nobody reads stalls only itself.
	stalled, err := m.Dial(e.ctx())
	e.must("Dial", err)
	defer stalled.Close()
	for range 8 {
		e.hello(m)
	}
	for i, err := range together(8, func(int) error { _, err := e.helloOnce(e.ctx(), m); return err }) {
		if err != nil {
			e.broken(2, "stream %d of several at once: %v", i, err)
		}
	}
	cut := make(chan error, 1)
	go func() { _, err := stalled.Read(make([]byte, 1)); cut <- err }()
	e.must("Stop", m.Stop(e.ctx()))
	select {
	case err := <-cut:
		if err == nil {
			e.Error("a stream of a stopped machine gave a byte")
		}
	case <-time.After(e.f.EndWithin):
		e.Errorf("a stream is still open %v after its machine was stopped", e.f.EndWithin)
	}
}

func testPoweroff(e *env) {
	m := e.ready()
	e.put(m, keep, "by poweroff")
	w := e.waiting(m)
	// The answer may be lost with the machine.
	_, _, _ = request(e.ctx(), m, http.MethodPost, guestapi.PathShutdown, nil)
	asked := time.Now()
	select {
	case r := <-w:
		if r.err != nil || r.exit.Cause != runtime.CausePoweroff {
			e.broken(5, "Wait for a guest that powered off: %+v, %v", r.exit, r.err)
		}
	case <-time.After(30 * time.Second):
		e.broken(5, "Wait has not returned %v after the guest was asked to power off", time.Since(asked))
	}
	e.is(m, runtime.Dead, "running→dead (poweroff)")
	e.start(m)
	e.kept(m, "by poweroff", "dead→running (Start after poweroff)")
}

func testIsolation(e *env) {
	a, b := e.ready(), e.ready()
	e.put(a, keep, "secret of a")
	if got, ok := e.get(b, keep); ok {
		e.broken(6, "one machine reads the file of another: %q", got)
	}
	e.put(b, keep, "of b")
	if got, _ := e.get(a, keep); got != "secret of a" {
		e.broken(6, "one machine changed the file of another to %q", got)
	}
	// Nor does a machine change the template for those that come later.
	c := e.ready()
	if got, ok := e.get(c, keep); ok {
		e.broken(6, "a new machine has the file of an older one: %q", got)
	}
	if e.hello(a).BootEpoch == e.hello(b).BootEpoch {
		e.broken(6, "two machines have one boot epoch: Dial reaches the same guest")
	}
}

// filler reads as n bytes that are not holes.
func filler(n int64) io.Reader {
	return io.LimitReader(repeat("filler: not a hole\n"), n)
}

type repeat string

func (r repeat) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		n += copy(p[n:], r)
	}
	return n, nil
}

func testDiskLimit(e *env) {
	spec := e.spec()
	spec.Resources.DiskBytes = e.f.SmallDisk
	m := e.create(spec)
	e.start(m)
	e.hello(m)
	e.put(m, keep, "small")
	code, b, err := request(e.ctx(), m, http.MethodPut, fileTarget(keep+".big"), filler(spec.Resources.DiskBytes+spec.Resources.DiskBytes/4))
	var said guestapi.Error
	if err == nil {
		_ = json.Unmarshal(b, &said) // what is no JSON has no code
	}
	if err != nil || code != http.StatusInsufficientStorage || said.Code != guestapi.CodeNoSpace {
		e.Errorf("limit broken (disk): a file larger than the disk got %d %.200s, %v; want 507 %s", code, b, err, guestapi.CodeNoSpace)
	}
	e.is(m, runtime.Running, "a full disk")
	e.kept(m, "small", "a full disk")
	if s, err := m.Stats(e.ctx()); err != nil || s.DiskBytes > uint64(spec.Resources.DiskBytes+16<<20) {
		e.Errorf("limit broken (disk): stats %+v, %v; the limit is %d", s, err, spec.Resources.DiskBytes)
	}
	e.must("Stop", m.Stop(e.ctx()))
	e.start(m)
	e.kept(m, "small", "Stop and Start with a full disk")
}

func testMemoryLimit(e *env) {
	m := e.ready()
	other := e.ready()
	e.put(m, keep, "before the breach")
	id := string(sandbox.NewSessionID(m.ID()))
	w := e.waiting(m)
	e.launch(m, guestapi.Start{ID: id, Shell: `x=0123456789abcdef; while :; do x="$x$x"; done`, User: "root", Cwd: "/"})
	if e.caps.GuestOOM {
		_, exit, err := finish(e.ctx(), m, id)
		if err != nil || (exit.Cause == guestapi.ExitExited && exit.Code == 0) {
			e.Errorf("limit broken (memory): the process ended with %+v, %v; want a failure", exit, err)
		}
		e.is(m, runtime.Running, "a memory breach where the guest has its own killer")
		e.kept(m, "before the breach", "a memory breach")
	} else {
		select {
		case r := <-w:
			if r.err != nil || r.exit.Cause != runtime.CauseOutOfMemory {
				e.broken(5, "Wait after a memory breach: %+v, %v; want %s", r.exit, r.err, runtime.CauseOutOfMemory)
			}
		case <-time.After(callTimeout - soon):
			e.Fatalf("limit broken (memory): the machine lives on after its limit was passed")
		}
		if s := e.is(m, runtime.Dead, "running→dead (out of memory)"); s.Exit != nil && s.Exit.Cause != runtime.CauseOutOfMemory {
			e.broken(5, "status after a memory breach: %+v", s.Exit)
		}
		e.start(m)
		e.kept(m, "before the breach", "dead→running (Start after out of memory)")
	}
	e.is(other, runtime.Running, "a neighbour's memory breach")
	e.hello(other)
}

func testProcessLimit(e *env) {
	m := e.ready()
	const user = "user"
	if text, exit := e.exec(m, user, "echo before"); exit.Code != 0 || text != "before\n" {
		e.Fatalf("echo as %s: %q, %+v", user, text, exit)
	}
	id := string(sandbox.NewSessionID(m.ID()))
	// The shell counts what it could start; a shell that dies of the limit, or
	// tries for ever, is a fair answer too. What counts is that the rest lives.
	e.launch(m, guestapi.Start{
		ID: id, User: user, Cwd: "/", TimeLimit: 5 * time.Second, Grace: time.Second,
		Shell: fmt.Sprintf("i=0; while [ $i -lt %d ]; do sleep 60 & i=$((i+1)); done; echo all", 4*e.f.Resources.MaxProcesses),
	})
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	text, exit, err := finish(ctx, m, id)
	if err != nil {
		e.Errorf("limit broken (processes): the session of a fork loop did not end: %v", err)
	}
	if strings.Contains(text, "all\n") && exit != nil && exit.Cause == guestapi.ExitExited && exit.Code == 0 && !strings.Contains(text, "fork") {
		e.Errorf("limit broken (processes): %d processes could be started, the limit is %d", 4*e.f.Resources.MaxProcesses, e.f.Resources.MaxProcesses)
	}
	if err := e.within(2, 10*time.Second, "hello after a fork loop", func() error { _, err := e.helloOnce(e.ctx(), m); return err }); err != nil {
		e.Errorf("limit broken (processes): the daemon does not answer after a fork loop: %v", err)
	}
	e.is(m, runtime.Running, "a fork loop within the soft limit")
	// Root is above the user's limit, so that the machine can be put in order.
	if text, exit := e.exec(m, "root", "kill -9 $(ps -o pid,comm 2>/dev/null | awk '$2==\"sleep\"{print $1}') 2>/dev/null; echo after"); exit.Code != 0 || text != "after\n" {
		e.Errorf("limit broken (processes): root cannot start a process after a user's fork loop: %q, %+v", text, exit)
	}
}

// testProcessFlood passes the soft limit by many uids at once: the machine may
// bear it or end, but only by a limit, and alone.
func testProcessFlood(e *env) {
	m, other := e.ready(), e.ready()
	e.put(m, keep, "before the flood")
	w := e.waiting(m)
	in := guestapi.Start{
		Cwd: "/", TimeLimit: 10 * time.Second, Grace: time.Second,
		Shell: fmt.Sprintf("i=0; while [ $i -lt %d ]; do sleep 60 & i=$((i+1)); done", e.f.Resources.MaxProcesses),
	}
	for uid := 3000; uid < 3040; uid++ {
		in.ID, in.User = string(sandbox.NewSessionID(m.ID())), fmt.Sprint(uid)
		b, err := json.Marshal(in)
		e.must("marshal", err)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		code, said, err := request(ctx, m, http.MethodPost, guestapi.PathProcesses, bytes.NewReader(b))
		cancel()
		if uid == 3000 && (err != nil || code/100 != 2) {
			e.Fatalf("the first fork loop did not start: %d %.200s, %v", code, said, err)
		}
		if errors.Is(err, runtime.ErrNotRunning) {
			break
		}
	}
	select {
	case r := <-w:
		if r.err != nil || (r.exit.Cause != runtime.CauseProcesses && r.exit.Cause != runtime.CauseOutOfMemory) {
			e.broken(5, "Wait after a flood of processes: %+v, %v; want %s or %s", r.exit, r.err, runtime.CauseProcesses, runtime.CauseOutOfMemory)
		}
		e.is(m, runtime.Dead, "running→dead (process limit)")
	case <-time.After(15 * time.Second):
		e.is(m, runtime.Running, "a flood of processes that the machine bears")
		e.must("Stop after a flood of processes", m.Stop(e.ctx()))
	}
	e.start(m)
	e.kept(m, "before the flood", "→running (Start after a flood of processes)")
	e.is(other, runtime.Running, "a neighbour's flood of processes")
	e.hello(other)
}

func testNetworkClosed(e *env) {
	m := e.ready()
	text, exit := e.exec(m, "root", "cat /proc/net/dev")
	if exit.Code != 0 {
		e.Fatalf("cat /proc/net/dev: %q, %+v", text, exit)
	}
	for line := range strings.SplitSeq(text, "\n") {
		name, _, has := strings.Cut(line, ":")
		if has && strings.TrimSpace(name) != "lo" {
			e.edge("absent→created (Create)", "the machine has interface %q; it is born with loopback only", strings.TrimSpace(name))
		}
	}
}
