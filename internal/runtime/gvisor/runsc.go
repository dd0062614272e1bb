package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"syscall"
	"time"

	"github.com/space-platform/space/internal/sandbox"
)

// verb is a command of runsc.
type verb string

const (
	// verbRun is create and start in one process: it takes two thirds of the time
	// of two commands.
	verbRun    verb = "run"
	verbPause  verb = "pause"
	verbResume verb = "resume"
	verbState  verb = "state"
)

// commandTimeout bounds a command whose sandbox does not answer.
const commandTimeout = 10 * time.Second

// maxErrorLog bounds how much of a command's error log is read.
const maxErrorLog = 64 << 10

// arguments is the whole argument list of a command: nothing of it comes from
// a guest or a tenant but the id, whose form is checked.
func (p paths) arguments(v verb, id sandbox.ID) []string {
	args := []string{
		"--root=" + p.state(id),
		"--shared-root=" + p.shared(),
		"--log=" + p.log(id),
		"--log-format=json",
		"--panic-log=" + p.panicLog(id),
		"--final-metrics-log=" + p.endLog(id),
		"--platform=systrap",
		"--network=sandbox",
		"--overlay2=none",
		"--file-access=exclusive",
		"--file-access-mounts=shared",
		"--host-uds=open",
		"--host-fifo=none",
		"--net-raw=false",
		"--allow-suid=true",
		"--cpu-num-from-quota=true",
		"--host-settings=ignore",
		string(v),
	}
	if v == verbRun {
		args = append(args, "--detach", "--bundle="+p.bundle(id), "--pid-file="+p.pid(id))
	}
	return append(args, string(id))
}

// command runs one verb. When ours is set, the command is killed with this
// process; a command that must not stop in its middle is not ours.
//
// The sandbox inherits the standard streams of run: they are /dev/null, so
// that a guest can neither hold a pipe of ours open nor fill the host's disk.
func (r *Runtime) command(ctx context.Context, v verb, id sandbox.ID, ours bool) ([]byte, error) {
	logFile := r.paths.log(id)
	_ = os.Remove(logFile) // the log of the last command; a missing one is fine
	cmd := exec.CommandContext(ctx, r.conf.Runsc, r.paths.arguments(v, id)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if ours {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	var out *os.File
	if v == verbState {
		var err error
		if out, err = os.CreateTemp(r.paths.dir(id), "state-"); err != nil {
			return nil, fmt.Errorf("gvisor: %w", err)
		}
		defer out.Close()
		defer os.Remove(out.Name())
		cmd.Stdout = out
	}
	if err := runInThread(cmd); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, fmt.Errorf("gvisor: runsc %s: %w: %s", v, err, lastError(logFile))
	}
	if out == nil {
		return nil, nil
	}
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("gvisor: %w", err)
	}
	b, err := io.ReadAll(io.LimitReader(out, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("gvisor: %w", err)
	}
	return b, nil
}

// runInThread runs cmd from a thread that outlives it: the kernel sends the
// parent-death signal when the thread that forked ends, not the process.
func runInThread(cmd *exec.Cmd) error {
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	return cmd.Run()
}

// lastError gives the last error message of a command's log: one line, bounded.
func lastError(logFile string) string {
	f, err := os.Open(logFile)
	if err != nil {
		return "no message"
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, maxErrorLog))
	msg := "no message"
	dec := json.NewDecoder(bytes.NewReader(b))
	for {
		var line struct {
			Msg string `json:"msg"`
		}
		if err := dec.Decode(&line); err != nil {
			break
		}
		if line.Msg != "" {
			msg = line.Msg
		}
	}
	msg, _, _ = strings.Cut(msg, "\n")
	if len(msg) > 300 {
		msg = msg[:300]
	}
	return msg
}

// state asks runsc what it believes: "created", "running", "paused", "stopped".
// It waits for a command that still runs.
func (r *Runtime) state(ctx context.Context, id sandbox.ID) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	b, err := r.command(ctx, verbState, id, true)
	if err != nil {
		return "", err
	}
	var st struct {
		Status string `json:"status"`
	}
	if err := json.Unmarshal(b, &st); err != nil {
		return "", fmt.Errorf("gvisor: runsc state: %w", err)
	}
	return st.Status, nil
}

// paths are all places of a machine on the host.
type paths struct{ data, run string }

// Names under RunDir are short: the control socket of the runtime must fit the
// 108 bytes of a socket address.
func (p paths) machines() string              { return filepath.Join(p.data, "machines") }
func (p paths) keep(id sandbox.ID) string     { return filepath.Join(p.machines(), string(id)) }
func (p paths) record(id sandbox.ID) string   { return filepath.Join(p.keep(id), "machine.json") }
func (p paths) image(id sandbox.ID) string    { return filepath.Join(p.keep(id), "disk.img") }
func (p paths) live() string                  { return filepath.Join(p.run, "m") }
func (p paths) dir(id sandbox.ID) string      { return filepath.Join(p.live(), string(id)) }
func (p paths) state(id sandbox.ID) string    { return filepath.Join(p.dir(id), "s") }
func (p paths) disk(id sandbox.ID) string     { return filepath.Join(p.dir(id), "disk") }
func (p paths) rootfs(id sandbox.ID) string   { return filepath.Join(p.dir(id), "root") }
func (p paths) bundle(id sandbox.ID) string   { return filepath.Join(p.dir(id), "bundle") }
func (p paths) channel(id sandbox.ID) string  { return filepath.Join(p.dir(id), "channel") }
func (p paths) log(id sandbox.ID) string      { return filepath.Join(p.dir(id), "runsc.log") }
func (p paths) panicLog(id sandbox.ID) string { return filepath.Join(p.dir(id), "panic.log") }
func (p paths) pid(id sandbox.ID) string      { return filepath.Join(p.dir(id), "pid") }
func (p paths) endLog(id sandbox.ID) string   { return filepath.Join(p.dir(id), "end.log") }
func (p paths) namespaces() string            { return filepath.Join(p.run, "netns") }
func (p paths) netns(id sandbox.ID) string    { return filepath.Join(p.namespaces(), string(id)) }
func (p paths) shared() string                { return filepath.Join(p.run, "shared") }
func (p paths) nullNetns() string             { return filepath.Join(p.shared(), "null-netns") }
func (p paths) controlSocket(id string) string {
	return filepath.Join(p.live(), id, "s", "runsc-"+id+".sock")
}

// check refuses places that do not fit.
func (p paths) check() error {
	for _, d := range []string{p.data, p.run} {
		if !filepath.IsAbs(d) || strings.ContainsAny(d, ",:\\\" \n") {
			return fmt.Errorf("gvisor: %q cannot be a directory of machines", d)
		}
	}
	longest := p.controlSocket(strings.Repeat("i", sandbox.IDLen))
	if n := len(longest); n > 107 {
		return fmt.Errorf("gvisor: the run directory %q is %d characters too long", p.run, n-107)
	}
	return nil
}

// writeFile replaces a file as a whole; with sync, durably.
func writeFile(path string, b []byte, sync bool) (err error) {
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	_, err = f.Write(b)
	if err == nil && sync {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil && sync {
		err = syncDir(filepath.Dir(path))
	}
	if err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
