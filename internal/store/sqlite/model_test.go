package sqlite_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlite"
	"github.com/space-platform/space/internal/tenant"
)

var errAbort = errors.New("abort")

// model is what the store should hold: two tenants' sandboxes, in memory.
type model struct {
	s    store.Store
	path string
	n    int
	t    [2]tenant.ID
	rows map[sandbox.ID]store.Sandbox
	now  time.Time
}

func (m *model) clone() map[sandbox.ID]store.Sandbox {
	out := make(map[sandbox.ID]store.Sandbox, len(m.rows))
	for k, v := range m.rows {
		out[k] = v
	}
	return out
}

func (m *model) ids() []sandbox.ID {
	var out []sandbox.ID
	for id := range m.rows {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

func living(rows map[sandbox.ID]store.Sandbox, t tenant.ID, name string) (store.Sandbox, bool) {
	for _, r := range rows {
		if r.Tenant == t && r.Name == name && name != "" && r.DeletedAt.IsZero() {
			return r, true
		}
	}
	return store.Sandbox{}, false
}

// TestModel drives random sequences of transactions, aborted ones and restarts
// against the store and the model; what each call answers and what is there
// afterwards must be the same.
func TestModel(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db") // one file for all checks: their tenants differ
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		m := &model{path: path, n: n, rows: map[sandbox.ID]store.Sandbox{}, now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
		m.open(rt)
		defer func() {
			if err := m.s.Close(); err != nil {
				rt.Error(err)
			}
		}()
		rt.Repeat(map[string]func(*rapid.T){
			"":        m.check,
			"mutate":  m.mutate,
			"restart": func(rt *rapid.T) { m.restart(rt) },
		})
	})
}

func (m *model) open(rt *rapid.T) {
	s, err := sqlite.Open(m.path)
	if err != nil {
		rt.Fatal(err)
	}
	m.s = s
	for i, name := range []string{"a", "b"} {
		if m.t[i], err = s.System().EnsureTenant(rt.Context(), fmt.Sprint(name, m.n)); err != nil {
			rt.Fatal(err)
		}
	}
}

func (m *model) restart(rt *rapid.T) {
	if err := m.s.Close(); err != nil {
		rt.Fatal(err)
	}
	m.open(rt)
}

// mutate is one transaction of a few steps, which may be taken back.
func (m *model) mutate(rt *rapid.T) {
	who := m.t[rapid.IntRange(0, 1).Draw(rt, "tenant")]
	abort := rapid.IntRange(0, 3).Draw(rt, "abort") == 0
	before := m.clone()
	err := m.s.Mutate(rt.Context(), who, func(tx store.Tx) error {
		for range rapid.IntRange(1, 4).Draw(rt, "steps") {
			m.step(rt, tx, who)
		}
		if abort {
			return errAbort
		}
		return nil
	})
	switch {
	case abort && !errors.Is(err, errAbort), !abort && err != nil:
		rt.Fatalf("mutate: %v (abort %v)", err, abort)
	case abort:
		m.rows = before
	}
}

var names = []string{"", "web", "api", "🧪"}

func (m *model) step(rt *rapid.T, tx store.Tx, who tenant.ID) {
	m.now = m.now.Add(time.Duration(rapid.IntRange(0, 2).Draw(rt, "time")) * time.Second)
	name := rapid.SampledFrom(names).Draw(rt, "name")
	if len(m.rows) == 0 || rapid.Bool().Draw(rt, "insert") {
		s := store.Sandbox{Tenant: who, ID: sandbox.NewID(), Name: name, Observed: sandbox.Creating, Desired: sandbox.Running,
			Generation: rapid.Uint64Range(0, 3).Draw(rt, "generation"), CreatedAt: m.now, UpdatedAt: m.now,
			Metadata: map[string]string{"k": rapid.SampledFrom(names).Draw(rt, "value")}}
		_, taken := living(m.rows, who, name)
		err := tx.InsertSandbox(s)
		if taken != errors.Is(err, store.ErrExists) || (err != nil && !taken) {
			rt.Fatalf("insert with name %q (taken: %v): %v", name, taken, err)
		}
		if !taken {
			s.Revision = 1
			m.rows[s.ID] = s
		}
		return
	}
	old := m.rows[rapid.SampledFrom(m.ids()).Draw(rt, "row")]
	s := old
	s.Name, s.UpdatedAt = name, m.now
	s.Revision = uint64(int(s.Revision) - rapid.IntRange(0, 1).Draw(rt, "stale"))
	s.Generation = uint64(max(0, int(s.Generation)+rapid.IntRange(-1, 2).Draw(rt, "raise")))
	s.Metadata = map[string]string{"k": rapid.SampledFrom(names).Draw(rt, "value")}
	if rapid.IntRange(0, 3).Draw(rt, "delete") == 0 {
		s.DeletedAt, s.Observed = m.now, sandbox.Deleted
	}
	other, taken := living(m.rows, old.Tenant, s.Name)
	taken = taken && other.ID != s.ID && s.DeletedAt.IsZero()
	var want error
	switch {
	case old.Tenant != who:
		want = store.ErrNotFound
	case s.Revision != old.Revision || s.Generation < old.Generation:
		want = store.ErrConflict
	case taken:
		want = store.ErrExists
	}
	err := tx.UpdateSandbox(s)
	if (want == nil) != (err == nil) || !errors.Is(err, want) {
		rt.Fatalf("update of\n%+v\nto\n%+v: %v, want %v", old, s, err, want)
	}
	if want == nil {
		s.Revision++
		m.rows[s.ID] = s
	}
}

// check compares everything that is there, by every way to read it.
func (m *model) check(rt *rapid.T) {
	for i, t := range m.t {
		got := map[sandbox.ID]store.Sandbox{}
		cursor := ""
		var last store.Sandbox
		for {
			p, err := m.s.Sandboxes(rt.Context(), t, store.Filter{Deleted: true, Limit: 2, Cursor: cursor})
			if err != nil {
				rt.Fatal(err)
			}
			for _, s := range p.Items {
				if last.ID != "" && (s.CreatedAt.After(last.CreatedAt) || (s.CreatedAt.Equal(last.CreatedAt) && s.ID >= last.ID)) {
					rt.Fatalf("%s listed after %s", s.ID, last.ID)
				}
				last = s
				got[s.ID] = s
			}
			if cursor = p.Next; cursor == "" {
				break
			}
		}
		want := map[sandbox.ID]store.Sandbox{}
		alive := 0
		for id, s := range m.rows {
			if s.Tenant == t {
				want[id] = s
				if s.DeletedAt.IsZero() {
					alive++
				}
			}
			one, err := m.s.Sandbox(rt.Context(), t, id)
			if (s.Tenant == t) != (err == nil) || (err == nil && !reflect.DeepEqual(one, s)) {
				rt.Fatalf("tenant %d reads %+v, %v; want %+v", i, one, err, s)
			}
		}
		if !reflect.DeepEqual(got, want) {
			rt.Fatalf("tenant %d has\n%+v\nwant\n%+v", i, got, want)
		}
		listed := 0
		for _, v := range names {
			p, err := m.s.Sandboxes(rt.Context(), t, store.Filter{Metadata: map[string]string{"k": v}, Limit: 1000})
			if err != nil {
				rt.Fatal(err)
			}
			for _, s := range p.Items {
				if s.Metadata["k"] != v || !s.DeletedAt.IsZero() {
					rt.Fatalf("filter k=%q gave %+v", v, s)
				}
			}
			listed += len(p.Items)
			named, err := m.s.SandboxByName(rt.Context(), t, v)
			if row, ok := living(m.rows, t, v); ok != (err == nil) || named.ID != row.ID {
				rt.Fatalf("name %q is %s (%v), want %s", v, named.ID, err, row.ID)
			}
		}
		if listed != alive {
			rt.Fatalf("filters list %d, %d are alive", listed, alive)
		}
	}
}
