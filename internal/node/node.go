package node

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/template"
)

// Templates is what a node asks of the template store (the host room's client).
type Templates interface {
	List(ctx context.Context) ([]template.Info, error)
	// Resolve finds by name:tag or digest; template.ErrNotFound otherwise.
	Resolve(ctx context.Context, ref string) (template.Info, error)
}

// Sealer keeps tenant environments unreadable at rest. Context binds what is
// sealed to its place: opening with another one fails.
type Sealer interface {
	Seal(plain, context []byte) ([]byte, error)
	Open(sealed, context []byte) ([]byte, error)
}

// Sessions is what a node asks of the session manager. The hooks are called
// without any lock of the node, in order per sandbox, and may come twice for
// the same thing (after a restart they are said again).
type Sessions interface {
	session.Service
	// SandboxEnded: the machine is gone, its processes with it. Cause is a problem
	// code of the node (out_of_memory, sandbox_expired, …), "stopped" or
	// "deleted"; reason is one sentence or "".
	SandboxEnded(id sandbox.ID, cause, reason string)
	SandboxPaused(id sandbox.ID)
	// SandboxResumed: the machine runs and its guest is configured.
	SandboxResumed(id sandbox.ID)
	// Erase removes everything kept of the sandbox: journals, tokens, sessions.
	Erase(ctx context.Context, id sandbox.ID) error
	// RunningSessions counts sessions whose command is starting or running.
	RunningSessions(id sandbox.ID) int
}

// Config of a Node. Zero durations and counts mean the default.
type Config struct {
	// Name is the node's, in the audit chain and in logs.
	Name      string
	DB        *sqlitedb.DB
	Runtime   runtime.Runtime
	Templates Templates
	// NewGuest makes the client of a machine's guest daemon; it dials lazily.
	NewGuest func(m runtime.Machine) guestclient.Guest
	Sealer   Sealer
	Clock    clock.Clock
	Log      *slog.Logger
	// Metrics may be nil.
	Metrics prometheus.Registerer

	// Capacity is what sandboxes may take in all; a zero field is no limit.
	Capacity sandbox.Resources
	// CPUOvercommit multiplies Capacity.MilliCPU; default 1.
	CPUOvercommit float64
	// MaxSandboxes bounds the rows; default no limit.
	MaxSandboxes int

	CreateTimeout time.Duration // of one Create; default 2 min
	StepTimeout   time.Duration // of one call of any other step; default 60 s
	PingEvery     time.Duration // default 15 s
	PingTimeout   time.Duration // default 10 s
	PingMisses    int           // in a row until the guest counts as unresponsive; default 3
	// OnUnresponsive is failed (default: files are kept, start works) or
	// quarantined.
	OnUnresponsive sandbox.State
	// TombstoneKeep is how long the id of a deleted sandbox is remembered; default 30 days.
	TombstoneKeep time.Duration
}

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&c.CreateTimeout, 2*time.Minute)
	set(&c.StepTimeout, time.Minute)
	set(&c.PingEvery, 15*time.Second)
	set(&c.PingTimeout, 10*time.Second)
	set(&c.TombstoneKeep, 30*24*time.Hour)
	if c.PingMisses <= 0 {
		c.PingMisses = 3
	}
	if c.OnUnresponsive == "" {
		c.OnUnresponsive = sandbox.Failed
	}
	if c.CPUOvercommit <= 0 {
		c.CPUOvercommit = 1
	}
	if c.Clock == nil {
		c.Clock = clock.System{}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Node owns the machines of one host. It implements API.
type Node struct {
	cfg      Config
	db       *sqlitedb.DB
	rt       runtime.Runtime
	caps     runtime.Capabilities
	clock    clock.Clock
	log      *slog.Logger
	audit    *Auditor
	ledger   *ledger
	metrics  *metrics
	sessions Sessions

	outcomeSignal chan struct{}
	limitKick     chan struct{}
	purgeAt       time.Time // only the limits loop uses it

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	closed  bool                     // guarded by mu
	started bool                     // guarded by mu
	boxes   map[sandbox.ID]*box      // guarded by mu
	infos   map[string]template.Info // by digest; guarded by mu
}

var _ API = (*Node)(nil)

// New makes a node and its tables; it touches no machine. Order for main: New,
// make the session manager with Guest, Activity, ReportProtocolError and
// Auditor of this node, Bind, Start, serve, Close.
func New(ctx context.Context, cfg Config) (*Node, error) {
	cfg = cfg.withDefaults()
	if cfg.DB == nil || cfg.Runtime == nil || cfg.Templates == nil || cfg.NewGuest == nil || cfg.Sealer == nil || cfg.Name == "" {
		return nil, errors.New("node: configuration: name, database, runtime, templates, guest client and sealer are needed")
	}
	if cfg.OnUnresponsive != sandbox.Failed && cfg.OnUnresponsive != sandbox.Quarantined {
		return nil, fmt.Errorf("node: configuration: an unresponsive guest leads to failed or quarantined, not to %q", cfg.OnUnresponsive)
	}
	if err := Migrate(ctx, cfg.DB); err != nil {
		return nil, err
	}
	n := &Node{
		cfg: cfg, db: cfg.DB, rt: cfg.Runtime, caps: cfg.Runtime.Capabilities(), clock: cfg.Clock,
		log: cfg.Log.With(slog.String("node", cfg.Name)), audit: NewAuditor(cfg.Name), metrics: newMetrics(),
		outcomeSignal: make(chan struct{}, 1), limitKick: make(chan struct{}, 1),
		boxes: map[sandbox.ID]*box{}, infos: map[string]template.Info{},
		ledger: newLedger(charge{
			milliCPU: int64(math.Floor(float64(cfg.Capacity.MilliCPU) * cfg.CPUOvercommit)),
			memory:   cfg.Capacity.MemoryBytes, disk: cfg.Capacity.DiskBytes,
		}, cfg.MaxSandboxes),
	}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if cfg.Metrics != nil {
		if err := n.metrics.register(cfg.Metrics, n); err != nil {
			n.cancel()
			return nil, fmt.Errorf("node: register metrics: %w", err)
		}
	}
	return n, nil
}

// Auditor is this node's audit chain, to be shared with the session manager.
func (n *Node) Auditor() *Auditor { return n.audit }

// Bind gives the node its sessions; before Start.
func (n *Node) Bind(s Sessions) { n.sessions = s }

// Sessions implements API.
func (n *Node) Sessions() session.Service { return n.sessions }

// Close ends all work of this process and waits for it. Machines go on; the
// next Start finds them. It does not close the database.
func (n *Node) Close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	n.wg.Wait()
	for _, b := range n.all() {
		b.mu.Lock()
		if b.guest != nil {
			b.guest.Close()
			b.guest = nil
		}
		b.mu.Unlock()
	}
}

