// Package templatetest gives tests of other packages real templates, built once
// per machine and shared by all of them.
package templatetest

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/space-platform/space/internal/template"
)

// EnvCache names the directory that keeps the templates between runs.
const EnvCache = "SPACE_TEMPLATE_CACHE"

const defaultCache = "/var/cache/space-test"

// Dir is where the shared templates and packages are.
func Dir() string {
	if dir := os.Getenv(EnvCache); dir != "" {
		return dir
	}
	return defaultCache
}

// PackageCache is the directory of downloaded packages that tests share.
func PackageCache() string { return filepath.Join(Dir(), "packages") }

// NeedRoot skips a test that cannot run without root.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes namespaces and mounts")
	}
}

// Store opens the shared store with a run directory of the test's own, and
// unmounts what the test has mounted when it ends. Needs root.
func Store(t testing.TB) *template.Store {
	t.Helper()
	NeedRoot(t)
	return open(t, t.TempDir())
}

func open(t testing.TB, runDir string) *template.Store {
	t.Helper()
	s, err := template.Open(template.Options{
		Dir: filepath.Join(Dir(), "templates"), RunDir: runDir, CacheDir: PackageCache(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		list, err := s.List()
		if err != nil {
			t.Error(err)
		}
		for _, info := range list {
			if err := s.Unmount(info.Digest); err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

// Tiny is tiny:latest in the shared store, built when it is not there.
func Tiny(t testing.TB) template.Info { t.Helper(); return get(t, "tiny") }

// Base is base:latest in the shared store, built when it is not there, which
// takes a minute.
func Base(t testing.TB) template.Info { t.Helper(); return get(t, "base") }

var (
	mu   sync.Mutex
	done = map[string]template.Info{} // guarded by mu
)

func get(t testing.TB, name string) template.Info {
	t.Helper()
	NeedRoot(t)
	mu.Lock()
	defer mu.Unlock()
	if info, ok := done[name]; ok {
		return info
	}
	recipe, err := template.Lookup(name)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	s := Store(t)
	info, err := s.Build(ctx, recipe, func(step string) { t.Logf("template %s: %s", name, step) })
	if err != nil {
		t.Fatalf("building %s: %v", recipe.Reference(), err)
	}
	done[name] = info
	return info
}
