package httpapi

import (
	"math"
	"time"
	"unicode/utf8"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/template"
)

const mib = 1 << 20

func resourcesOut(r sandbox.Resources) spaceapi.Resources {
	return spaceapi.Resources{CPUs: float64(r.MilliCPU) / 1000, MemoryMiB: r.MemoryBytes / mib, DiskMiB: r.DiskBytes / mib, MaxProcesses: r.MaxProcesses}
}

func resourcesIn(r spaceapi.Resources) sandbox.Resources {
	bytes := func(m int64) int64 {
		if m > math.MaxInt64/mib {
			return math.MaxInt64 // refused by control's limits, not wrapped around
		}
		return m * mib
	}
	cpu := int64(math.Round(r.CPUs * 1000))
	if r.CPUs > 0 {
		cpu = max(cpu, 1) // refused as too little, not taken for the default
	}
	return sandbox.Resources{MilliCPU: cpu, MemoryBytes: bytes(r.MemoryMiB), DiskBytes: bytes(r.DiskMiB), MaxProcesses: r.MaxProcesses}
}

// secondsIn turns whole seconds into a duration, saturating instead of wrapping.
func secondsIn(s int64) time.Duration {
	if s > math.MaxInt64/int64(time.Second) {
		return math.MaxInt64
	}
	return time.Duration(s) * time.Second
}

func problemOut(p *operation.Problem) *spaceapi.Problem {
	if p == nil {
		return nil
	}
	return &spaceapi.Problem{Code: p.Code, Detail: p.What, Cause: p.Why, Remedy: p.Remedy, Retryable: p.Retryable}
}

func sandboxOut(s control.Sandbox) spaceapi.Sandbox {
	return spaceapi.Sandbox{
		ID: string(s.ID), Name: s.Name, Template: s.Template, TemplateDigest: s.TemplateDigest,
		State: string(s.Observed), DesiredState: string(s.Desired), Isolation: string(s.Class), Runtime: s.Runtime,
		Generation: s.Generation, Resources: resourcesOut(s.Resources),
		OnTimeout: string(s.Policy.OnExpire), IdleSeconds: int64(s.Policy.Idle / time.Second), OnIdle: string(s.Policy.OnIdle),
		Metadata: s.Metadata, CreatedAt: s.CreatedAt, UpdatedAt: s.UpdatedAt,
		ExpiresAt: s.Policy.ExpiresAt, DeadlineAt: s.Policy.DeadlineAt, Problem: problemOut(s.Problem),
	}
}

func operationOut(o operation.Operation) spaceapi.Operation {
	out := spaceapi.Operation{
		ID: o.ID, Kind: string(o.Kind), SandboxID: string(o.Sandbox), State: string(o.State), WaitingFor: o.WaitingFor,
		CreatedAt: o.CreatedAt, UpdatedAt: o.UpdatedAt, DeadlineAt: o.DeadlineAt, RetrySafe: o.RetrySafe,
		SupersededBy: o.Superseded, Error: problemOut(o.Problem),
	}
	for _, s := range o.Steps {
		out.Steps = append(out.Steps, spaceapi.Step(s))
	}
	return out
}

func commandIn(c spaceapi.Command) session.Command {
	limit := time.Duration(0)
	if c.TimeoutSeconds > 0 {
		limit = max(time.Duration(math.Min(c.TimeoutSeconds, math.MaxInt32)*float64(time.Second)), time.Millisecond) // 0 would be no limit
	}
	return session.Command{Args: c.Args, Shell: c.Shell, User: c.User, Cwd: c.Cwd, Env: c.Env, TimeLimit: limit}
}

func sessionIn(c spaceapi.CreateSession) control.CreateSession {
	cmd := commandIn(c.Command)
	cmd.Stdin, cmd.Overflow = c.Stdin, c.Overflow
	if c.PTY != nil {
		cmd.PTY = &guestapi.Size{Rows: c.PTY.Rows, Cols: c.PTY.Cols}
	}
	return control.CreateSession{Command: cmd, TokenTTL: secondsIn(c.TokenTTLSeconds)}
}

func exitOut(e session.Exit) spaceapi.Exit {
	return spaceapi.Exit{Cause: e.Cause, Code: e.Code, Signal: e.Signal, Reason: e.Reason, At: e.At}
}

func sessionOut(s session.Session) spaceapi.Session {
	out := spaceapi.Session{
		ID: string(s.ID), SandboxID: string(s.Sandbox), CreatedBy: s.Principal, State: string(s.State), Args: s.Command.Args, Shell: s.Command.Shell,
		User: s.Command.User, Cwd: s.Command.Cwd, PTY: s.Command.PTY != nil, Epoch: s.Epoch,
		CreatedAt: s.CreatedAt, StartedAt: s.StartedAt, PID: s.PID, FirstID: s.FirstID, LastID: s.LastID, StdinOffset: s.StdinOffset,
	}
	if s.Exit != nil {
		e := exitOut(*s.Exit)
		out.Exit = &e
	}
	return out
}

// outputOut gives text where JSON does not more than double it: a program that
// prints control characters must not make our answer six times as large.
func outputOut(b []byte, truncated uint64) spaceapi.Output {
	cost := 0
	for _, c := range b {
		if c < 0x20 && c != '\n' && c != '\r' && c != '\t' {
			cost += 5
		}
	}
	if cost <= len(b) && utf8.Valid(b) {
		t := string(b)
		return spaceapi.Output{Text: &t, TruncatedBytes: truncated}
	}
	return spaceapi.Output{B64: b, TruncatedBytes: truncated}
}

func keyOut(k store.Key, secret string) spaceapi.Key {
	return spaceapi.Key{
		ID: k.ID, Name: k.Name, Scopes: k.Scopes, Secret: secret, CreatedAt: k.CreatedAt, CreatedBy: k.CreatedBy,
		ExpiresAt: k.ExpiresAt, RevokedAt: k.RevokedAt, LastUsedAt: k.LastUsedAt,
	}
}

func templateOut(t template.Info) spaceapi.Template {
	return spaceapi.Template{
		Reference: t.Reference, Digest: t.Digest, SizeBytes: t.SizeBytes,
		User: t.Config.User, WorkDir: t.Config.WorkDir, Env: t.Config.Env, BuiltAt: t.BuiltAt,
	}
}

func auditOut(r audit.Record) spaceapi.AuditRecord {
	const digits = "0123456789abcdef"
	hash := make([]byte, 0, 2*len(r.Hash))
	for _, b := range r.Hash {
		hash = append(hash, digits[b>>4], digits[b&15])
	}
	return spaceapi.AuditRecord{
		Chain: r.Chain, Seq: r.Seq, At: r.Entry.At, Actor: r.Entry.Actor, Action: r.Entry.Action,
		Target: r.Entry.Target, Request: r.Entry.Request, Detail: r.Entry.Detail, Hash: string(hash),
	}
}

func listOut[A, B any](p store.Page[A], f func(A) B) spaceapi.List[B] {
	out := spaceapi.List[B]{Items: make([]B, 0, len(p.Items)), Next: p.Next}
	for _, a := range p.Items {
		out.Items = append(out.Items, f(a))
	}
	return out
}
