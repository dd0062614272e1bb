// Package openapi holds the OpenAPI 3.1 document of the native API, generated
// from the types of package spaceapi and the routes of internal/httpapi. It is
// what servers serve at /v1/openapi.json.
package openapi

import _ "embed"

//go:generate go run ./gen openapi.json

// Document is the document as JSON.
//
//go:embed openapi.json
var Document []byte
