package node

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/template"
	"github.com/space-platform/space/internal/tenant"
)

// digest is the one template of the tests' host.
const digest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

type templates struct{}

func (templates) List(context.Context) ([]template.Info, error) {
	i, err := templates{}.Resolve(context.Background(), digest)
	return []template.Info{i}, err
}

func (templates) Resolve(_ context.Context, ref string) (template.Info, error) {
	if ref != digest && ref != "base:latest" {
		return template.Info{}, fmt.Errorf("%w: %s", template.ErrNotFound, ref)
	}
	return template.Info{Reference: "base:latest", Digest: digest, Config: template.Config{
		Env: map[string]string{"PATH": "/bin", "LANG": "C"}, User: "user", WorkDir: "/home/user"}}, nil
}

// rot13 is no cipher; it only shows what was sealed and for whom.
type rot13 struct{}

func (rot13) Seal(plain, label []byte) ([]byte, error) {
	out := slices.Clone(plain)
	for i := range out {
		out[i] ^= 0x5a
	}
	return append(append([]byte{byte(len(label))}, label...), out...), nil
}

func (rot13) Open(sealed, label []byte) ([]byte, error) {
	n := int(sealed[0])
	if string(sealed[1:1+n]) != string(label) {
		return nil, fmt.Errorf("sealed for %q, not %q", sealed[1:1+n], label)
	}
	out := slices.Clone(sealed[1+n:])
	for i := range out {
		out[i] ^= 0x5a
	}
	return out, nil
}

// sessions notes what the node says.
type sessions struct {
	session.Service
	mu      sync.Mutex
	said    map[sandbox.ID][]string
	running map[sandbox.ID]int
	erase   error
}

func (s *sessions) say(id sandbox.ID, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.said[id]); n > 0 && s.said[id][n-1] == what {
		return // hooks may come twice
	}
	s.said[id] = append(s.said[id], what)
}
func (s *sessions) SandboxEnded(id sandbox.ID, cause, _ string) { s.say(id, "ended "+cause) }
func (s *sessions) SandboxPaused(id sandbox.ID)                 { s.say(id, "paused") }
func (s *sessions) SandboxResumed(id sandbox.ID)                { s.say(id, "resumed") }
func (s *sessions) Erase(_ context.Context, id sandbox.ID) error {
	s.say(id, "erased")
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.erase
}
func (s *sessions) RunningSessions(id sandbox.ID) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running[id]
}
func (s *sessions) run(id sandbox.ID, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[id] = n
}
func (s *sessions) heard(id sandbox.ID) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.said[id])
}

// fataler is *testing.T or *rapid.T.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
}

// host is a machine with its world, its database file and a node that can be
// killed and started again.
type host struct {
	t        fataler
	world    *fake.World
	path     string
	drv      *fake.Driver
	db       *sqlitedb.DB
	n        *Node
	sessions *sessions
	reg      *prometheus.Registry
	report   AdoptionReport
	change   func(*Config)
	who      tenant.ID
	dir      string
	real     bool // with a real session manager
	manager  *session.Manager
}

// memory is a directory whose fsync costs nothing: these tests kill processes,
// not power.
func memory() string {
	if st, err := os.Stat("/dev/shm"); err == nil && st.IsDir() {
		return "/dev/shm"
	}
	return ""
}

// newHost must be called inside a synctest bubble.
func newHost(t fataler, change func(*Config), options []fake.Option, prepare ...func(*host)) *host {
	t.Helper()
	dir, err := os.MkdirTemp(memory(), "node-test-")
	if err != nil {
		t.Fatalf("%v", err)
	}
	who, err := tenant.Mint("acme")
	if err != nil {
		t.Fatalf("%v", err)
	}
	h := &host{t: t, world: fake.NewWorld(append([]fake.Option{fake.WithTemplates(digest)}, options...)...), dir: dir,
		path: filepath.Join(dir, "node.db"), change: change, who: who,
		sessions: &sessions{said: map[sandbox.ID][]string{}, running: map[sandbox.ID]int{}}}
	for _, p := range prepare {
		p(h)
	}
	h.boot()
	return h
}

func (h *host) boot() {
	h.t.Helper()
	db, err := sqlitedb.Open(h.path)
	if err != nil {
		h.t.Fatalf("open: %v", err)
	}
	h.db, h.drv, h.reg = db, fake.New(h.world), prometheus.NewRegistry()
	cfg := Config{Name: "n1", DB: db, Runtime: h.drv, Templates: templates{}, Sealer: rot13{}, Metrics: h.reg,
		NewGuest: func(m runtime.Machine) guestclient.Guest { return guestclient.New(m.Dial, guestclient.Options{}) }}
	if h.change != nil {
		h.change(&cfg)
	}
	n, err := New(context.Background(), cfg)
	if err != nil {
		h.t.Fatalf("new: %v", err)
	}
	h.n = n
	n.Bind(h.sessions)
	if h.real {
		h.manager, err = session.New(context.Background(), session.Config{DB: db, Dir: filepath.Join(h.dir, "sessions"), Guests: n,
			Sealer: rot13{}, Auditor: n.Auditor(), Activity: n.Activity})
		if err != nil {
			h.t.Fatalf("sessions: %v", err)
		}
		n.Bind(h.manager)
		if err := h.manager.Recover(context.Background()); err != nil {
			h.t.Fatalf("recover: %v", err)
		}
	}
	if h.report, err = n.Start(context.Background()); err != nil {
		h.t.Fatalf("start: %v", err)
	}
}

// crash is kill -9 of the node: nothing is written from here on, calls end
// where they are.
func (h *host) crash() {
	h.t.Helper()
	_ = h.db.Write.Close() // whatever is in progress is lost
	h.drv.Kill()
	if h.real {
		h.manager.Close()
	}
	h.n.Close()
	_ = h.db.Read.Close()
}

