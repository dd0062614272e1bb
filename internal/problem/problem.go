// Package problem writes errors as RFC 9457 problem documents. Its table is the
// one place that maps fault classes to HTTP statuses.
package problem

import (
	"encoding/json"
	"net/http"

	"github.com/space-platform/space/internal/fault"
)

// ContentType of a problem document.
const ContentType = "application/problem+json"

// statuses maps each class to its status.
var statuses = map[fault.Class]int{
	fault.Invalid:         http.StatusBadRequest,
	fault.Unauthenticated: http.StatusUnauthorized,
	fault.Denied:          http.StatusForbidden,
	fault.NotFound:        http.StatusNotFound,
	fault.Conflict:        http.StatusConflict,
	fault.Gone:            http.StatusGone,
	fault.Unprocessable:   http.StatusUnprocessableEntity,
	fault.TooLarge:        http.StatusRequestEntityTooLarge,
	fault.Exhausted:       http.StatusTooManyRequests,
	fault.Unavailable:     http.StatusServiceUnavailable,
	fault.Deadline:        http.StatusGatewayTimeout,
	fault.Internal:        http.StatusInternalServerError,
}

// Status gives the HTTP status of a class; 500 for one that is not known.
func Status(c fault.Class) int {
	if s, ok := statuses[c]; ok {
		return s
	}
	return http.StatusInternalServerError
}

// Document is the body: RFC 9457's members and ours.
type Document struct {
	// Type is "about:blank": Code is the stable name of the problem.
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	Code   string `json:"code"`
	// Cause says why, Remedy what to do; both for people.
	Cause     string `json:"cause,omitempty"`
	Remedy    string `json:"remedy,omitempty"`
	Retryable bool   `json:"retryable"`
	// Expected is the one number some codes promise (see fault.Error).
	Expected *uint64 `json:"expected,omitempty"`
	// Request is the request id, for the operator.
	Request string `json:"request_id,omitempty"`
}

// Of makes the document of err. An error that is not a fault is "internal"
// without its text.
func Of(err error) Document {
	e := fault.Of(err)
	status := Status(e.Class)
	return Document{
		Type: "about:blank", Title: http.StatusText(status), Status: status,
		Detail: e.What, Code: e.Code, Cause: e.Why, Remedy: e.Remedy,
		Retryable: e.Retryable, Expected: e.Expected,
	}
}

// Write answers err. The headers must not have been sent yet. A request id is
// taken from the answer's X-Request-Id header, when a front door has set it.
func Write(w http.ResponseWriter, err error) {
	d := Of(err)
	d.Request = w.Header().Get("X-Request-Id")
	WriteDocument(w, d)
}

// WriteDocument answers d as it is.
func WriteDocument(w http.ResponseWriter, d Document) {
	h := w.Header()
	h.Set("Content-Type", ContentType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if d.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="space"`)
	}
	if d.Status == http.StatusTooManyRequests || d.Status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	body, merr := json.Marshal(d)
	if merr != nil { // strings and numbers only: cannot happen
		body = []byte(`{"type":"about:blank","code":"internal","status":500}`)
	}
	w.WriteHeader(d.Status)
	_, _ = w.Write(append(body, '\n')) // a client that is gone needs no answer
}
