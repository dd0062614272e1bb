package guest

import (
	"bytes"
	"encoding/binary"
	"io"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/api/guestapi"
)

const (
	clockSlack = 100 * time.Millisecond
	maxEntropy = 4 << 10
	rndAdd     = 0x40085203 // RNDADDENTROPY
)

// handleConfigure binds identity. What the kernel does not let us set (gVisor
// has no clock and no pool to feed) is no failure: the host measures what
// matters from outside.
func (s *Server) handleConfigure(w http.ResponseWriter, r *http.Request) error {
	var c guestapi.Configure
	if err := read(w, r, &c); err != nil {
		return err
	}
	if len(c.Env) > guestapi.MaxEnv || len(c.Entropy) > maxEntropy || len(c.Hostname) > 64 {
		return refuse(400, guestapi.CodeInvalid, "env, entropy or hostname too long")
	}
	if _, err := environ(account{}, "", false, c.Env); err != nil {
		return err
	}
	if c.Hostname != "" {
		_ = unix.Sethostname([]byte(c.Hostname))
		if s.opt.HostsFile != "" {
			_ = nameHost(s.opt.HostsFile, c.Hostname) // a read-only or odd /etc is the sandbox's own affair
		}
	}
	if !c.Now.IsZero() && !s.opt.KeepClock {
		setClock(c.Now)
	}
	if len(c.Entropy) > 0 {
		addEntropy(c.Entropy)
	}
	c.Entropy = nil
	s.mu.Lock()
	s.conf = c
	s.mu.Unlock()
	return reply(w, 200, struct{}{})
}

func setClock(now time.Time) {
	if off := time.Since(now.Round(0)); off > -clockSlack && off < clockSlack {
		return
	}
	ts := unix.NsecToTimespec(now.UnixNano())
	_ = unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// addEntropy credits b to the kernel's pool: struct rand_pool_info {bits, size, bytes}.
func addEntropy(b []byte) {
	f, err := os.OpenFile("/dev/random", os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	var info bytes.Buffer
	_ = binary.Write(&info, binary.NativeEndian, []int32{int32(8 * len(b)), int32(len(b))})
	info.Write(b)
	for info.Len()%4 != 0 {
		info.WriteByte(0)
	}
	if ioctlBytes(f, rndAdd, info.Bytes()) != nil {
		_, _ = f.Write(b) // mixed in without credit
	}
}

func (s *Server) handleStats(w http.ResponseWriter, _ *http.Request) error {
	st := guestapi.Stats{CPUs: runtime.NumCPU(), Processes: len(tasks()) + 1}
	st.MemoryTotal, st.MemoryAvailable = memory()
	var fs unix.Statfs_t
	if unix.Statfs("/", &fs) == nil {
		st.DiskTotal = fs.Blocks * uint64(fs.Bsize)
		st.DiskFree = fs.Bavail * uint64(fs.Bsize)
	}
	buf := make([]byte, 128)
	if f := strings.Fields(string(buf[:slurp("/proc/self/statm", buf)])); len(f) > 1 {
		pages, _ := strconv.ParseUint(f[1], 10, 64)
		st.DaemonRSS = pages * uint64(os.Getpagesize())
	}
	return reply(w, 200, st)
}

func memory() (total, available uint64) {
	buf := make([]byte, 8<<10)
	for line := range strings.Lines(string(buf[:slurp("/proc/meminfo", buf)])) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, _ := strconv.ParseUint(f[1], 10, 64)
		switch f[0] {
		case "MemTotal:":
			total = n << 10
		case "MemAvailable:":
			available = n << 10
		}
	}
	return total, available
}

// handleShutdown ends all processes, writes files to disk, answers, and only
// then powers off: an answer means that files are safe.
func (s *Server) handleShutdown(w http.ResponseWriter, r *http.Request) error {
	_, _ = io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, guestapi.MaxMessage))
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	s.endAll()
	unix.Sync()
	if err := reply(w, 200, struct{}{}); err != nil {
		return err
	}
	_ = http.NewResponseController(w).Flush()
	if s.opt.PowerOff != nil {
		time.AfterFunc(100*time.Millisecond, s.opt.PowerOff) // the answer travels
	}
	return nil
}

// endAll gives everything a second to end by itself, then kills it.
func (s *Server) endAll() {
	const polite = time.Second
	alone := os.Getpid() == 1 // then everything else is ours to end
	left := func() bool {
		if alone {
			for _, t := range tasks() {
				if !t.zombie {
					return true
				}
			}
			return false
		}
		for _, p := range s.all() {
			if len(p.family().scan()) > 0 {
				return true
			}
		}
		return false
	}
	send := func(sig syscall.Signal) {
		if alone {
			_ = syscall.Kill(-1, sig)
			return
		}
		for _, p := range s.all() {
			if sig == unix.SIGKILL {
				p.family().kill(polite)
			} else {
				p.family().signal(sig)
			}
		}
	}
	send(unix.SIGTERM)
	send(unix.SIGCONT)
	for until := time.Now().Add(polite); left() && time.Now().Before(until); {
		time.Sleep(5 * time.Millisecond) // orphans tell nobody when they end
	}
	for until := time.Now().Add(polite); left() && time.Now().Before(until); {
		send(unix.SIGKILL)
		time.Sleep(5 * time.Millisecond)
	}
}
