//go:build race

package guesttest

// Raced reports that the daemon is under the race detector: a test under the race detector runs a daemon under it too.
const Raced = true
