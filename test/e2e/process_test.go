package e2e

import "strings"

// isSandbox tells runsc's sentry from its other processes.
func isSandbox(line string) bool { return strings.Contains(line, "runsc-sandbox") }
