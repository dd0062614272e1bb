package storetest

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

func testKeys(t *testing.T, e *env) {
	k := e.key("a")
	k.Tenant = e.a
	put := func(k store.Key) error {
		return e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.InsertKey(k) })
	}
	if err := put(k); err != nil {
		t.Fatal(err)
	}
	want(t, put(k), store.ErrExists)
	same := e.key("a")
	same.Tenant, same.Hash = e.a, k.Hash
	want(t, put(same), store.ErrExists)

	// Use is written at most once a minute.
	y := e.s.System()
	for _, step := range []struct{ at, want time.Duration }{{0, 0}, {59 * time.Second, 0}, {60 * time.Second, 60 * time.Second}} {
		if err := y.TouchKey(t.Context(), k, epoch.Add(step.at)); err != nil {
			t.Fatal(err)
		}
		got, err := y.KeyByHash(t.Context(), k.Hash)
		if err != nil || !got.LastUsedAt.Equal(epoch.Add(step.want)) {
			t.Errorf("touched at %v: last used %v (%v), want %v", step.at, got.LastUsedAt, err, step.want)
		}
	}
	_, err := y.KeyByHash(t.Context(), []byte("unknown"))
	want(t, err, store.ErrNotFound)
	_, err = y.KeyByHash(t.Context(), nil)
	want(t, err, store.ErrNotFound)

	update := func(k store.Key) error {
		return e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.UpdateKey(k) })
	}
	k.RevokedAt, k.Name = e.at(), "renamed"
	if err := update(k); err != nil {
		t.Fatal(err)
	}
	if got, err := y.KeyByHash(t.Context(), k.Hash); err != nil || !got.RevokedAt.Equal(k.RevokedAt) || got.Name != "renamed" {
		t.Errorf("after revoke: %+v, %v", got, err)
	}
	back := k
	back.RevokedAt = time.Time{}
	want(t, update(back), store.ErrConflict)
	later := k
	later.RevokedAt = e.at()
	want(t, update(later), store.ErrConflict)
	missing := e.key("a")
	missing.Tenant = e.a
	want(t, update(missing), store.ErrNotFound)

	for range 4 {
		k := e.key("a")
		k.Tenant = e.a
		if err := put(k); err != nil {
			t.Fatal(err)
		}
	}
	all := walk(t, func(c string) (store.Page[store.Key], error) { return e.s.Keys(t.Context(), e.a, c, 2) })
	if len(all) != 5 || !slices.IsSortedFunc(all, func(a, b store.Key) int { return b.CreatedAt.Compare(a.CreatedAt) }) {
		t.Errorf("keys: %d in the list, want 5, newest first", len(all))
	}
}

