// Package guesttest runs the real guest daemon on the host for tests: as PID 1
// of its own PID, mount and UTS namespaces when the test is root, so that
// everything it started dies with it, connected through the real channel.
package guesttest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/guestclient"
)

type binary struct {
	sync.Once
	path string
	err  error
}

var shipped, raced binary

// Binary builds the daemon once per test program, as it is shipped, and gives
// its path: build/guesttest/space-guest in the module's folder.
func Binary(t testing.TB) string {
	t.Helper()
	return shipped.get(t, "space-guest", []string{"-trimpath", "-ldflags", "-s -w"}, "CGO_ENABLED=0")
}

// daemon is what a Machine runs: the shipped one, or under the race detector one
// that is under it too.
func daemon(t testing.TB) string {
	t.Helper()
	if !Raced {
		return Binary(t)
	}
	return raced.get(t, "space-guest.race", []string{"-race"}, "CGO_ENABLED=1")
}

func (b *binary) get(t testing.TB, name string, flags []string, env string) string {
	t.Helper()
	b.Do(func() { b.path, b.err = build(name, flags, env) })
	if b.err != nil {
		t.Fatal(b.err)
	}
	return b.path
}

func build(name string, flags []string, env string) (string, error) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("guesttest: go list: %w", err)
	}
	dir := strings.TrimSpace(string(root))
	// One path for all test programs of a tree; renamed into place, so that
	// concurrent builds are harmless. build/ is not committed.
	out := filepath.Join(dir, "build", "guesttest", name)
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return "", err
	}
	tmp := out + "." + strconv.Itoa(os.Getpid())
	cmd := exec.Command("go", append(append([]string{"build"}, flags...), "-o", tmp, "./cmd/space-guest")...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env)
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("guesttest: build: %w\n%s", err, text)
	}
	return out, os.Rename(tmp, out)
}

// Options of a Machine.
type Options struct {
	// Wrap is put before the daemon's argv, such as "env", "--ignore-signal=INT".
	Wrap []string
	// Plain runs it without namespaces, also as root.
	Plain bool
	// Env is added to the daemon's own environment.
	Env []string
}

// Machine is a daemon and the host's end of its channel. It can die and be
// started again, like a machine; the client goes on working after a Restart.
type Machine struct {
	guestclient.Guest
	// Acceptor is the host's end, for tests of Dial itself.
	Acceptor *channel.Acceptor
	// Socket is where the daemon dials.
	Socket string

	t      testing.TB
	o      Options
	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd is waited for
}

// Start runs a daemon until the end of the test.
func Start(t testing.TB) *Machine { return StartWith(t, Options{}) }

// StartWith is Start with options.
func StartWith(t testing.TB, o Options) *Machine {
	t.Helper()
	// Socket paths are short (108 bytes); the names of tests are not.
	dir, err := os.MkdirTemp("", "guest")
	if err != nil {
		t.Fatal(err)
	}
	m := &Machine{t: t, o: o, Socket: filepath.Join(dir, "host.sock")}
	l, err := net.Listen("unix", m.Socket)
	if err != nil {
		t.Fatal(err)
	}
	m.Acceptor = channel.NewAcceptor(l, channel.Options{})
	m.Guest = guestclient.New(m.Acceptor.Dial, guestclient.Options{})
	t.Cleanup(func() {
		m.Guest.Close()
		m.Kill()
		_ = m.Acceptor.Close()
		_ = os.RemoveAll(dir)
	})
	m.boot()
	return m
}

// Dial opens a raw stream to the daemon, as a runtime's Machine does.
func (m *Machine) Dial(ctx context.Context) (net.Conn, error) { return m.Acceptor.Dial(ctx) }

// Isolated reports whether the daemon is PID 1 of its own namespaces.
func (m *Machine) Isolated() bool { return os.Geteuid() == 0 && !m.o.Plain }

func (m *Machine) boot() {
	m.t.Helper()
	argv := []string{daemon(m.t), "-dial", m.Socket, "-keep-clock"}
	argv = append(append([]string{}, m.o.Wrap...), argv...)
	if m.Isolated() {
		argv = append([]string{"sh", "-c", `mount -t proc proc /proc && exec "$@"`, "sh"}, argv...)
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "GORACE=halt_on_error=1"}, m.o.Env...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	if m.Isolated() {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS // makes / private
	}
	started := make(chan error)
	exited := make(chan struct{})
	go func() { // the parent-death signal follows the thread, so keep it
		runtime.LockOSThread()
		started <- cmd.Start()
		if cmd.Process != nil {
			_ = cmd.Wait()
		}
		close(exited)
	}()
	if err := <-started; err != nil {
		m.t.Fatal(err)
	}
	m.mu.Lock()
	m.cmd = cmd
	m.exited = exited
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if _, err := m.Hello(ctx); err != nil {
		m.t.Fatalf("guesttest: the daemon does not answer: %v", err)
	}
}

// PID of the daemon on the host (of PID 1 of the machine).
func (m *Machine) PID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cmd.Process.Pid
}

// Kill ends the machine as a crash does and waits until it is gone.
func (m *Machine) Kill() {
	m.mu.Lock()
	cmd, exited := m.cmd, m.exited
	m.mu.Unlock()
	if cmd == nil || cmd.Process == nil {
		return
	}
	_ = cmd.Process.Kill()
	<-exited
}

// Restart kills the machine and boots it again: another boot epoch, no processes.
func (m *Machine) Restart() {
	m.t.Helper()
	m.Kill()
	m.boot()
}
