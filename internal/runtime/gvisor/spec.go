package gvisor

import (
	"encoding/json"
	"fmt"
	"path/filepath"

	"github.com/space-platform/space/internal/runtime"
)

// Fixed places inside the machine. They, the daemon's arguments and the mounts
// are the same for every machine, because a restore compares them.
const (
	guestDir     = "/.space"
	guestDaemon  = guestDir + "/guest"
	guestChannel = guestDir + "/channel"
	socketName   = "host.sock"
	// GuestSocket is where the guest daemon dials the host.
	GuestSocket = guestChannel + "/" + socketName
)

// The parts of an OCI runtime document that runsc reads and we set. Types of
// our own keep the document in one reviewable place and free of surprises.
type (
	document struct {
		Version  string   `json:"ociVersion"`
		Process  process  `json:"process"`
		Root     root     `json:"root"`
		Hostname string   `json:"hostname"`
		Mounts   []mount  `json:"mounts"`
		Linux    linuxDoc `json:"linux"`
	}
	process struct {
		User         user         `json:"user"`
		Args         []string     `json:"args"`
		Cwd          string       `json:"cwd"`
		Env          []string     `json:"env,omitempty"`
		Capabilities capabilities `json:"capabilities"`
		Rlimits      []rlimit     `json:"rlimits"`
		// NoNewPrivileges stays false: sudo is part of a machine.
		NoNewPrivileges bool `json:"noNewPrivileges"`
	}
	user struct {
		UID uint32 `json:"uid"`
		GID uint32 `json:"gid"`
	}
	capabilities struct {
		Bounding  []string `json:"bounding"`
		Effective []string `json:"effective"`
		Permitted []string `json:"permitted"`
	}
	rlimit struct {
		Type string `json:"type"`
		Hard uint64 `json:"hard"`
		Soft uint64 `json:"soft"`
	}
	root struct {
		Path string `json:"path"`
	}
	mount struct {
		Destination string   `json:"destination"`
		Type        string   `json:"type"`
		Source      string   `json:"source"`
		Options     []string `json:"options,omitempty"`
	}
	linuxDoc struct {
		CgroupsPath   string      `json:"cgroupsPath"`
		Resources     resources   `json:"resources"`
		Namespaces    []namespace `json:"namespaces"`
		MaskedPaths   []string    `json:"maskedPaths"`
		ReadonlyPaths []string    `json:"readonlyPaths"`
	}
	namespace struct {
		Type string `json:"type"`
		Path string `json:"path,omitempty"`
	}
	resources struct {
		Memory  memory            `json:"memory"`
		CPU     cpu               `json:"cpu"`
		PIDs    pids              `json:"pids"`
		Unified map[string]string `json:"unified,omitempty"`
	}
	memory struct {
		Limit int64  `json:"limit"`
		Swap  *int64 `json:"swap,omitempty"`
	}
	cpu struct {
		Shares uint64 `json:"shares"`
		Quota  int64  `json:"quota"`
		Period uint64 `json:"period"`
	}
	pids struct {
		Limit int64 `json:"limit"`
	}
)

// caps is what container engines give by default: enough for package managers,
// sudo and servers, nothing that reaches the machine's kernel.
var caps = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

const cpuPeriod = 100_000 // microseconds

// pidsLimit is the hard stop of host tasks. The runtime needs up to two of
// them for a process of the guest, and the soft stop counts per uid, so it
// is far above: reaching it ends the machine.
func pidsLimit(maxProcesses int64) int64 { return 8*maxProcesses + 1024 }

// limits makes the resources of a machine for the host's kind of control groups.
func limits(spec runtime.Spec, v2, swap bool) resources {
	r := spec.Resources
	out := resources{
		Memory: memory{Limit: r.MemoryBytes},
		CPU: cpu{
			Shares: uint64(max(2, r.MilliCPU*1024/1000)),
			Quota:  max(1000, r.MilliCPU*cpuPeriod/1000),
			Period: cpuPeriod,
		},
		PIDs: pids{Limit: pidsLimit(r.MaxProcesses)},
	}
	if swap {
		out.Memory.Swap = &r.MemoryBytes // memory and swap together: no swap
	}
	if v2 {
		// A breach ends the machine as a whole, never some thread of its kernel.
		out.Unified = map[string]string{"memory.oom.group": "1"}
	}
	return out
}

// bundle is where the host keeps what a document names.
type bundle struct {
	root, netns, channel, daemon, cgroup string
	v2, swap                             bool
}

// ociDocument makes the OCI document of spec.
func ociDocument(spec runtime.Spec, b bundle) document {
	n := uint64(spec.Resources.MaxProcesses)
	return document{
		Version: "1.1.0",
		Process: process{
			Args:         []string{guestDaemon},
			Cwd:          "/",
			Capabilities: capabilities{Bounding: caps, Effective: caps, Permitted: caps},
			Rlimits: []rlimit{
				{Type: "RLIMIT_NPROC", Hard: n, Soft: n},
				{Type: "RLIMIT_NOFILE", Hard: 1 << 20, Soft: 1 << 16},
				{Type: "RLIMIT_CORE", Hard: 0, Soft: 0},
			},
		},
		Root:     root{Path: b.root},
		Hostname: string(spec.ID),
		Mounts: []mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777"}},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
			{Destination: guestDaemon, Type: "bind", Source: b.daemon, Options: []string{"bind", "ro", "nosuid", "nodev"}},
			{Destination: guestChannel, Type: "bind", Source: b.channel, Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"}},
		},
		Linux: linuxDoc{
			CgroupsPath: b.cgroup,
			Resources:   limits(spec, b.v2, b.swap),
			Namespaces: []namespace{
				{Type: "pid"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}, {Type: "network", Path: b.netns},
			},
			MaskedPaths:   []string{"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware"},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
}

// writeBundle writes the document where runsc looks for it.
func writeBundle(dir string, doc document) error {
	b, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return fmt.Errorf("gvisor: document: %w", err)
	}
	return writeFile(filepath.Join(dir, "config.json"), b, false)
}
