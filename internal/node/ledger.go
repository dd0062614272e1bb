package node

import (
	"sync"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
)

// charge is what one sandbox takes of the host.
type charge struct{ milliCPU, memory, disk int64 }

// chargeOf derives it from the row alone, so that books made anew from the rows
// after a restart equal those before. Disk is taken as long as the row is
// there; memory and CPU while a machine is, or is meant to be, resident.
func chargeOf(r *row) charge {
	c := charge{disk: r.Resources.DiskBytes}
	if r.Target == sandbox.Running || r.Target == sandbox.Paused || r.BootID != "" || r.Down {
		c.milliCPU, c.memory = r.Resources.MilliCPU, r.Resources.MemoryBytes
	}
	return c
}

// ledger is the books of one host. Its mutex is a leaf: nothing is called with it held.
type ledger struct {
	total charge // CPU with the overcommit factor
	max   int    // of sandboxes; 0 = no limit

	mu   sync.Mutex
	by   map[sandbox.ID]charge // guarded by mu
	used charge                // guarded by mu
}

func newLedger(total charge, maxSandboxes int) *ledger {
	return &ledger{total: total, max: maxSandboxes, by: map[sandbox.ID]charge{}}
}

// set books c for id without asking: for what exists anyway.
func (l *ledger) set(id sandbox.ID, c charge) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setLocked(id, c)
}

func (l *ledger) setLocked(id sandbox.ID, c charge) {
	old := l.by[id]
	l.used.milliCPU += c.milliCPU - old.milliCPU
	l.used.memory += c.memory - old.memory
	l.used.disk += c.disk - old.disk
	l.by[id] = c
}

// drop forgets id.
func (l *ledger) drop(id sandbox.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setLocked(id, charge{})
	delete(l.by, id)
}

// reserve books c for id, or says which resource does not suffice. What shrinks
// always fits.
func (l *ledger) reserve(id sandbox.ID, c charge) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.fitsLocked(id, c); err != nil {
		return err
	}
	l.setLocked(id, c)
	return nil
}

// fits is reserve without booking.
func (l *ledger) fits(id sandbox.ID, c charge) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fitsLocked(id, c)
}

func (l *ledger) fitsLocked(id sandbox.ID, c charge) error {
	old, known := l.by[id]
	if !known && l.max > 0 && len(l.by) >= l.max {
		return fault.New(fault.Exhausted, "capacity", "this host has no room for another sandbox").
			Because("%d of %d sandboxes exist", len(l.by), l.max).
			Do("delete sandboxes that are not needed, or retry later")
	}
	for _, q := range []struct {
		name, unit             string
		want, was, used, total int64
	}{
		{"memory", "bytes", c.memory, old.memory, l.used.memory, l.total.memory},
		{"CPU", "thousandths of a CPU", c.milliCPU, old.milliCPU, l.used.milliCPU, l.total.milliCPU},
		{"disk", "bytes", c.disk, old.disk, l.used.disk, l.total.disk},
	} {
		if q.total <= 0 || q.want <= q.was || q.used-q.was+q.want <= q.total {
			continue
		}
		f := fault.New(fault.Exhausted, "capacity", "this host has not enough %s for the sandbox", q.name)
		if q.want > q.total {
			return f.Because("%d %s asked for, %d in all", q.want, q.unit, q.total).
				Do("ask for less").Retry(false)
		}
		return f.Because("%d %s asked for, %d of %d free", q.want, q.unit, max(0, q.total-(q.used-q.was)), q.total).
			Do("stop or delete other sandboxes, ask for less, or retry later")
	}
	return nil
}

func (l *ledger) totals() (used charge, count int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.used, len(l.by)
}
