package netns

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// inside runs f in the namespace at path.
func inside(t *testing.T, path string, f func() error) {
	t.Helper()
	ns, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if err := inThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	}); err != nil {
		t.Fatal(err)
	}
}

func TestLife(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes network namespaces")
	}
	path := filepath.Join(t.TempDir(), "n")
	t.Cleanup(func() { _ = Remove(path) })
	for range 2 {
		if err := Create(path); err != nil {
			t.Fatal(err)
		}
	}
	var before, after unix.Stat_t
	if err := unix.Stat(path, &before); err != nil {
		t.Fatal(err)
	}
	looped := func() error {
		links, err := net.Interfaces()
		if err != nil || len(links) != 1 || links[0].Name != "lo" {
			return errors.Join(err, errors.New("not loopback alone"))
		}
		addrs, err := links[0].Addrs()
		if err != nil || len(addrs) == 0 || addrs[0].String() != "127.0.0.1/8" {
			return errors.Join(err, errors.New("loopback has no address"))
		}
		return nil
	}
	inside(t, path, looped)
	// What a sandbox takes when it starts.
	inside(t, path, func() error {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		ifr, err := unix.NewIfreq("lo")
		if err != nil {
			return err
		}
		if err := ifr.SetInet4Addr([]byte{0, 0, 0, 0}); err != nil {
			return err
		}
		return unix.IoctlIfreq(s, unix.SIOCSIFADDR, ifr)
	})
	if err := Reset(path); err != nil {
		t.Fatal(err)
	}
	inside(t, path, looped)
	if err := unix.Stat(path, &after); err != nil || before.Ino != after.Ino {
		t.Errorf("it is another namespace: %v", err)
	}
	for range 2 {
		if err := Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
}

// A name that a killed process left without its namespace is used again.
func TestHalfMade(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes network namespaces")
	}
	path := filepath.Join(t.TempDir(), "n")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Create(path); err != nil {
		t.Fatal(err)
	}
	if ok, err := exists(path); !ok || err != nil {
		t.Errorf("not a namespace: %v", err)
	}
	if err := Remove(path); err != nil {
		t.Fatal(err)
	}
}
