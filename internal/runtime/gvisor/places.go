package gvisor

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/sandbox"
)

// keepPlaces sees to it that what we mount into a machine has its place: a
// guest may have moved the places away, or put links there, and must start all
// the same. It also keeps /tmp on the disk: runsc would cover an empty or missing
// one with a file system in memory.
//
// The tree is the guest's. Every step is relative to an open directory and
// follows no symbolic link, so that nothing outside of it is ever touched.
func keepPlaces(rootfs string) error {
	root, err := os.Open(rootfs)
	if err != nil {
		return fmt.Errorf("gvisor: %w", err)
	}
	defer root.Close()
	fd := int(root.Fd())
	for _, name := range []string{"proc", "sys", "dev", guestDir[1:]} {
		if err := place(fd, name, true); err != nil {
			return err
		}
	}
	own, err := openBeneath(fd, guestDir[1:])
	if err != nil {
		return fmt.Errorf("gvisor: open %s: %w", guestDir, err)
	}
	defer own.Close()
	if err := place(int(own.Fd()), guestDaemon[len(guestDir)+1:], false); err != nil {
		return err
	}
	if err := place(int(own.Fd()), guestChannel[len(guestDir)+1:], true); err != nil {
		return err
	}
	return keepTmp(fd)
}

// place makes name in dir a directory, or else a file, and moves aside what is
// there and is not one.
func place(dir int, name string, directory bool) error {
	var st unix.Stat_t
	err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	want := uint32(unix.S_IFREG)
	if directory {
		want = unix.S_IFDIR
	}
	switch {
	case err == nil && st.Mode&unix.S_IFMT == want:
		return nil
	case err == nil:
		err = unix.Renameat(dir, name, dir, name+".moved-"+sandbox.Random(8))
	case errors.Is(err, unix.ENOENT):
		err = nil
	}
	if err == nil && directory {
		err = unix.Mkdirat(dir, name, 0o755)
	} else if err == nil {
		var fd int
		if fd, err = unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o555); err == nil {
			err = unix.Close(fd)
		}
	}
	if err != nil {
		return hostRoom(fmt.Errorf("gvisor: place of a mount: %w", err))
	}
	return nil
}

func openBeneath(dir int, name string) (*os.File, error) {
	fd, err := unix.Openat2(dir, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// keepTmp makes /tmp when it is missing, and puts an entry in when it is empty.
// What is not a directory is left alone: so does runsc.
func keepTmp(root int) error {
	dir, err := openBeneath(root, "tmp")
	if errors.Is(err, unix.ENOENT) {
		if err := unix.Mkdirat(root, "tmp", 0o777); err != nil {
			return hostRoom(fmt.Errorf("gvisor: make /tmp: %w", err))
		}
		if dir, err = openBeneath(root, "tmp"); err == nil {
			err = dir.Chmod(0o777 | os.ModeSticky)
		}
	}
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("gvisor: open /tmp: %w", err)
	}
	defer dir.Close()
	if _, err := dir.Readdirnames(1); err == nil || !errors.Is(err, io.EOF) {
		return nil
	}
	err = unix.Mkdirat(int(dir.Fd()), ".space", 0o700)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return nil // the guest filled its disk; it starts all the same
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("gvisor: keep /tmp: %w", err)
	}
	return nil
}
