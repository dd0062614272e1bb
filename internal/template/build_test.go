package template

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
)

// TestMain lets this binary be the process that builds and is killed.
func TestMain(m *testing.M) {
	if dir := os.Getenv("TEMPLATE_TEST_BUILD_IN"); dir != "" {
		if err := buildAndReport(dir); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func buildAndReport(dir string) error {
	if err := failpoint.FromEnv(); err != nil {
		return err
	}
	s, err := Open(Options{Dir: dir, RunDir: filepath.Join(dir, "run"), CacheDir: packageCache()})
	if err != nil {
		return err
	}
	info, err := s.Build(context.Background(), tiny(), func(step string) { fmt.Println("step:", step) })
	if err != nil {
		return err
	}
	fmt.Println("starts:", s.starts.Load())
	fmt.Println("digest:", info.Digest)
	return nil
}

// builder prepares another process that builds tiny in dir.
func builder(t testing.TB, dir string, env ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(append(os.Environ(), "TEMPLATE_TEST_BUILD_IN="+dir), env...)
	out := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	return cmd, out
}

type process struct {
	pid, parent, uid int
	name, net        string
}

// descendants lists the living processes below pid.
func descendants(t testing.TB, pid int) []process {
	t.Helper()
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	byParent := map[int][]process{}
	for _, d := range dirs {
		b, err := os.ReadFile(filepath.Join(d, "status"))
		if err != nil {
			continue
		}
		var p process
		fmt.Sscan(filepath.Base(d), &p.pid)
		state := ""
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(line, ":")
			switch key {
			case "PPid":
				fmt.Sscan(value, &p.parent)
			case "Uid":
				fmt.Sscan(value, &p.uid)
			case "Name":
				p.name = strings.TrimSpace(value)
			case "State":
				fmt.Sscan(value, &state)
			}
		}
		if state == "Z" || state == "X" {
			continue
		}
		p.net, _ = os.Readlink(filepath.Join(d, "ns/net"))
		byParent[p.parent] = append(byParent[p.parent], p)
	}
	var out []process
	for todo := []int{pid}; len(todo) > 0; todo = todo[1:] {
		for _, p := range byParent[todo[0]] {
			out = append(out, p)
			todo = append(todo, p.pid)
		}
	}
	return out
}

// eventually polls real processes until ok, with a deadline.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestTwoBuildsGiveOneDigestAndOneImage(t *testing.T) {
	needRoot(t)
	var infos []Info
	var images [][]byte
	for round := range 2 {
		s := openStore(t, t.TempDir())
		info := must(t)(s.Build(t.Context(), tiny(), nil))
		infos = append(infos, info)
		images = append(images, readAll(t, s.image(hexOf(info.Digest))))
		if round > 0 {
			break
		}
		// What is built already is returned at once.
		if again := must(t)(s.Build(t.Context(), tiny(), nil)); again.Digest != info.Digest || again.Reference != "tiny:latest" || s.starts.Load() != 1 {
			t.Errorf("again: %+v after %d builds", again, s.starts.Load())
		}
		// Another recipe under the same name is built.
		changed := tiny()
		changed.Files = append(changed.Files, File{Path: "/etc/motd", Content: "changed\n", Mode: 0o644})
		if other := must(t)(s.Build(t.Context(), changed, nil)); other.Digest == info.Digest || s.starts.Load() != 2 {
			t.Errorf("changed recipe: %+v after %d builds", other, s.starts.Load())
		}
		if again := must(t)(s.Rebuild(t.Context(), tiny(), nil)); again.Digest != info.Digest || s.starts.Load() != 3 {
			t.Errorf("rebuilt: %+v after %d builds", again, s.starts.Load())
		}
		if left, _ := os.ReadDir(s.path("tmp")); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	}
	if infos[0].Digest != infos[1].Digest {
		t.Errorf("digests %s and %s", infos[0].Digest, infos[1].Digest)
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("images differ")
	}
	t.Logf("tiny: %d bytes", infos[0].SizeBytes)
}

func TestConcurrentBuildsAreOne(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	s := openStore(t, dir)
	var wg sync.WaitGroup
	var mu sync.Mutex
	digests := map[string]int{}
	starts := 0
	for range 4 {
		wg.Go(func() {
			info, err := s.Build(t.Context(), tiny(), nil)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			digests[info.Digest]++
		})
	}
	for range 2 {
		wg.Go(func() {
			cmd, out := builder(t, dir)
			if err := cmd.Run(); err != nil {
				t.Errorf("another process: %v: %s", err, out)
			}
			_, rest, _ := strings.Cut(out.String(), "starts: ")
			n, digest := 0, ""
			if _, err := fmt.Sscanf(rest, "%d\ndigest: %s", &n, &digest); err != nil {
				t.Errorf("another process said %s: %v", out, err)
			}
			mu.Lock()
			defer mu.Unlock()
			digests[digest]++
			starts += n
		})
	}
	wg.Wait()
	if starts += int(s.starts.Load()); starts != 1 {
		t.Errorf("%d builds were started, want 1", starts)
	}
	if len(digests) != 1 {
		t.Errorf("digests %v", digests)
	}
}

