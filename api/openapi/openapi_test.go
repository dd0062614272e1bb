package openapi_test

import (
	"bytes"
	"testing"

	"github.com/space-platform/space/api/openapi"
	"github.com/space-platform/space/internal/httpapi"
)

func TestCommittedDocumentIsTheGeneratedOne(t *testing.T) {
	want, err := httpapi.Document()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(openapi.Document, want) {
		t.Fatal("api/openapi/openapi.json is old: run go generate ./api/openapi")
	}
}
