package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// maxPairs bounds the metadata pairs of one filter: each is a sub-query.
const maxPairs = 64

const sandboxColumns = `SELECT s.tenant, s.revision, s.doc FROM `

func scanSandbox(scan func(...any) error) (store.Sandbox, error) {
	var name, doc string
	var revision int64
	if err := scan(&name, &revision, &doc); err != nil {
		return store.Sandbox{}, err
	}
	var d sandboxDoc
	if err := decode(doc, &d); err != nil {
		return store.Sandbox{}, err
	}
	t, err := tenant.Mint(name)
	if err != nil {
		return store.Sandbox{}, err
	}
	s := d.sandbox()
	s.Tenant, s.Revision = t, uint64(revision)
	return s, nil
}

func oneSandbox(row *sql.Row) (store.Sandbox, error) {
	s, err := scanSandbox(row.Scan)
	if err != nil {
		return store.Sandbox{}, notFound("sandbox", err)
	}
	return s, nil
}

// notFound turns "no rows" into ErrNotFound.
func notFound(what string, err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("%s: %w", what, store.ErrNotFound)
	}
	return fmt.Errorf("store: %s: %w", what, err)
}

func (r runner) sandbox(ctx context.Context, t tenant.ID, id sandbox.ID) (store.Sandbox, error) {
	if t.IsZero() {
		return store.Sandbox{}, errNoTenant
	}
	if !possible(string(id)) {
		return store.Sandbox{}, notFound("sandbox", sql.ErrNoRows)
	}
	return oneSandbox(r.row(ctx, sandboxColumns+`sandboxes s WHERE s.tenant = ? AND s.id = ?`, t.String(), string(id)))
}

func (r runner) sandboxByName(ctx context.Context, t tenant.ID, name string) (store.Sandbox, error) {
	if t.IsZero() {
		return store.Sandbox{}, errNoTenant
	}
	if name == "" {
		return store.Sandbox{}, notFound("sandbox", sql.ErrNoRows)
	}
	return oneSandbox(r.row(ctx, sandboxColumns+`sandboxes s WHERE s.tenant = ? AND s.name_hash = ? AND s.deleted_at IS NULL`, t.String(), nameHash(name)))
}

// Sandbox implements store.Store.
func (s *Store) Sandbox(ctx context.Context, t tenant.ID, id sandbox.ID) (store.Sandbox, error) {
	return s.read().sandbox(ctx, t, id)
}

// SandboxByName implements store.Store.
func (s *Store) SandboxByName(ctx context.Context, t tenant.ID, name string) (store.Sandbox, error) {
	return s.read().sandboxByName(ctx, t, name)
}

// Sandboxes implements store.Store.
func (s *Store) Sandboxes(ctx context.Context, t tenant.ID, f store.Filter) (store.Page[store.Sandbox], error) {
	if t.IsZero() {
		return store.Page[store.Sandbox]{}, errNoTenant
	}
	list := filterDigest(f)
	from, err := s.parseCursor(t, list, f.Cursor)
	if err != nil {
		return store.Page[store.Sandbox]{}, err
	}
	limit := limits(f.Limit)
	query, args, err := sandboxQuery(t, f, from, limit+1)
	if err != nil || query == "" {
		return store.Page[store.Sandbox]{}, err
	}
	var items []store.Sandbox
	err = s.read().each(ctx, func(rows *sql.Rows) error {
		one, err := scanSandbox(rows.Scan)
		items = append(items, one)
		return err
	}, query, args...)
	if err != nil {
		return store.Page[store.Sandbox]{}, err
	}
	return page(s, t, list, items, limit, func(b store.Sandbox) place {
		return place{micro(b.CreatedAt), string(b.ID)}
	}), nil
}

// filterDigest names a list, so that a cursor of one filter is refused by another.
func filterDigest(f store.Filter) []byte {
	states := make([]string, 0, len(f.States))
	for _, s := range f.States {
		states = append(states, string(s))
	}
	slices.Sort(states)
	var pairs []string
	for _, k := range slices.Sorted(maps.Keys(f.Metadata)) {
		pairs = append(pairs, k, f.Metadata[k])
	}
	return digest("sandboxes", string(digest(slices.Compact(states)...)), string(digest(pairs...)), fmt.Sprint(f.Deleted))
}

