package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/cli"
	"github.com/space-platform/space/internal/host"
	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/privilege"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/store/sqlstore"
)

const nodeChain = "node:" + nodeName

// verifyCmd proves the audit chains from the files alone; no server is asked.
func verifyCmd(l *layout.Layout, app *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "verify",
		Short: "Prove offline that no audit record was changed, taken out or added",
		Long: `Prove offline that no audit record was changed, taken out or added.

Run as root: it reads the heads that the host room has signed, where only root
can write, and has a process of user space read the records to it. Up to the
last signed head not even the unprivileged side could have changed anything
unnoticed; what is newer is only linked.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			reports, err := verifyAudit(cmd.Context(), *l)
			if perr := app.Print(reports, func(w io.Writer) {
				fmt.Fprintln(w, "CHAIN\tRECORDS\tSIGNED UP TO\tHEADS")
				for _, r := range reports {
					fmt.Fprintf(w, "%s\t%d\t%d\t%d\n", r.Chain, r.Records, r.Signed, r.Heads)
				}
			}); err == nil {
				err = perr
			}
			return err
		},
	}
}

// recordsCmd writes a chain as JSON lines, for verify.
func recordsCmd(l *layout.Layout) *cobra.Command {
	return &cobra.Command{
		Use: "records CHAIN", Short: "Write the records of a chain (used by verify)", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			if args[0] == nodeChain {
				db, err := sqlitedb.Open(l.NodeDB())
				if err != nil {
					return err
				}
				defer db.Close()
				a := node.NewAuditor(nodeName)
				return audit.WriteRecords(os.Stdout, audit.Pages(func(from uint64) ([]audit.Record, error) { return a.Records(ctx, db.Read, from, 1000) }))
			}
			st, err := openStore(*l)
			if err != nil {
				return err
			}
			defer st.Close()
			return audit.WriteRecords(os.Stdout, audit.Pages(func(from uint64) ([]audit.Record, error) { return st.System().AuditAll(ctx, from, 1000) }))
		},
	}
}

func verifyAudit(ctx context.Context, l layout.Layout) (_ []audit.Report, err error) {
	if l.Data, err = filepath.Abs(l.Data); err != nil { // the reader of the records works in /
		return nil, err
	}
	key, err := os.ReadFile(filepath.Join(l.Room(), host.PublicKeyFile))
	if err != nil {
		return nil, fmt.Errorf("the host room's public key cannot be read (run as root?): %w", err)
	}
	pub, err := hex.DecodeString(strings.TrimSpace(string(key)))
	if err != nil || len(pub) != ed25519.PublicKeySize {
		return nil, errors.New("the host room's public key is damaged")
	}
	heads, err := signedHeads(l)
	if err != nil {
		return nil, err
	}
	var reports []audit.Report
	var errs []error
	for _, chain := range []string{sqlstore.Chain, nodeChain} {
		var its []audit.Head
		heads = slices.DeleteFunc(heads, func(h audit.Head) bool {
			if h.Chain == chain {
				its = append(its, h)
			}
			return h.Chain == chain
		})
		r, err := audit.Verify(chain, records(ctx, l, chain), its, pub)
		reports = append(reports, r)
		if err != nil {
			errs = append(errs, fmt.Errorf("chain %s: %w", chain, err))
		}
	}
	for _, h := range heads {
		errs = append(errs, fmt.Errorf("a signed head names the chain %q, which this installation does not have", h.Chain))
	}
	return reports, errors.Join(errs...)
}

// maxHeads bounds the file of heads that the unprivileged side keeps, in bytes.
const maxHeads = 1 << 30

// signedHeads gives the heads of the room, which only root can have changed, and
// those that the unprivileged side has kept.
func signedHeads(l layout.Layout) ([]audit.Head, error) {
	own, err := os.ReadFile(filepath.Join(l.Room(), host.HeadsFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	kept, err := layout.ReadOwned(l.AuditHeads(), maxHeads)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var out []audit.Head
	for _, b := range [][]byte{own, kept} {
		heads, err := audit.ReadHeads(bytes.NewReader(b))
		if err != nil {
			return nil, err
		}
		out = append(out, heads...)
	}
	return out, nil
}

// records has a process of user space read a chain: root neither opens a
// database that user space may have prepared, nor makes files beside it. What
// that process says needs no trust: the signed heads prove it.
func records(ctx context.Context, l layout.Layout, chain string) iter.Seq2[audit.Record, error] {
	return func(yield func(audit.Record, error) bool) {
		err := func() error {
			uid, gid, err := privilege.Lookup()
			if err != nil {
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			cmd := exec.CommandContext(ctx, self, "--data-dir", l.Data, "--run-dir", l.Run, "audit", "records", chain)
			var said bounded
			cmd.Env, cmd.Dir, cmd.Stderr = cleanEnv(), "/", &said
			out, err := cmd.StdoutPipe()
			if err != nil {
				return err
			}
			if err := privilege.Start(cmd, uid, gid); err != nil {
				return fmt.Errorf("read the records as user space: %w", err)
			}
			// Not the pipe itself: it has Seek, which fails.
			for r, err := range audit.ReadRecords(struct{ io.Reader }{out}) {
				if !yield(r, err) || err != nil {
					cancel()
					_ = cmd.Wait()
					return nil
				}
			}
			if err := cmd.Wait(); err != nil {
				return fmt.Errorf("read the records of %s: %w: %q", chain, err, said.b) // quoted: user space may have chosen the text
			}
			return nil
		}()
		if err != nil {
			yield(audit.Record{}, err)
		}
	}
}

// bounded keeps the first 2 KiB of what is written.
type bounded struct{ b []byte }

func (w *bounded) Write(p []byte) (int, error) {
	w.b = append(w.b, p[:min(len(p), 2<<10-len(w.b))]...)
	return len(p), nil
}
