package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/template"
	"github.com/space-platform/space/internal/tenant"
)

// fakeNode is a node.API that follows the contract and can be told to lose,
// delay, repeat and age what it says. It also watches control: what a node must
// never see is kept in violations.
type fakeNode struct {
	clock clock.Clock

	mu       sync.Mutex
	machines map[sandbox.ID]*machine
	outcomes []node.Outcome
	seq      uint64
	signal   chan struct{}
	changed  chan struct{} // closed and renewed at each change
	// delay > 0: an assignment converges by itself after it.
	delay time.Duration
	// script hooks, called with mu held; nil is none.
	onApply   func(node.Assignment) error          // an error is answered instead of applying
	loseReply func(node.Assignment) bool           // applied, but the answer is lost
	fail      func(node.Assignment) (string, bool) // the assignment ends as failed with this code
	stale     func(o node.Observation) (back int)  // answer the observation of `back` changes ago
	down      bool
	onAdmit   func() // called without mu
	capacity  error  // answered by Admit
	sessions  *fakeSessions
	auditLen  uint64

	violations []string
}

type machine struct {
	a         node.Assignment
	state     sandbox.State
	converged bool
	problem   *operation.Problem
	class     sandbox.Class
	pending   *node.Outcome
	boots     int
	history   []node.Observation
}

var errNodeDown = errors.New("fake: the node is down")

func newFakeNode(c clock.Clock) *fakeNode {
	n := &fakeNode{clock: c, machines: map[sandbox.ID]*machine{}, signal: make(chan struct{}, 1), changed: make(chan struct{})}
	n.sessions = &fakeSessions{n: n}
	return n
}

func (n *fakeNode) violate(format string, args ...any) {
	n.violations = append(n.violations, fmt.Sprintf(format, args...))
}

func (n *fakeNode) note(id sandbox.ID) {
	if m := n.machines[id]; m != nil {
		m.history = append(m.history, n.observation(id, m))
	}
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *fakeNode) observation(id sandbox.ID, m *machine) node.Observation {
	o := node.Observation{
		ID: id, Generation: m.a.Generation, State: m.state, Converged: m.converged, Problem: m.problem,
		Class: m.class, Since: n.clock.Now(),
		Steps: []operation.Step{{Name: "fake", StartedAt: n.clock.Now()}},
	}
	if m.class != "" {
		o.Runtime = "fake"
	}
	if m.pending != nil {
		p := *m.pending
		o.Pending = &p
	}
	return o
}

// answer gives the observation, aged as the script says.
func (n *fakeNode) answer(id sandbox.ID, m *machine) node.Observation {
	o := n.observation(id, m)
	if n.stale != nil {
		if back := n.stale(o); back > 0 && len(m.history) > back {
			return m.history[len(m.history)-1-back]
		}
	}
	return o
}

var transitional = map[sandbox.State]sandbox.State{
	sandbox.Running: sandbox.Starting, sandbox.Paused: sandbox.Pausing, sandbox.Stopped: sandbox.Stopping, sandbox.Deleted: sandbox.Deleting,
}

func (n *fakeNode) Apply(_ context.Context, a node.Assignment) (node.Observation, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return node.Observation{}, errNodeDown
	}
	if n.onApply != nil {
		if err := n.onApply(a); err != nil {
			return node.Observation{}, err
		}
	}
	m := n.machines[a.ID]
	switch {
	case m == nil:
		m = &machine{state: sandbox.Creating, class: sandbox.ClassUserKernel} // a node tells its class from the beginning
		n.machines[a.ID] = m
		if a.Desired == sandbox.Deleted {
			m.a, m.state, m.converged = a, sandbox.Deleted, true
			n.note(a.ID)
			return n.answer(a.ID, m), nil
		}
	case a.Generation < m.a.Generation:
		return node.Observation{}, node.ErrStale
	case m.pending != nil && a.Desired != sandbox.Deleted:
		return node.Observation{}, node.ErrOutcomePending
	case a.Generation == m.a.Generation:
		return n.answer(a.ID, m), nil
	case m.a.Desired == sandbox.Deleted && a.Desired != sandbox.Deleted:
		n.violate("%s: %s at generation %d after it was deleted at %d", a.ID, a.Desired, a.Generation, m.a.Generation)
	}
	was := m.state
	m.a, m.converged, m.problem = a, false, nil
	if a.Desired == sandbox.Deleted {
		m.pending = nil
		n.outcomes = slices.DeleteFunc(n.outcomes, func(o node.Outcome) bool { return o.ID == a.ID })
	}
	switch {
	case was == sandbox.Failed && (a.Desired == sandbox.Running && !a.Restart || a.Desired == sandbox.Paused):
		m.state, m.converged = sandbox.Failed, true
		m.problem = &operation.Problem{Code: "machine_died", What: "dead"}
	case was == a.Desired:
		m.converged = true
	case was != sandbox.Creating:
		m.state = transitional[a.Desired]
	}
	n.note(a.ID)
	if n.delay > 0 && !m.converged {
		n.later(a)
	}
	if n.loseReply != nil && n.loseReply(a) {
		return node.Observation{}, errNodeDown
	}
	return n.answer(a.ID, m), nil
}

