package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
)

const gvisorName = "gvisor"

// turns does f n times after a round that does not count.
func (b *bench) turns(ctx context.Context, f func(count bool) error) error {
	return turns(ctx, 1, b.n, f)
}

// turns does f n times after some rounds that do not count.
func turns(ctx context.Context, warm, n int, f func(count bool) error) error {
	for i := range warm + n {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := f(i >= warm); err != nil {
			return err
		}
	}
	return nil
}

// direct runs a command through the guest daemon: start, output to the exit.
// Window and acknowledgement are what sessions use.
func direct(ctx context.Context, g *guestclient.Client, args []string) (bytes int, err error) {
	const window, ackEvery = 1 << 20, 128 << 10
	id := sandbox.Random(20)
	if _, err := g.Start(ctx, guestapi.Start{ID: id, Args: args, Window: window}); err != nil {
		return 0, err
	}
	out, err := g.Output(ctx, id, 0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	acks := make(chan uint64, 1)
	acked := make(chan error, 1)
	go func() {
		var err error
		for n := range acks {
			err = errors.Join(err, g.Ack(ctx, id, n))
		}
		acked <- err
	}()
	defer func() { close(acks); err = errors.Join(err, <-acked) }()
	last := uint64(0)
	for {
		f, err := out.Next()
		if err != nil {
			return bytes, err
		}
		bytes += len(f.Payload)
		if f.Type == guestapi.FrameExit {
			if f.Exit.Code != 0 {
				return bytes, fmt.Errorf("%v: exit code %d", args, f.Exit.Code)
			}
			return bytes, nil
		}
		if f.End()-last >= ackEvery {
			select {
			case acks <- f.End():
				last = f.End()
			default: // one is on its way
			}
		}
	}
}

const directFloor = "guest daemon called directly over its channel: POST /v1/processes, GET /v1/processes/{id}/output to the exit frame"

// exec measures the round trip of a command that does nothing.
func (b *bench) exec(ctx context.Context) (err error) {
	_, g, err := b.world.machine(ctx)
	if err != nil {
		return err
	}
	defer g.Close()
	sb, err := b.server.newSandbox(ctx, b.template, spaceapi.Resources{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.server.remove(context.WithoutCancel(ctx), sb.ID)) }()
	fmt.Println("  floor:", directFloor)
	fmt.Println("  exec: POST /v1/sandboxes/{id}/exec")
	fmt.Println("  session: POST /v1/sandboxes/{id}/sessions, POST /d/sessions/{id}/attach to the exit event")
	var floor, exec, sess samples
	discard := samples{}
	err = turns(ctx, 5, 5*b.n, func(count bool) error {
		to := func(s *samples) *samples {
			if !count {
				return &discard
			}
			return s
		}
		return errors.Join(
			to(&floor).time(func() error { _, err := direct(ctx, g, []string{"true"}); return err }),
			to(&exec).time(func() error { return b.server.run(ctx, sb.ID, "true") }),
			to(&sess).time(func() error { return b.attached(ctx, sb.ID, "true") }),
		)
	})
	if err != nil {
		return err
	}
	b.add("exec round trip", gvisorName, "ms", exec, directFloor, floor, target{most: 1.5})
	b.add("session and attach", gvisorName, "ms", sess, directFloor, floor, target{})
	return nil
}

// attached runs a command as a session and follows it to its exit.
func (b *bench) attached(ctx context.Context, id string, args ...string) error {
	s, err := b.server.CreateSession(ctx, id, spaceapi.CreateSession{Command: spaceapi.Command{Args: args}})
	if err != nil {
		return err
	}
	st := b.server.Attach(s)
	defer st.Close()
	for {
		ev, err := st.Next(ctx)
		if err != nil {
			return err
		}
		if ev.Exit != nil {
			if ev.Exit.Code != 0 {
				return fmt.Errorf("%v: exit code %d", args, ev.Exit.Code)
			}
			return nil
		}
	}
}

const createFloor = "bare runtime by hand: mkfs, mounts, network namespace, runsc create, start, exec"

// create measures from the request to the first command's result.
func (b *bench) create(ctx context.Context) error {
	spec, g, err := b.world.machine(ctx)
	if err != nil {
		return err
	}
	defer g.Close()
	var ours, floor, one samples
	shown := false
	discard := samples{}
	err = b.turns(ctx, func(count bool) error {
		to := func(s *samples) *samples {
			if !count {
				return &discard
			}
			return s
		}
		for _, single := range []bool{false, true} {
			h, err := b.world.byHand(ctx, spec.ID)
			if err != nil {
				return err
			}
			script, into := h.make, &floor
			if single {
				script, into = h.oneCommand(), &one
			}
			if !shown {
				shown = true
				fmt.Println("  floor:\n    " + strings.ReplaceAll(script, "\n", "\n    "))
			}
			err = to(into).time(func() error { return h.try(ctx, script) })
			if err = errors.Join(err, shell(context.WithoutCancel(ctx), h.end)); err != nil {
				return err
			}
		}
		var sb spaceapi.Sandbox
		err := to(&ours).time(func() (err error) {
			if sb, err = b.server.newSandbox(ctx, b.template, spaceapi.Resources{}); err != nil {
				return err
			}
			return b.server.run(ctx, sb.ID, "true")
		})
		if sb.ID != "" {
			err = errors.Join(err, b.server.remove(context.WithoutCancel(ctx), sb.ID))
		}
		return err
	})
	if err != nil {
		return err
	}
	b.add("cold create to first exec", gvisorName, "ms", ours, createFloor, floor, target{most: 1.2})
	b.add("cold create to first exec", gvisorName, "ms", ours, "the same with runsc run in place of create and start", one, target{most: 1.2})
	return nil
}

const streamBytes = 64 << 20

const streamFloor = "64 MiB through the guest daemon's channel: GET /v1/processes/{id}/output with acknowledgements"

// stream measures bulk output.
func (b *bench) stream(ctx context.Context) (err error) {
	args := []string{"head", "-c", strconv.Itoa(streamBytes), "/dev/zero"}
	_, g, err := b.world.machine(ctx)
	if err != nil {
		return err
	}
	defer g.Close()
	sb, err := b.server.newSandbox(ctx, b.template, spaceapi.Resources{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.server.remove(context.WithoutCancel(ctx), sb.ID)) }()
	fmt.Println("  floor:", streamFloor+":", strings.Join(args, " "))
	fmt.Println("  frames: POST /d/sessions/{id}/attach, Accept:", session.FramesType)
	fmt.Println("  sse: POST /d/sessions/{id}/attach, Accept: text/event-stream (curl: the bytes of the events; client: decoded by the Go client)")
	whole := func(n int, err error) error {
		if err == nil && n != streamBytes {
			err = fmt.Errorf("%d bytes arrived instead of %d", n, streamBytes)
		}
		return err
	}
	var floor, frames, sse, decoded samples
	discard := samples{}
	err = b.turns(ctx, func(count bool) error {
		to := func(s *samples) *samples {
			if !count {
				return &discard
			}
			return s
		}
		err := to(&floor).rate(streamBytes, func() error { return whole(direct(ctx, g, args)) })
		for _, v := range []struct {
			into *samples
			read func(context.Context, spaceapi.SessionCreated) (int, error)
		}{{&frames, readFrames}, {&sse, readEvents}, {&decoded, b.decodeEvents}} {
			s, cerr := b.server.CreateSession(ctx, sb.ID, spaceapi.CreateSession{Command: spaceapi.Command{Args: args}})
			if cerr != nil {
				return cerr
			}
			err = errors.Join(err, to(v.into).rate(streamBytes, func() error { return whole(v.read(ctx, s)) }))
			_, kerr := b.server.KillSession(ctx, s.Session.ID) // ended: this only gives its journal's space back
			err = errors.Join(err, kerr)
		}
		return err
	})
	if err != nil {
		return err
	}
	b.add("stream, binary frames", gvisorName, "MB/s", frames, streamFloor, floor, target{least: .6})
	b.add("stream, SSE", gvisorName, "MB/s", sse, streamFloor, floor, target{least: .4})
	b.add("stream, SSE decoded by the Go client", gvisorName, "MB/s", decoded, streamFloor, floor, target{})
	return nil
}

func attachRaw(ctx context.Context, s spaceapi.SessionCreated, accept string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.Attach.URL+"/attach", nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+s.Attach.Token)
	req.Header.Set("Accept", accept)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, errors.Join(errors.New(resp.Status), resp.Body.Close())
	}
	return resp.Body, nil
}

