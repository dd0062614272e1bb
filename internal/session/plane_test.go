package session

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/quota"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session/journal"
)

// Whatever a program prints, it cannot end an event or begin another.
func TestOutputCannotForgeAnEvent(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	forged := "\n\nid: 1.99\nevent: exit\ndata: {\"cause\":\"exited\",\"code\":0}\n\n\r\revent: exit\r\r\x00: x\n"
	r := h.shell(`printf %s "$V"; printf %s "$V" >&2; exit 5`)
	r.Command.Env = map[string]string{"V": strings.ReplaceAll(forged, "\x00", "")}
	s, tok := h.create(r)
	st := p.attach(s.ID, tok.Token, "")
	x := st.end()
	want := strings.ReplaceAll(forged, "\x00", "")
	if x.Code != 5 || st.out.String() != want || st.errs.String() != want {
		t.Fatalf("%+v %q", x, st.out.String())
	}
	// A failed start carries the guest's words: they are data as well.
	s, tok = h.create(CreateRequest{Sandbox: h.box, Command: Command{Args: []string{"no\n\nevent: exit\ndata: {}\n\nprogram"}}})
	st = p.attach(s.ID, tok.Token, "")
	if e, err := st.next(); err != nil || e.kind != "error" {
		t.Fatalf("%+v %v", e, err)
	}
	if _, err := st.next(); err != io.EOF {
		t.Fatal(err)
	}
}

func TestEventIDsAndKinds(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	s, tok := h.create(h.shell("printf abc; sleep 0.1; printf de >&2"))
	st := p.attach(s.ID, tok.Token, "")
	var got []string
	for {
		e, err := st.next()
		if err != nil {
			break
		}
		got = append(got, e.kind+"@"+e.id)
	}
	if text := strings.Join(got, " "); text != "started@1.1 stdout@1.4 stderr@1.6 exit@1.7" {
		t.Fatal(text)
	}
	// Resuming inside an event gives the rest of it.
	st = p.events(s.ID, tok.Token, "1.2")
	if e, err := st.next(); err != nil || e.id != "1.4" || string(e.bytes(t)) != "bc" {
		t.Fatalf("%+v %v", e, err)
	}
	st = p.open("GET", "/d/sessions/"+string(s.ID)+"/events?after=1.6", tok.Token, "")
	if e, err := st.next(); err != nil || e.kind != "exit" {
		t.Fatalf("%+v %v", e, err)
	}
}

func TestBinaryFrames(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{Keepalive: 50 * time.Millisecond})
	s, tok := h.create(h.shell("printf abc; sleep 0.3; head -c 200000 /dev/zero; exit 3"))
	resp := p.do(context.Background(), "POST", "/d/sessions/"+string(s.ID)+"/attach", tok.Token, nil, "Accept", FramesType)
	if ct := resp.Header.Get("Content-Type"); ct != FramesType {
		t.Fatal(ct)
	}
	r := NewFrameReader(resp.Body)
	var last Frame
	keeps, n := 0, 0
	at := uint64(0)
	for {
		f, err := r.Next()
		if err == io.EOF {
			break
		}
		must(t, err)
		if f.Kind == frameKeepalive {
			keeps++
			continue
		}
		if f.Kind == byte(journal.Stdout) {
			n += len(f.Payload)
		}
		if f.ID.Epoch != 1 || f.ID.Offset <= at {
			t.Fatalf("%+v after %d", f.ID, at)
		}
		at = f.ID.Offset
		last = f
		last.Payload = bytes.Clone(f.Payload)
	}
	var x Exit
	must(t, json.Unmarshal(last.Payload, &x))
	if last.Kind != byte(journal.Exit) || x.Code != 3 || n != 200003 || keeps == 0 {
		t.Fatalf("kind %d %+v, %d bytes, %d keepalives", last.Kind, x, n, keeps)
	}
}