func (h *host) reboot() {
	_ = h.db.Write.Close()
	h.world.Reboot()
	h.n.Close()
	_ = h.db.Read.Close()
}

func (h *host) end() {
	if h.real {
		h.manager.Close()
	}
	h.n.Close()
	if err := h.db.Close(); err != nil {
		h.t.Fatalf("close: %v", err)
	}
	h.world.Close()
	_ = os.RemoveAll(h.dir)
}

func (h *host) assignment(id sandbox.ID, generation uint64, desired sandbox.State) Assignment {
	return Assignment{Tenant: h.who, ID: id, Generation: generation, Desired: desired, TemplateDigest: digest,
		Resources: sandbox.Resources{MilliCPU: 500, MemoryBytes: 64 << 20, DiskBytes: 128 << 20, MaxProcesses: 64},
		Policy: sandbox.Policy{ExpiresAt: time.Now().Add(24 * time.Hour), OnExpire: sandbox.ActionStop,
			DeadlineAt: time.Now().Add(48 * time.Hour)},
		Env: map[string]string{"TOKEN": "s3cret", "LANG": "fr"}, Deadline: time.Now().Add(2 * time.Minute)}
}

// try applies and gives the error.
func (h *host) try(id sandbox.ID, generation uint64, desired sandbox.State, change ...func(*Assignment)) error {
	a := h.assignment(id, generation, desired)
	for _, c := range change {
		c(&a)
	}
	_, err := h.n.Apply(context.Background(), a)
	return err
}

func (h *host) apply(id sandbox.ID, generation uint64, desired sandbox.State, change ...func(*Assignment)) {
	h.t.Helper()
	if err := h.try(id, generation, desired, change...); err != nil {
		h.t.Fatalf("apply %s %s %d: %v", id, desired, generation, err)
	}
}

// reach applies and waits until everything rests.
func (h *host) reach(id sandbox.ID, generation uint64, desired sandbox.State, change ...func(*Assignment)) Observation {
	h.t.Helper()
	h.apply(id, generation, desired, change...)
	return h.settled(id, generation, desired)
}

func (h *host) observe(id sandbox.ID) Observation {
	h.t.Helper()
	o, err := h.n.Observe(context.Background(), h.who, id)
	if err != nil {
		h.t.Fatalf("observe %s: %v", id, err)
	}
	return o
}

// settled waits for the end of an assignment.
func (h *host) settled(id sandbox.ID, generation uint64, want sandbox.State) Observation {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	for {
		o, err := h.n.Await(ctx, h.who, id, generation)
		if err != nil {
			h.t.Fatalf("await %s: %v, last %+v", id, err, o)
		}
		if o.Converged && o.Generation >= generation {
			if o.State != want {
				h.t.Fatalf("%s is %s, want %s: %+v problem %+v", id, o.State, want, o, o.Problem)
			}
			return o
		}
	}
}

// becomes waits for a state, whoever leads there.
func (h *host) becomes(id sandbox.ID, want sandbox.State, within time.Duration) Observation {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	for {
		o, changed, err := h.n.observation(ctx, h.who, id)
		if err != nil {
			h.t.Fatalf("observe %s: %v", id, err)
		}
		if o.State == want {
			return o
		}
		select {
		case <-changed:
		case <-ctx.Done():
			h.t.Fatalf("%s is %s after %v, want %s: %+v", id, o.State, within, want, o)
		}
	}
}

func (h *host) condition(id sandbox.ID) runtime.Condition {
	st, ok := h.world.Status(id)
	if !ok {
		return absent
	}
	return st.Condition
}

// absorb takes every outcome, as the control plane does.
func (h *host) absorb() []Outcome {
	h.t.Helper()
	out, err := h.n.Outcomes(context.Background(), 1000)
	if err != nil {
		h.t.Fatalf("outcomes: %v", err)
	}
	for _, o := range out {
		if err := h.n.Absorb(context.Background(), o.ID, o.Seq); err != nil {
			h.t.Fatalf("absorb: %v", err)
		}
	}
	return out
}

// balance checks that nothing is left of anybody and nothing is booked.
func (h *host) balance(keep ...sandbox.ID) {
	h.t.Helper()
	synctest.Wait()
	if leaks := h.world.Leaks(keep...); len(leaks) > 0 {
		h.t.Fatalf("left on the host: %q", leaks)
	}
	if d := h.world.Census().Doubles(); len(d) > 0 {
		h.t.Fatalf("two machines at once: %v", d)
	}
	if len(keep) == 0 {
		if used, count := h.n.ledger.totals(); used != (charge{}) || count != 0 {
			h.t.Fatalf("books: %+v of %d sandboxes", used, count)
		}
	}
	if err := h.verify(); err != nil {
		h.t.Fatalf("audit: %v", err)
	}
}

// verify walks the audit chain.
func (h *host) verify() error {
	records, err := h.n.Auditor().Records(context.Background(), h.db.Read, 1, 1<<30)
	if err != nil {
		return err
	}
	for i, r := range records {
		if r.Seq != uint64(i+1) {
			return fmt.Errorf("record %d has number %d", i+1, r.Seq)
		}
		if i > 0 && string(r.Prev) != string(records[i-1].Hash) {
			return fmt.Errorf("record %d does not follow its predecessor", r.Seq)
		}
	}
	return nil
}

// inBubble runs fn with virtual time and a host.
func inBubble(t *testing.T, change func(*Config), fn func(t *testing.T, h *host), options ...fake.Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t, change, options)
		defer h.end()
		fn(t, h)
	})
}

func (rot13) Derive(purpose string) []byte {
	sum := sha256.Sum256([]byte(purpose))
	return sum[:]
}
