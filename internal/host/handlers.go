package host

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	goruntime "runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
)

// handler does one operation. It returns nil for a plain "done", errSent when
// it has sent the last message itself.
type handler struct {
	do func(s *Server, ctx context.Context, c *net.UnixConn, q request) error
	// unbounded calls last as long as the peer wants.
	unbounded bool
}

// handlers is everything a peer can make the room do.
var handlers = map[op]handler{
	opHello:     {do: (*Server).hello},
	opCreate:    {do: (*Server).create},
	opStart:     {do: (*Server).start},
	opPause:     {do: onMachine(runtime.Machine.Pause)},
	opResume:    {do: onMachine(runtime.Machine.Resume)},
	opStop:      {do: onMachine(runtime.Machine.Stop)},
	opDestroy:   {do: (*Server).destroy},
	opStatus:    {do: (*Server).status},
	opList:      {do: (*Server).list},
	opStats:     {do: (*Server).stats},
	opWait:      {do: (*Server).wait, unbounded: true},
	opListen:    {do: (*Server).listen},
	opTemplates: {do: (*Server).templates},
	opResolve:   {do: (*Server).resolve},
	opBuild:     {do: (*Server).build, unbounded: true},
	opSign:      {do: (*Server).sign},
	opFacts:     {do: (*Server).facts},
	opSweep:     {do: (*Server).sweep},
}

// last sends the last message.
func (s *Server) last(c *net.UnixConn, r reply) error {
	r.Done, r.Room = true, s.room
	s.send(c, r, writeTimeout)
	return errSent
}

func (s *Server) hello(_ context.Context, c *net.UnixConn, _ request) error {
	return s.last(c, reply{Hello: &hello{
		Version: Version, Capabilities: s.conf.Driver.Capabilities(), PublicKey: s.PublicKey(),
	}})
}

func id(q request) (sandbox.ID, error) {
	id, err := sandbox.ParseID(q.ID)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return id, nil
}

func (s *Server) machine(ctx context.Context, q request) (runtime.Machine, error) {
	id, err := id(q)
	if err != nil {
		return nil, err
	}
	return s.conf.Driver.Adopt(ctx, id)
}

func onMachine(f func(runtime.Machine, context.Context) error) func(*Server, context.Context, *net.UnixConn, request) error {
	return func(s *Server, ctx context.Context, _ *net.UnixConn, q request) error {
		m, err := s.machine(ctx, q)
		if err != nil {
			return err
		}
		return f(m, ctx)
	}
}

func (s *Server) create(ctx context.Context, c *net.UnixConn, q request) error {
	id, err := id(q)
	if err != nil {
		return err
	}
	if q.Resources == nil {
		return fmt.Errorf("%w: no resources", ErrRefused)
	}
	spec := runtime.Spec{ID: id, TemplateDigest: q.Template, Resources: *q.Resources}
	if err := s.bounded(spec.Resources); err != nil {
		return err
	}
	if !isDigest(spec.TemplateDigest) {
		return fmt.Errorf("%w: %.80q is not the digest of a template", runtime.ErrNoTemplate, spec.TemplateDigest)
	}
	leave, err := s.admit(ctx, id)
	if err != nil {
		return err
	}
	defer leave()
	m, err := s.conf.Driver.Create(ctx, spec)
	if err != nil {
		return err
	}
	st, err := m.Status(ctx)
	if err != nil {
		return err
	}
	return s.last(c, reply{Status: &st})
}

// bounded refuses sizes that no peer may ask for.
func (s *Server) bounded(r sandbox.Resources) error {
	for _, b := range []struct {
		what       string
		value, max int64
	}{
		{"milli_cpu", r.MilliCPU, s.conf.MaxResources.MilliCPU},
		{"memory_bytes", r.MemoryBytes, s.conf.MaxResources.MemoryBytes},
		{"disk_bytes", r.DiskBytes, s.conf.MaxResources.DiskBytes},
		{"max_processes", r.MaxProcesses, s.conf.MaxResources.MaxProcesses},
	} {
		if b.value <= 0 {
			return fmt.Errorf("%w: %s is %d", ErrRefused, b.what, b.value)
		}
		if b.max > 0 && b.value > b.max {
			return fmt.Errorf("%w: %s is %d, at most %d are given to one machine", runtime.ErrNoSpace, b.what, b.value, b.max)
		}
	}
	return nil
}

// admit counts machines, so that many calls at once cannot pass the bound.
func (s *Server) admit(ctx context.Context, id sandbox.ID) (leave func(), err error) {
	if s.conf.MaxMachines <= 0 {
		return func() {}, nil
	}
	list, err := s.conf.Driver.List(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	others := map[sandbox.ID]bool{}
	for _, st := range list {
		others[st.Spec.ID] = true
	}
	if others[id] {
		return func() {}, nil
	}
	for other := range s.creating {
		others[other] = true
	}
	delete(others, id)
	if len(others) >= s.conf.MaxMachines {
		return nil, fmt.Errorf("%w: there are %d machines, the most this host takes", runtime.ErrNoSpace, len(others))
	}
	if s.creating[id] {
		return func() {}, nil // the first call counts for both
	}
	s.creating[id] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.creating, id)
	}, nil
}

func (s *Server) start(ctx context.Context, c *net.UnixConn, q request) error {
	m, err := s.machine(ctx, q)
	if err != nil {
		return err
	}
	if err := m.Start(ctx); err != nil {
		return err
	}
	st, err := m.Status(ctx)
	if err != nil {
		return err
	}
	return s.last(c, reply{Status: &st})
}

func (s *Server) destroy(ctx context.Context, _ *net.UnixConn, q request) error {
	id, err := id(q)
	if err != nil {
		return err
	}
	return s.conf.Driver.Destroy(ctx, id)
}

