package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
	"github.com/space-platform/space/internal/privilege"
	"github.com/space-platform/space/test/e2e/server"
)

// isSandbox tells runsc's sentry from its other processes.
func isSandbox(line string) bool { return strings.Contains(line, "runsc-sandbox") }

// Only the host room has privileges; its folders are nobody else's.
func TestPrivileges(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	sb := create(t, c, small())
	uid, gid, err := privilege.Lookup()
	ok(t, err)
	room, serve := s.Room(), s.Serve()
	st, err := privilege.Of(room)
	ok(t, err)
	if st.UIDs != [4]int{} {
		t.Errorf("the room runs as %v", st.UIDs)
	}
	st, err = privilege.Of(serve)
	ok(t, err)
	if st.UIDs != [4]int{uid, uid, uid, uid} || st.CapEff != 0 || st.CapPrm != 0 || st.CapBnd != 0 || !st.NoNewPrivs {
		t.Errorf("the unprivileged side has %+v", st)
	}
	sentries := 0
	for pid, line := range server.Processes(s.Layout.Run) {
		if line == "" || pid == room || pid == serve {
			continue
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue // it has just ended
		}
		switch {
		case isSandbox(line):
			sentries++
			if !strings.Contains(string(status), "\nSeccomp:\t2\n") {
				t.Errorf("no system call filter on %s", line)
			}
		case strings.Contains(line, "runsc"), strings.Contains(line, "gofer"):
		case strings.HasPrefix(line, s.Bin) && strings.Contains(line, " serve"): // one that is about to end
		default:
			if strings.Contains(string(status), "\nUid:\t0\t") && strings.HasPrefix(line, s.Bin) && !isClient(line) {
				t.Errorf("another process of ours is root: %s", line)
			}
		}
	}
	if sentries == 0 {
		t.Error("no sentry seen")
	}
	l := s.Layout
	for _, want := range []struct {
		path     string
		mode     os.FileMode
		uid, gid int
	}{
		{l.Data, fs.ModeDir | 0o710, 0, gid},
		{l.Host(), fs.ModeDir | 0o700, 0, 0},
		{l.Room(), fs.ModeDir | 0o700, 0, 0},
		{l.State(), fs.ModeDir | 0o700, uid, gid},
		{l.Journals(), fs.ModeDir | 0o700, uid, gid},
		{l.AdminKey(), 0o600, uid, gid},
		{l.Run, fs.ModeDir | 0o711, 0, 0},
		{l.RunHost(), fs.ModeDir | 0o700, 0, 0},
		{l.HostSocket(), fs.ModeSocket | 0o660, 0, gid},
		{l.LeaseSocket(), fs.ModeSocket | 0o600, 0, 0},
	} {
		fi, err := os.Lstat(want.path)
		ok(t, err)
		sys := fi.Sys().(*syscall.Stat_t)
		if fi.Mode() != want.mode || int(sys.Uid) != want.uid || int(sys.Gid) != want.gid {
			t.Errorf("%s is %v of %d:%d, not %v of %d:%d", want.path, fi.Mode(), sys.Uid, sys.Gid, want.mode, want.uid, want.gid)
		}
	}
	_ = filepath.WalkDir(l.State(), func(p string, d fs.DirEntry, err error) error {
		if fi, err := os.Lstat(p); err == nil && fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", p, fi.Mode())
		}
		return nil
	})
	_ = sb
}

// isClient tells a command line in use from a server.
func isClient(line string) bool {
	return !strings.Contains(line, " up ") && !strings.Contains(line, " serve ")
}

// Addresses that others reach need TLS, and the unprivileged side refuses to run
// with privileges.
func TestRefusesToExpose(t *testing.T) {
	t.Parallel()
	server.Templates(t, false)
	s, err := server.New(server.Options{})
	ok(t, err)
	t.Cleanup(func() {
		for _, trouble := range s.Close() {
			t.Error(trouble)
		}
	})
	for _, args := range [][]string{
		{"up", "--listen", "0.0.0.0:0"},
		{"up", "--listen-data", "[::]:0"},
		{"up", "--listen", ":0"},
		{"up", "--listen", "192.0.2.1:0"},
		{"up", "--listen", "127.0.0.1:0", "--tls-cert", "/nowhere"},
	} {
		r := s.CLI(args...)
		if r.Code != 1 || !strings.Contains(strings.ToLower(r.Err), "tls") {
			t.Errorf("%v: code %d, %s", args, r.Code, r.Err)
		}
	}
	if r := s.CLI("serve"); r.Code != 1 || !strings.Contains(r.Err, "refuses to run with privileges") {
		t.Errorf("serve as root: code %d, %s", r.Code, r.Err)
	}
}