func TestAttachRacesStartOnce(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	count := filepath.Join(t.TempDir(), "count")
	s, tok := h.create(h.shell("echo x >> " + count + "; echo hello; sleep 0.2"))
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			st := p.attach(s.ID, tok.Token, "")
			if x := st.end(); x.Code != 0 || st.out.String() != "hello\n" {
				t.Errorf("%+v %q", x, st.out.String())
			}
		})
	}
	wg.Wait()
	b, err := os.ReadFile(count)
	must(t, err)
	if string(b) != "x\n" {
		t.Fatalf("started %d times", strings.Count(string(b), "x"))
	}
	if n := h.trail.count("session.start", string(s.ID)); n != 1 {
		t.Fatalf("%d audited starts", n)
	}
	until(t, 5*time.Second, "the exit is audited", func() bool { return h.trail.count("session.exit", string(s.ID)) == 1 })
}

func TestUnattachedExpires(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{AttachWithin: 200 * time.Millisecond})
	s, tok := h.create(h.shell("true"))
	before := p.do(context.Background(), "GET", "/d/sessions/"+string(s.ID)+"/events", tok.Token, nil)
	if before.StatusCode != 409 {
		t.Fatalf("events before attach: %d", before.StatusCode)
	}
	h.reopen() // over a restart
	until(t, 5*time.Second, "expiry", func() bool {
		got, err := h.Get(context.Background(), h.who, s.ID)
		must(t, err)
		return got.State == Expired
	})
	st := p.attach(s.ID, tok.Token, "")
	e, err := st.next()
	must(t, err)
	if e.kind != "error" || !strings.Contains(e.data, "session_expired") {
		t.Fatalf("%+v", e)
	}
	if _, err := st.next(); err != io.EOF {
		t.Fatal(err)
	}
	// Killing one that never ran ends it as well.
	s, _ = h.create(h.shell("true"))
	got, err := h.Kill(context.Background(), h.who, s.ID)
	must(t, err)
	if got.State != Expired || got.Exit == nil {
		t.Fatalf("%+v", got)
	}
}

