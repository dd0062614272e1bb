package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/test/e2e/server"
)

// The codes of commands come through, and those of what could not run are the
// shell's.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := create(t, s.Client(), small())
	for _, x := range []struct {
		code int
		args []string
	}{
		{0, []string{"true"}},
		{7, []string{"sh", "-c", "exit 7"}},
		{139, []string{"sh", "-c", "kill -SEGV $$"}},
		{127, []string{"no-such-program"}},
		{126, []string{"/etc/passwd"}},
		{137, []string{"sh", "-c", "exit 137"}},
	} {
		if r := s.CLI(append([]string{"exec", sb.ID, "--"}, x.args...)...); r.Code != x.code {
			t.Errorf("exec %q: code %d, not %d; %s", x.args, r.Code, x.code, r.Err)
		}
	}
	if r := s.CLI("exec", "--time-limit", "1s", sb.ID, "--", "sleep", "60"); r.Code == 0 || r.Code == 125 || !strings.Contains(r.Err, "time limit") {
		t.Errorf("time limit: code %d; %s", r.Code, r.Err)
	}
	if r := s.CLI("exec", "--cwd", "/nowhere", sb.ID, "--", "true"); r.Code != 126 {
		t.Errorf("a missing directory: code %d; %s", r.Code, r.Err)
	}
	if r := s.CLI("exec", "nosuchsandbox", "--", "true"); r.Code != 125 {
		t.Errorf("a missing sandbox: code %d; %s", r.Code, r.Err)
	}
	if r := s.CLI("exec", "--no-such-flag", sb.ID); r.Code != 2 {
		t.Errorf("a wrong flag: code %d", r.Code)
	}
}

// Every command of a life, in text and in JSON.
func TestCommandLine(t *testing.T) {
	t.Parallel()
	s := shared(t)
	name := "cli-" + strconv.FormatInt(time.Now().UnixNano(), 36)
	do := func(args ...string) string {
		t.Helper()
		r := s.CLI(args...)
		if r.Code != 0 {
			t.Fatalf("%q: code %d: %s%s", args, r.Code, r.Out, r.Err)
		}
		return r.Out
	}
	into := func(v any, args ...string) {
		t.Helper()
		if text := do(append([]string{"--json"}, args...)...); json.Unmarshal([]byte(text), v) != nil {
			t.Fatalf("%q gave no JSON: %.300s", args, text)
		}
	}
	id := strings.TrimSpace(do("create", "--name", name, "--template", "tiny:latest", "--memory", "256", "--disk", "128", "--metadata", "from="+name, "-e", "GREETING=hallo"))
	t.Cleanup(func() { remove(t, s.Client(), id) })
	if got := do("exec", name, "--", "sh", "-c", `echo "$GREETING $1"; echo kept >~/f`, "sh", "welt"); got != "hallo welt\n" {
		t.Errorf("exec printed %q", got)
	}
	if r := s.CLI("exec", name, "--", "sh", "-c", "echo out; echo err >&2"); r.Out != "out\n" || r.Err != "err\n" {
		t.Errorf("streams: %+v", r)
	}
	var l spaceapi.List[spaceapi.Sandbox]
	if into(&l, "ls", "--metadata", "from="+name); len(l.Items) != 1 || l.Items[0].ID != id || l.Items[0].Name != name {
		t.Errorf("ls --json: %+v", l)
	}
	if got := do("ls"); !strings.Contains(got, id) || !strings.Contains(got, "SANDBOX") {
		t.Errorf("ls: %s", got)
	}
	for _, x := range []struct{ verb, state string }{{"pause", "paused"}, {"resume", "running"}, {"stop", "stopped"}, {"start", "running"}, {"pause", "paused"}, {"wake", "running"}} {
		do(x.verb, name)
		var sb spaceapi.Sandbox
		if into(&sb, "get", name); sb.State != x.state || sb.ID != id {
			t.Errorf("after %s: %+v", x.verb, sb)
		}
	}
	if got := do("exec", name, "--", "sh", "-c", "cat ~/f"); got != "kept\n" {
		t.Errorf("the file holds %q", got)
	}
	cmd := s.Command("exec", "-i", name, "--", "cat")
	cmd.Stdin = strings.NewReader("through\n")
	if b, err := cmd.Output(); err != nil || string(b) != "through\n" {
		t.Errorf("exec -i: %q, %v", b, err)
	}
	sess := strings.TrimSpace(do("exec", "-d", name, "--", "sh", "-c", "echo later; exit 3"))
	if r := s.CLI("attach", sess); r.Code != 3 || r.Out != "later\n" {
		t.Errorf("attach: %+v", r)
	}
	var sessions spaceapi.List[spaceapi.Session]
	if into(&sessions, "sessions", name); len(sessions.Items) < 2 {
		t.Errorf("sessions: %+v", sessions)
	}
	var ops spaceapi.List[spaceapi.Operation]
	if into(&ops, "ops", "--sandbox", id); len(ops.Items) != 7 {
		t.Errorf("%d operations, not create and six verbs", len(ops.Items))
	}
	var op spaceapi.Operation
	if into(&op, "ops", ops.Items[0].ID); op.State != "succeeded" || len(op.Steps) == 0 {
		t.Errorf("operation %+v", op)
	}
	var tmpl spaceapi.List[spaceapi.Template]
	into(&tmpl, "templates")
	named := map[string]bool{} // the store may keep older images, which have no name any more
	for _, i := range tmpl.Items {
		named[i.Reference] = true
	}
	if !named["base:latest"] || !named["tiny:latest"] {
		t.Errorf("templates: %+v", tmpl)
	}
	var key spaceapi.Key
	into(&key, "keys", "create", "--scope", "sandboxes:r", name)
	if text := do("keys", "ls"); !strings.Contains(text, key.ID) || strings.Contains(text, key.Secret) || key.Secret == "" {
		t.Errorf("keys ls: %s", text)
	}
	do("keys", "revoke", key.ID)
	if got := do("audit", "--limit", "200"); !strings.Contains(got, id) {
		t.Errorf("audit does not name the sandbox: %s", got)
	}
	if text := do("--version"); !strings.Contains(text, "test") {
		t.Errorf("version: %s", text)
	}
	if r := s.CLI("doctor"); r.Code != 0 {
		t.Errorf("doctor: %+v", r)
	}
	do("rm", name)
	if r := s.CLI("get", name); r.Code != 1 || r.Err == "" {
		t.Errorf("get after rm: %+v", r)
	}
}

