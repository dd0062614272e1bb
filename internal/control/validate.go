package control

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
)

var (
	nameRE = regexp.MustCompile(`^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$`)
	envRE  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// maxIdempotencyKey bounds an idempotency key, in characters of visible ASCII.
const maxIdempotencyKey = 255

func invalid(code, what string, args ...any) *fault.Error {
	return fault.New(fault.Invalid, code, what, args...)
}

func checkRequest(r Request) error {
	if r.IdempotencyKey == "" {
		return nil
	}
	if len(r.IdempotencyKey) > maxIdempotencyKey {
		return invalid("invalid_idempotency_key", "the idempotency key has more than %d characters", maxIdempotencyKey)
	}
	for i := range len(r.IdempotencyKey) {
		if c := r.IdempotencyKey[i]; c < '!' || c > '~' {
			return invalid("invalid_idempotency_key", "the idempotency key has characters other than visible ASCII")
		}
	}
	if len(r.BodyHash) == 0 || r.Method == "" || r.Route == "" {
		return fault.New(fault.Internal, "internal", "a request with an idempotency key came without its body's hash or its route")
	}
	return nil
}

func checkName(name string) error {
	if name == "" {
		return nil
	}
	if !nameRE.MatchString(name) {
		return invalid("invalid_name", "%s is not a name", quote(name)).
			Do("use 1 to 63 characters of a-z, 0-9 and '-', not beginning or ending with '-'")
	}
	if _, err := sandbox.ParseID(name); err == nil {
		return invalid("invalid_name", "%s has the form of an id", quote(name)).Do("use a name of another length")
	}
	return nil
}

// checkText checks pairs of tenant text: bounded, UTF-8, without NUL.
func checkText(what string, m map[string]string, pairs, bytes int) error {
	if len(m) > pairs {
		return fault.New(fault.TooLarge, "too_many_pairs", "%s has %d pairs, the limit is %d", what, len(m), pairs)
	}
	n := 0
	for k, v := range m {
		n += len(k) + len(v)
		if k == "" {
			return invalid("invalid_pair", "%s has an empty key", what)
		}
		if !utf8.ValidString(k) || !utf8.ValidString(v) || strings.ContainsRune(k+v, 0) {
			return invalid("invalid_pair", "%s is not UTF-8 text without NUL", what)
		}
	}
	if n > bytes {
		return fault.New(fault.TooLarge, "pairs_too_large", "%s has %d bytes, the limit is %d", what, n, bytes)
	}
	return nil
}

func checkAction(field string, a sandbox.Action) error {
	switch a {
	case sandbox.ActionDelete, sandbox.ActionStop, sandbox.ActionPause:
		return nil
	}
	return invalid("invalid_action", "%s cannot be %s", field, quote(string(a))).Do("use delete, stop or pause")
}

func (s *Service) checkTimeout(d time.Duration) error {
	if d < s.limits.MinTimeout || d > s.limits.MaxLifetime {
		return invalid("invalid_timeout", "a timeout of %s is out of bounds", d).
			Do("use %s to %s", s.limits.MinTimeout, s.limits.MaxLifetime)
	}
	return nil
}

func (s *Service) checkIdle(d time.Duration) error {
	if d != 0 && (d < s.limits.MinIdle || d > s.limits.MaxLifetime) {
		return invalid("invalid_idle", "an idle time of %s is out of bounds", d).
			Do("use 0 for never, or %s to %s", s.limits.MinIdle, s.limits.MaxLifetime)
	}
	return nil
}

func (s *Service) checkResources(r sandbox.Resources) error {
	lo, hi := s.limits.MinResources, s.limits.MaxResources
	for _, f := range []struct {
		name       string
		v, lo, hi  int64
		unit, code string
	}{
		{"cpu", r.MilliCPU, lo.MilliCPU, hi.MilliCPU, "thousandths of a CPU", "invalid_cpu"},
		{"memory", r.MemoryBytes, lo.MemoryBytes, hi.MemoryBytes, "bytes", "invalid_memory"},
		{"disk", r.DiskBytes, lo.DiskBytes, hi.DiskBytes, "bytes", "invalid_disk"},
		{"processes", r.MaxProcesses, lo.MaxProcesses, hi.MaxProcesses, "processes", "invalid_processes"},
	} {
		if f.v < f.lo || f.v > f.hi {
			return invalid(f.code, "%d %s of %s is out of bounds", f.v, f.unit, f.name).
				Do("use %d to %d %s", f.lo, f.hi, f.unit)
		}
	}
	return nil
}

// completeCreate fills what was left out and checks everything; the maps are copied.
func (s *Service) completeCreate(c CreateSandbox) (CreateSandbox, error) {
	if err := checkName(c.Name); err != nil {
		return c, err
	}
	or(&c.Template, s.defaults.Template)
	if len(c.Template) > 200 || !utf8.ValidString(c.Template) || strings.ContainsRune(c.Template, 0) {
		return c, invalid("invalid_template", "the template reference is not a name:tag or digest")
	}
	if len(c.Accept) == 0 {
		c.Accept = s.defaults.Accept
	}
	for _, a := range c.Accept {
		switch a {
		case sandbox.ClassMicroVM, sandbox.ClassUserKernel, sandbox.ClassEmulated:
		default:
			return c, invalid("invalid_isolation", "%s is not an isolation class", quote(string(a))).
				Do("use microvm, userkernel or emulated")
		}
	}
	c.Accept = slices.Compact(slices.Sorted(slices.Values(c.Accept)))
	orResources(&c.Resources, s.defaults.Resources)
	if err := s.checkResources(c.Resources); err != nil {
		return c, err
	}
	if c.MaxLifetime == 0 {
		c.MaxLifetime = max(min(s.defaults.MaxLifetime, s.limits.MaxLifetime), c.Timeout)
	}
	if c.MaxLifetime < s.limits.MinTimeout || c.MaxLifetime > s.limits.MaxLifetime {
		return c, invalid("invalid_max_lifetime", "a maximum life of %s is out of bounds", c.MaxLifetime).
			Do("use %s to %s", s.limits.MinTimeout, s.limits.MaxLifetime)
	}
	if c.Timeout == 0 {
		c.Timeout = min(s.defaults.Timeout, c.MaxLifetime)
	}
	if err := s.checkTimeout(c.Timeout); err != nil {
		return c, err
	}
	if c.Timeout > c.MaxLifetime {
		return c, invalid("invalid_timeout", "the timeout of %s is longer than the maximum life of %s", c.Timeout, c.MaxLifetime).
			Do("shorten the timeout or raise max_lifetime")
	}
	or(&c.OnTimeout, s.defaults.OnTimeout)
	if err := checkAction("on_timeout", c.OnTimeout); err != nil {
		return c, err
	}
	if err := s.checkIdle(c.IdleTimeout); err != nil {
		return c, err
	}
	or(&c.OnIdle, s.defaults.OnIdle)
	if err := checkAction("on_idle", c.OnIdle); err != nil {
		return c, err
	}
	if err := checkText("metadata", c.Metadata, s.limits.MaxMetadata, s.limits.MaxMetadataBytes); err != nil {
		return c, err
	}
	if err := checkText("env", c.Env, s.limits.MaxEnv, s.limits.MaxEnvBytes); err != nil {
		return c, err
	}
	for k := range c.Env {
		if !envRE.MatchString(k) {
			return c, invalid("invalid_env", "%s is not the name of an environment variable", quote(k)).
				Do("use letters, digits and '_', not beginning with a digit")
		}
	}
	c.Metadata, c.Env = maps.Clone(c.Metadata), maps.Clone(c.Env)
	return c, nil
}

func (s *Service) checkPatch(c PatchSandbox) error {
	if c.Name != nil {
		if err := checkName(*c.Name); err != nil {
			return err
		}
	}
	if c.Metadata != nil {
		if err := checkText("metadata", *c.Metadata, s.limits.MaxMetadata, s.limits.MaxMetadataBytes); err != nil {
			return err
		}
	}
	if c.Timeout != nil {
		if err := s.checkTimeout(*c.Timeout); err != nil {
			return err
		}
	}
	if c.OnTimeout != nil {
		if err := checkAction("on_timeout", *c.OnTimeout); err != nil {
			return err
		}
	}
	if c.IdleTimeout != nil {
		if err := s.checkIdle(*c.IdleTimeout); err != nil {
			return err
		}
	}
	if c.OnIdle != nil {
		return checkAction("on_idle", *c.OnIdle)
	}
	return nil
}

func (s *Service) pageLimit(n int) (int, error) {
	if n < 0 || n > s.limits.MaxPage {
		return 0, invalid("invalid_limit", "a page of %d rows is out of bounds", n).Do("use 1 to %d", s.limits.MaxPage)
	}
	if n == 0 {
		n = min(100, s.limits.MaxPage)
	}
	return n, nil
}
