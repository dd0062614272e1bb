package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
)

func (a *App) createCmd() *cobra.Command {
	var sf sandboxFlags
	noWait := false
	c := &cobra.Command{
		Use:   "create",
		Short: "Create a sandbox and print its id",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			in, err := sf.create()
			if err != nil {
				return err
			}
			m, err := c.CreateSandbox(cmd.Context(), in)
			if err != nil {
				return err
			}
			return a.finish(cmd.Context(), c, m, noWait)
		},
	}
	sf.add(c, false)
	c.Flags().BoolVar(&noWait, "no-wait", false, "return as soon as the intent is durable")
	return c
}

// finish waits for a mutation's operation and shows the sandbox.
func (a *App) finish(ctx context.Context, c *client.Client, m spaceapi.Mutation, noWait bool) error {
	if !noWait {
		if _, err := c.AwaitOperation(ctx, m.Operation); err != nil {
			return fmt.Errorf("%s of %s: %w", m.Operation.Kind, m.Sandbox.ID, err)
		}
		if m.Operation.Kind != "delete" {
			s, err := c.Sandbox(ctx, m.Sandbox.ID)
			if err != nil {
				return err
			}
			m.Sandbox = s
		}
	}
	return a.Print(m, func(w io.Writer) { fmt.Fprintln(w, m.Sandbox.ID) })
}

func (a *App) verbCmd(verb, short string) *cobra.Command {
	noWait := false
	c := &cobra.Command{
		Use:   verb + " SANDBOX...",
		Short: short,
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			return each(args, func(id string) error {
				m, err := c.Lifecycle(cmd.Context(), id, verb)
				if err != nil {
					return err
				}
				return a.finish(cmd.Context(), c, m, noWait)
			})
		},
	}
	c.Flags().BoolVar(&noWait, "no-wait", false, "return as soon as the intent is durable")
	return c
}

// each tries all arguments and joins what went wrong.
func each(args []string, f func(string) error) error {
	var errs []error
	for _, x := range args {
		if err := f(x); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", x, err))
		}
	}
	return errors.Join(errs...)
}

func (a *App) rmCmd() *cobra.Command {
	all, noWait := false, false
	c := &cobra.Command{
		Use:   "rm SANDBOX...",
		Short: "Delete sandboxes with their files",
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return &ExitError{CodeUsage, errors.New("name sandboxes, or say --all")}
			}
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			if all {
				if args, err = allIDs(cmd.Context(), c); err != nil {
					return err
				}
			}
			return each(args, func(id string) error {
				m, err := c.DeleteSandbox(cmd.Context(), id)
				if err != nil {
					return err
				}
				return a.finish(cmd.Context(), c, m, noWait)
			})
		},
	}
	c.Flags().BoolVar(&all, "all", false, "every sandbox of the tenant")
	c.Flags().BoolVar(&noWait, "no-wait", false, "return as soon as the intent is durable")
	return c
}

func allIDs(ctx context.Context, c *client.Client) ([]string, error) {
	var ids []string
	for o := (client.ListOptions{Limit: 500}); ; {
		l, err := c.Sandboxes(ctx, o)
		if err != nil {
			return nil, err
		}
		for _, s := range l.Items {
			ids = append(ids, s.ID)
		}
		if o.Cursor = l.Next; o.Cursor == "" {
			return ids, nil
		}
	}
}

func (a *App) lsCmd() *cobra.Command {
	var o client.ListOptions
	var meta []string
	c := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List sandboxes",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			if o.Metadata, err = pairs(meta, false); err != nil {
				return err
			}
			var all spaceapi.List[spaceapi.Sandbox]
			for o.Limit = 500; ; {
				l, err := c.Sandboxes(cmd.Context(), o)
				if err != nil {
					return err
				}
				all.Items = append(all.Items, l.Items...)
				if o.Cursor = l.Next; o.Cursor == "" {
					break
				}
			}
			now := time.Now()
			return a.Print(all, func(w io.Writer) {
				fmt.Fprintln(w, "SANDBOX\tNAME\tSTATE\tTEMPLATE\tISOLATION\tCREATED\tEXPIRES IN")
				for _, s := range all.Items {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.ID, dash(s.Name), s.State, s.Template, dash(s.Isolation), age(s.CreatedAt, now), age(s.ExpiresAt, now))
				}
			})
		},
	}
	c.Flags().StringSliceVar(&o.States, "state", nil, "only these states")
	c.Flags().StringArrayVar(&meta, "metadata", nil, "only with KEY=VALUE (repeatable)")
	return c
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return clean(s)
}

