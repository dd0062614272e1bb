package session

import (
	"context"
	"database/sql"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
)

//go:embed migrations
var migrations embed.FS

const versionTable = "session_version"

// row is a session as the node's database keeps it.
type row struct {
	seq         int64
	id          sandbox.SessionID
	tenant      tenant.ID
	sandbox     sandbox.ID
	principal   string
	request     string
	state       State
	epoch       uint64
	command     []byte // sealed
	dataKey     []byte // sealed
	guestBoot   string
	hostBoot    string
	createdAt   time.Time
	startedAt   time.Time
	endedAt     time.Time
	pausedAt    time.Time
	paused      time.Duration
	pid         int
	stdinOffset uint64
	lastOffset  uint64
	exit        *Exit
	bodyHash    []byte
}

const columns = `seq, id, tenant, sandbox, principal, request, state, epoch, command, data_key, guest_boot, host_boot,
	created_at, started_at, ended_at, paused_at, paused_micros, pid, stdin_offset, last_offset, exit, body_hash`

type scanner interface{ Scan(...any) error }

// scan reads a row and opens its exit.
func (m *Manager) scan(s scanner) (row, error) {
	var (
		r                              row
		tn, id, box, state             string
		created                        int64
		started, ended, pausedAt       sql.NullInt64
		pausedMicros, stdin, last, epo int64
		exit                           []byte // sealed: its reason may have a tenant's words
	)
	if err := s.Scan(&r.seq, &id, &tn, &box, &r.principal, &r.request, &state, &epo, &r.command, &r.dataKey, &r.guestBoot, &r.hostBoot,
		&created, &started, &ended, &pausedAt, &pausedMicros, &r.pid, &stdin, &last, &exit, &r.bodyHash); err != nil {
		return row{}, err
	}
	t, err := tenant.Mint(tn) // the row was written for a proven tenant
	if err != nil {
		return row{}, fmt.Errorf("session: row %s: %w", id, err)
	}
	r.id, r.tenant, r.sandbox, r.state = sandbox.SessionID(id), t, sandbox.ID(box), State(state)
	r.createdAt, r.startedAt, r.endedAt, r.pausedAt = fromMicros(created), fromNull(started), fromNull(ended), fromNull(pausedAt)
	r.paused = time.Duration(pausedMicros) * time.Microsecond
	r.stdinOffset, r.lastOffset, r.epoch = uint64(stdin), uint64(last), uint64(epo)
	if exit != nil {
		plain, err := m.Sealer.Open(exit, bind(r, "exit"))
		if err != nil {
			return row{}, fmt.Errorf("session: row %s: exit: %w", id, err)
		}
		r.exit = new(Exit)
		if err := json.Unmarshal(plain, r.exit); err != nil {
			return row{}, fmt.Errorf("session: row %s: exit: %w", id, err)
		}
	}
	return r, nil
}

func micros(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UnixMicro()
}

func fromMicros(n int64) time.Time { return time.UnixMicro(n).UTC() }

func fromNull(n sql.NullInt64) time.Time {
	if !n.Valid {
		return time.Time{}
	}
	return fromMicros(n.Int64)
}

func insertRow(ctx context.Context, tx *sql.Tx, r *row, idempotency []byte) error {
	res, err := tx.ExecContext(ctx, `INSERT INTO session_sessions
		(id, tenant, sandbox, principal, request, idempotency, body_hash, state, epoch, command, data_key, guest_boot, host_boot, created_at, started_at)
		VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)`,
		string(r.id), r.tenant.String(), string(r.sandbox), r.principal, r.request, idempotency, r.bodyHash, string(r.state), int64(r.epoch),
		r.command, r.dataKey, r.guestBoot, r.hostBoot, r.createdAt.UnixMicro(), micros(r.startedAt))
	if err != nil {
		return fmt.Errorf("session: insert: %w", err)
	}
	r.seq, err = res.LastInsertId()
	return err
}

// errNoRow: the guarded update matched nothing.
var errNoRow = errors.New("session: no row in that state")

func one(res sql.Result, err error) error {
	if err != nil {
		return fmt.Errorf("session: write: %w", err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return err
	}
	if n == 0 {
		return errNoRow
	}
	return nil
}

// markStarting is the compare-and-set that lets exactly one start happen.
func markStarting(ctx context.Context, tx *sql.Tx, id sandbox.SessionID, guestBoot, hostBoot string, now time.Time) error {
	return one(tx.ExecContext(ctx, `UPDATE session_sessions SET state='starting', guest_boot=?, host_boot=?, started_at=?
		WHERE id=? AND state='created'`, guestBoot, hostBoot, now.UnixMicro(), string(id)))
}

// markEnded makes the session final, once.
func (m *Manager) markEnded(ctx context.Context, tx *sql.Tx, r row) error {
	plain, err := json.Marshal(r.exit)
	if err != nil {
		return err
	}
	body, err := m.Sealer.Seal(plain, bind(r, "exit"))
	if err != nil {
		return fmt.Errorf("session: seal: %w", err)
	}
	return one(tx.ExecContext(ctx, `UPDATE session_sessions SET state=?, exit=?, ended_at=?, pid=?, stdin_offset=?, last_offset=?
		WHERE id=? AND ended_at IS NULL`, string(r.state), body, r.exit.At.UnixMicro(), r.pid, int64(r.stdinOffset), int64(r.lastOffset), string(r.id)))
}

func (m *Manager) rowOf(ctx context.Context, t tenant.ID, id sandbox.SessionID) (row, error) {
	if t.IsZero() {
		return row{}, errNotFound
	}
	r, err := m.scan(m.db.Read.QueryRowContext(ctx, `SELECT `+columns+` FROM session_sessions WHERE id=? AND tenant=?`, string(id), t.String()))
	if errors.Is(err, sql.ErrNoRows) {
		return row{}, errNotFound
	}
	if err != nil {
		return row{}, fmt.Errorf("session: read: %w", err)
	}
	return r, nil
}

func (m *Manager) rows(ctx context.Context, where string, args ...any) ([]row, error) {
	q, err := m.db.Read.QueryContext(ctx, `SELECT `+columns+` FROM session_sessions WHERE `+where, args...)
	if err != nil {
		return nil, fmt.Errorf("session: read: %w", err)
	}
	defer func() { _ = q.Close() }() // Err tells
	var out []row
	for q.Next() {
		r, err := m.scan(q)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	if err := q.Err(); err != nil {
		return nil, fmt.Errorf("session: read: %w", err)
	}
	return out, nil
}

var errNotFound = fault.New(fault.NotFound, "session_not_found", "there is no such session").
	Do("check the id; ended sessions are kept for a limited time, and go with their sandbox")
