package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// attachTries bounds how often another process may take the free loop device
// between our asking for it and our using it.
const attachTries = 64

// attach binds image to a loop device that detaches itself with its last user.
// The returned file is that last user until something is mounted.
//
// A device that still has the image is used again: a mount may live on for a
// moment where a process that was just starting has a copy of our mounts, and two
// devices with one image would be two file systems that destroy each other.
func attach(image string) (*os.File, error) {
	img, err := os.OpenFile(image, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("disk: %w", err)
	}
	defer img.Close()
	if dev, err := attached(image, img); dev != nil || err != nil {
		return dev, err
	}
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("disk: %w", err)
	}
	defer ctl.Close()
	var last error
	for range attachTries {
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("disk: free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("disk: %w", err)
		}
		conf := unix.LoopConfig{Fd: uint32(img.Fd()), Size: 4096}
		conf.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		copy(conf.Info.File_name[:len(conf.Info.File_name)-1], image)
		if err := unix.IoctlLoopConfigure(int(dev.Fd()), &conf); err == nil {
			return dev, nil
		} else {
			last = err
		}
		dev.Close()
		if !errors.Is(last, unix.EBUSY) {
			break
		}
	}
	return nil, fmt.Errorf("disk: attach loop device: %w", last)
}

// attached finds a device that has the image; nil when there is none.
func attached(image string, img *os.File) (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(img.Fd()), &st); err != nil {
		return nil, fmt.Errorf("disk: %w", err)
	}
	loops, err := Loops(image)
	if err != nil {
		return nil, err
	}
	for _, l := range loops {
		dev, err := os.OpenFile(l.Device, os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("disk: %w", err)
		}
		// From here on it cannot detach itself. It may have, before.
		info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		if err == nil && info.Inode == st.Ino {
			return dev, nil
		}
		dev.Close()
	}
	return nil, nil
}

// Released waits until no loop device has image any more, or ctx ends; it
// reports which.
func Released(ctx context.Context, image string) bool {
	for wait := 200 * time.Microsecond; ; wait = min(2*wait, 20*time.Millisecond) {
		if loops, err := Loops(image); err != nil || len(loops) == 0 {
			return err == nil
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return false
		case <-t.C:
		}
	}
}

// Loop is a loop device in use.
type Loop struct {
	Device string // "/dev/loop3"
	// Backing is the path of the image as it was when it was attached.
	Backing string
	// Deleted tells that the image is not there any more.
	Deleted bool
}

// Loops lists the loop devices whose image is, or was, under dir.
func Loops(dir string) ([]Loop, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, fmt.Errorf("disk: %w", err)
	}
	var out []Loop
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // detached meanwhile
		}
		backing, deleted := strings.CutSuffix(strings.TrimSuffix(string(b), "\n"), " (deleted)")
		if under(backing, dir) {
			name := strings.Split(f, "/")[3]
			out = append(out, Loop{Device: "/dev/" + name, Backing: backing, Deleted: deleted})
		}
	}
	return out, nil
}

// Detach frees a loop device: at once, or when its last user goes.
func Detach(device string) error {
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	defer f.Close()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("disk: detach %s: %w", device, err)
	}
	return nil
}

func under(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