func (n *fakeNode) later(a node.Assignment) {
	go func() {
		<-n.clock.After(n.delay)
		n.mu.Lock()
		defer n.mu.Unlock()
		if m := n.machines[a.ID]; m != nil && m.a.Generation == a.Generation && m.pending == nil {
			n.converge(a.ID)
		}
	}()
}

// converge ends the assignment in force; mu is held.
func (n *fakeNode) converge(id sandbox.ID) {
	m := n.machines[id]
	if m == nil || m.converged || m.pending != nil {
		return
	}
	if n.fail != nil {
		if code, yes := n.fail(m.a); yes {
			m.state, m.converged, m.problem = sandbox.Failed, true, &operation.Problem{Code: code, What: "told to fail"}
			n.note(id)
			return
		}
	}
	if m.a.Desired == sandbox.Running {
		if m.state != sandbox.Resuming {
			m.boots++
		}
	}
	m.state, m.converged = m.a.Desired, true
	n.note(id)
}

// step converges one machine by hand.
func (n *fakeNode) step(id sandbox.ID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.converge(id)
}

// move makes an outcome: the node moves the machine downwards by itself.
func (n *fakeNode) move(id sandbox.ID, to sandbox.State, trigger string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := n.machines[id]
	if m == nil || m.pending != nil || m.a.Desired == sandbox.Deleted || m.state == sandbox.Failed || m.state == to {
		return false
	}
	n.seq++
	o := node.Outcome{Seq: n.seq, ID: id, Tenant: m.a.Tenant.String(), Generation: m.a.Generation, State: to, Trigger: trigger, At: n.clock.Now()}
	m.pending, m.state, m.converged = &o, to, true
	n.outcomes = append(n.outcomes, o)
	n.note(id)
	select {
	case n.signal <- struct{}{}:
	default:
	}
	return true
}

// expire makes the outcome of every policy that has run out.
func (n *fakeNode) expire() {
	n.mu.Lock()
	due := map[sandbox.ID]node.Assignment{}
	now := n.clock.Now()
	for id, m := range n.machines {
		if m.state == sandbox.Running && m.converged && !m.a.Policy.ExpiresAt.After(now) {
			due[id] = m.a
		}
	}
	n.mu.Unlock()
	for id, a := range due {
		to := map[sandbox.Action]sandbox.State{
			sandbox.ActionPause: sandbox.Paused, sandbox.ActionStop: sandbox.Stopped, sandbox.ActionDelete: sandbox.Deleted,
		}[a.Policy.OnExpire]
		n.move(id, to, "expired")
	}
}

func (n *fakeNode) Observe(_ context.Context, _ tenant.ID, id sandbox.ID) (node.Observation, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return node.Observation{}, errNodeDown
	}
	m := n.machines[id]
	if m == nil {
		return node.Observation{}, node.ErrUnknown
	}
	return n.answer(id, m), nil
}

func (n *fakeNode) Await(ctx context.Context, t tenant.ID, id sandbox.ID, generation uint64) (node.Observation, error) {
	for {
		n.mu.Lock()
		if n.down {
			n.mu.Unlock()
			return node.Observation{}, errNodeDown
		}
		m := n.machines[id]
		if m == nil {
			n.mu.Unlock()
			return node.Observation{}, node.ErrUnknown
		}
		o, changed := n.answer(id, m), n.changed
		n.mu.Unlock()
		if o.Pending != nil || o.Generation >= generation && o.Converged {
			return o, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return o, ctx.Err()
		}
	}
}

func (n *fakeNode) Outcomes(_ context.Context, limit int) ([]node.Outcome, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return nil, errNodeDown
	}
	return slices.Clone(n.outcomes[:min(limit, len(n.outcomes))]), nil
}

func (n *fakeNode) Absorb(_ context.Context, id sandbox.ID, seq uint64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return errNodeDown
	}
	n.outcomes = slices.DeleteFunc(n.outcomes, func(o node.Outcome) bool { return o.ID == id && o.Seq == seq })
	if m := n.machines[id]; m != nil && m.pending != nil && m.pending.Seq == seq {
		m.pending = nil
		n.note(id)
	}
	return nil
}

func (n *fakeNode) OutcomeSignal() <-chan struct{} { return n.signal }

func (n *fakeNode) Known(context.Context) ([]sandbox.ID, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return nil, errNodeDown
	}
	var ids []sandbox.ID
	for id := range n.machines {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids, nil
}

