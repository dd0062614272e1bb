package template

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// stamp identifies an unchanged file: any write or replacement changes it.
type stamp struct {
	dev, ino     uint64
	size         int64
	mtime, ctime unix.Timespec
}

func stampOf(f *os.File) (stamp, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return stamp{}, err
	}
	return stamp{dev: uint64(st.Dev), ino: st.Ino, size: st.Size, mtime: st.Mtim, ctime: st.Ctim}, nil
}

// openImage opens the image of a record after its checksum was found right. The
// checksum is read once in the life of this Store, and again when the file's
// inode, size or times have changed since.
func (s *Store) openImage(rec record) (*os.File, error) {
	hex := hexOf(rec.Digest)
	f, err := os.OpenFile(s.image(hex), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: image of %s: %w", ErrCorrupt, rec.Digest, err)
	}
	now, err := stampOf(f)
	if err == nil && s.checked[hex] == now {
		return f, nil
	}
	delete(s.checked, hex)
	sum, size, hashErr := hashFile(f)
	if err := errors.Join(err, hashErr); err != nil {
		f.Close()
		return nil, err
	}
	if sum != rec.ImageSHA256 || size != rec.SizeBytes {
		f.Close()
		return nil, fmt.Errorf("%w: image of %s has checksum %s, its record says %s", ErrCorrupt, rec.Digest, sum, rec.ImageSHA256)
	}
	s.checked[hex] = now
	return f, nil
}

// intact reports whether the image of a record is what the record says.
func (s *Store) intact(rec record) bool {
	s.mountMu.Lock()
	defer s.mountMu.Unlock()
	f, err := s.openImage(rec)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

func (s *Store) target(hex string) string { return filepath.Join(s.o.RunDir, "templates", hex) }

// Mount makes the file system of a template available, read-only, and returns
// its directory, to be used as the lower layer of overlays. One mount serves all
// sandboxes; it stays until Unmount or a reboot, also when this process dies,
// and mounting again is quick and gives the same directory.
//
// The mount is nosuid and nodev for the host; the set-id bits themselves stay
// visible, so that a guest kernel honours them inside its machine. Errors:
// ErrNotFound, ErrCorrupt.
func (s *Store) Mount(ctx context.Context, digest string) (dir string, err error) {
	if !digestPattern.MatchString(digest) {
		return "", fmt.Errorf("%w digest %.200q", ErrInvalid, digest)
	}
	rec, err := s.record(digest)
	if err != nil {
		return "", err
	}
	s.mountMu.Lock()
	defer s.mountMu.Unlock()
	image, err := s.openImage(rec)
	if err != nil {
		return "", err
	}
	defer image.Close()
	dir = s.target(hexOf(digest))
	mounts, err := mountsAt(dir)
	if err != nil {
		return "", err
	}
	if len(mounts) == 1 && s.ours(mounts[0], image) {
		return dir, nil
	}
	// Something else is there: of an image that was replaced, or not of us.
	for range mounts {
		if err := unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return "", fmt.Errorf("template: cannot clear the mount point: %w", err)
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("template: %w", err)
	}
	loop, err := s.attach(ctx, image)
	if err != nil {
		return "", err
	}
	defer loop.Close() // the mount keeps the device; without it, it frees itself
	if err := unix.Mount(loop.Name(), dir, "squashfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, ""); err != nil {
		return "", fmt.Errorf("template: cannot mount %s: %w", digest, err)
	}
	return dir, nil
}

// Unmount undoes Mount. Overlays made on it keep their view. It is no error
// when nothing is mounted.
func (s *Store) Unmount(digest string) error {
	if !digestPattern.MatchString(digest) {
		return fmt.Errorf("%w digest %.200q", ErrInvalid, digest)
	}
	s.mountMu.Lock()
	defer s.mountMu.Unlock()
	dir := s.target(hexOf(digest))
	mounts, err := mountsAt(dir)
	if err != nil {
		return err
	}
	for range mounts {
		err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) { // somebody looks around in it; the last to leave ends it
			err = unix.Unmount(dir, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		if err != nil {
			return fmt.Errorf("template: cannot unmount %s: %w", digest, err)
		}
	}
	if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("template: %w", err)
	}
	return nil
}

// mountsAt lists the devices ("major:minor") mounted exactly at dir, the lowest first.
func mountsAt(dir string) ([]string, error) {
	resolved, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	var out []string
	for line := range strings.Lines(string(info)) {
		f := strings.Fields(line)
		if len(f) > 4 && unescape(f[4]) == resolved {
			out = append(out, f[2])
		}
	}
	return out, nil
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// ours reports whether the mounted device is a read-only loop device over the
// very file that image is.
func (s *Store) ours(device string, image *os.File) bool {
	name, err := os.Readlink("/sys/dev/block/" + device)
	if err != nil {
		return false
	}
	loop, err := os.Open("/dev/" + filepath.Base(name))
	if err != nil {
		return false
	}
	defer loop.Close()
	status, err := unix.IoctlLoopGetStatus64(int(loop.Fd()))
	if err != nil {
		return false
	}
	want, err := stampOf(image)
	return err == nil && status.Inode == want.ino && sameDevice(status.Device, want.dev) && status.Flags&unix.LO_FLAGS_READ_ONLY != 0
}

// sameDevice compares the kernel's way to write a device number in a loop
// status with stat's.
func sameDevice(loop, stat uint64) bool {
	return loop == stat || loop == uint64(unix.Major(stat))<<20|uint64(unix.Minor(stat)) ||
		loop == uint64(unix.Major(stat))<<8|uint64(unix.Minor(stat))
}

// attach makes a free loop device show the image, read-only. The device frees
// itself with its last user.
func (s *Store) attach(ctx context.Context, image *os.File) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: no loop devices: %w", ErrHost, err)
	}
	defer control.Close()
	// Another process may take the device between the two calls: ask again.
	for try := 0; ; try++ {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("%w: no free loop device: %w", ErrHost, err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDONLY, 0)
		if err == nil {
			err = unix.IoctlLoopConfigure(int(dev.Fd()), &unix.LoopConfig{
				Fd:   uint32(image.Fd()),
				Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR},
			})
			if err == nil {
				return dev, nil
			}
			dev.Close()
		}
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, os.ErrNotExist) || try > 200 {
			return nil, fmt.Errorf("template: loop device: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.o.Clock.After(10 * time.Millisecond):
		}
	}
}
