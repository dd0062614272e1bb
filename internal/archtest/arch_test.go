// Package archtest holds the rules of design.md section 4 that a compiler does
// not check: who may import whom, who may prove a tenant, and how large a file
// may grow.
package archtest

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/space-platform/space/"

// allowed lists, for packages that must know little, all that they may import
// of ours. Test files are free.
var allowed = map[string][]string{
	"internal/sandbox":   {"internal/fault"},
	"internal/fault":     {},
	"internal/failpoint": {},
	"internal/clock":     {},
	"internal/tenant":    {},
	"internal/operation": {"internal/fault", "internal/sandbox"},
	"internal/guest":     {"api/guestapi"},
	"api/guestapi":       {},
	"internal/runtime":   {"internal/sandbox", "internal/fault"},
	"internal/audit":     {"internal/fault"},
	"cmd/space-guest":    {"internal/guest", "internal/channel", "api/guestapi"},
}

// forbidden lists imports that break the direction, with the reason.
var forbidden = []struct{ from, to, why string }{
	{"internal/runtime/", "internal/store", "runtimes import no store"},
	{"internal/runtime/", "internal/node", "runtimes know nothing of the node"},
	{"internal/runtime/", "internal/control", "runtimes know nothing of control"},
	{"internal/httpapi", "internal/runtime", "front doors import control, never a runtime"},
	{"internal/httpapi", "internal/node", "front doors import control"},
	{"internal/control", "internal/runtime", "control meets machines only through the node API"},
	{"internal/control", "internal/host", "control never talks to the host room"},
	{"internal/node", "internal/store", "control store and node store meet only through the node API"},
	{"internal/session", "internal/store", "sessions live only on the node"},
	{"internal/store", "internal/node", "control store and node store meet only through the node API"},
	{"internal/host", "internal/node", "the room serves ids, it knows no policy"},
	{"internal/host", "internal/store", "the room has no database"},
	{"client", "internal/control", "the public client speaks HTTP only"},
}

// minters may call tenant.Mint.
var minters = []string{"internal/auth", "internal/store", "internal/node", "internal/session", "internal/tenant"}

type source struct {
	path string // slash path below the module root
	pkg  string
	file *ast.File
	test bool
}

func sources(t *testing.T) []source {
	t.Helper()
	root := "../.."
	var out []source
	fset := token.NewFileSet()
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "build" || d.Name() == "testdata" || d.Name() == "bin") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(p, ".go") {
			return nil
		}
		f, err := parser.ParseFile(fset, p, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		rel = filepath.ToSlash(rel)
		out = append(out, source{rel, filepath.ToSlash(filepath.Dir(rel)), f, strings.HasSuffix(rel, "_test.go")})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 20 {
		t.Fatalf("found only %d files: the walk is broken", len(out))
	}
	return out
}

func imports(f *ast.File) []string {
	var out []string
	for _, i := range f.Imports {
		if p := strings.Trim(i.Path.Value, `"`); strings.HasPrefix(p, module) {
			out = append(out, strings.TrimPrefix(p, module))
		}
	}
	return out
}

func under(pkg, prefix string) bool {
	return pkg == strings.TrimSuffix(prefix, "/") || strings.HasPrefix(pkg, strings.TrimSuffix(prefix, "/")+"/")
}

func TestImportDirection(t *testing.T) {
	for _, s := range sources(t) {
		testPkg := s.test || strings.HasSuffix(s.pkg, "test") || strings.HasSuffix(s.pkg, "/malicious")
		for _, imp := range imports(s.file) {
			if ok, has := allowed[s.pkg]; has && !testPkg {
				found := false
				for _, a := range ok {
					found = found || a == imp
				}
				if !found {
					t.Errorf("%s imports %s: %s may import only %v of ours", s.path, imp, s.pkg, ok)
				}
			}
			for _, r := range forbidden {
				if !testPkg && under(s.pkg, r.from) && under(imp, r.to) {
					t.Errorf("%s imports %s: %s", s.path, imp, r.why)
				}
			}
		}
	}
}

func TestTenantMinters(t *testing.T) {
	for _, s := range sources(t) {
		if s.test || strings.HasSuffix(s.pkg, "test") {
			continue
		}
		ok := false
		for _, m := range minters {
			ok = ok || under(s.pkg, m)
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if sel, is := n.(*ast.SelectorExpr); is && sel.Sel.Name == "Mint" {
				if x, is := sel.X.(*ast.Ident); is && x.Name == "tenant" && !ok {
					t.Errorf("%s calls tenant.Mint: only %v may prove a tenant", s.path, minters)
				}
			}
			return true
		})
	}
}

func TestPackagesAreDocumentedAndNamed(t *testing.T) {
	docs := map[string]bool{}
	for _, s := range sources(t) {
		if s.test {
			continue
		}
		docs[s.pkg] = docs[s.pkg] || s.file.Doc != nil
		switch name := s.file.Name.Name; name {
		case "util", "utils", "common", "helper", "helpers", "types", "misc", "shared":
			t.Errorf("%s: package %s is named for nothing", s.path, name)
		}
	}
	for pkg, ok := range docs {
		if !ok {
			t.Errorf("package %s has no doc comment", pkg)
		}
	}
}

func TestFilesStaySmall(t *testing.T) {
	for _, s := range sources(t) {
		f, err := os.Open(filepath.Join("../..", filepath.FromSlash(s.path)))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for sc := bufio.NewScanner(f); sc.Scan(); {
			n++
		}
		_ = f.Close()
		if n > 850 {
			t.Errorf("%s has %d lines: split it by meaning (about 800 is the limit)", s.path, n)
		}
	}
}
