package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/blob"
	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/host"
	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/lease"
	"github.com/space-platform/space/internal/privilege"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/runtime/gvisor"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
)

// upOptions are the flags of the host room; serve's own are passed through.
type upOptions struct {
	serve        serveOptions
	templatesDir string
	templates    []string
	ephemeral    bool
	stopOnExit   bool
	maxMachines  int
}

func upCmd(l *layout.Layout) *cobra.Command {
	o := upOptions{serve: serveDefaults()}
	c := &cobra.Command{
		Use:   "up",
		Short: "Serve on this machine: the host room as root, everything else as user space",
		Long: `Serve on this machine.

This process becomes the host room, the only one with privileges. Everything
else runs beside it as user "space" without any. Ctrl-C or SIGTERM ends both;
sandboxes go on running and are found again by the next "space up"
(--stop-on-exit powers them off; files are kept).`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return up(cmd.Context(), *l, o) },
	}
	o.serve.flags(c)
	c.Flags().StringVar(&o.templatesDir, "templates-dir", os.Getenv("SPACE_TEMPLATES_DIR"), "where template images are kept (default below the data directory)")
	c.Flags().StringSliceVar(&o.templates, "template", []string{"base:latest", "tiny:latest"}, "built-in templates to have ready")
	c.Flags().BoolVar(&o.stopOnExit, "stop-on-exit", false, "power off all sandboxes when this ends")
	c.Flags().IntVar(&o.maxMachines, "max-machines", 1000, "machines on this host at most")
	c.Flags().BoolVar(&o.ephemeral, "ephemeral", false, "end when no command needs the server any more")
	_ = c.Flags().MarkHidden("ephemeral") // `space run` uses it
	return c
}

// cgroupParent gives each data directory its own group, so that two
// installations on one host never count, or sweep, each other's machines.
func cgroupParent(l layout.Layout) string {
	if l.Data == layout.DefaultData {
		return "space"
	}
	sum := sha256.Sum256([]byte(l.Data))
	return "space-" + hex.EncodeToString(sum[:6])
}

func up(ctx context.Context, l layout.Layout, o upOptions) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("`space up` needs root for the host room (everything else runs as user space): run it with sudo")
	}
	uid, gid, err := privilege.Lookup()
	if err != nil {
		return err
	}
	if l.Data, err = filepath.Abs(l.Data); err != nil {
		return err
	}
	if l.Run, err = filepath.Abs(l.Run); err != nil {
		return err
	}
	if err := o.serve.check(); err != nil {
		return err
	}
	if err := l.Prepare(uid, gid); err != nil {
		return err
	}
	lock, err := layout.TakeLock(l.HostLock())
	if errors.Is(err, layout.ErrLocked) {
		return fmt.Errorf("a server already uses %s (pid %d)", l.Data, layout.Holder(l.HostLock()))
	}
	if err != nil {
		return err
	}
	defer lock.Release()

	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	log := newLogger(os.Stderr, o.serve.logLevel).With(slog.String("role", "host"))

	keeper, err := lease.Listen(l.LeaseSocket(), clock.System{})
	if err != nil {
		return err
	}
	defer keeper.Close()

	driver, templates, err := openHost(ctx, l, o, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, giveBack(driver, templates)) }()
	if err := buildTemplates(ctx, templates, o.templates, keeper, log); err != nil {
		return err
	}
	room, err := host.NewServer(host.Config{
		Driver: driver, Templates: templates, KeyDir: l.Room(), DiskDir: l.Host(),
		UIDs: []uint32{uint32(uid)}, MaxMachines: o.maxMachines,
		MaxResources: sandbox.Resources{MilliCPU: 256_000, MemoryBytes: 1 << 40, DiskBytes: 4 << 40, MaxProcesses: 1 << 20},
		Log:          log,
	})
	if err != nil {
		return err
	}
	// The public half lies where `space audit verify` finds it without the room.
	if err := layout.WriteFile(filepath.Join(l.Room(), "audit.pub"), []byte(hex.EncodeToString(room.PublicKey())+"\n"), 0o644); err != nil {
		return err
	}
	ln, err := host.Listen(l.HostSocket(), gid)
	if err != nil {
		return err
	}
	roomCtx, endRoom := context.WithCancel(context.WithoutCancel(ctx)) // serve still needs it while it ends
	roomDone := make(chan error, 1)
	go func() { roomDone <- room.Serve(roomCtx, ln) }()
	defer func() { endRoom(); <-roomDone }()

	child := &child{l: l, o: o.serve, uid: uid, gid: gid, log: log, ready: keeper.Ready}
	runCtx, endRun := context.WithCancel(ctx)
	defer endRun()
	if o.ephemeral {
		go func() {
			if keeper.Idle(runCtx) == nil {
				endRun()
			}
		}()
	}
	err = child.run(runCtx)
	if o.ephemeral || o.stopOnExit {
		err = errors.Join(err, stopAll(roomCtx, driver, log))
	}
	return errors.Join(err, leave(roomCtx, driver, templates))
}

