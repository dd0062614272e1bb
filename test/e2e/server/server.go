// Package server runs the real bin/space for end-to-end tests, as root, on
// directories and ports of its own. A server that ends is checked for what it
// left on the host.
package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/space-platform/space/client"
	"github.com/space-platform/space/internal/cgroup"
	"github.com/space-platform/space/internal/disk"
	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/template/templatetest"
)

// Options of a server; the zero value is right for most tests.
type Options struct {
	Flags []string // added to `space up`
	Env   []string // KEY=VALUE, added to the environment
	Base  bool     // have base:latest, not only tiny:latest
}

// Server is one installation on this host.
type Server struct {
	Layout layout.Layout
	API    string
	Data   string
	Bin    string

	o      Options
	points string // directory of armed failpoints
	log    string

	mu   sync.Mutex
	room *exec.Cmd // guarded by mu; nil: not ours to wait for
	done chan struct{}
}

// Start is New for one test: the server ends with it.
func Start(t testing.TB, o Options) *Server {
	t.Helper()
	Templates(t, o.Base)
	s, err := New(o)
	if err == nil {
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("log of the server:\n%s", s.Log())
			}
			for _, trouble := range s.Close() {
				t.Error(trouble)
			}
		})
		err = s.Up()
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Templates sees to it that the shared templates are built.
func Templates(t testing.TB, base bool) {
	t.Helper()
	templatetest.NeedRoot(t)
	templatetest.Tiny(t)
	if base {
		templatetest.Base(t)
	}
}

// New makes the directories of a server and starts nothing. The templates must
// be built.
func New(o Options) (*Server, error) {
	bin, err := Binary()
	if err != nil {
		return nil, err
	}
	run, err := os.MkdirTemp("/run", "sp-") // short: socket addresses are
	if err != nil {
		return nil, err
	}
	s := &Server{Bin: bin, o: o}
	s.Layout.Run = run
	if s.Layout.Data, err = os.MkdirTemp("", "space-e2e-"); err != nil {
		return nil, err
	}
	if s.points, err = os.MkdirTemp("", "space-points-"); err != nil {
		return nil, err
	}
	if err := os.Chmod(s.points, 0o777); err != nil { // who dies takes the file away
		return nil, err
	}
	s.log = s.points + ".log"
	ports, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	s.API, s.Data = fmt.Sprintf("127.0.0.1:%d", ports[0]), fmt.Sprintf("127.0.0.1:%d", ports[1])
	return s, nil
}

// freePorts gives ports that nobody listens on, outside of the range that
// outgoing connections take: they must be free again after a restart.
func freePorts(n int) ([]int, error) {
	var out []int
	for tries := 0; len(out) < n; tries++ {
		if tries > 1000 {
			return nil, errors.New("server: no free ports")
		}
		p := 10000 + rand.IntN(20000)
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", p))
		if err != nil {
			continue
		}
		_ = ln.Close()
		out = append(out, p)
	}
	return out, nil
}

// Command is the program with args on this installation.
func (s *Server) Command(args ...string) *exec.Cmd {
	cmd := exec.Command(s.Bin, args...)
	cmd.Env = append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "TERM=xterm",
		"SPACE_DATA_DIR=" + s.Layout.Data, "SPACE_RUN_DIR=" + s.Layout.Run,
		"SPACE_TEMPLATES_DIR=" + filepath.Join(templatetest.Dir(), "templates"),
		"SPACE_FAILPOINT_DIR=" + s.points,
	}, s.o.Env...)
	return cmd
}

// Result of a command line.
type Result struct {
	Out, Err string
	Code     int
}

// CLI runs the program and gives its output and exit code; it is killed after a
// minute, with code -1.
func (s *Server) CLI(args ...string) Result {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := s.Command(args...)
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	r := Result{Out: out.String(), Err: errs.String()}
	if cmd.ProcessState != nil {
		r.Code = cmd.ProcessState.ExitCode()
	} else {
		r.Code, r.Err = -1, err.Error()
	}
	return r
}

// Up starts `space up` where it does not run, and waits until it serves.
func (s *Server) Up() error {
	if err := s.start(); err != nil {
		return err
	}
	return s.Ready(40 * time.Second)
}