func TestFailingRecipeLeavesNothing(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	r := tiny()
	r.Packages = append(r.Packages, "no-such-package-anywhere")
	_, err := s.Build(t.Context(), r, nil)
	if !fault.IsCode(err, "template_build_failed") || !strings.Contains(err.Error(), "no-such-package-anywhere") {
		t.Errorf("error %v", err)
	}
	if got := entries(t, s.o.Dir); len(got) != 0 {
		t.Errorf("left %v", got)
	}
	if left := descendants(t, os.Getpid()); len(left) != 0 {
		t.Errorf("processes are left: %v", left)
	}
	must(t)(s.Build(t.Context(), tiny(), nil))
}

// fullDisk fails as a spool on a full file system does.
type fullDisk struct{ memory }

func (*fullDisk) WriteAt([]byte, int64) (int, error) { return 0, unix.ENOSPC }

func TestBuildEndsWhenItsTreeCannotBeRead(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	if _, err := s.bootstrap(t.Context(), tiny(), &fullDisk{}, func(string) {}); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("error %v", err)
	}
	eventually(t, "its processes end", func() bool { return len(descendants(t, os.Getpid())) == 0 })
}

func TestHostThatLacksToolsIsTold(t *testing.T) {
	needRoot(t)
	err := hostReady(t.TempDir())
	if !errors.Is(err, ErrHost) || !fault.IsCode(err, "template_host_unprepared") || !strings.Contains(err.Error(), "mmdebstrap") {
		t.Errorf("error %v", err)
	}
	if err := hostReady(toolPath); err != nil {
		t.Errorf("this host: %v", err)
	}
}

// buildStarted tells when mmdebstrap or a child of it runs below pid.
func buildStarted(t testing.TB, pid int) (found []process) {
	for _, p := range descendants(t, pid) {
		if p.name == "mmdebstrap" || p.name == "apt-get" {
			return descendants(t, pid)
		}
	}
	return nil
}

func TestCancelledBuildLeavesNothing(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { _, err := s.Build(ctx, tiny(), nil); done <- err }()
	eventually(t, "the build starts", func() bool { return buildStarted(t, os.Getpid()) != nil })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if got := entries(t, s.o.Dir); len(got) != 0 {
		t.Errorf("left %v", got)
	}
	eventually(t, "its processes end", func() bool { return len(descendants(t, os.Getpid())) == 0 })
}

func TestBuildRunsAsNobodyOfTheHost(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	done := make(chan error, 1)
	go func() { _, err := s.Build(t.Context(), tiny(), nil); done <- err }()
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the build starts", func() bool { return buildStarted(t, os.Getpid()) != nil })
	seen := 0
	for running := true; running; {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			running = false
		default:
			for _, p := range descendants(t, os.Getpid()) {
				if p.net == "" {
					continue // it ended while we looked
				}
				if p.uid < idBase || p.uid >= idBase+idCount || p.net == own {
					// Between fork and exec a process is still a copy of ours.
					if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", p.pid)); err != nil || strings.HasSuffix(exe, ".test") || strings.HasSuffix(p.name, ".test") {
						continue
					}
					t.Errorf("process %+v is of this host's network or an ordinary uid", p)
					continue
				}
				seen++
			}
		}
	}
	if seen == 0 {
		t.Error("saw no process of the build")
	}
}

func TestKilledBuildLeavesNothing(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	cmd, out := builder(t, dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var running []process
	eventually(t, "the build starts", func() bool {
		running = buildStarted(t, cmd.Process.Pid)
		return running != nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
		t.Fatalf("it ended by itself: %v: %s", err, out)
	}
	eventually(t, "the build's processes die with their builder", func() bool {
		for _, p := range running {
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid)); err == nil &&
				strings.Contains(string(b), fmt.Sprintf("Uid:\t%d", idBase)) && !strings.Contains(string(b), "State:\tZ") {
				return false
			}
		}
		return true
	})
	s := openStore(t, dir)
	if got := entries(t, dir); len(got) != 0 {
		t.Errorf("left %v", got)
	}
	must(t)(s.Build(t.Context(), tiny(), nil))
}

