package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/template"
)

// driver is a runtime that only notes what it is told.
type driver struct {
	mu   sync.Mutex
	made map[sandbox.ID]runtime.Spec // guarded by mu
	said []string                    // guarded by mu
	hang chan struct{}               // Start waits for it or its context
}

func (d *driver) note(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.said) < 1000 {
		d.said = append(d.said, fmt.Sprintf(format, args...))
	}
}

func (d *driver) specs() map[sandbox.ID]runtime.Spec {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.made)
}

func (d *driver) Capabilities() runtime.Capabilities {
	return runtime.Capabilities{Name: "note", Class: sandbox.ClassEmulated}
}

func (d *driver) Create(_ context.Context, spec runtime.Spec) (runtime.Machine, error) {
	d.note("create %s", spec.ID)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.made[spec.ID] = spec
	return noted{d, spec.ID}, nil
}

func (d *driver) Adopt(_ context.Context, id sandbox.ID) (runtime.Machine, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.made[id]; !ok {
		return nil, fmt.Errorf("%w: %s", runtime.ErrNotFound, id)
	}
	return noted{d, id}, nil
}

func (d *driver) List(context.Context) ([]runtime.Status, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []runtime.Status
	for _, s := range d.made {
		out = append(out, runtime.Status{Spec: s, Condition: runtime.Created})
	}
	return out, nil
}

func (d *driver) Restore(context.Context, runtime.Artifacts, runtime.Spec) (runtime.Machine, error) {
	return nil, runtime.ErrUnsupported
}

func (d *driver) Destroy(_ context.Context, id sandbox.ID) error {
	d.note("destroy %s", id)
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.made, id)
	return nil
}

func (d *driver) ListenFD(_ context.Context, id sandbox.ID) (*os.File, error) {
	d.note("listen %s", id)
	return os.Open("/dev/null")
}

func (d *driver) Sweep(context.Context) ([]string, error) { return []string{"removed nothing"}, nil }

type noted struct {
	d  *driver
	id sandbox.ID
}

func (m noted) ID() sandbox.ID { return m.id }
func (m noted) Status(context.Context) (runtime.Status, error) {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	return runtime.Status{Spec: m.d.made[m.id], Condition: runtime.Created}, nil
}
func (m noted) Start(ctx context.Context) error {
	m.d.note("start %s", m.id)
	select {
	case <-m.d.hang:
		return nil
	case <-ctx.Done():
		m.d.note("cancelled %s", m.id)
		return ctx.Err()
	}
}
func (m noted) Pause(context.Context) error  { return runtime.ErrNotRunning }
func (m noted) Resume(context.Context) error { return runtime.ErrPaused }
func (m noted) Stop(context.Context) error   { panic("a mistake of ours") }
func (m noted) Capture(context.Context, runtime.CaptureKind) (runtime.Artifacts, error) {
	return runtime.Artifacts{}, runtime.ErrUnsupported
}
func (m noted) Destroy(ctx context.Context) error            { return m.d.Destroy(ctx, m.id) }
func (m noted) Dial(context.Context) (net.Conn, error)       { return nil, runtime.ErrNotRunning }
func (m noted) Stats(context.Context) (runtime.Stats, error) { return runtime.Stats{CPUNanos: 7}, nil }
func (m noted) Wait(ctx context.Context) (runtime.Exit, error) {
	<-ctx.Done()
	return runtime.Exit{}, ctx.Err()
}

// shelf is a template store that notes what is built.
type shelf struct{ d *driver }

func (s shelf) List() ([]template.Info, error) {
	return []template.Info{{Reference: "tiny:latest", Digest: digest}}, nil
}
func (s shelf) Resolve(ref string) (template.Info, error) {
	if ref != "tiny:latest" && ref != digest {
		return template.Info{}, fmt.Errorf("%w: %q", template.ErrNotFound, ref)
	}
	return template.Info{Reference: "tiny:latest", Digest: digest}, nil
}
func (s shelf) Build(_ context.Context, r template.Recipe, progress func(string)) (template.Info, error) {
	s.d.note("build %s", r.Reference())
	for i := range 10 {
		progress(fmt.Sprintf("step %d", i))
	}
	return template.Info{Reference: r.Reference(), Digest: digest}, nil
}

