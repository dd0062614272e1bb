// Package netns makes named network namespaces that are born closed: loopback
// and nothing else.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Create makes a network namespace that lives at path (an empty file that the
// namespace is mounted on), or leaves an existing one alone.
func Create(path string) error {
	if ok, err := exists(path); err != nil || ok {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("netns: %w", err)
	}
	f.Close()
	return inThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("netns: unshare: %w", err)
		}
		if err := cycleLoopback(); err != nil {
			return err
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("netns: keep: %w", err)
		}
		return nil
	})
}

// Reset gives the loopback interface of the namespace at path its addresses
// back: a sandbox takes over the addresses of its interfaces when it starts.
func Reset(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("netns: %w", err)
	}
	defer f.Close()
	return inThread(func() error {
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("netns: enter: %w", err)
		}
		return cycleLoopback()
	})
}

// Remove takes away the namespace's name; it ends with its last process. Nil
// when there is none.
func Remove(path string) error {
	for {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		if err == nil {
			continue
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		return fmt.Errorf("netns: unmount: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("netns: %w", err)
	}
	return nil
}

func exists(path string) (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("netns: %w", err)
	}
	return st.Type == unix.NSFS_MAGIC, nil
}

// cycleLoopback takes lo down and up; the kernel then gives it 127.0.0.1 and
// ::1 when they are missing.
func cycleLoopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("netns: %w", err)
	}
	defer unix.Close(s)
	for _, flags := range []uint16{0, unix.IFF_UP} {
		ifr, err := unix.NewIfreq("lo")
		if err != nil {
			return fmt.Errorf("netns: %w", err)
		}
		ifr.SetUint16(flags)
		if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr); err != nil {
			return fmt.Errorf("netns: loopback: %w", err)
		}
	}
	return nil
}

// inThread runs f on a thread of its own, which ends with f, so that no other
// goroutine ever runs in another namespace.
func inThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread is thrown away
		done <- f()
	}()
	return <-done
}
