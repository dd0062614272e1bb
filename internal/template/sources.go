package template

import (
	"bufio"
	"context"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// source is one place that packages of a suite come from.
type source struct {
	uri        string // such as http://mirror.example/debian
	suite      string // such as bookworm-security
	components string // such as main
}

// Where a Debian host says which mirrors it uses.
const (
	sourcesFile = "/etc/apt/sources.list"
	sourcesDir  = "/etc/apt/sources.list.d"
)

// bootstrapper knows Debian's own mirrors; builds need it anyway.
const bootstrapper = "/usr/bin/mmdebstrap"

var mirrorRE = regexp.MustCompile(`'(https?://[a-z0-9.-]+/debian(?:-security)?)'`)

// defaultSources is for hosts that are not Debian, or of another release: the
// mirrors that mmdebstrap uses when it is told none. None where it is not
// installed, or names none.
func defaultSources(program, suite string) []source {
	b, err := os.ReadFile(program)
	if err != nil {
		return nil // the build says that the program is missing
	}
	var out []source
	for _, m := range mirrorRE.FindAllSubmatch(b, -1) {
		uri, suites := string(m[1]), []string{suite, suite + "-updates"}
		if strings.HasSuffix(uri, "-security") {
			suites = []string{suite + "-security"}
		}
		for _, have := range suites {
			if !slices.ContainsFunc(out, func(s source) bool { return s.suite == have }) {
				out = append(out, source{uri, have, "main"})
			}
		}
	}
	return out
}

// hostSources gives where packages of the Debian suite come from: the mirrors of
// the host's own sources, so that an operator's mirror is used, else Debian's.
// Sources of other suites or makers are never used.
func hostSources(suite, file, dir string) []source {
	var found []source
	read := func(path string, parse func(io.Reader, string) []source) {
		f, err := os.Open(path)
		if err != nil {
			return // unreadable sources are as good as none: the default serves
		}
		defer f.Close()
		found = append(found, parse(f, suite)...)
	}
	read(file, parseList)
	lists, _ := filepath.Glob(filepath.Join(dir, "*.list"))
	for _, p := range lists {
		read(p, parseList)
	}
	deb822, _ := filepath.Glob(filepath.Join(dir, "*.sources"))
	for _, p := range deb822 {
		read(p, parseDeb822)
	}
	var out []source
	for _, s := range found {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	// Without the release itself the others are of no use.
	if !slices.ContainsFunc(out, func(s source) bool { return s.suite == suite }) {
		return defaultSources(bootstrapper, suite)
	}
	return out
}

// usable makes a source of what a file says, if it is one of Debian's of suite.
func usable(uri, have, suite string) (source, bool) {
	if have != suite && have != suite+"-updates" && have != suite+"-security" {
		return source{}, false
	}
	u, err := url.Parse(uri)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || strings.ContainsAny(uri, " \t\"'[]\\") {
		return source{}, false
	}
	// main only: no template depends on what a host has enabled besides.
	return source{strings.TrimSuffix(uri, "/"), have, "main"}, true
}

// parseList reads the one-line format.
func parseList(r io.Reader, suite string) []source {
	var out []source
	for s := bufio.NewScanner(r); s.Scan(); {
		line, _, _ := strings.Cut(s.Text(), "#")
		fields := strings.Fields(line)
		if len(fields) < 4 || fields[0] != "deb" {
			continue
		}
		fields = fields[1:]
		if strings.HasPrefix(fields[0], "[") {
			end := slices.IndexFunc(fields, func(f string) bool { return strings.HasSuffix(f, "]") })
			if end < 0 {
				continue
			}
			fields = fields[end+1:]
		}
		if len(fields) < 3 || !slices.Contains(fields[2:], "main") {
			continue
		}
		if src, ok := usable(fields[0], fields[1], suite); ok {
			out = append(out, src)
		}
	}
	return out
}

// parseDeb822 reads the stanza format.
func parseDeb822(r io.Reader, suite string) []source {
	var out []source
	stanza := map[string]string{}
	key := ""
	end := func() {
		types, comps := strings.Fields(stanza["types"]), strings.Fields(stanza["components"])
		if strings.EqualFold(stanza["enabled"], "no") || !slices.Contains(types, "deb") || !slices.Contains(comps, "main") {
			clear(stanza)
			return
		}
		for _, uri := range strings.Fields(stanza["uris"]) {
			for _, have := range strings.Fields(stanza["suites"]) {
				if src, ok := usable(uri, have, suite); ok {
					out = append(out, src)
				}
			}
		}
		clear(stanza)
	}
	for s := bufio.NewScanner(r); s.Scan(); {
		line := s.Text()
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			end()
		case line[0] == ' ' || line[0] == '\t':
			stanza[key] += " " + strings.TrimSpace(line)
		default:
			k, v, _ := strings.Cut(line, ":")
			key = strings.ToLower(strings.TrimSpace(k))
			stanza[key] = strings.TrimSpace(v)
		}
	}
	end()
	return out
}

// hostProxy is the proxy that the host's apt uses for plain HTTP, or nil.
func hostProxy(ctx context.Context) *url.URL {
	cmd := exec.CommandContext(ctx, "/usr/bin/apt-config", "dump", "--no-empty", "--format", "%v%n", "Acquire::http::Proxy")
	cmd.Env = []string{"PATH=" + toolPath}
	out, err := cmd.Output()
	if err != nil {
		return nil // no apt here: then nothing is set either
	}
	return parseProxy(string(out))
}

func parseProxy(out string) *url.URL {
	line, _, _ := strings.Cut(out, "\n")
	u, err := url.Parse(strings.TrimSpace(line))
	if err != nil || u.Scheme != "http" || u.Hostname() == "" {
		return nil // apt writes DIRECT for none
	}
	return u
}