// leave gives back what the host keeps for later sandboxes (mounted templates,
// control group, namespace) when there is no sandbox that could need it.
func leave(ctx context.Context, d *gvisor.Runtime, s *template.Store) error {
	machines, err := d.List(ctx)
	if err != nil || len(machines) > 0 {
		return err
	}
	infos, err := s.List()
	if err != nil {
		return err
	}
	errs := []error{d.Uninstall(ctx)}
	for _, i := range infos {
		errs = append(errs, s.Unmount(i.Digest))
	}
	return errors.Join(errs...)
}

func openHost(ctx context.Context, l layout.Layout, o upOptions, log *slog.Logger) (*gvisor.Runtime, *template.Store, error) {
	runscDigest, err := blob.Digest("runsc")
	if err != nil {
		return nil, nil, fmt.Errorf("this binary carries no runtime (build it with `make build`): %w", err)
	}
	runsc, err := blob.Extract(l.Runtimes(), "runsc")
	if err != nil {
		return nil, nil, err
	}
	guest, err := blob.Extract(l.Runtimes(), "space-guest")
	if err != nil {
		return nil, nil, err
	}
	dir := o.templatesDir
	if dir == "" {
		dir = l.Templates()
	}
	templates, err := template.Open(template.Options{Dir: dir, RunDir: l.RunHost(), CacheDir: filepath.Join(filepath.Dir(dir), "cache"), Log: log})
	if err != nil {
		return nil, nil, err
	}
	driver, err := gvisor.New(gvisor.Config{
		DataDir: filepath.Join(l.Host(), "gvisor"), RunDir: filepath.Join(l.RunHost(), "gv"),
		Runsc: runsc, RunscDigest: runscDigest, GuestDaemon: guest, Templates: templates, CgroupParent: cgroupParent(l),
		Logf: func(format string, args ...any) { log.Warn(fmt.Sprintf(format, args...)) },
	})
	if err != nil {
		return nil, nil, err
	}
	swept, err := driver.Sweep(ctx)
	for _, s := range swept {
		log.Info("swept", "what", s)
	}
	if err != nil {
		driver.Close()
		return nil, nil, fmt.Errorf("sweep the host: %w", err)
	}
	return driver, templates, nil
}

// buildTemplates sees to it that the wanted built-in templates are there and as
// this version makes them. One that cannot be made anew, for want of a mirror
// perhaps, goes on serving as it is.
func buildTemplates(ctx context.Context, s *template.Store, wanted []string, k *lease.Keeper, log *slog.Logger) error {
	for _, w := range wanted {
		r, err := template.Lookup(w)
		if err != nil {
			return err
		}
		began := time.Now()
		_, err = s.Build(ctx, r, func(step string) {
			text := fmt.Sprintf("template %s: %s (%ds)", w, step, int(time.Since(began).Seconds()))
			fmt.Fprintln(os.Stderr, "space:", text)
			k.Progress(text)
		})
		if err == nil {
			continue
		}
		if _, old := s.Resolve(w); old != nil || ctx.Err() != nil {
			return fmt.Errorf("build template %s: %w", w, err)
		}
		log.Warn("a template is older than this version and cannot be renewed", "template", w, "err", err)
	}
	return nil
}

