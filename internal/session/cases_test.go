package session

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/internal/fault"
)

// world is a host with a data-plane client.
func world(t testing.TB, l Limits) (*host, *plane) {
	t.Helper()
	h := newHost(t, l)
	return h, newPlane(t, h)
}

// A loop is streamed while the guest link breaks, the host's process restarts
// and every client drops: no exit before the end, and all of it once.
func TestC001StreamEndIsTrue(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	n, lines, pause := pick(4, 20), pick(60, 300), pick("0.02", "1")
	type one struct {
		s   Session
		tok Token
		st  *stream
		out bytes.Buffer
	}
	var all []*one
	for range n {
		s, tok := h.create(h.shell(fmt.Sprintf("i=1; while [ $i -le %d ]; do echo $i; i=$((i+1)); sleep %s; done", lines, pause)))
		all = append(all, &one{s: s, tok: tok, st: p.attach(s.ID, tok.Token, "")})
	}
	drop := func() {
		for _, o := range all {
			o.st.close()
			o.out.Write(o.st.out.Bytes())
		}
	}
	again := func() {
		for _, o := range all {
			o.st = p.events(o.s.ID, o.tok.Token, o.st.last)
		}
	}
	for _, o := range all {
		o.st.prints("5\n")
	}
	// The link to the guest breaks; streams stay open and see nothing of it.
	h.link.cut()
	time.Sleep(pick(300*time.Millisecond, 5*time.Second)) // how long the link is away
	h.link.mend()
	for _, o := range all {
		o.st.prints("10\n")
	}
	drop()
	h.reopen()
	again()
	for _, o := range all {
		o.st.until("stdout")
	}
	drop()
	again()
	var want strings.Builder
	for i := 1; i <= lines; i++ {
		fmt.Fprintln(&want, i)
	}
	for _, o := range all {
		x := o.st.end()
		if x.Cause != CauseExited || x.Code != 0 {
			t.Fatalf("exit %+v", x)
		}
		o.out.Write(o.st.out.Bytes())
		if o.out.String() != want.String() {
			t.Fatalf("joined output has %d bytes, want %d", o.out.Len(), want.Len())
		}
	}
}

func TestC002SilenceIsNotDeath(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{Keepalive: pick(100*time.Millisecond, 10*time.Second)})
	s, tok := h.create(h.shell("sleep " + pick("2", "400") + "; echo done"))
	st := p.attach(s.ID, tok.Token, "")
	if x := st.end(); x.Code != 0 || st.out.String() != "done\n" {
		t.Fatalf("%+v %q", x, st.out.String())
	}
	if want := pick(10, 30); st.keeps < want {
		t.Fatalf("%d keepalives, want %d", st.keeps, want)
	}
}

// The machine dies: the stream ends with a typed error within seconds, what is
// known of the cause is told, and a new call fails at once.
func TestC003LossOfTheSandboxIsReported(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ cause, reason, kind, want string }{
		{"machine_died", "the machine ended", "error", CauseSandboxLost},
		{CauseOutOfMemory, "memory limit", "exit", CauseOutOfMemory},
	} {
		t.Run(c.cause, func(t *testing.T) {
			h, p := world(t, Limits{})
			s, tok := h.create(h.shell("echo up; sleep 600"))
			st := p.attach(s.ID, tok.Token, "")
			st.prints("up\n")
			within(t, 10*time.Second, "the end", func() {
				h.machine.Kill()
				h.guests.fail(h.box, fault.New(fault.Conflict, "sandbox_not_running", "the sandbox is failed"))
				h.SandboxEnded(h.box, c.cause, c.reason)
				e := st.until(c.kind)
				if !strings.Contains(e.data, c.want) {
					t.Fatalf("%+v", e)
				}
				if _, err := st.next(); err != io.EOF {
					t.Fatalf("after the end: %v", err)
				}
			})
			got, err := h.Get(context.Background(), h.who, s.ID)
			must(t, err)
			if got.Exit == nil || got.Exit.Cause != c.want || got.Exit.Code != -1 || !strings.Contains(got.Exit.Reason, c.reason) {
				t.Fatalf("%+v", got.Exit)
			}
			within(t, time.Second, "a refused exec", func() {
				if _, err := h.Exec(context.Background(), h.who, ExecRequest{CreateRequest: h.shell("true")}); !fault.IsCode(err, "sandbox_not_running") {
					t.Fatal(err)
				}
			})
		})
	}
}

