// Package failpoint names the places where tests may make the real code fail,
// hang, or die. A point costs one atomic load when nothing is armed.
//
// Points are armed in-process with Arm, or for a whole process by the
// environment variable SPACE_FAILPOINTS: "name=action[;name=action]" with
// actions
//
//	kill          SIGKILL this process at the point
//	kill(N)       SIGKILL at the N-th time the point is passed (1-based)
//	error         return ErrInjected once armed, every time
//	error(N)      return ErrInjected the first N times
//	hang          block until the context ends
//
// Where SPACE_FAILPOINT_DIR names a directory, a file there with the name of a
// point kills the process that passes the point and takes the file away, once:
// a test arms a running process, and the one that follows it lives.
//
// The environment is read only when the process was started with one of these
// set; production units never set them.
package failpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// ErrInjected is returned by a point armed with "error".
var ErrInjected = errors.New("failpoint: injected error")

type action struct {
	kind string
	n    int // 0 = always
	seen int
}

var (
	armed atomic.Int32
	mu    sync.Mutex
	set   = map[string]*action{} // guarded by mu
	known = map[string]bool{}    // guarded by mu
	dir   string                 // set by FromEnv, before anything is passed
)

// Name registers a point and returns its name, so that tests can walk all of
// them: var fpCreate = failpoint.Name("node.create.before").
func Name(name string) string {
	mu.Lock()
	defer mu.Unlock()
	known[name] = true
	return name
}

// Names lists every registered point in this binary, sorted.
func Names() []string {
	mu.Lock()
	defer mu.Unlock()
	out := make([]string, 0, len(known))
	for n := range known {
		out = append(out, n)
	}
	sort.Strings(out)
	return out
}

// Arm sets the action of a point (syntax in the package comment) and returns
// its disarm function.
func Arm(name, act string) (disarm func(), err error) {
	a, err := parse(act)
	if err != nil {
		return nil, fmt.Errorf("failpoint %s: %w", name, err)
	}
	mu.Lock()
	defer mu.Unlock()
	set[name] = a
	armed.Store(int32(len(set)))
	return func() {
		mu.Lock()
		defer mu.Unlock()
		if set[name] == a {
			delete(set, name)
			armed.Store(int32(len(set)))
		}
	}, nil
}

func parse(act string) (*action, error) {
	kind, rest, has := strings.Cut(act, "(")
	a := &action{kind: kind}
	if has {
		n, err := strconv.Atoi(strings.TrimSuffix(rest, ")"))
		if err != nil || n < 1 {
			return nil, fmt.Errorf("bad count in %q", act)
		}
		a.n = n
	}
	switch kind {
	case "kill", "error", "hang":
		return a, nil
	}
	return nil, fmt.Errorf("unknown action %q", act)
}

// FromEnv arms the points of SPACE_FAILPOINTS and SPACE_FAILPOINT_DIR; main
// calls it once, before there is another goroutine.
func FromEnv() error {
	dir = os.Getenv("SPACE_FAILPOINT_DIR")
	for _, f := range strings.Split(os.Getenv("SPACE_FAILPOINTS"), ";") {
		if f == "" {
			continue
		}
		name, act, _ := strings.Cut(f, "=")
		if _, err := Arm(name, act); err != nil {
			return err
		}
	}
	return nil
}

// Hit passes the named point: nil when it is not armed.
func Hit(ctx context.Context, name string) error {
	if dir != "" && os.Remove(filepath.Join(dir, filepath.Base(name))) == nil {
		die()
	}
	if armed.Load() == 0 {
		return nil
	}
	mu.Lock()
	a := set[name]
	if a == nil {
		mu.Unlock()
		return nil
	}
	a.seen++
	kind, n, seen := a.kind, a.n, a.seen
	mu.Unlock()
	switch kind {
	case "kill":
		if n == 0 || seen == n {
			die()
		}
	case "error":
		if n == 0 || seen <= n {
			return fmt.Errorf("%s: %w", name, ErrInjected)
		}
	case "hang":
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func die() {
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
	select {} // the signal is on its way; nothing after the point may run
}