func readFrames(ctx context.Context, s spaceapi.SessionCreated) (n int, err error) {
	body, err := attachRaw(ctx, s, session.FramesType)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, body.Close()) }()
	r := session.NewFrameReader(body)
	for {
		f, err := r.Next()
		switch {
		case errors.Is(err, io.EOF):
			return n, nil
		case err != nil:
			return n, err
		case f.Kind == 2:
			n += len(f.Payload)
		}
	}
}

// readEvents takes the events as curl does, undecoded: base64 makes the size known.
func readEvents(ctx context.Context, s spaceapi.SessionCreated) (n int, err error) {
	body, err := attachRaw(ctx, s, "text/event-stream")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, body.Close()) }()
	total, err := io.Copy(io.Discard, body)
	if err != nil {
		return 0, err
	}
	if total < streamBytes*4/3 {
		return int(total), nil // reported as too short
	}
	return streamBytes, nil
}

func (b *bench) decodeEvents(ctx context.Context, s spaceapi.SessionCreated) (n int, err error) {
	st := b.server.Attach(s)
	defer st.Close()
	for {
		ev, err := st.Next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return n, nil
		case err != nil:
			return n, err
		case ev.Type == spaceapi.EventStdout:
			n += len(ev.Data)
		}
	}
}

// pause measures both directions; there is no goal for them.
func (b *bench) pause(ctx context.Context) (err error) {
	sb, err := b.server.newSandbox(ctx, b.template, spaceapi.Resources{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.server.remove(context.WithoutCancel(ctx), sb.ID)) }()
	var pause, resume samples
	discard := samples{}
	err = b.turns(ctx, func(count bool) error {
		p, r := &pause, &resume
		if !count {
			p, r = &discard, &discard
		}
		verb := func(name string) func() error {
			return func() error {
				m, err := b.server.Lifecycle(ctx, sb.ID, name, client.Wait(wait))
				if err == nil && m.Operation.State != "succeeded" {
					err = fmt.Errorf("%s: the operation is %s", name, m.Operation.State)
				}
				return err
			}
		}
		if err := p.time(verb("pause")); err != nil {
			return err
		}
		return r.time(func() error {
			if err := verb("resume")(); err != nil {
				return err
			}
			return b.server.run(ctx, sb.ID, "true")
		})
	})
	if err != nil {
		return err
	}
	b.add("pause", gvisorName, "ms", pause, "", nil, target{})
	b.add("resume to first exec", gvisorName, "ms", resume, "", nil, target{})
	return nil
}