// Nobody tells, but another boot answers: the old processes are gone.
func TestC003AnotherBootMeansLost(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	s, tok := h.create(h.shell("echo up; sleep 600"))
	st := p.attach(s.ID, tok.Token, "")
	st.prints("up\n")
	within(t, 15*time.Second, "the end", func() {
		h.machine.Restart()
		if e := st.until("error"); !strings.Contains(e.data, `"code":"sandbox_lost"`) {
			t.Fatalf("%+v", e)
		}
	})
}

func TestC004TimeLimits(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	mark := filepath.Join(t.TempDir(), "alive")
	r := h.shell("echo partial; while :; do date > " + mark + "; sleep 0.05; done")
	r.Command.TimeLimit = time.Second
	within(t, 3*time.Second, "the end", func() {
		out := h.execAs(ExecRequest{CreateRequest: r})
		if out.Exit.Cause != CauseTimeLimit || out.Exit.Code == 0 || string(out.Stdout) != "partial\n" {
			t.Fatal(out)
		}
	})
	still(t, mark)
}

// still checks that nobody writes the file any more.
func still(t testing.TB, path string) {
	t.Helper()
	before, err := os.Stat(path)
	must(t, err)
	time.Sleep(500 * time.Millisecond) // what must not happen has to be waited for
	after, err := os.Stat(path)
	must(t, err)
	if !after.ModTime().Equal(before.ModTime()) || after.Size() != before.Size() {
		t.Fatal("a process of the session lives on")
	}
}

func TestC005ReconnectToARunningCommand(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{AttachWithin: 300 * time.Millisecond})
	r := h.shell("trap 'echo got; exit 4' USR1; i=0; while :; do i=$((i+1)); echo $i; sleep " + pick("0.05", "1") + "; done")
	r.Command.Stdin = true
	s, tok := h.create(r)
	st := p.attach(s.ID, tok.Token, "")
	st.prints("3\n")
	st.close()
	time.Sleep(pick(600*time.Millisecond, 180*time.Second)) // no call at all: longer than an unattached session may wait
	st2 := p.events(s.ID, tok.Token, st.last)
	st2.prints(fmt.Sprintf("%d\n", strings.Count(st.out.String(), "\n")+3))
	p.json("POST", "/d/sessions/"+string(s.ID)+"/signal", tok.Token, `{"signal":"USR1"}`, 204, nil)
	if x := st2.end(); x.Code != 4 {
		t.Fatalf("%+v", x)
	}
	if st2.out.Bytes()[0] == '1' && strings.HasPrefix(st2.out.String(), "1\n2\n") {
		t.Fatal("the stream began anew")
	}
}

func TestC006ReplayHasNoSilentGap(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{JournalBytes: 512 << 10, SegmentBytes: 64 << 10})
	s, tok := h.create(h.shell("echo first; sleep 0.2; seq 1 500000; exit 3"))
	st := p.attach(s.ID, tok.Token, "")
	st.prints("first\n")
	st.close()
	until(t, 60*time.Second, "the command ends", func() bool {
		got, err := h.Get(context.Background(), h.who, s.ID)
		must(t, err)
		return got.Exit != nil
	})
	st2 := p.events(s.ID, tok.Token, st.last)
	e, err := st2.next()
	must(t, err)
	missing, reason := e.gap(t)
	if e.kind != "gap" || reason != "window" || offset(t, st.last)+missing != offset(t, e.id) {
		t.Fatalf("%+v after %s", e, st.last)
	}
	got, err := h.Get(context.Background(), h.who, s.ID)
	must(t, err)
	if got.FirstID != e.id {
		t.Fatalf("the gap ends at %s, the first id is %s", e.id, got.FirstID)
	}
	x := st2.end()
	var all strings.Builder
	all.WriteString("first\n")
	for i := 1; i <= 500000; i++ {
		fmt.Fprintln(&all, i)
	}
	if x.Code != 3 || !strings.HasSuffix(all.String(), st2.out.String()) || uint64(all.Len()-st2.out.Len()) != missing+6 {
		t.Fatalf("exit %+v, %d bytes after a gap of %d of %d", x, st2.out.Len(), missing, all.Len())
	}
}

