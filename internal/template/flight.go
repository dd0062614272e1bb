package template

import (
	"context"
	"sync"
)

// flight makes concurrent builds of one key one build. The build goes on while
// anybody waits for it and is cancelled when the last one has gone.
type flight struct {
	mu    sync.Mutex
	calls map[string]*call // guarded by mu
}

type call struct {
	done    chan struct{}
	cancel  context.CancelFunc
	info    Info
	err     error
	waiters map[*func(string)]struct{} // guarded by flight.mu
	last    string                     // guarded by flight.mu: the step it is in
}

func (f *flight) do(ctx context.Context, key string, progress func(string), build func(context.Context, func(string)) (Info, error)) (Info, error) {
	if progress == nil {
		progress = func(string) {}
	}
	f.mu.Lock()
	if f.calls == nil {
		f.calls = map[string]*call{}
	}
	c := f.calls[key]
	if c == nil {
		// What outlives this caller keeps its values but not its end.
		shared, cancel := context.WithCancel(context.WithoutCancel(ctx))
		c = &call{done: make(chan struct{}), cancel: cancel, waiters: map[*func(string)]struct{}{}}
		f.calls[key] = c
		go func() {
			defer cancel()
			c.info, c.err = build(shared, func(step string) { f.tell(c, step) })
			f.mu.Lock()
			if f.calls[key] == c {
				delete(f.calls, key)
			}
			f.mu.Unlock()
			close(c.done)
		}()
	}
	me := &progress
	c.waiters[me] = struct{}{}
	last := c.last
	f.mu.Unlock()
	if last != "" {
		progress(last)
	}

	select {
	case <-c.done:
		f.leave(key, c, me, false)
		return c.info, c.err
	case <-ctx.Done():
		f.leave(key, c, me, true)
		return Info{}, ctx.Err()
	}
}

// leave takes a waiter off; the last one to give up ends the build, and waits
// for that end so that nothing of it is left when it returns.
func (f *flight) leave(key string, c *call, me *func(string), givenUp bool) {
	f.mu.Lock()
	delete(c.waiters, me)
	last := givenUp && len(c.waiters) == 0
	if last && f.calls[key] == c {
		delete(f.calls, key) // who comes now starts anew
	}
	f.mu.Unlock()
	if last {
		c.cancel()
		<-c.done
	}
}

func (f *flight) tell(c *call, step string) {
	f.mu.Lock()
	c.last = step
	to := make([]func(string), 0, len(c.waiters))
	for p := range c.waiters {
		to = append(to, *p)
	}
	f.mu.Unlock()
	for _, p := range to {
		p(step)
	}
}
