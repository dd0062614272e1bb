package server

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

// repository is the module's root, above the tests' working directory.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == "/" {
			return "", fmt.Errorf("server: not inside the repository")
		}
	}
}

// Binary is the real bin/space of the working tree, built once per process into
// a directory of its own; RemoveBinary takes it away.
var Binary = sync.OnceValues(build)

func build() (string, error) {
	root, err := repository()
	if err != nil {
		return "", err
	}
	// The test cache must know what the binary is made of: it sees which files a
	// test asks for, but not those that go build reads.
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), ".") {
			return fs.SkipDir
		}
		if err == nil && !d.IsDir() && !strings.HasSuffix(p, "_test.go") {
			_, err = os.Stat(p)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // others work here, too
		}
		return err
	})
	if err != nil {
		return "", err
	}
	run := func(name string, args ...string) error {
		cmd := exec.Command(name, args...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("server: %s: %w\n%s", name, err, out)
		}
		return nil
	}
	// The embedded guest daemon must be the working tree's, too.
	if err := run(filepath.Join(root, "scripts", "build-blobs.sh")); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "space-bin-")
	if err != nil {
		return "", err
	}
	// The unprivileged side starts from it, too.
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "space")
	err = run("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -X main.version=test", "-o", bin, "./cmd/space")
	if err != nil {
		_ = os.RemoveAll(dir)
	}
	return bin, err
}

// RemoveBinary takes away what Binary built.
func RemoveBinary() {
	if bin, err := Binary(); err == nil {
		_ = os.RemoveAll(filepath.Dir(bin))
	}
}