func TestC007ReplayIsExactlyOnce(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	s, tok := h.create(h.shell("seq 1 200000; exit 9"))
	var want bytes.Buffer
	for i := 1; i <= 200000; i++ {
		fmt.Fprintln(&want, i)
	}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			var got bytes.Buffer
			exits := 0
			st := p.attach(s.ID, tok.Token, "")
			for range 20 {
				for range rand.IntN(6) {
					e, err := st.next()
					if err != nil {
						break
					}
					if e.kind == "exit" {
						exits++
					}
				}
				st.close()
				got.Write(st.out.Bytes())
				st = p.attach(s.ID, tok.Token, st.last)
			}
			for {
				e, err := st.next()
				if err != nil {
					break
				}
				if e.kind == "exit" {
					exits++
				}
			}
			got.Write(st.out.Bytes())
			if exits != 1 || !bytes.Equal(got.Bytes(), want.Bytes()) {
				t.Errorf("%d exits, %d bytes of %d", exits, got.Len(), want.Len())
			}
		})
	}
	wg.Wait()
	// Finished, unknown and a bad cursor are three answers.
	done := p.events(s.ID, tok.Token, "")
	x := done.end()
	if x.Code != 9 {
		t.Fatalf("%+v", x)
	}
	rest := p.events(s.ID, tok.Token, done.last)
	if e, err := rest.next(); err != io.EOF {
		t.Fatalf("after the last id: %+v %v", e, err)
	}
	other := string(s.ID)[:len(s.ID)-1] + pick2(s.ID[len(s.ID)-1] == 'a', "b", "a")
	p.problem("GET", "/d/sessions/"+other+"/events", tok.Token, "", 404, "session_not_found")
	p.problem("GET", "/d/sessions/"+string(s.ID)+"/events?after=1.999999999", tok.Token, "", 400, "unknown_event_id")
	p.problem("GET", "/d/sessions/"+string(s.ID)+"/events?after=7.1", tok.Token, "", 400, "unknown_event_id")
	p.problem("GET", "/d/sessions/"+string(s.ID)+"/events?after=nonsense", tok.Token, "", 400, "invalid_event_id")
}

func pick2[T any](ok bool, a, b T) T {
	if ok {
		return a
	}
	return b
}

// A stops reading; B and C go on, over a pause too.
func TestC008OneSlowReader(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{WriteTimeout: 500 * time.Millisecond, JournalBytes: 2 << 20, SegmentBytes: 256 << 10})
	r := h.shell("cat")
	r.Command.Stdin = true
	s, tok := h.create(r)
	slow := p.attach(s.ID, tok.Token, "")
	slow.until("started")
	fast := p.attach(s.ID, tok.Token, "")
	feed := func(st *stream, n int) {
		t.Helper()
		chunk := bytes.Repeat([]byte("0123456789abcde\n"), 4096)
		have := st.out.Len()
		for sent := 0; sent < n; sent += len(chunk) {
			within(t, 2*time.Second, "a chunk", func() {
				p.json("POST", "/d/sessions/"+string(s.ID)+"/stdin", tok.Token, string(chunk), 200, nil)
				for st.out.Len() < have+sent+len(chunk) {
					if e, err := st.next(); err != nil || e.kind == "gap" {
						t.Fatalf("%+v %v", e, err)
					}
				}
			})
		}
	}
	feed(fast, 5<<20)
	h.SandboxPaused(h.box)
	h.SandboxResumed(h.box)
	third := p.attach(s.ID, tok.Token, fast.last)
	feed(third, pick(4<<20, 40<<20))
	p.json("POST", "/d/sessions/"+string(s.ID)+"/close-stdin", tok.Token, "", 200, nil)
	if x := third.end(); x.Code != 0 {
		t.Fatalf("%+v", x)
	}
	// A was dropped, or sees the gap when it reads on.
	for {
		e, err := slow.next()
		if err != nil {
			break // dropped
		}
		if e.kind == "gap" {
			break
		}
		if e.kind == "exit" {
			t.Fatal("the slow reader saw everything: it was not slow")
		}
	}
}

