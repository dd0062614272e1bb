package httpapi_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/problem"
)

const root = "../.."

// computed resolves codes that the source does not write as one literal, by file
// and expression. An expression that is not here fails the test.
var computed = map[string][]string{
	"internal/control/validate.go: code":                   nil, // of invalid(): its callers are read
	"internal/control/validate.go: f.code":                 {"invalid_cpu", "invalid_memory", "invalid_disk", "invalid_processes"},
	"internal/control/control.go: part + \"_unavailable\"": {"store_unavailable", "node_unavailable"},
	"internal/guestclient/client.go: e.Code":               nil, // guestapi's codes
	"internal/operation/operation.go: e.Code":              nil, // of a fault
	"internal/httpapi/convert.go: p.Code":                  nil, // of a record
	"internal/problem/problem.go: e.Code":                  nil, // of a fault
	"internal/httpapi/httpapi.go: d.Code":                  nil, // of a fault
	"internal/httpapi/httpapi.go: codes[status]":           nil, // the map is read
	"client/event.go: e.Ended.Code":                        nil, // of an event
	"internal/node/problem.go: \"machine_\" + string(s) + \"_failed\"": {
		"machine_look_failed", "machine_create_failed", "machine_start_failed", "machine_configure_failed", "machine_pause_failed", "machine_resume_failed", "machine_stop_failed", "machine_delete_failed",
	},
	"internal/control/observe.go: \"sandbox_\" + string(obs.State)": {"sandbox_failed", "sandbox_quarantined"},
	"internal/control/observe.go: \"sandbox_\" + string(o.State)":   {"sandbox_paused", "sandbox_stopped", "sandbox_deleted", "sandbox_failed", "sandbox_quarantined"},
}

var snake = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)

type found struct{ where, class string }

// sourceCodes reads every file of the project for codes.
func sourceCodes(t *testing.T) map[string][]found {
	t.Helper()
	out := map[string][]found{}
	used := map[string]bool{}
	fset := token.NewFileSet()
	files := 0
	must(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && (name == ".git" || name == "build" || name == "bin" || name == "testdata" || strings.HasSuffix(name, "test") || name == "malicious" || name == "fake") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(fset, path, nil, 0)
		if err != nil {
			return err
		}
		files++
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		add := func(e ast.Expr, class string) {
			if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				code, err := strconv.Unquote(lit.Value)
				if err != nil || !snake.MatchString(code) {
					t.Errorf("%s: %s is no code", fset.Position(e.Pos()), lit.Value)
				}
				out[code] = append(out[code], found{rel, class})
				return
			}
			var b strings.Builder
			if err := printer.Fprint(&b, fset, e); err != nil {
				t.Fatal(err)
			}
			key := rel + ": " + b.String()
			codes, ok := computed[key]
			if !ok {
				t.Errorf("%s: the test does not know which codes %s can be", fset.Position(e.Pos()), b.String())
			}
			used[key] = true
			for _, c := range codes {
				out[c] = append(out[c], found{rel, class})
			}
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				if f, ok := n.Fun.(*ast.Ident); ok && f.Name == "invalid" && strings.HasPrefix(rel, "internal/control/") {
					add(n.Args[0], "Invalid")
				}
				if f, ok := n.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "New" && fmt.Sprint(f.X) == "fault" {
					class := ""
					if c, ok := n.Args[0].(*ast.SelectorExpr); ok {
						class = c.Sel.Name
					}
					add(n.Args[1], class)
				}
			case *ast.CompositeLit:
				kind := ""
				switch x := n.Type.(type) {
				case *ast.SelectorExpr:
					kind = x.Sel.Name
				case *ast.Ident:
					kind = x.Name
				}
				for i, el := range n.Elts {
					kv, keyed := el.(*ast.KeyValueExpr)
					switch {
					case keyed && fmt.Sprint(kv.Key) == "Code":
						// An exit code is a number.
						if lit, ok := kv.Value.(*ast.BasicLit); kind == "Problem" || kind == "Document" || kind == "" && ok && lit.Kind == token.STRING {
							add(kv.Value, "")
						}
					case kind == "final" && i == 0 && rel == "internal/session/pump.go":
						add(el, "")
					}
				}
			case *ast.ValueSpec:
				for i, name := range n.Names {
					if rel == "api/guestapi/code.go" && strings.HasPrefix(name.Name, "Code") {
						add(n.Values[i], "")
					}
					if rel == "internal/httpapi/httpapi.go" && name.Name == "codes" {
						for _, el := range n.Values[i].(*ast.CompositeLit).Elts {
							add(el.(*ast.KeyValueExpr).Value, "")
						}
					}
				}
			}
			return true
		})
		return nil
	}))
	if files < 80 || len(out) < 100 {
		t.Fatalf("%d files, %d codes: the walk is broken", files, len(out))
	}
	for key := range computed {
		if !used[key] {
			t.Errorf("computed has %q, which is not in the source any more", key)
		}
	}
	return out
}

// TestErrorsAreDocumented: docs/errors.md lists every code, each with the class
// and status that the source gives it, and no code that does not exist.
func TestErrorsAreDocumented(t *testing.T) {
	text, err := os.ReadFile(root + "/docs/errors.md")
	must(t, err)
	rows := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		var cells []string
		for _, c := range strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|") {
			cells = append(cells, strings.TrimSpace(c))
		}
		code := strings.Trim(cells[0], "`")
		if rows[code] != nil {
			t.Errorf("%s is listed twice", code)
		}
		if len(cells) != 6 || slices.Contains(cells, "") {
			t.Fatalf("a row is not whole: %q", cells)
		}
		rows[code] = cells
	}
	source := sourceCodes(t)
	for _, code := range slices.Sorted(maps.Keys(source)) {
		row := rows[code]
		if row == nil {
			t.Errorf("docs/errors.md lacks %s (%v)", code, source[code])
			continue
		}
		for _, f := range source[code] {
			if f.class == "" {
				continue
			}
			class := classes[f.class]
			if string(class) != row[1] && code != "not_found" && code != "lifetime_over" {
				t.Errorf("%s is %s in %s, %s in docs/errors.md", code, class, f.where, row[1])
			}
			status := strconv.Itoa(problem.Status(class))
			if plain, ok := map[string]string{"method_not_allowed": "405", "body_timeout": "408"}[code]; ok {
				status = plain
			}
			if row[2] != status {
				t.Errorf("%s is answered as %s, docs/errors.md says %s", code, status, row[2])
			}
		}
	}
	for _, code := range slices.Sorted(maps.Keys(rows)) {
		if source[code] == nil {
			t.Errorf("docs/errors.md lists %s, which no source gives", code)
		}
	}
}

var classes = map[string]fault.Class{
	"Invalid": fault.Invalid, "Unauthenticated": fault.Unauthenticated, "Denied": fault.Denied, "NotFound": fault.NotFound,
	"Conflict": fault.Conflict, "Gone": fault.Gone, "Unprocessable": fault.Unprocessable, "TooLarge": fault.TooLarge,
	"Exhausted": fault.Exhausted, "Unavailable": fault.Unavailable, "Deadline": fault.Deadline, "Internal": fault.Internal,
}
