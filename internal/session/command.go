package session

import (
	"encoding/json"
	"strings"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
)

// check refuses a command that can never start.
func (c Command) check() error {
	bad := func(what string, args ...any) *fault.Error {
		return fault.New(fault.Invalid, "invalid_command", what, args...)
	}
	switch {
	case len(c.Args) == 0 && c.Shell == "":
		return bad("the command is empty").Do("set args or shell")
	case len(c.Args) > 0 && c.Shell != "":
		return bad("args and shell are both set").Do("set exactly one of them")
	case len(c.Args) > guestapi.MaxArgs:
		return bad("more than %d arguments", guestapi.MaxArgs)
	case len(c.Args) > 0 && c.Args[0] == "":
		return bad("the program's name is empty")
	case len(c.Env) > guestapi.MaxEnv:
		return bad("more than %d environment variables", guestapi.MaxEnv)
	case c.Overflow != "" && c.Overflow != "block" && c.Overflow != "drop":
		return bad("overflow is neither block nor drop")
	case c.TimeLimit < 0 || c.TimeLimit > 365*24*time.Hour:
		return bad("the time limit is not between 0 and a year")
	case c.PTY != nil && (c.PTY.Rows == 0 || c.PTY.Cols == 0):
		return bad("the terminal has no rows or no columns")
	}
	for _, s := range append([]string{c.Shell, c.User, c.Cwd}, c.Args...) {
		if strings.ContainsRune(s, 0) {
			return bad("a NUL byte cannot be part of a command")
		}
	}
	for k, v := range c.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return bad("an environment variable's name is empty or has '=', or there is a NUL byte in one")
		}
	}
	return nil
}

func (c Command) encode() ([]byte, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return nil, fault.New(fault.Invalid, "invalid_command", "the command cannot be encoded").Wrap(err)
	}
	if len(b) > MaxCommandBytes {
		return nil, fault.New(fault.TooLarge, "command_too_large", "arguments and environment have more than %d bytes", MaxCommandBytes).
			Do("pass bulk data through stdin or a file")
	}
	return b, nil
}

func (c Command) start(id string) guestapi.Start {
	return guestapi.Start{ID: id, Args: c.Args, Shell: c.Shell, User: c.User, Cwd: c.Cwd, Env: c.Env, Stdin: c.Stdin || c.PTY != nil,
		PTY: c.PTY, TimeLimit: c.TimeLimit, Window: guestWindow, Overflow: c.Overflow}
}

// shown is the command as callers see it: without the environment.
func (c Command) shown() Command {
	c.Env = nil
	return c
}
