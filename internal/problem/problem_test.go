package problem

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/space-platform/space/internal/fault"
)

func TestWriteMapsClassAndKeepsCausesInside(t *testing.T) {
	at := uint64(42)
	e := fault.New(fault.Conflict, "stdin_offset_ahead", "the offset is ahead").Do("send from expected")
	e.Expected = &at
	w := httptest.NewRecorder()
	w.Header().Set("X-Request-Id", "r1")
	Write(w, fmt.Errorf("session: %w", e))
	var d Document
	if err := json.Unmarshal(w.Body.Bytes(), &d); err != nil {
		t.Fatal(err)
	}
	if w.Code != 409 || d.Status != 409 || d.Code != "stdin_offset_ahead" || *d.Expected != 42 || d.Request != "r1" || d.Retryable {
		t.Fatalf("%d %+v", w.Code, d)
	}
	if ct := w.Header().Get("Content-Type"); ct != ContentType {
		t.Fatal(ct)
	}

	w = httptest.NewRecorder()
	Write(w, errors.New("open /var/lib/space/secret: permission denied"))
	if w.Code != 500 || strings.Contains(w.Body.String(), "/var/lib") || !strings.Contains(w.Body.String(), `"internal"`) {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
}

func TestEveryClassHasAStatus(t *testing.T) {
	for _, c := range []fault.Class{fault.Invalid, fault.Unauthenticated, fault.Denied, fault.NotFound, fault.Conflict, fault.Gone,
		fault.Unprocessable, fault.TooLarge, fault.Exhausted, fault.Unavailable, fault.Deadline, fault.Internal} {
		if _, ok := statuses[c]; !ok {
			t.Errorf("%s has no status", c)
		}
	}
	if Status("no such class") != 500 {
		t.Error("an unknown class is not a 500")
	}
}
