package control

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/node"
	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/store"
)

// model is what a client knows: what was acknowledged.
type model struct {
	*world
	hand *hand
	t    *rapid.T

	acked    map[string]Result // idempotency key → first answer
	calls    map[string]func(context.Context) (Result, error)
	sandbox  map[sandbox.ID]uint64 // highest generation seen
	ops      map[string]operation.State
	deleted  map[sandbox.ID]bool
	sequence int
}

var failpoints = []string{
	fpBeforeCommit, fpAfterCommit, fpBeforeApply, fpAfterApply, fpBeforeObserve, fpAbsorbBefore, fpAbsorbAfter,
}

// note checks what every answer and every row must keep.
func (m *model) note(s Sandbox, op *operation.Operation) {
	if s.Generation < m.sandbox[s.ID] {
		m.t.Fatalf("%s: generation fell from %d to %d", s.ID, m.sandbox[s.ID], s.Generation)
	}
	m.sandbox[s.ID] = s.Generation
	if m.deleted[s.ID] && s.DeletedAt.IsZero() {
		m.t.Fatalf("%s came back: %+v", s.ID, s)
	}
	if !s.DeletedAt.IsZero() {
		m.deleted[s.ID] = true
	}
	if op != nil {
		m.noteOp(*op)
	}
}

func (m *model) noteOp(op operation.Operation) {
	if was, ok := m.ops[op.ID]; ok && was.Final() && was != op.State {
		m.t.Fatalf("operation %s went from %s to %s", op.ID, was, op.State)
	}
	m.ops[op.ID] = op.State
}

// send makes a mutation with a key of its own and keeps it for repeats.
func (m *model) send(key string, call func(context.Context) (Result, error)) {
	res, err := call(context.Background())
	if err != nil {
		f := fault.Of(err)
		if f.Class == fault.Internal && !errors.Is(err, failpoint.ErrInjected) {
			m.t.Fatalf("%s: %v", key, err)
		}
		if errors.Is(err, failpoint.ErrInjected) {
			// The client does not know; it will repeat.
			m.calls[key] = call
		}
		return
	}
	if first, ok := m.acked[key]; ok {
		if first.Sandbox.ID != res.Sandbox.ID || first.Operation.ID != res.Operation.ID {
			m.t.Fatalf("%s: %s/%s, and then %s/%s", key, first.Sandbox.ID, first.Operation.ID, res.Sandbox.ID, res.Operation.ID)
		}
	} else {
		m.acked[key] = res
	}
	m.calls[key] = call
	m.note(res.Sandbox, &res.Operation)
}

func (m *model) key() string {
	m.sequence++
	return fmt.Sprintf("key-%d", m.sequence)
}

func (m *model) pick(label string) (sandbox.ID, bool) {
	ids := slices.Sorted(maps.Keys(m.sandbox))
	if len(ids) == 0 {
		return "", false
	}
	// Ids are random: draw a position, by age, so that a case can be repeated.
	byAge := map[sandbox.ID]string{}
	for k, r := range m.acked {
		if r.Operation.Kind == operation.Create {
			byAge[r.Sandbox.ID] = fmt.Sprintf("%010s", k)
		}
	}
	slices.SortFunc(ids, func(a, b sandbox.ID) int {
		if byAge[a] < byAge[b] {
			return -1
		}
		return 1
	})
	return ids[rapid.IntRange(0, len(ids)-1).Draw(m.t, label)], true
}