func TestC010NobodyReading(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{JournalBytes: 1 << 20, SegmentBytes: 256 << 10})
	done := filepath.Join(t.TempDir(), "finished")
	s, tok := h.create(h.shell("seq 1 3000000; touch " + done + "; exit 5"))
	p.attach(s.ID, tok.Token, "").close()
	until(t, 60*time.Second, "the command finishes", func() bool { _, err := os.Stat(done); return err == nil })
	st := p.events(s.ID, tok.Token, "")
	if x := st.end(); x.Code != 5 {
		t.Fatalf("%+v", x)
	}
	var n int64
	must(t, filepath.Walk(h.conf.Dir, func(_ string, i os.FileInfo, err error) error {
		if err == nil && i.Mode().IsRegular() {
			n += i.Size()
		}
		return err
	}))
	if n > 1<<20+512<<10 {
		t.Fatalf("%d bytes on the disk", n)
	}
}

func TestC011BytesSurvive(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	s, tok := h.create(h.shell(`printf '\342\202'; sleep 0.2; printf '\254'; i=0; while [ $i -lt 1000 ]; do printf '\342\202\254%.0s' 1 2 3 4 5 6 7 8 9 10; i=$((i+1)); done; head -c 100000 /dev/urandom | tee /dev/stderr`))
	st := p.attach(s.ID, tok.Token, "")
	st.end()
	text := strings.Repeat("€", 10001)
	out := st.out.Bytes()
	if string(out[:len(text)]) != text {
		t.Fatal("characters were changed")
	}
	if sha256.Sum256(out[len(text):]) != sha256.Sum256(st.errs.Bytes()) || st.errs.Len() != 100000 {
		t.Fatal("raw bytes were changed")
	}
}

func TestC012StdoutAndStderrStayApart(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	r := h.exec("echo out; echo err >&2; exit 7")
	if string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" || r.Exit.Cause != CauseExited || r.Exit.Code != 7 {
		t.Fatal(r)
	}
	s, tok := h.create(h.shell("echo out; echo err >&2; exit 7"))
	st := p.attach(s.ID, tok.Token, "")
	if x := st.end(); st.out.String() != "out\n" || st.errs.String() != "err\n" || x.Code != 7 {
		t.Fatalf("%q %q %+v", st.out.String(), st.errs.String(), x)
	}
}

func TestC013EveryCommandEnds(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	within(t, 2*time.Second, "a missing program in a shell", func() {
		if r := h.exec("no-such-program-here"); r.Exit.Code != 127 || r.Exit.Cause != CauseExited {
			t.Fatal(r)
		}
	})
	for code, c := range map[string]Command{
		"not_found":    {Args: []string{"no-such-program-here"}},
		"bad_cwd":      {Args: []string{"/bin/true"}, Cwd: "/no/such/folder"},
		"no_such_user": {Args: []string{"/bin/true"}, User: "nobody-of-this-name"},
	} {
		within(t, 2*time.Second, code, func() {
			r := h.execAs(ExecRequest{CreateRequest: CreateRequest{Sandbox: h.box, Command: c}})
			if r.Exit.Cause != CauseStartFailed || r.Exit.Code != -1 || !strings.HasPrefix(r.Exit.Reason, code+":") {
				t.Fatal(r)
			}
		})
	}
	s, tok := h.create(CreateRequest{Sandbox: h.box, Command: Command{Args: []string{"no-such-program-here"}}})
	st := p.attach(s.ID, tok.Token, "")
	e, err := st.next()
	must(t, err)
	if e.kind != "error" || !strings.Contains(e.data, `"code":"start_failed"`) || !strings.Contains(e.data, "not_found") {
		t.Fatalf("%+v", e)
	}
}

