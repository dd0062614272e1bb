package session_test

import (
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/session"
)

// The two sides fit as they are.
var (
	_ node.Sessions   = (*session.Manager)(nil)
	_ session.Guests  = (*node.Node)(nil)
	_ session.Auditor = (*node.Auditor)(nil)
	_ session.Sealer  = (*secret.Sealer)(nil)
)
