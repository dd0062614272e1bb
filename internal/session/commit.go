package session

import (
	"context"
	"database/sql"
	"fmt"
	"sync"

	"github.com/space-platform/space/internal/sqlitedb"
)

// committer runs writes of concurrent callers in one transaction, so that they
// share the one flush to the disk. The first caller leads; who comes while it
// commits is in the next batch.
type committer struct {
	db *sqlitedb.DB

	mu      sync.Mutex
	queue   []*job
	leading bool
}

type job struct {
	fn   func(ctx context.Context, tx *sql.Tx) error
	err  error
	done chan struct{}
}

// maxBatch bounds how many writes share a transaction.
const maxBatch = 128

// do runs fn in a transaction that may be shared; fn's error rolls back only
// its own writes. When do returns nil, they are durable. It does not stop for
// ctx: what was asked for is done or has failed when do returns.
func (c *committer) do(ctx context.Context, fn func(ctx context.Context, tx *sql.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	j := &job{fn: fn, done: make(chan struct{})}
	c.mu.Lock()
	c.queue = append(c.queue, j)
	lead := !c.leading
	c.leading = true
	c.mu.Unlock()
	if lead {
		c.batch()
		c.mu.Lock()
		if len(c.queue) > 0 {
			go c.rest()
		} else {
			c.leading = false
		}
		c.mu.Unlock()
	}
	<-j.done
	return j.err
}

// rest leads until nobody waits.
func (c *committer) rest() {
	for {
		c.batch()
		c.mu.Lock()
		if len(c.queue) == 0 {
			c.leading = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
	}
}

func (c *committer) batch() {
	c.mu.Lock()
	n := min(len(c.queue), maxBatch)
	jobs := c.queue[:n:n]
	c.queue = c.queue[n:]
	if len(c.queue) == 0 {
		c.queue = nil
	}
	c.mu.Unlock()
	ctx := context.Background()
	err := c.db.Update(ctx, func(tx *sql.Tx) error {
		if len(jobs) == 1 {
			return jobs[0].fn(ctx, tx)
		}
		for _, j := range jobs {
			if _, err := tx.ExecContext(ctx, "SAVEPOINT one"); err != nil {
				return fmt.Errorf("session: savepoint: %w", err)
			}
			if j.err = j.fn(ctx, tx); j.err != nil {
				if _, err := tx.ExecContext(ctx, "ROLLBACK TO one"); err != nil {
					return fmt.Errorf("session: roll back: %w", err)
				}
			}
			if _, err := tx.ExecContext(ctx, "RELEASE one"); err != nil {
				return fmt.Errorf("session: release: %w", err)
			}
		}
		return nil
	})
	for _, j := range jobs {
		if err != nil && j.err == nil {
			j.err = err
		}
		close(j.done)
	}
}