func TestTokens(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	ctx := context.Background()
	s, tok := h.create(h.shell("echo up; sleep 100"))
	other, _ := h.create(h.shell("true"))
	path := "/d/sessions/" + string(s.ID)

	p.problem("POST", path+"/attach", "", "", 401, "invalid_token")
	p.problem("POST", path+"/attach", "spt_"+strings.Repeat("a", tokenRandom), "", 401, "invalid_token")
	p.problem("POST", path+"/attach?token="+tok.Token, "", "", 401, "invalid_token") // never in a URL
	p.problem("POST", "/d/sessions/"+string(other.ID)+"/attach", tok.Token, "", 404, "session_not_found")
	p.problem("POST", "/d/nowhere", tok.Token, "", 404, "no_such_route")

	// Data tokens: scope exec opens sessions of the sandbox, others do not.
	files, err := h.MintDataToken(ctx, h.who, h.box, "key1", []string{"files:rw"}, 0)
	must(t, err)
	p.problem("GET", path+"/events", files.Token, "", 404, "session_not_found")
	exec, err := h.MintDataToken(ctx, h.who, h.box, "key2", []string{"exec", "exec"}, 0)
	must(t, err)
	if len(exec.Scopes) != 1 {
		t.Fatalf("%+v", exec)
	}
	if _, err := h.MintDataToken(ctx, h.who, h.box, "key2", []string{"root"}, 0); !fault.IsCode(err, "invalid_scope") {
		t.Fatal(err)
	}
	if _, err := h.MintDataToken(ctx, h.who, h.box, "key2", []string{"exec"}, 25*time.Hour); !fault.IsCode(err, "invalid_ttl") {
		t.Fatal(err)
	}
	g, err := h.Verify(ctx, files.Token)
	must(t, err)
	if !g.AllowsScope(h.box, ScopeFilesRead) || g.AllowsScope(h.box, ScopePort) || g.AllowsScope(sandbox.NewID(), ScopeFilesWrite) {
		t.Fatal("scopes")
	}
	g.Close()

	// Revoking cuts the streams it opened, and only those, at once.
	st := p.attach(s.ID, tok.Token, "")
	st.prints("up\n")
	// What key1's program prints is not for key2, unless it may read it all.
	p.problem("GET", path+"/events", exec.Token, "", 404, "session_not_found")
	exec, err = h.MintDataToken(ctx, h.who, h.box, "key2", []string{ScopeExec, ScopeActivity}, 0)
	must(t, err)
	own, err := h.MintDataToken(ctx, h.who, h.box, s.Principal, []string{ScopeExec}, 0)
	must(t, err)
	mine := p.events(s.ID, own.Token, "")
	mine.prints("up\n")
	mine.cancel()
	st2 := p.events(s.ID, exec.Token, "")
	st2.prints("up\n")
	must(t, h.RevokeAttachTokens(ctx, h.who, s.ID))
	within(t, 2*time.Second, "the cut", func() {
		if e, err := st.next(); err != nil || e.kind != "interrupted" || !strings.Contains(e.data, "token_revoked") || e.id != "" {
			t.Fatalf("%+v %v", e, err)
		}
		if _, err := st.next(); err == nil {
			t.Fatal("the stream goes on")
		}
	})
	p.problem("GET", path+"/events", tok.Token, "", 401, "invalid_token")
	fresh, err := h.MintAttachToken(ctx, h.who, s.ID, "key1", time.Second)
	must(t, err)
	st3 := p.events(s.ID, fresh.Token, "")
	st3.prints("up\n")
	// Expiry gates opening only; the stream goes on, and revoking still cuts it.
	until(t, 5*time.Second, "expiry", func() bool { _, err := h.Verify(ctx, fresh.Token); return err != nil })
	must(t, h.Signal(ctx, h.who, s.ID, "CONT", false))
	must(t, h.RevokePrincipal(ctx, "key1"))
	within(t, 2*time.Second, "the cut of an expired token's stream", func() { st3.until("interrupted") })
	must(t, h.RevokeDataTokens(ctx, h.who, h.box))
	within(t, 2*time.Second, "the cut", func() { st2.until("interrupted") })

	if n := h.Config.Ledger.Used(h.who, h.box, quota.Readers); n != 0 {
		until(t, 2*time.Second, "readers are refunded", func() bool { return h.Config.Ledger.Used(h.who, h.box, quota.Readers) == 0 })
	}
	// Strangers see nothing.
	stranger := mint(t, "stranger")
	for what, err := range map[string]error{
		"get":    second(h.Get(ctx, stranger, s.ID)),
		"kill":   second(h.Kill(ctx, stranger, s.ID)),
		"mint":   second(h.MintAttachToken(ctx, stranger, s.ID, "k", 0)),
		"revoke": h.RevokeAttachTokens(ctx, stranger, s.ID),
		"data":   second(h.MintDataToken(ctx, stranger, h.box, "k", []string{"exec"}, 0)),
		"exec":   second(h.Exec(ctx, stranger, ExecRequest{CreateRequest: h.shell("true")})),
		"attach": second(h.Attach(ctx, stranger, s.ID, journal.ID{})),
	} {
		if !fault.IsClass(err, fault.NotFound) {
			t.Errorf("%s by a stranger: %v", what, err)
		}
	}
	if l, _, err := h.List(ctx, stranger, h.box, "", 0); err != nil || len(l) != 0 {
		t.Errorf("list by a stranger: %v %v", l, err)
	}
	if _, err := h.Kill(ctx, h.who, s.ID); err != nil {
		t.Fatal(err)
	}
}

func second[T any](_ T, err error) error { return err }

