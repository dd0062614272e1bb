// Package clock is time as a parameter. Code that decides by time takes a
// Clock; tests pass one they can move (or run under testing/synctest, where
// System itself is virtual).
package clock

import "time"

// Clock tells the time and makes timers.
type Clock interface {
	// Now is the wall clock with its monotonic reading.
	Now() time.Time
	// After fires once after d of this clock.
	After(d time.Duration) <-chan time.Time
}

// System is the machine's clock.
type System struct{}

// Now implements Clock.
func (System) Now() time.Time { return time.Now() }

// After implements Clock.
func (System) After(d time.Duration) <-chan time.Time { return time.After(d) }
