package guest

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNameHost(t *testing.T) {
	for _, c := range []struct{ name, before, host, want string }{
		{"empty", "", "ibox", "127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\tibox\n"},
		{"kept", "127.0.0.1 localhost ibox\n", "ibox", "127.0.0.1 localhost ibox\n"},
		{"only in a comment", "127.0.0.1 localhost # ibox\n", "ibox", "127.0.0.1 localhost # ibox\n127.0.1.1\tibox\n"},
		{"no newline", "127.0.0.1 localhost", "ibox", "127.0.0.1 localhost\n127.0.1.1\tibox\n"},
		{"a name that is not one", "x\n", "i\nbox", "x\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := filepath.Join(t.TempDir(), "hosts")
			if err := os.WriteFile(p, []byte(c.before), 0o644); err != nil {
				t.Fatal(err)
			}
			for range 2 { // the second time changes nothing
				if err := nameHost(p, c.host); err != nil {
					t.Fatal(err)
				}
			}
			if b, _ := os.ReadFile(p); string(b) != c.want {
				t.Errorf("got %q, want %q", b, c.want)
			}
		})
	}
	dir := t.TempDir()
	fifo, link, aim := filepath.Join(dir, "fifo"), filepath.Join(dir, "link"), filepath.Join(dir, "aim")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(aim, link); err != nil {
		t.Fatal(err)
	}
	_ = nameHost(fifo, "ibox") // must not hang
	if err := nameHost(link, "ibox"); err == nil {
		t.Error("followed a link")
	}
	if _, err := os.Lstat(aim); err == nil {
		t.Error("wrote through a link")
	}
}