var digest = "sha256:" + strings.Repeat("ab", 32)

func newServer(t testing.TB, change func(*Config)) (*Server, *driver) {
	t.Helper()
	d := &driver{made: map[sandbox.ID]runtime.Spec{}, hang: make(chan struct{})}
	conf := Config{
		Driver: d, Templates: shelf{d}, KeyDir: filepath.Join(t.TempDir(), "room"), DiskDir: "/",
		UIDs:        []uint32{uint32(os.Getuid())},
		MaxMachines: 3, MaxResources: sandbox.Resources{MilliCPU: 4000, MemoryBytes: 1 << 30, DiskBytes: 1 << 30, MaxProcesses: 1000},
	}
	if change != nil {
		change(&conf)
	}
	s, err := NewServer(conf)
	if err != nil {
		t.Fatal(err)
	}
	return s, d
}

// serve puts a server on a socket and gives its path.
func serve(t testing.TB, s *Server) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := Listen(path, os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(ctx, l) }()
	t.Cleanup(func() { cancel(); <-done })
	return path
}

func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func dial(t testing.TB, path string) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	return c
}

// raw sends one message and gives the last answer.
func raw(t testing.TB, c *net.UnixConn, msg string) reply {
	t.Helper()
	if _, err := c.Write([]byte(msg)); err != nil {
		t.Fatal(err)
	}
	return answer(t, c)
}

func answer(t testing.TB, c *net.UnixConn) reply {
	t.Helper()
	b := make([]byte, MaxMessage)
	for {
		n, err := c.Read(b)
		if err != nil {
			t.Fatalf("no answer: %v", err)
		}
		var r reply
		if err := json.Unmarshal(b[:n], &r); err != nil {
			t.Fatal(err)
		}
		if r.Done {
			return r
		}
	}
}

func spec(id sandbox.ID) runtime.Spec {
	return runtime.Spec{ID: id, TemplateDigest: digest, Resources: sandbox.Resources{
		MilliCPU: 1000, MemoryBytes: 256 << 20, DiskBytes: 128 << 20, MaxProcesses: 100,
	}}
}