func TestC014SignalsAreNotSuccess(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	if r := h.exec("kill -SEGV $$"); r.Exit.Cause != CauseSignal || r.Exit.Code != 139 || r.Exit.Signal != "SIGSEGV" {
		t.Fatal(r)
	}
	if r := h.exec("exit 137"); r.Exit.Cause != CauseExited || r.Exit.Code != 137 || r.Exit.Signal != "" {
		t.Fatal(r)
	}
	s, tok := h.create(h.shell("echo up; exec sleep 100"))
	st := p.attach(s.ID, tok.Token, "")
	st.prints("up\n")
	p.json("POST", "/d/sessions/"+string(s.ID)+"/signal", tok.Token, `{"signal":"KILL","tree":true}`, 204, nil)
	if x := st.end(); x.Cause != CauseSignal || x.Code != 137 || x.Signal != "SIGKILL" {
		t.Fatalf("%+v", x)
	}
	p.problem("POST", "/d/sessions/"+string(s.ID)+"/signal", tok.Token, `{"signal":"KILL"}`, 409, "session_ended")
}

func TestC015LastOutputBeforeExit(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{ExecOutput: 4 << 20})
	for range pick(30, 500) {
		if r := h.exec("printf late"); string(r.Stdout) != "late" || r.Exit.Code != 0 {
			t.Fatal(r)
		}
	}
	for range pick(5, 500) {
		r := h.exec("head -c 1000000 /dev/zero; printf END")
		if len(r.Stdout) != 1000003 || !bytes.HasSuffix(r.Stdout, []byte("\x00END")) {
			t.Fatalf("%d bytes", len(r.Stdout))
		}
	}
}

func TestC016BackgroundJobs(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	mark := filepath.Join(t.TempDir(), "alive")
	within(t, 2*time.Second, "a command with a background job", func() {
		r := h.exec("(while :; do date +%N > " + mark + "; sleep 0.05; done) & echo started")
		if string(r.Stdout) != "started\n" || r.Exit.Code != 0 {
			t.Fatal(r)
		}
	})
	within(t, 2*time.Second, "the next command", func() {
		if r := h.exec("echo next"); string(r.Stdout) != "next\n" {
			t.Fatal(r)
		}
	})
	must2 := func() string { b, _ := os.ReadFile(mark); return string(b) }
	first := must2()
	until(t, 5*time.Second, "the job lives", func() bool { return must2() != first })
}

