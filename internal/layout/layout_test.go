package layout

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const someUID, someGID = 64321, 64321 // of nobody on this host

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: owners of folders are set")
	}
}

// open makes the folders of t.TempDir passable for others.
func open(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func mode(t *testing.T, path string) os.FileMode {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Mode().Perm()
}

func TestPrepareLetsTheUnprivilegedSideThrough(t *testing.T) {
	needRoot(t)
	dir := open(t)
	l := Layout{Data: filepath.Join(dir, "not", "yet", "data"), Run: filepath.Join(dir, "nor", "run")}
	for range 2 { // idempotent
		if err := l.Prepare(someUID, someGID); err != nil {
			t.Fatal(err)
		}
		for path, want := range map[string]os.FileMode{
			filepath.Dir(l.Data): 0o755, filepath.Dir(l.Run): 0o755, l.Data: 0o710, l.Host(): 0o700, l.State(): 0o700,
			l.Run: 0o711, l.RunHost(): 0o700, l.RunServe(): 0o755,
		} {
			if got := mode(t, path); got != want {
				t.Errorf("%s has mode %04o, want %04o", path, got, want)
			}
		}
		if err := os.Chmod(l.State(), 0o777); err != nil { // is mended
			t.Fatal(err)
		}
	}
}

func TestPrepareNamesTheFolderThatIsClosed(t *testing.T) {
	needRoot(t)
	dir := open(t)
	closed := filepath.Join(dir, "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	l := Layout{Data: filepath.Join(closed, "below", "data"), Run: filepath.Join(dir, "run")}
	err := l.Prepare(someUID, someGID)
	if err == nil || !strings.Contains(err.Error(), "cannot pass through "+closed+" (mode 0700)") {
		t.Fatalf("a data directory below a closed folder: %v", err)
	}
	if got := mode(t, closed); got != 0o700 {
		t.Errorf("the mode of a folder that is not ours was changed to %04o", got)
	}
}
