// Package tenant holds the tenant identity that every row and every store
// method carries.
//
// An ID cannot be made from a string by ordinary code: only Mint makes one, and
// an architecture test checks who calls it. A handler therefore cannot act for a
// tenant that no credential proved.
package tenant

import (
	"fmt"
	"regexp"
)

// ID is a proven tenant. The zero ID is no tenant and every store method refuses it.
type ID struct{ name string }

// String gives the tenant's name, for logs, rows and audit.
func (i ID) String() string { return i.name }

// IsZero reports whether i is no tenant.
func (i ID) IsZero() bool { return i.name == "" }

// MarshalText writes the name; there is no UnmarshalText on purpose.
func (i ID) MarshalText() ([]byte, error) { return []byte(i.name), nil }

// Default is the tenant of a one-user installation.
const Default = "default"

var valid = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// Mint proves a tenant from its stored name. Only packages named in the
// architecture test may call it: auth (from a verified credential) and the
// stores (from a row that was written for a proven tenant).
func Mint(name string) (ID, error) {
	if !valid.MatchString(name) {
		return ID{}, fmt.Errorf("tenant: invalid name %q: want %s", name, valid)
	}
	return ID{name: name}, nil
}