// Ctrl-C reaches the command, which decides.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := create(t, s.Client(), small())
	for _, x := range []struct {
		text string
		code int
	}{
		{"echo up; exec sleep 60", 130},
		{"trap 'exit 5' INT; echo up; while :; do sleep 0.1; done", 5},
	} {
		cmd := s.Command("exec", sb.ID, "--", "sh", "-c", x.text)
		var out watched
		cmd.Stdout = &out
		ok(t, cmd.Start())
		out.await(t, "up\n")
		ok(t, cmd.Process.Signal(os.Interrupt))
		if code := ended(t, cmd); code != x.code {
			t.Errorf("%q interrupted: code %d, not %d", x.text, code, x.code)
		}
	}
}

func ended(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	select {
	case <-done:
		return cmd.ProcessState.ExitCode()
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
		<-done
		t.Fatalf("%q did not end", cmd.Args)
		return -1
	}
}

// watched collects what a program prints.
type watched struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

func (w *watched) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.b.Reset()
}

func (w *watched) await(t *testing.T, text string) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(w.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no %q in %q", text, w.String())
		}
	}
}

// A shell on a terminal: prompt, keys, size, exit code.
func TestTerminal(t *testing.T) {
	t.Parallel()
	s := shared(t)
	in := small()
	in.Template = "base:latest"
	sb := create(t, s.Client(), in)
	cmd := s.Command("exec", "-it", "-e", "PS1=prompt> ", sb.ID, "--", "bash", "--norc", "-i")
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 31, Cols: 101})
	ok(t, err)
	defer tty.Close()
	var seen watched
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := tty.Read(buf)
			_, _ = seen.Write(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	typed := func(text string) {
		t.Helper()
		_, err := tty.WriteString(text)
		ok(t, err)
	}
	seen.await(t, "prompt> ")
	typed("stty size\r")
	seen.await(t, "31 101\r\n")
	ok(t, pty.Setsize(tty, &pty.Winsize{Rows: 40, Cols: 120}))
	ok(t, cmd.Process.Signal(syscall.SIGWINCH))
	typed("until [ \"$(stty size)\" = '40 120' ]; do sleep 0.05; done; echo resi''zed\r")
	seen.await(t, "resized\r\n")
	typed("sleep 60\r")
	time.Sleep(200 * time.Millisecond) // the key must meet the program, not the shell's line editor
	typed("\x03")
	typed("echo code=$?\r")
	seen.await(t, "code=130")
	typed("exit 9\r")
	if code := ended(t, cmd); code != 9 {
		t.Errorf("the shell's code is %d, not 9: %s", code, seen.String())
	}
}

// `space run` without a server serves for the time of the command; two at once
// share one; afterwards nothing is left.
func TestRunWithoutServer(t *testing.T) {
	t.Parallel()
	server.Templates(t, true)
	s, err := server.New(server.Options{})
	ok(t, err)
	t.Cleanup(func() {
		for _, trouble := range s.Close() {
			t.Error(trouble)
		}
	})
	var wg sync.WaitGroup
	for range 2 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if r := s.CLI("run", "--", "python3", "-c", "print(6*7)"); r.Code != 0 || r.Out != "42\n" {
				t.Errorf("run: %+v", r)
			}
		}()
	}
	wg.Wait()
	if r := s.CLI("run", "--template", "tiny:latest", "--", "sh", "-c", "exit 7"); r.Code != 7 {
		t.Errorf("run: %+v", r)
	}
	cmd := s.Command("run", "--template", "tiny:latest", "--", "sh", "-c", "echo up; exec sleep 60")
	var printed watched
	cmd.Stdout = &printed
	ok(t, cmd.Start())
	printed.await(t, "up\n")
	ok(t, cmd.Process.Signal(os.Interrupt))
	if code := ended(t, cmd); code != 130 {
		t.Errorf("interrupted: code %d", code)
	}
	if left := s.Gone("", 15*time.Second); len(left) > 0 {
		t.Errorf("left: %q", left)
	}

	// One that is killed cannot delete; its server ends nevertheless, the machine
	// is powered off.
	cmd = s.Command("run", "--template", "tiny:latest", "--timeout", "1m", "--", "sh", "-c", "echo up; exec sleep 60")
	printed.reset()
	cmd.Stdout = &printed
	ok(t, cmd.Start())
	printed.await(t, "up\n")
	ok(t, cmd.Process.Kill())
	_ = cmd.Wait()
	for end := time.Now().Add(20 * time.Second); len(server.Processes(s.Layout.Run)) > 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still there: %v", server.Processes(s.Layout.Run))
		}
	}
	ok(t, s.Up()) // an ordinary server finds it, and Close deletes it
}
