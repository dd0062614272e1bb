package e2e

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// docs/cases.md lists every case once; the tests that it names are there, under
// the case's number, and no test of a case is missing in it.
func TestTableOfCases(t *testing.T) {
	const root = "../.."
	there := map[string]bool{} // "path: name"
	caseTest := regexp.MustCompile(`^TestC\d{3}`)
	ok(t, filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && p != root {
			return fs.SkipDir
		}
		if !strings.HasSuffix(p, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		for _, d := range f.Decls {
			if fn, is := d.(*ast.FuncDecl); is && caseTest.MatchString(fn.Name.Name) {
				there[filepath.ToSlash(rel)+": "+fn.Name.Name] = false
			}
		}
		return nil
	}))
	b, err := os.ReadFile(filepath.Join(root, "docs", "cases.md"))
	ok(t, err)
	row := regexp.MustCompile(`(?m)^\| C-(\d{3}) \| ([^|]+) \| (.+) \|$`)
	named := regexp.MustCompile("`([^`]+_test\\.go)`: `(Test[^`]+)`")
	n := 0
	for _, m := range row.FindAllStringSubmatch(string(b), -1) {
		n++
		if want := fmt.Sprintf("%03d", n); m[1] != want {
			t.Fatalf("row %d is of case %s", n, m[1])
		}
		tests := named.FindAllStringSubmatch(m[3], -1)
		if len(tests) == 0 && !strings.Contains(m[3], "waits for ") {
			t.Errorf("case %s has no test and waits for nothing", m[1])
		}
		for _, x := range tests {
			key := x[1] + ": " + x[2]
			if _, is := there[key]; !is {
				t.Errorf("case %s names %s, which is not there", m[1], key)
			}
			if !strings.HasPrefix(x[2], "TestC"+m[1]) {
				t.Errorf("case %s names %s", m[1], x[2])
			}
			there[key] = true
		}
	}
	if n != 85 {
		t.Errorf("%d rows, not 85", n)
	}
	for key, listed := range there {
		if !listed {
			t.Errorf("not in docs/cases.md: %s", key)
		}
	}
}
