package control

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/template"
)

// require checks a scope and logs what was denied.
func (s *Service) require(p Principal, scope auth.Scope, action, target, request string) error {
	if p.Tenant.IsZero() || p.KeyID == "" {
		return fault.New(fault.Unauthenticated, "unauthenticated", "the request carries no credential").
			Do("send an API key as bearer token")
	}
	err := p.Require(scope)
	if err != nil {
		s.metrics.denied.WithLabelValues(action).Inc()
		s.log.Warn("denied", "tenant", p.Tenant.String(), "key", p.KeyID, "action", action, "target", target, "request", request, "scope", string(scope))
	}
	return err
}

// audit writes an entry of its own, for acts whose effect is not in the store.
// An act that cannot be audited fails.
func (s *Service) audit(ctx context.Context, p Principal, req Request, action, target string, detail map[string]string) error {
	err := s.store.Mutate(ctx, p.Tenant, func(tx store.Tx) error {
		return tx.Audit(audit.Entry{
			At: s.now(), Tenant: p.Tenant.String(), Actor: p.KeyID, Action: action,
			Target: target, Request: req.ID, Detail: detail,
		})
	})
	if err != nil {
		return storeFault(fmt.Errorf("audit: %w", err))
	}
	return nil
}

// ListTemplates implements API.
func (s *Service) ListTemplates(ctx context.Context, p Principal) ([]template.Info, error) {
	if err := s.require(p, scopeSandboxesRead, "template.list", "", ""); err != nil {
		return nil, err
	}
	list, err := s.node.Templates(ctx)
	return list, nodeFault(err)
}

// GetTemplate implements API.
func (s *Service) GetTemplate(ctx context.Context, p Principal, ref string) (template.Info, error) {
	if err := s.require(p, scopeSandboxesRead, "template.get", ref, ""); err != nil {
		return template.Info{}, err
	}
	info, err := s.node.Resolve(ctx, ref)
	if errors.Is(err, template.ErrNotFound) || errors.Is(err, template.ErrInvalid) {
		return info, fault.New(fault.NotFound, "template_not_found", "there is no template %s", quote(ref)).
			Do("list the templates to see what there is").Wrap(err)
	}
	return info, nodeFault(err)
}

// ListNodes implements API.
func (s *Service) ListNodes(ctx context.Context, p Principal) ([]Node, error) {
	if err := s.require(p, scopeOperator, "node.list", "", ""); err != nil {
		return nil, err
	}
	c, err := s.node.Capacity(ctx)
	if err != nil {
		return nil, nodeFault(err)
	}
	return []Node{{NodeInfo: s.info, Capacity: c}}, nil
}

// The chains of ListAudit.
const (
	ChainControl = "control"
	ChainNode    = "node"
)

// ListAudit implements API.
func (s *Service) ListAudit(ctx context.Context, p Principal, chain, cursor string, limit int) (store.Page[audit.Record], error) {
	if err := s.require(p, scopeAudit, "audit.list", "", ""); err != nil {
		return store.Page[audit.Record]{}, err
	}
	limit, err := s.pageLimit(limit)
	if err != nil {
		return store.Page[audit.Record]{}, err
	}
	switch chain {
	case "", ChainControl:
		page, err := s.store.AuditEntries(ctx, p.Tenant, cursor, limit)
		return page, storeFault(err)
	case ChainNode:
		return s.nodeAudit(ctx, p, cursor, limit)
	}
	return store.Page[audit.Record]{}, invalid("invalid_chain", "there is no audit chain %s", quote(chain)).Do("use control or node")
}

// nodeAudit pages through the node's chain; the cursor is the last number shown.
func (s *Service) nodeAudit(ctx context.Context, p Principal, cursor string, limit int) (page store.Page[audit.Record], err error) {
	var before uint64
	if cursor != "" {
		digits, ok := strings.CutPrefix(cursor, "n")
		if before, err = strconv.ParseUint(digits, 10, 63); err != nil || !ok || before == 0 {
			return page, storeFault(store.ErrBadCursor)
		}
	}
	if page.Items, err = s.node.Audit(ctx, p.Tenant, before, limit); err != nil {
		return page, nodeFault(err)
	}
	if n := len(page.Items); n == limit && page.Items[n-1].Seq > 1 {
		page.Next = "n" + strconv.FormatUint(page.Items[n-1].Seq, 10)
	}
	return page, nil
}
