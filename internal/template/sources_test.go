package template

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func writeFile(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestHostSourcesTakeTheHostsMirrors(t *testing.T) {
	dir := t.TempDir()
	list := writeFile(t, filepath.Join(dir, "sources.list"), `
# deb http://commented.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/x.gpg] http://mirror.example/debian/ bookworm main contrib # trailing
deb-src http://src.example/debian bookworm main
deb http://old.example/debian bullseye main
deb http://other.example/apt stable main
deb http://user:pw@secret.example/debian bookworm main
deb file:///srv/debian bookworm main
deb cdrom:[Debian]/ bookworm main
deb [broken http://x.example bookworm main
`)
	d := filepath.Join(dir, "d")
	writeFile(t, filepath.Join(d, "debian.sources"), `Types: deb
# a comment inside
URIs: http://second.example/debian
Suites: bookworm
 bookworm-updates
Components: main

Types: deb
URIs: https://security.example:8443/debian-security
Suites: bookworm-security
Components: main
Enabled: yes

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: http://backports.example/debian
Suites: bookworm-backports
Components: main
`)
	writeFile(t, filepath.Join(d, "vendor.list"), "deb https://vendor.example/apt nodistro main\n")
	got := hostSources("bookworm", list, d)
	want := []source{
		{"http://mirror.example/debian", "bookworm", "main"},
		{"http://second.example/debian", "bookworm", "main"},
		{"http://second.example/debian", "bookworm-updates", "main"},
		{"https://security.example:8443/debian-security", "bookworm-security", "main"},
	}
	if !slices.Equal(got, want) {
		t.Fatalf("sources\n%v, want\n%v", got, want)
	}
}

func TestHostSourcesFallBackToDebian(t *testing.T) {
	dir := t.TempDir()
	list := writeFile(t, filepath.Join(dir, "sources.list"), "deb http://archive.example/ubuntu noble main\ndeb http://m.example/debian bookworm-updates main\n")
	if got := hostSources("bookworm", list, dir); !slices.Equal(got, defaultSources(bootstrapper, "bookworm")) {
		t.Fatalf("sources %v", got)
	}
	if got := hostSources("bookworm", filepath.Join(dir, "none"), filepath.Join(dir, "none.d")); len(got) != 3 {
		t.Fatalf("sources %v", got)
	}
}

func TestParseProxy(t *testing.T) {
	for out, want := range map[string]string{
		"http://cache.example:3142/\n": "cache.example:3142", "": "", "DIRECT\n": "", "false\n": "", "socks5h://x:1\n": "", "http://\n": "", "\n": "",
	} {
		got := ""
		if u := parseProxy(out); u != nil {
			got = u.Host
		}
		if got != want {
			t.Errorf("%q: %q, want %q", out, got, want)
		}
	}
}

func FuzzSources(f *testing.F) {
	f.Add("deb http://a.example/debian bookworm main")
	f.Add("Types: deb\nURIs: http://a.example/x\nSuites: bookworm\nComponents: main\n")
	f.Add("deb [a=b] http://a\"b/debian bookworm main\n x")
	f.Fuzz(func(t *testing.T, s string) {
		for _, src := range append(parseList(strings.NewReader(s), "bookworm"), parseDeb822(strings.NewReader(s), "bookworm")...) {
			if strings.ContainsAny(src.uri, " \t\n\"'[]\\") || !strings.HasPrefix(src.uri, "http") && !strings.HasPrefix(strings.ToLower(src.uri), "http") {
				t.Fatalf("uri %q accepted", src.uri)
			}
			if !strings.HasPrefix(src.suite, "bookworm") || src.components != "main" {
				t.Fatalf("source %v accepted", src)
			}
		}
	})
}

func TestDefaultSourcesAreTheBootstrappers(t *testing.T) {
	program := writeFile(t, filepath.Join(t.TempDir(), "mmdebstrap"),
		"my $mirror = 'http://a.example/debian';\nmy $sec = 'http://b.example/debian-security';\n$mirror = 'http://c.example/debian'; # later\n'http://x.example/ubuntu'")
	want := []source{
		{"http://a.example/debian", "bookworm", "main"},
		{"http://a.example/debian", "bookworm-updates", "main"},
		{"http://b.example/debian-security", "bookworm-security", "main"},
	}
	if got := defaultSources(program, "bookworm"); !slices.Equal(got, want) {
		t.Fatalf("%v, want %v", got, want)
	}
	if got := defaultSources(program+".none", "bookworm"); got != nil {
		t.Fatalf("of no program: %v", got)
	}
}
