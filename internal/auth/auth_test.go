package auth

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/store/sqlite"
	"github.com/space-platform/space/internal/tenant"
)

var hashKey = bytes.Repeat([]byte{9}, 32)

// clockAt is a clock that tests set.
type clockAt struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clockAt) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clockAt) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func (c *clockAt) After(time.Duration) <-chan time.Time { return nil } // nothing polls here

type env struct {
	*Authenticator
	s     store.Store
	clock *clockAt
	log   *bytes.Buffer
	dir   string
	admin Principal
	key   string
}

func newEnv(t *testing.T) *env {
	t.Helper()
	e := &env{clock: &clockAt{now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}, log: &bytes.Buffer{}, dir: t.TempDir()}
	s, err := sqlite.Open(filepath.Join(e.dir, "db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	e.s = s
	e.Authenticator = e.another(t)
	first, err := e.FirstKey(t.Context(), e.dir)
	if err != nil {
		t.Fatal(err)
	}
	e.key = first.Key.Reveal()
	if e.admin, err = e.Verify(t.Context(), e.key); err != nil {
		t.Fatal(err)
	}
	return e
}

// another is one more control process over the same store.
func (e *env) another(t *testing.T) *Authenticator {
	t.Helper()
	a, err := New(Config{Store: e.s, HashKey: hashKey, Clock: e.clock, Log: slog.New(slog.NewTextHandler(e.log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (e *env) mint(t *testing.T, by Principal, w Wish) (store.Key, string) {
	t.Helper()
	k, v, err := e.Mint(t.Context(), by, w)
	if err != nil {
		t.Fatal(err)
	}
	return k, v.Reveal()
}

func (e *env) verify(t *testing.T, key string) Principal {
	t.Helper()
	p, err := e.Verify(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func code(t *testing.T, err error, want string) {
	t.Helper()
	if !fault.IsCode(err, want) {
		t.Fatalf("error is %v, want %s", err, want)
	}
}

func TestScopes(t *testing.T) {
	has := map[Scope][]Scope{
		Admin: Scopes(), SandboxesWrite: {SandboxesRead, SandboxesWrite}, FilesWrite: {FilesRead, FilesWrite},
	}
	for _, s := range Scopes() {
		want := has[s]
		if want == nil {
			want = []Scope{s}
		}
		p := Principal{Scopes: []Scope{s}}
		for _, w := range Scopes() {
			can := slices.Contains(want, w)
			if p.Can(w) != can {
				t.Errorf("%s can %s: %v, want %v", s, w, !can, can)
			}
			if err := p.Require(w); can != (err == nil) || (!can && !fault.IsClass(err, fault.Denied)) {
				t.Errorf("%s requires %s: %v", s, w, err)
			}
			if slices.Contains(p.Granted(), string(w)) != can {
				t.Errorf("%s grants %v", s, p.Granted())
			}
		}
		if p.Can("everything") || p.Can("") {
			t.Errorf("%s can what does not exist", s)
		}
	}
	if (Principal{}).Can(SandboxesRead) {
		t.Error("nobody can read")
	}
}

func TestVerify(t *testing.T) {
	e := newEnv(t)
	if e.admin.Tenant.String() != "default" || !e.admin.Can(Admin) {
		t.Errorf("first key is %+v", e.admin)
	}
	other := "a"
	if strings.HasSuffix(e.key, "a") {
		other = "b"
	}
	for _, bad := range []string{"", "spk_", e.key + "a", e.key[:43], e.key[:43] + other, strings.ToUpper(e.key), " " + e.key, e.key + "\n", "Bearer " + e.key, strings.Repeat("x", 1<<20)} {
		_, err := e.Verify(t.Context(), bad)
		code(t, err, "unauthenticated")
		if len(bad) > 20 && strings.Contains(fmt.Sprintf("%+v", err), bad[4:20]) {
			t.Errorf("the error has the key: %v", err)
		}
	}
	// A row that somebody put into the database without the hash key is no key.
	forged, err := New(Config{Store: e.s, HashKey: bytes.Repeat([]byte{1}, 32), Clock: e.clock})
	if err != nil {
		t.Fatal(err)
	}
	_, err = forged.Verify(t.Context(), e.key)
	code(t, err, "unauthenticated")
	if _, err := New(Config{Store: e.s, HashKey: []byte("short")}); err == nil {
		t.Error("a short hash key was accepted")
	}
}

func TestExpiry(t *testing.T) {
	e := newEnv(t)
	_, key := e.mint(t, e.admin, Wish{Scopes: []Scope{Exec}, ExpiresAt: e.clock.Now().Add(2 * time.Second)})
	e.verify(t, key)
	e.clock.add(2*time.Second - 1)
	e.verify(t, key)
	e.clock.add(1) // the cache still has it
	_, err := e.Verify(t.Context(), key)
	code(t, err, "key_expired")
	e.clock.add(time.Hour)
	_, err = e.Verify(t.Context(), key)
	code(t, err, "key_expired")
}

func TestRevoke(t *testing.T) {
	e := newEnv(t)
	var told []string
	e.c.OnRevoke = func(owner tenant.ID, id string) { told = append(told, owner.String()+" "+id) }
	second := e.another(t)
	k, key := e.mint(t, e.admin, Wish{Name: "ci", Scopes: []Scope{Exec}})
	p := e.verify(t, key)
	if _, err := second.Verify(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	watched, cancel := e.Watch(t.Context(), p)
	defer cancel()
	if watched.Err() != nil {
		t.Fatal("the context of a valid key has ended")
	}
	got, err := e.Revoke(t.Context(), e.admin, k.ID, "req1")
	if err != nil || got.RevokedAt.IsZero() {
		t.Fatalf("revoke: %+v, %v", got, err)
	}
	_, err = e.Verify(t.Context(), key) // at once, cache or not
	code(t, err, "key_revoked")
	<-watched.Done()
	if cause := context.Cause(watched); !errors.Is(cause, ErrRevoked) {
		t.Errorf("cause %v", cause)
	}
	late, cancelLate := e.Watch(t.Context(), p) // a principal proven before
	defer cancelLate()
	<-late.Done()
	_, _, err = e.Mint(t.Context(), Principal{Tenant: p.Tenant, KeyID: k.ID, Scopes: []Scope{Admin}}, Wish{Scopes: []Scope{Exec}})
	code(t, err, "key_revoked")
	// Another process: at the latest when its cache is stale.
	if _, err := second.Verify(t.Context(), key); err != nil {
		t.Errorf("within the cache's time: %v", err)
	}
	e.clock.add(3 * time.Second)
	_, err = second.Verify(t.Context(), key)
	code(t, err, "key_revoked")
	again, err := e.Revoke(t.Context(), e.admin, k.ID, "req2")
	if err != nil || !again.RevokedAt.Equal(got.RevokedAt) {
		t.Errorf("revoked again: %+v, %v", again, err)
	}
	if !slices.Contains(told, "default "+k.ID) {
		t.Errorf("told %v", told)
	}
	_, err = e.Revoke(t.Context(), e.admin, "keynowhere", "")
	code(t, err, "key_not_found")
}

func TestMint(t *testing.T) {
	e := newEnv(t)
	soon := e.clock.Now().Add(time.Hour)
	_, narrowKey := e.mint(t, e.admin, Wish{Name: "narrow", Scopes: []Scope{KeysWrite, SandboxesWrite, KeysWrite}, ExpiresAt: soon})
	narrow := e.verify(t, narrowKey)
	// No scope that it lacks, each of them.
	for _, s := range Scopes() {
		_, _, err := e.Mint(t.Context(), narrow, Wish{Scopes: []Scope{s}})
		if narrow.Can(s) != (err == nil) || (err != nil && !fault.IsCode(err, "scope_too_wide")) {
			t.Errorf("mint of %s: %v", s, err)
		}
	}
	// Nor longer than it lives; and a claim in memory does not help.
	_, _, err := e.Mint(t.Context(), narrow, Wish{Scopes: []Scope{SandboxesRead}, ExpiresAt: soon.Add(time.Second)})
	code(t, err, "expiry_too_late")
	child, _ := e.mint(t, narrow, Wish{Scopes: []Scope{SandboxesRead}})
	if !child.ExpiresAt.Equal(soon) {
		t.Errorf("a child expires at %v, its parent at %v", child.ExpiresAt, soon)
	}
	boast := narrow
	boast.Scopes = []Scope{Admin}
	_, _, err = e.Mint(t.Context(), boast, Wish{Scopes: []Scope{Operator}})
	code(t, err, "scope_too_wide")
	_, _, err = e.Mint(t.Context(), Principal{Tenant: e.admin.Tenant, KeyID: "keynowhere", Scopes: []Scope{Admin}}, Wish{Scopes: []Scope{Exec}})
	code(t, err, "unauthenticated")
	_, readKey := e.mint(t, e.admin, Wish{Scopes: []Scope{SandboxesRead}})
	reader := e.verify(t, readKey)
	_, _, err = e.Mint(t.Context(), reader, Wish{Scopes: []Scope{SandboxesRead}})
	code(t, err, "scope_missing")
	_, err = e.List(t.Context(), reader, "", 0)
	code(t, err, "scope_missing")
	_, err = e.Revoke(t.Context(), reader, e.admin.KeyID, "")
	code(t, err, "scope_missing")
	_, err = e.Revoke(t.Context(), narrow, e.admin.KeyID, "") // would lock out the administrator
	code(t, err, "scope_too_wide")
	if _, err := e.Revoke(t.Context(), reader, reader.KeyID, ""); err != nil {
		t.Errorf("a key cannot end itself: %v", err)
	}
	for _, w := range []Wish{
		{}, {Scopes: []Scope{"root"}}, {Scopes: []Scope{Exec, ""}}, {Scopes: []Scope{Exec}, Name: "a\nb"}, {Scopes: []Scope{Exec}, Name: "\xff"},
		{Scopes: []Scope{Exec}, Name: strings.Repeat("x", 129)}, {Scopes: []Scope{Exec}, ExpiresAt: e.clock.Now()},
		{Scopes: []Scope{Exec}, ExpiresAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		_, _, err := e.Mint(t.Context(), e.admin, w)
		code(t, err, "invalid_key")
	}
	// What runs in the same transaction fails it as a whole.
	before, err := e.List(t.Context(), e.admin, "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	stop := errors.New("stop")
	_, v, err := e.Mint(t.Context(), e.admin, Wish{Scopes: []Scope{Exec}, Also: func(store.Tx, store.Key) error { return stop }})
	if !errors.Is(err, stop) || !v.IsZero() {
		t.Errorf("mint: %v", err)
	}
	after, err := e.List(t.Context(), e.admin, "", 1000)
	if err != nil || len(after.Items) != len(before.Items) {
		t.Errorf("%d keys, were %d (%v)", len(after.Items), len(before.Items), err)
	}
	_, err = e.List(t.Context(), e.admin, "nonsense", 0)
	code(t, err, "bad_cursor")
}

// TestNothingTells plants a key and looks for it in what is stored, logged and audited.
func TestNothingTells(t *testing.T) {
	e := newEnv(t)
	_, key := e.mint(t, e.admin, Wish{Name: "ci", Scopes: []Scope{Exec}, Request: "req1"})
	p := e.verify(t, key)
	if _, err := e.Revoke(t.Context(), e.admin, p.KeyID, "req2"); err != nil {
		t.Fatal(err)
	}
	_, verr := e.Verify(t.Context(), key)
	records, err := e.s.System().AuditAll(t.Context(), 1, 100)
	if err != nil {
		t.Fatal(err)
	}
	var actions []string
	for _, r := range records {
		actions = append(actions, r.Entry.Action+" "+r.Entry.Actor+" "+r.Entry.Request)
	}
	if want := []string{"key.create operator ", "key.create " + e.admin.KeyID + " req1", "key.revoke " + e.admin.KeyID + " req2"}; !slices.Equal(actions, want) {
		t.Errorf("audit has %q, want %q", actions, want)
	}
	if _, err := audit.Verify("control", audit.Pages(func(from uint64) ([]audit.Record, error) { return e.s.System().AuditAll(t.Context(), from, 2) }), nil, nil); err != nil {
		t.Error(err)
	}
	texts := []string{e.log.String(), fmt.Sprintf("%+v %#v", verr, verr), fmt.Sprintf("%+v", records), fmt.Sprintf("%+v", p)}
	for _, name := range []string{"db", "db-wal"} {
		b, err := os.ReadFile(filepath.Join(e.dir, name))
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(b))
	}
	for i, text := range texts {
		for _, k := range []string{key, e.key} {
			if strings.Contains(text, k[len(Prefix):]) {
				t.Errorf("text %d has a key", i)
			}
		}
	}
}

func TestLastUse(t *testing.T) {
	e := newEnv(t)
	used := func() time.Time {
		p, err := e.List(t.Context(), e.admin, "", 0)
		if err != nil {
			t.Fatal(err)
		}
		return p.Items[0].LastUsedAt
	}
	start := e.clock.Now()
	for _, step := range []struct{ add, want time.Duration }{{0, 0}, {30 * time.Second, 0}, {30 * time.Second, time.Minute}} {
		e.clock.add(step.add)
		e.verify(t, e.key)
		if got := used().Sub(start); got != step.want {
			t.Errorf("last use %v after the start, want %v", got, step.want)
		}
	}
}

func TestFirstKey(t *testing.T) {
	e := newEnv(t)
	path := filepath.Join(e.dir, FirstKeyFile)
	read, err := ReadKeyFile(path)
	if err != nil || !read.Equal(secret.New(e.key)) {
		t.Fatalf("key file: %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	again, err := e.FirstKey(t.Context(), e.dir)
	if err != nil || again.New || !again.Key.IsZero() {
		t.Errorf("second start: %+v, %v", again, err)
	}
	// The file was taken away on purpose: no new key appears.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if again, err = e.FirstKey(t.Context(), e.dir); err != nil || again.New {
		t.Errorf("without the file: %+v, %v", again, err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file came back: %v", err)
	}
	// No admin key is left: there is a new one.
	if _, err := e.Revoke(t.Context(), e.admin, e.admin.KeyID, ""); err != nil {
		t.Fatal(err)
	}
	if again, err = e.FirstKey(t.Context(), e.dir); err != nil || !again.New || again.Key.Reveal() == e.key {
		t.Errorf("after the revocation: new %v, %v", again.New, err)
	}
	e.verify(t, again.Key.Reveal())
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadKeyFile(path); !errors.Is(err, os.ErrPermission) {
		t.Errorf("an open key file: %v", err)
	}
	if err := os.WriteFile(path, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadKeyFile(path); err == nil || strings.Contains(err.Error(), "nonsense") {
		t.Errorf("nonsense: %v", err)
	}
}

// TestWatch: what is open under a key ends with it, by expiry and by another
// process's revocation; not by an outage of the store.
func TestWatch(t *testing.T) {
	for name, c := range map[string]struct {
		act  func(t *testing.T, e *watchEnv)
		want error
		by   time.Duration
	}{
		"expiry":                    {func(*testing.T, *watchEnv) {}, ErrExpired, 10 * time.Minute},
		"expiry in an outage":       {func(_ *testing.T, e *watchEnv) { e.away.Store(true) }, ErrExpired, 10 * time.Minute},
		"revoked elsewhere":         {func(t *testing.T, e *watchEnv) { e.revoke(t, e.elsewhere) }, ErrRevoked, 0},
		"revoked here in an outage": {func(t *testing.T, e *watchEnv) { e.revoke(t, e.here); e.away.Store(true) }, ErrRevoked, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newWatchEnv(t)
				contexts := make([]context.Context, 3)
				for i := range contexts {
					var cancel context.CancelFunc
					contexts[i], cancel = e.here.Watch(t.Context(), e.p)
					defer cancel()
				}
				gone, cancel := e.here.Watch(t.Context(), e.p)
				cancel()
				<-gone.Done()
				start := time.Now()
				c.act(t, e)
				for _, ctx := range contexts {
					<-ctx.Done()
					if cause := context.Cause(ctx); !errors.Is(cause, c.want) {
						t.Errorf("cause %v, want %v", cause, c.want)
					}
				}
				if took := time.Since(start); took < c.by || took > c.by+3*time.Second {
					t.Errorf("ended after %v, want %v and at most 3s more", took, c.by)
				}
				synctest.Wait()
				e.here.mu.Lock()
				defer e.here.mu.Unlock()
				if len(e.here.watches) != 0 {
					t.Errorf("%d watches are left", len(e.here.watches))
				}
			})
		})
	}
}

// watchEnv is two control processes over rows in memory whose store may be away.
type watchEnv struct {
	here, elsewhere *Authenticator
	p               Principal
	away            atomic.Bool
	mu              sync.Mutex
	key             store.Key
}

func newWatchEnv(t *testing.T) *watchEnv {
	t.Helper()
	e := &watchEnv{}
	var err error
	if e.here, err = New(Config{Store: rows{e: e}, HashKey: hashKey}); err != nil {
		t.Fatal(err)
	}
	if e.elsewhere, err = New(Config{Store: rows{e: e}, HashKey: hashKey}); err != nil {
		t.Fatal(err)
	}
	owner, err := tenant.Mint("a")
	if err != nil {
		t.Fatal(err)
	}
	v := generate()
	h := e.here.hash(v.Reveal())
	e.key = store.Key{Tenant: owner, ID: "key1", Hash: h[:], Scopes: []string{"admin"}, ExpiresAt: time.Now().Add(10 * time.Minute), LastUsedAt: time.Now()}
	if e.p, err = e.here.Verify(t.Context(), v.Reveal()); err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *watchEnv) revoke(t *testing.T, a *Authenticator) {
	t.Helper()
	if _, err := a.Revoke(t.Context(), e.p, e.key.ID, ""); err != nil {
		t.Fatal(err)
	}
}

// rows is the little of a store that Verify, Watch and Revoke use.
type rows struct {
	store.Store
	e *watchEnv
}

func (r rows) System() store.System { return system{e: r.e} }

func (r rows) Mutate(_ context.Context, _ tenant.ID, fn func(store.Tx) error) error {
	return fn(tx{e: r.e})
}

type system struct {
	store.System
	e *watchEnv
}

func (y system) KeyByHash(context.Context, []byte) (store.Key, error) { return y.e.get() }

func (e *watchEnv) get() (store.Key, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.away.Load() {
		return store.Key{}, errors.New("away")
	}
	return e.key, nil
}

type tx struct {
	store.Tx
	e *watchEnv
}

func (x tx) Key(string) (store.Key, error) { return x.e.get() }
func (x tx) Audit(audit.Entry) error       { return nil }
func (x tx) UpdateKey(k store.Key) error {
	x.e.mu.Lock()
	defer x.e.mu.Unlock()
	x.e.key = k
	return nil
}
