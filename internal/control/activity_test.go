package control

import (
	"slices"
	"testing"

	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
)

// The node's chain is paged like the control chain: all of it, once.
func TestNodeAuditPages(t *testing.T) {
	w, _ := stepped(t)
	w.node.auditLen = 7
	var got []uint64
	cursor := ""
	for range 10 {
		page, err := w.svc.ListAudit(t.Context(), w.p, ChainNode, cursor, 3)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range page.Items {
			got = append(got, r.Seq)
		}
		if cursor = page.Next; cursor == "" {
			break
		}
	}
	if !slices.Equal(got, []uint64{7, 6, 5, 4, 3, 2, 1}) {
		t.Errorf("pages have %v", got)
	}
	for _, bad := range []string{"n0", "n-1", "7", "nx", "n99999999999999999999"} {
		if _, err := w.svc.ListAudit(t.Context(), w.p, ChainNode, bad, 3); !fault.IsCode(err, "bad_cursor") {
			t.Errorf("cursor %q: %v", bad, err)
		}
	}
	if _, err := w.svc.ListAudit(t.Context(), w.p, "other", "", 3); !fault.IsCode(err, "invalid_chain") {
		t.Errorf("a chain that is not there: %v", err)
	}
}

// What a program prints is for the key that started it, and for keys that may
// read all activity.
func TestOutputIsReadWithActivityOnly(t *testing.T) {
	w, _ := stepped(t)
	s := w.up(t, CreateSandbox{})
	id := string(sandbox.NewSessionID(s.ID))
	w.node.sessions.madeBy = "key2"
	p := w.p
	p.Scopes = []auth.Scope{auth.Exec}
	if _, err := w.svc.MintAttachToken(t.Context(), p, Request{}, id, 0); !fault.IsCode(err, "scope_missing") {
		t.Errorf("another's session with exec alone: %v", err)
	}
	p.Scopes = []auth.Scope{auth.Exec, auth.ActivityRead}
	if _, err := w.svc.MintAttachToken(t.Context(), p, Request{}, id, 0); err != nil {
		t.Errorf("another's session with activity:read: %v", err)
	}
	w.node.sessions.madeBy = p.KeyID
	p.Scopes = []auth.Scope{auth.Exec}
	if _, err := w.svc.MintAttachToken(t.Context(), p, Request{}, id, 0); err != nil {
		t.Errorf("one's own session: %v", err)
	}
}