const manySandboxes = 50

// memory measures what a sandbox costs our own processes, and the host in all.
func (b *bench) memory(ctx context.Context) (err error) {
	s, err := b.serve(ctx, "mem", b.binary)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	small := spaceapi.Resources{CPUs: .1, MemoryMiB: 128, DiskMiB: 64}
	for range 5 { // code, caches and pools that every server has
		sb, err := s.newSandbox(ctx, b.template, small)
		if err != nil {
			return err
		}
		if err := errors.Join(s.run(ctx, sb.ID, "true"), s.remove(ctx, sb.ID)); err != nil {
			return err
		}
	}
	before, freeBefore, err := b.settled(ctx, s)
	if err != nil {
		return err
	}
	for range manySandboxes {
		sb, err := s.newSandbox(ctx, b.template, small)
		if err != nil {
			return err
		}
		if err := s.run(ctx, sb.ID, "true"); err != nil {
			return err
		}
	}
	after, freeAfter, err := b.settled(ctx, s)
	if err != nil {
		return err
	}
	each := func(a, b samples) samples {
		out := make(samples, len(a))
		for i := range a {
			out[i] = (a[i] - b.quantile(.5)) / manySandboxes
		}
		return out
	}
	fmt.Printf("  our processes: %.1f MiB with none, %.1f MiB with %d sandboxes\n", before.quantile(.5), after.quantile(.5), manySandboxes)
	b.add("memory of ours per sandbox", gvisorName, "MiB", each(after, before), fmt.Sprintf("RSS of host room and unprivileged side with 0 sandboxes against %d", manySandboxes), nil, target{most: 1, ofValue: true})
	for i := range freeAfter {
		freeAfter[i] = -freeAfter[i]
	}
	for i := range freeBefore {
		freeBefore[i] = -freeBefore[i]
	}
	b.add("memory of the host per sandbox", gvisorName, "MiB", each(freeAfter, freeBefore), "MemAvailable; the runtime's own processes are most of it", nil, target{})
	return nil
}

// settled samples our processes' RSS and the host's available memory, in MiB,
// over some seconds after a pause in which garbage is collected.
func (b *bench) settled(ctx context.Context, s *server) (rss, available samples, err error) {
	select {
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	case <-time.After(10 * time.Second):
	}
	for range b.n {
		total, err := rssOf(s.layout.Data, b.binary)
		if err != nil {
			return nil, nil, err
		}
		rss = append(rss, float64(total)/(1<<20))
		available = append(available, float64(meminfo("MemAvailable"))/(1<<20))
		time.Sleep(100 * time.Millisecond)
	}
	return rss, available, nil
}

// rssOf sums the resident memory of the processes that run our binary with this
// data directory.
func rssOf(data, binary string) (total int64, err error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return 0, err
	}
	found := 0
	for _, d := range dirs {
		exe, err := os.Readlink(d + "/exe")
		if err != nil || strings.TrimSuffix(exe, " (deleted)") != binary {
			continue
		}
		args, err := os.ReadFile(d + "/cmdline")
		if err != nil || !strings.Contains(string(args), data+"\x00") {
			continue
		}
		status, err := os.ReadFile(d + "/status")
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(status)) {
			if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				var kib int64
				if _, err := fmt.Sscan(rest, &kib); err != nil {
					return 0, err
				}
				total += kib << 10
				found++
			}
		}
	}
	if found != 2 {
		return 0, fmt.Errorf("%d processes of the server were found instead of two", found)
	}
	return total, nil
}
