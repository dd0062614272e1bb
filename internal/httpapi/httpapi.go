// Package httpapi is the native control API over HTTP: routes, authentication,
// error documents and the OpenAPI 3.1 document that is derived from the types.
// It holds no logic: every route is one call of control.API.
//
// # Order of a request
//
// request id → log and panic guard → Host and Origin check → authentication (all
// routes but health and the document) → the body, whole, within its bounds of
// size and time → schema validation → control.
package httpapi

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/auth"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/httpguard"
	"github.com/space-platform/space/internal/problem"
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
	Version string // of the program, shown by health
	Log     *slog.Logger
	// Metrics, when set, is served at /metrics to keys with scope operator.
	Metrics http.Handler
	// BodyTimeout is how long a client may take to send a request body; 30 s by default.
	BodyTimeout time.Duration
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
	if c.BodyTimeout <= 0 {
		c.BodyTimeout = 30 * time.Second
	}
	s := &server{Config: c}
	mux := http.NewServeMux()
	s.register(mux)
	doc, err := s.document()
	if err != nil { // types of ours only: cannot happen
		panic(err)
	}
	mux.HandleFunc("GET "+documentPath, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/vnd.oai.openapi+json;version=3.1")
		_, _ = w.Write(doc) // a client that is gone needs no answer
	})
	if c.Metrics != nil {
		mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
			if err := principal(r.Context()).Require(auth.Operator); err != nil {
				problem.Write(w, err)
				return
			}
			c.Metrics.ServeHTTP(w, r)
		})
	}
	return s.outer(c.Guard.Wrap(s.authenticate(unknownRoutes(mux, readQuery(s.readBody(holdResults(mux)))))))
}

func (s *server) register(mux *http.ServeMux) {
	cfg := huma.DefaultConfig("SPACE", apiVersion)
	// The document is made once and served by New: huma's own handler makes it
	// at its first request, unguarded against a second one.
	cfg.OpenAPIPath, cfg.DocsPath, cfg.SchemasPath = "", "", ""
	cfg.CreateHooks = nil // no $schema links: bodies are exactly what spaceapi says
	cfg.RejectUnknownQueryParameters = true
	cfg.Formats = map[string]huma.Format{"application/json": huma.DefaultJSONFormat, "json": huma.DefaultJSONFormat}
	cfg.DefaultFormat = "application/json"
	describe(cfg.OpenAPI)
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
		// readBody has bounded body and time already. A deadline that huma sets is
		// never taken back, and would end the requests that wait.
		DefaultStatus: status, MaxBodyBytes: MaxBody, BodyReadTimeout: -1,
		Errors: errorStatuses,
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
	// These are package variables of huma; this package is its only user.
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
	huma.DefaultArrayNullable = false // a list is never null, in requests and in answers
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

// Mutation is what every change of state carries.
type Mutation struct {
	IdempotencyKey string `header:"Idempotency-Key" maxLength:"255" doc:"names the mutation: a repeat with the same key and body is the same one"`
	Wait           string `query:"wait" maxLength:"10" pattern:"^[0-9]{1,5}(ms|s|m)?$" doc:"hold the answer until the operation ended, at most this long (30s)"`
	method, route  string
}

// Resolve keeps what identifies the request; huma calls it after parsing.
func (m *Mutation) Resolve(ctx huma.Context) []error {
	u := ctx.URL()
	m.method, m.route = ctx.Method(), u.EscapedPath()
	return nil
}

func (m *Mutation) request(ctx context.Context, body any) (control.Request, error) {
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
