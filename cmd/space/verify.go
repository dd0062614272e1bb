package main

import (
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/cli"
	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/sqlitedb"
	"github.com/space-platform/space/internal/store/sqlstore"
)

// verifyCmd proves the audit chains from the files alone; no server is asked.
func verifyCmd(l *layout.Layout, app *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "verify",
		Short: "Prove offline that no audit record was changed, taken out or added",
		Long: `Prove offline that no audit record was changed, taken out or added.

Reads the databases, the signed heads and the host room's public key below the
data directory, as root. Up to the last signed head not even the unprivileged
side could have changed anything unnoticed; what is newer is only linked.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			reports, err := verifyAudit(cmd, *l)
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

func verifyAudit(cmd *cobra.Command, l layout.Layout) ([]audit.Report, error) {
	key, err := os.ReadFile(filepath.Join(l.Room(), "audit.pub"))
	if err != nil {
		return nil, fmt.Errorf("the host room's public key cannot be read (run as root?): %w", err)
	}
	pub, err := hex.DecodeString(strings.TrimSpace(string(key)))
	if err != nil || len(pub) != ed25519.PublicKeySize {
		return nil, errors.New("the host room's public key is damaged")
	}
	var heads []audit.Head
	if f, err := os.Open(l.AuditHeads()); err == nil {
		heads, err = audit.ReadHeads(f)
		_ = f.Close()
		if err != nil {
			return nil, err
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	of := func(chain string) (out []audit.Head) {
		for _, h := range heads {
			if h.Chain == chain {
				out = append(out, h)
			}
		}
		return out
	}
	for _, h := range heads {
		if h.Chain != sqlstore.Chain && h.Chain != "node:"+nodeName {
			return nil, fmt.Errorf("a signed head names the chain %q, which this installation does not have", h.Chain)
		}
	}
	var reports []audit.Report
	var errs []error
	check := func(chain string, read func(from uint64) ([]audit.Record, error)) {
		r, err := audit.Verify(chain, audit.Pages(read), of(chain), pub)
		reports = append(reports, r)
		if err != nil {
			errs = append(errs, fmt.Errorf("chain %s: %w", chain, err))
		}
	}
	st, err := openStore(l)
	if err != nil {
		return nil, err
	}
	defer st.Close()
	check(sqlstore.Chain, func(from uint64) ([]audit.Record, error) { return st.System().AuditAll(cmd.Context(), from, 1000) })
	db, err := sqlitedb.Open(l.NodeDB())
	if err != nil {
		return reports, err
	}
	defer db.Close()
	a := node.NewAuditor(nodeName)
	check("node:"+nodeName, func(from uint64) ([]audit.Record, error) { return a.Records(cmd.Context(), db.Read, from, 1000) })
	return reports, errors.Join(errs...)
}
