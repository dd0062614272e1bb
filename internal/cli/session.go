package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
)

// join connects our own terminal and streams to a session until it ends, and
// gives its end as an ExitError (nil for code 0).
//
// SIGINT and SIGTERM are forwarded. The third SIGINT within two seconds leaves
// the command running and returns, so that nobody is held by a deaf program.
func (a *App) join(ctx context.Context, s *client.Stream, stdin, tty bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if tty {
		restore, err := a.rawTerminal(ctx, s)
		if err != nil {
			return err
		}
		defer restore()
	}
	detached := a.forwardSignals(ctx, cancel, s)
	// Input is sent once the process is there to read it: it runs already where
	// the stream goes on after an event, else the first event says so.
	pump := sync.OnceFunc(func() {
		if stdin {
			go a.pumpStdin(ctx, s)
		}
	})
	if s.Last() != "" {
		pump()
	}
	for {
		ev, err := s.Next(ctx)
		if err != nil {
			if detached() {
				return &ExitError{130, fmt.Errorf("left the command running: `space attach %s` to come back", s.Session())}
			}
			if errors.Is(err, io.EOF) {
				return &ExitError{CodeLost, errors.New("the stream ended without an exit event")}
			}
			return startFailure(err)
		}
		pump()
		if done, err := a.show(ev); done {
			return err
		}
	}
}

// show writes one event; done after the last one.
func (a *App) show(ev client.Event) (done bool, err error) {
	if a.JSON {
		if err := a.line(ev); err != nil {
			return true, &ExitError{CodeFailure, err}
		}
		switch ev.Type {
		case spaceapi.EventError:
			return true, startFailure(ev.Err())
		case spaceapi.EventExit:
			return true, exitError(*ev.Exit)
		}
		return false, nil
	}
	switch ev.Type {
	case spaceapi.EventStdout:
		_, err = a.Stdout.Write(ev.Data)
	case spaceapi.EventStderr:
		_, err = a.Stderr.Write(ev.Data)
	case spaceapi.EventGap:
		fmt.Fprintf(a.Stderr, "\nspace: %d bytes of output are missing here (%s)\n", ev.Gap.Missing, clean(ev.Gap.Reason))
	case spaceapi.EventRewound, spaceapi.EventSuspended:
		fmt.Fprintf(a.Stderr, "\nspace: the sandbox was %s\n", ev.Type)
	case spaceapi.EventError:
		return true, startFailure(ev.Err())
	case spaceapi.EventExit:
		return true, exitError(*ev.Exit)
	}
	if err != nil {
		return true, &ExitError{CodeFailure, err}
	}
	return false, nil
}

// exitError turns the end of a command into our own exit code.
func exitError(e spaceapi.Exit) error {
	switch e.Cause {
	case "exited", "signal":
		if e.Code == 0 {
			return nil
		}
		return &ExitError{Code: e.Code}
	case "time_limit":
		return &ExitError{max(e.Code, 1), errors.New("the command's time limit ended it")}
	}
	why := e.Reason
	if why == "" {
		why = e.Cause
	}
	return &ExitError{CodeLost, fmt.Errorf("the command did not end by itself: %s", clean(why))}
}

// startFailure gives the codes shells use for commands that could not run.
func startFailure(err error) error {
	switch client.Code(err) {
	case "not_found", "command_not_found":
		return &ExitError{CodeMissing, err}
	case "not_executable", "start_failed", "bad_cwd", "no_such_user", "process_limit", "args_too_long":
		return &ExitError{CodeCannot, err}
	}
	return &ExitError{CodeLost, err}
}

func (a *App) forwardSignals(ctx context.Context, cancel context.CancelFunc, s *client.Stream) (detached func() bool) {
	ch := make(chan os.Signal, 8)
	signal.Notify(ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	left := make(chan struct{})
	go func() {
		defer signal.Stop(ch)
		var first time.Time
		n := 0
		for {
			select {
			case <-ctx.Done():
				return
			case sig := <-ch:
				if sig == syscall.SIGINT {
					if now := time.Now(); now.Sub(first) > 2*time.Second {
						first, n = now, 0
					}
					if n++; n >= 3 {
						close(left)
						cancel()
						return
					}
				}
				names := map[os.Signal]string{syscall.SIGINT: "INT", syscall.SIGTERM: "TERM", syscall.SIGHUP: "HUP", syscall.SIGQUIT: "QUIT"}
				sctx, done := context.WithTimeout(ctx, 5*time.Second)
				if err := s.Signal(sctx, names[sig]); err != nil && ctx.Err() == nil {
					fmt.Fprintf(a.Stderr, "space: could not forward the signal: %v\n", err)
				}
				done()
			}
		}
	}()
	return func() bool {
		select {
		case <-left:
			return true
		default:
			return false
		}
	}
}

func (a *App) pumpStdin(ctx context.Context, s *client.Stream) {
	buf := make([]byte, 64<<10)
	for {
		n, err := a.Stdin.Read(buf)
		if n > 0 {
			if werr := s.Write(ctx, buf[:n]); werr != nil {
				// The program may have closed its input or ended: its own exit tells.
				return
			}
		}
		if err != nil {
			_ = s.CloseStdin(ctx) // an ended session has no input to close
			return
		}
	}
}

// rawTerminal puts our terminal into raw mode and follows its size.
func (a *App) rawTerminal(ctx context.Context, s *client.Stream) (restore func(), err error) {
	fd := int(a.Stdin.Fd())
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, &ExitError{CodeUsage, fmt.Errorf("-t needs a terminal: %w", err)}
	}
	winch := make(chan os.Signal, 1)
	signal.Notify(winch, syscall.SIGWINCH)
	go func() {
		defer signal.Stop(winch)
		for {
			select {
			case <-ctx.Done():
				return
			case <-winch:
				if w, h, err := term.GetSize(fd); err == nil {
					_ = s.Resize(ctx, spaceapi.Size{Rows: uint16(h), Cols: uint16(w)}) // the next change tries again
				}
			}
		}
	}()
	return func() { _ = term.Restore(fd, old) }, nil
}

// ptySize is the size to open a terminal with.
func (a *App) ptySize() (*spaceapi.Size, error) {
	w, h, err := term.GetSize(int(a.Stdin.Fd()))
	if err != nil {
		return nil, &ExitError{CodeUsage, errors.New("-t needs a terminal on standard input")}
	}
	return &spaceapi.Size{Rows: uint16(h), Cols: uint16(w)}, nil
}