func TestCalls(t *testing.T) {
	s, d := newServer(t, nil)
	ctx := bounded(t)
	c, err := Connect(ctx, serve(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Capabilities().Name != "note" {
		t.Errorf("capabilities %+v", c.Capabilities())
	}
	id := sandbox.NewID()
	m, err := c.Create(ctx, spec(id))
	if err != nil {
		t.Fatal(err)
	}
	if got := d.specs()[id]; got != spec(id) {
		t.Errorf("made %+v", got)
	}
	if st, err := m.Stats(ctx); err != nil || st.CPUNanos != 7 {
		t.Errorf("stats %+v %v", st, err)
	}
	// Errors keep what they are.
	if err := m.Pause(ctx); !errors.Is(err, runtime.ErrNotRunning) {
		t.Errorf("pause: %v", err)
	}
	if err := m.Resume(ctx); !errors.Is(err, runtime.ErrPaused) {
		t.Errorf("resume: %v", err)
	}
	if _, err := c.Adopt(ctx, sandbox.NewID()); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("adopt: %v", err)
	}
	if _, err := c.Templates().Resolve(ctx, "nothing:latest"); !errors.Is(err, template.ErrNotFound) {
		t.Errorf("resolve: %v", err)
	}
	if err := m.Stop(ctx); err == nil { // the handler panics
		t.Error("a panic in the room is an answer")
	}
	var steps []string
	if info, err := c.Templates().Build(ctx, "tiny", func(s string) { steps = append(steps, s) }); err != nil || info.Digest != digest || len(steps) != 10 {
		t.Errorf("build %+v %v, steps %q", info, err, steps)
	}
	if _, err := c.Templates().Build(ctx, "../../etc/passwd", nil); err == nil {
		t.Error("a recipe that is not built in was built")
	}
	if f, err := c.Facts(ctx); err != nil || f.CPUs < 1 || f.MemoryBytes == 0 || f.DiskFree == 0 || f.Machines != 1 || f.MaxMachines != 3 {
		t.Errorf("facts %+v %v", f, err)
	}
	if h, err := c.SignHead(ctx, "control", 3, make([]byte, 32)); err != nil || h.Seq != 3 || !h.Check(c.PublicKey()) {
		t.Errorf("head %+v %v", h, err)
	}
	if _, err := c.SignHead(ctx, "control", 2, make([]byte, 32)); !errors.Is(err, audit.ErrSigned) {
		t.Errorf("a lower head: %v", err)
	}
	if list, err := c.List(ctx); err != nil || len(list) != 1 || list[0].Spec.ID != id {
		t.Errorf("list %+v %v", list, err)
	}
	if lines, err := c.Sweep(ctx); err != nil || len(lines) != 1 {
		t.Errorf("sweep %q %v", lines, err)
	}
	if _, err := m.Capture(ctx, runtime.CaptureDisk); !errors.Is(err, runtime.ErrUnsupported) {
		t.Errorf("capture: %v", err)
	}
}

// What a peer may ask for is bounded, also by many calls at once.
func TestBounds(t *testing.T) {
	s, d := newServer(t, nil)
	ctx := bounded(t)
	c, err := Connect(ctx, serve(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for name, change := range map[string]func(*runtime.Spec){
		"cpu":       func(s *runtime.Spec) { s.Resources.MilliCPU = 4001 },
		"memory":    func(s *runtime.Spec) { s.Resources.MemoryBytes = 1 << 40 },
		"disk":      func(s *runtime.Spec) { s.Resources.DiskBytes = 10 << 50 },
		"processes": func(s *runtime.Spec) { s.Resources.MaxProcesses = 1001 },
		"negative":  func(s *runtime.Spec) { s.Resources.DiskBytes = -1 },
		"id":        func(s *runtime.Spec) { s.ID = "../../../etc" },
		"template":  func(s *runtime.Spec) { s.TemplateDigest = "/etc" },
	} {
		sp := spec(sandbox.NewID())
		change(&sp)
		if _, err := c.Create(ctx, sp); err == nil {
			t.Errorf("too much %s was given", name)
		}
	}
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() { _, _ = c.Create(ctx, spec(sandbox.NewID())) })
	}
	wg.Wait()
	if n := len(d.specs()); n != 3 {
		t.Errorf("%d machines, 3 are the most", n)
	}
	if _, err := c.Create(ctx, spec(sandbox.NewID())); !errors.Is(err, runtime.ErrNoSpace) {
		t.Errorf("one too many: %v", err)
	}
}

func TestWrongUser(t *testing.T) {
	s, d := newServer(t, func(c *Config) { c.UIDs = []uint32{54321} })
	r := raw(t, dial(t, serve(t, s)), `{"version":1,"op":"hello"}`)
	if r.Error == nil || r.Error.Code != "refused" || r.Hello != nil {
		t.Errorf("answer %+v", r)
	}
	if len(d.said) != 0 {
		t.Errorf("the driver was asked: %q", d.said)
	}
}

// The kernel, not the peer, says who the peer is: another user that can reach the
// socket is refused, the one that is named is served.
func TestRealUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it connects as other users")
	}
	const allowed, other = 54321, 65534
	s, _ := newServer(t, func(c *Config) { c.UIDs = []uint32{allowed} })
	dir, err := os.MkdirTemp("", "room")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	l, err := Listen(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(ctx, l) }()
	defer func() { cancel(); <-done }()
	as := func(uid int) (*net.UnixConn, error) {
		got := make(chan error, 1)
		var fd int
		go func() {
			goruntime.LockOSThread() // never unlocked: the thread keeps the other uid
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
				got <- errno
				return
			}
			var err error
			if fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0); err == nil {
				err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
			}
			got <- err
		}()
		if err := <-got; err != nil {
			return nil, err
		}
		c := conn(t, fd)
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		return c, nil
	}
	if _, err := as(other); !errors.Is(err, unix.EACCES) {
		t.Errorf("a user outside of the group reaches the socket: %v", err)
	}
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(path, 0o666)); err != nil {
		t.Fatal(err)
	}
	for uid, want := range map[int]bool{other: false, allowed: true} {
		c, err := as(uid)
		if err != nil {
			t.Fatal(err)
		}
		r := raw(t, c, `{"version":1,"op":"hello"}`)
		if served := r.Hello != nil && r.Error == nil; served != want {
			t.Errorf("uid %d: %+v", uid, r)
		}
		c.Close()
	}
	if r := raw(t, dial(t, path), `{"version":1,"op":"hello"}`); r.Error == nil {
		t.Error("root is served though it is not named")
	}
}

