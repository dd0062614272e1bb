package fake_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/fake"
	"github.com/space-platform/space/internal/sandbox"
)

var errBoom = errors.New("boom")

func spec() runtime.Spec {
	return runtime.Spec{
		ID: sandbox.NewID(), TemplateDigest: "sha256:any",
		Resources: sandbox.Resources{MilliCPU: 1000, MemoryBytes: 256 << 20, DiskBytes: 1 << 20, MaxProcesses: 64},
	}
}

// inBubble runs f with a World in a bubble of virtual time.
func inBubble(t *testing.T, f func(t *testing.T, w *fake.World, d *fake.Driver), options ...fake.Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := fake.NewWorld(options...)
		defer w.Close()
		f(t, w, fake.New(w))
	})
}

func boot(t *testing.T, d *fake.Driver) runtime.Machine {
	t.Helper()
	m, err := d.Create(t.Context(), spec())
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m
}

func client(m runtime.Machine) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return m.Dial(ctx) },
	}}
}

func call(t *testing.T, m runtime.Machine, method, path string, in any) (int, string) {
	t.Helper()
	body, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://guest"+path, strings.NewReader(string(body)))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client(m).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(out)
}

// output reads a process's stream to its exit.
func output(t *testing.T, m runtime.Machine, id string) (string, guestapi.ExitStatus) {
	t.Helper()
	path := strings.Replace(guestapi.PathOutput, "{id}", id, 1)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://guest"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client(m).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	fr := guestapi.NewFrameReader(resp.Body, 0)
	var text strings.Builder
	for {
		f, err := fr.Next()
		if err != nil {
			t.Fatalf("after %q: %v", text.String(), err)
		}
		switch f.Type {
		case guestapi.FrameExit:
			return text.String(), *f.Exit
		case guestapi.FrameKeepalive:
		case guestapi.FrameGap:
			fmt.Fprintf(&text, "[gap %d]", f.Missing)
		default:
			fmt.Fprintf(&text, "%s:%s", f.Type, f.Payload)
		}
	}
}

func TestProcessRunsOnceAndItsOutputIsKept(t *testing.T) {
	inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
		m := boot(t, d)
		for range 3 {
			if code, body := call(t, m, "POST", guestapi.PathProcesses, guestapi.Start{ID: "s1", Shell: "echo hello; sleep 3600; nope; exit 7"}); code != 200 {
				t.Fatalf("start: %d %s", code, body)
			}
		}
		began := time.Now()
		text, exit := output(t, m, "s1")
		if want := "stdout:hello\nstderr:sh: nope: not found\n"; text != want || exit.Code != 7 || exit.Cause != guestapi.ExitExited {
			t.Errorf("output %q, exit %+v; want %q and code 7", text, exit, want)
		}
		if d := time.Since(began); d != time.Hour {
			t.Errorf("the process took %v of virtual time, want 1h", d)
		}
		if n := w.Executions("s1"); n != 1 {
			t.Errorf("%d executions, want 1", n)
		}
	})
}

func TestSignalAndTimeLimitAreDistinct(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *fake.World, d *fake.Driver) {
		m := boot(t, d)
		call(t, m, "POST", guestapi.PathProcesses, guestapi.Start{ID: "a", Args: []string{"sleep", "60"}})
		call(t, m, "POST", strings.Replace(guestapi.PathSignal, "{id}", "a", 1), guestapi.Signal{Signal: "TERM"})
		if _, exit := output(t, m, "a"); exit.Cause != guestapi.ExitSignal || exit.Signal != "SIGTERM" || exit.Code != 143 {
			t.Errorf("after TERM: %+v", exit)
		}
		call(t, m, "POST", guestapi.PathProcesses, guestapi.Start{ID: "b", Args: []string{"sleep", "60"}, TimeLimit: time.Second})
		if _, exit := output(t, m, "b"); exit.Cause != guestapi.ExitTimeLimit {
			t.Errorf("after the limit: %+v", exit)
		}
	})
}

