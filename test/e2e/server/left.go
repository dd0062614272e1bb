package server

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/space-platform/space/internal/cgroup"
	"github.com/space-platform/space/internal/disk"
)

// CgroupParent is the control group that the host room makes for a data
// directory.
func CgroupParent(data string) string {
	sum := sha256.Sum256([]byte(data))
	return "space-" + hex.EncodeToString(sum[:6])
}

// Processes are the host processes whose command line holds text, by pid.
func Processes(text string) map[int]string {
	out := map[int]string{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		b, err := os.ReadFile(filepath.Join(d, "cmdline"))
		if err != nil || !bytes.Contains(b, []byte(text)) {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(d))
		if pid != os.Getpid() {
			out[pid] = string(bytes.ReplaceAll(b, []byte{0}, []byte{' '}))
		}
	}
	return out
}

// Left lists what the server has on the host that names a machine: processes,
// mounts, loop devices, control groups, namespaces, sockets, directories. With
// an id only of that machine; without one also what the server itself holds.
func (s *Server) Left(id string) []string {
	var left []string
	see := func(kind, what string) {
		if id == "" || strings.Contains(what, id) {
			left = append(left, kind+" "+what)
		}
	}
	note := func(err error) {
		if err != nil {
			left = append(left, err.Error())
		}
	}
	for _, dir := range []string{s.Layout.Run, s.Layout.Data} {
		for pid, line := range Processes(dir) {
			see("process", fmt.Sprintf("%d %s", pid, line))
		}
		mounts, err := disk.Mounts(dir)
		note(err)
		for _, m := range mounts {
			see("mount", m)
		}
		loops, err := disk.Loops(dir)
		note(err)
		for _, l := range loops {
			see("loop device", l.Device+" of "+l.Backing)
		}
	}
	for _, pattern := range []string{"*/", ""} {
		groups, _ := filepath.Glob(filepath.Join(cgroup.DefaultRoot, pattern+CgroupParent(s.Layout.Data)))
		for _, g := range groups {
			_ = filepath.WalkDir(g, func(p string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					see("control group", p)
				}
				return nil // groups vanish while one walks
			})
		}
	}
	_ = filepath.WalkDir(s.Layout.Run, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil
		case d.IsDir() && p != s.Layout.Run && Mountpoint(p):
			return fs.SkipDir // told above; who walks in it keeps it from being unmounted
		case d.Type()&fs.ModeSocket != 0:
			see("socket", p)
		case id != "" && strings.Contains(p, id):
			see("file", p)
		case id == "" && strings.Contains(filepath.Dir(p), "/netns"):
			see("namespace", p)
		}
		return nil
	})
	machines, err := os.ReadDir(filepath.Join(s.Layout.Host(), "gvisor", "machines"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		note(err)
	}
	for _, m := range machines {
		see("directory", filepath.Join(s.Layout.Host(), "gvisor", "machines", m.Name()))
	}
	return left
}

// Mountpoint reports whether another file system begins at dir.
func Mountpoint(dir string) bool {
	var a, b syscall.Stat_t
	return syscall.Lstat(dir, &a) == nil && syscall.Lstat(filepath.Dir(dir), &b) == nil && a.Dev != b.Dev
}

// Gone waits until nothing is Left of id, at most d, and gives what stays. What
// the kernel takes away after its last user may need a moment.
func (s *Server) Gone(id string, d time.Duration) []string {
	for end := time.Now().Add(d); ; time.Sleep(20 * time.Millisecond) {
		left := s.Left(id)
		if len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}
