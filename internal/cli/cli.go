// Package cli is the command line's own behaviour: how a server is found, how
// answers are shown, how a terminal is joined to a command session. cmd/space
// only wires it to flags and main.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/space-platform/space/client"
	"github.com/space-platform/space/internal/layout"
)

// Exit codes of our own; a command's code is passed through as it is.
const (
	CodeFailure = 1   // the request failed
	CodeUsage   = 2   // the command line is wrong
	CodeLost    = 125 // the sandbox was lost, or SPACE itself failed, before the command ended
	CodeCannot  = 126 // the command could not be started
	CodeMissing = 127 // the command was not found
)

// ExitError carries the process's exit code out of a command.
type ExitError struct {
	Code int
	Err  error // nil when there is nothing more to say
}

// Error implements error.
func (e *ExitError) Error() string {
	if e.Err != nil {
		return e.Err.Error()
	}
	return fmt.Sprintf("exit code %d", e.Code)
}

// Unwrap gives the cause.
func (e *ExitError) Unwrap() error { return e.Err }

// App is what every command shares.
type App struct {
	Stdin          *os.File
	Stdout, Stderr io.Writer

	Server string // --server, SPACE_API_URL
	Key    string // SPACE_API_KEY; there is no flag, since arguments are visible to all
	Layout layout.Layout
	JSON   bool
	// Ephemeral starts a server for the time of a command when none is
	// reachable, and returns what keeps it alive. Nil: not possible.
	Ephemeral func(ctx context.Context) (io.Closer, error)
}

// errNoServer is what commands say when there is nothing to talk to.
var errNoServer = errors.New("no SPACE server is reachable: start one with `space up`, or name one with --server (or SPACE_API_URL) and SPACE_API_KEY")

// Connect finds the server: --server and SPACE_API_KEY, else the local one with
// its admin key.
func (a *App) Connect(ctx context.Context) (*client.Client, error) {
	if a.Server != "" {
		if a.Key == "" {
			return nil, errors.New("a server is named but no key: set SPACE_API_KEY")
		}
		return client.New(a.Server, a.Key), nil
	}
	e, err := a.Layout.ReadEndpoint()
	if err != nil {
		return nil, errNoServer
	}
	key := a.Key
	if key == "" {
		b, err := layout.ReadOwned(a.Layout.AdminKey(), 1024)
		if err != nil {
			return nil, fmt.Errorf("a local server runs at %s but its admin key cannot be read (%w): run as root, or set SPACE_API_KEY", e.API, err)
		}
		key = strings.TrimSpace(string(b))
	}
	c := client.New(e.API, key)
	hctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if _, err := client.New(e.API, key, client.WithAttempts(1)).Health(hctx); err != nil {
		return nil, fmt.Errorf("%w (the last one, at %s, does not answer)", errNoServer, e.API)
	}
	return c, nil
}

// ConnectOrServe is Connect, and else a server for the time of this command.
func (a *App) ConnectOrServe(ctx context.Context) (*client.Client, io.Closer, error) {
	if a.Server == "" && a.Ephemeral != nil {
		// A lease is held also on a server that another command started, so that it
		// does not end under us.
		lease, err := a.Ephemeral(ctx)
		if err != nil {
			return nil, nil, err
		}
		c, err := a.Connect(ctx)
		if err != nil {
			_ = lease.Close()
			return nil, nil, err
		}
		return c, lease, nil
	}
	c, err := a.Connect(ctx)
	return c, io.NopCloser(nil), err
}

// Print shows v as JSON, or calls table for people.
func (a *App) Print(v any, table func(w io.Writer)) error {
	if a.JSON {
		enc := json.NewEncoder(a.Stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	}
	tw := tabwriter.NewWriter(a.Stdout, 2, 4, 2, ' ', 0)
	table(tw)
	return tw.Flush()
}

// clean makes text from a server or a guest safe for a terminal: one line, no
// control characters, nothing that turns the direction of writing.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029' {
			return '�'
		}
		return r
	}, s)
}

// Message is an error's text, made safe for a terminal; its lines are kept.
func Message(err error) string {
	lines := strings.Split(err.Error(), "\n")
	for i, l := range lines {
		lines[i] = clean(l)
	}
	return strings.Join(lines, "\n")
}

// age shows a time as people say it.
func age(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := now.Sub(t)
	suffix := " ago"
	if d < 0 {
		d, suffix = -d, ""
	}
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds%s", int(d.Seconds()), suffix)
	case d < time.Hour:
		return fmt.Sprintf("%dm%s", int(d.Minutes()), suffix)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%s", int(d.Hours()), suffix)
	}
	return fmt.Sprintf("%dd%s", int(d.Hours()/24), suffix)
}

// pairs reads repeated K=V flags. A bare K takes the value of our own
// environment, as other tools do.
func pairs(in []string, fromEnv bool) (map[string]string, error) {
	if len(in) == 0 {
		return nil, nil
	}
	out := map[string]string{}
	for _, kv := range in {
		k, v, ok := strings.Cut(kv, "=")
		if !ok && fromEnv {
			if v, ok = os.LookupEnv(k); !ok {
				continue
			}
		}
		if !ok || k == "" {
			return nil, &ExitError{CodeUsage, fmt.Errorf("%q is not KEY=VALUE", kv)}
		}
		out[k] = v
	}
	return out, nil
}

// Commands adds every client command to root.
func (a *App) Commands(root *cobra.Command) {
	root.AddCommand(a.runCmd(), a.createCmd(), a.lsCmd(), a.getCmd(), a.execCmd(), a.attachCmd(), a.rmCmd(), a.opsCmd(),
		a.keysCmd(), a.templatesCmd(), a.auditCmd(), a.sessionsCmd())
	for _, v := range []struct{ verb, short string }{
		{"pause", "Keep a sandbox in memory, not running"},
		{"resume", "Go on with a paused sandbox"},
		{"stop", "Power a sandbox off; its files are kept"},
		{"start", "Boot a stopped or failed sandbox again"},
		{"wake", "Bring a sandbox back from whatever state it is in"},
	} {
		root.AddCommand(a.verbCmd(v.verb, v.short))
	}
}
