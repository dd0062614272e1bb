package guest_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guest/guesttest"
	"github.com/space-platform/space/internal/guestclient"
)

type result struct {
	out, err string
	exit     guestapi.ExitStatus
	gaps     uint64
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// collect reads to the exit, acknowledging as a journal would.
func collect(t testing.TB, ctx context.Context, g guestclient.Guest, id string, from uint64) result {
	t.Helper()
	o, err := g.Output(ctx, id, from)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	var r result
	var out, errs bytes.Buffer
	acked := from
	for {
		f, err := o.Next()
		if err != nil {
			t.Fatalf("%s after %d bytes: %v", id, out.Len(), err)
		}
		switch f.Type {
		case guestapi.FrameStdout:
			out.Write(f.Payload)
		case guestapi.FrameStderr:
			errs.Write(f.Payload)
		case guestapi.FrameGap:
			r.gaps += f.Missing
		case guestapi.FrameExit:
			r.out, r.err, r.exit = out.String(), errs.String(), *f.Exit
			return r
		}
		if f.End()-acked >= 32<<10 {
			acked = f.End()
			if err := g.Ack(ctx, id, acked); err != nil {
				t.Fatal(err)
			}
		}
	}
}

var serial struct {
	sync.Mutex
	n int
}

func newID() string {
	serial.Lock()
	defer serial.Unlock()
	serial.n++
	return fmt.Sprintf("s%d", serial.n)
}

func start(t testing.TB, g guestclient.Guest, s guestapi.Start) string {
	t.Helper()
	if s.ID == "" {
		s.ID = newID()
	}
	if _, err := g.Start(within(t, 20*time.Second), s); err != nil {
		t.Fatalf("start %+v: %v", s, err)
	}
	return s.ID
}

func run(t testing.TB, g guestclient.Guest, s guestapi.Start) result {
	t.Helper()
	id := start(t, g, s)
	r := collect(t, within(t, 60*time.Second), g, id, 0)
	if err := g.Forget(within(t, 10*time.Second), id); err != nil {
		t.Fatal(err)
	}
	return r
}

func sh(text string) guestapi.Start { return guestapi.Start{Shell: text} }

func poll(t testing.TB, what string, d time.Duration, ok func() bool) {
	t.Helper()
	for until := time.Now().Add(d); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("not within %s: %s", d, what)
		}
	}
}

