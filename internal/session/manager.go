package session

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/quota"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/session/journal"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/tenant"
)

// The failpoints of a session's life.
var (
	fpStartBefore = failpoint.Name("session.start.before")
	fpStartRow    = failpoint.Name("session.start.after_row")
	fpStartGuest  = failpoint.Name("session.start.after_guest")
	fpAppend      = failpoint.Name("session.output.after_append")
	fpExitBefore  = failpoint.Name("session.exit.before")
	fpExitRecord  = failpoint.Name("session.exit.after_record")
	fpExitAfter   = failpoint.Name("session.exit.after")
)

// Guests finds the daemon of a sandbox that runs here.
type Guests interface {
	// Guest gives the daemon. An error that is a fault with Retryable set, or is
	// no fault, means "not now" (starting, paused, channel away): sessions wait.
	// Any other fault means that the machine the sessions ran in is gone
	// (sandbox_not_running, sandbox_deleted): they are lost. Another boot of the
	// machine gives another value, unless SandboxEnded was called between them.
	Guest(ctx context.Context, t tenant.ID, id sandbox.ID) (guestclient.Guest, error)
}

// Sealer encrypts what lies in the database. Context binds the result to where
// it is kept; opening with another context fails.
type Sealer interface {
	Seal(plain, context []byte) ([]byte, error)
	Open(sealed, context []byte) ([]byte, error)
	// Derive gives a key of 32 bytes for another purpose.
	Derive(purpose string) []byte
}

// Auditor appends to the node's audit chain in the transaction of the act.
type Auditor interface {
	Append(ctx context.Context, tx *sql.Tx, e audit.Entry) error
}

// Config of a Manager. Metrics, Activity, ProtocolError and Limits may be left out.
type Config struct {
	DB      *sqlitedb.DB // the node's; the manager keeps its own tables in it
	Dir     string       // of the journals; made with mode 0700
	Guests  Guests
	Sealer  Sealer
	Ledger  *quota.Ledger
	Auditor Auditor
	Clock   clock.Clock
	Log     *slog.Logger
	Metrics prometheus.Registerer
	// Activity is told of each data-plane call and, each Sweep, of each sandbox
	// with a reader attached to a running session. It must not block.
	Activity func(sandbox.ID)
	// ProtocolError is told of a sandbox whose guest broke the protocol so that its
	// session had to be given up; it may quarantine it. May be nil.
	ProtocolError func(ctx context.Context, id sandbox.ID) error
	Limits        Limits
	// HostBoot names the boot of the host: journals of another boot may have lost
	// their end. "" reads the kernel's boot id.
	HostBoot string
}

// Manager implements Service over the journals of one node. Make it with New,
// then call Recover once, before the node reports what became of its machines.
type Manager struct {
	Config
	db      *sqlitedb.DB
	commits committer
	macKey  []byte
	metrics *metrics
	holding holding

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	lives   map[sandbox.SessionID]*live
	kept    map[sandbox.ID][]kept // ended sessions, oldest first
	readers map[sandbox.ID]int
	dirty   map[*journal.Journal]struct{}
	resting map[*journal.Journal]struct{} // synced, descriptor still open
	grants  map[string]map[*Grant]struct{}
	tickets map[string]ticket
	paused  map[sandbox.ID]time.Time
	boots   map[sandbox.ID]bootOf
	closed  bool

	settling *settling // the round of flushes that is being gathered
}

var _ Service = (*Manager)(nil)

// kept is an ended session on the disk.
type kept struct {
	id     sandbox.SessionID
	tenant tenant.ID
	bytes  int64
}