func TestBuilderKilledAtEveryPoint(t *testing.T) {
	needRoot(t)
	for _, point := range []string{fpImageDone, fpRenamed} {
		t.Run(point, func(t *testing.T) {
			dir := t.TempDir()
			cmd, out := builder(t, dir, "SPACE_FAILPOINTS="+point+"=kill")
			var exit *exec.ExitError
			if err := cmd.Run(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
				t.Fatalf("not killed: %v: %s", err, out)
			}
			if len(entries(t, dir)) == 0 {
				t.Fatal("the point was passed before anything was written")
			}
			s := openStore(t, dir)
			if got := entries(t, dir); len(got) != 0 {
				t.Errorf("left %v", got)
			}
			must(t)(s.Build(t.Context(), tiny(), nil))
		})
	}
}

// A maintainer script is a program of somebody else. This one tries what it
// should not be able to, and writes what it found into the template.
func TestHostileScriptIsConfined(t *testing.T) {
	needRoot(t)
	host, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	marker := filepath.Join(t.TempDir(), "marker")
	if err := os.WriteFile(marker, []byte("host"), 0o644); err != nil {
		t.Fatal(err)
	}
	abstract, err := net.Listen("unix", "@space-template-test")
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	_, port, _ := net.SplitHostPort(host.Addr().String())
	reach := `
try() { perl -MIO::Socket::INET -e 'my $s = IO::Socket::INET->new(PeerAddr=>$ARGV[0],Timeout=>3) or exit 1; if ($ARGV[1]) { print $s "GET $ARGV[1] HTTP/1.0\r\n\r\n"; my $l = <$s>; print "proxy: $l"; }' "$@"; }
try 127.0.0.1:` + port + ` && echo "reached the host" || true
perl -MSocket -e 'socket(S,PF_UNIX,SOCK_STREAM,0); connect(S, pack("S a*", AF_UNIX, "\0space-template-test")) and print "reached an abstract socket\n"' || true
`
	// On the host itself both are reached, so that not reaching them means something.
	control, err := exec.Command("/bin/sh", "-c", reach).Output()
	if err != nil || string(control) != "reached the host\nreached an abstract socket\n" {
		t.Fatalf("control: %q, %v", control, err)
	}
	if c, err := host.Accept(); err == nil {
		c.Close()
	}
	s := openStore(t, t.TempDir())
	info, err := s.Build(t.Context(), Recipe{
		Name: "hostile", Tag: "test", Suite: "bookworm", Variant: "minbase",
		Setup: `
exec >/root/found 2>/root/errors
id -u
# The way out of a chroot, for a root that may chroot.
cat >/root/escape.pl <<'END'
mkdir "/root/hole"; opendir(my $d, "/") or die; chroot("/root/hole") or die "chroot: $!";
for (1..64) { chdir(".."); } chroot(".");
exec @ARGV;
END
perl /root/escape.pl /bin/sh -c 'cd /; echo "outside: $(ls / | tr "\n" " ")"; test -e ` + marker + ` && echo "sees the host"; cat /etc/shadow >/dev/null 2>&1 && echo "reads shadow"; touch /usr/bin/made 2>/dev/null && echo "writes tools"; ls /proc | grep -c "^[0-9]"' || true
` + reach + `
try 1.1.1.1:80 && echo "reached the world" || true
try 127.0.0.1:3142 http://127.0.0.1:` + port + `/ || true
try 127.0.0.1:3142 http://example.org/ || true
mknod /root/disk b 254 0 && echo "made a device" || true
mount -t ext4 /dev/vda /mnt 2>/dev/null && echo "mounted a disk" || true
grep -E "^(NoNewPrivs|Seccomp):" /proc/self/status
echo end
`,
		Config: Config{User: "root", WorkDir: "/", Shell: "/bin/sh"},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	at, err := s.Mount(t.Context(), info.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Delete(info.Digest)
	found := string(readAll(t, filepath.Join(at, "root/found")))
	t.Logf("found:\n%s", found)
	for _, bad := range []string{"sees the host", "reads shadow", "writes tools", "reached", "made a device", "mounted", "proxy: HTTP/1.0 200", "proxy: HTTP/1.1 200"} {
		if strings.Contains(found, bad) {
			t.Errorf("a script of the build %q", bad)
		}
	}
	if n := strings.Count(found, " 403 "); n != 2 {
		t.Errorf("%d requests were refused by the proxy, want 2", n)
	}
	for _, want := range []string{"outside: ", "NoNewPrivs:\t1", "end\n"} {
		if !strings.Contains(found, want) {
			t.Errorf("%q is missing: the script did not run as meant", want)
		}
	}
	host.(*net.TCPListener).SetDeadline(time.Now())
	if c, err := host.Accept(); err == nil {
		c.Close()
		t.Error("the host's listener was reached")
	}
}