func (n *fakeNode) Admit(context.Context, sandbox.Resources) error {
	if n.onAdmit != nil {
		n.onAdmit()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.capacity
}

func (n *fakeNode) Capacity(context.Context) (node.Capacity, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.down {
		return node.Capacity{}, errNodeDown
	}
	return node.Capacity{Sandboxes: n.living(), MaxSandboxes: 1000}, nil
}

func (n *fakeNode) living() (k int) {
	for _, m := range n.machines {
		if m.state != sandbox.Deleted {
			k++
		}
	}
	return k
}

func (n *fakeNode) Stats(_ context.Context, _ tenant.ID, id sandbox.ID) (node.Stats, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.machines[id] == nil {
		return node.Stats{}, node.ErrUnknown
	}
	return node.Stats{MemoryBytes: 1}, nil
}

func (n *fakeNode) Templates(context.Context) ([]template.Info, error) {
	return []template.Info{{Reference: "base:latest", Digest: "sha256:base"}}, nil
}

func (n *fakeNode) Resolve(_ context.Context, ref string) (template.Info, error) {
	if ref != "base:latest" && ref != "sha256:base" {
		return template.Info{}, fault.New(fault.NotFound, "template_not_found", "there is no template %q", ref)
	}
	return template.Info{Reference: "base:latest", Digest: "sha256:base"}, nil
}

// Audit answers a chain of auditLen records of every tenant.
func (n *fakeNode) Audit(_ context.Context, t tenant.ID, before uint64, limit int) (out []audit.Record, err error) {
	if before == 0 || before > n.auditLen {
		before = n.auditLen + 1
	}
	for seq := before - 1; seq > 0 && len(out) < limit; seq-- {
		out = append(out, audit.Record{Chain: "node:test", Seq: seq, Entry: audit.Entry{Tenant: t.String()}})
	}
	return out, nil
}

func (n *fakeNode) Sessions() session.Service { return n.sessions }

// state gives what the machine truly is.
func (n *fakeNode) state(id sandbox.ID) sandbox.State {
	n.mu.Lock()
	defer n.mu.Unlock()
	if m := n.machines[id]; m != nil {
		return m.state
	}
	return ""
}

// fakeSessions serves sessions of machines that run.
type fakeSessions struct {
	session.Service // nil: what is not written below must not be called
	n               *fakeNode
	revoked         []string // guarded by n.mu
	madeBy          string   // who made every session that Get answers
}

func (f *fakeSessions) Create(_ context.Context, t tenant.ID, r session.CreateRequest) (session.Session, session.Token, error) {
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	m := f.n.machines[r.Sandbox]
	if m == nil || m.a.Tenant != t {
		return session.Session{}, session.Token{}, node.ErrUnknown
	}
	if m.state != sandbox.Running {
		return session.Session{}, session.Token{}, fault.New(fault.Unavailable, "sandbox_in_transition", "the machine is %s", m.state)
	}
	return session.Session{ID: sandbox.NewSessionID(r.Sandbox), Sandbox: r.Sandbox}, session.Token{ID: "t", Token: "secret"}, nil
}

func (f *fakeSessions) Exec(ctx context.Context, t tenant.ID, r session.ExecRequest) (session.ExecResult, error) {
	s, _, err := f.Create(ctx, t, r.CreateRequest)
	return session.ExecResult{Session: s.ID, Stdout: []byte("42\n")}, err
}

func (f *fakeSessions) foreign(t tenant.ID, id sandbox.SessionID) error {
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	if m := f.n.machines[id.Sandbox()]; m == nil || m.a.Tenant != t {
		return fault.New(fault.NotFound, "session_not_found", "there is no session %q", string(id))
	}
	return nil
}

func (f *fakeSessions) Get(_ context.Context, t tenant.ID, id sandbox.SessionID) (session.Session, error) {
	return session.Session{ID: id, Principal: f.madeBy}, f.foreign(t, id)
}

func (f *fakeSessions) Kill(_ context.Context, t tenant.ID, id sandbox.SessionID) (session.Session, error) {
	return session.Session{ID: id}, f.foreign(t, id)
}

func (f *fakeSessions) List(context.Context, tenant.ID, sandbox.ID, string, int) ([]session.Session, string, error) {
	return nil, "", nil
}

func (f *fakeSessions) MintAttachToken(_ context.Context, t tenant.ID, id sandbox.SessionID, _ string, _ time.Duration) (session.Token, error) {
	return session.Token{ID: "t"}, f.foreign(t, id)
}

func (f *fakeSessions) RevokeAttachTokens(_ context.Context, t tenant.ID, id sandbox.SessionID) error {
	return f.foreign(t, id)
}

func (f *fakeSessions) MintDataToken(context.Context, tenant.ID, sandbox.ID, string, []string, time.Duration) (session.Token, error) {
	return session.Token{ID: "d"}, nil
}

func (f *fakeSessions) RevokeDataTokens(context.Context, tenant.ID, sandbox.ID) error { return nil }

func (f *fakeSessions) RevokePrincipal(_ context.Context, principal string) error {
	f.n.mu.Lock()
	defer f.n.mu.Unlock()
	f.revoked = append(f.revoked, principal)
	return nil
}