// New opens the manager: tables and key. Nothing runs until Recover.
func New(ctx context.Context, c Config) (*Manager, error) {
	if c.Clock == nil {
		c.Clock = clock.System{}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Ledger == nil {
		c.Ledger = quota.New(quota.Defaults())
	}
	if c.Activity == nil {
		c.Activity = func(sandbox.ID) {}
	}
	if c.DB == nil || c.Guests == nil || c.Sealer == nil || c.Auditor == nil || c.Dir == "" {
		return nil, errors.New("session: DB, Dir, Guests, Sealer and Auditor are needed")
	}
	if c.HostBoot == "" {
		b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, fmt.Errorf("session: boot id: %w", err)
		}
		c.HostBoot = strings.TrimSpace(string(b))
	}
	c.Limits = c.Limits.withDefaults()
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("session: make directory: %w", err)
	}
	if err := sqlitedb.Migrate(ctx, c.DB, migrations, "migrations", versionTable); err != nil {
		return nil, err
	}
	m := &Manager{Config: c, db: c.DB, macKey: c.Sealer.Derive("session tokens and idempotency keys"), commits: committer{db: c.DB},
		lives: map[sandbox.SessionID]*live{}, kept: map[sandbox.ID][]kept{}, readers: map[sandbox.ID]int{},
		dirty: map[*journal.Journal]struct{}{}, resting: map[*journal.Journal]struct{}{},
		grants: map[string]map[*Grant]struct{}{}, tickets: map[string]ticket{}, paused: map[sandbox.ID]time.Time{}, boots: map[sandbox.ID]bootOf{}}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	var err error
	if m.metrics, err = newMetrics(c.Metrics); err != nil {
		return nil, err
	}
	return m, nil
}

// mac is the keyed hash under which tokens and idempotency keys are kept.
func (m *Manager) mac(label string, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, m.macKey)
	fmt.Fprintf(h, "%s\x00", label)
	for _, p := range parts {
		fmt.Fprintf(h, "%d\x00", len(p))
		h.Write(p)
	}
	return h.Sum(nil)
}

// Recover charges what is on the disk, goes on with the sessions that were
// running, finishes those whose end was recorded but not committed, and starts
// the sweeper.
func (m *Manager) Recover(ctx context.Context) error {
	rows, err := m.rows(ctx, `1 ORDER BY seq`)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, r := range rows {
		m.Ledger.Adopt(r.tenant, r.sandbox, quota.Sessions, 1)
		known[string(r.id)] = true
		switch r.state {
		case Created:
		case Starting, Running:
			if err := m.resume(r); err != nil {
				m.Log.Error("session cannot be recovered", "session", r.id, "error", err)
				return err
			}
		default:
			n := dirBytes(m.dir(r.id))
			m.Ledger.Adopt(r.tenant, r.sandbox, quota.JournalBytes, n)
			m.kept[r.sandbox] = append(m.kept[r.sandbox], kept{r.id, r.tenant, n})
		}
	}
	if err := m.removeStrays(known); err != nil {
		return err
	}
	if err := m.adoptTokens(ctx); err != nil {
		return err
	}
	m.wg.Go(m.sweeper)
	return nil
}

// removeStrays erases journals that no row knows: their sandbox was deleted and
// the deletion was interrupted.
func (m *Manager) removeStrays(known map[string]bool) error {
	boxes, err := os.ReadDir(m.Dir)
	if err != nil {
		return fmt.Errorf("session: read directory: %w", err)
	}
	for _, b := range boxes {
		in := filepath.Join(m.Dir, b.Name())
		ids, err := os.ReadDir(in)
		if err != nil {
			return fmt.Errorf("session: read directory: %w", err)
		}
		left := len(ids)
		for _, s := range ids {
			if !known[s.Name()] {
				if err := journal.Erase(filepath.Join(in, s.Name())); err != nil {
					return err
				}
				left--
			}
		}
		if left == 0 {
			if err := journal.Erase(in); err != nil {
				return err
			}
		}
	}
	return nil
}

// resume goes on with a session that was starting or running.
func (m *Manager) resume(r row) error {
	l := m.newLive(r)
	l.recovered = true
	if err := l.openJournal(true); err != nil {
		return err
	}
	m.mu.Lock()
	l.refs++
	m.lives[r.id] = l
	if !r.pausedAt.IsZero() {
		m.paused[r.sandbox] = r.pausedAt
	}
	m.mu.Unlock()
	m.wg.Go(l.pump)
	return nil
}

// Close stops pumps, sweeper and streams. Processes go on in their sandboxes;
// the next Manager finds them.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	var gs []*Grant
	for _, set := range m.grants {
		for g := range set {
			gs = append(gs, g)
		}
	}
	m.mu.Unlock()
	for _, g := range gs {
		g.cut(errClosing)
	}
	m.cancel()
	m.wg.Wait()
	m.mu.Lock()
	left := make([]*live, 0, len(m.lives))
	for _, l := range m.lives {
		left = append(left, l)
	}
	m.mu.Unlock()
	for _, l := range left {
		l.closeJournal()
	}
}

