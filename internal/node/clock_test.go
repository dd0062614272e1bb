package node

import (
	"sync"
	"time"
)

// jumpClock is the bubble's clock with a wall that can jump.
type jumpClock struct {
	mu  sync.Mutex
	off time.Duration
}

func (c *jumpClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.off)
}

func (c *jumpClock) After(d time.Duration) <-chan time.Time { return time.After(d) }

func (c *jumpClock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += d
}