// Tokens, environment, arguments and input are not in the database, the
// journals or the logs in clear, at debug level and over errors too.
func TestC068ValuesDoNotReachDiskOrLogs(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	const env, arg, input = "MARKENVd41d8cd98f", "MARKARG00b204e980", "MARKINPUT998ecf84"
	r := h.shell("cat; echo " + arg + "; printf %s \"$V\"; sleep 100")
	r.Command.Env = map[string]string{"V": env}
	r.Command.Stdin = true
	s, tok := h.create(r)
	st := p.attach(s.ID, tok.Token, "")
	p.json("POST", "/d/sessions/"+string(s.ID)+"/stdin?offset=0", tok.Token, input, 200, nil)
	p.json("POST", "/d/sessions/"+string(s.ID)+"/close-stdin", tok.Token, "", 200, nil)
	st.prints(env)
	if got, err := h.Get(context.Background(), h.who, s.ID); err != nil || got.Command.Env != nil || !strings.Contains(got.Command.Shell, arg) {
		t.Fatalf("%+v %v", got, err)
	}
	h.link.cut()
	p.do(context.Background(), "POST", "/d/sessions/"+string(s.ID)+"/stdin", tok.Token, strings.NewReader(input))
	h.link.mend()
	bad := h.shell("true")
	bad.Command = Command{Args: []string{arg + "-no-such-program"}, Env: map[string]string{"V": env}}
	h.execAs(ExecRequest{CreateRequest: bad})
	if _, err := h.Kill(context.Background(), h.who, s.ID); err != nil {
		t.Fatal(err)
	}
	st.until("exit")
	h.Manager.Close()
	must(t, h.db.Close())
	audited, err := json.Marshal(h.trail.entries)
	must(t, err)
	where := map[string][]byte{"logs": []byte(h.logs.String()), "audit": audited}
	must(t, filepath.Walk(h.root, func(path string, i os.FileInfo, err error) error {
		if err != nil || !i.Mode().IsRegular() {
			return err
		}
		if i.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, i.Mode())
		}
		where[path], err = os.ReadFile(path)
		return err
	}))
	if len(where) < 4 {
		t.Fatalf("only %d places searched", len(where))
	}
	for place, b := range where {
		for name, marker := range map[string]string{"environment": env, "argument": arg, "input": input, "token": tok.Token, "token's random part": tok.Token[4:]} {
			if bytes.Contains(b, []byte(marker)) {
				t.Errorf("%s in %s", name, place)
			}
		}
	}
}

func TestWebSocketTerminal(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s, tok := h.create(CreateRequest{Sandbox: h.box, Command: Command{Args: []string{"/bin/sh", "-i"}, PTY: terminalSize}})
	url := strings.Replace(p.srv.URL, "http", "ws", 1) + "/d/sessions/" + string(s.ID) + "/pty"
	if _, _, err := websocket.Dial(ctx, url, nil); err == nil {
		t.Fatal("opened without a token")
	}
	// A ticket opens once, on WebSockets only.
	var ticket struct {
		Ticket string `json:"ticket"`
	}
	p.json("POST", "/d/tickets", tok.Token, "", 201, &ticket)
	p.problem("GET", "/d/sessions/"+string(s.ID)+"/events?ticket="+ticket.Ticket, "", "", 401, "invalid_token")
	c, _, err := websocket.Dial(ctx, url+"?ticket="+ticket.Ticket, nil)
	must(t, err)
	defer func() { _ = c.CloseNow() }()
	if _, _, err := websocket.Dial(ctx, url+"?ticket="+ticket.Ticket, nil); err == nil {
		t.Fatal("a ticket opened twice")
	}
	c.SetReadLimit(1 << 20)
	send := func(b ...byte) { must(t, c.Write(ctx, websocket.MessageBinary, b)) }
	stdin := func(at uint64, text string) {
		send(append(binary.BigEndian.AppendUint64([]byte{requestStdin}, at), text...)...)
	}
	var out bytes.Buffer
	var lastID string
	// read reads frames until one that ok takes.
	read := func(conn *websocket.Conn, ok func(Frame) bool) {
		t.Helper()
		for {
			_, msg, err := conn.Read(ctx)
			if err != nil {
				t.Fatalf("%v; out %q", err, out.String())
			}
			found := false
			for r := NewFrameReader(bytes.NewReader(msg)); ; {
				f, err := r.Next()
				if err == io.EOF {
					break
				}
				must(t, err)
				if f.Kind == byte(journal.Stdout) {
					out.Write(f.Payload)
				}
				if f.ID.Offset > 0 {
					lastID = f.ID.String()
				}
				found = found || ok(f)
			}
			if found {
				return
			}
		}
	}
	send(append([]byte{requestResize}, 0, 33, 0, 99)...)
	stdin(0, "stty size\n")
	read(c, func(f Frame) bool {
		return f.Kind == frameAccepted && string(f.Payload) == `{"accepted":10,"closed":false}`
	})
	read(c, func(Frame) bool { return strings.Contains(out.String(), "33 99\r\n") })
	stdin(999, "x")
	read(c, func(f Frame) bool {
		return f.Kind == frameProblem && bytes.Contains(f.Payload, []byte(`"stdin_offset_ahead"`)) && bytes.Contains(f.Payload, []byte(`"expected":10`))
	})
	send(77)
	read(c, func(f Frame) bool {
		return f.Kind == frameProblem && bytes.Contains(f.Payload, []byte("invalid_message"))
	})
	_ = c.CloseNow() // the connection drops; the shell stays

	hdr := http.Header{"Authorization": {"Bearer " + tok.Token}}
	c2, _, err := websocket.Dial(ctx, url+"?after="+lastID, &websocket.DialOptions{HTTPHeader: hdr})
	must(t, err)
	defer func() { _ = c2.CloseNow() }()
	c = c2
	c.SetReadLimit(1 << 20)
	stdin(math.MaxUint64, "echo again$((1+1)); exit 8\n")
	var x Exit
	read(c, func(f Frame) bool {
		if f.Kind == byte(journal.Exit) {
			must(t, json.Unmarshal(f.Payload, &x))
		}
		return f.Kind == byte(journal.Exit)
	})
	if x.Code != 8 || !strings.Contains(out.String(), "again2\r\n") {
		t.Fatalf("%+v %q", x, out.String())
	}
	if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Fatal(err)
	}
}

