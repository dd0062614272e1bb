// Package secret holds values that must not be seen: Value, which redacts itself
// wherever Go prints, and Sealer, which seals tenant data at rest.
//
// Reveal is the only way to a Value's content. TestRevealIsConfined lists the
// packages that may call it; adding one is a decision that a reviewer sees.
package secret

import (
	"crypto/subtle"
	"fmt"
	"io"
	"log/slog"
)

// Redacted is what every form of printing gives.
const Redacted = "[redacted]"

// Value is a secret text. The zero Value is no secret. It can be decoded from
// JSON and text, never encoded: what it becomes there is Redacted.
type Value struct {
	// A pointer, so that also a printer that ignores the methods below and walks
	// the memory (a debug dump of an unexported field) shows an address.
	text *string
}

// New keeps s.
func New(s string) Value {
	if s == "" {
		return Value{}
	}
	return Value{text: &s}
}

// Reveal gives the content. See the package comment for who may call it.
func (v Value) Reveal() string {
	if v.text == nil {
		return ""
	}
	return *v.text
}

// IsZero reports whether v is no secret.
func (v Value) IsZero() bool { return v.text == nil }

// Equal compares in a time that does not depend on where the contents differ.
func (v Value) Equal(w Value) bool {
	return subtle.ConstantTimeCompare([]byte(v.Reveal()), []byte(w.Reveal())) == 1
}

// String implements fmt.Stringer.
func (v Value) String() string { return Redacted }

// GoString implements fmt.GoStringer.
func (v Value) GoString() string { return Redacted }

// Format implements fmt.Formatter: every verb, also %d and %x of mistaken calls.
func (v Value) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, Redacted) } // fmt ignores it too

// MarshalText implements encoding.TextMarshaler, and so JSON and map keys.
func (v Value) MarshalText() ([]byte, error) { return []byte(Redacted), nil }

// UnmarshalText implements encoding.TextUnmarshaler, for requests and settings.
func (v *Value) UnmarshalText(b []byte) error {
	*v = New(string(b))
	return nil
}

// LogValue implements slog.LogValuer.
func (v Value) LogValue() slog.Value { return slog.StringValue(Redacted) }