func TestHelloAndRestart(t *testing.T) {
	m := guesttest.Start(t)
	a, err := m.Hello(within(t, 5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if m.Isolated() && a.PID != 1 {
		t.Fatalf("pid %d", a.PID)
	}
	id := start(t, m, sh("sleep 100"))
	m.Restart()
	b, err := m.Hello(within(t, 5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if a.BootEpoch == b.BootEpoch {
		t.Fatal("the boot epoch stayed")
	}
	if _, err := m.Process(within(t, 5*time.Second), id); !fault.IsCode(err, guestapi.CodeNoSuchProcess) {
		t.Fatalf("a process of an earlier boot: %v", err)
	}
}

func TestC012StreamsStayApart(t *testing.T) {
	g := guesttest.Start(t)
	r := run(t, g, sh("echo out; echo err >&2; exit 7"))
	if r.out != "out\n" || r.err != "err\n" || r.exit.Code != 7 || r.exit.Cause != guestapi.ExitExited {
		t.Fatalf("%+v", r)
	}
}

func TestOrderOfStreams(t *testing.T) {
	g := guesttest.Start(t)
	id := start(t, g, sh("for i in 1 2 3 4 5; do echo o$i; sleep 0.05; echo e$i >&2; sleep 0.05; done"))
	o, err := g.Output(within(t, 10*time.Second), id, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	var all bytes.Buffer
	for {
		f, err := o.Next()
		if err != nil {
			t.Fatal(err)
		}
		all.Write(f.Payload)
		if f.Type == guestapi.FrameExit {
			break
		}
	}
	if want := "o1\ne1\no2\ne2\no3\ne3\no4\ne4\no5\ne5\n"; all.String() != want {
		t.Fatalf("%q", all.String())
	}
}

func TestC013StartFailures(t *testing.T) {
	g := guesttest.Start(t)
	if r := run(t, g, sh("no-such-program-here")); r.exit.Code != 127 {
		t.Fatalf("%+v", r)
	}
	dir := t.TempDir()
	plain := dir + "/plain"
	if err := os.WriteFile(plain, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	bad := dir + "/bad"
	if err := os.WriteFile(bad, []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	junk := dir + "/junk"
	if err := os.WriteFile(junk, []byte("\x00\x01junk"), 0o755); err != nil {
		t.Fatal(err)
	}
	big := map[string]string{"BIG": strings.Repeat("x", 200<<10)}
	for code, s := range map[string]guestapi.Start{
		guestapi.CodeNotFound:               {Args: []string{"no-such-program-here"}},
		guestapi.CodeNotFound + "/abs":      {Args: []string{"/no/such/program"}},
		guestapi.CodeNotFound + "/interp":   {Args: []string{bad}},
		guestapi.CodeNotExecutable:          {Args: []string{plain}},
		guestapi.CodeNotExecutable + "/dir": {Args: []string{"/tmp"}},
		guestapi.CodeNotExecutable + "/fmt": {Args: []string{junk}},
		guestapi.CodeNoSuchUser:             {Args: []string{"true"}, User: "no-such-user"},
		guestapi.CodeBadCwd:                 {Args: []string{"true"}, Cwd: "/no/such/dir"},
		guestapi.CodeBadCwd + "/file":       {Args: []string{"true"}, Cwd: "/etc/passwd"},
		guestapi.CodeBadCwd + "/rights":     {Args: []string{"true"}, Cwd: "/root", User: "nobody"},
		guestapi.CodeArgsTooLong:            {Args: []string{"true"}, Env: big},
		guestapi.CodeInvalid:                {Args: []string{"true"}, Env: map[string]string{"a=b": ""}},
	} {
		s.ID = newID()
		code, _, _ := strings.Cut(code, "/")
		if code == guestapi.CodeBadCwd && s.User != "" {
			if os.Geteuid() != 0 {
				continue
			}
			if fi, err := os.Stat("/root"); err != nil || fi.Mode().Perm()&1 != 0 {
				continue // the machine lets anyone in
			}
		}
		began := time.Now()
		_, err := g.Start(within(t, 5*time.Second), s)
		if !fault.IsCode(err, code) || !guestclient.IsStartFailure(err) || time.Since(began) > 2*time.Second {
			t.Errorf("%s: %v after %s", code, err, time.Since(began))
		}
		if _, err := g.Process(within(t, 5*time.Second), s.ID); !fault.IsCode(err, guestapi.CodeNoSuchProcess) {
			t.Errorf("%s: a process is left: %v", code, err)
		}
	}
}

func TestC014SignalsAreNotSuccess(t *testing.T) {
	g := guesttest.Start(t)
	if r := run(t, g, sh("kill -SEGV $$")); r.exit.Cause != guestapi.ExitSignal || r.exit.Signal != "SIGSEGV" || r.exit.Code != 139 {
		t.Fatalf("%+v", r.exit)
	}
	if r := run(t, g, sh("exit 137")); r.exit.Cause != guestapi.ExitExited || r.exit.Signal != "" || r.exit.Code != 137 {
		t.Fatalf("%+v", r.exit)
	}
	id := start(t, g, sh("sleep 100"))
	if err := g.Signal(within(t, 5*time.Second), id, "KILL", false); err != nil {
		t.Fatal(err)
	}
	if r := collect(t, within(t, 5*time.Second), g, id, 0); r.exit.Signal != "SIGKILL" || r.exit.Code != 137 {
		t.Fatalf("%+v", r.exit)
	}
	if err := g.Signal(within(t, 5*time.Second), id, "KILL", false); !fault.IsCode(err, guestapi.CodeProcessEnded) {
		t.Fatalf("signal to an ended process: %v", err)
	}
}

func TestC015LastOutputBeforeExit(t *testing.T) {
	g := guesttest.Start(t)
	for i := range 500 {
		if r := run(t, g, guestapi.Start{Args: []string{"printf", "late"}}); r.out != "late" || r.exit.Code != 0 {
			t.Fatalf("round %d: %+v", i, r)
		}
	}
	for range 20 {
		r := run(t, g, sh("head -c 1048576 /dev/zero; printf END"))
		if len(r.out) != 1<<20+3 || !strings.HasSuffix(r.out, "END") {
			t.Fatalf("%d bytes", len(r.out))
		}
	}
}

func TestC016BackgroundJobsHoldPipes(t *testing.T) {
	g := guesttest.Start(t)
	began := time.Now()
	id := start(t, g, sh("sleep 120 & (while :; do echo noise; done) & echo started $!"))
	r := collect(t, within(t, 5*time.Second), g, id, 0)
	if !strings.Contains(r.out, "started") || r.exit.Code != 0 || time.Since(began) > 2*time.Second {
		t.Fatalf("after %s: %d bytes, %+v", time.Since(began), len(r.out), r.exit)
	}
	if r := run(t, g, sh("echo next")); r.out != "next\n" {
		t.Fatalf("%+v", r)
	}
	if g.Isolated() { // the shell may have ended before its job became sleep
		poll(t, "the background job", 5*time.Second, func() bool { return run(t, g, sh("pgrep -c sleep")).out == "1\n" })
	}
	// The noisy job neither blocks nor dies of a closed pipe.
	noisy := regexp.MustCompile(`started (\d+)`).FindStringSubmatch(r.out)
	if noisy == nil {
		t.Fatalf("no pid: %.100q", r.out)
	}
	look := "cpu() { cut -d' ' -f14,15 /proc/" + noisy[1] + "/stat; }; a=$(cpu); for i in $(seq 100); do sleep 0.05; [ \"$(cpu)\" = \"$a\" ] || exit 0; done; exit 1"
	if r := run(t, g, sh(look)); r.exit.Code != 0 {
		t.Fatalf("the background job does not run: %+v", r)
	}
	if err := g.Signal(within(t, 5*time.Second), id, "KILL", true); err != nil {
		t.Fatal(err)
	}
	if r := run(t, g, sh("pgrep -c sleep")); g.Isolated() && r.out != "0\n" {
		t.Fatalf("left after KILL of the tree: %+v", r)
	}
}

const escapes = `
sleep 1001 &
setsid sleep 1002 &
(setsid sh -c 'sleep 1003 & sleep 1003 &' &)
env -i setsid sleep 1004 &
nohup sh -c 'trap "" TERM INT HUP; while :; do sleep 1005; done' >/dev/null 2>&1 &
sleep 0.2
echo ready
wait`

func sleepers(t *testing.T, g guestclient.Guest) string {
	t.Helper()
	return strings.TrimSpace(run(t, g, sh("pgrep -f '[s]leep 100[1-9]' | wc -l")).out)
}

func TestC017KillsTheWholeTree(t *testing.T) {
	g := guesttest.Start(t)
	if !g.Isolated() {
		t.Skip("counts processes by name, so it needs a PID namespace (root)")
	}
	other := start(t, g, sh("sleep 2000"))
	wait := func(id string) {
		t.Helper()
		poll(t, "the tree is up", 5*time.Second, func() bool {
			p, err := g.Process(within(t, 5*time.Second), id)
			return err == nil && p.Next > 0
		})
		if n := sleepers(t, g); n < "6" {
			t.Fatalf("%s sleepers", n)
		}
	}
	id := start(t, g, sh(escapes))
	wait(id)
	began := time.Now()
	if err := g.Signal(within(t, 5*time.Second), id, "SIGKILL", true); err != nil {
		t.Fatal(err)
	}
	if n := sleepers(t, g); n != "0" || time.Since(began) > 2*time.Second {
		t.Fatalf("%s left after %s", n, time.Since(began))
	}
	if r := collect(t, within(t, 5*time.Second), g, id, 0); r.exit.Signal != "SIGKILL" {
		t.Fatalf("%+v", r.exit)
	}

	// Ended by its time limit, and one of the tree ignores TERM.
	id = start(t, g, guestapi.Start{Shell: escapes, TimeLimit: time.Second, Grace: 500 * time.Millisecond})
	wait(id)
	r := collect(t, within(t, 5*time.Second), g, id, 0)
	if r.exit.Cause != guestapi.ExitTimeLimit || r.exit.Code != 143 || r.out != "ready\n" {
		t.Fatalf("%+v", r)
	}
	poll(t, "no process of the session is left", 2*time.Second, func() bool { return sleepers(t, g) == "0" })

	p, err := g.Process(within(t, 5*time.Second), other)
	if err != nil || p.State != guestapi.ProcessRunning {
		t.Fatalf("the other session was hit: %+v %v", p, err)
	}
}

func TestKillOutrunsForking(t *testing.T) {
	g := guesttest.Start(t)
	if !g.Isolated() {
		t.Skip("counts processes by name, so it needs a PID namespace (root)")
	}
	for range 5 {
		// A family that runs away: each generation forks the next and ends.
		id := start(t, g, sh(`f() { (setsid sh -c "$1" "$1" 3007 & exit) ; }; export RUN='sleep 0.001; setsid sh -c "$RUN" 3007 & exit'; for i in 1 2 3 4; do setsid sh -c "$RUN" 3007 & done; wait`))
		time.Sleep(100 * time.Millisecond) // let it run
		if err := g.Signal(within(t, 10*time.Second), id, "KILL", true); err != nil {
			t.Fatal(err)
		}
		// What was killed may take a moment to be gone on a busy host; what had run
		// away would go on for ever.
		for end := time.Now().Add(2 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			r := run(t, g, sh("pgrep -f '[3]007' | wc -l"))
			if strings.TrimSpace(r.out) == "0" {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("left: %q", r.out)
			}
		}
	}
}

func TestC018StdinEnds(t *testing.T) {
	g := guesttest.Start(t)
	for _, s := range []string{"cat", "grep x", "python3 -"} {
		began := time.Now()
		if r := run(t, g, sh(s)); r.out != "" || time.Since(began) > 3*time.Second {
			t.Fatalf("%s: %+v", s, r)
		}
	}
	id := start(t, g, guestapi.Start{Args: []string{"cat"}, Stdin: true})
	ctx := within(t, 10*time.Second)
	if r, err := g.Stdin(ctx, id, 0, []byte("abc")); err != nil || r.Accepted != 3 {
		t.Fatal(r, err)
	}
	if r, err := g.Stdin(ctx, id, 1, []byte("bcd")); err != nil || r.Accepted != 4 { // overlaps
		t.Fatal(r, err)
	}
	r, err := g.Stdin(ctx, id, 9, []byte("x"))
	if f := fault.Of(err); !fault.IsCode(err, guestapi.CodeStdinAhead) || f.Expected == nil || *f.Expected != 4 || r.Accepted != 4 {
		t.Fatal(r, err)
	}
	if r, err := g.CloseStdin(ctx, id); err != nil || !r.Closed {
		t.Fatal(r, err)
	}
	if r := collect(t, ctx, g, id, 0); r.out != "abcd" || r.exit.Code != 0 {
		t.Fatalf("%+v", r)
	}
	if r, err := g.Stdin(ctx, id, 4, []byte("x")); err != nil || !r.Closed || r.Accepted != 4 {
		t.Fatal(r, err)
	}
}

func TestStdinOfAProcessThatDoesNotRead(t *testing.T) {
	g := guesttest.Start(t)
	id := start(t, g, guestapi.Start{Shell: "sleep 1.5; wc -c", Stdin: true})
	data := bytes.Repeat([]byte("x"), 512<<10)
	ctx, cancel := context.WithTimeout(context.Background(), 800*time.Millisecond)
	defer cancel()
	r, err := g.Stdin(ctx, id, 0, data)
	if err != nil || r.Accepted == 0 || r.Accepted >= uint64(len(data)) {
		t.Fatalf("partial acceptance: %+v %v", r, err)
	}
	long := within(t, 20*time.Second)
	for r.Accepted < uint64(len(data)) {
		if r, err = g.Stdin(long, id, r.Accepted, data[r.Accepted:]); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := g.CloseStdin(long, id); err != nil {
		t.Fatal(err)
	}
	if r := collect(t, long, g, id, 0); strings.TrimSpace(r.out) != fmt.Sprint(len(data)) {
		t.Fatalf("%+v", r)
	}
	// A reader that is gone.
	id = start(t, g, guestapi.Start{Shell: "exec <&-; sleep 2", Stdin: true})
	poll(t, "closed by EPIPE", 5*time.Second, func() bool {
		at, err := g.Process(long, id)
		if err != nil {
			t.Fatal(err)
		}
		r, err := g.Stdin(long, id, at.StdinOffset, []byte("x"))
		return err == nil && r.Closed
	})
}

func TestC019HereDocuments(t *testing.T) {
	g := guesttest.Start(t)
	f := t.TempDir() + "/f"
	for _, end := range []string{"", "\n"} {
		if r := run(t, g, sh("cat > "+f+" <<'EOT'\na $HOME\n  b `id`\nc\nEOT"+end)); r.exit.Code != 0 {
			t.Fatalf("%+v", r)
		}
		if r := run(t, g, sh("cat "+f)); r.out != "a $HOME\n  b `id`\nc\n" {
			t.Fatalf("%q", r.out)
		}
	}
}

func TestC021StuckCommand(t *testing.T) {
	g := guesttest.Start(t)
	id := start(t, g, guestapi.Start{Shell: "trap '' TERM INT; sleep 1000; sleep 1000", TimeLimit: time.Second, Grace: time.Second})
	for range 10 {
		if r := run(t, g, sh("echo ok")); r.out != "ok\n" {
			t.Fatalf("%+v", r)
		}
	}
	r := collect(t, within(t, 5*time.Second), g, id, 0)
	if r.exit.Cause != guestapi.ExitTimeLimit || r.exit.Code != 137 {
		t.Fatalf("%+v", r.exit)
	}
}

func TestC004TimeLimitDeliversOutput(t *testing.T) {
	g := guesttest.Start(t)
	began := time.Now()
	r := run(t, g, guestapi.Start{Shell: "echo partial; sleep 60", TimeLimit: time.Second})
	if r.out != "partial\n" || r.exit.Cause != guestapi.ExitTimeLimit || time.Since(began) > 3*time.Second {
		t.Fatalf("%+v after %s", r, time.Since(began))
	}
}

func TestC022EnvironmentIsData(t *testing.T) {
	g := guesttest.Start(t)
	nasty := map[string]string{
		"JSON":  "{\n  \"a\": [1, 2]\n}\n",
		"SUBST": "$(touch /tmp/pwned-by-env) `id` \"q\" 'p' \\ % ${HOME}",
		"OVER":  "sandbox",
		"EMPTY": "",
		"BYTES": "\xff\xfe\x01",
	}
	// JSON cannot carry invalid UTF-8 as a string; what it can is byte exact.
	nasty["BYTES"] = "\u00ff\u0001\u2028"
	ctx := within(t, 10*time.Second)
	if err := g.Configure(ctx, guestapi.Configure{Env: nasty, Hostname: "box"}); err != nil {
		t.Fatal(err)
	}
	r := run(t, g, guestapi.Start{Args: []string{"env", "-0"}, Env: map[string]string{"OVER": "process", "PATH": "/usr/bin:/bin"}})
	got := map[string]string{}
	for kv := range strings.SplitSeq(strings.TrimSuffix(r.out, "\x00"), "\x00") {
		k, v, _ := strings.Cut(kv, "=")
		got[k] = v
	}
	nasty["OVER"], nasty["PATH"], nasty["LANG"], nasty["USER"] = "process", "/usr/bin:/bin", "C.UTF-8", "root"
	if os.Geteuid() != 0 {
		delete(nasty, "USER")
	}
	for k, v := range nasty {
		if got[k] != v {
			t.Errorf("%s: %q, want %q", k, got[k], v)
		}
	}
	if _, err := os.Stat("/tmp/pwned-by-env"); err == nil {
		t.Fatal("a value was run")
	}
	if g.Isolated() {
		if r := run(t, g, sh("hostname")); r.out != "box\n" {
			t.Fatalf("hostname %q", r.out)
		}
	}
}

func TestUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	g := guesttest.Start(t)
	if r := run(t, g, guestapi.Start{Shell: "id -un; id -u; echo $HOME $USER; echo x > /dev/stdout; echo y > /dev/stderr", User: "nobody", Cwd: "/tmp"}); !strings.HasPrefix(r.out, "nobody\n65534\n/nonexistent nobody\nx\n") || r.err != "y\n" {
		t.Fatalf("%+v", r)
	}
	if r := run(t, g, guestapi.Start{Shell: "id -u; id -g; id -G; pwd", User: "1234:5678"}); r.out != "1234\n5678\n5678\n/\n" {
		t.Fatalf("%+v", r)
	}
	if r := run(t, g, guestapi.Start{Shell: "id -u; id -g", User: "4321"}); r.out != "4321\n4321\n" {
		t.Fatalf("%+v", r)
	}
}

func TestC010BlockAndDrop(t *testing.T) {
	g := guesttest.Start(t)
	flag := t.TempDir() + "/finished"
	id := start(t, g, guestapi.Start{Shell: "seq 1 300000; touch " + flag, Overflow: "drop", Window: 64 << 10})
	poll(t, "finished without a reader", 20*time.Second, func() bool { _, err := os.Stat(flag); return err == nil })
	r := collect(t, within(t, 10*time.Second), g, id, 0)
	if want := len(seq(300000)); int(r.gaps)+len(r.out) != want || r.gaps == 0 || !strings.HasSuffix(r.out, "\n300000\n") || len(r.out) > 64<<10 {
		t.Fatalf("gap %d + %d bytes of %d", r.gaps, len(r.out), want)
	}

	// Block: it waits in the window, and goes on after acknowledgement.
	id = start(t, g, guestapi.Start{Shell: "seq 1 300000", Window: 64 << 10})
	ctx := within(t, 20*time.Second)
	poll(t, "window full", 5*time.Second, func() bool {
		p, err := g.Process(ctx, id)
		return err == nil && p.Next-p.Base == 64<<10
	})
	if r := collect(t, ctx, g, id, 0); r.out != seq(300000) || r.gaps != 0 {
		t.Fatalf("%d bytes", len(r.out))
	}
	if err := g.Ack(ctx, id, 1<<40); !fault.IsCode(err, guestapi.CodeOffsetAhead) {
		t.Fatal(err)
	}
	if _, err := g.Output(ctx, id, 1<<40); !fault.IsCode(err, guestapi.CodeOffsetAhead) {
		t.Fatal(err)
	}
}

func seq(n int) string {
	var b strings.Builder
	for i := 1; i <= n; i++ {
		fmt.Fprintln(&b, i)
	}
	return b.String()
}

func TestC007TwoReadersAndResume(t *testing.T) {
	g := guesttest.Start(t)
	id := start(t, g, guestapi.Start{Shell: "seq 1 200000", Window: guestapi.MaxWindow})
	var wg sync.WaitGroup
	for reader := range 2 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			h := sha256.New()
			at, cut := uint64(0), 0
			for done := false; !done; {
				o, err := g.Output(ctx, id, at)
				if err != nil {
					t.Error(err)
					return
				}
				for frames := 0; frames < 3 || cut >= 20; frames++ {
					f, err := o.Next()
					if err != nil {
						t.Error(reader, err)
						return
					}
					h.Write(f.Payload)
					at = f.End()
					if done = f.Type == guestapi.FrameExit; done {
						break
					}
				}
				cut++
				_ = o.Close()
			}
			if want := sha256.Sum256([]byte(seq(200000))); !bytes.Equal(h.Sum(nil), want[:]) {
				t.Errorf("reader %d: joined output differs", reader)
			}
		})
	}
	wg.Wait()
}

func TestHundredMegabytes(t *testing.T) {
	g := guesttest.Start(t)
	const size = 100 << 20
	id := start(t, g, guestapi.Start{Shell: fmt.Sprintf("openssl enc -aes-128-ctr -K 00 -iv 00 -in /dev/zero 2>/dev/null | head -c %d | tee >(sha256sum >&2)", size)})
	ctx := within(t, 60*time.Second)
	o, err := g.Output(ctx, id, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	h := sha256.New()
	var sum bytes.Buffer
	n, acked := 0, uint64(0)
	began := time.Now()
	for done := false; !done; {
		f, err := o.Next()
		if err != nil {
			t.Fatal(err)
		}
		switch f.Type {
		case guestapi.FrameStdout:
			h.Write(f.Payload)
			n += len(f.Payload)
		case guestapi.FrameStderr:
			sum.Write(f.Payload)
		case guestapi.FrameExit:
			done = true
		}
		if f.End()-acked > 128<<10 {
			acked = f.End()
			if err := g.Ack(ctx, id, acked); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%.0f MB/s with hashing on both ends", size/1e6/time.Since(began).Seconds())
	if n != size {
		t.Fatalf("%d bytes", n)
	}
	if got := fmt.Sprintf("%x", h.Sum(nil)); sum.Len() > 0 && !strings.HasPrefix(sum.String(), got) {
		t.Fatalf("hash %s, the guest's is %s", got, sum.String())
	}
	st, err := g.Stats(ctx)
	if err != nil || st.DaemonRSS > 48<<20 && !guesttest.Raced || st.MemoryTotal == 0 || st.Processes == 0 {
		t.Fatalf("%+v %v", st, err)
	}
}

func TestStartOnceOfFifty(t *testing.T) {
	g := guesttest.Start(t)
	counter := t.TempDir() + "/count"
	s := guestapi.Start{ID: newID(), Shell: "echo x >> " + counter + "; sleep 0.2"}
	var wg sync.WaitGroup
	pids := make(chan int, 50)
	for range 50 {
		wg.Go(func() {
			p, err := g.Start(within(t, 20*time.Second), s)
			if err != nil {
				t.Error(err)
			}
			pids <- p.PID
		})
	}
	wg.Wait()
	close(pids)
	first := <-pids
	for p := range pids {
		if p != first {
			t.Fatalf("pids %d and %d", first, p)
		}
	}
	collect(t, within(t, 5*time.Second), g, s.ID, 0)
	if p, err := g.Start(within(t, 5*time.Second), s); err != nil || p.State != guestapi.ProcessExited {
		t.Fatalf("a late duplicate: %+v %v", p, err)
	}
	if b, err := os.ReadFile(counter); err != nil || string(b) != "x\n" {
		t.Fatalf("%q %v", b, err)
	}
	if err := g.Forget(within(t, 5*time.Second), s.ID); err != nil {
		t.Fatal(err)
	}
	if err := g.Forget(within(t, 5*time.Second), s.ID); err != nil {
		t.Fatal("forgetting twice:", err)
	}
}

func TestC082ProcessLimit(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs another user to be limited")
	}
	g := guesttest.StartWith(t, guesttest.Options{Wrap: []string{"prlimit", "--nproc=20"}})
	const user = "54321"
	storm := start(t, g, guestapi.Start{Shell: "f() { f | f & sleep 60; }; f", User: user, Cwd: "/"})
	// The storm goes up and down at the limit; what starts under it stays.
	limited := false
	for range 200 {
		s := guestapi.Start{ID: newID(), Args: []string{"sleep", "60"}, User: user, Cwd: "/"}
		_, err := g.Start(within(t, 5*time.Second), s)
		if limited = fault.IsCode(err, guestapi.CodeProcessLimit); limited {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = g.Signal(within(t, 5*time.Second), s.ID, "KILL", true) }()
	}
	if !limited {
		t.Fatal("the limit is not told")
	}
	if r := run(t, g, sh("echo ok")); r.out != "ok\n" {
		t.Fatalf("the others: %+v", r)
	}
	if err := g.Signal(within(t, 10*time.Second), storm, "KILL", true); err != nil {
		t.Fatal(err)
	}
	if r := run(t, g, sh("pgrep -u 54321 sh | wc -l; pgrep -u 54321 bash | wc -l")); r.out != "0\n0\n" && g.Isolated() {
		t.Fatalf("left of the storm: %q", r.out)
	}
}

func TestOrphansAreReaped(t *testing.T) {
	g := guesttest.Start(t)
	if !g.Isolated() {
		t.Skip("counts zombies of PID 1, so it needs a PID namespace (root)")
	}
	for range 20 {
		run(t, g, sh("(setsid sh -c 'exit 3' &) ; (sleep 0.01 &)"))
	}
	poll(t, "no zombies", 5*time.Second, func() bool {
		return strings.TrimSpace(run(t, g, sh("ps -eo stat= | grep -c ^Z")).out) == "0"
	})
}

func TestShutdown(t *testing.T) {
	g := guesttest.Start(t)
	if !g.Isolated() {
		t.Skip("ends every process it sees, so it needs a PID namespace (root)")
	}
	mark := t.TempDir() + "/term"
	start(t, g, sh("trap 'echo bye > "+mark+"; exit' TERM; while :; do sleep 0.05; done"))
	start(t, g, sh("trap '' TERM; while :; do sleep 1; done"))
	time.Sleep(200 * time.Millisecond) // until the traps are set
	if err := g.Shutdown(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(mark); err != nil || string(b) != "bye\n" {
		t.Fatalf("TERM did not come first: %q %v", b, err)
	}
	poll(t, "the machine is off", 5*time.Second, func() bool { return !g.Acceptor.Connected() })
}