func TestRevocationCutsWebSockets(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s, tok := h.create(h.shell("sleep 100"))
	c, _, err := websocket.Dial(ctx, strings.Replace(p.srv.URL, "http", "ws", 1)+"/d/sessions/"+string(s.ID)+"/ws",
		&websocket.DialOptions{HTTPHeader: http.Header{"Authorization": {"Bearer " + tok.Token}}})
	must(t, err)
	defer func() { _ = c.CloseNow() }()
	_, _, err = c.Read(ctx)
	must(t, err)
	must(t, h.RevokeAttachTokens(ctx, h.who, s.ID))
	for err == nil {
		_, _, err = c.Read(ctx)
	}
	if websocket.CloseStatus(err) != closeRevoked {
		t.Fatal(err)
	}
	if _, err := h.Kill(ctx, h.who, s.ID); err != nil {
		t.Fatal(err)
	}
}

func TestCreateIsIdempotent(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	ctx := context.Background()
	r := h.shell("echo once")
	r.IdempotencyKey, r.BodyHash = "key-a", []byte("hash-1")
	var mu sync.Mutex
	var ids []sandbox.SessionID
	var toks []Token
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			s, tok, err := h.Create(ctx, h.who, r)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			ids, toks = append(ids, s.ID), append(toks, tok)
			mu.Unlock()
		})
	}
	wg.Wait()
	valid := 0
	for i := range ids {
		if ids[i] != ids[0] {
			t.Fatal("two sessions for one key")
		}
		if g, err := h.Verify(ctx, toks[i].Token); err == nil {
			valid++
			g.Close()
		}
	}
	if valid != 1 {
		t.Fatalf("%d tokens are valid", valid)
	}
	h.reopen()
	s, tok := h.create(r)
	if s.ID != ids[0] {
		t.Fatal("another session after a restart")
	}
	if st := p.attach(s.ID, tok.Token, ""); st.end().Code != 0 {
		t.Fatal("exit")
	}
	bad := r
	bad.BodyHash = []byte("hash-2")
	if _, _, err := h.Create(ctx, h.who, bad); !fault.IsCode(err, "idempotency_mismatch") || !fault.IsClass(err, fault.Unprocessable) {
		t.Fatal(err)
	}
	bad.Principal = "key2"
	if s2, _ := h.create(bad); s2.ID == s.ID {
		t.Fatal("another principal got the session")
	}
	if n := h.Config.Ledger.Used(h.who, h.box, quota.Sessions); n != 2 {
		t.Fatalf("%d sessions charged", n)
	}
}

