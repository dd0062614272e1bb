package session

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/sandbox"
)

// MaxFilePut bounds one upload: the sandbox's disk is the true limit.
const MaxFilePut = 64 << 30

// maxPath bounds a path in bytes, as the guest's kernel does.
const maxPath = 4096

// The files part of the data plane: one whole file each, with a data token.
//
//	GET /d/sandboxes/{id}/files?path=P[&user=U]         the bytes; Content-Length when known
//	PUT /d/sandboxes/{id}/files?path=P[&user=U&mode=M]  replaces the file atomically
//
// A path is bytes: percent-encoded in path, or base64 in path_b64 for names
// that are not text. It is opened in the guest with the rights of user (default
// the template's); the host never uses it as a path. mode is octal.
func (m *Manager) serveFiles(scope string, do func(http.ResponseWriter, *http.Request, *Grant, sandbox.ID, string) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		g, err := m.authorise(r)
		if err != nil {
			m.fail(w, err)
			return
		}
		defer g.Close()
		id, err := sandbox.ParseID(r.PathValue("id"))
		if err != nil || g.Sandbox != id || g.Session != "" {
			m.fail(w, fault.New(fault.NotFound, "sandbox_not_found", "there is no such sandbox").Do("use a data token of this sandbox"))
			return
		}
		if !g.AllowsScope(id, scope) {
			m.fail(w, fault.New(fault.Denied, "scope_missing", "the data token lacks scope %s", scope).Do("mint a data token with it"))
			return
		}
		path, err := pathOf(r.URL.Query())
		if err == nil {
			m.Activity(id)
			err = do(w, r.WithContext(g.Context()), g, id, path)
		}
		if err != nil {
			m.fail(w, err)
		}
	})
}

// pathOf reads the path of a request, which is any bytes but NUL.
func pathOf(q url.Values) (string, error) {
	bad := func(why string) (string, error) {
		return "", fault.New(fault.Invalid, "invalid_path", "the path cannot be used").Because("%s", why).
			Do("send path percent-encoded, or path_b64 in base64; 1 to %d bytes without NUL", maxPath)
	}
	if q.Has("path") == q.Has("path_b64") {
		return bad("exactly one of path and path_b64 is needed")
	}
	path := q.Get("path")
	if q.Has("path_b64") {
		b, err := base64.StdEncoding.DecodeString(q.Get("path_b64"))
		if err != nil {
			return bad("path_b64 is not base64")
		}
		path = string(b)
	}
	switch {
	case path == "":
		return bad("it is empty")
	case len(path) > maxPath:
		return bad("it is too long")
	case strings.ContainsRune(path, 0):
		return bad("it holds a NUL byte")
	}
	return path, nil
}

func (m *Manager) getFile(w http.ResponseWriter, r *http.Request, g *Grant, id sandbox.ID, path string) error {
	guest, err := m.Guests.Guest(r.Context(), g.Tenant, id)
	if err != nil {
		return err
	}
	f, err := guest.GetFile(r.Context(), path, r.URL.Query().Get("user"))
	if err != nil {
		return err
	}
	defer f.Close()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", "attachment")
	h.Set("X-File-Mode", fmt.Sprintf("%04o", f.Mode&0o7777))
	if f.Size >= 0 {
		h.Set("Content-Length", strconv.FormatInt(f.Size, 10))
	}
	w.WriteHeader(http.StatusOK)
	rc := http.NewResponseController(w)
	buf := make([]byte, 128<<10)
	for {
		n, err := f.Read(buf)
		if n > 0 {
			_ = rc.SetWriteDeadline(time.Now().Add(m.Limits.WriteTimeout)) // without deadlines the write itself fails
			if _, werr := w.Write(buf[:n]); werr != nil {
				return nil // the client is gone
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			m.Log.Info("download broken off", "sandbox", id, "error", err)
			panic(http.ErrAbortHandler) // the client must not take a part for the whole
		}
	}
}

func (m *Manager) putFile(w http.ResponseWriter, r *http.Request, g *Grant, id sandbox.ID, path string) error {
	var mode uint64
	if s := r.URL.Query().Get("mode"); s != "" {
		var err error
		if mode, err = strconv.ParseUint(s, 8, 32); err != nil || mode > 0o777 || mode == 0 {
			return fault.New(fault.Invalid, "invalid_mode", "the mode cannot be used").Do("write permission bits in octal, such as 644")
		}
	}
	guest, err := m.Guests.Guest(r.Context(), g.Tenant, id)
	if err != nil {
		return err
	}
	body := patient{http.MaxBytesReader(w, r.Body, MaxFilePut), http.NewResponseController(w), m.Limits.WriteTimeout}
	err = guest.PutFile(r.Context(), path, r.URL.Query().Get("user"), uint32(mode), r.ContentLength, body)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return fault.New(fault.TooLarge, "too_large", "one upload has at most %d bytes", int64(MaxFilePut))
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
