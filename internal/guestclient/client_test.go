package guestclient_test

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guest/malicious"
	"github.com/space-platform/space/internal/guestclient"
)

const lie = "guest_protocol_error"

// liar connects a malicious daemon through the real channel.
func liar(t *testing.T, b malicious.Behaviour) *guestclient.Client {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	a := channel.NewAcceptor(l, channel.Options{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = channel.Serve(ctx, func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
		}, malicious.Handler(b), channel.ServeOptions{})
	}()
	c := guestclient.New(a.Dial, guestclient.Options{CallTimeout: time.Second, IdleTimeout: 500 * time.Millisecond})
	t.Cleanup(func() { c.Close(); cancel(); <-done; _ = a.Close() })
	return c
}

// read reads output to its end: joined bytes, exits seen, and the error.
func read(ctx context.Context, c guestclient.Guest) (out string, exits int, err error) {
	o, err := c.Output(ctx, "s1", 0)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = o.Close() }()
	for {
		f, err := o.Next()
		if err != nil {
			return out, exits, err
		}
		out += string(f.Payload)
		if f.Type == guestapi.FrameExit {
			exits++
		}
	}
}

// What each lie must come to, by call. "" means that the call succeeds.
type want struct{ hello, process, list, output, stdin, file string }

func all(code string) want { return want{code, code, code, code, code, code} }

var wants = map[malicious.Behaviour]want{
	malicious.Honest:          {},
	malicious.ExitFirst:       {output: lie},
	malicious.OutputAfterExit: {},
	malicious.TwoExits:        {},
	malicious.AbsurdCode:      {process: lie, list: lie, output: lie},
	malicious.SignalNoCode:    {output: lie},
	malicious.UnknownCause:    {process: lie, list: lie, output: lie},
	malicious.HugeFrame:       {output: lie},
	malicious.UnknownFrame:    {output: lie},
	malicious.Backwards:       {output: lie},
	malicious.Hole:            {output: lie},
	malicious.WrongTotal:      {output: lie},
	malicious.GapOverflow:     {output: lie},
	malicious.KeepaliveFlood:  {output: lie},
	malicious.DribbleOutput:   {output: "guest_timeout"},
	malicious.SilentOutput:    {output: "guest_timeout"},
	malicious.BreakOff:        {output: "guest_unavailable"},
	malicious.OtherID:         {process: lie},
	malicious.BadOffsets:      {process: lie, list: lie},
	malicious.ExitedNoExit:    {process: lie, list: lie},
	malicious.WrongNonce:      {hello: lie},
	malicious.WrongVersion:    {hello: lie},
	malicious.EndlessJSON:     all(lie),
	malicious.DeepJSON:        all(lie),
	malicious.NotJSON:         {lie, lie, lie, "guest_unavailable", lie, lie},
	malicious.DribbleJSON:     {"guest_timeout", "guest_timeout", "guest_timeout", "guest_timeout", "guest_timeout", lie},
	malicious.Silent:          all("guest_timeout"),
	malicious.HugeHeader:      all(lie),
	malicious.EndlessHeader:   all(lie),
	malicious.NotHTTP:         all(lie),
	malicious.Informational:   all(lie),
	malicious.UnknownCode:     all(lie),
	malicious.NastyText:       all(guestapi.CodeIO),
	malicious.Redirect:        all(lie),
	malicious.StdinBackwards:  {stdin: lie},
	malicious.DoubleIDs:       {list: lie},
	malicious.LongList:        {list: lie},
	malicious.ShortFile:       {file: "guest_unavailable"},
	malicious.BadFileMode:     {file: lie},
}

func TestMaliciousGuest(t *testing.T) {
	for _, b := range malicious.HTTP {
		t.Run(string(b), func(t *testing.T) {
			t.Parallel()
			w, ok := wants[b]
			if !ok {
				t.Fatal("no expectation")
			}
			c := liar(t, b)
			ctx := context.Background()
			verify := func(call, code string, f func() error) {
				t.Helper()
				began := time.Now()
				err := f()
				if code == "" && err != nil || code != "" && !fault.IsCode(err, code) {
					t.Errorf("%s: %v, want %q", call, err, code)
				}
				if took := time.Since(began); took > 7*time.Second {
					t.Errorf("%s took %s", call, took)
				}
				if err != nil {
					f := fault.Of(err)
					if len(f.What)+len(f.Why) > 1000 || strings.ContainsAny(f.What+f.Why, "\x1b\r\n\u202e") {
						t.Errorf("%s: the text is not clean: %q", call, f.What)
					}
				}
			}
			verify("hello", w.hello, func() error { _, err := c.Hello(ctx); return err })
			verify("process", w.process, func() error { _, err := c.Process(ctx, "s1"); return err })
			verify("start", w.process, func() error { _, err := c.Start(ctx, guestapi.Start{ID: "s1", Shell: "x"}); return err })
			verify("list", w.list, func() error { _, err := c.Processes(ctx); return err })
			verify("stdin", w.stdin, func() error { _, err := c.Stdin(ctx, "s1", 100, []byte("abc")); return err })
			verify("output", w.output, func() error {
				out, exits, err := read(ctx, c)
				if errors.Is(err, io.EOF) {
					if out != "hello" || exits != 1 {
						t.Errorf("output %q with %d exits", out, exits)
					}
					return nil
				}
				if exits != 0 {
					t.Errorf("an exit was believed")
				}
				return err
			})
			verify("file", w.file, func() error {
				f, err := c.GetFile(ctx, "/x", "")
				if err != nil {
					return err
				}
				defer func() { _ = f.Close() }()
				_, err = io.Copy(io.Discard, io.LimitReader(f, 10<<20))
				return err
			})
		})
	}
}

func TestContextEndsCalls(t *testing.T) {
	c := liar(t, malicious.Silent)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := c.Hello(ctx); !errors.Is(err, context.Canceled) || !fault.IsCode(err, "guest_unavailable") {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Output(ctx, "s1", 0); !errors.Is(err, context.DeadlineExceeded) || !fault.IsCode(err, "guest_timeout") {
		t.Fatal(err)
	}
}

var errPaused = errors.New("paused")

func TestDialErrorIsKept(t *testing.T) {
	c := guestclient.New(func(context.Context) (net.Conn, error) { return nil, errPaused }, guestclient.Options{})
	if _, err := c.Hello(context.Background()); !errors.Is(err, errPaused) || !fault.IsCode(err, "guest_unavailable") {
		t.Fatal(err)
	}
	c.Close()
	if _, err := c.Hello(context.Background()); !fault.IsCode(err, "guest_unavailable") {
		t.Fatal(err)
	}
}
