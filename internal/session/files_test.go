package session

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"io"
	"net/url"
	"os"
	"strings"
	"testing"

	"github.com/space-platform/space/internal/sandbox"
)

// Whole files travel with a data token, by names that are any bytes.
func TestFilesOverDataPlane(t *testing.T) {
	t.Parallel()
	h, p := world(t, Limits{})
	ctx := context.Background()
	base := "/d/sandboxes/" + string(h.box) + "/files"
	dir := t.TempDir()
	must(t, os.Chmod(dir, 0o755))
	rw, err := h.MintDataToken(ctx, h.who, h.box, "key1", []string{"files:rw"}, 0)
	must(t, err)
	ro, err := h.MintDataToken(ctx, h.who, h.box, "key1", []string{"files:r"}, 0)
	must(t, err)
	exec, err := h.MintDataToken(ctx, h.who, h.box, "key1", []string{"exec"}, 0)
	must(t, err)

	content := make([]byte, 1<<20)
	_, _ = rand.Read(content)
	for _, name := range []string{"plain", "report%20name.txt", "report name.txt", "a#?&+;b", "new\nline", "-dash", "\xff\xfe bytes", strings.Repeat("é", 127)} {
		path := dir + "/" + name
		q := "?user=0&path=" + url.QueryEscape(path)
		b64 := "?user=0&path_b64=" + url.QueryEscape(base64.StdEncoding.EncodeToString([]byte(path)))
		body := append([]byte(name), content...)
		if r := p.do(ctx, "PUT", base+q, rw.Token, bytes.NewReader(body)); r.StatusCode != 204 {
			b, _ := io.ReadAll(r.Body)
			t.Fatalf("put %q: %d %s", name, r.StatusCode, b)
		}
		r := p.do(ctx, "GET", base+b64, ro.Token, nil)
		got, err := io.ReadAll(r.Body)
		must(t, err)
		if r.StatusCode != 200 || !bytes.Equal(got, body) {
			t.Fatalf("get %q: %d, %d bytes, want %d", name, r.StatusCode, len(got), len(body))
		}
	}

	q := "?path=" + url.QueryEscape(dir+"/plain")
	p.problem("PUT", base+q, ro.Token, "x", 403, "scope_missing")
	p.problem("GET", base+q, exec.Token, "", 403, "scope_missing")
	p.problem("GET", base+q, "", "", 401, "invalid_token")
	p.problem("GET", "/d/sandboxes/"+string(sandbox.NewID())+"/files"+q, rw.Token, "", 404, "sandbox_not_found")
	s, attach := h.create(h.shell("true"))
	_ = s
	p.problem("GET", base+q, attach.Token, "", 404, "sandbox_not_found")
	p.problem("GET", base+"?path="+url.QueryEscape(dir+"/absent"), rw.Token, "", 404, "not_found")
	p.problem("GET", base, rw.Token, "", 400, "invalid_path")
	p.problem("GET", base+"?path=a&path_b64=YQ==", rw.Token, "", 400, "invalid_path")
	p.problem("GET", base+"?path=a%00b", rw.Token, "", 400, "invalid_path")
	p.problem("GET", base+"?path="+strings.Repeat("a", 4097), rw.Token, "", 400, "invalid_path")
	p.problem("PUT", base+q+"&mode=9", rw.Token, "x", 400, "invalid_mode")

	must(t, h.RevokeDataTokens(ctx, h.who, h.box))
	p.problem("GET", base+q, rw.Token, "", 401, "invalid_token")
}
