package node

import (
	"context"
	"database/sql"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/sqlitedb"
)

//go:embed migrations/*.sql
var migrations embed.FS

// versionTable keeps the version of the node's own tables.
const versionTable = "node_migrations"

// Migrate makes or updates the node's tables in db. New calls it too; whoever
// uses an Auditor before New must call it first.
func Migrate(ctx context.Context, db *sqlitedb.DB) error {
	if err := sqlitedb.Migrate(ctx, db, migrations, "migrations", versionTable); err != nil {
		return fmt.Errorf("node: migrate: %w", err)
	}
	return nil
}

// row is what is durable of one sandbox.
type row struct {
	ID         sandbox.ID
	Tenant     string
	Generation uint64
	// Desired is the assignment's wish, Target what the node drives to: the same,
	// until the node moves the machine down by itself.
	Desired, Target sandbox.State
	// State is the last settled one ("creating" before the first).
	State     sandbox.State
	Template  string
	Resources sandbox.Resources
	Policy    sandbox.Policy
	SealedEnv []byte
	Deadline  time.Time
	// Made: the machine was ready or settled once, so its files exist. Without
	// its machine such a sandbox is lost, it is never made anew.
	Made bool
	// BootID names the boot whose memory clients know; "" when there is none.
	BootID string
	// Down: a power-off is owed. It is carried out whatever the target has become
	// since, so that what was told to be stopped never goes on with its memory.
	Down bool
	// Cause and Reason say why the machine is not (or soon not) running.
	Cause, Reason string
	Problem       *operation.Problem
	Converged     bool
	Steps         []operation.Step
	Since         time.Time
	Activity      time.Time
	Created       time.Time
}

func (r *row) spec() (s specOf) {
	return specOf{id: r.ID, template: r.Template, resources: r.Resources}
}

// settled reports whether the row says that nothing is left to be done. Whether
// the guest of a running machine is ready is known in memory only.
func (r *row) settled() bool { return r.State == r.Target && !r.Down && r.Target != sandbox.Deleted }

// observed is the state that clients see: the settled one, or where it is going.
func (r *row) observed() sandbox.State {
	if r.Target == sandbox.Failed || r.Target == sandbox.Quarantined {
		return r.Target
	}
	if r.State == r.Target && !r.Down {
		return r.State
	}
	switch r.Target {
	case sandbox.Paused:
		if r.State == sandbox.Creating {
			return sandbox.Creating
		}
		return sandbox.Pausing
	case sandbox.Stopped:
		return sandbox.Stopping
	case sandbox.Deleted:
		return sandbox.Deleting
	}
	switch r.State {
	case sandbox.Creating:
		return sandbox.Creating
	case sandbox.Paused:
		if !r.Down {
			return sandbox.Resuming
		}
	}
	return sandbox.Starting
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

func fromMicros(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.UnixMicro(n).UTC()
}

func problemJSON(p *operation.Problem) (sql.NullString, error) {
	if p == nil {
		return sql.NullString{}, nil
	}
	b, err := json.Marshal(p)
	return sql.NullString{String: string(b), Valid: true}, err
}

func problemFrom(s sql.NullString) (*operation.Problem, error) {
	if !s.Valid {
		return nil, nil
	}
	p := &operation.Problem{}
	return p, json.Unmarshal([]byte(s.String), p)
}

const rowColumns = `id, tenant, generation, desired, target, state, template_digest, resources, policy,
	sealed_env, deadline, made, boot_id, down, cause, reason, problem, converged, steps, since, activity, created`

func saveRow(ctx context.Context, tx *sql.Tx, r *row) error {
	resources, err := json.Marshal(r.Resources)
	if err != nil {
		return err
	}
	policy, err := json.Marshal(r.Policy)
	if err != nil {
		return err
	}
	steps, err := json.Marshal(r.Steps)
	if err != nil {
		return err
	}
	problem, err := problemJSON(r.Problem)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT OR REPLACE INTO node_machines (`+rowColumns+`)
		VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)`,
		string(r.ID), r.Tenant, int64(r.Generation), string(r.Desired), string(r.Target), string(r.State), r.Template,
		string(resources), string(policy), r.SealedEnv, micros(r.Deadline), r.Made, r.BootID, r.Down, r.Cause, r.Reason,
		problem, r.Converged, string(steps), micros(r.Since), micros(r.Activity), micros(r.Created))
	return err
}

func loadRows(ctx context.Context, db *sql.DB) (rows []row, err error) {
	q, err := db.QueryContext(ctx, `SELECT `+rowColumns+` FROM node_machines ORDER BY id`)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, q.Close()) }()
	for q.Next() {
		var r row
		var generation, deadline, since, activity, created int64
		var resources, policy, steps string
		var problem sql.NullString
		if err := q.Scan(&r.ID, &r.Tenant, &generation, &r.Desired, &r.Target, &r.State, &r.Template, &resources, &policy,
			&r.SealedEnv, &deadline, &r.Made, &r.BootID, &r.Down, &r.Cause, &r.Reason, &problem, &r.Converged, &steps,
			&since, &activity, &created); err != nil {
			return nil, err
		}
		r.Generation = uint64(generation)
		r.Deadline, r.Since, r.Activity, r.Created = fromMicros(deadline), fromMicros(since), fromMicros(activity), fromMicros(created)
		if r.Problem, err = problemFrom(problem); err == nil {
			err = errors.Join(json.Unmarshal([]byte(resources), &r.Resources), json.Unmarshal([]byte(policy), &r.Policy),
				json.Unmarshal([]byte(steps), &r.Steps))
		}
		if err != nil {
			return nil, fmt.Errorf("row of %s: %w", r.ID, err)
		}
		rows = append(rows, r)
	}
	return rows, q.Err()
}

// tombstone is what stays of a deleted sandbox.
type tombstone struct {
	Tenant     string
	Generation uint64
	Deleted    time.Time
}

type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func loadTombstone(ctx context.Context, q querier, id sandbox.ID) (t tombstone, ok bool, err error) {
	var generation, deleted int64
	err = q.QueryRowContext(ctx, `SELECT tenant, generation, deleted FROM node_tombstones WHERE id = ?`, string(id)).
		Scan(&t.Tenant, &generation, &deleted)
	if errors.Is(err, sql.ErrNoRows) {
		return t, false, nil
	}
	t.Generation, t.Deleted = uint64(generation), fromMicros(deleted)
	return t, err == nil, err
}

// saveTombstone replaces the row of a deleted sandbox.
func saveTombstone(ctx context.Context, tx *sql.Tx, id sandbox.ID, t tombstone) error {
	if _, err := tx.ExecContext(ctx, `DELETE FROM node_machines WHERE id = ?`, string(id)); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO node_tombstones (id, tenant, generation, deleted) VALUES (?,?,?,?)`,
		string(id), t.Tenant, int64(t.Generation), micros(t.Deleted))
	return err
}

