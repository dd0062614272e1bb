package secret

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// revealers may call Value.Reveal, each with its reason.
var revealers = map[string]string{
	"internal/secret":  "its home",
	"internal/auth":    "hashes a presented key; writes the first admin key to its file",
	"internal/cli":     "shows a minted key to its owner, once; sends it as bearer",
	"internal/httpapi": "answers a minted key or token to its owner, once",
	"cmd/space":        "shows the first admin key to the operator, once",
	"internal/control": "hands a minted key to the front door",
	"internal/session": "sends a tenant's environment to the guest that it is for",
}

// TestRevealIsConfined reads every file of the project: whoever calls Reveal
// must be on the list. Any method of that name counts, so none can hide.
func TestRevealIsConfined(t *testing.T) {
	root := "../.."
	files := 0
	used := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{".git", "bin", "build", "testdata"}, d.Name()):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		files++
		pkg, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return err
		}
		for _, name := range revealsIn(file) {
			used[pkg] = true
			if revealers[filepath.ToSlash(pkg)] == "" {
				t.Errorf("%s uses %s: %s is not on the list of who may", path, name, pkg)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 20 || !used["internal/secret"] {
		t.Fatalf("the walk is broken: %d files, home seen: %v", files, used["internal/secret"])
	}
}

// revealsIn gives every mention of the method, called or taken as a value.
func revealsIn(file *ast.File) []string {
	var out []string
	ast.Inspect(file, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Reveal" {
			out = append(out, "Reveal")
		}
		return true
	})
	return out
}

func TestRevealsAreSeen(t *testing.T) {
	for src, want := range map[string]int{
		`package a; func f(v V) { _ = v.Reveal() }`:       1,
		`package a; func f(v V) { g := v.Reveal; _ = g }`: 1,
		`package a; var g = secret.Value.Reveal`:          1,
		`package a; func Reveal() {}`:                     0,
	} {
		file, err := parser.ParseFile(token.NewFileSet(), "a.go", src, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(revealsIn(file)); got != want {
			t.Errorf("%s: saw %d, want %d", src, got, want)
		}
	}
}
