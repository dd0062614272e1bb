package control

import "github.com/space-platform/space/internal/auth"

// Principal is who asks, proven by package auth.
type Principal = auth.Principal

// What the use cases ask for.
const (
	scopeSandboxesRead  = auth.SandboxesRead
	scopeSandboxesWrite = auth.SandboxesWrite
	scopeExec           = auth.Exec
	scopeAudit          = auth.AuditRead
	scopeOperator       = auth.Operator
	scopeKeys           = auth.KeysWrite
)
