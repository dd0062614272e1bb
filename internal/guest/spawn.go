package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/space-platform/space/api/guestapi"
)

// failure is an error with a code of guestapi.
type failure struct {
	status  int
	code    string
	message string
}

func (f *failure) Error() string { return f.code + ": " + f.message }

func refuse(status int, code, format string, args ...any) *failure {
	return &failure{status, code, fmt.Sprintf(format, args...)}
}

const unprocessable = 422

func startFailure(code, format string, args ...any) *failure {
	return refuse(unprocessable, code, format, args...)
}

const basePath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// environ merges the layers: base below sandbox below process. Values are
// passed byte by byte; no shell sees them.
func environ(a account, sessionID string, terminal bool, layers ...map[string]string) ([]string, error) {
	env := map[string]string{
		"PATH": basePath, "HOME": a.home, "USER": a.name, "LOGNAME": a.name, "SHELL": a.shell, "LANG": "C.UTF-8",
	}
	if terminal {
		env["TERM"] = "xterm-256color"
	}
	for _, l := range layers {
		for k, v := range l {
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
				return nil, refuse(400, guestapi.CodeInvalid, "environment name %.40q or its value cannot be given to a program", k)
			}
			env[k] = v
		}
	}
	if len(env) > guestapi.MaxEnv+16 {
		return nil, refuse(400, guestapi.CodeInvalid, "more than %d environment variables", guestapi.MaxEnv)
	}
	delete(env, marker)
	out := []string{marker + "=" + sessionID}
	for _, k := range slices.Sorted(maps.Keys(env)) {
		out = append(out, k+"="+env[k])
	}
	return out, nil
}

// command is a start request resolved against the machine as it is now.
type command struct {
	path string // of the program
	argv []string
	env  []string
	dir  string
	who  account
}

func (s *Server) resolve(r guestapi.Start) (command, error) {
	s.mu.Lock()
	conf := s.conf
	s.mu.Unlock()
	c := command{argv: r.Args}
	if r.Shell != "" {
		sh := "/bin/sh"
		if fi, err := os.Stat("/bin/bash"); err == nil && fi.Mode().IsRegular() {
			sh = "/bin/bash"
		}
		c.argv = []string{sh, "-c", r.Shell}
	}
	user := r.User
	if user == "" {
		user = conf.User
	}
	var err error
	if c.who, err = lookup("", user); err != nil {
		return c, startFailure(guestapi.CodeNoSuchUser, "the machine has no user %.64q", user)
	}
	if c.env, err = environ(c.who, r.ID, r.PTY != nil, conf.Env, r.Env); err != nil {
		return c, err
	}
	for _, arg := range c.argv {
		if strings.ContainsRune(arg, 0) {
			return c, refuse(400, guestapi.CodeInvalid, "an argument holds a zero byte")
		}
	}
	asked := r.Cwd
	if asked == "" {
		asked = conf.WorkDir
	}
	c.dir = asked
	if c.dir == "" {
		c.dir = c.who.home
	}
	return c, c.who.as(func() error {
		switch err := openDir(c.dir); {
		case err == nil:
		case asked == "":
			c.dir = "/" // a home that is not there is no reason to fail
		default:
			return startFailure(guestapi.CodeBadCwd, "working directory %.200q: %s", c.dir, reason(err))
		}
		return c.find()
	})
}