func (a *App) getCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "get SANDBOX",
		Short: "Show one sandbox",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			s, err := c.Sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			now := time.Now()
			return a.Print(s, func(w io.Writer) {
				row := func(k, v string) { fmt.Fprintf(w, "%s\t%s\n", k, v) }
				row("id", s.ID)
				row("name", dash(s.Name))
				row("state", s.State)
				row("desired", s.DesiredState)
				row("template", s.Template+" "+s.TemplateDigest)
				row("isolation", dash(s.Isolation)+" ("+dash(s.Runtime)+")")
				row("limits", fmt.Sprintf("%g CPU, %d MiB memory, %d MiB disk, %d processes", s.Resources.CPUs, s.Resources.MemoryMiB, s.Resources.DiskMiB, s.Resources.MaxProcesses))
				row("created", age(s.CreatedAt, now))
				row("expires in", age(s.ExpiresAt, now)+" → "+s.OnTimeout)
				for k, v := range s.Metadata {
					row("metadata", clean(k)+"="+clean(v))
				}
				if p := s.Problem; p != nil {
					row("problem", clean((&client.Error{Problem: *p}).Error()))
				}
			})
		},
	}
}

func (a *App) opsCmd() *cobra.Command {
	var o client.ListOptions
	c := &cobra.Command{
		Use:   "ops [OPERATION]",
		Short: "List operations, or show one with its steps",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			if len(args) == 1 {
				op, err := c.Operation(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				return a.Print(op, func(w io.Writer) { showOperation(w, op) })
			}
			l, err := c.Operations(cmd.Context(), o)
			if err != nil {
				return err
			}
			now := time.Now()
			return a.Print(l, func(w io.Writer) {
				fmt.Fprintln(w, "OPERATION\tKIND\tSANDBOX\tSTATE\tCREATED\tTOOK\tWAITING FOR")
				for _, op := range l.Items {
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", op.ID, op.Kind, op.SandboxID, op.State, age(op.CreatedAt, now),
						op.UpdatedAt.Sub(op.CreatedAt).Round(time.Millisecond), dash(op.WaitingFor))
				}
			})
		},
	}
	c.Flags().StringVar(&o.Sandbox, "sandbox", "", "only of this sandbox")
	c.Flags().IntVar(&o.Limit, "limit", 50, "at most this many")
	return c
}

func showOperation(w io.Writer, op spaceapi.Operation) {
	fmt.Fprintf(w, "%s\t%s of %s\n", op.ID, op.Kind, op.SandboxID)
	fmt.Fprintf(w, "state\t%s\n", op.State)
	if op.WaitingFor != "" {
		fmt.Fprintf(w, "waiting for\t%s\n", clean(op.WaitingFor))
	}
	fmt.Fprintf(w, "retry safe\t%v\n", op.RetrySafe)
	for _, s := range op.Steps {
		took := "going on"
		if !s.EndedAt.IsZero() {
			took = s.EndedAt.Sub(s.StartedAt).Round(time.Microsecond * 100).String()
		}
		fmt.Fprintf(w, "step\t%s\t%s\n", clean(s.Name), took)
	}
	if op.Error != nil {
		fmt.Fprintf(w, "error\t%s\n", clean((&client.Error{Problem: *op.Error}).Error()))
	}
}

