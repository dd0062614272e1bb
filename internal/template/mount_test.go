package template

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes namespaces and mounts")
	}
}

// smallTree builds an image of a few files without any package.
func smallTree(t testing.TB, s *Store, r Recipe) Info {
	t.Helper()
	needRoot(t)
	setuid := file("usr/sudo", "program")
	setuid.Mode = 0o4755
	caps := file("usr/ping", "program")
	caps.PAXRecords = map[string]string{"SCHILY.xattr.user.mark": "a\x00b"}
	owned := file("usr/owned", "x")
	owned.Uid, owned.Gid = 1000, 1000
	tr := read(t, archive(t, dir("usr"), setuid, caps, owned, link("usr/again", "usr/owned"), symlink("l", "/etc/passwd"), dir("tmp")), all)
	work, remove, err := s.workspace()
	if err != nil {
		t.Fatal(err)
	}
	defer remove()
	sum, size, err := pack(t.Context(), tr, filepath.Join(work, imageName))
	if err != nil {
		t.Fatal(err)
	}
	return must(t)(s.commit(t.Context(), r, record{
		Info:   Info{Reference: r.Reference(), Digest: digestOf(t, tr, r.Config), SizeBytes: size, Config: r.Config},
		Format: "squashfs", ImageSHA256: sum,
	}, work))
}

// loops counts the loop devices over files below dir.
func loops(t testing.TB, dir string) int {
	t.Helper()
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	n := 0
	for _, b := range backing {
		if c, err := os.ReadFile(b); err == nil && strings.HasPrefix(string(c), dir) {
			n++
		}
	}
	return n
}

func TestMountIsSharedReadOnlyAndGoesAway(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	info := smallTree(t, s, tiny())
	dirs := make([]string, 8)
	var wg sync.WaitGroup
	for i := range dirs {
		wg.Go(func() {
			var err error
			if dirs[i], err = s.Mount(t.Context(), info.Digest); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, d := range dirs {
		if d != dirs[0] || d == "" {
			t.Fatalf("directories %v", dirs)
		}
	}
	at := dirs[0]
	if m, err := mountsAt(at); err != nil || len(m) != 1 {
		t.Fatalf("mounts %v, %v", m, err)
	}
	if n := loops(t, s.o.Dir); n != 1 {
		t.Errorf("%d loop devices", n)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(at, &fs); err != nil || fs.Flags&(unix.ST_RDONLY|unix.ST_NOSUID|unix.ST_NODEV) != unix.ST_RDONLY|unix.ST_NOSUID|unix.ST_NODEV {
		t.Errorf("flags %#x, %v", fs.Flags, err)
	}
	// The mode is what a guest kernel needs to see.
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(at, "usr/sudo"), &st); err != nil || st.Mode&0o7777 != 0o4755 {
		t.Errorf("mode %o, %v", st.Mode, err)
	}
	if err := unix.Stat(filepath.Join(at, "usr/again"), &st); err != nil || st.Uid != 1000 || st.Gid != 1000 || st.Nlink != 2 || st.Mtim.Sec != epoch.Unix() {
		t.Errorf("%+v, %v", st, err)
	}
	mark := make([]byte, 16)
	if n, err := unix.Getxattr(filepath.Join(at, "usr/ping"), "user.mark", mark); err != nil || string(mark[:n]) != "a\x00b" {
		t.Errorf("attribute %q, %v", mark[:max(n, 0)], err)
	}
	if err := os.WriteFile(filepath.Join(at, "tmp", "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing: %v", err)
	}

	// After a restart of our process the mount is found, not made again.
	other, err := Open(Options{Dir: s.o.Dir, RunDir: s.o.RunDir, Log: s.o.Log})
	if err != nil {
		t.Fatal(err)
	}
	if d, err := other.Mount(t.Context(), info.Digest); err != nil || d != at || loops(t, s.o.Dir) != 1 {
		t.Errorf("again: %s %v, %d loop devices", d, err, loops(t, s.o.Dir))
	}

	// An overlay on it keeps working when the mount goes.
	over := filepath.Join(t.TempDir(), "over")
	upper := t.TempDir()
	for _, d := range []string{over, upper + "/u", upper + "/w"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("overlay", over, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s/u,workdir=%s/w", at, upper, upper)); err != nil {
		t.Fatal(err)
	}
	unmounted := false
	defer func() {
		if !unmounted {
			unix.Unmount(over, unix.MNT_DETACH)
		}
	}()
	if err := s.Delete(info.Digest); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(over, "usr/owned")); err != nil || string(b) != "x" {
		t.Errorf("overlay after Delete: %q %v", b, err)
	}
	if err := unix.Unmount(over, 0); err != nil {
		t.Fatal(err)
	}
	unmounted = true
	if n := loops(t, s.o.Dir); n != 0 {
		t.Errorf("%d loop devices are left", n)
	}
	if _, err := os.Stat(at); !os.IsNotExist(err) {
		t.Errorf("the mount point is left: %v", err)
	}
	if err := s.Unmount(info.Digest); err != nil {
		t.Errorf("unmounting what is not mounted: %v", err)
	}
	if _, err := s.Mount(t.Context(), info.Digest); !errors.Is(err, ErrNotFound) {
		t.Errorf("mounting what is deleted: %v", err)
	}
}

func TestMountReplacesWhatIsNotTheTemplate(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	info := smallTree(t, s, tiny())
	at := s.target(hexOf(info.Digest))
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Mount(t.Context(), info.Digest); err != nil {
		t.Fatal(err)
	}
	if m, err := mountsAt(at); err != nil || len(m) != 1 {
		t.Errorf("mounts %v, %v", m, err)
	}
	if _, err := os.Stat(filepath.Join(at, "usr/sudo")); err != nil {
		t.Error(err)
	}
	if err := s.Unmount(info.Digest); err != nil {
		t.Error(err)
	}
}

func TestMountRefusesAnImageThatChanged(t *testing.T) {
	needRoot(t)
	s := openStore(t, t.TempDir())
	info := smallTree(t, s, tiny())
	if _, err := s.Mount(t.Context(), info.Digest); err != nil {
		t.Fatal(err)
	}
	if err := s.Unmount(info.Digest); err != nil {
		t.Fatal(err)
	}
	path := s.image(hexOf(info.Digest))
	b := readAll(t, path)
	b[len(b)/2] ^= 1
	if err := os.WriteFile(path, b, 0o400); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Mount(t.Context(), info.Digest); !errors.Is(err, ErrCorrupt) {
		t.Errorf("one flipped bit: error %v", err)
	}
	// A link to elsewhere is not followed.
	if err := errors.Join(os.Remove(path), os.Symlink("/etc/passwd", path)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Mount(t.Context(), info.Digest); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a symbolic link: error %v", err)
	}
	if n := loops(t, s.o.Dir); n != 0 {
		t.Errorf("%d loop devices are left", n)
	}
}
