// Command gen writes the OpenAPI document to the file that is its argument.
package main

import (
	"fmt"
	"os"

	"github.com/space-platform/space/internal/httpapi"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("usage: gen FILE")
	}
	b, err := httpapi.Document()
	if err != nil {
		return err
	}
	return os.WriteFile(args[0], b, 0o644)
}
