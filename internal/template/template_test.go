package template

import (
	"errors"
	"strings"
	"testing"
)

func TestParseReference(t *testing.T) {
	for ref, want := range map[string]string{
		"base": "base:latest", "base:1.0": "base:1.0", "a-b_c.d:x": "a-b_c.d:x", strings.Repeat("a", 63): strings.Repeat("a", 63) + ":latest",
	} {
		name, tag, err := ParseReference(ref)
		if err != nil || name+":"+tag != want {
			t.Errorf("%q: %s:%s, %v", ref, name, tag, err)
		}
	}
	for _, ref := range []string{"", ":", "base:", ":latest", "Base", "base:Latest", "-a", ".a", "a/b", "../a", "a:b:c", "a b", "a\n", strings.Repeat("a", 64), "a:" + strings.Repeat("a", 64), "sha256:"} {
		if _, _, err := ParseReference(ref); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: error %v", ref, err)
		}
	}
}

func FuzzParseReference(f *testing.F) {
	f.Add("base:latest")
	f.Add("../../etc/passwd")
	f.Fuzz(func(t *testing.T, ref string) {
		name, tag, err := ParseReference(ref)
		if err != nil {
			return
		}
		// Both become names of files.
		for _, s := range []string{name, tag} {
			if s == "" || len(s) > 63 || s[0] == '.' || s[0] == '-' || strings.ContainsAny(s, "/:\x00 ") {
				t.Fatalf("%q accepted as %q %q", ref, name, tag)
			}
		}
	})
}

func TestBuiltinRecipesAreValidAndDiffer(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Builtin() {
		if err := r.Validate(); err != nil {
			t.Errorf("%s: %v", r.Reference(), err)
		}
		d, err := r.digest()
		if err != nil || seen[d] {
			t.Errorf("%s: digest %s, %v", r.Reference(), d, err)
		}
		seen[d] = true
	}
	if _, err := Lookup("base"); err != nil {
		t.Error(err)
	}
	if _, err := Lookup("none"); !errors.Is(err, ErrNotFound) {
		t.Errorf("error %v", err)
	}
	// Builtin gives fresh values: who changes one changes nobody else's.
	one, two := Builtin()[0], Builtin()[0]
	one.Files[0].Content, one.Config.Env["PATH"] = "changed", "changed"
	if two.Files[0].Content == "changed" || two.Config.Env["PATH"] == "changed" {
		t.Error("recipes share memory")
	}
}

func TestRecipeValidate(t *testing.T) {
	for what, spoil := range map[string]func(r *Recipe){
		"name":              func(r *Recipe) { r.Name = "../x" },
		"tag":               func(r *Recipe) { r.Tag = "" },
		"suite":             func(r *Recipe) { r.Suite = "--bad" },
		"variant":           func(r *Recipe) { r.Variant = "custom" },
		"package as option": func(r *Recipe) { r.Packages = []string{"--unsafe"} },
		"package list":      func(r *Recipe) { r.Packages = []string{"a,b"} },
		"setup, extract":    func(r *Recipe) { r.Variant = "extract" },
		"setup with NUL":    func(r *Recipe) { r.Setup = "a\x00b" },
		"drop":              func(r *Recipe) { r.Drop = []string{"/["} },
		"relative drop":     func(r *Recipe) { r.Drop = []string{"etc"} },
		"relative file":     func(r *Recipe) { r.Files = []File{{Path: "etc/x"}} },
		"file up":           func(r *Recipe) { r.Files = []File{{Path: "/../x"}} },
		"file mode":         func(r *Recipe) { r.Files = []File{{Path: "/x", Mode: 1 << 20}} },
		"file owner":        func(r *Recipe) { r.Files = []File{{Path: "/x", UID: idCount}} },
		"no user":           func(r *Recipe) { r.Config.User = "" },
		"relative workdir":  func(r *Recipe) { r.Config.WorkDir = "home" },
		"relative shell":    func(r *Recipe) { r.Config.Shell = "sh" },
	} {
		r := base()
		if spoil(&r); !errors.Is(r.Validate(), ErrInvalid) {
			t.Errorf("%s: %v", what, r.Validate())
		}
	}
}

func TestLinesAreBoundedAndPrintable(t *testing.T) {
	var got []string
	l := &lines{emit: func(s string) { got = append(got, s) }}
	for range 3 * tailLines {
		l.Write([]byte("\x1b]0;title\x07 " + strings.Repeat("x", 10*maxLine) + "\xff\n"))
	}
	l.Write([]byte("no end of line"))
	l.flush()
	if len(got) != 3*tailLines+1 || got[len(got)-1] != "no end of line" {
		t.Fatalf("%d lines, last %q", len(got), got[len(got)-1])
	}
	for _, s := range got {
		if len(s) > maxLine || strings.ContainsAny(s, "\x1b\x07") {
			t.Fatalf("line %q", s)
		}
	}
	if n := strings.Count(l.text(), " | "); n != tailLines-1 {
		t.Errorf("%d lines are kept", n+1)
	}
}
