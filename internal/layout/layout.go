// Package layout names every path that our processes keep on a host, who owns
// it and with which mode, and the locks that keep one owner at a time.
//
//	<data>             0710 root:space   nothing but the two below
//	<data>/host        0700 root         host room: machines, templates, runtimes, room key
//	<data>/state       0700 space        control.db, node.db, journals, keys, admin.key;
//	                                     root reads files here with ReadOwned only
//	<run>              0711 root         lost at reboot
//	<run>/host         0700 root         mounts, runsc state, channel sockets
//	<run>/hostd.sock   0660 root:space   the host room's socket
//	<run>/lease.sock   0600 root         keeps an ephemeral server alive
//	<run>/serve        0755 space        endpoint.json: where the listeners are
//
// The unprivileged side must pass through <data> to reach its own part, so the
// top is 0710 with the group of user space; nobody else gets in (ADR 0004).
package layout

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Defaults of the flags.
const (
	DefaultData = "/var/lib/space"
	DefaultRun  = "/run/space"
)

// Layout is one installation on this host.
type Layout struct{ Data, Run string }

// Host is the root-only durable folder.
func (l Layout) Host() string { return filepath.Join(l.Data, "host") }

// Templates is where template images are kept.
func (l Layout) Templates() string { return filepath.Join(l.Host(), "templates") }

// Runtimes is where embedded runtime binaries are extracted, by digest.
func (l Layout) Runtimes() string { return filepath.Join(l.Host(), "runtimes") }

// Room is the host room's own folder (signing key).
func (l Layout) Room() string { return filepath.Join(l.Host(), "room") }

// State is the unprivileged side's durable folder.
func (l Layout) State() string { return filepath.Join(l.Data, "state") }

// ControlDB is the control store's SQLite file.
func (l Layout) ControlDB() string { return filepath.Join(l.State(), "control.db") }

// NodeDB is the node store's SQLite file.
func (l Layout) NodeDB() string { return filepath.Join(l.State(), "node.db") }

// Journals is where session journals are kept.
func (l Layout) Journals() string { return filepath.Join(l.State(), "journals") }

// AuditHeads is the file with all signed audit heads; the last of each chain is
// also where only the host room can write (host.HeadsFile in Room).
func (l Layout) AuditHeads() string { return filepath.Join(l.State(), "audit-heads.jsonl") }

// AdminKey is the file of the first key.
func (l Layout) AdminKey() string { return filepath.Join(l.State(), "admin.key") }

// RunHost is the root-only folder that is lost at reboot.
func (l Layout) RunHost() string { return filepath.Join(l.Run, "host") }

// HostSocket is the host room's socket.
func (l Layout) HostSocket() string { return filepath.Join(l.Run, "hostd.sock") }

// LeaseSocket keeps an ephemeral server alive while clients hold it.
func (l Layout) LeaseSocket() string { return filepath.Join(l.Run, "lease.sock") }

// EndpointFile tells local clients where the listeners are.
func (l Layout) EndpointFile() string { return filepath.Join(l.RunServe(), "endpoint.json") }

// RunServe is what the unprivileged side publishes.
func (l Layout) RunServe() string { return filepath.Join(l.Run, "serve") }

// Prepare makes the folders of a layout, as root, for the unprivileged uid and
// gid. It is idempotent and mends owner and mode of what exists. Folders above
// Data and Run are made with mode 0755 when missing, and never changed: one that
// the unprivileged side cannot pass through is an error.
//
// Every folder made here has a parent that only root can write to: below a
// folder of user space a name may be exchanged between a check and a change of
// mode.
func (l Layout) Prepare(uid, gid int) error {
	for _, top := range []string{l.Data, l.Run} {
		if err := os.MkdirAll(filepath.Dir(top), 0o755); err != nil {
			return fmt.Errorf("layout: %w", err)
		}
		if err := passable(filepath.Dir(top), uid, gid); err != nil {
			return err
		}
	}
	for _, d := range []struct {
		path     string
		mode     os.FileMode
		uid, gid int
	}{
		{l.Data, 0o710, 0, gid},
		{l.Host(), 0o700, 0, 0},
		{l.Templates(), 0o700, 0, 0},
		{l.Runtimes(), 0o700, 0, 0},
		{l.Room(), 0o700, 0, 0},
		{l.State(), 0o700, uid, gid},
		{l.Run, 0o711, 0, 0},
		{l.RunHost(), 0o700, 0, 0},
		{l.RunServe(), 0o755, uid, gid},
	} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return fmt.Errorf("layout: %w", err)
		}
		fi, err := os.Lstat(d.path)
		if err != nil {
			return fmt.Errorf("layout: %w", err)
		}
		if !fi.IsDir() {
			return fmt.Errorf("layout: %s is not a directory", d.path)
		}
		if err := os.Lchown(d.path, d.uid, d.gid); err != nil {
			return fmt.Errorf("layout: %w", err)
		}
		if err := os.Chmod(d.path, d.mode); err != nil {
			return fmt.Errorf("layout: %w", err)
		}
	}
	return nil
}