// giveBack closes the driver and takes off the host what no machine needs while
// nobody serves; machines keep their own view of their templates.
func giveBack(d *gvisor.Runtime, s *template.Store) error {
	errs := []error{d.Close()}
	infos, err := s.List()
	errs = append(errs, err)
	for _, i := range infos {
		errs = append(errs, s.Unmount(i.Digest))
	}
	machines, err := d.List(context.Background())
	if errs = append(errs, err); err == nil && len(machines) == 0 {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		errs = append(errs, d.Uninstall(ctx))
	}
	return errors.Join(errs...)
}

// stopAll powers every machine off; files are kept.
func stopAll(ctx context.Context, d runtime.Runtime, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	all, err := d.List(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, st := range all {
		if st.Condition != runtime.Running && st.Condition != runtime.Paused {
			continue
		}
		m, err := d.Adopt(ctx, st.Spec.ID)
		if err == nil {
			err = m.Stop(ctx)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("stop %s: %w", st.Spec.ID, err))
			continue
		}
		log.Info("stopped on exit", "sandbox", string(st.Spec.ID))
	}
	return errors.Join(errs...)
}

// child is the unprivileged side, kept running.
type child struct {
	l        layout.Layout
	o        serveOptions
	uid, gid int
	log      *slog.Logger
	ready    func()
}

// run keeps one unprivileged side alive until ctx ends, and then ends it. One
// that outlived an earlier host room is watched instead of started.
//
// One that has never served and ends three times in a row has a fault that
// trying again does not mend, such as a port in use: that ends the room too.
func (c *child) run(ctx context.Context) error {
	backoff := 100 * time.Millisecond
	var served atomic.Bool
	told := c.ready
	c.ready = func() { served.Store(true); told() }
	for failures := 0; ; {
		began := time.Now()
		err := c.once(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			c.log.Error("the unprivileged side ended", "err", err)
			if failures++; failures == 3 && !served.Load() {
				return fmt.Errorf("the unprivileged side does not start (its reason is above): %w", err)
			}
		}
		if time.Since(began) > time.Minute {
			backoff = 100 * time.Millisecond
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(backoff):
			backoff = min(2*backoff, 5*time.Second)
		}
	}
}

func (c *child) once(ctx context.Context) error {
	if pid := layout.Holder(c.l.ServeLock()); pid > 0 {
		return c.watch(ctx, pid)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command(self, append([]string{"--data-dir", c.l.Data, "--run-dir", c.l.Run, "serve"}, c.o.args()...)...)
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{w} // descriptor 3: a line when it serves
	cmd.Env = cleanEnv()
	cmd.Dir = "/"
	err = privilege.Start(cmd, c.uid, c.gid)
	_ = w.Close()
	if err != nil {
		return err
	}
	go func() {
		b, _ := io.ReadAll(io.LimitReader(r, 64)) // "ready" or nothing
		if strings.HasPrefix(string(b), "ready") {
			c.ready()
		}
	}()
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	return c.until(ctx, cmd.Process.Signal, done)
}

// until waits for the end, and on ctx asks for it, insisting after 20 s.
func (c *child) until(ctx context.Context, sig func(os.Signal) error, done <-chan error) error {
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	_ = sig(syscall.SIGTERM) // already gone is fine
	select {
	case err := <-done:
		return err
	case <-time.After(20 * time.Second):
		_ = sig(syscall.SIGKILL)
		return <-done
	}
}

// watch waits for a process that is not ours to end.
func (c *child) watch(ctx context.Context, pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // it has just ended
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	if layout.Holder(c.l.ServeLock()) != pid {
		return nil
	}
	// The pid is what a file of user space says, and we may have to kill: only a
	// process that user space could kill as well.
	st, err := privilege.Of(pid)
	if err != nil || st.Dropped() != nil || st.UIDs != [4]int{c.uid, c.uid, c.uid, c.uid} {
		return fmt.Errorf("process %d holds the lock of the unprivileged side but is not it", pid)
	}
	c.log.Info("found the unprivileged side running", "pid", pid)
	c.ready()
	done := make(chan error, 1)
	go func() {
		for {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			if n, err := unix.Poll(p, 1000); n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
				done <- nil
				return
			}
		}
	}()
	return c.until(ctx, func(s os.Signal) error { return unix.PidfdSendSignal(fd, s.(syscall.Signal), nil, 0) }, done)
}