func (s *Server) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.room != nil {
		if alive(s.room.Process.Pid) {
			return nil
		}
		<-s.done
	}
	log, err := os.OpenFile(s.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	templates := "tiny:latest"
	if s.o.Base {
		templates = "base:latest,tiny:latest"
	}
	cmd := s.Command(append([]string{"up", "--listen", s.API, "--listen-data", s.Data, "--template", templates}, s.o.Flags...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	s.room, s.done = cmd, done
	return nil
}

// Ready waits until the server serves.
func (s *Server) Ready(d time.Duration) error {
	var err error
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(15 * time.Millisecond) {
		var e layout.Endpoint
		if e, err = s.Layout.ReadEndpoint(); err != nil {
			continue
		}
		if syscall.Kill(e.PID, 0) != nil {
			err = fmt.Errorf("process %d is gone", e.PID)
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		_, err = client.New(e.API, "", client.WithAttempts(1)).Health(ctx)
		cancel()
		if err == nil {
			return nil
		}
		s.mu.Lock()
		done := s.done
		s.mu.Unlock()
		select {
		case <-done:
			return fmt.Errorf("server: `space up` ended: %w\n%s", err, s.Log())
		default:
		}
	}
	return fmt.Errorf("server: not ready: %w\n%s", err, s.Log())
}

// Key is the admin key.
func (s *Server) Key() string {
	b, err := os.ReadFile(s.Layout.AdminKey())
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Client speaks with the admin key. It repeats calls long enough for a restart.
func (s *Server) Client() *client.Client {
	return client.New("http://"+s.API, s.Key(), client.WithAttempts(14))
}

// Room is the host room's pid, 0 when it does not run.
func (s *Server) Room() int { return layout.Holder(s.Layout.HostLock()) }

// Serve is the unprivileged side's pid, 0 when it does not run.
func (s *Server) Serve() int { return layout.Holder(s.Layout.ServeLock()) }

// Kill sends SIGKILL to one of our processes and waits for its end.
func (s *Server) Kill(pid int) {
	if pid <= 0 {
		return
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
	Ended(pid, 10*time.Second)
}

// Ended waits for the end of a process, at most d.
func Ended(pid int, d time.Duration) bool {
	for end := time.Now().Add(d); alive(pid); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	i := bytes.LastIndexByte(b, ')')
	return i < 0 || i+2 >= len(b) || b[i+2] != 'Z' // whoever is to wait for a dead one does so some time
}

// Arm makes the next process that passes the failpoint die there, once.
func (s *Server) Arm(point string) error {
	return os.WriteFile(filepath.Join(s.points, point), nil, 0o666)
}

// Armed reports whether nobody has passed the point since Arm.
func (s *Server) Armed(point string) bool {
	_, err := os.Stat(filepath.Join(s.points, point))
	return err == nil
}

// Disarm takes a point back.
func (s *Server) Disarm(point string) { _ = os.Remove(filepath.Join(s.points, point)) }

// Points lists the failpoints of the binary.
func (s *Server) Points() []string { return strings.Fields(s.CLI("failpoints").Out) }

// Log is what both sides have logged.
func (s *Server) Log() string {
	b, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	const most = 96 << 10
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return string(b)
}

// LogFile is where the log is, whole.
func (s *Server) LogFile() string { return s.log }

// Down ends the server with SIGTERM; sandboxes go on.
func (s *Server) Down() error {
	s.mu.Lock()
	room, done := s.room, s.done
	s.room = nil
	s.mu.Unlock()
	if room == nil {
		return nil
	}
	_ = room.Process.Signal(syscall.SIGTERM)
	select {
	case <-done:
		return nil
	case <-time.After(40 * time.Second):
		_ = room.Process.Kill()
		<-done
		return errors.New("server: did not end within 40 s of SIGTERM")
	}
}

// DeleteAll deletes every sandbox.
func (s *Server) DeleteAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := s.Client()
	var errs []error
	for o := (client.ListOptions{Limit: 500}); ; {
		l, err := c.Sandboxes(ctx, o)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		for _, sb := range l.Items {
			wg.Add(1)
			go func() {
				defer wg.Done()
				m, err := c.DeleteSandbox(ctx, sb.ID)
				if err == nil {
					_, err = c.AwaitOperation(ctx, m.Operation)
				}
				if err != nil && client.Code(err) != "sandbox_deleted" && client.Code(err) != "sandbox_not_found" {
					mu.Lock()
					errs = append(errs, fmt.Errorf("delete %s: %w", sb.ID, err))
					mu.Unlock()
				}
			}()
		}
		wg.Wait()
		if o.Cursor = l.Next; o.Cursor == "" {
			return errors.Join(errs...)
		}
	}
}

// Close deletes all sandboxes, ends the server, proves its audit chains, and
// gives what was wrong or is left on the host.
func (s *Server) Close() (trouble []string) {
	note := func(err error) {
		if err != nil {
			trouble = append(trouble, err.Error())
		}
	}
	for _, p := range s.Points() {
		s.Disarm(p)
	}
	s.mu.Lock()
	was := s.room != nil
	s.mu.Unlock()
	if was {
		err := s.Up()
		note(err)
		if err == nil {
			note(s.DeleteAll())
			for _, l := range s.Gone("/gvisor/machines/", 5*time.Second) {
				trouble = append(trouble, "left after deletion: "+l)
			}
		}
		note(s.Down())
		if r := s.CLI("audit", "verify"); r.Code != 0 {
			trouble = append(trouble, "space audit verify: "+r.Err+r.Out)
		}
	}
	for _, l := range s.Gone("", 5*time.Second) {
		trouble = append(trouble, "left on the host: "+l)
	}
	if len(trouble) > 0 {
		s.purge() // the next test is not to suffer
	} else if err := os.Remove(s.log); !errors.Is(err, fs.ErrNotExist) { // of one that never ran
		note(err)
	}
	for _, p := range []string{s.Layout.Run, s.Layout.Data, s.points} {
		note(os.RemoveAll(p))
	}
	return trouble
}

// purge takes by force off the host what a broken server has left; the log stays.
func (s *Server) purge() {
	for pid := range Processes(s.Layout.Run) {
		s.Kill(pid)
	}
	for _, dir := range []string{s.Layout.Run, s.Layout.Data} {
		mounts, _ := disk.Mounts(dir) // all of this is a try
		slices.Sort(mounts)
		slices.Reverse(mounts)
		for _, m := range mounts {
			_ = syscall.Unmount(m, syscall.MNT_DETACH)
		}
	}
	for _, pattern := range []string{"*/", ""} {
		groups, _ := filepath.Glob(filepath.Join(cgroup.DefaultRoot, pattern+CgroupParent(s.Layout.Data)))
		for _, g := range groups {
			inner, _ := filepath.Glob(g + "/*/")
			for _, dir := range append(inner, g) {
				_ = syscall.Rmdir(dir)
			}
		}
	}
}
