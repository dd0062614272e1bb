package guest

import (
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const cleared = "SPACE_GUEST_CLEARED"

// Dispositions makes sure that processes begin with default signal dispositions
// and an empty mask, whatever the daemon itself was started with (C-023). A
// caught signal becomes default at exec, an ignored one stays ignored, and the
// Go runtime leaves some inherited ignores alone; so all are caught here. An
// inherited mask is in the runtime's hands before us: the program executes
// itself once with an empty one.
func Dispositions() error {
	sink := make(chan os.Signal, 1)
	signal.Notify(sink,
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGPIPE, syscall.SIGCHLD, syscall.SIGCONT,
		syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGURG, syscall.SIGWINCH, syscall.SIGTERM)
	go func() {
		for sig := range sink {
			// PID 1 ends by Shutdown or with its machine, not by its inmates' signals.
			if os.Getpid() != 1 && (sig == syscall.SIGTERM || sig == syscall.SIGINT || sig == syscall.SIGQUIT || sig == syscall.SIGHUP) {
				os.Exit(0)
			}
		}
	}()
	if !masked() || os.Getenv(cleared) != "" {
		_ = os.Unsetenv(cleared)
		return nil
	}
	var none unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &none, nil); err != nil {
		return fmt.Errorf("signal mask: %w", err)
	}
	err := syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), cleared+"=1"))
	return fmt.Errorf("exec with an empty signal mask: %w", err)
}

func masked() bool {
	buf := make([]byte, 4<<10)
	for line := range strings.Lines(string(buf[:slurp("/proc/self/status", buf)])) {
		if v, ok := strings.CutPrefix(line, "SigBlk:"); ok {
			return strings.Trim(strings.TrimSpace(v), "0") != ""
		}
	}
	return false
}
