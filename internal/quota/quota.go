// Package quota is the one capped ledger that sessions, journals, readers,
// tokens, watchers and transfers are charged to, per sandbox and per tenant.
// It lives in memory: what it counts is found again after a restart by its
// owners, who charge it anew.
package quota

import (
	"sync"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/tenant"
)

// Kind of a thing that is charged.
type Kind string

// The kinds. JournalBytes and TransferBytes are bytes, the others count things.
const (
	Sessions      Kind = "sessions"      // sessions that are kept, ended ones included
	JournalBytes  Kind = "journal_bytes" // bytes of output journals on the disk
	Readers       Kind = "readers"       // open output streams
	Tokens        Kind = "tokens"        // data-plane tokens that are valid
	Watchers      Kind = "watchers"      // file and event watchers
	TransferBytes Kind = "transfer_bytes"
)

// Cap is the highest use of one kind. Zero or less means no cap.
type Cap struct {
	Sandbox int64 // of one sandbox
	Tenant  int64 // of all sandboxes of one tenant
}

// Defaults are the caps of an installation that states none.
func Defaults() map[Kind]Cap {
	return map[Kind]Cap{
		Sessions:     {Sandbox: 1024, Tenant: 16384},
		JournalBytes: {Sandbox: 256 << 20, Tenant: 4 << 30},
		Readers:      {Sandbox: 256, Tenant: 2048},
		Tokens:       {Sandbox: 2048, Tenant: 32768},
		Watchers:     {Sandbox: 64, Tenant: 1024},
	}
}

type account struct {
	tenant  string
	sandbox sandbox.ID // "" for the tenant's own sum
	kind    Kind
}

// Ledger counts use against caps. Safe for concurrent use.
type Ledger struct {
	caps map[Kind]Cap

	mu   sync.Mutex
	used map[account]int64 // no zero entries
}

// New makes an empty ledger. A kind that caps does not name has no cap.
func New(caps map[Kind]Cap) *Ledger {
	own := make(map[Kind]Cap, len(caps))
	for k, c := range caps {
		own[k] = c
	}
	return &Ledger{caps: own, used: map[account]int64{}}
}

// Charge adds n (>= 0) of kind k to the sandbox and its tenant: both or, when
// either would pass its cap, neither and a fault of class exhausted with code
// "quota".
func (l *Ledger) Charge(t tenant.ID, id sandbox.ID, k Kind, n int64) error {
	return l.add(t, id, k, n, false)
}

// Adopt adds n like Charge, but past any cap: for what already exists when its
// owner finds it again after a restart, and for the small overdraft that an
// owner has documented. New charges then fail until use is below the cap.
func (l *Ledger) Adopt(t tenant.ID, id sandbox.ID, k Kind, n int64) {
	_ = l.add(t, id, k, n, true) // cannot fail past the caps
}

func (l *Ledger) add(t tenant.ID, id sandbox.ID, k Kind, n int64, force bool) error {
	if n < 0 {
		return fault.New(fault.Internal, "internal", "a negative charge of %s", k)
	}
	own := account{t.String(), id, k}
	sum := account{t.String(), "", k}
	limit := l.caps[k]
	l.mu.Lock()
	defer l.mu.Unlock()
	if !force {
		if limit.Sandbox > 0 && l.used[own]+n > limit.Sandbox {
			return refuse(k, "this sandbox", limit.Sandbox)
		}
		if limit.Tenant > 0 && l.used[sum]+n > limit.Tenant {
			return refuse(k, "this tenant", limit.Tenant)
		}
	}
	if n > 0 {
		l.used[own] += n
		l.used[sum] += n
	}
	return nil
}

func refuse(k Kind, whose string, limit int64) error {
	return fault.New(fault.Exhausted, "quota", "the quota of %s is used up", k).
		Because("%s may have %d", whose, limit).
		Do("end or delete some, or ask the operator for a higher quota")
}

// Refund takes n (>= 0) back; use never falls below zero.
func (l *Ledger) Refund(t tenant.ID, id sandbox.ID, k Kind, n int64) {
	if n <= 0 {
		return
	}
	own := account{t.String(), id, k}
	sum := account{t.String(), "", k}
	l.mu.Lock()
	defer l.mu.Unlock()
	n = min(n, l.used[own]) // a double refund of one sandbox never frees another's
	for _, a := range []account{own, sum} {
		if l.used[a] -= n; l.used[a] <= 0 {
			delete(l.used, a)
		}
	}
}

// Used tells what one sandbox (or with id "" the whole tenant) uses of k.
func (l *Ledger) Used(t tenant.ID, id sandbox.ID, k Kind) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used[account{t.String(), id, k}]
}
