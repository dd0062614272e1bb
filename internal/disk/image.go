// Package disk makes the writable disk of a machine and mounts it: a sparse
// ext4 image on a loop device, and a host overlay file system over a template.
//
// It executes mkfs.ext4 and nothing else; loop devices and mounts are system
// calls, because starting mount(8) and losetup(8) costs more than the work.
// Everything is idempotent, and a loop device detaches itself when its mount
// goes, also when this process is killed between attaching and mounting.
package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoSpace tells that the host's file system is full.
var ErrNoSpace = errors.New("disk: no space on the host")

// mkfsArgs are all the options of mkfs.ext4 but the image, so that no file
// system depends on the host's /etc/mke2fs.conf. Inode tables and journal are
// left for the kernel to write when they are used: a new image allocates less
// than 1 MiB whatever its size. No blocks are reserved, because root in the guest is
// a tenant like everybody else there.
var mkfsArgs = []string{
	"-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0",
	"-O", "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum",
	"-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0",
}

// MinBytes is the smallest image that can be made.
const MinBytes = 32 << 20

// Make makes the image at path with size bytes (rounded down to whole blocks),
// or leaves a finished one alone. The image is durable when it returns, and
// never half-made under path.
func Make(ctx context.Context, path string, size int64) error {
	if size < MinBytes {
		return fmt.Errorf("disk: %d bytes is below the minimum of %d", size, MinBytes)
	}
	if _, err := os.Lstat(path); err == nil {
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("disk: %w", err)
	}
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return noSpace(fmt.Errorf("disk: %w", err))
	}
	defer f.Close()
	if err := f.Truncate(size &^ 4095); err != nil {
		return noSpace(fmt.Errorf("disk: size image: %w", err))
	}
	if err := mkfs(ctx, tmp, journal(size)); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return noSpace(fmt.Errorf("disk: sync image: %w", err))
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	return nil
}

// journal is the size of the journal in MiB for an image of size bytes.
func journal(size int64) int {
	switch {
	case size < 128<<20:
		return 4
	case size < 1<<30:
		return 16
	}
	return 32
}

func mkfs(ctx context.Context, image string, journalMiB int) error {
	args := append(append([]string{}, mkfsArgs...), "-J", fmt.Sprintf("size=%d", journalMiB), image)
	cmd := exec.CommandContext(ctx, mkfsPath(), args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "MKE2FS_CONFIG=/dev/null", "LC_ALL=C"}
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		lines := strings.Join(strings.Fields(errOut.String()), " ")
		err = fmt.Errorf("disk: mkfs.ext4: %w: %.500s", err, lines)
		if strings.Contains(errOut.String(), "No space left") {
			return fmt.Errorf("%w: %w", ErrNoSpace, err)
		}
		return err
	}
	return nil
}

// mkfsPath finds mkfs.ext4 also when the environment has no PATH with /sbin.
func mkfsPath() string {
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/bin"} {
		p := filepath.Join(dir, "mkfs.ext4")
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	return "mkfs.ext4"
}

func noSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG) {
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return err
}

// Allocated tells how many bytes the image occupies on the host.
func Allocated(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, fmt.Errorf("disk: %w", err)
	}
	return uint64(st.Blocks) * 512, nil
}

// Sync writes everything of the file system mounted at target, and then the
// image below it, to stable storage. It does nothing when nothing is mounted there.
func Sync(target, image string) error {
	mounted, err := Mounted(target)
	if err != nil || !mounted {
		return err
	}
	d, err := os.Open(target)
	if err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	err = unix.Syncfs(int(d.Fd()))
	d.Close()
	if err != nil {
		return noSpace(fmt.Errorf("disk: syncfs: %w", err))
	}
	f, err := os.Open(image)
	if err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return noSpace(fmt.Errorf("disk: sync image: %w", err))
	}
	return nil
}