// TestModel drives random interleavings of requests, repeats, crashes, lost and
// late node reports, the node's own moves and clock jumps, and then lets
// everything come to rest. What must hold at all times is in note; at rest:
// every acknowledged intent is kept, each key has one operation and one
// sandbox, every operation has ended, what is observed is what is wanted or
// failed, and is what the node truly has.
func TestModel(t *testing.T) {
	base := scratch(t)
	var runs atomic.Int64
	rapid.Check(t, func(rt *rapid.T) {
		dir := filepath.Join(base, fmt.Sprint(runs.Add(1)))
		if err := os.Mkdir(dir, 0o700); err != nil {
			rt.Fatalf("%v", err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
		h := &hand{now: start}
		m := &model{
			world: newWorld(rt, dir, h), hand: h, t: rt,
			acked: map[string]Result{}, calls: map[string]func(context.Context) (Result, error){},
			sandbox: map[sandbox.ID]uint64{}, ops: map[string]operation.State{}, deleted: map[sandbox.ID]bool{},
		}
		defer m.close(rt)
		for range rapid.IntRange(10, 60).Draw(rt, "steps") {
			m.act()
			m.look()
		}
		m.rest()
	})
}

// scratch is a directory in memory where there is one: these tests make
// thousands of commits, and what a disk does with them is storetest's matter.
func scratch(t *testing.T) string {
	if dir, err := os.MkdirTemp("/dev/shm", "space-control-test"); err == nil {
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		return dir
	}
	return t.TempDir()
}

func (m *model) act() {
	t := m.t
	ctx := context.Background()
	switch a := rapid.IntRange(0, 19).Draw(t, "act"); a {
	case 0, 1:
		key := m.key()
		c := CreateSandbox{
			Timeout:   time.Duration(rapid.IntRange(5, 300).Draw(t, "timeout")) * time.Second,
			OnTimeout: rapid.SampledFrom([]sandbox.Action{sandbox.ActionDelete, sandbox.ActionPause, sandbox.ActionStop}).Draw(t, "on"),
			Env:       map[string]string{"A": "b"},
		}
		m.send(key, func(ctx context.Context) (Result, error) {
			return m.svc.CreateSandbox(ctx, m.p, request(key, "create"), c)
		})
	case 2, 3, 4, 5:
		id, ok := m.pick("verb on")
		if !ok {
			return
		}
		key := m.key()
		v := rapid.SampledFrom([]sandbox.Verb{sandbox.Pause, sandbox.Resume, sandbox.Stop, sandbox.Start, sandbox.Wake}).Draw(t, "verb")
		req := request(key, string(v))
		req.Route = "/v1/sandboxes/" + string(id) + "/" + string(v)
		m.send(key, func(ctx context.Context) (Result, error) {
			return m.svc.Lifecycle(ctx, m.p, req, string(id), Lifecycle{Verb: v})
		})
	case 6:
		id, ok := m.pick("delete")
		if !ok || rapid.IntRange(0, 2).Draw(t, "really") > 0 {
			return
		}
		key := m.key()
		m.send(key, func(ctx context.Context) (Result, error) {
			return m.svc.DeleteSandbox(ctx, m.p, request(key, "none"), string(id))
		})
	case 7:
		id, ok := m.pick("patch")
		if !ok {
			return
		}
		key, d := m.key(), time.Duration(rapid.IntRange(5, 600).Draw(t, "renew"))*time.Second
		m.send(key, func(ctx context.Context) (Result, error) {
			return m.svc.PatchSandbox(ctx, m.p, request(key, d.String()), string(id), PatchSandbox{Timeout: &d})
		})
	case 8:
		if keys := slices.Sorted(maps.Keys(m.calls)); len(keys) > 0 {
			key := rapid.SampledFrom(keys).Draw(t, "repeat")
			m.send(key, m.calls[key])
		}
	case 9:
		if open := m.open(); len(open) > 0 {
			op := open[rapid.IntRange(0, len(open)-1).Draw(t, "cancel")]
			key := m.key()
			m.send(key, func(ctx context.Context) (Result, error) {
				return m.svc.CancelOperation(ctx, m.p, request(key, "none"), op.ID)
			})
		}
	case 10, 11, 12:
		_ = m.turn(ctx)
	case 13, 14:
		if id, ok := m.pick("step"); ok {
			m.node.step(id)
		}
	case 15:
		m.restart(t)
	case 16:
		m.hand.add(time.Duration(rapid.SampledFrom([]int{1, 1, 5, 30, 200}).Draw(t, "jump")) * time.Second)
		m.node.expire()
	case 17:
		if id, ok := m.pick("moves"); ok {
			mv := rapid.SampledFrom([]struct {
				to      sandbox.State
				trigger string
			}{{sandbox.Paused, "idle"}, {sandbox.Failed, "machine_died"}, {sandbox.Quarantined, "limit"}, {sandbox.Stopped, "idle"}, {sandbox.Deleted, "deadline"}}).Draw(t, "move")
			m.node.mu.Lock()
			ran := m.node.machines[id] != nil && m.node.machines[id].state == sandbox.Running
			m.node.mu.Unlock()
			if ran {
				m.node.move(id, mv.to, mv.trigger)
			}
		}
	case 18:
		m.script(rapid.IntRange(0, 4).Draw(t, "script"))
	case 19:
		fp := rapid.SampledFrom(failpoints).Draw(t, "failpoint")
		disarm, err := failpoint.Arm(fp, "error(1)")
		if err != nil {
			t.Fatalf("%v", err)
		}
		defer disarm()
		if rapid.Bool().Draw(t, "in turn") {
			_ = m.turn(ctx)
		} else {
			key := m.key()
			m.send(key, func(ctx context.Context) (Result, error) {
				return m.svc.CreateSandbox(ctx, m.p, request(key, "create"), CreateSandbox{})
			})
		}
		if rapid.Bool().Draw(t, "and crash") {
			m.restart(t)
		}
	}
}

// script makes the node's answers worse, or well again.
func (m *model) script(kind int) {
	n := m.node
	n.mu.Lock()
	defer n.mu.Unlock()
	n.loseReply, n.stale, n.down, n.fail, n.onApply = nil, nil, false, nil, nil
	count := 0
	switch kind {
	case 1:
		n.loseReply = func(node.Assignment) bool { count++; return count%2 == 1 }
	case 2:
		n.stale = func(node.Observation) int { count++; return count % 3 }
	case 3:
		n.down = true
	case 4:
		n.fail = func(a node.Assignment) (string, bool) {
			count++
			return "told_to", a.Desired == sandbox.Running && count%2 == 1
		}
	}
}

func (m *model) open() []operation.Operation {
	var out []operation.Operation
	for _, id := range slices.Sorted(maps.Keys(m.ops)) {
		if !m.ops[id].Final() {
			out = append(out, m.op(m.t, id))
		}
	}
	slices.SortFunc(out, func(a, b operation.Operation) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return out
}

// look reads everything that was acknowledged.
func (m *model) look() {
	ctx := context.Background()
	rows, err := m.store.Sandboxes(ctx, m.p.Tenant, store.Filter{Deleted: true, Limit: 1000})
	if err != nil {
		m.t.Fatalf("list: %v", err)
	}
	ops, err := m.store.Operations(ctx, m.p.Tenant, "", "", 1000)
	if err != nil {
		m.t.Fatalf("list: %v", err)
	}
	found := 0
	for _, row := range rows.Items {
		if _, ok := m.sandbox[row.ID]; ok {
			m.note(viewOf(row), nil)
			found++
		}
	}
	for _, op := range ops.Items {
		if _, ok := m.ops[op.ID]; ok {
			m.noteOp(op)
			found++
		}
	}
	if want := len(m.sandbox) + len(m.ops); found != want {
		m.t.Fatalf("of %d acknowledged records %d are kept", want, found)
	}
	m.sound(m.t)
}

// rest makes everything well, lets it come to rest, and checks the end.
func (m *model) rest() {
	t := m.t
	m.script(0)
	m.restart(t)
	for _, key := range slices.Sorted(maps.Keys(m.calls)) {
		m.send(key, m.calls[key])
	}
	m.settle(t)
	m.look()
	for id, op := range m.ops {
		if !op.Final() {
			t.Fatalf("operation %s is %s at rest: %+v", id, op, m.op(t, id))
		}
	}
	for _, res := range m.acked {
		if op := m.op(t, res.Operation.ID); op.Sandbox != res.Sandbox.ID {
			t.Fatalf("operation %s is of %s, not %s", op.ID, op.Sandbox, res.Sandbox.ID)
		}
	}
	page, err := m.store.Sandboxes(context.Background(), m.p.Tenant, store.Filter{Deleted: true, Limit: 1000})
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	for _, row := range page.Items {
		if _, ok := m.sandbox[row.ID]; !ok {
			t.Fatalf("%s was made, and no answer tells of it", row.ID)
		}
		truly := m.node.state(row.ID)
		switch {
		case row.Converged != row.Generation:
			t.Fatalf("at rest, but not converged: %+v", row)
		case row.Observed == sandbox.Failed || row.Observed == sandbox.Quarantined:
		case row.Observed != row.Desired:
			t.Fatalf("at rest %s, wanted %s", row.Observed, row.Desired)
		case (row.Observed == sandbox.Deleted) != !row.DeletedAt.IsZero():
			t.Fatalf("half a tombstone: %+v", row)
		case len(row.SealedEnv) > 0 && row.Observed == sandbox.Deleted:
			t.Fatalf("%s keeps its environment after its end", row.ID)
		}
		if truly != row.Observed {
			t.Fatalf("%s is recorded as %s, the node has %s", row.ID, row.Observed, truly)
		}
	}
	known, _ := m.node.Known(context.Background())
	for _, id := range known {
		if _, ok := m.sandbox[id]; !ok {
			t.Fatalf("the node has %s, which nobody was told of", id)
		}
	}
}
