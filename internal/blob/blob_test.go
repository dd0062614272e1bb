package blob

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/fstest"
)

func packed(t *testing.T, content, sumOf string) fstest.MapFS {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(sumOf))
	return fstest.MapFS{
		"tool.gz":     {Data: b.Bytes()},
		"tool.sha256": {Data: []byte(hex.EncodeToString(sum[:]) + "\n")},
	}
}

func TestExtractWritesAnExecutableUnderItsDigest(t *testing.T) {
	fsys, dir := packed(t, "program", "program"), t.TempDir()
	path, err := extract(fsys, dir, "tool")
	if err != nil {
		t.Fatal(err)
	}
	sum, _ := digest(fsys, "tool")
	if want := filepath.Join(dir, sum, "tool"); path != want {
		t.Fatalf("path %s, want %s", path, want)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o555 {
		t.Fatalf("mode %v, error %v", st.Mode(), err)
	}
	if b, _ := os.ReadFile(path); string(b) != "program" {
		t.Fatalf("content %q", b)
	}
}

func TestExtractReplacesWhatIsNotTheBlob(t *testing.T) {
	fsys := packed(t, "program", "program")
	for name, spoil := range map[string]func(path string) error{
		"other content": func(p string) error {
			return errors.Join(os.Chmod(p, 0o755), os.WriteFile(p, []byte("evil!!!"), 0o755), os.Chmod(p, 0o555))
		},
		"symlink": func(p string) error {
			return errors.Join(os.Remove(p), os.Symlink("/bin/true", p))
		},
		"directory":     func(p string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o755)) },
		"writable mode": func(p string) error { return os.Chmod(p, 0o777) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, err := extract(fsys, dir, "tool")
			if err != nil {
				t.Fatal(err)
			}
			if err := spoil(path); err != nil {
				t.Fatal(err)
			}
			if path, err = extract(fsys, dir, "tool"); err != nil {
				t.Fatal(err)
			}
			st, err := os.Lstat(path)
			if err != nil || st.Mode() != 0o555 {
				t.Fatalf("mode %v, error %v", st.Mode(), err)
			}
			if b, _ := os.ReadFile(path); string(b) != "program" {
				t.Fatalf("content %q", b)
			}
		})
	}
}

func TestWrongChecksumLeavesNoFile(t *testing.T) {
	fsys, dir := packed(t, "program", "another"), t.TempDir()
	if _, err := extract(fsys, dir, "tool"); err == nil {
		t.Fatal("extracted a blob of the wrong checksum")
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*", "*"))
	hidden, _ := filepath.Glob(filepath.Join(dir, "*", ".*"))
	if len(left)+len(hidden) != 0 {
		t.Fatalf("left behind: %v %v", left, hidden)
	}
	r, err := open(fsys, "tool")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); err == nil {
		t.Fatal("read a blob of the wrong checksum to its end")
	}
}

func TestExtractAtOnce(t *testing.T) {
	fsys, dir := packed(t, "program", "program"), t.TempDir()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			path, err := extract(fsys, dir, "tool")
			if err != nil {
				t.Error(err)
				return
			}
			if b, err := os.ReadFile(path); string(b) != "program" {
				t.Errorf("content %q, error %v", b, err)
			}
		})
	}
	wg.Wait()
}

func TestAbsentAndBadNames(t *testing.T) {
	if _, err := extract(fstest.MapFS{}, t.TempDir(), Runsc); !errors.Is(err, ErrAbsent) {
		t.Fatalf("error %v, want ErrAbsent", err)
	}
	for _, name := range []string{"", ".", "..", "../tool", "a/b", "a\x00"} {
		if _, err := extract(packed(t, "p", "p"), t.TempDir(), name); err == nil || errors.Is(err, ErrAbsent) {
			t.Errorf("name %q: error %v", name, err)
		}
	}
}

// What is embedded in this very build must be whole.
func TestEmbeddedBlobsMatchTheirDigests(t *testing.T) {
	for _, name := range []string{Guest, Runsc} {
		r, err := Open(name)
		if errors.Is(err, ErrAbsent) {
			t.Logf("%s: built without it", name)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, r); err != nil {
			t.Error(err)
		}
	}
}
