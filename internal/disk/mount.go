package disk

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// MountImage mounts an image that only Make and this kernel have written at
// target, which must be a directory. It does nothing when target is a mount.
//
// The guest never has the block device, so the file system's structure is ours;
// set-uid bits and device files that a guest made have no effect on the host.
func MountImage(image, target string) error {
	if mounted, err := Mounted(target); err != nil || mounted {
		return err
	}
	dev, err := attach(image)
	if err != nil {
		return err
	}
	defer dev.Close()
	err = unix.Mount(dev.Name(), target, "ext4", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, "errors=remount-ro,init_itable=0")
	if err != nil {
		return fmt.Errorf("disk: mount image: %w", err)
	}
	return nil
}

// Overlay mounts lower (read-only) and the directories "upper" and "work" of
// disk at target. It does nothing when target is a mount.
//
// Features that store trust in extended attributes of the upper layer are off,
// but for redirects, which a guest cannot forge: it writes through the overlay,
// and that hides and refuses the overlay's own attributes.
func Overlay(lower, diskDir, target string) error {
	if mounted, err := Mounted(target); err != nil || mounted {
		return err
	}
	for _, p := range []string{lower, diskDir, target} {
		if !filepath.IsAbs(p) || strings.ContainsAny(p, ",:\\\" \n") {
			return fmt.Errorf("disk: %q cannot be a path of an overlay", p)
		}
	}
	upper, work := filepath.Join(diskDir, "upper"), filepath.Join(diskDir, "work")
	for _, d := range []string{upper, work} {
		switch err := os.Mkdir(d, 0o755); {
		case errors.Is(err, fs.ErrExist): // its mode is the guest's by now
		case err != nil:
			return noSpace(fmt.Errorf("disk: %w", err))
		default:
			// upper's mode is that of the guest's /, whatever our umask is.
			if err := os.Chmod(d, 0o755); err != nil {
				return fmt.Errorf("disk: %w", err)
			}
		}
	}
	data := "lowerdir=" + lower + ",upperdir=" + upper + ",workdir=" + work +
		",redirect_dir=on,index=off,metacopy=off,xino=off"
	if err := unix.Mount("overlay", target, "overlay", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, data); err != nil {
		return noSpace(fmt.Errorf("disk: mount overlay: %w", err))
	}
	return nil
}

// Unmount takes away every mount at target; nil when there is none. Only when
// something still uses it, it is taken out of the tree at once and freed when
// that user ends.
func Unmount(target string) error {
	for {
		err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		switch {
		case err == nil:
			continue // there may be another below
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		case errors.Is(err, unix.EBUSY):
			if err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
				return fmt.Errorf("disk: unmount: %w", err)
			}
		default:
			return fmt.Errorf("disk: unmount: %w", err)
		}
	}
}

// Mounted reports whether target itself is the root of a mount.
func Mounted(target string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, target, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("disk: %w", err)
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// Mounts lists the mount points at and under dir, innermost first.
func Mounts(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("disk: %w", err)
	}
	defer f.Close()
	var out []string
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		fields := strings.Fields(sc.Text())
		if len(fields) < 5 {
			continue
		}
		if p := unescape(fields[4]); under(p, dir) {
			out = append([]string{p}, out...)
		}
	}
	return out, sc.Err()
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}
