package guest_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guest/guesttest"
	"github.com/space-platform/space/internal/guestclient"
)

// screen collects a terminal's output in the background.
type screen struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	exit *guestapi.ExitStatus
	at   uint64
}

func (s *screen) follow(t *testing.T, ctx context.Context, g guestclient.Guest, id string) {
	s.mu.Lock()
	at := s.at
	s.mu.Unlock()
	o, err := g.Output(ctx, id, at)
	if err != nil {
		t.Error(err)
		return
	}
	go func() {
		defer func() { _ = o.Close() }()
		for {
			f, err := o.Next()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.buf.Write(f.Payload)
			s.at = f.End()
			s.exit = f.Exit
			s.mu.Unlock()
		}
	}()
}

func (s *screen) text() string { s.mu.Lock(); defer s.mu.Unlock(); return s.buf.String() }
func (s *screen) ended() *guestapi.ExitStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.exit
}

type typist struct {
	t   *testing.T
	g   guestclient.Guest
	id  string
	off uint64
}

func (k *typist) keys(text string) {
	k.t.Helper()
	r, err := k.g.Stdin(within(k.t, 5*time.Second), k.id, k.off, []byte(text))
	if err != nil {
		k.t.Fatal(err)
	}
	k.off = r.Accepted
}

var term = &guestapi.Size{Rows: 24, Cols: 80}

func TestC023ControlKeys(t *testing.T) {
	for name, o := range map[string]guesttest.Options{
		"default":                             {},
		"daemon started with signals ignored": {Wrap: []string{"env", "--ignore-signal=INT", "--ignore-signal=QUIT", "--ignore-signal=HUP", "--ignore-signal=TSTP", "--ignore-signal=PIPE", "--ignore-signal=CHLD"}},
		"daemon started with signals blocked": {Wrap: []string{"env", "--block-signal=INT,QUIT,TERM,CHLD,USR1"}},
	} {
		t.Run(name, func(t *testing.T) {
			g := guesttest.StartWith(t, o)
			// bash itself ignores nothing without a terminal. Signals 32 and 33 are the C
			// library's own: what make starts has them ignored.
			r := run(t, g, sh("grep -E 'Sig(Blk|Ign)' /proc/$$/status"))
			var blocked, ignored uint64
			if _, err := fmt.Sscanf(r.out, "SigBlk:\t%x\nSigIgn:\t%x\n", &blocked, &ignored); err != nil || blocked != 0 || ignored&^(3<<31) != 0 {
				t.Fatalf("a process does not begin with defaults:\n%s", r.out)
			}
			for key, want := range map[string]string{"\x03": "130", "\x1c": "131"} {
				id := start(t, g, guestapi.Start{Args: []string{"sh", "-i"}, PTY: term, Env: map[string]string{"PS1": "ready> "}})
				ctx := within(t, 20*time.Second)
				var s screen
				s.follow(t, ctx, g, id)
				k := &typist{t: t, g: g, id: id}
				poll(t, "prompt", 5*time.Second, func() bool { return strings.Contains(s.text(), "ready> ") })
				k.keys("sleep 60\n")
				poll(t, "sleep runs", 5*time.Second, func() bool {
					return strings.TrimSpace(run(t, g, sh("ps -o comm= -g "+fmt.Sprint(pid(t, g, id))+" | grep -c sleep")).out) == "1"
				})
				began := time.Now()
				k.keys(key)
				poll(t, "prompt again", time.Second, func() bool { return strings.Count(s.text(), "ready> ") >= 2 })
				k.keys("echo code=$?\n")
				poll(t, "code", 2*time.Second, func() bool { return strings.Contains(s.text(), "code="+want) })
				t.Logf("%q came through after %s", key, time.Since(began))
				k.keys("exit 5\n")
				poll(t, "exit", 2*time.Second, func() bool { return s.ended() != nil })
				if e := s.ended(); e.Code != 5 {
					t.Fatalf("%+v", e)
				}
			}
		})
	}
}

func pid(t *testing.T, g guestclient.Guest, id string) int {
	t.Helper()
	p, err := g.Process(within(t, 5*time.Second), id)
	if err != nil {
		t.Fatal(err)
	}
	return p.PID
}

func TestC024TerminalSurvivesDisconnect(t *testing.T) {
	g := guesttest.Start(t)
	id := start(t, g, guestapi.Start{Shell: "i=0; while [ $i -lt 20 ]; do i=$((i+1)); echo n$i; sleep 0.05; done", PTY: term})
	ctx, cut := context.WithCancel(context.Background())
	var s screen
	s.follow(t, ctx, g, id)
	poll(t, "output", 5*time.Second, func() bool { return strings.Contains(s.text(), "n3\r\n") })
	cut()
	before := pid(t, g, id)
	time.Sleep(300 * time.Millisecond) // away
	if pid(t, g, id) != before {
		t.Fatal("another process")
	}
	rest := collect(t, within(t, 10*time.Second), g, id, 0)
	var want strings.Builder
	for i := 1; i <= 20; i++ {
		fmt.Fprintf(&want, "n%d\r\n", i)
	}
	if rest.out != want.String() {
		t.Fatalf("%q", rest.out)
	}
}

func TestTerminal(t *testing.T) {
	g := guesttest.Start(t)
	id := start(t, g, guestapi.Start{Shell: "stty size; tty; test -t 0 && test -t 1 && test -t 2 && echo all; echo $TERM; read x; stty size; cat; echo bye", PTY: &guestapi.Size{Rows: 33, Cols: 111}})
	ctx := within(t, 20*time.Second)
	var s screen
	s.follow(t, ctx, g, id)
	poll(t, "start", 5*time.Second, func() bool { return strings.Contains(s.text(), "xterm-256color\r\n") })
	if got := s.text(); !strings.HasPrefix(got, "33 111\r\n/dev/pts/") || !strings.Contains(got, "\r\nall\r\n") {
		t.Fatalf("%q", got)
	}
	if err := g.Resize(ctx, id, guestapi.Size{Rows: 50, Cols: 132}); err != nil {
		t.Fatal(err)
	}
	k := &typist{t: t, g: g, id: id}
	k.keys("go\n")
	poll(t, "resized", 5*time.Second, func() bool { return strings.Contains(s.text(), "50 132\r\n") })
	if _, err := g.CloseStdin(ctx, id); err != nil {
		t.Fatal(err)
	}
	poll(t, "end of input", 5*time.Second, func() bool { return s.ended() != nil })
	if !strings.HasSuffix(s.text(), "bye\r\n") {
		t.Fatalf("%q", s.text())
	}
	plain := start(t, g, sh("sleep 5"))
	if err := g.Resize(ctx, plain, guestapi.Size{Rows: 1, Cols: 1}); !fault.IsCode(err, guestapi.CodeNoTerminal) {
		t.Fatal(err)
	}
	if err := g.Resize(ctx, id, guestapi.Size{Rows: 1, Cols: 1}); err != nil && !fault.IsCode(err, guestapi.CodeProcessEnded) {
		t.Fatal(err)
	}
}

// What a terminal's process printed before it ended is there, also when nobody
// had read it yet: the kernel throws away what a hung-up terminal still holds,
// so the daemon has to be quick.
func TestTerminalLastOutput(t *testing.T) {
	g := guesttest.Start(t)
	want := strings.ReplaceAll(seq(8000), "\n", "\r\n")
	for range 50 {
		if r := run(t, g, guestapi.Start{Args: []string{"seq", "1", "8000"}, PTY: term}); r.out != want {
			t.Fatalf("%d bytes of %d", len(r.out), len(want))
		}
	}
}
