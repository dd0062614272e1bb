package template

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The uids and gids of a build's user namespace on the host. The range is above
// those that distributions and systemd hand out, and owns nothing on any disk:
// everything that a build writes is in a memory file system that ends with it.
const (
	idBase  = 1_900_000_000
	idCount = 65536
)

// toolPath is where a build finds programs, whatever our own environment says.
const toolPath = "/usr/sbin:/usr/bin:/sbin:/bin"

//go:embed confine.sh
var confineScript string

// command is a program to run confined.
type command struct {
	args []string
	// env is the whole environment, besides PATH and the like.
	env    []string
	stdin  io.Reader
	stdout io.Writer
	// line gets each line that the program writes on standard error.
	line func(string)
	// scratch bounds what the program may write, in bytes; memory of the host.
	scratch int64
	// ready is called once, when the namespaces exist and nothing runs in them.
	ready func(pid int) error
}

// tailLines is how much of standard error goes into the error of a failed command.
const tailLines = 12

// run executes c in fresh user, mount, PID, IPC, UTS and network namespaces, as
// an unprivileged uid of the host, and waits for its end. Every process of it is
// dead when run returns, and also when the calling process is killed.
func (c command) run(ctx context.Context) error {
	goRead, goWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	defer goRead.Close()
	defer goWrite.Close()

	cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", confineScript, "build"}, c.args...)...)
	cmd.Dir = "/"
	cmd.Env = append([]string{
		"PATH=" + toolPath, "HOME=/root", "TMPDIR=/tmp", "LC_ALL=C.UTF-8", "TZ=UTC",
		fmt.Sprintf("SOURCE_DATE_EPOCH=%d", epoch.Unix()), fmt.Sprintf("SPACE_SCRATCH=%d", c.scratch),
	}, c.env...)
	cmd.Stdin, cmd.Stdout = c.stdin, c.stdout
	cmd.ExtraFiles = []*os.File{goRead}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: idBase, Size: idCount}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{Uid: 0, Gid: 0},
		Pdeathsig:  syscall.SIGKILL,
		Setpgid:    true,
	}
	tail := &lines{emit: c.line}
	cmd.Stderr = tail
	cmd.WaitDelay = 10 * time.Second

	// The death signal is bound to the thread that forks: it must live as long.
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			done <- fmt.Errorf("%w: cannot make user namespaces: %w", ErrHost, err)
			return
		}
		err := c.release(cmd.Process.Pid, goWrite)
		if err != nil {
			_ = cmd.Process.Kill()
		}
		done <- errors.Join(err, cmd.Wait())
	}()
	err = <-done
	tail.flush()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil && !errors.Is(err, ErrHost) {
		return fmt.Errorf("%s: %w%s", c.args[0], err, tail.text())
	}
	return err
}

// release bounds the waiting first process and lets it go.
func (c command) release(pid int, goWrite *os.File) error {
	for resource, limit := range map[int]uint64{
		unix.RLIMIT_CORE:   0,
		unix.RLIMIT_NPROC:  4096,
		unix.RLIMIT_NOFILE: 4096,
		unix.RLIMIT_FSIZE:  uint64(maxTreeBytes),
	} {
		var now unix.Rlimit
		if err := unix.Prlimit(pid, resource, nil, &now); err != nil {
			return fmt.Errorf("limits of a build: %w", err)
		}
		limit = min(limit, now.Max) // raising needs a capability that root may lack
		if err := unix.Prlimit(pid, resource, &unix.Rlimit{Cur: limit, Max: limit}, nil); err != nil {
			return fmt.Errorf("limits of a build: %w", err)
		}
	}
	if c.ready != nil {
		if err := c.ready(pid); err != nil {
			return err
		}
	}
	_, err := goWrite.WriteString("go\n")
	return err
}

// lines splits what is written into lines, passes them on and keeps the last.
type lines struct {
	emit func(string)

	mu   sync.Mutex
	part []byte   // guarded by mu
	last []string // guarded by mu
}

const maxLine = 400

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range p {
		switch {
		case b == '\n' || b == '\r':
			l.end()
		case b < ' ' && b != '\t' || b == 0x7f:
			l.add('?') // a hostile build must not speak to a terminal
		default:
			l.add(b)
		}
	}
	return len(p), nil
}

func (l *lines) add(b byte) {
	if len(l.part) < maxLine {
		l.part = append(l.part, b)
	}
}

func (l *lines) end() {
	s := strings.ToValidUTF8(strings.TrimSpace(string(l.part)), "?")
	l.part = l.part[:0]
	if s == "" {
		return
	}
	if l.last = append(l.last, s); len(l.last) > tailLines {
		l.last = l.last[1:]
	}
	if l.emit != nil {
		l.emit(s)
	}
}

func (l *lines) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end()
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.last) == 0 {
		return ""
	}
	return ": " + strings.Join(l.last, " | ")
}

// inNetwork runs fn on a thread that is in the network namespace of process pid.
// The thread ends afterwards, so that no other goroutine ever runs on it.
func inNetwork(pid int, fn func() error) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return fmt.Errorf("network namespace of a build: %w", err)
	}
	defer ns.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("network namespace of a build: %w", err)
			return
		}
		done <- fn()
	}()
	return <-done
}

// loopbackUp sets the loopback interface of the thread's network namespace up.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("loopback of a build: %w", err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("loopback of a build: %w", err)
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("loopback of a build: %w", err)
	}
	return nil
}

// availableMemory is MemAvailable of the host in bytes; 0 when unknown.
func availableMemory() int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		var kib int64
		if _, err := fmt.Sscanf(s.Text(), "MemAvailable: %d kB", &kib); err == nil {
			return kib << 10
		}
	}
	return 0
}
