package httpapi

import (
	"context"
	"net/http"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store"
)

// installation registers keys, templates, nodes, audit and health.
func (s *server) installation() {
	type mintIn struct {
		Mutation
		Body spaceapi.MintKey
	}
	type minted struct {
		key    store.Key
		secret secret.Value
	}
	route(s, "mint-key", "POST", "/v1/keys", "keys", "Make an API key; its secret is shown once", http.StatusCreated,
		func(ctx context.Context, in *mintIn) (*body[spaceapi.Key], error) {
			req, err := in.request(ctx, in.Body)
			if err != nil {
				return nil, err
			}
			k, v, err := s.Control.MintKey(ctx, principal(ctx), req, control.MintKey{Name: in.Body.Name, Scopes: in.Body.Scopes, TTL: secondsIn(in.Body.TTLSeconds)})
			return answer(minted{k, v}, err, func(m minted) spaceapi.Key { return keyOut(m.key, m.secret.Reveal()) })
		})
	route(s, "list-keys", "GET", "/v1/keys", "keys", "List keys, newest first", http.StatusOK,
		func(ctx context.Context, in *Page) (*body[spaceapi.List[spaceapi.Key]], error) {
			p, err := s.Control.ListKeys(ctx, principal(ctx), in.Cursor, in.Limit)
			return answer(p, err, func(p store.Page[store.Key]) spaceapi.List[spaceapi.Key] {
				return listOut(p, func(k store.Key) spaceapi.Key { return keyOut(k, "") })
			})
		})
	type keyIn struct {
		ID string `path:"id" maxLength:"64"`
		Mutation
	}
	route(s, "revoke-key", "DELETE", "/v1/keys/{id}", "keys", "Revoke a key, the tokens it minted, and their streams", http.StatusOK,
		func(ctx context.Context, in *keyIn) (*body[spaceapi.Key], error) {
			req, err := in.request(ctx, nil)
			if err != nil {
				return nil, err
			}
			k, err := s.Control.RevokeKey(ctx, principal(ctx), req, in.ID)
			return answer(k, err, func(k store.Key) spaceapi.Key { return keyOut(k, "") })
		})

	route(s, "list-templates", "GET", "/v1/templates", "templates", "List the installed templates", http.StatusOK,
		func(ctx context.Context, _ *struct{}) (*body[spaceapi.List[spaceapi.Template]], error) {
			l, err := s.Control.ListTemplates(ctx, principal(ctx))
			if err != nil {
				return nil, err
			}
			out := spaceapi.List[spaceapi.Template]{Items: make([]spaceapi.Template, 0, len(l))}
			for _, t := range l {
				out.Items = append(out.Items, templateOut(t))
			}
			return &body[spaceapi.List[spaceapi.Template]]{out}, nil
		})
	type templateIn struct {
		Ref string `path:"ref" maxLength:"200" doc:"name:tag or digest"`
	}
	route(s, "get-template", "GET", "/v1/templates/{ref}", "templates", "Get a template", http.StatusOK,
		func(ctx context.Context, in *templateIn) (*body[spaceapi.Template], error) {
			t, err := s.Control.GetTemplate(ctx, principal(ctx), in.Ref)
			return answer(t, err, templateOut)
		})

	route(s, "list-nodes", "GET", "/v1/nodes", "operator", "List nodes with their capacity", http.StatusOK,
		func(ctx context.Context, _ *struct{}) (*body[spaceapi.List[spaceapi.Node]], error) {
			l, err := s.Control.ListNodes(ctx, principal(ctx))
			if err != nil {
				return nil, err
			}
			out := spaceapi.List[spaceapi.Node]{Items: make([]spaceapi.Node, 0, len(l))}
			for _, n := range l {
				out.Items = append(out.Items, spaceapi.Node{
					Name: n.Name, Runtime: n.Runtime, Isolation: string(n.Class), Total: resourcesOut(n.Total), Used: resourcesOut(n.Used),
					Sandboxes: n.Sandboxes, MaxSandboxes: n.MaxSandboxes,
				})
			}
			return &body[spaceapi.List[spaceapi.Node]]{out}, nil
		})

	type auditIn struct {
		Page
		Chain string `query:"chain" enum:"control,node" default:"control" doc:"control: what was asked for; node: what sandboxes and sessions did"`
	}
	route(s, "list-audit", "GET", "/v1/audit", "audit", "List the tenant's audit records, newest first", http.StatusOK,
		func(ctx context.Context, in *auditIn) (*body[spaceapi.List[spaceapi.AuditRecord]], error) {
			p, err := s.Control.ListAudit(ctx, principal(ctx), in.Chain, in.Cursor, in.Limit)
			return answer(p, err, func(p store.Page[audit.Record]) spaceapi.List[spaceapi.AuditRecord] { return listOut(p, auditOut) })
		})

	type health struct {
		Status int
		Body   spaceapi.Health
	}
	route(s, "health", "GET", "/v1/health", "health", "Whether this server serves; needs no key", http.StatusOK,
		func(ctx context.Context, _ *struct{}) (*health, error) {
			checks, ok := s.Control.Health(ctx)
			h := &health{Status: http.StatusOK, Body: spaceapi.Health{Status: "ok", Version: s.Version, Checks: checks}}
			if !ok {
				h.Status, h.Body.Status = http.StatusServiceUnavailable, "degraded"
			}
			return h, nil
		})
}
