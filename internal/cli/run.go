package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
)

// commandFlags are shared by run and exec.
type commandFlags struct {
	user, cwd string
	env       []string
	limit     time.Duration
	stdin     bool
	tty       bool
	shell     bool
}

func (f *commandFlags) add(c *cobra.Command) {
	c.Flags().StringVarP(&f.user, "user", "u", "", "user to run as (name or uid[:gid]; default the template's)")
	c.Flags().StringVarP(&f.cwd, "cwd", "w", "", "working directory")
	c.Flags().StringArrayVarP(&f.env, "env", "e", nil, "environment KEY=VALUE, or KEY to pass ours (repeatable)")
	c.Flags().DurationVar(&f.limit, "time-limit", 0, "end the command after this time (0: none)")
	c.Flags().BoolVarP(&f.stdin, "interactive", "i", false, "forward standard input")
	c.Flags().BoolVarP(&f.tty, "tty", "t", false, "run on a terminal")
	c.Flags().BoolVar(&f.shell, "shell", false, "give the single argument to the sandbox's shell")
	c.Flags().SetInterspersed(false)
}

func (f *commandFlags) session(a *App, args []string) (spaceapi.CreateSession, error) {
	env, err := pairs(f.env, true)
	if err != nil {
		return spaceapi.CreateSession{}, err
	}
	in := spaceapi.CreateSession{Stdin: f.stdin || f.tty}
	in.User, in.Cwd, in.Env, in.TimeoutSeconds = f.user, f.cwd, env, f.limit.Seconds()
	if f.shell {
		if len(args) != 1 {
			return in, &ExitError{CodeUsage, fmt.Errorf("--shell takes one argument, the text for the shell")}
		}
		in.Shell = args[0]
	} else {
		in.Args = args
	}
	if f.tty {
		if in.PTY, err = a.ptySize(); err != nil {
			return in, err
		}
	}
	return in, nil
}

// sandboxFlags are shared by run and create.
type sandboxFlags struct {
	name, template, onTimeout, onIdle string
	cpus                              float64
	memory, disk, processes           int64
	timeout, idle                     time.Duration
	metadata, env, accept             []string
}

func (f *sandboxFlags) add(c *cobra.Command, ofRun bool) {
	c.Flags().StringVar(&f.name, "name", "", "name, unique among the living")
	c.Flags().StringVar(&f.template, "template", "base:latest", "template, name:tag or digest")
	c.Flags().Float64Var(&f.cpus, "cpus", 0, "CPU quota (0: server default)")
	c.Flags().Int64Var(&f.memory, "memory", 0, "memory in MiB (0: server default)")
	c.Flags().Int64Var(&f.disk, "disk", 0, "disk in MiB (0: server default)")
	c.Flags().Int64Var(&f.processes, "max-processes", 0, "processes per user (0: server default)")
	c.Flags().DurationVar(&f.timeout, "timeout", 0, "life of the sandbox (0: server default)")
	c.Flags().StringArrayVar(&f.metadata, "metadata", nil, "KEY=VALUE (repeatable)")
	c.Flags().StringSliceVar(&f.accept, "accept", nil, "isolation classes accepted (microvm, userkernel, emulated)")
	if !ofRun {
		c.Flags().StringVar(&f.onTimeout, "on-timeout", "", "delete, stop or pause at the end of life (default delete)")
		c.Flags().DurationVar(&f.idle, "idle", 0, "time without activity before --on-idle (0: never)")
		c.Flags().StringVar(&f.onIdle, "on-idle", "", "pause, stop or delete when idle (default pause)")
		c.Flags().StringArrayVarP(&f.env, "env", "e", nil, "environment of every command, KEY=VALUE (repeatable)")
	}
}

func (f *sandboxFlags) create() (spaceapi.CreateSandbox, error) {
	in := spaceapi.CreateSandbox{
		Name: f.name, Template: f.template, AcceptIsolation: f.accept,
		Resources:      spaceapi.Resources{CPUs: f.cpus, MemoryMiB: f.memory, DiskMiB: f.disk, MaxProcesses: f.processes},
		TimeoutSeconds: seconds(f.timeout), OnTimeout: f.onTimeout, IdleSeconds: seconds(f.idle), OnIdle: f.onIdle,
	}
	var err error
	if in.Metadata, err = pairs(f.metadata, false); err != nil {
		return in, err
	}
	in.Env, err = pairs(f.env, true)
	return in, err
}

// seconds rounds up: a life of half a second is a second, not for ever.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// opWait is how long a command line waits for an operation in one request.
const opWait = 60 * time.Second

