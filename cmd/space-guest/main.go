// Command space-guest is the daemon inside a sandbox's machine. Without
// arguments it dials the host's socket in the fixed mount; PID 1's arguments are
// the same in every machine, because a restore compares them.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/channel"
	"github.com/space-platform/space/internal/guest"
)

// version is set by the linker.
var version = "dev"

const hostSocket = "/.space/channel/host.sock"

func init() {
	// The main goroutine keeps the main thread, whose credentials are those that
	// /proc shows for the program; file calls change theirs on other threads.
	runtime.LockOSThread()
}

func main() {
	listen := flag.String("listen", "", "unix:PATH: serve plain HTTP there instead of dialling the host (tests)")
	dial := flag.String("dial", hostSocket, "the host's socket")
	keepClock := flag.Bool("keep-clock", false, "never set the wall clock (tests on a kernel that is not the machine's own)")
	flag.Parse()
	if err := run(*listen, *dial, *keepClock); err != nil {
		fmt.Fprintln(os.Stderr, "space-guest:", err)
		os.Exit(1)
	}
}

func run(listen, dial string, keepClock bool) error {
	if err := guest.Dispositions(); err != nil {
		return err
	}
	unix.Umask(0o022)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(96 << 20)
	hosts := ""
	if os.Getpid() == 1 && !keepClock {
		hosts = "/etc/hosts"
	}
	s := guest.New(guest.Options{Version: version, KeepClock: keepClock, PowerOff: powerOff, HostsFile: hosts})
	go s.Run(make(chan struct{}))
	if listen != "" {
		path, ok := strings.CutPrefix(listen, "unix:")
		if !ok {
			return fmt.Errorf("-listen %q: only unix:PATH", listen)
		}
		l, err := net.Listen("unix", path)
		if err != nil {
			return err
		}
		srv := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 30 * time.Second}
		return srv.Serve(l)
	}
	return channel.Serve(context.Background(), func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", dial)
	}, s.Handler(), channel.ServeOptions{})
}

// powerOff ends the machine: as PID 1 by the kernel where it lets us, and by
// exiting everywhere else.
func powerOff() {
	signal.Reset()
	if os.Getpid() == 1 {
		_ = syscall.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	}
	os.Exit(0)
}
