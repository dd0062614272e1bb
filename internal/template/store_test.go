package template

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/failpoint"
)

func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(Options{
		Dir: dir, RunDir: filepath.Join(t.TempDir(), "run"), CacheDir: packageCache(),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		mounts, _ := filepath.Glob(filepath.Join(s.o.RunDir, "templates", "*"))
		for _, m := range mounts {
			for unix.Unmount(m, unix.MNT_DETACH) == nil {
			}
		}
	})
	return s
}

// packageCache is shared with templatetest, which cannot be imported from here.
func packageCache() string {
	dir := os.Getenv("SPACE_TEMPLATE_CACHE")
	if dir == "" {
		dir = "/var/cache/space-test"
	}
	if os.Geteuid() != 0 {
		return ""
	}
	return filepath.Join(dir, "packages")
}

// entries lists what is in the folders of a store, relative, lock files aside.
func entries(t testing.TB, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		if strings.Contains(rel, "/") && !strings.HasPrefix(rel, "locks/") {
			out = append(out, rel)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// publish commits an image of arbitrary content, which needs no root.
func publish(t testing.TB, s *Store, r Recipe, content string) (Info, error) {
	t.Helper()
	work, remove, err := s.workspace()
	if err != nil {
		t.Fatal(err)
	}
	defer remove()
	if err := os.WriteFile(filepath.Join(work, imageName), []byte(content), 0o400); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(content))
	tr := read(t, archive(t, file("f", content)), all)
	return s.commit(t.Context(), r, record{
		Info:   Info{Reference: r.Reference(), Digest: digestOf(t, tr, r.Config), SizeBytes: int64(len(content)), Config: r.Config},
		Format: "squashfs", ImageSHA256: hex.EncodeToString(sum[:]),
	}, work)
}

func must(t testing.TB) func(Info, error) Info {
	return func(i Info, err error) Info {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
}

func TestStoreResolvesListsAndDeletes(t *testing.T) {
	s := openStore(t, t.TempDir())
	if list, err := s.List(); err != nil || len(list) != 0 {
		t.Fatalf("new store: %v %v", list, err)
	}
	one := must(t)(publish(t, s, base(), "one"))
	two := must(t)(publish(t, s, tiny(), "two"))
	for _, ref := range []string{"base", "base:latest", one.Digest} {
		if got := must(t)(s.Resolve(ref)); got.Digest != one.Digest || got.Config.User != "user" {
			t.Errorf("%s: %+v", ref, got)
		}
	}
	// A name moves on; what it pointed to stays for those who use the digest.
	three := must(t)(publish(t, s, base(), "three"))
	if got := must(t)(s.Resolve("base")); got.Digest != three.Digest {
		t.Errorf("base is %+v", got)
	}
	list, err := s.List()
	if err != nil || len(list) != 3 || list[0].Digest != three.Digest || list[1].Digest != two.Digest || list[2].Digest != one.Digest || list[2].Reference != "" {
		t.Fatalf("list %+v, %v", list, err)
	}
	if err := s.Delete(three.Digest); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"base", three.Digest, "none", "sha256:" + strings.Repeat("0", 64)} {
		if _, err := s.Resolve(ref); !errors.Is(err, ErrNotFound) {
			t.Errorf("%s: error %v", ref, err)
		}
	}
	if err := s.Delete(three.Digest); err != nil {
		t.Errorf("deleting twice: %v", err)
	}
	for _, ref := range []string{"../x", "sha256:zz", "sha256:../../x", ""} {
		if _, err := s.Resolve(ref); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: error %v", ref, err)
		}
	}
	if err := s.Delete("sha256:../x"); !errors.Is(err, ErrInvalid) {
		t.Errorf("error %v", err)
	}
	// Another process sees the same.
	again, err := openStore(t, s.o.Dir).List()
	if err != nil || len(again) != 2 {
		t.Errorf("after opening again: %v %v", again, err)
	}
	st, err := os.Stat(s.o.Dir)
	if err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

func TestPublishedImageNeverChanges(t *testing.T) {
	s := openStore(t, t.TempDir())
	info := must(t)(publish(t, s, base(), "one"))
	path := s.image(hexOf(info.Digest))
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	must(t)(publish(t, s, base(), "one"))
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Error("the same tree replaced an image that was whole")
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, []byte("rot"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Mount(t.Context(), info.Digest); !errors.Is(err, ErrCorrupt) {
		t.Errorf("mounting a spoilt image: error %v", err)
	}
	must(t)(publish(t, s, base(), "one"))
	if b, err := os.ReadFile(path); err != nil || string(b) != "one" {
		t.Errorf("a spoilt image was not replaced: %q %v", b, err)
	}
}

func TestOpenSweepsWhatDeadBuildsLeft(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	info := must(t)(publish(t, s, base(), "one"))
	want := entries(t, dir)

	writeFile(t, filepath.Join(dir, "tmp", "build-1", "image.squashfs"), "half")
	writeFile(t, filepath.Join(dir, "tmp", "gone-1", "image.squashfs"), "half removed")
	writeFile(t, filepath.Join(dir, "tmp", "stray"), "x")
	writeFile(t, filepath.Join(dir, "images", strings.Repeat("a", 64), "template.json"), "{}")
	writeFile(t, filepath.Join(dir, "names", "base:latest.json.new"), "half")
	writeFile(t, filepath.Join(dir, "names", "x:y.json"), `{"digest":"sha256:`+strings.Repeat("b", 64)+`"}`)
	alive, remove, err := s.workspace() // of a build that runs
	if err != nil {
		t.Fatal(err)
	}
	openStore(t, dir)
	if _, err := os.Stat(alive); err != nil {
		t.Errorf("a running build lost its directory: %v", err)
	}
	remove()
	if got := entries(t, dir); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("left %v, want %v", got, want)
	}
	must(t)(s.Resolve(info.Digest))
}

func TestCommitThatFailsHalfWayPublishesNothing(t *testing.T) {
	s := openStore(t, t.TempDir())
	disarm, err := failpoint.Arm(fpRenamed, "error(1)")
	if err != nil {
		t.Fatal(err)
	}
	defer disarm()
	if _, err := publish(t, s, base(), "one"); !errors.Is(err, failpoint.ErrInjected) {
		t.Fatalf("error %v", err)
	}
	if got := entries(t, s.o.Dir); len(got) != 0 {
		t.Errorf("left %v", got)
	}
	must(t)(publish(t, s, base(), "one"))
}

func TestCorruptRecordsAreErrorsNotPanics(t *testing.T) {
	s := openStore(t, t.TempDir())
	info := must(t)(publish(t, s, base(), "one"))
	rec := s.path("images", hexOf(info.Digest), recordName)
	for _, content := range []string{"", "{", "[]", `{"digest":"sha256:` + strings.Repeat("0", 64) + `"}`, strings.Repeat("{", maxJSON+1)} {
		if err := os.WriteFile(rec, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Resolve("base"); !errors.Is(err, ErrCorrupt) {
			t.Errorf("record %.20q: error %v", content, err)
		}
	}
	other := must(t)(publish(t, s, tiny(), "two"))
	if list, err := s.List(); err != nil || len(list) != 1 || list[0].Digest != other.Digest {
		t.Errorf("a template that cannot be read hides the others: %v, %v", list, err)
	}
}

func TestLockWaitsAndEndsWithItsContext(t *testing.T) {
	s := openStore(t, t.TempDir())
	path := s.path("locks", "x")
	unlock, err := s.lock(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waited := 0
	if _, err := s.lock(ctx, path, func() { waited++; cancel() }); !errors.Is(err, context.Canceled) || waited != 1 {
		t.Fatalf("error %v, told %d times", err, waited)
	}
	unlock()
	unlock, err = s.lock(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	unlock()
}

func TestUnescapeMountinfo(t *testing.T) {
	for in, want := range map[string]string{`/a\040b\134c`: "/a b\\c", `/plain`: "/plain", `/x\04`: `/x\04`, `/x\999`: `/x\999`} {
		if got := unescape(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func readAll(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Clone(b)
}
