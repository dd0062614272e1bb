package guest

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"crypto/rand"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/api/guestapi"
)

var errNotRegular = errors.New("not a regular file")

// openRegular opens a regular file for reading and nothing else: a FIFO or
// device is refused without waiting for its other end.
func openRegular(name string) (*os.File, error) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		_ = unix.SetNonblock(fd, false)
		return os.NewFile(uintptr(fd), name), nil
	case unix.S_IFDIR:
		err = unix.EISDIR
	default:
		err = errNotRegular
	}
	_ = unix.Close(fd)
	return nil, err
}

func fileFailure(err error) error {
	var f *failure
	switch {
	case err == nil || errors.As(err, &f):
		return err
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return refuse(404, guestapi.CodeNotFound, "no such file")
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS), errors.Is(err, unix.ETXTBSY):
		return refuse(403, guestapi.CodePermissionDenied, "%s", reason(err))
	case errors.Is(err, unix.EISDIR):
		return refuse(409, guestapi.CodeIsDirectory, "a directory")
	case errors.Is(err, errNotRegular), errors.Is(err, unix.ENXIO):
		return refuse(409, guestapi.CodeNotRegular, "not a regular file")
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		return refuse(507, guestapi.CodeNoSpace, "%s", reason(err))
	case errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EINVAL):
		return refuse(400, guestapi.CodeInvalid, "%s", reason(err))
	}
	return refuse(500, guestapi.CodeIO, "%s", reason(err))
}

// target reads who and where from the query.
func (s *Server) target(r *http.Request) (account, string, error) {
	q := r.URL.Query()
	name := q.Get("path")
	if !path.IsAbs(name) || strings.ContainsRune(name, 0) {
		return account{}, "", refuse(400, guestapi.CodeInvalid, "path is not absolute")
	}
	user := q.Get("user")
	if user == "" {
		s.mu.Lock()
		user = s.conf.User
		s.mu.Unlock()
	}
	who, err := lookup("", user)
	if err != nil {
		return account{}, "", refuse(unprocessable, guestapi.CodeNoSuchUser, "the machine has no user %.64q", user)
	}
	return who, name, nil
}

func (s *Server) handleGetFile(w http.ResponseWriter, r *http.Request) error {
	who, name, err := s.target(r)
	if err != nil {
		return err
	}
	var f *os.File
	err = who.as(func() (err error) { f, err = openRegular(name); return err })
	if err != nil {
		return fileFailure(err)
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return fileFailure(err)
	}
	ctl := http.NewResponseController(w)
	stop := onDone(r, func() { _ = ctl.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set(guestapi.HeaderMode, strconv.FormatUint(uint64(st.Mode().Perm()), 8))
	h.Set(guestapi.HeaderModTime, strconv.FormatInt(st.ModTime().UnixNano(), 10))
	from := io.Reader(f)
	if size := st.Size(); size > 0 {
		// Exactly what was promised, also when the file grows meanwhile.
		h.Set("Content-Length", strconv.FormatInt(size, 10))
		from = io.LimitReader(f, size)
	}
	w.WriteHeader(200)
	buf := make([]byte, 128<<10)
	if _, err := io.CopyBuffer(onlyWriter{w}, onlyReader{from}, buf); err != nil {
		panic(http.ErrAbortHandler) // the reader must not take this for the end
	}
	return nil
}

// onlyWriter and onlyReader hide methods, so that the copy uses our buffer.
type onlyWriter struct{ io.Writer }
type onlyReader struct{ io.Reader }

func (s *Server) handlePutFile(w http.ResponseWriter, r *http.Request) error {
	who, name, err := s.target(r)
	if err != nil {
		return err
	}
	mode := uint64(0)
	if q := r.URL.Query().Get("mode"); q != "" {
		if mode, err = strconv.ParseUint(q, 8, 32); err != nil || mode > 0o7777 {
			return refuse(400, guestapi.CodeInvalid, "mode is not an octal number up to 7777")
		}
	}
	if strings.HasSuffix(name, "/") {
		return refuse(409, guestapi.CodeIsDirectory, "a directory")
	}
	if err := fileFailure(who.as(func() error { return put(name, who, uint32(mode), r.Body) })); err != nil {
		return err
	}
	return reply(w, 200, struct{}{})
}

// put writes a whole file with the rights of the calling thread: beside its
// final name, synced, then renamed. A crash leaves the old file or the new one.
func put(name string, who account, mode uint32, body io.Reader) (err error) {
	if real, err := filepath.EvalSymlinks(name); err == nil {
		name = real // write what the link names, not over the link
	}
	name = path.Clean(name)
	dir := path.Dir(name)
	if err := unixMkdirAll(dir); err != nil {
		return err
	}
	perm := uint32(0o644)
	uid, gid := -1, -1
	var old unix.Stat_t
	switch err := unix.Lstat(name, &old); {
	case err == nil:
		switch old.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			perm = old.Mode & 0o7777
			if who.uid == 0 {
				uid, gid = int(old.Uid), int(old.Gid)
			}
		case unix.S_IFDIR:
			return unix.EISDIR
		default:
			return errNotRegular
		}
	case !errors.Is(err, unix.ENOENT):
		return err
	}
	if mode != 0 {
		perm = mode
	}
	tmp := path.Join(dir, ".space-"+rand.Text())
	fd, err := unix.Open(tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), tmp)
	defer func() {
		_ = f.Close()
		if err != nil {
			_ = unix.Unlink(tmp)
		}
	}()
	if _, err := io.CopyBuffer(onlyWriter{f}, onlyReader{body}, make([]byte, 128<<10)); err != nil {
		return err
	}
	if uid >= 0 {
		if err := f.Chown(uid, gid); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(fd, perm); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := unix.Rename(tmp, name); err != nil {
		return err
	}
	syncDir(dir)
	return nil
}

// unixMkdirAll makes dir and its parents with the calling thread's rights.
func unixMkdirAll(dir string) error {
	err := unix.Mkdir(dir, 0o755)
	switch {
	case err == nil, errors.Is(err, unix.EEXIST):
		return nil // what is there and no directory fails at the open
	case errors.Is(err, unix.ENOENT) && dir != "/":
		if err := unixMkdirAll(path.Dir(dir)); err != nil {
			return err
		}
		if err := unix.Mkdir(dir, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		return nil
	}
	var st unix.Stat_t
	if unix.Stat(dir, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil // a directory on a read-only or foreign place
	}
	return err
}

func syncDir(dir string) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	_ = unix.Fsync(fd)
	_ = unix.Close(fd)
}
