package session

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/problem"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session/journal"
)

// Handler serves the data plane of sessions, below /d/:
//
//	POST /d/sessions/{id}/attach        starts the command (once) and streams its events
//	GET  /d/sessions/{id}/events        streams them, starting nothing
//	POST /d/sessions/{id}/stdin         ?offset=N, raw body → {"accepted":N,"closed":bool}
//	POST /d/sessions/{id}/close-stdin   → the same
//	POST /d/sessions/{id}/signal        {"signal":"TERM","tree":true} → 204
//	POST /d/sessions/{id}/resize        {"rows":24,"cols":80} → 204
//	GET  /d/sessions/{id}/ws            WebSocket: attach, and input, in binary frames
//	GET  /d/sessions/{id}/pty           the same
//	POST /d/tickets                     trades a token for a ticket that opens one WebSocket, once, soon
//
// Streams are server-sent events, or binary frames with Accept:
// application/vnd.space.frames. They resume after the id in Last-Event-ID or
// ?after=. The token is in Authorization: Bearer, never in the URL. The caller
// wraps the handler with httpguard.
//
// A session of another tenant, sandbox or token answers like one that does not exist.
func (m *Manager) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST /d/sessions/{id}/attach", m.session(m.serveAttach))
	mux.Handle("GET /d/sessions/{id}/events", m.session(m.serveEvents))
	mux.Handle("POST /d/sessions/{id}/stdin", m.session(m.serveStdin))
	mux.Handle("POST /d/sessions/{id}/close-stdin", m.session(m.serveCloseStdin))
	mux.Handle("POST /d/sessions/{id}/signal", m.session(m.serveSignal))
	mux.Handle("POST /d/sessions/{id}/resize", m.session(m.serveResize))
	mux.Handle("GET /d/sessions/{id}/ws", m.session(m.serveWebSocket))
	mux.Handle("GET /d/sessions/{id}/pty", m.session(m.serveWebSocket))
	mux.Handle("GET /d/sandboxes/{id}/files", m.serveFiles(ScopeFilesRead, m.getFile))
	mux.Handle("PUT /d/sandboxes/{id}/files", m.serveFiles(ScopeFilesWrite, m.putFile))
	mux.HandleFunc("POST /d/tickets", m.serveTicket)
	mux.HandleFunc("/d/", func(w http.ResponseWriter, _ *http.Request) {
		problem.Write(w, fault.New(fault.NotFound, "no_such_route", "the data plane has no such route"))
	})
	return mux
}

// call is one authorised request.
type call struct {
	g  *Grant
	id sandbox.SessionID
}

type sessionHandler func(http.ResponseWriter, *http.Request, call) error

// session authorises and writes errors as problems. The handler's request has
// the grant's context: it ends when the token is revoked.
func (m *Manager) session(next sessionHandler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		g, err := m.authorise(r)
		if err != nil {
			m.fail(w, err)
			return
		}
		defer g.Close()
		id, err := sandbox.ParseSessionID(r.PathValue("id"))
		if err != nil || !g.Allows(id) {
			m.fail(w, errNotFound)
			return
		}
		if g.Session == "" && !g.AllowsScope(g.Sandbox, ScopeActivity) {
			// What programs print is for who started them, and who may read it all.
			if rw, err := m.rowOf(r.Context(), g.Tenant, id); err != nil || rw.principal != g.Principal {
				m.fail(w, errNotFound)
				return
			}
		}
		if err := next(w, r.WithContext(g.Context()), call{g, id}); err != nil {
			if why := context.Cause(g.Context()); why != nil && fault.IsCode(why, errRevoked.Code) {
				err = why
			}
			m.fail(w, err)
		}
	})
}

func (m *Manager) authorise(r *http.Request) (*Grant, error) {
	if strings.HasSuffix(r.URL.Path, "/ws") || strings.HasSuffix(r.URL.Path, "/pty") {
		if t := r.URL.Query().Get("ticket"); t != "" {
			return m.VerifyTicket(r.Context(), t)
		}
	}
	token, err := bearer(r)
	if err != nil {
		return nil, err
	}
	return m.Verify(r.Context(), token)
}

func bearer(r *http.Request) (string, error) {
	scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return "", errToken
	}
	return strings.TrimSpace(token), nil
}

func (m *Manager) fail(w http.ResponseWriter, err error) {
	if fault.Of(err).Class == fault.Internal && !errors.Is(err, context.Canceled) {
		m.Log.Error("data plane", "error", err)
	}
	problem.Write(w, err)
}

