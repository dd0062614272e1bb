package httpapi_test

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/space-platform/space/api/openapi"
)

type docParam struct {
	Name, In string
}

type docOperation struct {
	OperationID string                 `json:"operationId"`
	Parameters  []docParam             `json:"parameters"`
	Security    *[]map[string][]string `json:"security"`
	Responses   map[string]struct {
		Ref string `json:"$ref"`
	} `json:"responses"`
}

func (o docOperation) has(in, name string) bool {
	return slices.Contains(o.Parameters, docParam{name, in})
}

// TestDocument checks what cannot be seen from the types: errors are problems,
// mutations take idempotency keys, what changes a sandbox can wait.
func TestDocument(t *testing.T) {
	var doc struct {
		OpenAPI    string                                `json:"openapi"`
		Paths      map[string]map[string]json.RawMessage `json:"paths"`
		Components struct {
			Schemas   map[string]json.RawMessage `json:"schemas"`
			Responses map[string]struct {
				Content map[string]struct {
					Schema struct {
						Ref string `json:"$ref"`
					} `json:"schema"`
				} `json:"content"`
			} `json:"responses"`
			SecuritySchemes map[string]json.RawMessage `json:"securitySchemes"`
		} `json:"components"`
		Security []map[string][]string `json:"security"`
	}
	must(t, json.Unmarshal(openapi.Document, &doc))
	if !strings.HasPrefix(doc.OpenAPI, "3.1.") || len(doc.Security) != 1 || doc.Security[0]["key"] == nil || doc.Components.SecuritySchemes["key"] == nil || doc.Components.SecuritySchemes["token"] == nil {
		t.Errorf("openapi %q, security %v", doc.OpenAPI, doc.Security)
	}
	ids := map[string]bool{}
	for path, item := range doc.Paths {
		for method, raw := range item {
			if method == "servers" {
				continue
			}
			var op docOperation
			must(t, json.Unmarshal(raw, &op))
			name := method + " " + path
			if op.OperationID == "" || ids[op.OperationID] {
				t.Errorf("%s: operation id %q is missing or not the only one", name, op.OperationID)
			}
			ids[op.OperationID] = true
			for status, r := range op.Responses {
				if status[0] < '4' || path == "/v1/health" && status == "503" {
					continue
				}
				component := doc.Components.Responses[strings.TrimPrefix(r.Ref, "#/components/responses/")]
				if component.Content["application/problem+json"].Schema.Ref != "#/components/schemas/Problem" {
					t.Errorf("%s: the answer %s (%s) is no problem document", name, status, r.Ref)
				}
			}
			if strings.HasPrefix(path, "/d/") {
				if op.Security == nil || len(*op.Security) != 1 || (*op.Security)[0]["token"] == nil {
					t.Errorf("%s: the data plane takes tokens, the document says %v", name, op.Security)
				}
				continue
			}
			if mutates := method != "get"; op.has("header", "Idempotency-Key") != mutates {
				t.Errorf("%s: idempotency key documented: %v", name, !mutates)
			}
			_, accepted := op.Responses["202"]
			_, done := op.Responses["200"]
			if accepted && (!done || !op.has("query", "wait")) {
				t.Errorf("%s answers 202: it can wait and be done", name)
			}
			if strings.Contains(path, "{id}") && !op.has("path", "id") {
				t.Errorf("%s: the id is not documented", name)
			}
		}
	}
	for schema, words := range map[string][]string{
		"CreateSandbox": {`"emulated"`, `"userkernel"`, `"additionalProperties": false`}, "Sandbox": {`"quarantined"`, `"emulated"`},
		"Exit": {`"out_of_memory"`, `"start_failed"`}, "MintToken": {`"files:rw"`, `"port"`}, "Operation": {`"cancelled"`}, "CreateSession": {`"drop"`},
	} {
		for _, w := range words {
			if !strings.Contains(string(doc.Components.Schemas[schema]), w) {
				t.Errorf("schema %s lacks %s", schema, w)
			}
		}
	}
	if doc.Components.Schemas["Failure"] != nil || strings.Contains(string(openapi.Document), "schemas/Failure") {
		t.Error("an error schema of our implementation shows")
	}
	if strings.Contains(string(doc.Components.Schemas["Sandbox"]), "additionalProperties\": false") {
		t.Error("an answer's schema forbids fields that later versions add")
	}
}

// TestDataPlaneDocument compares the document with the routes that the data
// plane registers: a hand-written list would be forgotten.
func TestDataPlaneDocument(t *testing.T) {
	var doc struct {
		Paths map[string]map[string]json.RawMessage `json:"paths"`
	}
	must(t, json.Unmarshal(openapi.Document, &doc))
	var documented []string
	for path, item := range doc.Paths {
		for method := range item {
			if method != "servers" && strings.HasPrefix(path, "/d/") {
				documented = append(documented, strings.ToUpper(method)+" "+path)
			}
		}
	}
	src, err := os.ReadFile(root + "/internal/session/dataplane.go")
	must(t, err)
	var served []string
	for _, m := range regexp.MustCompile(`mux\.Handle(?:Func)?\("([A-Z]+ /d/[^"]+)"`).FindAllStringSubmatch(string(src), -1) {
		served = append(served, m[1])
	}
	slices.Sort(documented)
	slices.Sort(served)
	if len(served) < 8 || !slices.Equal(documented, served) {
		t.Errorf("documented:\n%s\nserved:\n%s", strings.Join(documented, "\n"), strings.Join(served, "\n"))
	}
}

func TestDocumentIsServed(t *testing.T) {
	h := newHost(t)
	r := h.call("", "GET", "/v1/openapi.json", "")
	if r.status != 200 || string(r.body) != string(openapi.Document) || !strings.Contains(r.header.Get("Content-Type"), "openapi+json") {
		t.Errorf("%d %s: what is served is not the committed document", r.status, r.header.Get("Content-Type"))
	}
}
