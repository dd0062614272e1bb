// Package fault is the closed set of error classes of SPACE and the error
// value that reaches users: a stable code, what happened, why, and what to do.
//
// Rules. Packages wrap causes with %w as usual; where an error is about to
// cross a front door it is (or wraps) an *Error. An Error never carries a
// secret, a host path or a Go stack. Anything that is not an *Error is shown
// to users as code "internal" and logged with its cause.
package fault

import (
	"errors"
	"fmt"
)

// Class is one of a closed set; httpapi maps it to a status in one table.
type Class string

// The classes. Adding one means adding a row to httpapi's table and docs/errors.md.
const (
	Invalid         Class = "invalid"         // the request can never succeed as sent
	Unauthenticated Class = "unauthenticated" // no or bad credential
	Denied          Class = "denied"          // credential known, scope missing
	NotFound        Class = "not_found"       // unknown, or another tenant's: same answer
	Conflict        Class = "conflict"        // the state forbids it now
	Gone            Class = "gone"            // existed and ended (deleted, expired, lost)
	Unprocessable   Class = "unprocessable"   // idempotency key reused with another body
	TooLarge        Class = "too_large"       // body or field above its stated limit
	Exhausted       Class = "exhausted"       // quota, capacity or rate; retry later
	Unavailable     Class = "unavailable"     // a part of ours is away; retry is safe
	Deadline        Class = "deadline"        // the time limit of the request passed
	Internal        Class = "internal"        // our mistake
)

// Error is an error meant for a user.
type Error struct {
	Class Class
	// Code is stable, snake_case and listed in docs/errors.md.
	Code string
	// What happened, in one sentence without secrets.
	What string
	// Why it happened, when known.
	Why string
	// Remedy says what the caller can do.
	Remedy string
	// Retryable reports whether the same request may succeed later unchanged.
	Retryable bool
	// Expected carries the one machine-readable fact some codes promise, such
	// as the accepted stdin offset of "stdin_offset_ahead". Nil otherwise.
	Expected *uint64
	cause    error
}

// New makes an Error of class c with a stable code and one sentence of what happened.
func New(c Class, code, what string, args ...any) *Error {
	if len(args) > 0 {
		what = fmt.Sprintf(what, args...)
	}
	return &Error{Class: c, Code: code, What: what, Retryable: c == Exhausted || c == Unavailable}
}

// Because returns a copy with the reason set.
func (e *Error) Because(why string, args ...any) *Error {
	c := *e
	if len(args) > 0 {
		why = fmt.Sprintf(why, args...)
	}
	c.Why = why
	return &c
}

// Do returns a copy with the remedy set.
func (e *Error) Do(remedy string, args ...any) *Error {
	c := *e
	if len(args) > 0 {
		remedy = fmt.Sprintf(remedy, args...)
	}
	c.Remedy = remedy
	return &c
}

// Wrap returns a copy that keeps cause for errors.Is, errors.As and the log; it
// is never shown to users.
func (e *Error) Wrap(cause error) *Error { c := *e; c.cause = cause; return &c }

// Retry returns a copy that says whether an unchanged retry may succeed.
func (e *Error) Retry(ok bool) *Error { c := *e; c.Retryable = ok; return &c }

// Error implements error: the text for logs, cause included.
func (e *Error) Error() string {
	s := e.Code + ": " + e.What
	if e.Why != "" {
		s += " (" + e.Why + ")"
	}
	if e.cause != nil {
		s += ": " + e.cause.Error()
	}
	return s
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.cause }

// Is makes two Errors equal when their codes are, so that errors.Is works with templates.
func (e *Error) Is(target error) bool {
	var t *Error
	return errors.As(target, &t) && t.Code == e.Code
}

// Of returns the Error inside err, or an Internal one wrapping it. Nil stays nil.
func Of(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return New(Internal, "internal", "something went wrong on our side").
		Do("retry; if it stays, give the request id to your operator").Wrap(err)
}

// IsClass reports whether err is an Error of class c.
func IsClass(err error, c Class) bool {
	var e *Error
	return errors.As(err, &e) && e.Class == c
}

// IsCode reports whether err is an Error with the given code.
func IsCode(err error, code string) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}
