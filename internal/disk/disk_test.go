package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts")
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestMake(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	for _, size := range []int64{MinBytes, 100<<20 + 123, 1 << 30, 64 << 30} {
		path := filepath.Join(dir, "disk.img")
		ok(t, Make(ctx, path, size))
		st, err := os.Stat(path)
		ok(t, err)
		if st.Size() != size&^4095 || st.Mode().Perm() != 0o600 {
			t.Errorf("%d bytes: size %d mode %v", size, st.Size(), st.Mode())
		}
		used, err := Allocated(path)
		ok(t, err)
		if used > 8<<20 {
			t.Errorf("an image of %d bytes takes %d", size, used)
		}
		ok(t, Make(ctx, path, size)) // a finished one is left alone
		again, err := os.Stat(path)
		ok(t, err)
		if again.ModTime() != st.ModTime() {
			t.Error("a finished image was made again")
		}
		ok(t, os.Remove(path))
	}
	if err := Make(ctx, filepath.Join(dir, "small"), MinBytes-1); err == nil {
		t.Error("too small an image was made")
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if err := Make(ended, filepath.Join(dir, "late"), MinBytes); !errors.Is(err, context.Canceled) {
		t.Errorf("ended context: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "late")); !errors.Is(err, os.ErrNotExist) {
		t.Error("a half-made image has the final name")
	}
}

func TestFullHost(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	ok(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=32k"))
	defer Unmount(dir)
	if err := Make(context.Background(), filepath.Join(dir, "disk.img"), MinBytes); !errors.Is(err, ErrNoSpace) {
		t.Errorf("a full host: %v", err)
	}
}

func TestMounts(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	image, target, root, lower := filepath.Join(dir, "disk.img"), filepath.Join(dir, "disk"), filepath.Join(dir, "root"), filepath.Join(dir, "lower")
	for _, d := range []string{target, root, lower} {
		ok(t, os.Mkdir(d, 0o755))
	}
	old := unix.Umask(0o077) // the guest's / is for everybody, whatever our umask is
	defer unix.Umask(old)
	ok(t, os.WriteFile(filepath.Join(lower, "old"), []byte("template"), 0o644))
	ok(t, os.Mkdir(filepath.Join(lower, "dir"), 0o755))
	ok(t, Make(context.Background(), image, MinBytes))
	t.Cleanup(func() { _, _ = Unmount(root), Unmount(target) })
	mount := func() {
		t.Helper()
		for range 2 { // a second time does nothing
			ok(t, MountImage(image, target))
			ok(t, Overlay(lower, target, root))
		}
	}
	mount()
	if list, err := Mounts(dir); err != nil || len(list) != 2 || list[0] != root {
		t.Errorf("mounts %q %v", list, err)
	}
	loops, err := Loops(dir)
	if err != nil || len(loops) != 1 || loops[0].Backing != image || loops[0].Deleted {
		t.Errorf("loops %+v %v", loops, err)
	}
	if fi, err := os.Stat(root); err != nil || fi.Mode().Perm() != 0o755 {
		t.Errorf("the guest's / has mode %v %v", fi.Mode(), err)
	}
	// Set-uid programs and devices that a guest made do nothing on the host.
	var st unix.Statfs_t
	for _, m := range []string{target, root} {
		ok(t, unix.Statfs(m, &st))
		if st.Flags&unix.MS_NOSUID == 0 || st.Flags&unix.MS_NODEV == 0 {
			t.Errorf("%s is not nosuid and nodev", m)
		}
	}
	ok(t, os.WriteFile(filepath.Join(root, "old"), []byte("changed"), 0o644))
	ok(t, os.Rename(filepath.Join(root, "dir"), filepath.Join(root, "moved")))
	// Nobody can forge what the overlay keeps in attributes.
	if err := unix.Setxattr(filepath.Join(root, "moved"), "trusted.overlay.redirect", []byte("/etc"), 0); err == nil {
		b := make([]byte, 64)
		if n, err := unix.Getxattr(filepath.Join(target, "upper", "moved"), "trusted.overlay.redirect", b); err == nil && string(b[:n]) == "/etc" {
			t.Error("a redirect was forged through the overlay")
		}
	}
	ok(t, Sync(target, image))
	ok(t, Unmount(root))
	ok(t, Unmount(target))
	ok(t, Unmount(target))
	ok(t, Sync(target, image)) // nothing is mounted: nothing to do
	// Another process that is just making its mount namespace still holds it.
	soon, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if !Released(soon, image) {
		t.Error("the image is not free after unmount")
	}
	if loops, err := Loops(dir); err != nil || len(loops) != 0 {
		t.Errorf("loops after unmount %+v %v", loops, err)
	}
	if b, err := os.ReadFile(filepath.Join(lower, "old")); err != nil || string(b) != "template" {
		t.Errorf("the template was changed: %q %v", b, err)
	}
	mount()
	if b, err := os.ReadFile(filepath.Join(root, "old")); err != nil || string(b) != "changed" {
		t.Errorf("after mounting again: %q %v", b, err)
	}
	// A busy mount goes from the tree at once and is freed by its last user.
	f, err := os.Open(filepath.Join(root, "old"))
	ok(t, err)
	ok(t, Unmount(root))
	ok(t, Unmount(target))
	if list, err := Mounts(dir); err != nil || len(list) != 0 {
		t.Errorf("mounts %q %v", list, err)
	}
	// While it is, the image has one device and not two.
	ok(t, MountImage(image, target))
	if loops, err = Loops(dir); err != nil || len(loops) != 1 {
		t.Errorf("loops of an image that is mounted again %+v %v", loops, err)
	}
	ok(t, Unmount(target))
	short, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if Released(short, image) {
		t.Error("a busy image is said to be free")
	}
	ok(t, os.Remove(image))
	if loops, err = Loops(dir); err != nil || len(loops) != 1 || !loops[0].Deleted {
		t.Errorf("loops of a busy mount %+v %v", loops, err)
	}
	f.Close()
	long, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if !Released(long, image) {
		t.Error("the device stays after its last user")
	}
}

// A loop device whose process died before mounting it goes by itself.
func TestAttachAlone(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	image := filepath.Join(dir, "disk.img")
	ok(t, Make(context.Background(), image, MinBytes))
	dev, err := attach(image)
	ok(t, err)
	if loops, err := Loops(dir); err != nil || len(loops) != 1 || loops[0].Device != dev.Name() {
		t.Errorf("loops %+v %v", loops, err)
	}
	ok(t, Detach(dev.Name()))
	dev.Close() // what a death does
	if loops, err := Loops(dir); err != nil || len(loops) != 0 {
		t.Errorf("loops %+v %v", loops, err)
	}
}

func TestOverlayRefusesStrangePaths(t *testing.T) {
	for _, bad := range []string{"/a:b", "/a,b", "relative", `/a\b`} {
		if err := Overlay(bad, "/x", "/nonexistent-target"); err == nil || !strings.Contains(err.Error(), "cannot be a path") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
