// Package httpapi is the native control API over HTTP: routes, authentication,
// error documents and the OpenAPI 3.1 document that is derived from the types.
// It holds no logic: every route is one call of control.API.
//
// # Order of a request
//
// request id → log and panic guard → Host and Origin check → body bound →
// authentication (all routes but health and the document) → schema validation
// → control.
package httpapi

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/httpguard"
	"github.com/space-platform/space/internal/problem"
	"github.com/space-platform/space/internal/sandbox"
)

// MaxBody bounds a request body of the control API, in bytes: above the largest
// exec with its input.
const MaxBody = 8 << 20

// Authenticator proves who a bearer is.
type Authenticator interface {
	// Verify answers a fault Unauthenticated for anything but a valid key.
	Verify(ctx context.Context, bearer string) (control.Principal, error)
}

// Config is what the front door needs.
type Config struct {
	Control control.API
	Auth    Authenticator
	Guard   httpguard.Guard
	// DataURL is the base of the data plane as clients reach it, without a slash at the end.
	DataURL string
	Version string
	Log     *slog.Logger
	// Metrics, when set, is served at /metrics to keys with scope operator.
	Metrics http.Handler
}

type server struct {
	Config
	api huma.API
}

// New gives the handler of the control API.
func New(c Config) http.Handler {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	s := &server{Config: c}
	mux := http.NewServeMux()
	s.register(mux)
	if c.Metrics != nil {
		mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
			if err := principal(r.Context()).Require(scopeOperator); err != nil {
				problem.Write(w, err)
				return
			}
			c.Metrics.ServeHTTP(w, r)
		})
	}
	return s.outer(c.Guard.Wrap(s.authenticate(unknownRoutes(mux))))
}

// Document gives the OpenAPI document as indented JSON, without a server.
func Document(version string) ([]byte, error) {
	s := &server{Config: Config{Version: version}}
	s.register(http.NewServeMux())
	b, err := json.MarshalIndent(s.api.OpenAPI(), "", "  ")
	return append(b, '\n'), err
}

func (s *server) register(mux *http.ServeMux) {
	cfg := huma.DefaultConfig("SPACE", s.Version)
	cfg.Info.Description = "Sandboxed Platform for Agentic Code Execution: the native control API."
	cfg.Info.License = &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}
	cfg.OpenAPIPath, cfg.DocsPath, cfg.SchemasPath = "/v1/openapi", "", ""
	cfg.CreateHooks = nil // no $schema links: bodies are exactly what spaceapi says
	cfg.RejectUnknownQueryParameters = true
	cfg.Formats = map[string]huma.Format{"application/json": huma.DefaultJSONFormat, "json": huma.DefaultJSONFormat}
	cfg.DefaultFormat = "application/json"
	cfg.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"key": {Type: "http", Scheme: "bearer", Description: "an API key"},
	}
	cfg.Security = []map[string][]string{{"key": {}}}
	s.api = humago.New(mux, cfg)
	s.sandboxes()
	s.operations()
	s.sessions()
	s.installation()
}

// route adds one operation with the answers that every route may give.
func route[I, O any](s *server, id, method, path, tag, summary string, status int, h func(context.Context, *I) (*O, error)) {
	op := huma.Operation{
		OperationID: id, Method: method, Path: path, Tags: []string{tag}, Summary: summary,
		DefaultStatus: status, MaxBodyBytes: MaxBody, BodyReadTimeout: 30 * time.Second,
		Errors: []int{400, 401, 403, 404, 409, 410, 413, 422, 429, 500, 503},
	}
	huma.Register(s.api, op, func(ctx context.Context, in *I) (*O, error) {
		out, err := h(ctx, in)
		if err != nil {
			return nil, s.failure(ctx, err)
		}
		return out, nil
	})
}

// Failure is a problem document as huma's error type.
type Failure struct{ spaceapi.Problem }

// Error implements error.
func (f *Failure) Error() string { return f.Code + ": " + f.Detail }

// GetStatus implements huma.StatusError.
func (f *Failure) GetStatus() int { return f.Status }

// ContentType makes error answers problem documents.
func (f *Failure) ContentType(string) string { return problem.ContentType }

var (
	_ huma.StatusError       = (*Failure)(nil)
	_ huma.ContentTypeFilter = (*Failure)(nil)
)

func documentOf(err error) spaceapi.Problem {
	d := problem.Of(err)
	return spaceapi.Problem{
		Type: d.Type, Title: d.Title, Status: d.Status, Code: d.Code, Detail: d.Detail,
		Cause: d.Cause, Remedy: d.Remedy, Retryable: d.Retryable, Expected: d.Expected,
	}
}