// passable reports an error when uid cannot pass through dir or a folder above
// it. It goes by owner, group and mode; a stricter rule shows at the first use.
func passable(dir string, uid, gid int) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("layout: %w", err)
	}
	for {
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil {
			return fmt.Errorf("layout: %s: %w", dir, err)
		}
		search := uint32(0o001)
		switch {
		case int(st.Uid) == uid:
			search = 0o100
		case int(st.Gid) == gid:
			search = 0o010
		}
		if st.Mode&search == 0 {
			return fmt.Errorf("layout: the unprivileged side cannot pass through %s (mode %04o): choose another folder, or chmod o+x it", dir, st.Mode&0o7777)
		}
		if dir == "/" {
			return nil
		}
		dir = filepath.Dir(dir)
	}
}

// ErrLocked means that another process owns the part.
var ErrLocked = errors.New("layout: already in use by another process")

// Lock is an exclusive advisory lock that dies with its process. The file holds
// the owner's pid.
type Lock struct{ f *os.File }

// TakeLock takes the lock file at path, made with mode 0600. Error: ErrLocked.
func TakeLock(path string) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s", ErrLocked, path)
		}
		return nil, fmt.Errorf("layout: lock %s: %w", path, err)
	}
	if err := f.Truncate(0); err == nil {
		_, _ = fmt.Fprintf(f, "%d\n", os.Getpid())
	}
	return &Lock{f: f}, nil
}

// Holder gives the pid written by the lock's present owner, or 0 when the lock
// is free.
//
// The number is a claim of whoever may write the file: see to it that it is the
// process you mean before you act on it.
func Holder(path string) int {
	f, err := openRegular(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err == nil {
		return 0
	}
	var pid int
	if _, err := fmt.Fscan(io.LimitReader(f, 32), &pid); err != nil || pid <= 1 {
		return 0
	}
	return pid
}

// openRegular opens a file for reading and nothing else: it follows no link at
// the end of path, and a FIFO or device put there neither blocks nor acts.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		_ = f.Close()
		return nil, errors.Join(err, fmt.Errorf("layout: %s is not a regular file", path))
	}
	return f, nil
}

// ReadOwned reads a file of at most limit bytes from a folder that its owner may
// fill with anything while root reads it. It gives only what that owner could
// have read as well: a link, soft or hard, to somebody else's file is an error.
// The parents of the folder must be root's or the caller's.
func ReadOwned(path string, limit int64) ([]byte, error) {
	dir, err := os.Lstat(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	f, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !dir.IsDir() || owner(dir) != owner(fi) {
		return nil, fmt.Errorf("layout: %s does not belong to the owner of its folder", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("layout: %s has more than %d bytes", path, limit)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

func owner(fi os.FileInfo) uint32 { return fi.Sys().(*syscall.Stat_t).Uid }

// Release gives the lock back.
func (k *Lock) Release() { _ = k.f.Close() }

// HostLock is the host room's lock file.
func (l Layout) HostLock() string { return filepath.Join(l.Host(), "lock") }

// ServeLock is the unprivileged side's lock file.
func (l Layout) ServeLock() string { return filepath.Join(l.State(), "lock") }

// Endpoint tells local clients where a running server is.
type Endpoint struct {
	API       string    `json:"api"`  // http://127.0.0.1:7780
	Data      string    `json:"data"` // http://127.0.0.1:7781
	PID       int       `json:"pid"`
	StartedAt time.Time `json:"started_at"`
}

// WriteEndpoint publishes e atomically.
func (l Layout) WriteEndpoint(e Endpoint) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return WriteFile(l.EndpointFile(), b, 0o644)
}

// ReadEndpoint reads what WriteEndpoint wrote.
func (l Layout) ReadEndpoint() (Endpoint, error) {
	var e Endpoint
	b, err := ReadOwned(l.EndpointFile(), 64<<10)
	if err != nil {
		return e, err
	}
	return e, json.Unmarshal(b, &e)
}

// WriteFile replaces the file at path atomically and durably.
func WriteFile(path string, b []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // after the rename there is nothing of that name
	if _, err = f.Write(b); err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
