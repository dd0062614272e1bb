package guest

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// setgroupsThread sets the supplementary groups of the calling thread alone;
// unix.Setgroups would set them for all threads. The slice outlives the call.
func setgroupsThread(gids []uint32) error {
	var p unsafe.Pointer
	if len(gids) > 0 {
		p = unsafe.Pointer(&gids[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(gids)), uintptr(p), 0); e != 0 {
		return e
	}
	return nil
}

// ioctlBytes passes the bytes of b to an ioctl that only reads them.
func ioctlBytes(f *os.File, op uintptr, b []byte) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), op, uintptr(unsafe.Pointer(&b[0]))); e != 0 {
		return e
	}
	return nil
}
