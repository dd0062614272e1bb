package e2e

import (
	"database/sql"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/privilege"
	"github.com/space-platform/space/test/e2e/server"
)

// Whoever has taken over the unprivileged side owns its folders. Commands and
// processes of root must not be turned by what lies there.

// give makes path one of user space's.
func give(t *testing.T, path string) {
	t.Helper()
	uid, gid, err := privilege.Lookup()
	ok(t, err)
	ok(t, os.Lchown(path, uid, gid))
}

func TestRootSendsNobodyItsFiles(t *testing.T) {
	s := server.Start(t, server.Options{})
	const secret = "only-root-may-read-this"
	theirs := filepath.Join(s.Layout.Room(), "of-root")
	ok(t, os.WriteFile(theirs, []byte(secret), 0o600))
	var got atomic.Value
	thief := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got.Store(r.Header.Get("Authorization"))
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer thief.Close()
	keep := func(path string) {
		t.Helper()
		b, err := os.ReadFile(path)
		ok(t, err)
		t.Cleanup(func() {
			_ = os.Remove(path)
			ok(t, os.WriteFile(path, b, 0o600))
			give(t, path)
		})
		ok(t, os.Remove(path))
	}
	keep(s.Layout.EndpointFile())
	keep(s.Layout.AdminKey())
	b, err := json.Marshal(layout.Endpoint{API: thief.URL, Data: thief.URL})
	ok(t, err)
	ok(t, os.WriteFile(s.Layout.EndpointFile(), b, 0o644))
	give(t, s.Layout.EndpointFile())
	for name, put := range map[string]func() error{
		"symbolic link": func() error { return os.Symlink(theirs, s.Layout.AdminKey()) },
		"hard link":     func() error { return os.Link(theirs, s.Layout.AdminKey()) },
		"FIFO":          func() error { return unix.Mkfifo(s.Layout.AdminKey(), 0o600) },
	} {
		ok(t, put())
		r := s.CLI("ls")
		if r.Code != 1 || strings.Contains(r.Out+r.Err, secret) {
			t.Errorf("%s: exit code %d: %s%s", name, r.Code, r.Out, r.Err)
		}
		if v := got.Load(); v != nil {
			t.Fatalf("%s: root sent %q", name, v)
		}
		ok(t, os.Remove(s.Layout.AdminKey()))
	}
	// The trap itself works: a key of user space's own is sent.
	ok(t, os.WriteFile(s.Layout.AdminKey(), []byte("own"), 0o600))
	give(t, s.Layout.AdminKey())
	if s.CLI("ls"); got.Load() == nil {
		t.Error("the command line asked nobody: the test proves nothing")
	}
}

func TestRoomEndsThoughItsLockIsAFIFO(t *testing.T) {
	s := server.Start(t, server.Options{})
	lock := s.Layout.ServeLock()
	serve := s.Serve()
	ok(t, os.Rename(lock, lock+".away"))
	ok(t, unix.Mkfifo(lock, 0o600))
	give(t, lock)
	ok(t, syscall.Kill(serve, syscall.SIGKILL))
	server.Ended(serve, 5*time.Second)
	ok(t, s.Down())
	ok(t, os.Remove(lock))
	ok(t, os.Rename(lock+".away", lock))
}

func TestAuditOfATakenOverSide(t *testing.T) {
	s := server.Start(t, server.Options{})
	for _, name := range []string{"a", "b", "c"} {
		if r := s.CLI("keys", "create", name); r.Code != 0 {
			t.Fatal(r.Err)
		}
	}
	ok(t, s.Down()) // the last heads are signed at the end
	if r := s.CLI("audit", "verify"); r.Code != 0 {
		t.Fatal(r.Err)
	}
	// It takes its last act out, in all of what it can write.
	db, heads := s.Layout.ControlDB(), s.Layout.AuditHeads()
	for _, path := range []string{db, heads} {
		b, err := os.ReadFile(path)
		ok(t, err)
		t.Cleanup(func() { ok(t, os.WriteFile(path, b, 0o600)); give(t, path) })
	}
	c, err := sql.Open("sqlite", db)
	ok(t, err)
	_, err = c.Exec(`DELETE FROM audit WHERE seq = (SELECT max(seq) FROM audit)`)
	ok(t, err)
	ok(t, c.Close())
	ok(t, os.Remove(heads))
	give(t, db)
	if r := s.CLI("audit", "verify"); r.Code == 0 || !strings.Contains(r.Err, "truncated") {
		t.Errorf("a record was taken out, with the heads: code %d: %s%s", r.Code, r.Out, r.Err)
	}
	// Root makes no file of its own there, which would lock the owner out.
	uid, _, err := privilege.Lookup()
	ok(t, err)
	entries, err := os.ReadDir(s.Layout.State())
	ok(t, err)
	for _, e := range entries {
		var st unix.Stat_t
		ok(t, unix.Lstat(filepath.Join(s.Layout.State(), e.Name()), &st))
		if int(st.Uid) != uid {
			t.Errorf("%s belongs to user %d", e.Name(), st.Uid)
		}
	}
}
