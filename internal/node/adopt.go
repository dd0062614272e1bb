package node

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

// AdoptionResult is what became of one id at start-up.
type AdoptionResult string

// The results.
const (
	AdoptedRunning  AdoptionResult = "running"     // goes on; its guest is asked anew
	AdoptedPaused   AdoptionResult = "paused"      // sleeps on
	AdoptedResting  AdoptionResult = "resting"     // stopped or failed, with its files
	AdoptedHeld     AdoptionResult = "quarantined" // kept out of reach
	AdoptedResumed  AdoptionResult = "unfinished"  // an assignment in progress goes on
	AdoptedDead     AdoptionResult = "dead"        // its machine ended while we were away
	AdoptedLost     AdoptionResult = "lost"        // its machine is no longer on the host
	AdoptedMismatch AdoptionResult = "mismatch"    // not the machine that was recorded: quarantined
	AdoptedOrphan   AdoptionResult = "orphan"      // a machine that nothing is known of: is destroyed
)

// Adoption says what was found for one id.
type Adoption struct {
	ID     sandbox.ID
	Result AdoptionResult
}

// AdoptionReport is every id that has a row or a machine, in no order.
type AdoptionReport []Adoption

// Counts sums the report by result.
func (r AdoptionReport) Counts() map[AdoptionResult]int {
	m := map[AdoptionResult]int{}
	for _, a := range r {
		m[a.Result]++
	}
	return m
}

// Start takes possession of the host: it compares rows with machines, decides
// about each, and begins to converge. When it returns, every decision is
// durable and the API may be served; the work goes on in the actors. A host
// that cannot list its machines is asked again until ctx ends.
func (n *Node) Start(ctx context.Context) (AdoptionReport, error) {
	if n.sessions == nil {
		return nil, errors.New("node: Bind must come before Start")
	}
	rows, err := loadRows(ctx, n.db.Read)
	if err != nil {
		return nil, fmt.Errorf("node: read rows: %w", err)
	}
	pending, err := loadOutcomes(ctx, n.db.Read, "", 0)
	if err != nil {
		return nil, fmt.Errorf("node: read outcomes: %w", err)
	}
	found, err := n.list(ctx)
	if err != nil {
		return nil, err
	}
	latest := map[sandbox.ID]*Outcome{}
	for i := range pending {
		latest[pending[i].ID] = &pending[i]
	}
	now := n.clock.Now().UTC()
	var report AdoptionReport
	// First all the books, so that nothing is decided on half of them.
	for i := range rows {
		b := n.boxFor(rows[i].ID)
		b.mu.Lock()
		// Nobody could reach the sandbox while the node was away: that is not idleness.
		b.row, b.pending, b.activity = rows[i], latest[rows[i].ID], now
		n.ledger.set(b.id, chargeOf(&b.row))
		b.mu.Unlock()
	}
	for i := range rows {
		st, ok := found[rows[i].ID]
		if !ok {
			st = runtime.Status{Condition: absent}
		}
		delete(found, rows[i].ID)
		result, err := n.boxFor(rows[i].ID).adopt(ctx, st)
		if err != nil {
			return report, fmt.Errorf("node: adopt %s: %w", rows[i].ID, err)
		}
		report = append(report, Adoption{rows[i].ID, result})
	}
	for id := range found {
		if err := n.boxFor(id).orphan(ctx, now); err != nil {
			return report, fmt.Errorf("node: adopt %s: %w", id, err)
		}
		report = append(report, Adoption{id, AdoptedOrphan})
	}
	for _, a := range report {
		n.metrics.adopted.WithLabelValues(string(a.Result)).Inc()
		level := slog.LevelInfo
		if a.Result == AdoptedDead || a.Result == AdoptedLost || a.Result == AdoptedMismatch || a.Result == AdoptedOrphan {
			level = slog.LevelWarn
		}
		n.log.Log(ctx, level, "adopted", slog.String("sandbox", string(a.ID)), slog.String("result", string(a.Result)))
	}
	if err := n.auditAdoption(ctx, report); err != nil {
		return report, err
	}
	if len(pending) > 0 {
		n.signalOutcome()
	}
	n.mu.Lock()
	n.started = true
	n.mu.Unlock()
	n.spawn(func() { n.enforceLimits(n.ctx) })
	return report, nil
}