// spawn runs fn in a goroutine that Close waits for; false when the node is closed.
func (n *Node) spawn(fn func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	n.wg.Go(fn)
	return true
}

func (n *Node) update(ctx context.Context, fn func(tx *sql.Tx) error) error {
	if err := n.db.Update(ctx, fn); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	return nil
}

func (n *Node) box(id sandbox.ID) *box {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.boxes[id]
}

// boxFor finds or makes the box of id.
func (n *Node) boxFor(id sandbox.ID) *box {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.boxes[id]
	if b == nil {
		b = newBox(n, id)
		n.boxes[id] = b
	}
	return b
}

// forget drops a box that is gone, and its charge. b.mu is held.
func (n *Node) forget(b *box) {
	n.mu.Lock()
	if n.boxes[b.id] == b {
		delete(n.boxes, b.id)
		n.ledger.drop(b.id)
	}
	n.mu.Unlock()
}

func (n *Node) all() []*box {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]*box, 0, len(n.boxes))
	for _, b := range n.boxes {
		out = append(out, b)
	}
	return out
}

func (n *Node) signalOutcome() {
	select {
	case n.outcomeSignal <- struct{}{}:
	default:
	}
}

// maxInfos bounds the cache of template configurations.
const maxInfos = 1024

// template finds what is known of a digest; digests never change their meaning.
func (n *Node) template(ctx context.Context, digest string) (template.Info, error) {
	n.mu.Lock()
	info, ok := n.infos[digest]
	n.mu.Unlock()
	if ok {
		return info, nil
	}
	info, err := n.cfg.Templates.Resolve(ctx, digest)
	if errors.Is(err, template.ErrNotFound) {
		return info, fmt.Errorf("node: %w: %w", runtime.ErrNoTemplate, err)
	}
	if err != nil {
		return info, fmt.Errorf("node: template %s: %w", digest, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.infos) >= maxInfos {
		clear(n.infos)
	}
	n.infos[digest] = info
	return info, nil
}

// envContext binds a sealed environment to its sandbox.
func envContext(id sandbox.ID, tenant string) []byte {
	return []byte("node-env:" + tenant + ":" + string(id))
}

func (n *Node) sealEnv(id sandbox.ID, tenant string, env map[string]string) ([]byte, error) {
	if len(env) == 0 {
		return nil, nil
	}
	plain, err := json.Marshal(env)
	if err != nil {
		return nil, fmt.Errorf("node: environment: %w", err)
	}
	sealed, err := n.cfg.Sealer.Seal(plain, envContext(id, tenant))
	if err != nil {
		return nil, fmt.Errorf("node: seal environment: %w", err)
	}
	return sealed, nil
}

func (n *Node) openEnv(r *row) (map[string]string, error) {
	if len(r.SealedEnv) == 0 {
		return nil, nil
	}
	plain, err := n.cfg.Sealer.Open(r.SealedEnv, envContext(r.ID, r.Tenant))
	if err != nil {
		return nil, fmt.Errorf("node: open sealed environment: %w", err)
	}
	var env map[string]string
	if json.Unmarshal(plain, &env) != nil {
		return nil, errors.New("node: sealed environment is malformed") // its text stays out of errors
	}
	return env, nil
}

func (n *Node) purge(ctx context.Context) {
	before := n.clock.Now().Add(-n.cfg.TombstoneKeep)
	err := n.update(ctx, func(tx *sql.Tx) error { return purgeTombstones(ctx, tx, before) })
	if err != nil && ctx.Err() == nil {
		n.log.Warn("cannot purge tombstones; will retry tomorrow", slog.Any("error", err))
	}
}

// Known implements API.
func (n *Node) Known(context.Context) ([]sandbox.ID, error) {
	var ids []sandbox.ID
	for _, b := range n.all() {
		b.mu.Lock()
		if !b.gone && b.row.ID != "" {
			ids = append(ids, b.id)
		}
		b.mu.Unlock()
	}
	slices.Sort(ids)
	return ids, nil
}
