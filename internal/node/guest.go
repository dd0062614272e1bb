package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
)

// ReadyWait is how long Guest waits for a sandbox that is on its way up.
const ReadyWait = 10 * time.Second

// Guest gives the guest daemon of a sandbox that runs and is ready, and counts
// as activity. It waits for one that is starting or resuming, at most ReadyWait.
// Faults: sandbox_not_found, sandbox_paused, sandbox_starting and node_starting
// (retryable), sandbox_not_running, sandbox_quarantined. The client stays valid until the machine ends, also over
// a pause.
func (n *Node) Guest(ctx context.Context, t tenant.ID, id sandbox.ID) (guestclient.Guest, error) {
	if !n.ready() {
		return nil, errNotServing() // sessions wait: the sandbox may well be there
	}
	limit := n.clock.After(ReadyWait)
	for {
		b := n.box(id)
		if b == nil {
			return nil, notFound()
		}
		b.mu.Lock()
		g, err := b.admit(t)
		changed := b.changed
		b.mu.Unlock()
		if g != nil || !fault.IsCode(err, "sandbox_starting") {
			return g, err
		}
		select {
		case <-changed:
		case <-limit:
			return nil, err
		case <-ctx.Done():
			return nil, err
		}
	}
}

// admit decides in the sandbox's turn whether a call may go to the guest. b.mu is held.
func (b *box) admit(t tenant.ID) (guestclient.Guest, error) {
	r := &b.row
	if b.gone || r.ID == "" || r.Tenant != t.String() {
		return nil, notFound()
	}
	switch {
	case r.Target == sandbox.Quarantined:
		return nil, fault.New(fault.Conflict, "sandbox_quarantined", "the sandbox is quarantined").
			Do("ask an operator to release or delete it")
	case r.Target == sandbox.Paused:
		return nil, fault.New(fault.Conflict, "sandbox_paused", "the sandbox is paused").
			Do("wake it, then retry").Retry(true)
	case r.Target != sandbox.Running:
		f := fault.New(fault.Conflict, "sandbox_not_running", "the sandbox is %s", r.observed()).Do("wake it, then retry")
		if r.Problem != nil {
			f = f.Because("%s", r.Problem.What)
		}
		return nil, f
	case r.State != sandbox.Running || r.Down || b.guest == nil:
		return nil, fault.New(fault.Unavailable, "sandbox_starting", "the sandbox is not ready yet").Do("retry in a moment")
	}
	b.activity = b.n.clock.Now().UTC()
	return b.guest, nil
}

func errNotServing() error {
	return fault.New(fault.Unavailable, "node_starting", "the node is starting or stopping").Do("retry in a moment")
}

func notFound() error {
	return fault.New(fault.NotFound, "sandbox_not_found", "there is no such sandbox").Do("list your sandboxes")
}

// Activity counts as use of the sandbox: any data-plane call, a reader that
// comes or goes, the end of a command. Unknown ids are ignored.
func (n *Node) Activity(id sandbox.ID) {
	if b := n.box(id); b != nil {
		b.mu.Lock()
		b.activity = n.clock.Now().UTC()
		b.mu.Unlock()
	}
}

