// Package doctor looks at a machine and says whether SPACE can run on it, and
// what to do where it cannot. It changes nothing.
package doctor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/layout"
	"github.com/space-platform/space/internal/privilege"
)

// Verdict of one check.
type Verdict string

// The verdicts. Only Bad keeps SPACE from running.
const (
	Good Verdict = "ok"
	Note Verdict = "note"
	Bad  Verdict = "bad"
)

// Finding is the answer of one check.
type Finding struct {
	Check   string  `json:"check"`
	Verdict Verdict `json:"verdict"`
	Found   string  `json:"found"`
	Remedy  string  `json:"remedy,omitempty"`
}

// Examine runs every check.
func Examine(l layout.Layout) []Finding {
	return []Finding{root(), kernel(), filesystems(), loops(), groups(), user(), tools(), kvm(), space(l), server(l)}
}

// OK reports whether nothing is Bad.
func OK(fs []Finding) bool {
	for _, f := range fs {
		if f.Verdict == Bad {
			return false
		}
	}
	return true
}

func root() Finding {
	if os.Geteuid() == 0 {
		return Finding{"root", Good, "running as root", ""}
	}
	return Finding{"root", Bad, fmt.Sprintf("running as uid %d", os.Geteuid()), "run with sudo: the host room needs root, nothing else does"}
}

func kernel() Finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Finding{"kernel", Bad, err.Error(), "use a Linux kernel"}
	}
	release := unix.ByteSliceToString(u.Release[:])
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major < 5 || major == 5 && minor < 10 {
		return Finding{"kernel", Bad, release, "use Linux 5.10 or newer"}
	}
	return Finding{"kernel", Good, release, ""}
}

func filesystems() Finding {
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return Finding{"file systems", Bad, err.Error(), "mount /proc"}
	}
	var missing []string
	for _, want := range []string{"overlay", "squashfs", "ext4"} {
		if !strings.Contains(string(b), "\t"+want+"\n") {
			missing = append(missing, want)
		}
	}
	if len(missing) > 0 {
		return Finding{"file systems", Bad, "the kernel lacks " + strings.Join(missing, ", "), "modprobe " + strings.Join(missing, " ")}
	}
	return Finding{"file systems", Good, "overlay, squashfs, ext4", ""}
}

func loops() Finding {
	if f, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0); err != nil {
		return Finding{"loop devices", Bad, err.Error(), "modprobe loop; sandboxes keep their files on loop-mounted images"}
	} else {
		_ = f.Close()
	}
	return Finding{"loop devices", Good, "/dev/loop-control opens", ""}
}

func groups() Finding {
	const dir = "/sys/fs/cgroup/"
	if b, err := os.ReadFile(dir + "cgroup.controllers"); err == nil {
		for _, want := range []string{"memory", "cpu", "pids"} {
			if !strings.Contains(" "+strings.TrimSpace(string(b))+" ", " "+want+" ") {
				return Finding{"control groups", Bad, "cgroup v2 without the controller " + want, "boot with the controller enabled"}
			}
		}
		return Finding{"control groups", Good, "cgroup v2", ""}
	}
	var missing []string
	for _, want := range []string{"memory", "cpu", "pids"} {
		if _, err := os.Stat(dir + want + "/cgroup.procs"); err != nil {
			missing = append(missing, want)
		}
	}
	if len(missing) > 0 {
		return Finding{"control groups", Bad, "no " + strings.Join(missing, ", "), "mount cgroup v2, or the v1 hierarchies memory, cpu and pids, at /sys/fs/cgroup"}
	}
	return Finding{"control groups", Good, "cgroup v1", ""}
}

func user() Finding {
	uid, gid, err := privilege.Lookup()
	if err != nil {
		return Finding{"user space", Bad, err.Error(), "useradd --system --no-create-home --shell /usr/sbin/nologin space"}
	}
	return Finding{"user space", Good, fmt.Sprintf("uid %d, gid %d", uid, gid), ""}
}

func tools() Finding {
	var missing []string
	for _, t := range []string{"mmdebstrap", "tar2sqfs", "mkfs.ext4"} {
		if _, err := exec.LookPath(t); err != nil {
			missing = append(missing, t)
		}
	}
	if len(missing) > 0 {
		return Finding{"tools", Bad, "missing: " + strings.Join(missing, ", "), "apt-get install --no-install-recommends mmdebstrap squashfs-tools-ng e2fsprogs"}
	}
	return Finding{"tools", Good, "mmdebstrap, tar2sqfs, mkfs.ext4", ""}
}

func kvm() Finding {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return Finding{"hardware virtualisation", Note, "no /dev/kvm: sandboxes get the isolation class userkernel (gVisor)", ""}
	}
	_ = f.Close()
	return Finding{"hardware virtualisation", Note, "/dev/kvm opens; it is not used: this version runs sandboxes on gVisor only (class userkernel)", ""}
}

func space(l layout.Layout) Finding {
	dir := l.Data
	for {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if err == nil {
			free := int64(st.Bavail) * st.Bsize >> 30
			f := Finding{"disk", Good, fmt.Sprintf("%d GiB free for %s", free, l.Data), ""}
			if free < 5 {
				f.Verdict, f.Remedy = Note, "sandboxes and templates want at least 5 GiB"
			}
			return f
		}
		if !errors.Is(err, unix.ENOENT) || dir == "/" || dir == "." {
			return Finding{"disk", Bad, err.Error(), "name another --data-dir"}
		}
		if i := strings.LastIndexByte(dir, '/'); i > 0 {
			dir = dir[:i]
		} else {
			dir = "/"
		}
	}
}

func server(l layout.Layout) Finding {
	if pid := layout.Holder(l.HostLock()); pid > 0 {
		e, err := l.ReadEndpoint()
		if err != nil {
			return Finding{"server", Note, fmt.Sprintf("starting (pid %d)", pid), ""}
		}
		return Finding{"server", Good, fmt.Sprintf("running (pid %d) at %s", pid, e.API), ""}
	}
	return Finding{"server", Note, "none is running here", "start one with `space up`"}
}