func TestQuotaAndErase(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{JournalBytes: 1 << 20, SegmentBytes: 64 << 10})
	h.Manager.Close()
	h.conf.Ledger = quota.New(map[quota.Kind]quota.Cap{
		quota.Sessions: {Sandbox: 6}, quota.JournalBytes: {Sandbox: 1 << 20}, quota.Readers: {Sandbox: 2}, quota.Tokens: {Sandbox: 10}})
	h.open()
	p := newPlane(t, h)
	ctx := context.Background()
	// Ended sessions make room: for sessions, and for bytes.
	var first sandbox.SessionID
	for i := range 20 {
		r := h.execAs(ExecRequest{CreateRequest: h.shell("head -c 400000 /dev/zero; exit 2")})
		if r.Exit.Code != 2 {
			t.Fatal(r)
		}
		if i == 0 {
			first = r.Session
		}
	}
	if n := h.Config.Ledger.Used(h.who, h.box, quota.JournalBytes); n > 1<<20+128<<10 || n == 0 {
		t.Fatalf("%d journal bytes charged", n)
	}
	if _, err := h.Get(ctx, h.who, first); !fault.IsCode(err, "session_not_found") {
		t.Fatalf("the oldest session: %v", err)
	}
	list, _, err := h.List(ctx, h.who, h.box, "", 0)
	must(t, err)
	if len(list) == 0 || len(list) > 6 {
		t.Fatalf("%d sessions", len(list))
	}
	// Output that went leaves a gap and the exit.
	oldest := list[len(list)-1]
	tok, err := h.MintAttachToken(ctx, h.who, oldest.ID, "key1", 0)
	must(t, err)
	st := p.events(oldest.ID, tok.Token, "")
	e, err := st.next()
	must(t, err)
	if _, reason := e.gap(t); e.kind != "gap" || reason != "erased" {
		t.Fatalf("%+v", e)
	}
	if x := st.end(); x.Code != 2 {
		t.Fatalf("%+v", x)
	}
	// Running sessions do not make room.
	var run []Session
	for range 6 {
		s, tok := h.create(h.shell("sleep 100"))
		p.attach(s.ID, tok.Token, "").close()
		run = append(run, s)
	}
	if _, _, err := h.Create(ctx, h.who, h.shell("true")); !fault.IsCode(err, "quota") {
		t.Fatal(err)
	}
	until(t, 5*time.Second, "readers are gone", func() bool { return h.ActiveReaders(h.box) == 0 })
	var open []*Stream
	for range 2 {
		s, err := h.Events(ctx, h.who, run[0].ID, journal.ID{})
		must(t, err)
		open = append(open, s)
	}
	if _, err := h.Events(ctx, h.who, run[0].ID, journal.ID{}); !fault.IsCode(err, "quota") {
		t.Fatal(err)
	}
	if h.ActiveReaders(h.box) != 2 || h.RunningSessions(h.box) != 6 {
		t.Fatalf("%d readers, %d running", h.ActiveReaders(h.box), h.RunningSessions(h.box))
	}
	for _, s := range open {
		s.Close()
	}
	for {
		if _, err := h.MintAttachToken(ctx, h.who, run[0].ID, "key1", 0); fault.IsCode(err, "quota") {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// Deleting the sandbox leaves nothing.
	must(t, h.Erase(ctx, h.box))
	must(t, h.Erase(ctx, h.box))
	for _, k := range []quota.Kind{quota.Sessions, quota.JournalBytes, quota.Readers, quota.Tokens} {
		if n := h.Config.Ledger.Used(h.who, h.box, k); n != 0 {
			t.Errorf("%d %s charged after the end", n, k)
		}
	}
	for _, table := range []string{"session_sessions", "session_tokens"} {
		var n int
		must(t, h.db.Read.QueryRow("SELECT count(*) FROM "+table).Scan(&n))
		if n != 0 {
			t.Errorf("%d rows left in %s", n, table)
		}
	}
	if left, err := os.ReadDir(h.conf.Dir); err != nil || len(left) != 0 {
		t.Errorf("left on the disk: %v %v", left, err)
	}
	if _, err := h.Get(ctx, h.who, run[0].ID); !fault.IsCode(err, "session_not_found") {
		t.Errorf("get: %v", err)
	}
}

func TestListPages(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	ctx := context.Background()
	var made []sandbox.SessionID
	for range 7 {
		s, _ := h.create(h.shell("true"))
		made = append(made, s.ID)
	}
	slices.Reverse(made) // newest first
	var seen []sandbox.SessionID
	cursor := ""
	pages := 0
	for {
		l, next, err := h.List(ctx, h.who, h.box, cursor, 3)
		must(t, err)
		pages++
		for _, s := range l {
			seen = append(seen, s.ID)
		}
		if cursor = next; next == "" {
			break
		}
	}
	if !slices.Equal(seen, made) || pages != 3 {
		t.Fatalf("%v on %d pages, want %v", seen, pages, made)
	}
	for _, bad := range []string{"x", "s0", string(h.box), string(sandbox.NewSessionID(h.box)), string(sandbox.NewSessionID(sandbox.NewID()))} {
		if _, _, err := h.List(ctx, h.who, h.box, bad, 3); !fault.IsCode(err, "bad_cursor") {
			t.Errorf("cursor %q: %v", bad, err)
		}
	}
}

func TestCommandsThatCannotRunAreRefused(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	for name, c := range map[string]Command{
		"empty": {}, "both": {Args: []string{"a"}, Shell: "b"}, "nul": {Shell: "a\x00b"}, "env": {Shell: "a", Env: map[string]string{"A=B": "c"}},
		"overflow": {Shell: "a", Overflow: "lose"}, "limit": {Shell: "a", TimeLimit: -1}, "no program": {Args: []string{""}},
	} {
		if _, _, err := h.Create(context.Background(), h.who, CreateRequest{Sandbox: h.box, Command: c}); !fault.IsCode(err, "invalid_command") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := h.Create(context.Background(), h.who, h.shell(strings.Repeat("x", MaxCommandBytes))); !fault.IsCode(err, "command_too_large") {
		t.Error(err)
	}
}

func TestExecDeclaresTruncation(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	r := h.execAs(ExecRequest{CreateRequest: h.shell("head -c 5000 /dev/zero; head -c 300 /dev/zero >&2"), MaxOutput: 1000})
	if len(r.Stdout) != 1000 || r.StdoutTruncated != 4000 || len(r.Stderr) != 300 || r.StderrTruncated != 0 || r.GapBytes != 0 {
		t.Fatalf("%d+%d %d+%d", len(r.Stdout), r.StdoutTruncated, len(r.Stderr), r.StderrTruncated)
	}
}

// A dead disk of the journal holds the process back; nothing is lost.
func TestPausedSandboxRefusesAndGoesOn(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	r := h.shell("cat")
	r.Command.Stdin = true
	s, tok := h.create(r)
	paused := fault.New(fault.Conflict, "sandbox_paused", "the sandbox is paused").Retry(true)
	h.guests.fail(h.box, paused)
	p.problem("POST", "/d/sessions/"+string(s.ID)+"/attach", tok.Token, "", 409, "sandbox_paused")
	h.guests.fail(h.box, nil)
	st := p.attach(s.ID, tok.Token, "")
	st.until("started")
	h.SandboxPaused(h.box)
	h.guests.fail(h.box, paused)
	h.link.cut()
	p.problem("POST", "/d/sessions/"+string(s.ID)+"/stdin", tok.Token, "x", 409, "sandbox_paused")
	if _, err := h.Kill(context.Background(), h.who, s.ID); !fault.IsCode(err, "sandbox_paused") {
		t.Fatal(err)
	}
	h.link.mend()
	h.guests.fail(h.box, nil)
	h.SandboxResumed(h.box)
	p.json("POST", "/d/sessions/"+string(s.ID)+"/stdin?offset=0", tok.Token, "hello", 200, nil)
	st.prints("hello")
	p.json("POST", "/d/sessions/"+string(s.ID)+"/close-stdin", tok.Token, "", 200, nil)
	if x := st.end(); x.Code != 0 {
		t.Fatalf("%+v", x)
	}
}

// The commit of several writers keeps those that succeed and refuses only the
// one that fails.
func TestCommitsShareATransaction(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	var wg sync.WaitGroup
	boom := errors.New("boom")
	for i := range 200 {
		wg.Go(func() {
			err := h.commits.do(context.Background(), func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `INSERT INTO session_tokens (id, kind, hash, tenant, sandbox, principal, created_at, expires_at)
					VALUES (?, 'data', ?, 'acme', 'x', 'p', 0, 9000000000000000)`, fmt.Sprint(i), []byte(fmt.Sprint(i)))
				if err == nil && i%10 == 0 {
					return boom
				}
				return err
			})
			if errors.Is(err, boom) != (i%10 == 0) {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	wg.Wait()
	var n int
	must(t, h.db.Read.QueryRow("SELECT count(*) FROM session_tokens").Scan(&n))
	if n != 180 {
		t.Fatalf("%d rows", n)
	}
}
