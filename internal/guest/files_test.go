package guest_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/guest/guesttest"
	"github.com/space-platform/space/internal/guestclient"
)

func fetch(t testing.TB, g guestclient.Guest, path, user string) ([]byte, error) {
	t.Helper()
	f, err := g.GetFile(within(t, 20*time.Second), path, user)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(f)
	if err == nil && f.Size >= 0 && int64(len(b)) != f.Size {
		t.Fatalf("%s: %d bytes of %d", path, len(b), f.Size)
	}
	return b, err
}

func TestFiles(t *testing.T) {
	g := guesttest.Start(t)
	dir := t.TempDir()
	ctx := within(t, 60*time.Second)
	name := dir + "/a/b/ü \n c"
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	for _, size := range []int64{int64(len(data)), -1} {
		if err := g.PutFile(ctx, name, "", 0o640, size, bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
	}
	f, err := g.GetFile(ctx, name, "")
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(f)
	_ = f.Close()
	if err != nil || sha256.Sum256(got) != sha256.Sum256(data) || f.Mode != 0o640 || f.Size != int64(len(data)) || time.Since(f.ModTime) > time.Minute {
		t.Fatal(len(got), f.Size, f.Mode, f.ModTime, err)
	}
	// The mode stays, the link stays, an empty file works.
	link := dir + "/link"
	if err := os.Symlink(name, link); err != nil {
		t.Fatal(err)
	}
	if err := g.PutFile(ctx, link, "", 0, 0, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Lstat(link); err != nil || fi.Mode()&os.ModeSymlink == 0 {
		t.Fatal("the link was replaced")
	}
	if fi, err := os.Stat(name); err != nil || fi.Size() != 0 || fi.Mode().Perm() != 0o640 {
		t.Fatal(fi, err)
	}
	if b, err := fetch(t, g, name, ""); err != nil || len(b) != 0 {
		t.Fatal(b, err)
	}
	if b, err := fetch(t, g, "/proc/version", ""); err != nil || len(b) == 0 {
		t.Fatal("a file of /proc:", b, err)
	}
	left, _ := filepath.Glob(dir + "/a/b/.space-*")
	if len(left) != 0 {
		t.Fatal(left)
	}
}

type breaking struct{ n int }

func (b *breaking) Read(p []byte) (int, error) {
	if b.n <= 0 {
		return 0, errors.New("the caller's source broke")
	}
	n := min(len(p), b.n)
	b.n -= n
	return n, nil
}

func TestFileFailures(t *testing.T) {
	g := guesttest.Start(t)
	dir := t.TempDir()
	fifo := dir + "/fifo"
	if err := syscall.Mkfifo(fifo, 0o666); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for path, code := range map[string]string{
		dir + "/missing": guestapi.CodeNotFound, dir: guestapi.CodeIsDirectory, fifo: guestapi.CodeNotRegular,
		"/dev/null": guestapi.CodeNotRegular, "relative": guestapi.CodeInvalid, "/etc/passwd/x": guestapi.CodeNotFound,
	} {
		if _, err := fetch(t, g, path, ""); !fault.IsCode(err, code) {
			t.Errorf("get %s: %v", path, err)
		}
		if path == dir+"/missing" {
			continue
		}
		if err := g.PutFile(within(t, 5*time.Second), path, "", 0, 1, strings.NewReader("x")); err == nil {
			t.Errorf("put %s worked", path)
		} else if fault.IsCode(err, "guest_protocol_error") || fault.IsCode(err, "guest_timeout") {
			t.Errorf("put %s: %v", path, err)
		}
	}
	if time.Since(began) > 5*time.Second {
		t.Fatal("something hung")
	}
	// A broken upload leaves nothing.
	if err := g.PutFile(within(t, 5*time.Second), dir+"/half", "", 0, 1<<20, &breaking{300 << 10}); !fault.IsCode(err, "upload_broken") {
		t.Fatal(err)
	}
	poll(t, "nothing is left", 5*time.Second, func() bool {
		left, _ := os.ReadDir(dir)
		return len(left) == 1
	})
}

func TestFilesHaveTheUsersRights(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	g := guesttest.Start(t)
	dir, err := os.MkdirTemp("/tmp", "rights")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	secret := dir + "/secret"
	for _, err := range []error{
		os.Chmod(dir, 0o777|os.ModeSticky), os.WriteFile(secret, []byte("s"), 0o600), os.Symlink(secret, dir+"/link"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{secret, dir + "/link", "/etc/shadow"} {
		if _, err := fetch(t, g, p, "nobody"); !fault.IsCode(err, guestapi.CodePermissionDenied) {
			t.Errorf("get %s: %v", p, err)
		}
		if err := g.PutFile(within(t, 5*time.Second), p, "nobody", 0, 1, strings.NewReader("x")); !fault.IsCode(err, guestapi.CodePermissionDenied) {
			t.Errorf("put %s: %v", p, err)
		}
	}
	if err := g.PutFile(within(t, 5*time.Second), dir+"/mine/deep/f", "nobody", 0, 1, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"/mine", "/mine/deep", "/mine/deep/f"} {
		fi, err := os.Stat(dir + p)
		if err != nil || fi.Sys().(*syscall.Stat_t).Uid != 65534 {
			t.Fatal(p, fi, err)
		}
	}
	if err := g.PutFile(within(t, 5*time.Second), dir+"/x", "no-such-user", 0, 1, strings.NewReader("x")); !fault.IsCode(err, guestapi.CodeNoSuchUser) {
		t.Fatal(err)
	}
	// Threads that acted as nobody are gone or root again.
	if err := g.PutFile(within(t, 5*time.Second), dir+"/root", "", 0, 1, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(dir + "/root"); err != nil || fi.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Fatal(fi, err)
	}
}

func TestNoSpace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts a small tmpfs, which needs root")
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=1m", "small", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	g := guesttest.Start(t)
	if err := g.PutFile(within(t, 10*time.Second), dir+"/big", "", 0, 8<<20, bytes.NewReader(make([]byte, 8<<20))); !fault.IsCode(err, guestapi.CodeNoSpace) {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Fatal(left)
	}
}

func TestBinaryIsSmallAndStatic(t *testing.T) {
	path := guesttest.Binary(t)
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", fi.Size())
	if fi.Size() >= 8<<20 {
		t.Fatalf("%d bytes; the limit is 8 MiB", fi.Size())
	}
	if !static(t, path) {
		t.Fatal("the daemon needs a dynamic linker")
	}
}