func (a *App) runCmd() *cobra.Command {
	var sf sandboxFlags
	var cf commandFlags
	keep := false
	c := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Run one command in a new sandbox and throw the sandbox away",
		Long: `Run one command in a new sandbox and throw the sandbox away.

The command's exit code becomes ours (128+n for signals). 125 means that the
sandbox was lost, 126 and 127 that the command could not be started. Where no
server is reachable, one serves for the time of the command (as root).`,
		Example: "  space run -- python3 -c 'print(6*7)'\n  space run -it -- bash",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			ctx := cmd.Context()
			in, err := sf.create()
			if err != nil {
				return err
			}
			sess, err := cf.session(a, args)
			if err != nil {
				return err
			}
			c, lease, err := a.ConnectOrServe(ctx)
			if err != nil {
				return &ExitError{CodeLost, err}
			}
			defer lease.Close()
			if in.Metadata == nil {
				in.Metadata = map[string]string{}
			}
			in.Metadata["space.command"] = "run"
			m, err := c.CreateSandbox(ctx, in, client.Wait(opWait))
			if err != nil {
				return &ExitError{CodeLost, err}
			}
			if !keep {
				defer func() {
					dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), opWait)
					defer cancel()
					if _, derr := c.DeleteSandbox(dctx, m.Sandbox.ID, client.Wait(30*time.Second)); derr != nil && client.Code(derr) != "sandbox_deleted" {
						fmt.Fprintf(a.Stderr, "space: sandbox %s was not deleted: %v\n", m.Sandbox.ID, derr)
					}
				}()
			}
			if _, err := c.AwaitOperation(ctx, m.Operation); err != nil {
				return &ExitError{CodeLost, err}
			}
			if keep {
				fmt.Fprintf(a.Stderr, "space: sandbox %s is kept\n", m.Sandbox.ID)
			}
			return a.runSession(ctx, c, m.Sandbox.ID, sess, cf)
		},
	}
	sf.add(c, true)
	cf.add(c)
	c.Flags().BoolVar(&keep, "keep", false, "keep the sandbox afterwards")
	return c
}

func (a *App) runSession(ctx context.Context, c *client.Client, id string, in spaceapi.CreateSession, cf commandFlags) error {
	s, err := c.CreateSession(ctx, id, in)
	if err != nil {
		return &ExitError{CodeLost, err}
	}
	st := c.Attach(s)
	defer st.Close()
	return a.join(ctx, st, cf.stdin || cf.tty, cf.tty)
}

func (a *App) execCmd() *cobra.Command {
	var cf commandFlags
	background := false
	c := &cobra.Command{
		Use:     "exec [flags] SANDBOX -- COMMAND [ARG...]",
		Short:   "Run a command in a sandbox",
		Example: "  space exec web -- ls -l\n  space exec -it web -- bash",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			rest := args[1:]
			if rest[0] == "--" {
				rest = rest[1:]
			}
			in, err := cf.session(a, rest)
			if err != nil {
				return err
			}
			if !background {
				return a.runSession(cmd.Context(), c, args[0], in, cf)
			}
			s, err := c.CreateSession(cmd.Context(), args[0], in)
			if err != nil {
				return err
			}
			st := c.Attach(s)
			defer st.Close()
			if _, err := st.Next(cmd.Context()); err != nil { // started
				return startFailure(err)
			}
			fmt.Fprintln(a.Stdout, s.Session.ID)
			return nil
		},
	}
	cf.add(c)
	c.Flags().BoolVarP(&background, "detach", "d", false, "leave it running and print the session id")
	return c
}

func (a *App) attachCmd() *cobra.Command {
	var after string
	var stdin bool
	c := &cobra.Command{
		Use:   "attach SESSION",
		Short: "Read a session's output again, from any event on",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			s, err := c.Follow(cmd.Context(), args[0], after)
			if err != nil {
				return err
			}
			defer s.Close()
			return a.join(cmd.Context(), s, stdin, false)
		},
	}
	c.Flags().StringVar(&after, "after", "", "id of the last event seen (epoch.offset)")
	c.Flags().BoolVarP(&stdin, "interactive", "i", false, "forward standard input")
	return c
}

func (a *App) sessionsCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "sessions SANDBOX",
		Short: "List the command sessions of a sandbox",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			l, err := c.Sessions(cmd.Context(), args[0], client.ListOptions{Limit: 100})
			if err != nil {
				return err
			}
			return a.Print(l, func(w io.Writer) {
				fmt.Fprintln(w, "SESSION\tSTATE\tEXIT\tCOMMAND")
				for _, s := range l.Items {
					exit := "-"
					if s.Exit != nil {
						exit = fmt.Sprintf("%s %d", s.Exit.Cause, s.Exit.Code)
					}
					cmdline := s.Shell
					if len(s.Args) > 0 {
						cmdline = fmt.Sprint(s.Args)
					}
					fmt.Fprintf(w, "%s\t%s\t%s\t%.60s\n", s.ID, s.State, exit, clean(cmdline))
				}
			})
		},
	}
	return c
}