func (s *server) failure(ctx context.Context, err error) error {
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		err = fault.New(fault.Deadline, "client_gone", "the client hung up before the answer").Wrap(err)
	}
	f := &Failure{documentOf(err)}
	f.RequestID = requestID(ctx)
	if f.Status >= 500 {
		s.Log.ErrorContext(ctx, "request failed", "request", f.RequestID, "code", f.Code, "err", err)
	}
	if f.Status == http.StatusTooManyRequests || f.Status == http.StatusServiceUnavailable {
		return huma.ErrorWithHeaders(f, http.Header{"Retry-After": {"1"}})
	}
	return f
}

// codes of the errors that huma finds by itself.
var codes = map[int]string{
	400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 406: "not_acceptable",
	408: "body_timeout", 413: "body_too_large", 415: "unsupported_media_type", 422: "invalid_request", 500: "internal",
}

func init() {
	// huma's error maker is a package variable; this package is its only user.
	huma.NewErrorWithContext = func(hc huma.Context, status int, msg string, errs ...error) huma.StatusError {
		if status == http.StatusUnprocessableEntity {
			status = http.StatusBadRequest // 422 is kept for a reused idempotency key
		}
		f := newFailure(status, msg, errs...)
		if hc != nil {
			f.RequestID = requestID(hc.Context())
		}
		return f
	}
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError { return newFailure(status, msg, errs...) }
}

func newFailure(status int, msg string, errs ...error) *Failure {
	f := &Failure{spaceapi.Problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Code: codes[status], Detail: msg}}
	if f.Code == "" {
		f.Code = "invalid_request"
	}
	if status >= 500 {
		f.Code, f.Detail = "internal", "something went wrong on our side"
		return f
	}
	var why []string
	for _, e := range errs {
		if d, ok := e.(huma.ErrorDetailer); ok {
			// The value is left out: it may be a secret of the caller.
			why = append(why, strings.TrimSpace(d.ErrorDetail().Location+" "+d.ErrorDetail().Message))
		}
		if len(why) == 10 {
			break
		}
	}
	f.Cause = strings.Join(why, "; ")
	f.Remedy = "mend the request as the OpenAPI document at /v1/openapi.json says"
	return f
}

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
		r.Body = http.MaxBytesReader(sw, r.Body, MaxBody+1)
		defer func() {
			if p := recover(); p != nil {
				s.Log.Error("panic in a request", "request", id, "panic", p, "stack", string(debug.Stack()))
				if sw.status == 0 {
					problem.Write(sw, fault.New(fault.Internal, "internal", "something went wrong on our side"))
				}
			}
			// The path without its query: queries may hold tenant data.
			s.Log.Debug("request", "request", id, "method", r.Method, "path", r.URL.Path, "status", sw.status, "ms", time.Since(began).Milliseconds())
		}()
		next.ServeHTTP(sw, r)
	})
}

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
var open = map[string]bool{"/v1/health": true, "/v1/openapi.json": true, "/v1/openapi.yaml": true}

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

// unknownRoutes answers what the mux does not know with problem documents.
func unknownRoutes(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pattern := mux.Handler(r); pattern != "" {
			mux.ServeHTTP(w, r)
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

// mutation is what every change of state carries.
type mutation struct {
	IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"names the mutation: a repeat with the same key and body is the same one"`
	Wait           string `query:"wait" maxLength:"10" pattern:"^[0-9]{1,5}(ms|s|m)?$" doc:"hold the answer until the operation ended, at most this long (30s)"`
	method, route  string
	body           []byte
}

// Resolve keeps what identifies the request; huma calls it after parsing.
func (m *mutation) Resolve(ctx huma.Context) []error {
	u := ctx.URL()
	m.method, m.route = ctx.Method(), u.EscapedPath()
	return nil
}

func (m *mutation) request(ctx context.Context, body any) (control.Request, error) {
	r := control.Request{ID: requestID(ctx), IdempotencyKey: m.IdempotencyKey, Method: m.method, Route: m.route}
	var err error
	if r.Wait, err = waitOf(m.Wait); err != nil {
		return r, err
	}
	if m.IdempotencyKey != "" {
		b, err := json.Marshal(body) // canonical: field order of the type, sorted maps
		if err != nil {
			return r, err
		}
		sum := sha256.Sum256(b)
		r.BodyHash = sum[:]
	}
	return r, nil
}

func waitOf(s string) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	if !strings.HasSuffix(s, "s") && !strings.HasSuffix(s, "m") {
		s += "s"
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, fault.New(fault.Invalid, "invalid_request", "wait is not a duration").Do("write wait=30s")
	}
	return d, nil
}