func (m *Manager) serveTicket(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	token, err := bearer(r)
	if err != nil {
		m.fail(w, err)
		return
	}
	g, err := m.Verify(r.Context(), token)
	if err != nil {
		m.fail(w, err)
		return
	}
	defer g.Close()
	s, at, err := m.Ticket(g)
	if err != nil {
		m.fail(w, err)
		return
	}
	m.answer(w, http.StatusCreated, map[string]any{"ticket": s, "expires_at": at})
}

func (m *Manager) answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		m.Log.Debug("answer not taken", "error", err)
	}
}

// after reads where a stream resumes: Last-Event-ID, or ?after=.
func after(r *http.Request) (journal.ID, error) {
	s := r.Header.Get("Last-Event-ID")
	if s == "" {
		s = r.URL.Query().Get("after")
	}
	if s == "" {
		return journal.ID{}, nil
	}
	id, ok := journal.ParseID(s)
	if !ok {
		return journal.ID{}, fault.New(fault.Invalid, "invalid_event_id", "that is not an event id").Do("send the id of an event of this session, such as 1.4096")
	}
	return id, nil
}

func (m *Manager) serveAttach(w http.ResponseWriter, r *http.Request, c call) error {
	return m.serveStream(w, r, c, m.Attach)
}

func (m *Manager) serveEvents(w http.ResponseWriter, r *http.Request, c call) error {
	return m.serveStream(w, r, c, m.Events)
}

func (m *Manager) serveStdin(w http.ResponseWriter, r *http.Request, c call) error {
	offset, err := offsetOf(r)
	if err != nil {
		return err
	}
	body := http.MaxBytesReader(w, r.Body, MaxStdinPost)
	reply, err := m.Stdin(r.Context(), c.g.Tenant, c.id, offset, patient{body, http.NewResponseController(w), m.Limits.WriteTimeout})
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		f := fault.New(fault.TooLarge, "too_large", "one stdin request has at most %d bytes", MaxStdinPost).Do("go on from expected with another request")
		f.Expected = &reply.Accepted
		return f
	}
	if err != nil {
		return err
	}
	m.answer(w, http.StatusOK, reply)
	return nil
}

func offsetOf(r *http.Request) (*uint64, error) {
	s := r.URL.Query().Get("offset")
	if s == "" {
		return nil, nil
	}
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil {
		return nil, fault.New(fault.Invalid, "invalid_offset", "the offset is not a number of bytes")
	}
	return &n, nil
}

// patient reads a body whose sender may be slow, but not dead.
type patient struct {
	r    io.Reader
	c    *http.ResponseController
	wait time.Duration
}

func (p patient) Read(b []byte) (int, error) {
	_ = p.c.SetReadDeadline(time.Now().Add(p.wait)) // not supported by a test's recorder only
	return p.r.Read(b)
}

func (m *Manager) serveCloseStdin(w http.ResponseWriter, r *http.Request, c call) error {
	reply, err := m.CloseStdin(r.Context(), c.g.Tenant, c.id)
	if err != nil {
		return err
	}
	m.answer(w, http.StatusOK, reply)
	return nil
}

func (m *Manager) serveSignal(w http.ResponseWriter, r *http.Request, c call) error {
	var in guestapi.Signal
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if err := m.Signal(r.Context(), c.g.Tenant, c.id, in.Signal, in.Tree); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (m *Manager) serveResize(w http.ResponseWriter, r *http.Request, c call) error {
	var in guestapi.Size
	if err := decode(w, r, &in); err != nil {
		return err
	}
	if err := m.Resize(r.Context(), c.g.Tenant, c.id, in); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// decode reads a small JSON body strictly.
func decode(w http.ResponseWriter, r *http.Request, to any) error {
	bad := fault.New(fault.Invalid, "invalid_body", "the body is not the JSON object expected")
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 4<<10))
	if err != nil {
		return bad.Wrap(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil || d.More() {
		return bad.Wrap(err)
	}
	return nil
}

// wantsFrames reports whether the client accepts the binary form.
func wantsFrames(r *http.Request) bool {
	for _, part := range strings.Split(r.Header.Get("Accept"), ",") {
		if t, _, err := mime.ParseMediaType(part); err == nil && t == FramesType {
			return true
		}
	}
	return false
}

func problemJSON(e *fault.Error) []byte {
	b, err := json.Marshal(problem.Of(e))
	if err != nil { // strings and numbers only: cannot happen
		return []byte(`{}`)
	}
	return b
}
