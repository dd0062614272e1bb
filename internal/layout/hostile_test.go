package layout

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Folders of user space may hold anything while root works with them.

func prepared(t *testing.T) Layout {
	t.Helper()
	needRoot(t)
	dir := open(t)
	l := Layout{Data: filepath.Join(dir, "data"), Run: filepath.Join(dir, "run")}
	if err := l.Prepare(someUID, someGID); err != nil {
		t.Fatal(err)
	}
	return l
}

// plant makes a file of user space.
func plant(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Lchown(path, someUID, someGID); err != nil {
		t.Fatal(err)
	}
}

func TestReadOwnedGivesOnlyWhatTheOwnerCouldRead(t *testing.T) {
	l := prepared(t)
	theirs := filepath.Join(l.Host(), "secret") // root's
	if err := os.WriteFile(theirs, []byte("root only"), 0o600); err != nil {
		t.Fatal(err)
	}
	read := func() ([]byte, error) {
		type result struct {
			b   []byte
			err error
		}
		done := make(chan result, 1)
		go func() { b, err := ReadOwned(l.AdminKey(), 100); done <- result{b, err} }()
		select {
		case r := <-done:
			return r.b, r.err
		case <-time.After(10 * time.Second):
			t.Fatal("reading does not end")
			return nil, nil
		}
	}
	for name, put := range map[string]func() error{
		"symbolic link": func() error { return os.Symlink(theirs, l.AdminKey()) },
		"hard link":     func() error { return os.Link(theirs, l.AdminKey()) },
		"FIFO":          func() error { return unix.Mkfifo(l.AdminKey(), 0o600) },
		"directory":     func() error { return os.Mkdir(l.AdminKey(), 0o700) },
		"too large":     func() error { plant(t, l.AdminKey(), strings.Repeat("x", 101)); return nil },
		"device":        func() error { return unix.Mknod(l.AdminKey(), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))) },
	} {
		if err := put(); err != nil {
			t.Fatal(err)
		}
		if b, err := read(); err == nil {
			t.Errorf("%s: read %q", name, b)
		}
		if err := os.Remove(l.AdminKey()); err != nil {
			t.Fatal(err)
		}
	}
	plant(t, l.AdminKey(), "their own")
	if b, err := read(); err != nil || string(b) != "their own" {
		t.Errorf("its own file: %q %v", b, err)
	}
}

func TestHolderIsNotHeldUp(t *testing.T) {
	l := prepared(t)
	if err := unix.Mkfifo(l.ServeLock(), 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan int, 1)
	go func() { done <- Holder(l.ServeLock()) }()
	select {
	case pid := <-done:
		if pid != 0 {
			t.Errorf("a FIFO is held by %d", pid)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a FIFO in the place of the lock holds root up")
	}
	if err := os.Remove(l.ServeLock()); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"-1", "0", "1", "x", "", strings.Repeat("9", 1000)} {
		k, err := TakeLock(l.ServeLock())
		if err != nil {
			t.Fatal(err)
		}
		plant(t, l.ServeLock(), text)
		if pid := Holder(l.ServeLock()); pid != 0 {
			t.Errorf("a lock that says %.20q is held by %d", text, pid)
		}
		k.Release()
	}
}

// What lies below a folder of user space is left to user space.
func TestPrepareTouchesNothingBelowStateOrServe(t *testing.T) {
	l := prepared(t)
	victim := filepath.Join(filepath.Dir(l.Data), "victim")
	if err := os.Mkdir(victim, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(l.Journals()); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, l.Journals()); err != nil {
		t.Fatal(err)
	}
	if err := l.Prepare(someUID, someGID); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(victim, &st); err != nil || st.Uid != 0 || st.Mode&0o777 != 0o755 {
		t.Errorf("root changed what a link of user space points to: uid %d mode %o (%v)", st.Uid, st.Mode, err)
	}
}