func TestC017KillMeansTheWholeTree(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	dir := t.TempDir()
	loop := func(f string) string {
		return "(while :; do date >> " + f + "; sleep 0.05; done) & echo up; wait"
	}
	other, otok := h.create(h.shell("echo up; sleep 100"))
	ost := p.attach(other.ID, otok.Token, "")
	ost.prints("up\n")

	r := h.shell(loop(dir + "/a"))
	r.Command.TimeLimit = pick(500*time.Millisecond, 3*time.Second)
	if out := h.execAs(ExecRequest{CreateRequest: r}); out.Exit.Cause != CauseTimeLimit {
		t.Fatal(out)
	}
	still(t, dir+"/a")

	s, tok := h.create(h.shell(loop(dir + "/b")))
	st := p.attach(s.ID, tok.Token, "")
	st.prints("up\n")
	until(t, 5*time.Second, "the child writes", func() bool { _, err := os.Stat(dir + "/b"); return err == nil })
	within(t, 2*time.Second, "kill", func() {
		got, err := h.Kill(context.Background(), h.who, s.ID)
		must(t, err)
		if got.State != Exited || got.Exit.Cause != CauseSignal || got.Exit.Signal != "SIGKILL" {
			t.Fatalf("%+v", got.Exit)
		}
	})
	still(t, dir+"/b")
	if _, err := h.Kill(context.Background(), h.who, s.ID); err != nil {
		t.Fatalf("again: %v", err)
	}
	// A caller that goes takes its command along.
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error)
	go func() {
		_, err := h.Exec(ctx, h.who, ExecRequest{CreateRequest: h.shell(loop(dir + "/c"))})
		gone <- err
	}()
	until(t, 5*time.Second, "the child writes", func() bool { _, err := os.Stat(dir + "/c"); return err == nil })
	cancel()
	if err := <-gone; !fault.IsCode(err, "exec_cancelled") {
		t.Fatal(err)
	}
	still(t, dir+"/c")
	if got, err := h.Get(context.Background(), h.who, other.ID); err != nil || got.State != Running {
		t.Fatalf("another session: %+v %v", got, err)
	}
}

func TestC018StdinEnds(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	for text, code := range map[string]int{"cat": 0, "grep x": 1} {
		within(t, 3*time.Second, text, func() {
			if r := h.exec(text); r.Exit.Code != code || len(r.Stdout) > 0 {
				t.Fatal(r)
			}
		})
	}
	r := h.shell("cat")
	r.Command.Stdin = true
	s, tok := h.create(r)
	path := "/d/sessions/" + string(s.ID)
	p.problem("POST", path+"/stdin?offset=0", tok.Token, "abc", 409, "session_not_started")
	st := p.attach(s.ID, tok.Token, "")
	var got StdinReply
	p.json("POST", path+"/stdin?offset=0", tok.Token, "ab", 200, &got)
	if got.Accepted != 2 {
		t.Fatalf("%+v", got)
	}
	p.json("POST", path+"/stdin?offset=1", tok.Token, "bc", 200, &got) // repeated in part
	if got.Accepted != 3 {
		t.Fatalf("%+v", got)
	}
	if d := p.problem("POST", path+"/stdin?offset=5", tok.Token, "x", 409, "stdin_offset_ahead"); d.Expected == nil || *d.Expected != 3 {
		t.Fatalf("%+v", d)
	}
	p.json("POST", path+"/close-stdin", tok.Token, "", 200, &got)
	if x := st.end(); x.Code != 0 || st.out.String() != "abc" {
		t.Fatalf("%+v %q", x, st.out.String())
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 40000)
	out := h.execAs(ExecRequest{CreateRequest: h.shell("cat"), StdinData: big})
	if !bytes.Equal(out.Stdout, big) {
		t.Fatalf("%d of %d bytes came back", len(out.Stdout), len(big))
	}
}

func TestC019ShellTextIsPassedIntact(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	f := filepath.Join(t.TempDir(), "f")
	for _, end := range []string{"\n", ""} {
		if r := h.exec("cat > " + f + " <<'EOF'\none $HOME\n\ttwo `x` \\ \"q\"\nthree\nEOF" + end); r.Exit.Code != 0 {
			t.Fatal(r)
		}
		if r := h.exec("cat " + f); string(r.Stdout) != "one $HOME\n\ttwo `x` \\ \"q\"\nthree\n" {
			t.Fatal(r)
		}
	}
}

func TestC020OneCommandCannotPoisonASession(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	if r := h.exec("echo a; exit 3"); r.Exit.Code != 3 || string(r.Stdout) != "a\n" {
		t.Fatal(r)
	}
	if r := h.exec("echo b"); r.Exit.Code != 0 || string(r.Stdout) != "b\n" {
		t.Fatal(r)
	}
}