var errClosing = fault.New(fault.Unavailable, "shutting_down", "the service is shutting down").Do("attach again after the id of your last event")

func (m *Manager) dir(id sandbox.SessionID) string {
	return filepath.Join(m.Dir, string(id.Sandbox()), string(id))
}

func (m *Manager) now() time.Time { return m.Clock.Now().UTC() }

func dirBytes(dir string) int64 {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0 // erased
	}
	var n int64
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			n += info.Size()
		}
	}
	return n
}

// newRow makes the row of a new session, charged to the ledger.
func (m *Manager) newRow(ctx context.Context, t tenant.ID, r CreateRequest) (row, error) {
	if t.IsZero() {
		return row{}, errNotFound
	}
	if _, err := sandbox.ParseID(string(r.Sandbox)); err != nil {
		return row{}, err
	}
	if err := r.Command.check(); err != nil {
		return row{}, err
	}
	plain, err := r.Command.encode()
	if err != nil {
		return row{}, err
	}
	id := sandbox.NewSessionID(r.Sandbox)
	out := row{id: id, tenant: t, sandbox: r.Sandbox, principal: r.Principal, request: r.Request, state: Created, epoch: 1, createdAt: m.now()}
	if out.command, err = m.Sealer.Seal(plain, bind(out, "command")); err != nil {
		return row{}, fmt.Errorf("session: seal: %w", err)
	}
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails (crypto/rand)
	if out.dataKey, err = m.Sealer.Seal(key, bind(out, "data-key")); err != nil {
		return row{}, fmt.Errorf("session: seal: %w", err)
	}
	for {
		err = m.Ledger.Charge(t, r.Sandbox, quota.Sessions, 1)
		if err == nil || !m.evict(ctx, r.Sandbox) {
			return out, err
		}
	}
}

func bind(r row, what string) []byte {
	return secret.Bind("session-"+what, r.tenant.String(), string(r.id))
}

// Create makes a session and its first attach token. Nothing runs.
func (m *Manager) Create(ctx context.Context, t tenant.ID, r CreateRequest) (Session, Token, error) {
	if _, err := m.Guests.Guest(ctx, t, r.Sandbox); fault.IsClass(err, fault.NotFound) || fault.IsClass(err, fault.Gone) {
		return Session{}, Token{}, err // a paused or stopped sandbox may be back by the time of attach
	}
	rw, err := m.newRow(ctx, t, r)
	if err != nil {
		return Session{}, Token{}, err
	}
	tok, secret, err := m.newToken(kindAttach, t, r.Sandbox, rw.id, r.Principal, nil, r.TokenTTL)
	if err != nil {
		m.Ledger.Refund(t, r.Sandbox, quota.Sessions, 1)
		return Session{}, Token{}, err
	}
	var idem []byte
	if r.IdempotencyKey != "" {
		idem = m.mac("idempotency", []byte(r.IdempotencyKey))
		rw.bodyHash = m.mac("body", r.BodyHash)
	}
	var old *row
	var revoked []tokenRow
	err = m.commits.do(ctx, func(ctx context.Context, tx *sql.Tx) error {
		old, revoked = nil, nil
		if idem != nil {
			found, err := m.scan(tx.QueryRowContext(ctx, `SELECT `+columns+` FROM session_sessions WHERE tenant=? AND principal=? AND idempotency=?`,
				t.String(), r.Principal, idem))
			switch {
			case errors.Is(err, sql.ErrNoRows):
			case err != nil:
				return fmt.Errorf("session: read: %w", err)
			case found.sandbox != r.Sandbox || subtle.ConstantTimeCompare(found.bodyHash, rw.bodyHash) != 1:
				return errMismatch
			default:
				old = &found
				if revoked, err = deleteTokens(ctx, tx, `session=?`, string(found.id)); err != nil {
					return err
				}
				tok.session = found.id
			}
		}
		if old == nil {
			if err := insertRow(ctx, tx, &rw, idem); err != nil {
				return err
			}
			if err := m.Auditor.Append(ctx, tx, audit.Entry{At: rw.createdAt, Tenant: t.String(), Actor: r.Principal, Action: "session.create",
				Target: string(rw.id), Request: r.Request}); err != nil {
				return err
			}
		}
		return m.insertToken(ctx, tx, tok, r.Request)
	})
	if err != nil || old != nil {
		m.Ledger.Refund(t, r.Sandbox, quota.Sessions, 1)
	}
	if err != nil {
		m.Ledger.Refund(t, r.Sandbox, quota.Tokens, 1)
		return Session{}, Token{}, err
	}
	m.cutTokens(revoked)
	if old != nil {
		rw = *old
	}
	s, err := m.view(rw)
	return s, secret, err
}