// ReportProtocolError quarantines a sandbox whose guest broke the protocol:
// the session manager saw it lie.
func (n *Node) ReportProtocolError(ctx context.Context, id sandbox.ID) error {
	b := n.box(id)
	if b == nil {
		return ErrUnknown
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone || depth(b.row.Target) > 0 && b.row.Target != sandbox.Paused {
		return nil // it is going down, or cut off, anyway
	}
	return b.move(ctx, sandbox.Quarantined, triggerProtocol, protocolProblem())
}

func (b *box) newGuest(m runtime.Machine) guestclient.Guest {
	return &watched{Guest: b.n.cfg.NewGuest(m), b: b}
}

// errNoStatus: the guest answered and the host did not tell of its machine.
var errNoStatus = errors.New("node: the host does not tell of the machine")

// configure makes the guest of a booted or woken machine usable. Only after it
// the sandbox counts as running: a daemon of a version we speak has answered
// and has taken identity, clock, entropy and environment.
func (b *box) configure(ctx context.Context, r *row, m runtime.Machine) error {
	info, err := b.n.template(ctx, r.Template)
	if err != nil {
		return err
	}
	env, err := b.n.openEnv(r)
	if err != nil {
		return err
	}
	merged := make(map[string]string, len(info.Config.Env)+len(env))
	for k, v := range info.Config.Env {
		merged[k] = v
	}
	for k, v := range env {
		merged[k] = v
	}
	b.mu.Lock()
	g, boot := b.guest, b.bootID
	b.mu.Unlock()
	if g == nil {
		g = b.newGuest(m)
	}
	type answer struct {
		runtime.Status
		error
	}
	status := make(chan answer, 1)
	if boot == "" { // just started; asking costs as much as the guest's answer
		go func() {
			st, err := m.Status(ctx)
			status <- answer{st, err}
		}()
	}
	entropy := make([]byte, 64)
	_, _ = rand.Read(entropy) // never fails (crypto/rand)
	if _, err = g.Hello(ctx); err == nil {
		err = g.Configure(ctx, guestapi.Configure{
			SandboxID: string(b.id), Hostname: string(b.id), Now: b.n.clock.Now().UTC(), Entropy: entropy,
			Env: merged, User: info.Config.User, WorkDir: info.Config.WorkDir,
		})
	}
	if err == nil && boot == "" {
		select {
		case st := <-status:
			boot = st.BootID
			switch {
			case st.error != nil:
				err = fmt.Errorf("%w: %w", errNoStatus, st.error)
			case st.Condition != runtime.Running || boot == "":
				err = runtime.ErrNotRunning
			}
		case <-ctx.Done():
			err = errNoStatus
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil && b.gone {
		err = errOvertaken
	}
	if err != nil {
		if b.guest != g {
			go g.Close()
		}
		return err
	}
	b.guest, b.bootID = g, boot
	return nil
}

// keep watches the machine of a settled sandbox until it ends. b.mu is held.
func (b *box) keep() {
	if b.keeping != nil {
		return
	}
	ctx, cancel := context.WithCancel(b.n.ctx)
	m, boot := b.machine, b.bootID
	ended := make(chan runtime.Exit, 1)
	if b.n.spawn(func() { b.await(ctx, m, ended) }) && b.n.spawn(func() { b.guard(ctx, boot, ended) }) {
		b.keeping = cancel
		return
	}
	cancel()
}

// await tells when the machine has ended.
func (b *box) await(ctx context.Context, m runtime.Machine, ended chan<- runtime.Exit) {
	for {
		exit, err := m.Wait(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			ended <- exit
			return
		case errors.Is(err, runtime.ErrNotFound):
			b.mu.Lock()
			b.known = false
			b.poke()
			b.mu.Unlock()
			return
		}
		b.n.log.Warn("cannot watch a machine; will retry", slog.String("sandbox", string(b.id)), slog.Any("error", err))
		select {
		case <-b.n.clock.After(time.Second):
		case <-ctx.Done():
			return
		}
	}
}

// guard acts when the machine ends, and asks its guest now and then.
func (b *box) guard(ctx context.Context, boot string, ended <-chan runtime.Exit) {
	misses := 0
	every := b.n.cfg.PingEvery
	wait := every/2 + mathrand.N(every/2+1) // not all at once after a restart
	for {
		select {
		case exit := <-ended:
			b.died(ctx, boot, exit)
			return
		case <-ctx.Done():
			return
		case <-b.n.clock.After(wait):
		}
		wait = every
		b.mu.Lock()
		g := b.guest
		idle := !b.ready || b.row.Target != sandbox.Running || b.row.State != sandbox.Running || g == nil
		b.mu.Unlock()
		if idle {
			misses = 0
			continue
		}
		pctx, cancel := b.n.bounded(ctx, b.n.cfg.PingTimeout, errStepTimeout)
		_, err := g.Hello(pctx)
		cancel(nil)
		switch {
		case err == nil || ctx.Err() != nil:
			misses = 0
			continue
		case fault.IsCode(err, "guest_protocol_error"):
			misses = 0
			b.unwell(ctx, sandbox.Quarantined, triggerProtocol, protocolProblem())
			continue
		}
		if misses++; misses >= b.n.cfg.PingMisses {
			misses = 0
			b.unwell(ctx, b.n.cfg.OnUnresponsive, triggerUnresponsive, unresponsiveProblem())
		}
	}
}

// unwell moves a sandbox whose guest does not do what it must, if it is still
// meant to run.
func (b *box) unwell(ctx context.Context, to sandbox.State, trigger string, p *operation.Problem) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gone || !b.ready || b.row.Target != sandbox.Running || b.row.State != sandbox.Running {
		return
	}
	if err := b.move(ctx, to, trigger, p); err != nil {
		b.log().Error("cannot record an unwell guest; will retry", slog.Any("error", err))
	}
}

// died acts on the end of the machine that booted as boot.
func (b *box) died(ctx context.Context, boot string, exit runtime.Exit) {
	for {
		b.mu.Lock()
		if b.gone || b.bootID != boot || b.row.Down || b.row.Target == sandbox.Deleted {
			b.mu.Unlock()
			return // it was ended on purpose
		}
		b.cond, b.exit, b.known, b.ready = runtime.Dead, &exit, true, false
		if b.row.Target == sandbox.Quarantined {
			b.poke()
			b.mu.Unlock()
			return
		}
		err := b.fail(b.n.ctx, sandbox.Failed, triggerDied, diedProblem(&exit))
		if err == nil {
			b.n.metrics.died(string(exit.Cause))
		}
		b.mu.Unlock()
		if err == nil || ctx.Err() != nil {
			return
		}
		b.n.log.Error("cannot record the end of a machine; will retry", slog.String("sandbox", string(b.id)), slog.Any("error", err))
		select {
		case <-b.n.clock.After(time.Second):
		case <-ctx.Done():
			return
		}
	}
}
