package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/space-platform/space/internal/cli"
	"github.com/space-platform/space/internal/doctor"
)

func doctorCmd(app *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Say whether this machine can run SPACE, and what to do if not", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			found := doctor.Examine(app.Layout)
			err := app.Print(found, func(w io.Writer) {
				for _, f := range found {
					fmt.Fprintf(w, "%s\t%s\t%s\n", f.Verdict, f.Check, f.Found)
					if f.Remedy != "" {
						fmt.Fprintf(w, "\t\t→ %s\n", f.Remedy)
					}
				}
			})
			if err == nil && !doctor.OK(found) {
				err = &cli.ExitError{Code: cli.CodeFailure, Err: errors.New("this machine cannot run SPACE yet: see above")}
			}
			return err
		},
	}
}