func (n *Node) ready() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.started && !n.closed
}

// list asks the host for its machines, as long as ctx lasts.
func (n *Node) list(ctx context.Context) (map[sandbox.ID]runtime.Status, error) {
	for attempt := 1; ; attempt++ {
		lctx, cancel := n.bounded(ctx, n.cfg.StepTimeout, errStepTimeout)
		all, err := n.rt.List(lctx)
		cancel(nil)
		if err == nil {
			found := make(map[sandbox.ID]runtime.Status, len(all))
			for _, st := range all {
				found[st.Spec.ID] = st
			}
			return found, nil
		}
		n.log.Warn("cannot list machines; will retry", slog.Any("error", err))
		select {
		case <-n.clock.After(backoff(attempt)):
		case <-ctx.Done():
			return nil, fmt.Errorf("node: list machines: %w", errors.Join(ctx.Err(), err))
		case <-n.ctx.Done():
			return nil, errNotServing()
		}
	}
}

// adopt decides about one row with what the host listed for it. It makes no call
// of its own: one machine that does not answer holds up no other.
func (b *box) adopt(ctx context.Context, st runtime.Status) (AdoptionResult, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.row.Target
	if err := b.saw(ctx, nil, st); err != nil {
		return "", err
	}
	defer b.schedule()
	defer b.poke()
	b.known = false // the actor begins with a look, which also gives it the machine
	r := &b.row
	if r.Target == sandbox.Quarantined && was != sandbox.Quarantined {
		return AdoptedMismatch, nil
	}
	switch next(b.view()) {
	case stepDied:
		return AdoptedDead, b.fail(ctx, sandbox.Failed, triggerAdoptedDead, diedProblem(st.Exit))
	case stepLost:
		return AdoptedLost, b.fail(ctx, sandbox.Failed, triggerAdoptedDead, lostProblem())
	}
	switch {
	case r.Target == sandbox.Quarantined:
		return AdoptedHeld, nil
	case !r.settled() || !r.Converged:
		return AdoptedResumed, nil
	case r.Target == sandbox.Running:
		return AdoptedRunning, nil
	case r.Target == sandbox.Paused:
		return AdoptedPaused, nil
	}
	return AdoptedResting, nil
}

// orphan makes a row for a machine that nothing is known of, so that its
// removal goes on after the next crash too. Its id is then deleted for ever:
// whoever still believes in it is told so.
func (b *box) orphan(ctx context.Context, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := b.commit(ctx, func(r *row) {
		*r = row{ID: b.id, Desired: sandbox.Deleted, Target: sandbox.Deleted, State: sandbox.Creating, Down: true,
			Cause: "orphan", Created: now, Since: now}
	}, func(tx *sql.Tx) error {
		return b.n.audit.Append(ctx, tx, audit.Entry{At: now, Actor: "node", Action: "sandbox.orphan", Target: string(b.id)})
	})
	if err == nil {
		b.poke()
	}
	return err
}

// auditAdoption records the sums; what was moved or destroyed has its own entry.
func (n *Node) auditAdoption(ctx context.Context, report AdoptionReport) error {
	detail := map[string]string{}
	for result, count := range report.Counts() {
		detail[string(result)] = strconv.Itoa(count)
	}
	return n.update(ctx, func(tx *sql.Tx) error {
		return n.audit.Append(ctx, tx, audit.Entry{At: n.clock.Now().UTC(), Actor: "node", Action: "node.start",
			Target: n.cfg.Name, Detail: detail})
	})
}