func (s *Server) status(ctx context.Context, c *net.UnixConn, q request) error {
	m, err := s.machine(ctx, q)
	if err != nil {
		return err
	}
	st, err := m.Status(ctx)
	if err != nil {
		return err
	}
	return s.last(c, reply{Status: &st})
}

func (s *Server) list(ctx context.Context, c *net.UnixConn, _ request) error {
	list, err := s.conf.Driver.List(ctx)
	if err != nil {
		return err
	}
	for i := range list {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.send(c, reply{Status: &list[i]}, writeTimeout)
	}
	return nil
}

func (s *Server) stats(ctx context.Context, c *net.UnixConn, q request) error {
	m, err := s.machine(ctx, q)
	if err != nil {
		return err
	}
	st, err := m.Stats(ctx)
	if err != nil {
		return err
	}
	return s.last(c, reply{Stats: &st})
}

func (s *Server) wait(ctx context.Context, c *net.UnixConn, q request) error {
	m, err := s.machine(ctx, q)
	if err != nil {
		return err
	}
	exit, err := m.Wait(ctx)
	if err != nil {
		return err
	}
	return s.last(c, reply{Exit: &exit})
}

// listen hands out the socket that the guest daemon dials.
func (s *Server) listen(ctx context.Context, c *net.UnixConn, q request) error {
	id, err := id(q)
	if err != nil {
		return err
	}
	f, err := s.conf.Driver.ListenFD(ctx, id)
	if err != nil {
		return err
	}
	defer f.Close()
	rc, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("host: listen: %w", err)
	}
	_ = c.SetWriteDeadline(time.Now().Add(writeTimeout))
	var werr error
	if err := rc.Control(func(fd uintptr) { // f.Fd would make the shared socket block
		_, _, werr = c.WriteMsgUnix([]byte(`{"done":true,"room":`+strconv.Quote(s.room)+`}`), unix.UnixRights(int(fd)), nil)
	}); err != nil {
		return fmt.Errorf("host: listen: %w", err)
	}
	if werr != nil {
		return fmt.Errorf("host: listen: %w", werr)
	}
	return errSent
}

func (s *Server) templates(ctx context.Context, c *net.UnixConn, _ request) error {
	list, err := s.conf.Templates.List()
	if err != nil {
		return err
	}
	for i := range list {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.send(c, reply{Template: &list[i]}, writeTimeout)
	}
	return nil
}

func (s *Server) resolve(_ context.Context, c *net.UnixConn, q request) error {
	if !isDigest(q.Template) {
		if _, _, err := template.ParseReference(q.Template); err != nil {
			return err
		}
	}
	info, err := s.conf.Templates.Resolve(q.Template)
	if err != nil {
		return err
	}
	return s.last(c, reply{Template: &info})
}

// build builds one of the recipes that are part of this program.
func (s *Server) build(ctx context.Context, c *net.UnixConn, q request) error {
	recipe, err := template.Lookup(q.Template)
	if err != nil {
		return err
	}
	info, err := s.conf.Templates.Build(ctx, recipe, func(step string) {
		if len(step) > 1000 {
			step = step[:1000]
		}
		// A peer that does not read loses steps; it does not hold up a build that
		// others may share.
		s.send(c, reply{Progress: strings.ToValidUTF8(step, "?")}, progressTimeout)
	})
	if err != nil {
		return err
	}
	return s.last(c, reply{Template: &info})
}

func (s *Server) sign(_ context.Context, c *net.UnixConn, q request) error {
	h, err := s.heads.sign(audit.Head{Chain: q.Chain, Seq: q.Seq, Hash: q.Hash}, time.Now())
	if err != nil {
		return err
	}
	return s.last(c, reply{Head: &h})
}

func (s *Server) facts(ctx context.Context, c *net.UnixConn, _ request) error {
	list, err := s.conf.Driver.List(ctx)
	if err != nil {
		return err
	}
	f := Facts{CPUs: goruntime.NumCPU(), Machines: len(list), MaxMachines: s.conf.MaxMachines, MaxResources: s.conf.MaxResources}
	if f.MemoryBytes, f.MemoryFree, err = hostMemory("/proc/meminfo"); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(s.conf.DiskDir, &st); err != nil {
		return fmt.Errorf("host: facts: %w", err)
	}
	f.DiskBytes, f.DiskFree = int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		f.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	return s.last(c, reply{Facts: &f})
}

func (s *Server) sweep(ctx context.Context, c *net.UnixConn, _ request) error {
	lines, err := s.conf.Driver.Sweep(ctx)
	const most = 200 // lines of one message; what does not fit is in the log
	for _, l := range lines {
		s.conf.Log.Info("host room: sweep", "did", l)
	}
	if err != nil {
		return err
	}
	if len(lines) > most {
		lines = append(lines[:most:most], fmt.Sprintf("and %d more", len(lines)-most))
	}
	for i, l := range lines {
		if len(l) > 200 {
			lines[i] = l[:200]
		}
	}
	return s.last(c, reply{Lines: lines})
}

func isDigest(s string) bool {
	hex, ok := strings.CutPrefix(s, "sha256:")
	return ok && len(hex) == 64 && strings.Trim(hex, "0123456789abcdef") == ""
}

// hostMemory reads total and available bytes.
func hostMemory(file string) (total, free int64, err error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, 0, fmt.Errorf("host: memory: %w", err)
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		if len(fields) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(fields[1], 10, 64)
		switch fields[0] {
		case "MemTotal:":
			total = n << 10
		case "MemAvailable:":
			free = n << 10
		}
	}
	if total == 0 {
		return 0, 0, fmt.Errorf("host: memory: %s tells no total", file)
	}
	return total, free, sc.Err()
}