func purgeTombstones(ctx context.Context, tx *sql.Tx, before time.Time) error {
	// One whose outcome nobody absorbed yet stays.
	_, err := tx.ExecContext(ctx, `DELETE FROM node_tombstones WHERE deleted < ?
		AND id NOT IN (SELECT id FROM node_outcomes)`, micros(before))
	return err
}

// saveOutcome gives o its sequence number.
func saveOutcome(ctx context.Context, tx *sql.Tx, o *Outcome) error {
	problem, err := problemJSON(o.Problem)
	if err != nil {
		return err
	}
	res, err := tx.ExecContext(ctx, `INSERT INTO node_outcomes (id, tenant, generation, state, trigger, problem, at)
		VALUES (?,?,?,?,?,?,?)`, string(o.ID), o.Tenant, int64(o.Generation), string(o.State), o.Trigger, problem, micros(o.At))
	if err != nil {
		return err
	}
	seq, err := res.LastInsertId()
	o.Seq = uint64(seq)
	return err
}

// loadOutcomes lists unabsorbed ones by seq; of one sandbox when id is not "".
// A limit below 1 means all.
func loadOutcomes(ctx context.Context, q querier, id sandbox.ID, limit int) (out []Outcome, err error) {
	if limit < 1 {
		limit = -1
	}
	rows, err := q.QueryContext(ctx, `SELECT seq, id, tenant, generation, state, trigger, problem, at FROM node_outcomes
		WHERE ? = '' OR id = ? ORDER BY seq LIMIT ?`, string(id), string(id), limit)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var o Outcome
		var seq, generation, at int64
		var problem sql.NullString
		if err := rows.Scan(&seq, &o.ID, &o.Tenant, &generation, &o.State, &o.Trigger, &problem, &at); err != nil {
			return nil, err
		}
		o.Seq, o.Generation, o.At = uint64(seq), uint64(generation), fromMicros(at)
		if o.Problem, err = problemFrom(problem); err != nil {
			return nil, fmt.Errorf("outcome %d: %w", seq, err)
		}
		out = append(out, o)
	}
	return out, rows.Err()
}