func TestStrictRequests(t *testing.T) {
	s, d := newServer(t, nil)
	path := serve(t, s)
	id := string(sandbox.NewID())
	for _, msg := range []string{
		`{"version":1,"op":"hello","path":"/etc"}`, `{"version":1,"op":"hello"}{}`, `{"version":2,"op":"hello"}`,
		`{"version":1,"op":"exec"}`, `{"version":1}`, `[]`, `null`, `x`, "\x00",
		`{"version":1,"op":"destroy","id":"i/../../../../../etc"}`, `{"version":1,"op":"destroy","id":""}`,
		`{"version":1,"op":"create","id":"` + id + `","template":"` + digest + `"}`,
		`{"version":1,"op":"create","id":"` + id + `","template":"` + digest + `","resources":{"milli_cpu":1,"args":["x"]}}`,
		`{"version":1,"op":"sign","digest":"AAAA"}`, `{"version":1,"op":"sign","chain":"control","seq":1,"hash":"AAAA"}`, `{"version":1,"op":"build","template":"https://x/y"}`,
		`{"version":1,"op":"resolve","template":"` + strings.Repeat("a", 60000) + `"}`,
		strings.Repeat(" ", MaxMessage+1),
	} {
		if r := raw(t, dial(t, path), msg); r.Error == nil {
			t.Errorf("%.80q was answered: %+v", msg, r)
		}
	}
	for _, said := range d.said {
		t.Errorf("the driver was asked: %s", said)
	}
}

// Silence ends a connection; peers that hang or flood hold up nobody.
func TestHangingPeers(t *testing.T) {
	s, d := newServer(t, func(c *Config) { c.MaxCalls = 20; c.FirstMessage = 200 * time.Millisecond })
	path := serve(t, s)
	ctx := bounded(t)
	c, err := Connect(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	id := sandbox.NewID()
	if _, err := c.Create(ctx, spec(id)); err != nil {
		t.Fatal(err)
	}
	var silent []*net.UnixConn
	for range 40 {
		silent = append(silent, dial(t, path))
	}
	if _, err := c.List(ctx); err != nil { // tries again until the silent ones are gone
		t.Fatalf("list among silent peers: %v", err)
	}
	for _, s := range silent {
		for b := make([]byte, MaxMessage); ; {
			if _, err := s.Read(b); err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
					t.Fatalf("a silent peer was not cut off: %v", err)
				}
				break
			}
		}
	}
	// A peer that goes away cancels its call.
	gone := dial(t, path)
	if _, err := gone.Write([]byte(`{"version":1,"op":"start","id":"` + string(id) + `"}`)); err != nil {
		t.Fatal(err)
	}
	saw := func(what string) bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return strings.Contains(strings.Join(d.said, "\n"), what)
	}
	for !saw("start") && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	gone.Close()
	for !saw("cancelled") && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	if ctx.Err() != nil {
		t.Fatal("the call was not cancelled")
	}
}