// Both listeners answer to their names only, and to no foreign page.
func TestHostAndOrigin(t *testing.T) {
	t.Parallel()
	s := shared(t)
	get := func(url, host, origin, key string) (int, string) {
		req, err := http.NewRequestWithContext(within(t, 10*time.Second), "GET", url, nil)
		ok(t, err)
		if host != "" {
			req.Host = host
		}
		if origin != "" {
			req.Header.Set("Origin", origin)
		}
		if key != "" {
			req.Header.Set("Authorization", "Bearer "+key)
		}
		resp, err := http.DefaultClient.Do(req)
		ok(t, err)
		defer resp.Body.Close()
		var p spaceapi.Problem
		_ = json.NewDecoder(resp.Body).Decode(&p) // not every answer is a problem
		return resp.StatusCode, p.Code
	}
	for _, l := range []string{"http://" + s.API + "/v1/sandboxes", "http://" + s.Data + "/d/sessions/x/events"} {
		plain, _ := get(l, "", "", s.Key())
		for _, bad := range []struct{ host, origin string }{
			{"evil.test", ""}, {"127.0.0.1.evil.test:80", ""}, {"localhost.evil.test", ""},
			{"", "http://evil.test"}, {"", "null"}, {"", "http://localhost.evil.test"},
		} {
			code, _ := get(l, bad.host, bad.origin, s.Key())
			if code != http.StatusForbidden && code != http.StatusMisdirectedRequest {
				t.Errorf("%s with host %q, origin %q: %d (without: %d)", l, bad.host, bad.origin, code, plain)
			}
		}
		if code, _ := get(l, "localhost", "", ""); code != http.StatusUnauthorized {
			t.Errorf("%s without a key: %d", l, code)
		}
	}
	if code, _ := get("http://"+s.API+"/metrics", "", "", ""); code != http.StatusUnauthorized {
		t.Errorf("/metrics without a key: %d", code)
	}
}

// C-068: what tenants hand over is in no log, no trace of an error, no audit
// record, no file of ours in the clear, and in no process list.
func TestC068MarkersAreNowhere(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.Client()
	id := func(kind string) string { return "MARK" + kind + fmt.Sprintf("%x", time.Now().UnixNano()) }
	marks := map[string]string{}
	mark := func(kind string) string { marks[kind] = id(kind); return marks[kind] }

	in := small()
	in.Env = map[string]string{"PLANTED": mark("createenv")}
	sb := create(t, c, in)
	sess := spaceapi.CreateSession{Stdin: true, Command: spaceapi.Command{
		Shell: `read x; printf '%s %s\n' "$PLANTED" "$MORE"; sleep 600; : ` + mark("shell"),
		Env:   map[string]string{"MORE": mark("sessionenv")},
	}}
	st := session(t, c, sb.ID, sess)
	started(t, st)
	ok(t, st.Write(within(t, 10*time.Second), []byte(mark("stdin")+"\n")))
	said(t, st, marks["createenv"]+" "+marks["sessionenv"])
	argv := spaceapi.Command{Args: []string{"sleep", "600", mark("argv")}}
	started(t, session(t, c, sb.ID, spaceapi.CreateSession{Command: argv}))
	out(t, c, sb.ID, "echo "+mark("file")+" >~/secret; cat ~/secret")

	// Errors that come near them.
	bad := spaceapi.Command{Args: []string{"/no/such/" + mark("badargv")}, Env: map[string]string{"BAD": mark("badenv")}, Cwd: "/" + mark("badcwd")}
	if r, err := c.Exec(within(t, 10*time.Second), sb.ID, spaceapi.Exec{Command: bad}); err == nil && r.Exit.Code == 0 {
		t.Error("a missing program ran")
	}
	_, err := c.Exec(within(t, 10*time.Second), sb.ID, spaceapi.Exec{Command: spaceapi.Command{Env: map[string]string{"A=B": mark("refusedenv")}, Args: []string{"true"}}})
	if client.Code(err) == "" {
		t.Errorf("a refused name of a variable: %v", err)
	}
	for _, body := range []string{`{"env":{"A":"` + mark("badjson") + `"`, `{"env":"` + mark("badtype") + `"}`} {
		req, err := http.NewRequestWithContext(within(t, 10*time.Second), "POST", "http://"+s.API+"/v1/sandboxes", strings.NewReader(body))
		ok(t, err)
		req.Header.Set("Authorization", "Bearer "+s.Key())
		resp, err := http.DefaultClient.Do(req)
		ok(t, err)
		_ = resp.Body.Close()
		if resp.StatusCode < 400 {
			t.Errorf("%s: %d", body, resp.StatusCode)
		}
	}
	tok, err := c.MintToken(within(t, 10*time.Second), sb.ID, spaceapi.MintToken{Scopes: []string{"exec"}})
	ok(t, err)
	marks["datatoken"] = tok.Token
	key, err := c.MintKey(within(t, 10*time.Second), spaceapi.MintKey{Name: "planted", Scopes: []string{"sandboxes:r"}})
	ok(t, err)
	marks["apikey"] = key.Secret
	if r := s.CLI("--json", "audit"); r.Code != 0 {
		t.Errorf("audit: %s", r.Err)
	} else {
		search(t, marks, "the audit records", []byte(r.Out))
	}

	places := 0
	look := func(path string) {
		b, err := os.ReadFile(path)
		if err != nil {
			return // it is gone, or no file
		}
		places++
		search(t, marks, path, b)
	}
	look(s.LogFile())
	for _, root := range []string{s.Layout.Data, s.Layout.Run} {
		ok(t, filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				return nil // it is gone
			}
			if d.IsDir() && p != root && server.Mountpoint(p) {
				return fs.SkipDir // the tenant's own files
			}
			// The image is the sandbox's disk: what a guest writes is there.
			if d.Type().IsRegular() && !strings.HasSuffix(p, ".img") && !strings.Contains(p, "/runtimes/") {
				look(p)
			}
			return nil
		}))
	}
	for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ"} {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			look(f)
		}
	}
	if places < 50 {
		t.Errorf("only %d places searched", places)
	}
}

func search(t *testing.T, marks map[string]string, place string, b []byte) {
	t.Helper()
	for kind, m := range marks {
		if bytes.Contains(b, []byte(m)) {
			i := bytes.Index(b, []byte(m))
			t.Errorf("%s of the tenant is in %s: …%q", kind, place, b[max(0, i-200):min(len(b), i+100)])
		}
	}
}