func (a *App) keysCmd() *cobra.Command {
	root := &cobra.Command{Use: "keys", Short: "Make, list and revoke API keys"}
	var scopes []string
	var ttl time.Duration
	create := &cobra.Command{
		Use: "create NAME", Short: "Make a key; its secret is shown once", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			k, err := c.MintKey(cmd.Context(), spaceapi.MintKey{Name: args[0], Scopes: scopes, TTLSeconds: seconds(ttl)})
			if err != nil {
				return err
			}
			return a.Print(k, func(w io.Writer) { fmt.Fprintf(w, "%s\t%s\n", k.ID, k.Secret) })
		},
	}
	create.Flags().StringSliceVar(&scopes, "scope", []string{"sandboxes:rw", "exec", "files:rw"}, "what it may do")
	create.Flags().DurationVar(&ttl, "ttl", 0, "valid for this time (0: until revoked)")
	list := &cobra.Command{
		Use: "ls", Short: "List keys", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			l, err := c.Keys(cmd.Context(), client.ListOptions{Limit: 500})
			if err != nil {
				return err
			}
			now := time.Now()
			return a.Print(l, func(w io.Writer) {
				fmt.Fprintln(w, "KEY\tNAME\tSCOPES\tCREATED\tSTATE")
				for _, k := range l.Items {
					state := "valid"
					if !k.RevokedAt.IsZero() {
						state = "revoked " + age(k.RevokedAt, now)
					} else if !k.ExpiresAt.IsZero() {
						state = "expires in " + age(k.ExpiresAt, now)
					}
					fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", k.ID, clean(k.Name), strings.Join(k.Scopes, ","), age(k.CreatedAt, now), state)
				}
			})
		},
	}
	revoke := &cobra.Command{
		Use: "revoke KEY...", Short: "Revoke keys and cut their streams", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			return each(args, func(id string) error {
				k, err := c.RevokeKey(cmd.Context(), id)
				if err != nil {
					return err
				}
				return a.Print(k, func(w io.Writer) { fmt.Fprintln(w, k.ID) })
			})
		},
	}
	root.AddCommand(create, list, revoke)
	return root
}

func (a *App) templatesCmd() *cobra.Command {
	return &cobra.Command{
		Use: "templates [NAME:TAG]", Short: "List the templates that are installed", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			var l spaceapi.List[spaceapi.Template]
			if len(args) == 1 {
				t, err := c.Template(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				l.Items = append(l.Items, t)
			} else if l, err = c.Templates(cmd.Context()); err != nil {
				return err
			}
			now := time.Now()
			return a.Print(l, func(w io.Writer) {
				fmt.Fprintln(w, "TEMPLATE\tDIGEST\tSIZE\tUSER\tBUILT")
				for _, t := range l.Items {
					fmt.Fprintf(w, "%s\t%.19s\t%d MiB\t%s\t%s\n", t.Reference, t.Digest, t.SizeBytes>>20, t.User, age(t.BuiltAt, now))
				}
			})
		},
	}
}

func (a *App) auditCmd() *cobra.Command {
	var o client.ListOptions
	var chain string
	root := &cobra.Command{
		Use: "audit", Short: "Show who did what; `audit verify` proves the chains offline", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.Connect(cmd.Context())
			if err != nil {
				return err
			}
			l, err := c.Audit(cmd.Context(), chain, o)
			if err != nil {
				return err
			}
			return a.Print(l, func(w io.Writer) {
				fmt.Fprintln(w, "SEQ\tAT\tACTOR\tACTION\tTARGET")
				for _, r := range l.Items {
					fmt.Fprintf(w, "%s/%d\t%s\t%s\t%s\t%s\n", r.Chain, r.Seq, r.At.Format(time.RFC3339), clean(r.Actor), clean(r.Action), clean(r.Target))
				}
			})
		},
	}
	root.Flags().StringVar(&chain, "chain", "control", "control: what was asked for; node: what sandboxes and sessions did")
	root.Flags().IntVar(&o.Limit, "limit", 50, "at most this many")
	return root
}