// Descriptors that a peer sends are not taken.
func TestDescriptorsAreRefused(t *testing.T) {
	s, _ := newServer(t, nil)
	c := dial(t, serve(t, s))
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	rights := unix.UnixRights(int(w.Fd()), int(w.Fd()), int(w.Fd()))
	if _, _, err := c.WriteMsgUnix([]byte(`{"version":1,"op":"hello"}`), rights, nil); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if a := answer(t, c); a.Hello == nil {
		t.Fatalf("answer %+v", a)
	}
	_ = r.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the room holds the peer's descriptor: %v", err)
	}
}

func TestKey(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "room")
	one, err := loadKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	two, err := loadKey(dir)
	if err != nil || !one.Equal(two) {
		t.Errorf("another key at the second start: %v", err)
	}
	for name, mode := range map[string]os.FileMode{"": 0o700, keyFile: 0o600} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode().Perm() != mode {
			t.Errorf("%q: %v %v", name, st.Mode(), err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, keyFile), []byte("zz\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := loadKey(dir); err == nil {
		t.Error("a damaged key was replaced in silence")
	}
}

// FuzzRoom is a hostile peer: whatever it sends, as one message or several, the room
// answers or closes, does not panic, and asks the driver only for well-formed things.
func FuzzRoom(f *testing.F) {
	id := string(sandbox.NewID())
	for o := range handlers {
		f.Add([]byte(`{"version":1,"op":"`+string(o)+`","id":"`+id+`","template":"`+digest+`","resources":{"milli_cpu":1,"memory_bytes":1,"disk_bytes":1,"max_processes":1},"digest":"`+strings.Repeat("A", 43)+`="}`), []byte("more"))
	}
	f.Add([]byte(`{"version":1,"op":"create","id":"i/../../../../../../x"}`), []byte{})
	f.Add([]byte(`{"version":1,"version":9,"op":"destroy","ID":"x"}`), []byte{0})
	f.Add([]byte{0xff, 0xfe}, []byte("{"))
	s, d := newServer(f, func(c *Config) { c.FirstMessage = time.Second })
	close(d.hang)
	f.Fuzz(func(t *testing.T, first, second []byte) {
		if len(first) > MaxMessage || len(second) > MaxMessage {
			return
		}
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := conn(t, fds[0]), conn(t, fds[1])
		defer theirs.Close()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		s.ServeConn(ctx, ours)
		_ = theirs.SetDeadline(time.Now().Add(5 * time.Second))
		_, _ = theirs.Write(first)
		if len(second) > 0 {
			_, _ = theirs.Write(second)
		}
		if q, err := parse(first); err == nil && q.Op == opWait && len(second) == 0 {
			theirs.Close() // else it would wait for ever, as it should
		}
		for b := make([]byte, MaxMessage); ; {
			n, err := theirs.Read(b)
			if err != nil {
				var ne net.Error
				if errors.As(err, &ne) && ne.Timeout() {
					t.Fatalf("the room neither answers nor closes after %q", first)
				}
				break
			}
			var r reply
			if err := json.Unmarshal(b[:n], &r); err != nil {
				t.Fatalf("answer %q", b[:n])
			}
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, said := range d.said {
			verb, arg, _ := strings.Cut(said, " ")
			if verb == "build" {
				if _, err := template.Lookup(arg); err != nil {
					t.Fatalf("%q was built", arg)
				}
			} else if _, err := sandbox.ParseID(arg); err != nil {
				t.Fatalf("the driver was asked %q", said)
			}
		}
		if len(d.made) > 3 {
			t.Fatalf("%d machines", len(d.made))
		}
		for _, m := range d.made {
			if s.bounded(m.Resources) != nil || !isDigest(m.TemplateDigest) {
				t.Fatalf("made %+v", m)
			}
		}
		d.said = nil
	})
}

func conn(t testing.TB, fd int) *net.UnixConn {
	t.Helper()
	f := os.NewFile(uintptr(fd), "pair")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	return c.(*net.UnixConn)
}
