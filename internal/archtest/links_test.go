package archtest

import (
	"go/ast"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	// [text](target), ![text](target), with or without a title.
	inlineLink = regexp.MustCompile(`\]\(\s*<?([^)\s>]+)>?(?:\s+"[^"]*")?\s*\)`)
	// [name]: target
	referenceLink = regexp.MustCompile(`(?m)^\s{0,3}\[[^\]]+\]:\s*<?([^\s>]+)`)
	fencedCode    = regexp.MustCompile("(?ms)^\\s*```.*?^\\s*```")
	inlineCode    = regexp.MustCompile("`[^`\n]*`")
	headingLine   = regexp.MustCompile(`(?m)^#{1,6}\s+(.*?)\s*#*$`)
	notInAnchor   = regexp.MustCompile(`[^\p{L}\p{N}\- _]`)
	// What design pages promise: a test, fuzz or benchmark function, in backquotes.
	namedTest = regexp.MustCompile("`((?:Test|Fuzz|Benchmark)[A-Z][A-Za-z0-9_]*)`")
	// A file or folder of ours, in backquotes.
	namedPath = regexp.MustCompile("`((?:api|client|cmd|docs|internal|runsc|scripts|test)/[A-Za-z0-9_./-]*)`")
)

// links gives the targets that a page names, without those in code.
func links(page string) []string {
	page = inlineCode.ReplaceAllString(fencedCode.ReplaceAllString(page, ""), "")
	var out []string
	for _, re := range []*regexp.Regexp{inlineLink, referenceLink} {
		for _, m := range re.FindAllStringSubmatch(page, -1) {
			out = append(out, m[1])
		}
	}
	return out
}

// anchors gives the fragments by which the headings of a page are reached.
func anchors(page string) map[string]bool {
	out := map[string]bool{}
	for _, m := range headingLine.FindAllStringSubmatch(fencedCode.ReplaceAllString(page, ""), -1) {
		text := strings.ToLower(notInAnchor.ReplaceAllString(m[1], ""))
		out[strings.ReplaceAll(text, " ", "-")] = true
	}
	return out
}

// broken says what is wrong with a link of the page at path; "" when nothing is.
func broken(path, target string) string {
	u, err := url.Parse(target)
	if err != nil {
		return "is not a URL"
	}
	if u.Scheme != "" || u.Host != "" {
		return "" // elsewhere: the network is not asked by a test
	}
	if strings.HasPrefix(u.Path, "/") {
		return "is absolute: write it relative to the page"
	}
	to := path
	if u.Path != "" {
		to = filepath.Join(filepath.Dir(path), filepath.FromSlash(u.Path))
	}
	if _, err := os.Stat(to); err != nil {
		return "leads nowhere"
	}
	if u.Fragment == "" || !strings.HasSuffix(to, ".md") {
		return ""
	}
	b, err := os.ReadFile(to)
	if err != nil {
		return err.Error()
	}
	if !anchors(string(b))[u.Fragment] {
		return "names a heading that is not there"
	}
	return ""
}

func pages(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir("../..", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			switch d.Name() {
			case ".git", "build", "bin", "testdata":
				return fs.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(p, ".md") {
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			out[p] = string(b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 5 {
		t.Fatalf("found only %d pages: the walk is broken", len(out))
	}
	return out
}

func TestLinksResolve(t *testing.T) {
	seen := 0
	for p, text := range pages(t) {
		for _, l := range links(text) {
			seen++
			if why := broken(p, l); why != "" {
				t.Errorf("%s: the link %q %s", strings.TrimPrefix(p, "../../"), l, why)
			}
		}
	}
	if seen == 0 {
		t.Error("no page has a link: the search is broken")
	}
}

// Pages name tests as proof and files as places: both must be there.
func TestPagesNameWhatIsThere(t *testing.T) {
	tests := map[string]bool{}
	for _, s := range sources(t) {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
				tests[f.Name.Name] = true
			}
		}
	}
	seen := 0
	for p, text := range pages(t) {
		for _, m := range namedTest.FindAllStringSubmatch(text, -1) {
			seen++
			if !tests[m[1]] {
				t.Errorf("%s names the test %s, which is not there", strings.TrimPrefix(p, "../../"), m[1])
			}
		}
		for _, m := range namedPath.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join("../..", filepath.FromSlash(m[1]))); err != nil {
				t.Errorf("%s names %s, which is not there", strings.TrimPrefix(p, "../../"), m[1])
			}
		}
	}
	if seen == 0 {
		t.Error("no page names a test: the search is broken")
	}
}

func TestLinkSearch(t *testing.T) {
	page := "# A `code` heading, twice!\n[a](x.md) ![b](<y.png> \"t\") `[c](no)`\n```\n[d](no)\n```\n[e]: z.md#f\n"
	if got := strings.Join(links(page), " "); got != "x.md y.png z.md#f" {
		t.Errorf("links gave %q", got)
	}
	if !anchors(page)["a-code-heading-twice"] {
		t.Errorf("anchors gave %v", anchors(page))
	}
	here := t.TempDir()
	if err := os.WriteFile(filepath.Join(here, "to.md"), []byte("# There\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for target, ok := range map[string]bool{
		"to.md": true, "to.md#there": true, "https://example.org/": true,
		"no.md": false, "to.md#nowhere": false, "/to.md": false,
	} {
		if why := broken(filepath.Join(here, "from.md"), target); (why == "") != ok {
			t.Errorf("%s: %q", target, why)
		}
	}
}