// sandboxQuery builds the list statement; "" when the filter can match nothing.
// Each form reads at most limit rows of an index that is already in the list's
// order, so that its cost does not depend on how many rows there are: the plan
// test in storetest holds it to that.
func sandboxQuery(t tenant.ID, f store.Filter, from *place, limit int) (string, []any, error) {
	if len(f.Metadata) > maxPairs {
		return "", nil, fmt.Errorf("store: filter has %d metadata pairs, at most %d", len(f.Metadata), maxPairs)
	}
	var states []string
	for _, s := range f.States {
		if possible(string(s)) && !slices.Contains(states, string(s)) && known[s] {
			states = append(states, string(s))
		}
	}
	if len(f.States) > 0 && len(states) == 0 {
		return "", nil, nil
	}
	living := " AND s.deleted_at IS NULL"
	if f.Deleted {
		living = ""
	}
	if len(f.Metadata) > 0 {
		return labelQuery(t, f, states, from, limit)
	}
	cond, condArgs := before(from, "s.created_at", "s.id")
	const order = ` ORDER BY s.created_at DESC, s.id DESC`
	if len(states) == 0 {
		args := append([]any{t.String()}, condArgs...)
		return sandboxColumns + `sandboxes s WHERE s.tenant = ?` + living + cond + order + limitSQL(limit), args, nil
	}
	var parts []string
	var args []any
	for _, st := range states {
		parts = append(parts, `SELECT * FROM (SELECT s.tenant, s.revision, s.doc, s.created_at, s.id FROM sandboxes s WHERE s.tenant = ? AND s.observed = ?`+
			living+cond+order+limitSQL(limit)+`) u`)
		args = append(append(args, t.String(), st), condArgs...)
	}
	return `SELECT tenant, revision, doc FROM (` + strings.Join(parts, " UNION ALL ") + `) u ORDER BY created_at DESC, id DESC` + limitSQL(limit), args, nil
}

// labelQuery walks the index of one pair and checks the others row by row.
func labelQuery(t tenant.ID, f store.Filter, states []string, from *place, limit int) (string, []any, error) {
	keys := slices.Sorted(maps.Keys(f.Metadata))
	query := sandboxColumns + `labels l JOIN sandboxes s ON s.id = l.sandbox AND s.tenant = l.tenant WHERE l.tenant = ? AND l.pair = ?`
	args := []any{t.String(), digest(keys[0], f.Metadata[keys[0]])}
	if !f.Deleted {
		query += ` AND l.living = 1`
	}
	for _, k := range keys[1:] {
		query += ` AND EXISTS (SELECT 1 FROM labels m WHERE m.sandbox = l.sandbox AND m.pair = ?)`
		args = append(args, digest(k, f.Metadata[k]))
	}
	if len(states) > 0 {
		query += ` AND s.observed IN (?` + strings.Repeat(", ?", len(states)-1) + `)`
		for _, st := range states {
			args = append(args, st)
		}
	}
	cond, condArgs := before(from, "l.created_at", "l.sandbox")
	return query + cond + ` ORDER BY l.created_at DESC, l.sandbox DESC` + limitSQL(limit), append(args, condArgs...), nil
}

// known are the states a row can be observed in.
var known = map[sandbox.State]bool{
	sandbox.Running: true, sandbox.Paused: true, sandbox.Suspended: true, sandbox.Stopped: true,
	sandbox.Deleted: true, sandbox.Creating: true, sandbox.Pausing: true, sandbox.Resuming: true,
	sandbox.Suspending: true, sandbox.Restoring: true, sandbox.Starting: true, sandbox.Stopping: true,
	sandbox.Deleting: true, sandbox.Failed: true, sandbox.Quarantined: true,
}

func (x *tx) Sandbox(id sandbox.ID) (store.Sandbox, error) {
	if err := x.usable(); err != nil {
		return store.Sandbox{}, err
	}
	s, err := x.r.sandbox(x.ctx, x.t, id)
	return s, x.note(err)
}

func (x *tx) SandboxByName(name string) (store.Sandbox, error) {
	if err := x.usable(); err != nil {
		return store.Sandbox{}, err
	}
	s, err := x.r.sandboxByName(x.ctx, x.t, name)
	return s, x.note(err)
}