var errMismatch = fault.New(fault.Unprocessable, "idempotency_mismatch", "the idempotency key was used with another request").
	Do("use a new key for a new request")

// Get tells about one session.
func (m *Manager) Get(ctx context.Context, t tenant.ID, id sandbox.SessionID) (Session, error) {
	r, err := m.rowOf(ctx, t, id)
	if err != nil {
		return Session{}, err
	}
	return m.view(r)
}

// view makes what callers see of a row, with what is newer in memory.
func (m *Manager) view(r row) (Session, error) {
	m.mu.Lock()
	l := m.lives[r.id]
	m.mu.Unlock()
	var st journal.State
	if l != nil {
		l.mu.Lock()
		if l.row.tenant == r.tenant && !(r.exit != nil && l.row.exit == nil) && !(r.state != Created && l.row.state == Created) {
			r = l.row
			r.stdinOffset = max(r.stdinOffset, l.stdin)
		}
		if l.journal != nil {
			st = l.journal.State()
		}
		l.mu.Unlock()
	}
	c, err := m.command(r)
	if err != nil {
		return Session{}, err
	}
	first := st.First
	if st.End == 0 && r.exit != nil {
		st.End = r.lastOffset
		if p, ok := journal.Peek(m.dir(r.id)); ok {
			first = p
		} else {
			first = max(r.lastOffset, 1) - 1
		}
	}
	return Session{ID: r.id, Sandbox: r.sandbox, Principal: r.principal, State: r.state, Command: c.shown(), Epoch: r.epoch, CreatedAt: r.createdAt, StartedAt: r.startedAt,
		PID: r.pid, Exit: r.exit, FirstID: journal.ID{Epoch: r.epoch, Offset: first}.String(),
		LastID: journal.ID{Epoch: r.epoch, Offset: st.End}.String(), StdinOffset: r.stdinOffset}, nil
}

// MaxList bounds one page of List.
const MaxList = 200

// List tells about the sessions of a sandbox, oldest first. A limit of 0 or
// above MaxList is MaxList; next is "" at the end.
func (m *Manager) List(ctx context.Context, t tenant.ID, id sandbox.ID, cursor string, limit int) ([]Session, string, error) {
	if t.IsZero() {
		return nil, "", errNotFound
	}
	if limit <= 0 || limit > MaxList {
		limit = MaxList
	}
	before := int64(math.MaxInt64)
	if cursor != "" { // the id of the last session shown, which tells its caller nothing new
		last, err := sandbox.ParseSessionID(cursor)
		var r row
		if err == nil && last.Sandbox() == id {
			r, err = m.rowOf(ctx, t, last)
		}
		switch {
		case err != nil && !fault.IsClass(err, fault.NotFound) && !fault.IsClass(err, fault.Invalid):
			return nil, "", err
		case err != nil || r.id == "":
			return nil, "", fault.New(fault.Invalid, "bad_cursor", "the cursor was not made by this list").Do("start again without a cursor")
		}
		before = r.seq
	}
	rows, err := m.rows(ctx, `tenant=? AND sandbox=? AND seq<? ORDER BY seq DESC LIMIT ?`, t.String(), string(id), before, limit+1)
	if err != nil {
		return nil, "", err
	}
	next := ""
	if len(rows) > limit {
		rows = rows[:limit]
		next = string(rows[limit-1].id)
	}
	out := make([]Session, 0, len(rows))
	for _, r := range rows {
		s, err := m.view(r)
		if err != nil {
			return nil, "", err
		}
		out = append(out, s)
	}
	return out, next, nil
}
