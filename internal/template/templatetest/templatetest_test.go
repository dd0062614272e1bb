package templatetest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/space-platform/space/internal/template"
)

// within runs a program as uid 1000 with the template as its root, in
// namespaces of its own.
func within(t *testing.T, root string, c template.Config, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = []string{"HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1"}
	for k, v := range c.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 1_910_000_000, Size: 65536}}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot:      root,
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true,
		Credential: &syscall.Credential{Uid: 1000, Gid: 1000},
	}
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// writable lays a writable layer with the devices that programs need over a template.
func writable(t *testing.T, lower string) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"root", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	root := filepath.Join(dir, "root")
	if err := syscall.Mount("overlay", root, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", lower, dir, dir)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(root, 0); err != nil {
			t.Error(err)
		}
	})
	for name, minor := range map[string]int{"null": 3, "urandom": 9} {
		node := filepath.Join(root, "dev", name)
		if err := errors.Join(syscall.Mknod(node, syscall.S_IFCHR|0o666, 1<<8|minor), os.Chmod(node, 0o666)); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestTinyHasAShell(t *testing.T) {
	info, s := Tiny(t), Store(t)
	root, err := s.Mount(t.Context(), info.Digest)
	if err != nil {
		t.Fatal(err)
	}
	out, err := within(t, root, info.Config, "/bin/sh", "-c", "id -u; id -un; echo ~user; ls / | tr '\\n' ' '; env true && seq 3 | wc -l")
	if want := "1000\nuser\n/home/user\nbin dev etc home proc root run sys tmp usr var 3"; err != nil || out != want {
		t.Errorf("%v: got\n%s\nwant\n%s", err, out, want)
	}
	// Every applet that the recipe links is one of this busybox.
	links, err := filepath.Glob(filepath.Join(root, "bin", "*"))
	if err != nil || len(links) < 100 {
		t.Fatalf("%d links, %v", len(links), err)
	}
	list, err := within(t, root, info.Config, "/bin/busybox", "--list")
	if err != nil {
		t.Fatal(err)
	}
	has := map[string]bool{"busybox": true}
	for _, a := range strings.Fields(list) {
		has[a] = true
	}
	for _, l := range links {
		if !has[filepath.Base(l)] {
			t.Errorf("%s is no applet", filepath.Base(l))
		}
	}
	t.Logf("tiny: image %d bytes, tree %d bytes", info.SizeBytes, info.TreeBytes)
}

func TestBaseHasWhatPeopleExpect(t *testing.T) {
	info, s := Base(t), Store(t)
	lower, err := s.Mount(t.Context(), info.Digest)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"usr/bin/sudo": "4755 0:0", "etc/sudoers.d/user": "440 0:0", "etc/shadow": "640 0:42",
		"home/user": "755 1000:1000", "home/user/.bashrc": "644 1000:1000", "tmp": "1777 0:0", "root": "700 0:0",
	} {
		var st syscall.Stat_t
		if err := syscall.Lstat(filepath.Join(lower, path), &st); err != nil {
			t.Error(err)
		} else if got := fmt.Sprintf("%o %d:%d", st.Mode&0o7777, st.Uid, st.Gid); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	root := writable(t, lower)
	for line, want := range map[string]string{
		"python3 -c 'import ssl, json, sqlite3, asyncio; print(6*7)'": "42",
		"python -c 'print(\"python\")'":                               "python",
		"python3 -m pip --version | cut -d' ' -f1":                    "pip",
		"pip --version | cut -d' ' -f1":                               "pip",
		"node -e 'console.log(6*7)'":                                  "42",
		"git --version | cut -d' ' -f1-2":                             "git version",
		"curl --version | head -1 | cut -d' ' -f1":                    "curl",
		"bash -c 'echo $BASH' ":                                       "/usr/bin/bash",
		"id -un; id -gn":                                              "user\nuser",
		"cat /etc/hostname /etc/machine-id /etc/resolv.conf":          "sandbox",
		"grep -c BEGIN /etc/ssl/certs/ca-certificates.crt | wc -l":    "1",
		"git init -q /tmp/r && cd /tmp/r && git -c user.name=u -c user.email=e commit -q --allow-empty -m m && git log --oneline | wc -l": "1",
		"ls -A /var/cache/apt/archives /var/lib/apt/lists /dev | grep -v -e : -e partial -e null -e urandom | xargs":                      "",
	} {
		out, err := within(t, root, info.Config, info.Config.Shell, "-c", line)
		if err != nil || out != want {
			t.Errorf("%s: %q, %v, want %q", line, out, err, want)
		}
	}
	// Compiled files are used as they are.
	if out, err := within(t, root, info.Config, "/usr/bin/python3", "-v", "-c", "import json"); err != nil || !strings.Contains(out, "json/__pycache__/__init__.cpython-311.pyc matches") {
		t.Errorf("the compiled json is not used: %v: %.2000s", err, out)
	}
	sudoers, err := os.ReadFile(filepath.Join(root, "etc/sudoers.d/user"))
	if err != nil || !strings.Contains(string(sudoers), "user ALL=(ALL:ALL) NOPASSWD: ALL") {
		t.Errorf("sudoers %q, %v", sudoers, err)
	}
	if info.SizeBytes > 150_000_000 {
		t.Errorf("image of %d bytes, aim is below 150 MB", info.SizeBytes)
	}
	t.Logf("base: image %d bytes, tree %d bytes", info.SizeBytes, info.TreeBytes)
}