func (x *tx) InsertSandbox(s store.Sandbox) error {
	if err := x.usable(); err != nil {
		return err
	}
	if s.Tenant != x.t {
		return errOtherOwner
	}
	if !possible(string(s.ID)) || s.ID == "" {
		return fmt.Errorf("store: sandbox id is not valid")
	}
	if !known[s.Observed] {
		return fmt.Errorf("store: unknown observed state %q", s.Observed)
	}
	generation, err1 := number(s.Generation)
	converged, err2 := number(s.Converged)
	doc, err3 := encode(docOf(s))
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	n, err := x.r.exec(x.ctx, `INSERT INTO sandboxes (id, tenant, name_hash, observed, generation, converged, created_at, updated_at, deleted_at, revision, doc)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?) ON CONFLICT DO NOTHING`,
		string(s.ID), x.t.String(), nameHash(s.Name), string(s.Observed), generation, converged,
		micro(s.CreatedAt), micro(s.UpdatedAt), stamp(s.DeletedAt), doc)
	if err != nil {
		return x.note(err)
	}
	if n == 0 {
		return fmt.Errorf("sandbox id or name: %w", store.ErrExists)
	}
	return x.note(x.insertLabels(s))
}

func (x *tx) insertLabels(s store.Sandbox) error {
	for _, k := range slices.Sorted(maps.Keys(s.Metadata)) {
		if _, err := x.r.exec(x.ctx, `INSERT INTO labels (sandbox, tenant, pair, living, created_at) VALUES (?, ?, ?, ?, ?)`,
			string(s.ID), x.t.String(), digest(k, s.Metadata[k]), flag(s.DeletedAt.IsZero()), micro(s.CreatedAt)); err != nil {
			return err
		}
	}
	return nil
}

func (x *tx) UpdateSandbox(s store.Sandbox) error {
	if err := x.usable(); err != nil {
		return err
	}
	if s.Tenant != x.t {
		return notFound("sandbox", sql.ErrNoRows)
	}
	old, err := x.Sandbox(s.ID)
	if err != nil {
		return err
	}
	if old.Revision != s.Revision || s.Generation < old.Generation {
		return fmt.Errorf("sandbox %s: %w", s.ID, store.ErrConflict)
	}
	if !norm(s.CreatedAt).Equal(old.CreatedAt) {
		return fmt.Errorf("store: the creation time of a sandbox never changes")
	}
	if !known[s.Observed] {
		return fmt.Errorf("store: unknown observed state %q", s.Observed)
	}
	if s.Name != "" && s.DeletedAt.IsZero() && (s.Name != old.Name || !old.DeletedAt.IsZero()) {
		// Asked for beforehand because a violated index would end a PostgreSQL
		// transaction; nobody can take the name in between (guarantee 1 of this package).
		switch other, err := x.SandboxByName(s.Name); {
		case err == nil && other.ID != s.ID:
			return fmt.Errorf("sandbox name: %w", store.ErrExists)
		case err != nil && !errors.Is(err, store.ErrNotFound):
			return err
		}
	}
	generation, err1 := number(s.Generation)
	converged, err2 := number(s.Converged)
	doc, err3 := encode(docOf(s))
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	n, err := x.r.exec(x.ctx, `UPDATE sandboxes SET name_hash = ?, observed = ?, generation = ?, converged = ?, updated_at = ?, deleted_at = ?, revision = revision + 1, doc = ?
		WHERE tenant = ? AND id = ? AND revision = ? AND generation <= ?`,
		nameHash(s.Name), string(s.Observed), generation, converged, micro(s.UpdatedAt), stamp(s.DeletedAt), doc,
		x.t.String(), string(s.ID), int64(old.Revision), generation)
	if err != nil {
		return x.note(err)
	}
	if n == 0 {
		return fmt.Errorf("sandbox %s: %w", s.ID, store.ErrConflict)
	}
	return x.note(x.updateLabels(old, s))
}

func (x *tx) updateLabels(old, s store.Sandbox) error {
	if maps.Equal(old.Metadata, s.Metadata) {
		if len(s.Metadata) == 0 || old.DeletedAt.IsZero() == s.DeletedAt.IsZero() {
			return nil
		}
		_, err := x.r.exec(x.ctx, `UPDATE labels SET living = ? WHERE tenant = ? AND sandbox = ?`,
			flag(s.DeletedAt.IsZero()), x.t.String(), string(s.ID))
		return err
	}
	if _, err := x.r.exec(x.ctx, `DELETE FROM labels WHERE tenant = ? AND sandbox = ?`, x.t.String(), string(s.ID)); err != nil {
		return err
	}
	return x.insertLabels(s)
}

func (x *tx) CountSandboxes() (int, error) {
	if err := x.usable(); err != nil {
		return 0, err
	}
	var n int
	err := x.r.row(x.ctx, `SELECT count(*) FROM sandboxes WHERE tenant = ? AND deleted_at IS NULL`, x.t.String()).Scan(&n)
	return n, x.note(err)
}
