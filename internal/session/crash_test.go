package session

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/guest/guesttest"
	"github.com/space-platform/space/internal/guestclient"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/tenant"
)

// The host's process, to be killed, is this test program started again.
const childEnv = "SPACE_SESSION_CHILD"

type childConfig struct {
	Root, Socket string
	Box          sandbox.ID
	Journal      int64
}

func TestMain(m *testing.M) {
	if conf := os.Getenv(childEnv); conf != "" {
		if err := child(conf); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// dbTrail audits into a table, so that the parent can read it.
type dbTrail struct{}

func (dbTrail) Append(ctx context.Context, tx *sql.Tx, e audit.Entry) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO trail VALUES (?, ?)`, e.Action, e.Target)
	return err
}

// child serves one sandbox's sessions until it is killed. It prints its address.
func child(conf string) error {
	var c childConfig
	if err := json.Unmarshal([]byte(conf), &c); err != nil {
		return err
	}
	if err := failpoint.FromEnv(); err != nil {
		return err
	}
	_ = os.Remove(c.Socket)
	gl, err := net.Listen("unix", c.Socket)
	if err != nil {
		return err
	}
	acceptor := channel.NewAcceptor(gl, channel.Options{})
	db, err := sqlitedb.Open(filepath.Join(c.Root, "node.db"))
	if err != nil {
		return err
	}
	if _, err := db.Write.Exec(`CREATE TABLE IF NOT EXISTS trail (action TEXT, target TEXT)`); err != nil {
		return err
	}
	sealer, err := secret.NewSealer(key(7))
	if err != nil {
		return err
	}
	g := &guests{known: map[sandbox.ID]guestclient.Guest{c.Box: guestclient.New(acceptor.Dial, guestclient.Options{})}, err: map[sandbox.ID]error{}}
	m, err := New(context.Background(), Config{DB: db, Dir: filepath.Join(c.Root, "journals"), Guests: g, Sealer: sealer, Auditor: dbTrail{},
		Limits: Limits{JournalBytes: c.Journal, Sweep: 50 * time.Millisecond, Backoff: 50 * time.Millisecond}})
	if err != nil {
		return err
	}
	if err := m.Recover(context.Background()); err != nil {
		return err
	}
	who, err := tenant.Mint("acme")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/d/", m.Handler())
	mux.HandleFunc("POST /create", func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		s, tok, err := m.Create(r.Context(), who, CreateRequest{Sandbox: c.Box, Principal: "key1", Command: Command{Shell: string(text)}})
		if err != nil {
			http.Error(w, err.Error(), 500)
			return
		}
		_ = json.NewEncoder(w).Encode([]string{string(s.ID), tok.Token})
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() { // until the parent is gone
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	fmt.Println(l.Addr())
	return http.Serve(l, mux)
}

// victim is the host's process with a guest that outlives it.
type victim struct {
	t    testing.TB
	conf childConfig
	cmd  *exec.Cmd
	base string
	gone chan struct{}
}

func newVictim(t testing.TB, journal int64) *victim {
	t.Helper()
	machine := guesttest.Start(t)
	must(t, machine.Acceptor.Close()) // the child listens in its place; the daemon dials again
	v := &victim{t: t, conf: childConfig{Root: t.TempDir(), Socket: machine.Socket, Box: sandbox.NewID(), Journal: journal}}
	t.Cleanup(v.kill)
	return v
}

// start runs the process with failpoints ("" for none).
func (v *victim) start(failpoints string) {
	v.t.Helper()
	conf, err := json.Marshal(v.conf)
	must(v.t, err)
	v.cmd = exec.Command(os.Args[0])
	v.cmd.Env = append(os.Environ(), childEnv+"="+string(conf), "SPACE_FAILPOINTS="+failpoints)
	v.cmd.Stderr = os.Stderr
	// The child ends when this pipe does. Not by a parent-death signal: that follows
	// a thread, and threads of tests that run beside this one come and go.
	_, err = v.cmd.StdinPipe()
	must(v.t, err)
	out, err := v.cmd.StdoutPipe()
	must(v.t, err)
	must(v.t, v.cmd.Start())
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		v.t.Fatalf("the child did not come up: %v", err)
	}
	v.base = "http://" + strings.TrimSpace(addr)
	gone, cmd := make(chan struct{}), v.cmd
	v.gone = gone
	go func() { _ = cmd.Wait(); close(gone) }()
}

func (v *victim) kill() {
	if v.cmd != nil && v.gone != nil {
		_ = v.cmd.Process.Kill()
		<-v.gone
	}
}

func (v *victim) create(text string) (id, token string) {
	v.t.Helper()
	resp, err := http.Post(v.base+"/create", "text/plain", strings.NewReader(text))
	must(v.t, err)
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	must(v.t, err)
	var pair []string
	if err := json.Unmarshal(b, &pair); err != nil {
		v.t.Fatalf("create: %s", b)
	}
	return pair[0], pair[1]
}

// open opens a stream; an error when the process is gone, or goes.
func (v *victim) open(method, id, token, what, after string) (*stream, error) {
	r, err := http.NewRequest(method, v.base+"/d/sessions/"+id+"/"+what, nil)
	must(v.t, err)
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Last-Event-ID", after)
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(r)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != 200 {
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		return nil, fmt.Errorf("%d %s", resp.StatusCode, b)
	}
	return &stream{t: v.t, resp: resp, r: bufio.NewReaderSize(resp.Body, 256<<10), cancel: func() {}, last: after}, nil
}

// SIGKILL of the host's process at random points of a long output: what readers
// joined is what the guest printed, no byte twice and none missing.
func TestKillInTheMiddleOfOutput(t *testing.T) {
	t.Parallel()
	lines, kills := pick(1_500_000, 13_000_000), pick(6, 50)
	v := newVictim(t, 512<<20)
	v.start("")
	want := sha256.New()
	w := bufio.NewWriterSize(want, 1<<20)
	total := 0
	for i := 1; i <= lines; i++ {
		n, _ := fmt.Fprintln(w, i)
		total += n
	}
	must(t, w.Flush())
	id, token := v.create(fmt.Sprintf("seq 1 %d; exit 7", lines))
	got := sha256.New()
	joined, last, done := 0, "", false
	what, method := "attach", "POST"
	for !done {
		st, err := v.open(method, id, token, what, last)
		if err != nil {
			t.Fatalf("attach after %q: %v", last, err)
		}
		what, method = "events", "GET"
		next := total + 1
		if kills > 0 { // always before the end
			next = joined + rand.IntN((total-joined)/(kills+1)) + 1
		}
		for {
			e, err := st.next()
			if err != nil {
				if !errors.Is(err, io.EOF) && joined+st.out.Len() >= next {
					break
				}
				t.Fatalf("stream broke at %d: %v", joined+st.out.Len(), err)
			}
			if e.kind == "gap" || e.kind == "error" {
				t.Fatalf("%+v", e)
			}
			if e.kind == "exit" {
				if !strings.Contains(e.data, `"code":7`) {
					t.Fatal(e.data)
				}
				done = true
				break
			}
			if joined+st.out.Len() >= next {
				break
			}
			if st.out.Len() > 8<<20 {
				got.Write(st.out.Bytes())
				joined += st.out.Len()
				st.out.Reset()
			}
		}
		got.Write(st.out.Bytes())
		joined += st.out.Len()
		last = st.last
		_ = st.resp.Body.Close()
		if !done {
			v.kill()
			kills--
			v.start("")
		}
	}
	if kills > 0 {
		t.Fatalf("%d kills were left when the output ended", kills)
	}
	if joined != total || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Fatalf("joined %d bytes of %d, or others", joined, total)
	}
}

// The host's process dies at every named point of a session's life; after a
// restart the command has run exactly once and its end is told once.
func TestAttachKilledStartsOnce(t *testing.T) {
	t.Parallel()
	v := newVictim(t, 1<<20)
	v.start("")
	rounds := pick(20, 200)
	if testing.Short() {
		rounds = 8
	}
	points := []string{fpStartGuest, fpStartGuest, fpStartRow, fpStartBefore, fpAppend, fpExitBefore, fpExitRecord, fpExitAfter}
	for i := range rounds {
		point := points[i%len(points)]
		count := filepath.Join(v.conf.Root, fmt.Sprintf("count%d", i))
		v.kill()
		v.start(point + "=kill")
		id, token := v.create("echo x >> " + count + "; echo hello; exit 3")
		if st, err := v.open("POST", id, token, "attach", ""); err == nil {
			for err == nil {
				_, err = st.next()
			}
			_ = st.resp.Body.Close()
		}
		select {
		case <-v.gone:
		case <-time.After(20 * time.Second):
			t.Fatalf("%s did not kill", point)
		}
		v.start("")
		what, method := "events", "GET"
		if point == fpStartBefore { // nothing was durable: the client attaches again
			what, method = "attach", "POST"
		}
		st, err := v.open(method, id, token, what, "")
		if err != nil {
			t.Fatalf("%s: %v", point, err)
		}
		var kinds []string
		for {
			e, err := st.next()
			if err != nil {
				break
			}
			kinds = append(kinds, e.kind)
			if e.kind == "exit" && !strings.Contains(e.data, `"code":3`) {
				t.Fatalf("%s: %+v", point, e)
			}
		}
		_ = st.resp.Body.Close()
		if text := strings.Join(kinds, " "); text != "started stdout exit" || st.out.String() != "hello\n" {
			t.Fatalf("%s: %s, %q", point, text, st.out.String())
		}
		b, err := os.ReadFile(count)
		must(t, err)
		if string(b) != "x\n" {
			t.Fatalf("%s: started %d times", point, bytes.Count(b, []byte("x")))
		}
		until(t, 10*time.Second, "one audited start and exit", func() bool { return v.audited(id, "session.start") == 1 && v.audited(id, "session.exit") == 1 })
	}
}

func (v *victim) audited(id, action string) int {
	v.t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(v.conf.Root, "node.db")+"?mode=ro&_pragma=busy_timeout(5000)")
	must(v.t, err)
	defer func() { _ = db.Close() }()
	var n int
	must(v.t, db.QueryRow(`SELECT count(*) FROM trail WHERE action=? AND target=?`, action, id).Scan(&n))
	return n
}