func TestWindowBlocksUntilAcknowledged(t *testing.T) {
	inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
		w.Handle("spew", func(p *fake.Proc) int {
			if _, err := p.Stdout.Write(make([]byte, 1000)); err != nil {
				return 9
			}
			return 0
		})
		m := boot(t, d)
		call(t, m, "POST", guestapi.PathProcesses, guestapi.Start{ID: "b", Args: []string{"spew"}, Window: 100})
		call(t, m, "POST", guestapi.PathProcesses, guestapi.Start{ID: "d", Args: []string{"spew"}, Window: 100, Overflow: "drop"})
		synctest.Wait()
		procs := w.Daemon(m.ID()).Processes()
		if p := procs["b"]; p.Next != 100 || p.State != guestapi.ProcessRunning {
			t.Errorf("block: %+v, want it to wait at 100", p)
		}
		if p := procs["d"]; p.Next != 1000 || p.Base == 0 || p.Exit == nil {
			t.Errorf("drop: %+v, want it to have ended with a gap", p)
		}
		if text, _ := output(t, m, "d"); !strings.HasPrefix(text, "[gap 900]") {
			t.Errorf("drop: output %.20q, want an explicit gap of 900", text)
		}
		call(t, m, "POST", strings.Replace(guestapi.PathAck, "{id}", "b", 1), guestapi.Ack{Offset: 40})
		synctest.Wait()
		if p := w.Daemon(m.ID()).Processes()["b"]; p.Next != 140 || p.Base != 40 {
			t.Errorf("after the acknowledgement: %+v, want base 40, next 140", p)
		}
	})
}

func TestStdinIsByOffset(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *fake.World, d *fake.Driver) {
		m := boot(t, d)
		call(t, m, "POST", guestapi.PathProcesses, guestapi.Start{ID: "c", Args: []string{"cat"}, Stdin: true})
		send := func(offset int, text string) (int, string) {
			req, err := http.NewRequestWithContext(t.Context(), "POST",
				fmt.Sprintf("http://guest/v1/processes/c/stdin?offset=%d", offset), strings.NewReader(text))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := client(m).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			return resp.StatusCode, string(b)
		}
		send(0, "abc")
		send(1, "bcd")
		if code, body := send(9, "x"); code != 409 || !strings.Contains(body, `"accepted":4`) {
			t.Errorf("ahead: %d %s, want 409 with accepted 4", code, body)
		}
		call(t, m, "POST", "/v1/processes/c/close-stdin", struct{}{})
		text, exit := output(t, m, "c")
		if got := strings.ReplaceAll(text, "stdout:", ""); got != "abcd" || exit.Code != 0 {
			t.Errorf("cat gave %q, %+v; want abcd, 0", got, exit)
		}
	})
}

func TestPauseFreezesGuest(t *testing.T) {
	inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
		m := boot(t, d)
		call(t, m, "POST", guestapi.PathProcesses, guestapi.Start{ID: "p", Shell: "sleep 5; echo late"})
		if err := m.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if p := w.Daemon(m.ID()).Processes()["p"]; p.Next != 0 {
			t.Errorf("a paused machine printed %d bytes", p.Next)
		}
		if err := m.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		if text, _ := output(t, m, "p"); text != "stdout:late\n" {
			t.Errorf("after resume %q", text)
		}
	})
}

func TestFaultsStrikeEveryStep(t *testing.T) {
	// do passes each step once on a machine that runs.
	do := map[fake.Op]func(context.Context, *fake.Driver, runtime.Machine) error{
		fake.OpStart:   func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error { return m.Start(ctx) },
		fake.OpPause:   func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error { return m.Pause(ctx) },
		fake.OpResume:  func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error { return m.Resume(ctx) },
		fake.OpStop:    func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error { return m.Stop(ctx) },
		fake.OpDestroy: func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error { return m.Destroy(ctx) },
		fake.OpDial:    func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error { _, err := m.Dial(ctx); return err },
		fake.OpStats:   func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error { _, err := m.Stats(ctx); return err },
		fake.OpStatus: func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error {
			_, err := m.Status(ctx)
			return err
		},
		fake.OpWait: func(ctx context.Context, _ *fake.Driver, m runtime.Machine) error { _, err := m.Wait(ctx); return err },
		fake.OpList: func(ctx context.Context, d *fake.Driver, _ runtime.Machine) error { _, err := d.List(ctx); return err },
		fake.OpAdopt: func(ctx context.Context, d *fake.Driver, m runtime.Machine) error {
			_, err := d.Adopt(ctx, m.ID())
			return err
		},
	}
	create := func(ctx context.Context, d *fake.Driver, _ runtime.Machine) error {
		_, err := d.Create(ctx, spec())
		return err
	}
	for _, op := range fake.Ops() {
		f := do[op]
		if f == nil {
			f = create
		}
		t.Run(string(op)+"/error", func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
				m := boot(t, d)
				a := w.On(op, fake.Any, fake.Fault{Err: errBoom, Times: 1})
				if err := f(t.Context(), d, m); !errors.Is(err, errBoom) || a.Struck() != 1 {
					t.Fatalf("error %v after %d strikes, want boom after 1", err, a.Struck())
				}
				if leaks := w.Leaks(m.ID()); len(leaks) > 0 {
					t.Errorf("an error left %v", leaks)
				}
			})
		})
		t.Run(string(op)+"/hang", func(t *testing.T) {
			inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
				m := boot(t, d)
				a := w.On(op, fake.Any, fake.Fault{Hang: true})
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if err := f(ctx, d, m); !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("context ended: %v", err)
				}
				done := make(chan error, 1)
				go func() { done <- f(t.Context(), d, m) }()
				synctest.Wait()
				if a.Hanging() != 1 {
					t.Fatalf("%d hang, want 1", a.Hanging())
				}
				d.Kill()
				if err := <-done; err == nil {
					t.Error("the call of a killed process succeeded")
				}
			})
		})
	}
}

func TestAfterLosesOnlyTheAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
		s := spec()
		w.On(fake.OpCreateDone, s.ID, fake.Fault{After: true, Err: errBoom, Times: 1})
		w.On(fake.OpStart, s.ID, fake.Fault{After: true, Err: errBoom, Times: 1})
		if _, err := d.Create(t.Context(), s); !errors.Is(err, errBoom) {
			t.Fatal(err)
		}
		m, err := d.Create(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Start(t.Context()); !errors.Is(err, errBoom) {
			t.Fatal(err)
		}
		if err := m.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := w.Census().Starts(s.ID); n != 1 {
			t.Errorf("%d boots, want 1", n)
		}
	})
}

func TestKillInEveryStepOfCreateLeavesAHalfThatCanGoOn(t *testing.T) {
	for _, op := range []fake.Op{fake.OpCreateBegin, fake.OpCreateDisk, fake.OpCreateDone} {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/after=%v", op, after), func(t *testing.T) {
				inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
					s := spec()
					w.On(op, s.ID, fake.Fault{After: after, Call: d.Kill, Times: 1})
					if _, err := d.Create(t.Context(), s); err == nil {
						t.Fatal("the call of a killed process succeeded")
					}
					if got := len(w.Leaks()) > 0; got != (after || op != fake.OpCreateBegin) {
						t.Fatalf("left on the host: %v", w.Leaks())
					}
					d = fake.New(w)
					m, err := d.Create(t.Context(), s)
					if err != nil {
						t.Fatal(err)
					}
					if err := m.Start(t.Context()); err != nil {
						t.Fatal(err)
					}
					if err := m.Destroy(t.Context()); err != nil {
						t.Fatal(err)
					}
					if leaks := w.Leaks(); len(leaks) > 0 {
						t.Errorf("left on the host: %v", leaks)
					}
				})
			})
		}
	}
}

func TestCensusSeesTwoMachinesOfOneSandbox(t *testing.T) {
	c := fake.NewCensus()
	a, b := fake.NewWorld(fake.WithCensus(c)), fake.NewWorld(fake.WithCensus(c))
	defer a.Close()
	defer b.Close()
	s := spec()
	for _, w := range []*fake.World{a, b} {
		m, err := fake.New(w).Create(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := c.Doubles(); !slices.Equal(got, []sandbox.ID{s.ID}) {
		t.Errorf("doubles %v, want %v", got, s.ID)
	}
}

func TestRoomAndDelay(t *testing.T) {
	inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
		w.On(fake.OpCreateDisk, fake.Any, fake.Fault{Delay: time.Minute})
		began := time.Now()
		boot(t, d)
		if got := time.Since(began); got != time.Minute {
			t.Errorf("create took %v, want the delay of 1m", got)
		}
		if _, err := d.Create(t.Context(), spec()); !errors.Is(err, runtime.ErrNoSpace) {
			t.Errorf("a second machine: %v, want ErrNoSpace", err)
		}
	}, fake.WithRoom(1))
}

func TestMutedGuestAnswersWhenItHearsAgain(t *testing.T) {
	inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
		m := boot(t, d)
		w.Mute(m.ID(), true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := m.Dial(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("dial of a deaf guest: %v", err)
		}
		w.Mute(m.ID(), false)
		call(t, m, "POST", guestapi.PathHello, guestapi.Hello{Version: guestapi.Version, Nonce: "n"})
	})
}

func TestOwnGuest(t *testing.T) {
	var asked string
	guest := func(_ runtime.Spec, bootID string) (net.Conn, error) {
		asked = bootID
		near, far := net.Pipe()
		go func() { _, _ = far.Write([]byte("lie")); _ = far.Close() }()
		return near, nil
	}
	inBubble(t, func(t *testing.T, w *fake.World, d *fake.Driver) {
		m := boot(t, d)
		c, err := m.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(c)
		st, _ := w.Status(m.ID())
		if string(b) != "lie" || asked != st.BootID || asked == "" {
			t.Errorf("read %q from the guest of boot %q, machine is in boot %q", b, asked, st.BootID)
		}
	}, fake.WithGuest(guest))
}