func testRestart(t *testing.T, e *env) {
	s := e.insert(t, e.a, func(s *store.Sandbox) { s.Name = "kept"; s.Metadata = map[string]string{"a": "b"} })
	e.insert(t, e.a, nil)
	e.mutate(t, e.a, func(tx store.Tx) error {
		return errors.Join(tx.Audit(e.entry("one")), tx.InsertIdempotency(store.Idempotency{Principal: "p", Key: "k", Method: "POST", Route: "/", Resource: string(s.ID), CreatedAt: epoch}))
	})
	first, err := e.s.Sandboxes(t.Context(), e.a, store.Filter{Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	second, err := e.open()
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	e.s = e.another(t)
	equal(t, e.get(t, e.a, s.ID), s)
	e.mutate(t, e.a, func(tx store.Tx) error {
		i, err := tx.Idempotency("p", "k", "POST", "/")
		if i.Resource != string(s.ID) {
			t.Errorf("idempotency row after restart: %+v", i)
		}
		return errors.Join(err, tx.Audit(e.entry("two")))
	})
	// A cursor from before the restart goes on.
	next, err := e.s.Sandboxes(t.Context(), e.a, store.Filter{Limit: 1, Cursor: first.Next})
	if err != nil || len(next.Items) != 1 || next.Items[0].ID != s.ID {
		t.Errorf("page after restart: %v, %v", ids(next.Items), err)
	}
	e.verify(t, 2)
}

// testForeignTenant tries every method with the ids of another tenant: the answer
// equals the one for an id that does not exist.
func testForeignTenant(t *testing.T, e *env) {
	s := e.insert(t, e.a, func(s *store.Sandbox) { s.Name = "mine"; s.Metadata = map[string]string{"k": "v"} })
	e.insert(t, e.a, func(s *store.Sandbox) { s.Metadata = map[string]string{"k": "v"} })
	o, k := e.operation(s.ID), e.key("a")
	o2 := e.operation(s.ID)
	k2 := e.key("a")
	k.Tenant, k2.Tenant = e.a, e.a
	e.mutate(t, e.a, func(tx store.Tx) error {
		return errors.Join(tx.InsertOperation(o), tx.InsertOperation(o2), tx.InsertKey(k), tx.InsertKey(k2), tx.Audit(e.entry("one")), tx.Audit(e.entry("two")),
			tx.InsertIdempotency(store.Idempotency{Principal: "p", Key: "k", Method: "POST", Route: "/", CreatedAt: epoch}))
	})
	ctx := t.Context()
	pair := func(what string, foreign, unknown error) {
		t.Helper()
		if !errors.Is(foreign, store.ErrNotFound) {
			t.Errorf("%s of another tenant: %v, want not found", what, foreign)
		}
		if unknown != nil && foreign != nil && strings.ReplaceAll(foreign.Error(), string(s.ID), "") != strings.ReplaceAll(unknown.Error(), "inowhere", "") {
			t.Errorf("%s of another tenant says %q, an unknown one %q", what, foreign, unknown)
		}
	}
	_, err := e.s.Sandbox(ctx, e.b, s.ID)
	_, none := e.s.Sandbox(ctx, e.b, "inowhere")
	pair("Sandbox", err, none)
	_, err = e.s.SandboxByName(ctx, e.b, "mine")
	_, none = e.s.SandboxByName(ctx, e.b, "nobody")
	pair("SandboxByName", err, none)
	_, err = e.s.Operation(ctx, e.b, o.ID)
	_, none = e.s.Operation(ctx, e.b, "opnowhere")
	pair("Operation", err, none)

	// Lists are empty, whatever narrows them, and A's cursors are not B's.
	for _, f := range []store.Filter{{}, {Deleted: true}, {Metadata: s.Metadata}, {States: []sandbox.State{s.Observed}}} {
		p, err := e.s.Sandboxes(ctx, e.b, f)
		if err != nil || len(p.Items) != 0 {
			t.Errorf("Sandboxes %+v of another tenant: %d rows, %v", f, len(p.Items), err)
		}
		f.Limit = 1
		p, err = e.s.Sandboxes(ctx, e.a, f)
		if err != nil || p.Next == "" {
			t.Fatalf("Sandboxes %+v: no second page (%v)", f, err)
		}
		f.Cursor = p.Next
		_, err = e.s.Sandboxes(ctx, e.b, f)
		want(t, err, store.ErrBadCursor)
	}
	for _, id := range []sandbox.ID{"", s.ID} {
		p, err := e.s.Operations(ctx, e.b, id, "", 0)
		if err != nil || len(p.Items) != 0 {
			t.Errorf("Operations(%q) of another tenant: %d rows, %v", id, len(p.Items), err)
		}
		mine, err := e.s.Operations(ctx, e.a, id, "", 1)
		if err != nil {
			t.Fatal(err)
		}
		_, err = e.s.Operations(ctx, e.b, id, mine.Next, 1)
		want(t, err, store.ErrBadCursor)
	}
	keys, err := e.s.Keys(ctx, e.b, "", 0)
	if err != nil || len(keys.Items) != 0 {
		t.Errorf("Keys of another tenant: %d, %v", len(keys.Items), err)
	}
	keys, err = e.s.Keys(ctx, e.a, "", 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.s.Keys(ctx, e.b, keys.Next, 1)
	want(t, err, store.ErrBadCursor)
	records, err := e.s.AuditEntries(ctx, e.b, "", 0)
	if err != nil || len(records.Items) != 0 {
		t.Errorf("AuditEntries of another tenant: %d, %v", len(records.Items), err)
	}
	records, err = e.s.AuditEntries(ctx, e.a, "", 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.s.AuditEntries(ctx, e.b, records.Next, 1)
	want(t, err, store.ErrBadCursor)

	e.mutate(t, e.b, func(tx store.Tx) error {
		_, err := tx.Sandbox(s.ID)
		pair("tx.Sandbox", err, nil)
		_, err = tx.SandboxByName("mine")
		pair("tx.SandboxByName", err, nil)
		_, err = tx.Operation(o.ID)
		pair("tx.Operation", err, nil)
		_, err = tx.Key(k.ID)
		pair("tx.Key", err, nil)
		_, err = tx.Idempotency("p", "k", "POST", "/")
		pair("tx.Idempotency", err, nil)
		pair("tx.UpdateSandbox", tx.UpdateSandbox(s), nil)
		stolen := s
		stolen.Tenant = e.b
		pair("tx.UpdateSandbox with a changed owner", tx.UpdateSandbox(stolen), nil)
		pair("tx.UpdateOperation", tx.UpdateOperation(o), nil)
		pair("tx.UpdateKey", tx.UpdateKey(k), nil)
		key := k
		key.Tenant = e.b
		pair("tx.UpdateKey with a changed owner", tx.UpdateKey(key), nil)
		if got, err := tx.OpenOperations(s.ID); err != nil || len(got) != 0 {
			t.Errorf("tx.OpenOperations of another tenant: %d, %v", len(got), err)
		}
		if n, err := tx.CountSandboxes(); err != nil || n != 0 {
			t.Errorf("tx.CountSandboxes counts %d of another tenant (%v)", n, err)
		}
		if tx.InsertSandbox(e.sandbox(e.a)) == nil || tx.InsertKey(e.foreignKey()) == nil {
			t.Error("wrote a row for another tenant")
		}
		entry := e.entry("x")
		entry.Tenant = "a"
		if tx.Audit(entry) == nil {
			t.Error("wrote an audit entry for another tenant")
		}
		return nil
	})
	equal(t, e.get(t, e.a, s.ID), s)
	touched := k
	touched.Tenant = e.b
	if err := e.s.System().TouchKey(ctx, touched, epoch); err != nil {
		t.Fatal(err)
	}
	if got, err := e.s.System().KeyByHash(ctx, k.Hash); err != nil || !got.LastUsedAt.IsZero() {
		t.Errorf("TouchKey reached another tenant's key: %+v, %v", got, err)
	}
}

func (e *env) foreignKey() store.Key {
	k := e.key("a")
	k.Tenant = e.a
	return k
}

func testNoTenant(t *testing.T, e *env) {
	var no tenant.ID
	ctx := t.Context()
	_, err1 := e.s.Sandbox(ctx, no, "i")
	_, err2 := e.s.SandboxByName(ctx, no, "n")
	_, err3 := e.s.Sandboxes(ctx, no, store.Filter{})
	_, err4 := e.s.Operation(ctx, no, "o")
	_, err5 := e.s.Operations(ctx, no, "", "", 0)
	_, err6 := e.s.Keys(ctx, no, "", 0)
	_, err7 := e.s.AuditEntries(ctx, no, "", 0)
	err8 := e.s.Mutate(ctx, no, func(store.Tx) error { t.Error("fn ran without a tenant"); return nil })
	for i, err := range []error{err1, err2, err3, err4, err5, err6, err7, err8} {
		if err == nil || errors.Is(err, store.ErrNotFound) {
			t.Errorf("method %d with no tenant: %v, want a refusal", i+1, err)
		}
	}
	for _, name := range []string{"", "A", "a b", "a'", strings.Repeat("a", 64)} {
		if _, err := e.s.System().EnsureTenant(ctx, name); err == nil {
			t.Errorf("tenant %q was made", name)
		}
	}
	again, err := e.s.System().EnsureTenant(ctx, "a")
	if err != nil || again != e.a {
		t.Errorf("EnsureTenant again: %v, %v", again, err)
	}
}

// testPages is C-062: 25 rows, pages of 10, others come and go meanwhile.
func testPages(t *testing.T, e *env) {
	shared := e.at() // many rows of one instant: the id decides
	keep := map[sandbox.ID]int{}
	var doomed []store.Sandbox
	for i := range 25 {
		s := e.insert(t, e.a, func(s *store.Sandbox) {
			if i%2 == 0 {
				s.CreatedAt = shared
			}
			s.Metadata = map[string]string{"app": "x"}
		})
		keep[s.ID] = 0
		doomed = append(doomed, e.insert(t, e.a, func(s *store.Sandbox) { s.Metadata = map[string]string{"app": "x"} }))
	}
	for _, f := range []store.Filter{
		{Limit: 10}, {Limit: 10, Metadata: map[string]string{"app": "x"}},
		{Limit: 7, States: []sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Creating}}, {Limit: 10, Deleted: true},
	} {
		for id := range keep {
			keep[id] = 0
		}
		seen := map[sandbox.ID]int{}
		pages := 0
		for _, s := range walk(t, func(c string) (store.Page[store.Sandbox], error) {
			f.Cursor = c
			p, err := e.s.Sandboxes(t.Context(), e.a, f)
			if len(p.Items) > f.Limit || (p.Next != "" && len(p.Items) != f.Limit) {
				t.Errorf("a page of %d, limit %d, next %q", len(p.Items), f.Limit, p.Next)
			}
			pages++
			// The row that the cursor names goes away, another goes, one comes.
			if n := len(p.Items); n > 0 && p.Next != "" {
				if last := p.Items[n-1]; keep[last.ID] == 0 && seen[last.ID] == 0 && !inKeep(keep, last.ID) {
					e.remove(t, last)
				}
			}
			if len(doomed) > 0 {
				e.remove(t, doomed[0])
				doomed = doomed[1:]
			}
			e.insert(t, e.a, func(s *store.Sandbox) { s.Metadata = map[string]string{"app": "x"} })
			return p, err
		}) {
			if seen[s.ID]++; seen[s.ID] > 1 {
				t.Errorf("filter %+v: %s twice", f, s.ID)
			}
		}
		for id := range keep {
			if seen[id] != 1 {
				t.Errorf("filter %+v: a row that was there all the time was listed %d times", f, seen[id])
			}
		}
		if pages < 3 {
			t.Errorf("only %d pages", pages)
		}
	}
	// An exact multiple ends without an empty page.
	two, err := e.s.Sandboxes(t.Context(), e.b, store.Filter{})
	if err != nil || two.Next != "" || len(two.Items) != 0 {
		t.Errorf("empty list: %+v, %v", two, err)
	}
	e.insert(t, e.b, nil)
	e.insert(t, e.b, nil)
	two, err = e.s.Sandboxes(t.Context(), e.b, store.Filter{Limit: 2})
	if err != nil || two.Next != "" || len(two.Items) != 2 {
		t.Errorf("exactly one page: %d rows, next %q, %v", len(two.Items), two.Next, err)
	}
}

func inKeep(keep map[sandbox.ID]int, id sandbox.ID) bool { _, ok := keep[id]; return ok }

// remove makes a tombstone, if the row is not one already.
func (e *env) remove(t *testing.T, s store.Sandbox) {
	t.Helper()
	s = e.get(t, e.a, s.ID)
	if !s.DeletedAt.IsZero() {
		return
	}
	s.DeletedAt, s.Observed = e.at(), sandbox.Deleted
	e.mutate(t, e.a, func(tx store.Tx) error { return tx.UpdateSandbox(s) })
}

// testFilters is C-063: a filter never widens.
func testFilters(t *testing.T, e *env) {
	one := e.insert(t, e.a, func(s *store.Sandbox) {
		s.Metadata = map[string]string{"app": "one", "env": "test"}
		s.Observed = sandbox.Running
	})
	two := e.insert(t, e.a, func(s *store.Sandbox) {
		s.Metadata = map[string]string{"app": "two", "env": "test", "": "", "k\x00": "v\x00"}
	})
	e.insert(t, e.a, nil)
	meta := func(kv ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		return m
	}
	list := func(f store.Filter) string {
		t.Helper()
		p, err := e.s.Sandboxes(t.Context(), e.a, f)
		if err != nil {
			t.Fatalf("filter %+v: %v", f, err)
		}
		return ids(p.Items)
	}
	for _, c := range []struct {
		f    store.Filter
		want []store.Sandbox
	}{
		{store.Filter{Metadata: meta("app", "one")}, []store.Sandbox{one}},
		{store.Filter{Metadata: meta("env", "test")}, []store.Sandbox{two, one}},
		{store.Filter{Metadata: meta("env", "test", "app", "two")}, []store.Sandbox{two}},
		{store.Filter{Metadata: meta("", "")}, []store.Sandbox{two}},
		{store.Filter{Metadata: meta("k\x00", "v\x00")}, []store.Sandbox{two}},
		{store.Filter{Metadata: meta("env", "test"), States: []sandbox.State{sandbox.Running}}, []store.Sandbox{one}},
		{store.Filter{States: []sandbox.State{sandbox.Running}}, []store.Sandbox{one}},
		{store.Filter{States: []sandbox.State{sandbox.Running, "dreaming"}}, []store.Sandbox{one}},
		// Nothing, each of them.
		{store.Filter{Metadata: meta("app", "unknown")}, nil},
		{store.Filter{Metadata: meta("unknown", "one")}, nil},
		{store.Filter{Metadata: meta("app", "ONE")}, nil},
		{store.Filter{Metadata: meta("app", "on%")}, nil},
		{store.Filter{Metadata: meta("app", "")}, nil},
		{store.Filter{Metadata: meta("app", "one", "env", "prod")}, nil},
		{store.Filter{Metadata: meta("a", "ppone")}, nil},
		{store.Filter{Metadata: meta("app", "one'--")}, nil},
		{store.Filter{Metadata: meta("\xff", "\xff")}, nil},
		{store.Filter{States: []sandbox.State{sandbox.Quarantined}}, nil},
		{store.Filter{States: []sandbox.State{"dreaming"}}, nil},
		{store.Filter{States: []sandbox.State{"nul\x00"}}, nil},
		{store.Filter{States: []sandbox.State{""}}, nil},
		{store.Filter{Metadata: meta("env", "test"), States: []sandbox.State{sandbox.Stopped}}, nil},
	} {
		if got := list(c.f); got != ids(c.want) {
			t.Errorf("filter %+v lists %q, want %q", c.f, got, ids(c.want))
		}
	}
	// Changed metadata is found by the new value only.
	one.Metadata = meta("app", "three")
	e.mutate(t, e.a, func(tx store.Tx) error { return tx.UpdateSandbox(one) })
	if list(store.Filter{Metadata: meta("app", "one")}) != "" || list(store.Filter{Metadata: meta("app", "three")}) != ids([]store.Sandbox{one}) {
		t.Error("the filter follows old metadata")
	}
}

func testCursors(t *testing.T, e *env) {
	for range 4 {
		e.insert(t, e.a, func(s *store.Sandbox) { s.Metadata = map[string]string{"k": "v"} })
	}
	plain, err := e.s.Sandboxes(t.Context(), e.a, store.Filter{Limit: 2})
	if err != nil {
		t.Fatal(err)
	}
	good := plain.Next
	raw, err := base64.RawURLEncoding.DecodeString(good)
	if err != nil {
		t.Fatal(err)
	}
	bad := []string{"x", "!", good + "A", good[:len(good)-1], good + "=", " " + good, strings.Repeat("A", 5000), "\x00", "\xff", "AAAA"}
	for i := range raw {
		forged := bytes.Clone(raw)
		forged[i] ^= 1
		bad = append(bad, base64.RawURLEncoding.EncodeToString(forged))
	}
	for _, c := range bad {
		_, err := e.s.Sandboxes(t.Context(), e.a, store.Filter{Cursor: c})
		if !errors.Is(err, store.ErrBadCursor) {
			t.Errorf("cursor %.40q: %v, want bad cursor", c, err)
		}
		for _, f := range []store.Filter{{Cursor: c, States: []sandbox.State{"dreaming"}}} {
			if _, err := e.s.Sandboxes(t.Context(), e.a, f); !errors.Is(err, store.ErrBadCursor) {
				t.Errorf("cursor %.40q with an empty filter: %v", c, err)
			}
		}
		_, err1 := e.s.Operations(t.Context(), e.a, "", c, 1)
		_, err2 := e.s.Keys(t.Context(), e.a, c, 1)
		_, err3 := e.s.AuditEntries(t.Context(), e.a, c, 1)
		for _, err := range []error{err1, err2, err3} {
			want(t, err, store.ErrBadCursor)
		}
	}
	// A good cursor works for its own list only, with any page size.
	for _, f := range []store.Filter{
		{Metadata: map[string]string{"k": "v"}}, {Deleted: true}, {States: []sandbox.State{sandbox.Creating}},
	} {
		f.Cursor = good
		_, err := e.s.Sandboxes(t.Context(), e.a, f)
		want(t, err, store.ErrBadCursor)
	}
	_, err = e.s.Operations(t.Context(), e.a, "", good, 1)
	want(t, err, store.ErrBadCursor)
	p, err := e.s.Sandboxes(t.Context(), e.a, store.Filter{Cursor: good, Limit: 1000})
	if err != nil || len(p.Items) != 2 {
		t.Errorf("the rest of the list: %d rows, %v", len(p.Items), err)
	}
}

// verify walks the whole chain.
func (e *env) verify(t *testing.T, n int) []audit.Record {
	t.Helper()
	var all []audit.Record
	for {
		part, err := e.s.System().AuditAll(t.Context(), uint64(len(all)+1), 7)
		if err != nil {
			t.Fatal(err)
		}
		if len(part) == 0 {
			break
		}
		all = append(all, part...)
	}
	if len(all) != n {
		t.Fatalf("audit has %d records, want %d", len(all), n)
	}
	var prev audit.Record
	for i, r := range all {
		again, err := audit.Next(r.Chain, prev.Seq, prev.Hash, r.Entry)
		if err != nil || again.Seq != r.Seq || !bytes.Equal(again.Hash, r.Hash) || !bytes.Equal(again.Prev, r.Prev) {
			t.Fatalf("record %d does not chain: %+v (%v)", i+1, r, err)
		}
		prev = r
	}
	return all
}

func testAudit(t *testing.T, e *env) {
	for i, text := range hostile {
		e.mutate(t, e.a, func(tx store.Tx) error {
			entry := e.entry("act")
			entry.Target, entry.Request = text, text+"\xff" // broken text must not break the chain
			entry.Detail = map[string]string{text: text, "n": fmt.Sprint(i)}
			entry.At = entry.At.In(time.FixedZone("east", 3600)).Add(77)
			return errors.Join(tx.Audit(entry), tx.Audit(e.entry("second")))
		})
	}
	e.mutate(t, e.b, func(tx store.Tx) error { return tx.Audit(e.entry("b")) })
	n := 2*len(hostile) + 1
	all := e.verify(t, n)
	mine := walk(t, func(c string) (store.Page[audit.Record], error) { return e.s.AuditEntries(t.Context(), e.a, c, 3) })
	if len(mine) != n-1 || mine[0].Seq != all[n-2].Seq || mine[len(mine)-1].Seq != 1 {
		t.Errorf("the tenant's part has %d records, want %d, newest first", len(mine), n-1)
	}
	for _, bad := range []audit.Entry{{}, {At: epoch, Actor: "a"}, {At: epoch, Action: "a"}, {Actor: "a", Action: "a"}} {
		if err := e.s.Mutate(t.Context(), e.a, func(tx store.Tx) error { return tx.Audit(bad) }); err == nil {
			t.Errorf("audited %+v", bad)
		}
	}
}

func testAuditRace(t *testing.T, e *env) {
	clients := []store.Store{e.s, e.another(t)}
	var wg sync.WaitGroup
	for i := range 6 {
		owner := []tenant.ID{e.a, e.b}[i%2] // PostgreSQL locks by tenant: the head must hold across them
		wg.Go(func() {
			for n := range 10 {
				err := clients[(i/2)%2].Mutate(t.Context(), owner, func(tx store.Tx) error {
					if err := tx.InsertSandbox(sandboxAt(owner, epoch)); err != nil {
						return err
					}
					return tx.Audit(audit.Entry{At: epoch, Actor: "k", Action: "a", Target: fmt.Sprint(i, n)})
				})
				if err != nil {
					t.Errorf("mutate: %v", err)
				}
			}
		})
	}
	wg.Wait()
	e.verify(t, 60)
}

func testUnsettled(t *testing.T, e *env) {
	done := func(s *store.Sandbox) { s.Converged = s.Generation }
	behind := e.insert(t, e.a, nil)
	settled := e.insert(t, e.b, done)
	withOp := e.insert(t, e.b, done)
	both := e.insert(t, e.a, nil)
	o1, o2, o3 := e.operation(withOp.ID), e.operation(both.ID), e.operation(settled.ID)
	o3.State = operation.Succeeded
	e.mutate(t, e.b, func(tx store.Tx) error { return errors.Join(tx.InsertOperation(o1), tx.InsertOperation(o3)) })
	e.mutate(t, e.a, func(tx store.Tx) error { return tx.InsertOperation(o2) })
	y := e.s.System()
	got, err := y.Unsettled(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, got, []store.Ref{{Tenant: e.a, ID: behind.ID}, {Tenant: e.b, ID: withOp.ID}, {Tenant: e.a, ID: both.ID}})
	got, err = y.Unsettled(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, got, []store.Ref{{Tenant: e.a, ID: behind.ID}})

	got, err = y.OverdueOperations(t.Context(), o1.DeadlineAt.Add(time.Microsecond), 10)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, got, []store.Ref{{Tenant: e.b, ID: withOp.ID}})
	if got, err = y.OverdueOperations(t.Context(), o1.DeadlineAt.Add(-time.Second), 10); err != nil || len(got) != 0 {
		t.Errorf("overdue before the deadline: %v, %v", got, err)
	}
	if got, err = y.OverdueOperations(t.Context(), epoch.Add(time.Hour), 10); err != nil || len(got) != 2 {
		t.Errorf("overdue in an hour: %v, %v; the final one must not be there", got, err)
	}

	// Living walks everything once, in the order of ids.
	var after sandbox.ID
	seen := []sandbox.ID{}
	for {
		refs, err := y.Living(t.Context(), after, 3)
		if err != nil {
			t.Fatal(err)
		}
		if len(refs) == 0 {
			break
		}
		for _, r := range refs {
			seen = append(seen, r.ID)
		}
		after = refs[len(refs)-1].ID
	}
	if len(seen) != 4 || !slices.IsSorted(seen) {
		t.Errorf("living: %v", seen)
	}
	found, err := y.FindSandbox(t.Context(), withOp.ID)
	if err != nil || found.Tenant != e.b {
		t.Errorf("found %+v, %v", found, err)
	}
	_, err = y.FindSandbox(t.Context(), "inowhere")
	want(t, err, store.ErrNotFound)
}

func testPurge(t *testing.T, e *env) {
	dead := func(at time.Time) func(*store.Sandbox) {
		return func(s *store.Sandbox) {
			s.DeletedAt, s.Observed, s.Metadata = at, sandbox.Deleted, map[string]string{"k": "v"}
		}
	}
	old, young := epoch, epoch.Add(time.Hour)
	limit := epoch.Add(time.Minute)
	gone := e.insert(t, e.a, dead(old))
	kept := e.insert(t, e.a, dead(young))
	busy := e.insert(t, e.b, dead(old))
	alive := e.insert(t, e.a, nil)
	op := func(id sandbox.ID, s operation.State, at time.Time) operation.Operation {
		o := e.operation(id)
		o.State, o.UpdatedAt = s, at
		return o
	}
	oldOp, youngOp, openOp := op(alive.ID, operation.Failed, old), op(alive.ID, operation.Succeeded, young), op(busy.ID, operation.Running, old)
	e.mutate(t, e.b, func(tx store.Tx) error { return tx.InsertOperation(openOp) })
	e.mutate(t, e.a, func(tx store.Tx) error {
		return errors.Join(tx.InsertOperation(oldOp), tx.InsertOperation(youngOp), tx.Audit(e.entry("kept")),
			tx.InsertIdempotency(store.Idempotency{Key: "old", CreatedAt: old}), tx.InsertIdempotency(store.Idempotency{Key: "young", CreatedAt: young}))
	})
	n, err := e.s.System().Purge(t.Context(), limit)
	if err != nil || n != 3 {
		t.Fatalf("purged %d, %v; want 3: a tombstone, an operation, an idempotency row", n, err)
	}
	_, err = e.s.Sandbox(t.Context(), e.a, gone.ID)
	want(t, err, store.ErrNotFound)
	_, err = e.s.Operation(t.Context(), e.a, oldOp.ID)
	want(t, err, store.ErrNotFound)
	e.get(t, e.a, kept.ID)
	e.get(t, e.a, alive.ID)
	e.get(t, e.b, busy.ID)
	e.mutate(t, e.a, func(tx store.Tx) error {
		_, err := tx.Idempotency("", "old", "", "")
		want(t, err, store.ErrNotFound)
		_, err = tx.Idempotency("", "young", "", "")
		return err
	})
	e.verify(t, 1) // the audit chain is never purged
}
