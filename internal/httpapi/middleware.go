package httpapi

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/problem"
	"github.com/space-platform/space/internal/sandbox"
	"github.com/space-platform/space/internal/session"
)

type ctxKey int

const (
	keyRequestID ctxKey = iota
	keyPrincipal
)

func requestID(ctx context.Context) string { id, _ := ctx.Value(keyRequestID).(string); return id }

func principal(ctx context.Context) control.Principal {
	p, _ := ctx.Value(keyPrincipal).(control.Principal)
	return p
}

var requestIDRE = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// outer gives each request an id, logs its end and turns a panic into an answer.
func (s *server) outer(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(spaceapi.HeaderRequestID)
		if !requestIDRE.MatchString(id) {
			id = "req" + sandbox.Random(20)
		}
		w.Header().Set(spaceapi.HeaderRequestID, id)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		began := time.Now()
		sw := &statusWriter{ResponseWriter: w}
		r = r.WithContext(context.WithValue(r.Context(), keyRequestID, id))
		defer func() {
			p := recover()
			if p != nil && p != http.ErrAbortHandler {
				s.Log.Error("panic in a request", "request", id, "panic", p, "stack", string(debug.Stack()))
				if sw.status == 0 {
					problem.Write(sw, internal)
					p = nil
				}
			}
			// The path without its query: queries may hold tenant data.
			s.Log.Debug("request", "request", id, "method", r.Method, "path", r.URL.Path, "status", sw.status, "ms", time.Since(began).Milliseconds())
			if p != nil {
				// Half an answer is out: cut the connection, so that nobody takes it for
				// a whole one.
				panic(http.ErrAbortHandler)
			}
		}()
		next.ServeHTTP(sw, r)
	})
}

var internal = fault.New(fault.Internal, "internal", "something went wrong on our side").
	Do("retry; if it stays, give the request id to your operator")

type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(code int) {
	if w.status == 0 {
		w.status = code
	}
	w.ResponseWriter.WriteHeader(code)
}

func (w *statusWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController through.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// open are the routes that need no key.
var open = map[string]bool{"/v1/health": true, documentPath: true}

func (s *server) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if open[r.URL.Path] {
			next.ServeHTTP(w, r)
			return
		}
		scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !strings.EqualFold(scheme, "bearer") || key == "" {
			problem.Write(w, fault.New(fault.Unauthenticated, "key_missing", "the request has no API key").
				Do("send Authorization: Bearer with a key"))
			return
		}
		p, err := s.Auth.Verify(r.Context(), strings.TrimSpace(key))
		if err != nil {
			problem.Write(w, err)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), keyPrincipal, p)))
	})
}

// readBody reads the body before anything else is done, within MaxBody and
// BodyTimeout. The time limit ends with the body: one that stays set would
// end a request that waits for its operation. Text that is not UTF-8 is refused
// here, since encoding/json would replace it without a word.
func (s *server) readBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body == nil || r.Body == http.NoBody {
			next.ServeHTTP(w, r)
			return
		}
		rc := http.NewResponseController(w)
		// A recorder of tests has no deadlines; a server's connection has.
		_ = rc.SetReadDeadline(time.Now().Add(s.BodyTimeout))
		b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxBody))
		_ = rc.SetReadDeadline(time.Time{})
		var large *http.MaxBytesError
		switch {
		case errors.As(err, &large):
			err = fault.New(fault.TooLarge, "body_too_large", "the request body is larger than %d bytes", MaxBody).Do("send less in one request")
		case errors.Is(err, os.ErrDeadlineExceeded):
			w.Header().Set("Connection", "close") // what is left of it would be taken for a request
			d := problem.Of(fault.New(fault.Deadline, "body_timeout", "the request body did not come within %s", s.BodyTimeout).
				Do("send it again").Retry(true))
			d.Status, d.Title, d.Request = http.StatusRequestTimeout, http.StatusText(http.StatusRequestTimeout), requestID(r.Context())
			problem.WriteDocument(w, d)
			return
		case err != nil:
			w.Header().Set("Connection", "close")
			err = fault.New(fault.Invalid, "body_broken", "the request body broke off").Do("send it again").Retry(true).Wrap(err)
		case !utf8.Valid(b):
			err = fault.New(fault.Invalid, "invalid_request", "the request body is not UTF-8").Do("send JSON in UTF-8")
		}
		if err != nil {
			problem.Write(w, err)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(b))
		next.ServeHTTP(w, r)
	})
}

// resultTimeout is how long a caller may take to read the result of an exec.
const resultTimeout = 5 * time.Minute

// holdResults keeps the memory of exec's results counted until they are written,
// within resultTimeout.
func holdResults(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, "/exec") {
			next.ServeHTTP(w, r)
			return
		}
		ctx, release := session.Hold(r.Context())
		defer release()
		next.ServeHTTP(&hurried{w}, r.WithContext(ctx))
	})
}

// hurried bounds each write.
type hurried struct{ http.ResponseWriter }

func (w *hurried) Write(b []byte) (int, error) {
	// A recorder of tests has no deadlines; a server's connection has.
	rc := http.NewResponseController(w.ResponseWriter)
	_ = rc.SetWriteDeadline(time.Now().Add(resultTimeout))
	defer func() { _ = rc.SetWriteDeadline(time.Time{}) }() // or it would end the connection's next request
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController through.
func (w *hurried) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// readQuery refuses queries that cannot be read whole, and filters without a
// value: both would otherwise be dropped, and a filter that is dropped widens.
func readQuery(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q, err := url.ParseQuery(r.URL.RawQuery)
		if err != nil {
			problem.Write(w, fault.New(fault.Invalid, "invalid_request", "the query cannot be read").Do("percent-encode its values").Wrap(err))
			return
		}
		for _, name := range slices.Sorted(maps.Keys(q)) {
			if name != "cursor" && slices.Contains(q[name], "") {
				problem.Write(w, fault.New(fault.Invalid, "invalid_request", "a query parameter has no value").
					Because("%.40q", name).Do("leave it out, or give it a value"))
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

// unknownRoutes answers what the mux does not know with problem documents.
func unknownRoutes(mux *http.ServeMux, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if path.Clean(r.URL.Path) != r.URL.Path { // the mux would redirect
			problem.Write(w, fault.New(fault.NotFound, "route_not_found", "there is no such route").Do("see /v1/openapi.json"))
			return
		}
		if _, pattern := mux.Handler(r); pattern != "" {
			next.ServeHTTP(w, r)
			return
		}
		// The mux tells 405 from 404 by the answer it would give.
		probe := &probeWriter{h: http.Header{}}
		mux.ServeHTTP(probe, r)
		if probe.status == http.StatusMethodNotAllowed {
			w.Header().Set("Allow", probe.h.Get("Allow"))
			d := problem.Of(fault.New(fault.Invalid, "method_not_allowed", "the route does not take this method").Do("use one of the methods in Allow"))
			d.Status, d.Title, d.Request = probe.status, http.StatusText(probe.status), requestID(r.Context())
			problem.WriteDocument(w, d)
			return
		}
		problem.Write(w, fault.New(fault.NotFound, "route_not_found", "there is no such route").Do("see /v1/openapi.json"))
	})
}

type probeWriter struct {
	h      http.Header
	status int
}

func (p *probeWriter) Header() http.Header         { return p.h }
func (p *probeWriter) Write(b []byte) (int, error) { return len(b), nil }
func (p *probeWriter) WriteHeader(code int)        { p.status = code }
