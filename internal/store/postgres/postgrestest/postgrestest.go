// Package postgrestest starts a private PostgreSQL for tests: in a directory of
// its own, as an unprivileged user, on a unix socket only, ended by its process
// id at the end of the test.
package postgrestest

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
)

// Server is one running PostgreSQL.
type Server struct {
	socket string
	log    *bytes.Buffer // what the server printed; read after its end only
	n      atomic.Int64
}

// Start starts a server that ends with the test. It skips the test where no
// PostgreSQL is installed (scripts/setup.sh test installs it).
func Start(t testing.TB) *Server {
	t.Helper()
	bin := find()
	if bin == "" {
		t.Skip("no PostgreSQL below /usr/lib/postgresql or in PATH: run scripts/setup.sh test")
	}
	cred := unprivileged(t)
	// Not t.TempDir: its parents are closed to other users, and a path of a unix
	// socket is short.
	dir, err := os.MkdirTemp("", "space-pg-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove cluster: %v", err)
		}
	})
	if cred != nil {
		if err := os.Chown(dir, int(cred.Uid), int(cred.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	data := filepath.Join(dir, "data")
	init := command(cred, dir, filepath.Join(bin, "initdb"), "-D", data, "-U", "space", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
	if out, err := init.CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	s := &Server{socket: dir, log: &bytes.Buffer{}}
	server := command(cred, dir, filepath.Join(bin, "postgres"), "-D", data, "-k", dir, "-c", "listen_addresses=", "-c", "max_connections=60",
		// The tests ask for the rules of transactions, not of the disk.
		"-c", "fsync=off")
	server.Stdout, server.Stderr = s.log, s.log
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGINT) // fast shutdown; the wait tells the rest
		stopped := make(chan error, 1)
		go func() { stopped <- server.Wait() }()
		select {
		case err := <-stopped:
			if err != nil || t.Failed() {
				t.Logf("postgres: %v\n%s", err, s.log)
			}
		case <-time.After(20 * time.Second):
			_ = server.Process.Kill()
			<-stopped
			t.Errorf("postgres did not stop and was killed\n%s", s.log)
		}
	})
	s.await(t)
	return s
}

// await waits until the server answers.
func (s *Server) await(t testing.TB) {
	t.Helper()
	db, err := sql.Open("pgx", s.dsn("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	deadline := time.Now().Add(30 * time.Second)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err = db.PingContext(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("postgres does not answer: %v", err)
		}
		time.Sleep(20 * time.Millisecond) // polls a real process
	}
}

func (s *Server) dsn(database string) string {
	return fmt.Sprintf("host=%s user=space dbname=%s sslmode=disable", s.socket, database)
}

// Database makes an empty database and gives its DSN.
func (s *Server) Database(t testing.TB) string {
	t.Helper()
	name := fmt.Sprintf("test%d", s.n.Add(1))
	db, err := sql.Open("pgx", s.dsn("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = db.Exec("CREATE DATABASE " + name)
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	return s.dsn(name)
}

// find gives the directory of the newest installed server's programs.
func find() string {
	all, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb") // the pattern is sound
	slices.SortFunc(all, func(a, b string) int { return version(a) - version(b) })
	if len(all) > 0 {
		return filepath.Dir(all[len(all)-1])
	}
	if p, err := exec.LookPath("initdb"); err == nil {
		return filepath.Dir(p)
	}
	return ""
}

func version(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path)))) // 0 for an odd name
	return n
}

// unprivileged gives whom to run as: PostgreSQL refuses root. Nil: as we are.
func unprivileged(t testing.TB) *syscall.Credential {
	t.Helper()
	if os.Geteuid() != 0 {
		return nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if errors.Join(err1, err2) == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), Groups: []uint32{}}
		}
	}
	t.Fatal("neither user postgres nor nobody is there to run PostgreSQL as")
	return nil
}

func command(cred *syscall.Credential, dir, name string, args ...string) *exec.Cmd {
	c := exec.Command(name, args...)
	c.Dir = dir
	c.Env = []string{"LC_ALL=C", "PATH=/usr/bin:/bin", "TZ=UTC"}
	// A test that is killed takes its server with it.
	c.SysProcAttr = &syscall.SysProcAttr{Credential: cred, Pdeathsig: syscall.SIGQUIT}
	return c
}
