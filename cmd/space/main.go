// Command space is the whole of SPACE in one binary: the server's roles and the
// command line. It holds flags and wiring, nothing else.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/space-platform/space/internal/cli"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/lease"
)

// version is set by the build.
var version = "unknown"

func main() {
	if err := failpoint.FromEnv(); err != nil {
		fmt.Fprintln(os.Stderr, "space:", err)
		os.Exit(cli.CodeUsage)
	}
	err := root().ExecuteContext(context.Background())
	if err == nil {
		return
	}
	code := cli.CodeFailure
	var e *cli.ExitError
	if errors.As(err, &e) {
		code = e.Code
		err = e.Err
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "space:", cli.Message(err))
	}
	os.Exit(code)
}

func root() *cobra.Command {
	app := &cli.App{
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Server: os.Getenv("SPACE_API_URL"), Key: os.Getenv("SPACE_API_KEY"),
	}
	c := &cobra.Command{
		Use:           "space",
		Short:         "Isolated Linux machines for programs that agents write",
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	c.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &cli.ExitError{Code: cli.CodeUsage, Err: err} })
	f := c.PersistentFlags()
	f.StringVar(&app.Server, "server", app.Server, "address of the control API (SPACE_API_URL); default the local server")
	f.StringVar(&app.Layout.Data, "data-dir", fromEnv("SPACE_DATA_DIR", layout.DefaultData), "durable state (SPACE_DATA_DIR)")
	f.StringVar(&app.Layout.Run, "run-dir", fromEnv("SPACE_RUN_DIR", layout.DefaultRun), "state that ends with the boot (SPACE_RUN_DIR)")
	f.BoolVar(&app.JSON, "json", false, "answer in JSON")
	app.Ephemeral = func(ctx context.Context) (io.Closer, error) { return ephemeral(ctx, app.Layout, app.Stderr) }
	app.Commands(c)
	for _, sub := range c.Commands() {
		if sub.Name() == "audit" {
			sub.AddCommand(verifyCmd(&app.Layout, app), recordsCmd(&app.Layout))
		}
	}
	c.AddCommand(upCmd(&app.Layout), serveCmd(&app.Layout), doctorCmd(app), failpointsCmd(app))
	return c
}

// failpointsCmd names the places where tests make this binary die.
func failpointsCmd(app *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "failpoints", Short: "List the failpoints (for tests)", Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return app.Print(failpoint.Names(), func(w io.Writer) {
				for _, n := range failpoint.Names() {
					fmt.Fprintln(w, n)
				}
			})
		},
	}
}

func fromEnv(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

// ephemeral holds a lease on the local server, starting one when there is none.
func ephemeral(ctx context.Context, l layout.Layout, stderr io.Writer) (io.Closer, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute) // the first start builds a template
	defer cancel()
	said := ""
	progress := func(s string) {
		if s != said {
			said = s
			fmt.Fprintln(stderr, "space:", s)
		}
	}
	for started, wait := false, 20*time.Millisecond; ; {
		held, err := lease.Take(ctx, l.LeaseSocket(), progress)
		switch {
		case err == nil:
			return held, nil
		case ctx.Err() != nil:
			return nil, fmt.Errorf("the server did not become ready: %w", err)
		case errors.Is(err, os.ErrPermission):
			return noLease{}, nil // somebody else's server: Connect says what is missing
		}
		if os.Geteuid() != 0 {
			return noLease{}, nil
		}
		// Two commands may both start one; the lock lets one live, the other's exit
		// is not an error here.
		if !started || errors.Is(err, lease.ErrEnded) {
			if err := startEphemeral(l); err != nil {
				return nil, err
			}
			started = true
		}
		if layout.Holder(l.HostLock()) == 0 && wait > 2*time.Second {
			return nil, fmt.Errorf("the server did not start%s (its log is %s)", lastWords(ephemeralLog(l)), ephemeralLog(l))
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
			wait = min(wait*2, 3*time.Second)
		}
	}
}

type noLease struct{}

func (noLease) Close() error { return nil }

func ephemeralLog(l layout.Layout) string { return filepath.Join(l.Host(), "ephemeral.log") }

// lastWords gives what the server said for people before it ended, after a colon.
func lastWords(log string) string {
	b, err := os.ReadFile(log)
	if err != nil {
		return ""
	}
	said := ""
	for line := range strings.Lines(string(b)) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "space: "); ok && !strings.Contains(text, "admin key") {
			said = ": " + text
		}
	}
	return said
}

func startEphemeral(l layout.Layout) error {
	// Above the data directory others must be able to pass; `space up` mends the rest.
	if err := os.MkdirAll(filepath.Dir(l.Data), 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(l.Host(), 0o700); err != nil {
		return err
	}
	log, err := os.OpenFile(ephemeralLog(l), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := []string{"--data-dir", l.Data, "--run-dir", l.Run, "up", "--ephemeral"}
	// Whatever else serves on this host has its ports; ours stay the same when the
	// unprivileged side starts anew.
	for _, flag := range []string{"--listen", "--listen-data"} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer ln.Close() // both are held until both are known; the child listens much later
		args = append(args, flag, ln.Addr().String())
	}
	cmd := exec.Command(self, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = cleanEnv()
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "SPACE_TEMPLATES_DIR=") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // our Ctrl-C is not the server's
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
}

// cleanEnv is what our own children get: nothing of the caller's but failpoints,
// which only tests set.
func cleanEnv() []string {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=/nonexistent"}
	for _, name := range []string{"SPACE_FAILPOINTS", "SPACE_FAILPOINT_DIR", "SPACE_STORE"} {
		if v := os.Getenv(name); v != "" {
			env = append(env, name+"="+v)
		}
	}
	return env
}