func TestC021OneStuckCommandCannotPoisonASandbox(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	r := h.shell("trap '' TERM INT; while :; do sleep 1000; done")
	r.Command.TimeLimit = pick(time.Second, 5*time.Second)
	done := make(chan ExecResult)
	go func() {
		out, _ := h.Exec(context.Background(), h.who, ExecRequest{CreateRequest: r})
		done <- out
	}()
	for range 10 {
		within(t, 2*time.Second, "echo", func() {
			if r := h.exec("echo ok"); string(r.Stdout) != "ok\n" {
				t.Fatal(r)
			}
		})
	}
	within(t, r.Command.TimeLimit+4*time.Second, "the end of the stuck one", func() {
		if out := <-done; out.Exit.Cause != CauseTimeLimit {
			t.Fatal(out)
		}
	})
	h.exec("echo ok")
}

func TestC022EnvironmentValuesAreData(t *testing.T) {
	t.Parallel()
	h := newHost(t, Limits{})
	values := []string{"{\n \"a\": [1,\n 2]\n}\n", "$(touch /tmp/ran)`id`'\"\\%s", "", " x ", "€"}
	for _, v := range values {
		r := h.shell(`printf %s "$V"`)
		r.Command.Env = map[string]string{"V": v}
		if out := h.execAs(ExecRequest{CreateRequest: r}); string(out.Stdout) != v {
			t.Fatalf("%q became %q", v, out.Stdout)
		}
	}
}

// The interrupt key reaches the program in a terminal, and the shell stays.
func TestC023TerminalControlKeys(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	s, tok, st := terminal(h, p)
	type_ := func(text string) {
		p.json("POST", "/d/sessions/"+string(s.ID)+"/stdin", tok.Token, text, 200, nil)
	}
	for i, key := range []string{"\x03", "\x1c"} {
		// The program itself says that it is there: the key cannot come too early.
		type_(fmt.Sprintf("sh -c 'echo go$((%d+1)); exec sleep 60'\n", 10*i))
		st.prints(fmt.Sprintf("go%d\r\n", 10*i+1))
		within(t, 2*time.Second, "the key", func() {
			type_(key)
			type_(fmt.Sprintf("echo back$((%d+1))\n", 10*i))
			st.prints(fmt.Sprintf("back%d\r\n", 10*i+1))
		})
	}
	p.json("POST", "/d/sessions/"+string(s.ID)+"/resize", tok.Token, `{"rows":40,"cols":123}`, 204, nil)
	type_("stty size; exit 6\n")
	st.prints("40 123\r\n")
	if x := st.end(); x.Code != 6 {
		t.Fatalf("%+v", x)
	}
}

func TestC024TerminalsSurviveDisconnects(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	s, tok, st := terminal(h, p)
	p.json("POST", "/d/sessions/"+string(s.ID)+"/stdin", tok.Token,
		"echo pid=$$; for i in $(seq 1 "+pick("20", "120")+"); do echo n$i; sleep "+pick("0.05", "1")+"; done; echo same=$$; exit\n", 200, nil)
	st.prints("n3\r\n")
	st.close()
	time.Sleep(pick(200*time.Millisecond, 30*time.Second)) // the client is away
	st2 := p.attach(s.ID, tok.Token, st.last)
	st2.end()
	all := st.out.String() + st2.out.String()
	var pid, same int
	if _, err := fmt.Sscanf(all[strings.LastIndex(all, "pid="):], "pid=%d", &pid); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(all[strings.LastIndex(all, "same="):], "same=%d", &same); err != nil {
		t.Fatal(err)
	}
	if pid != same || strings.Count(all, "n7\r\n") != 1 {
		t.Fatalf("pid %d and %d in %q", pid, same, all)
	}
}

// terminal opens a shell in a terminal.
func terminal(h *host, p *plane) (Session, Token, *stream) {
	h.t.Helper()
	r := CreateRequest{Sandbox: h.box, Command: Command{Args: []string{"/bin/sh", "-i"}, PTY: terminalSize}}
	s, tok := h.create(r)
	st := p.attach(s.ID, tok.Token, "")
	st.until("stdout")
	return s, tok, st
}