// openDir proves that the calling thread may enter dir.
func openDir(dir string) error {
	if !path.IsAbs(dir) || strings.ContainsRune(dir, 0) {
		return errors.New("not an absolute path")
	}
	fd, err := unix.Open(dir+"/.", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// find looks the program up as the calling thread may, in the PATH that the
// process will have.
func (c *command) find() error {
	name := c.argv[0]
	var places []string
	if strings.Contains(name, "/") {
		places = []string{name}
	} else {
		for _, kv := range c.env {
			if list, ok := strings.CutPrefix(kv, "PATH="); ok {
				for _, dir := range strings.Split(list, ":") {
					if dir == "" {
						dir = "."
					}
					places = append(places, dir+"/"+name)
				}
			}
		}
	}
	seen := error(nil)
	for _, p := range places {
		if !path.IsAbs(p) {
			p = c.dir + "/" + p
		}
		err := executable(p)
		if err == nil {
			c.path = p
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
			seen = err
		}
	}
	if name != "" && seen != nil {
		return startFailure(guestapi.CodeNotExecutable, "%.200q cannot be executed: %s", name, reason(seen))
	}
	return startFailure(guestapi.CodeNotFound, "there is no program %.200q", name)
}

func executable(p string) error {
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return errors.New("not a regular file")
	}
	return unix.Faccessat(unix.AT_FDCWD, p, unix.X_OK, unix.AT_EACCESS)
}

// reason is the kernel's word for err, without the path.
func reason(err error) string {
	var e unix.Errno
	if errors.As(err, &e) {
		return e.Error()
	}
	return err.Error()
}

// ends are the two sides of a process's standard streams.
type ends struct {
	child  [3]*os.File // given to the process
	stdin  *os.File    // ours; nil without stdin
	stdout *os.File
	stderr *os.File // nil with a terminal
	tty    *os.File // ours: the terminal's inner side, open until the process ended
}

func (e *ends) closeChild() {
	closed := map[*os.File]bool{e.tty: true, nil: true}
	for _, f := range e.child {
		if !closed[f] {
			closed[f] = true
			_ = f.Close()
		}
	}
}

func (e *ends) closeAll() {
	e.closeChild()
	for _, f := range []*os.File{e.stdin, e.stdout, e.stderr, e.tty} {
		if f != nil {
			_ = f.Close()
		}
	}
}

func openTerminal(size guestapi.Size, who account) (*ends, error) {
	outer, t, err := pty.Open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = outer.Close() }()
	if size.Rows > 0 && size.Cols > 0 {
		_ = pty.Setsize(outer, &pty.Winsize{Rows: size.Rows, Cols: size.Cols})
	}
	_ = unix.Fchown(int(t.Fd()), who.uid, -1)
	// The library leaves both sides blocking, which is right for the inner one.
	// The outer one is polled: reads happen under the buffer's lock and must not wait.
	fd, err := unix.FcntlInt(outer.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		_ = t.Close()
		return nil, err
	}
	p := os.NewFile(uintptr(fd), "terminal")
	return &ends{child: [3]*os.File{t, t, t}, stdin: p, stdout: p, tty: t}, nil
}

func openEnds(r guestapi.Start, who account) (*ends, error) {
	e := &ends{}
	if r.PTY != nil {
		return openTerminal(*r.PTY, who)
	}
	var err error
	if r.Stdin {
		e.child[0], e.stdin, err = pipe(who, false)
	} else {
		e.child[0], err = os.Open(os.DevNull)
	}
	if err == nil {
		e.child[1], e.stdout, err = pipe(who, true)
	}
	if err == nil {
		e.child[2], e.stderr, err = pipe(who, true)
	}
	if err != nil {
		e.closeAll()
		return nil, err
	}
	return e, nil
}

// pipe makes a pipe whose outer end is ours and never blocks a thread. The
// inner end belongs to who, so that the process can open /dev/stdout again.
func pipe(who account, write bool) (inner, outer *os.File, err error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	in, out := fd[0], fd[1]
	if write {
		in, out = fd[1], fd[0]
	}
	_ = unix.Fchown(in, who.uid, who.gid)
	if err := unix.SetNonblock(out, true); err != nil {
		_ = unix.Close(in)
		_ = unix.Close(out)
		return nil, nil, err
	}
	return os.NewFile(uintptr(in), "inner"), os.NewFile(uintptr(out), "outer"), nil
}

// fork starts the program. Its own errors, also those of exec, are returned
// here: a process that never ran has no exit.
func (c *command) fork(e *ends, terminal bool) (int, error) {
	attr := &syscall.ProcAttr{
		Dir: c.dir,
		Env: c.env,
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: terminal},
	}
	for _, f := range e.child {
		attr.Files = append(attr.Files, f.Fd())
	}
	if os.Geteuid() == 0 {
		groups := make([]uint32, len(c.who.groups))
		for i, g := range c.who.groups {
			groups[i] = uint32(g)
		}
		attr.Sys.Credential = &syscall.Credential{Uid: uint32(c.who.uid), Gid: uint32(c.who.gid), Groups: groups}
	}
	for wait := time.Millisecond; ; wait *= 2 {
		pid, err := syscall.ForkExec(c.path, c.argv, attr)
		// A program just written may still be open for writing in a child between
		// fork and exec.
		if err != syscall.ETXTBSY || wait > 64*time.Millisecond {
			return pid, err
		}
		time.Sleep(wait)
	}
}

func forkFailure(err error, name string) *failure {
	code := guestapi.CodeStartFailed
	switch {
	case errors.Is(err, unix.EAGAIN):
		return startFailure(guestapi.CodeProcessLimit, "the machine's limit of processes is reached")
	case errors.Is(err, unix.ENOMEM):
		return startFailure(guestapi.CodeNoMemory, "the machine has no memory for one more process")
	case errors.Is(err, unix.E2BIG), errors.Is(err, unix.ENAMETOOLONG) && len(name) < 256:
		// gVisor says the second of one argument above 128 KiB.
		return startFailure(guestapi.CodeArgsTooLong, "arguments and environment are longer than the kernel takes")
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return startFailure(guestapi.CodeNotFound, "%.200q or its interpreter does not exist", name)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.ENOEXEC), errors.Is(err, unix.ELIBBAD):
		code = guestapi.CodeNotExecutable
	}
	return startFailure(code, "%.200q cannot be started: %s", name, reason(err))
}
