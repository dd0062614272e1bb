package httpapi

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

type body[T any] struct{ Body T }

// Page is the part of a list that is asked for. Like the other parts of requests
// it is exported because huma does not see embedded types that are not.
type Page struct {
	Cursor string `query:"cursor" maxLength:"512" doc:"next_cursor of the page before"`
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"100"`
}

// Ref is a sandbox's id or name in a path.
type Ref struct {
	ID string `path:"id" minLength:"1" maxLength:"64" doc:"id or name"`
}

// mutated answers 202 with the operation, or 200 when it is over.
type mutated struct {
	Status   int
	Location string `header:"Location"`
	Replayed string `header:"Idempotency-Replayed"`
	Body     spaceapi.Mutation
}

func mutatedOut(r control.Result) *mutated {
	m := &mutated{Status: http.StatusAccepted, Location: "/v1/operations/" + r.Operation.ID}
	if r.Operation.State.Final() {
		m.Status = http.StatusOK
	}
	if r.Replayed {
		m.Replayed = "true"
	}
	m.Body = spaceapi.Mutation{Operation: operationOut(r.Operation), Sandbox: sandboxOut(r.Sandbox)}
	return m
}

func change(r control.Result, err error) (*mutated, error) {
	if err != nil {
		return nil, err
	}
	return mutatedOut(r), nil
}

func answer[A, B any](a A, err error, f func(A) B) (*body[B], error) {
	if err != nil {
		return nil, err
	}
	return &body[B]{f(a)}, nil
}

func (s *server) sandboxes() {
	const tag = "sandboxes"
	type createIn struct {
		Mutation
		Body spaceapi.CreateSandbox
	}
	route(s, "create-sandbox", "POST", "/v1/sandboxes", tag, "Create a sandbox", http.StatusAccepted,
		func(ctx context.Context, in *createIn) (*mutated, error) {
			req, err := in.request(ctx, in.Body)
			if err != nil {
				return nil, err
			}
			b := in.Body
			var accept []sandbox.Class
			for _, a := range b.AcceptIsolation {
				accept = append(accept, sandbox.Class(a))
			}
			return change(s.Control.CreateSandbox(ctx, principal(ctx), req, control.CreateSandbox{
				Name: b.Name, Template: b.Template, Accept: accept, Resources: resourcesIn(b.Resources),
				Timeout: secondsIn(b.TimeoutSeconds), OnTimeout: sandbox.Action(b.OnTimeout),
				IdleTimeout: secondsIn(b.IdleSeconds), OnIdle: sandbox.Action(b.OnIdle),
				MaxLifetime: secondsIn(b.MaxLifetimeSeconds), Metadata: b.Metadata, Env: b.Env,
			}))
		})

	type listIn struct {
		Page
		State    []string `query:"state,explode" maxItems:"20" doc:"only these observed states; repeatable"`
		Metadata []string `query:"metadata,explode" maxItems:"64" doc:"only with this key=value; repeatable, all must match"`
		Deleted  bool     `query:"deleted" doc:"include those deleted lately"`
	}
	route(s, "list-sandboxes", "GET", "/v1/sandboxes", tag, "List sandboxes, newest first", http.StatusOK,
		func(ctx context.Context, in *listIn) (*body[spaceapi.List[spaceapi.Sandbox]], error) {
			f := store.Filter{Cursor: in.Cursor, Limit: in.Limit, Deleted: in.Deleted}
			for _, st := range in.State {
				f.States = append(f.States, sandbox.State(st))
			}
			for _, kv := range in.Metadata {
				k, v, ok := strings.Cut(kv, "=")
				if !ok || k == "" {
					return nil, fault.New(fault.Invalid, "invalid_filter", "a metadata filter is not key=value").Do("write metadata=key=value")
				}
				if old, twice := f.Metadata[k]; twice && old != v {
					return nil, fault.New(fault.Invalid, "invalid_filter", "a metadata key is filtered for two values").Do("name each key once")
				}
				if f.Metadata == nil {
					f.Metadata = map[string]string{}
				}
				f.Metadata[k] = v
			}
			p, err := s.Control.ListSandboxes(ctx, principal(ctx), f)
			return answer(p, err, func(p store.Page[control.Sandbox]) spaceapi.List[spaceapi.Sandbox] { return listOut(p, sandboxOut) })
		})

	route(s, "get-sandbox", "GET", "/v1/sandboxes/{id}", tag, "Get a sandbox", http.StatusOK,
		func(ctx context.Context, in *Ref) (*body[spaceapi.Sandbox], error) {
			sb, err := s.Control.GetSandbox(ctx, principal(ctx), in.ID)
			return answer(sb, err, sandboxOut)
		})

	type patchIn struct {
		Ref
		Mutation
		Body spaceapi.PatchSandbox
	}
	route(s, "patch-sandbox", "PATCH", "/v1/sandboxes/{id}", tag, "Change policy or metadata", http.StatusAccepted,
		func(ctx context.Context, in *patchIn) (*mutated, error) {
			req, err := in.request(ctx, in.Body)
			if err != nil {
				return nil, err
			}
			b := in.Body
			c := control.PatchSandbox{Name: b.Name, Metadata: b.Metadata, OnTimeout: action(b.OnTimeout), OnIdle: action(b.OnIdle)}
			c.Timeout, c.IdleTimeout = duration(b.TimeoutSeconds), duration(b.IdleSeconds)
			return change(s.Control.PatchSandbox(ctx, principal(ctx), req, in.ID, c))
		})

	type refIn struct {
		Ref
		Mutation
	}
	route(s, "delete-sandbox", "DELETE", "/v1/sandboxes/{id}", tag, "Delete a sandbox with its files; it wins over everything going on", http.StatusAccepted,
		func(ctx context.Context, in *refIn) (*mutated, error) {
			req, err := in.request(ctx, nil)
			if err != nil {
				return nil, err
			}
			return change(s.Control.DeleteSandbox(ctx, principal(ctx), req, in.ID))
		})

	for verb, summary := range map[sandbox.Verb]string{
		sandbox.Pause:  "Keep it in memory, not scheduled",
		sandbox.Resume: "Go on with a paused one",
		sandbox.Stop:   "Power it off; files are kept",
		sandbox.Start:  "Boot a stopped or failed one",
		sandbox.Wake:   "Bring it back by whatever way is valid",
	} {
		route(s, string(verb)+"-sandbox", "POST", "/v1/sandboxes/{id}/"+string(verb), tag, summary, http.StatusAccepted,
			func(ctx context.Context, in *refIn) (*mutated, error) {
				req, err := in.request(ctx, nil)
				if err != nil {
					return nil, err
				}
				return change(s.Control.Lifecycle(ctx, principal(ctx), req, in.ID, control.Lifecycle{Verb: verb}))
			})
	}

	route(s, "stats-sandbox", "GET", "/v1/sandboxes/{id}/stats", tag, "What the host measures of it", http.StatusOK,
		func(ctx context.Context, in *Ref) (*body[spaceapi.Stats], error) {
			st, err := s.Control.SandboxStats(ctx, principal(ctx), in.ID)
			if err != nil {
				return nil, err
			}
			return &body[spaceapi.Stats]{spaceapi.Stats{
				CPUSeconds: float64(st.CPUNanos) / 1e9, MemoryBytes: st.MemoryBytes, MemoryPeak: st.MemoryPeak,
				DiskBytes: st.DiskBytes, Processes: st.Processes,
			}}, nil
		})

	route(s, "list-quarantine", "GET", "/v1/quarantine", "operator", "List quarantined sandboxes", http.StatusOK,
		func(ctx context.Context, in *Page) (*body[spaceapi.List[spaceapi.Sandbox]], error) {
			p, err := s.Control.ListQuarantine(ctx, principal(ctx), in.Cursor, in.Limit)
			return answer(p, err, func(p store.Page[control.Sandbox]) spaceapi.List[spaceapi.Sandbox] { return listOut(p, sandboxOut) })
		})
	route(s, "release-sandbox", "POST", "/v1/quarantine/{id}/release", "operator", "End a quarantine: the sandbox becomes stopped", http.StatusAccepted,
		func(ctx context.Context, in *refIn) (*mutated, error) {
			req, err := in.request(ctx, nil)
			if err != nil {
				return nil, err
			}
			return change(s.Control.Release(ctx, principal(ctx), req, in.ID))
		})
}

func action(s *string) *sandbox.Action {
	if s == nil {
		return nil
	}
	a := sandbox.Action(*s)
	return &a
}

func duration(s *int64) *time.Duration {
	if s == nil {
		return nil
	}
	d := secondsIn(*s)
	return &d
}

func (s *server) operations() {
	const tag = "operations"
	type getIn struct {
		ID   string `path:"id" maxLength:"64"`
		Wait string `query:"wait" maxLength:"10" pattern:"^[0-9]{1,5}(ms|s|m)?$" doc:"hold the answer until it ended, at most this long"`
	}
	route(s, "get-operation", "GET", "/v1/operations/{id}", tag, "Get an operation", http.StatusOK,
		func(ctx context.Context, in *getIn) (*body[spaceapi.Operation], error) {
			wait, err := waitOf(in.Wait)
			if err != nil {
				return nil, err
			}
			op, err := s.Control.GetOperation(ctx, principal(ctx), in.ID, wait)
			return answer(op, err, operationOut)
		})
	type listIn struct {
		Page
		Sandbox string `query:"sandbox" maxLength:"64" doc:"only of this sandbox"`
	}
	route(s, "list-operations", "GET", "/v1/operations", tag, "List operations, newest first", http.StatusOK,
		func(ctx context.Context, in *listIn) (*body[spaceapi.List[spaceapi.Operation]], error) {
			p, err := s.Control.ListOperations(ctx, principal(ctx), in.Sandbox, in.Cursor, in.Limit)
			return answer(p, err, func(p store.Page[operation.Operation]) spaceapi.List[spaceapi.Operation] {
				return listOut(p, operationOut)
			})
		})
	type cancelIn struct {
		ID string `path:"id" maxLength:"64"`
		Mutation
	}
	route(s, "cancel-operation", "POST", "/v1/operations/{id}/cancel", tag, "Take back what has not taken effect", http.StatusOK,
		func(ctx context.Context, in *cancelIn) (*body[spaceapi.Operation], error) {
			req, err := in.request(ctx, nil)
			if err != nil {
				return nil, err
			}
			r, err := s.Control.CancelOperation(ctx, principal(ctx), req, in.ID)
			return answer(r, err, func(r control.Result) spaceapi.Operation { return operationOut(r.Operation) })
		})
}
