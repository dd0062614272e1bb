package auth

import (
	"slices"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/tenant"
)

// Scope is one thing that a key may do. The set is closed.
type Scope string

// The scopes. One that ends in rw includes the one that ends in r; Admin
// includes every one.
const (
	Admin          Scope = "admin"         // everything, keys and tenants included
	SandboxesRead  Scope = "sandboxes:r"   // get and list sandboxes, operations, sessions, templates
	SandboxesWrite Scope = "sandboxes:rw"  // create, change, delete; life-cycle verbs
	Exec           Scope = "exec"          // start commands
	FilesRead      Scope = "files:r"       // read files
	FilesWrite     Scope = "files:rw"      // and write them
	ActivityRead   Scope = "activity:read" // read what programs printed
	KeysWrite      Scope = "keys:rw"       // mint, list and revoke keys
	AuditRead      Scope = "audit:r"       // read the tenant's audit records
	Operator       Scope = "operator"      // quarantine, nodes, metrics
)

// Scopes lists the set in a fixed order.
func Scopes() []Scope {
	return []Scope{Admin, SandboxesRead, SandboxesWrite, Exec, FilesRead, FilesWrite, ActivityRead, KeysWrite, AuditRead, Operator}
}

// covers reports whether who has s may do w.
func (s Scope) covers(w Scope) bool {
	return s == w || s == Admin || (s == SandboxesWrite && w == SandboxesRead) || (s == FilesWrite && w == FilesRead)
}

// Principal is who asks, proven by a key.
type Principal struct {
	Tenant tenant.ID
	KeyID  string
	Scopes []Scope

	// For Watch: they find the key again, and end it while the store is away.
	hash    keyHash
	expires time.Time
}

// Can reports whether p may do what needs s. An unknown scope is never granted.
func (p Principal) Can(s Scope) bool {
	return slices.Contains(Scopes(), s) && slices.ContainsFunc(p.Scopes, func(have Scope) bool { return have.covers(s) })
}

// Require gives a fault Denied where p lacks s.
func (p Principal) Require(s Scope) error {
	if p.Can(s) {
		return nil
	}
	return fault.New(fault.Denied, "scope_missing", "the key lacks scope %s", s).
		Do("use a key that has the scope %s, or ask who administers your keys for one", s)
}

// Granted spells out everything that p can do, for code that compares scopes as
// plain words.
func (p Principal) Granted() []string {
	var out []string
	for _, s := range Scopes() {
		if p.Can(s) {
			out = append(out, string(s))
		}
	}
	return out
}
