package sqlstore

import (
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

var (
	errNoTenant   = errors.New("store: no tenant")
	errOtherOwner = errors.New("store: the row is of another tenant than the transaction")
	errTxDone     = errors.New("store: transaction used after its function returned")
)

// sandboxDoc is the durable form of a sandbox, apart from tenant and revision.
// Its names are a file format: never rename, only add.
type sandboxDoc struct {
	ID             sandbox.ID         `json:"id"`
	Name           string             `json:"name"`
	Template       string             `json:"template"`
	TemplateDigest string             `json:"template_digest"`
	Accept         []sandbox.Class    `json:"accept"`
	Class          sandbox.Class      `json:"class"`
	Runtime        string             `json:"runtime"`
	Resources      sandbox.Resources  `json:"resources"`
	Policy         sandbox.Policy     `json:"policy"`
	Metadata       map[string]string  `json:"metadata"`
	SealedEnv      []byte             `json:"sealed_env"`
	Node           string             `json:"node"`
	Desired        sandbox.State      `json:"desired"`
	Observed       sandbox.State      `json:"observed"`
	Generation     uint64             `json:"generation"`
	Converged      uint64             `json:"converged"`
	Problem        *operation.Problem `json:"problem"`
	OutcomeSeq     uint64             `json:"outcome_seq"`
	CreatedAt      time.Time          `json:"created_at"`
	UpdatedAt      time.Time          `json:"updated_at"`
	DeletedAt      time.Time          `json:"deleted_at"`
	CreatedBy      string             `json:"created_by"`
}

func docOf(s store.Sandbox) sandboxDoc {
	s.Policy.ExpiresAt = norm(s.Policy.ExpiresAt)
	s.Policy.DeadlineAt = norm(s.Policy.DeadlineAt)
	return sandboxDoc{
		ID: s.ID, Name: s.Name, Template: s.Template, TemplateDigest: s.TemplateDigest,
		Accept: s.Accept, Class: s.Class, Runtime: s.Runtime, Resources: s.Resources,
		Policy: s.Policy, Metadata: s.Metadata, SealedEnv: s.SealedEnv, Node: s.Node,
		Desired: s.Desired, Observed: s.Observed, Generation: s.Generation, Converged: s.Converged,
		Problem: s.Problem, OutcomeSeq: s.OutcomeSeq,
		CreatedAt: norm(s.CreatedAt), UpdatedAt: norm(s.UpdatedAt), DeletedAt: norm(s.DeletedAt),
		CreatedBy: s.CreatedBy,
	}
}

func (d sandboxDoc) sandbox() store.Sandbox {
	return store.Sandbox{
		ID: d.ID, Name: d.Name, Template: d.Template, TemplateDigest: d.TemplateDigest,
		Accept: d.Accept, Class: d.Class, Runtime: d.Runtime, Resources: d.Resources,
		Policy: d.Policy, Metadata: d.Metadata, SealedEnv: d.SealedEnv, Node: d.Node,
		Desired: d.Desired, Observed: d.Observed, Generation: d.Generation, Converged: d.Converged,
		Problem: d.Problem, OutcomeSeq: d.OutcomeSeq,
		CreatedAt: d.CreatedAt, UpdatedAt: d.UpdatedAt, DeletedAt: d.DeletedAt, CreatedBy: d.CreatedBy,
	}
}

// keyDoc is the durable form of a key, apart from its columns.
type keyDoc struct {
	Name      string    `json:"name"`
	Scopes    []string  `json:"scopes"`
	CreatedBy string    `json:"created_by"`
	ExpiresAt time.Time `json:"expires_at"`
}

// idempotencyDoc is the durable form of a remembered mutation.
type idempotencyDoc struct {
	Principal string `json:"principal"`
	Key       string `json:"key"`
	Method    string `json:"method"`
	Route     string `json:"route"`
	BodyHash  []byte `json:"body_hash"`
	Operation string `json:"operation"`
	Resource  string `json:"resource"`
}

func normOperation(o operation.Operation) operation.Operation {
	steps := make([]operation.Step, 0, len(o.Steps))
	for _, s := range o.Steps {
		s.StartedAt, s.EndedAt = norm(s.StartedAt), norm(s.EndedAt)
		steps = append(steps, s)
	}
	if o.Steps != nil {
		o.Steps = steps
	}
	o.CreatedAt, o.UpdatedAt, o.DeadlineAt = norm(o.CreatedAt), norm(o.UpdatedAt), norm(o.DeadlineAt)
	return o
}

// encode gives the JSON of a row, or an error where it would not read back equal.
func encode(v any) (string, error) {
	if err := checkText(reflect.ValueOf(v)); err != nil {
		return "", err
	}
	b, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("store: encode: %w", err)
	}
	return string(b), nil
}

func decode(s string, v any) error {
	if err := json.Unmarshal([]byte(s), v); err != nil {
		return fmt.Errorf("store: decode a row: %w", err)
	}
	return nil
}

// checkText refuses text that JSON would silently change.
func checkText(v reflect.Value) error {
	switch v.Kind() {
	case reflect.String:
		if !utf8.ValidString(v.String()) {
			return errors.New("store: text is not UTF-8")
		}
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			return checkText(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				if err := checkText(v.Field(i)); err != nil {
					return err
				}
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return nil // bytes go as base64
		}
		for i := range v.Len() {
			if err := checkText(v.Index(i)); err != nil {
				return err
			}
		}
	case reflect.Map:
		for it := v.MapRange(); it.Next(); {
			if err := errors.Join(checkText(it.Key()), checkText(it.Value())); err != nil {
				return err
			}
		}
	}
	return nil
}

// norm gives t as it reads back: UTC, microseconds, no monotonic reading.
func norm(t time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }

func micro(t time.Time) int64 { return norm(t).UnixMicro() }

// stamp is micro, with NULL for the zero time.
func stamp(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return micro(t)
}

func unmicro(n int64) time.Time { return time.UnixMicro(n).UTC() }

func unstamp(n sql.NullInt64) time.Time {
	if !n.Valid {
		return time.Time{}
	}
	return unmicro(n.Int64)
}

func number(n uint64) (int64, error) {
	if n > math.MaxInt64 {
		return 0, fmt.Errorf("store: number %d is too large", n)
	}
	return int64(n), nil
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

// digest hashes texts so that no two lists of texts give the same bytes to hash.
func digest(parts ...string) []byte {
	h := sha256.New()
	var n [8]byte
	for _, p := range parts {
		binary.BigEndian.PutUint64(n[:], uint64(len(p)))
		h.Write(n[:])
		h.Write([]byte(p))
	}
	return h.Sum(nil)
}

// nameHash gives NULL for no name.
func nameHash(name string) any {
	if name == "" {
		return nil
	}
	return digest("name", name)
}

// possible reports whether id can be in a text column at all; what cannot is
// simply not found (PostgreSQL would fail on it).
func possible(id string) bool {
	return utf8.ValidString(id) && !strings.ContainsRune(id, 0)
}
