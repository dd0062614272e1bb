//go:build !race

package guesttest

// Raced: see race_on.go.
const Raced = false
