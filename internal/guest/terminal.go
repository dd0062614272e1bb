package guest

import (
	"context"
	"net/http"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/api/guestapi"
)

func sysSignal(n int) syscall.Signal { return syscall.Signal(n) }

// onDone calls f when the caller of r is gone.
func onDone(r *http.Request, f func()) (stop func() bool) { return context.AfterFunc(r.Context(), f) }

func (s *Server) handleResize(w http.ResponseWriter, r *http.Request, p *process) error {
	var size guestapi.Size
	if err := read(w, r, &size); err != nil {
		return err
	}
	switch {
	case p.ends.tty == nil:
		return refuse(409, guestapi.CodeNoTerminal, "the process has no terminal")
	case size.Rows == 0 || size.Cols == 0:
		return refuse(400, guestapi.CodeInvalid, "a terminal has at least one row and one column")
	}
	// Not pty.Setsize: it makes the descriptor blocking.
	rc, err := p.ends.stdout.SyscallConn()
	if err == nil {
		if cerr := rc.Control(func(fd uintptr) {
			err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
		}); cerr != nil {
			err = cerr
		}
	}
	if err != nil {
		return refuse(409, guestapi.CodeProcessEnded, "the terminal is closed")
	}
	return reply(w, 200, struct{}{})
}
