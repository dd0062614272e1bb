package guest

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// account is who a process or a file operation runs as.
type account struct {
	name   string
	uid    int
	gid    int
	groups []int // supplementary, gid included
	home   string
	shell  string
}

var errNoSuchUser = errors.New("no such user")

const maxDatabase = 4 << 20 // bytes read of /etc/passwd or /etc/group

// lookup finds "name", "uid", and either with ":group" or ":gid". The databases
// are parsed here: a static binary has no NSS, and the guest's files may be
// anything, so they are read without blocking and in bounds.
func lookup(root, who string) (account, error) {
	if who == "" {
		who = "root"
	}
	user, group, hasGroup := strings.Cut(who, ":")
	passwd := database(root + "/etc/passwd")
	a, ok := findUser(passwd, user)
	if !ok {
		uid, err := strconv.ParseUint(user, 10, 31)
		switch {
		case err == nil && uid == 0:
			a = account{name: "root", home: "/root", shell: "/bin/sh"}
		case err == nil:
			// A number without an entry: its own group, never root's.
			a = account{name: user, uid: int(uid), gid: int(uid), home: "/", shell: "/bin/sh"}
		case user == "root":
			a = account{name: "root", home: "/root", shell: "/bin/sh"}
		default:
			return account{}, errNoSuchUser
		}
	}
	groups := database(root + "/etc/group")
	if hasGroup {
		gid, ok := findGroup(groups, group)
		if !ok {
			return account{}, errNoSuchUser
		}
		a.gid = gid
		a.groups = []int{gid}
	} else {
		a.groups = memberships(groups, a.name, a.gid)
	}
	if a.shell == "" {
		a.shell = "/bin/sh"
	}
	if a.home == "" {
		a.home = "/"
	}
	return a, nil
}

func database(path string) []byte {
	f, err := openRegular(path)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }()
	b, _ := io.ReadAll(io.LimitReader(f, maxDatabase))
	return b
}

func rows(b []byte, fields int, f func([]string) bool) {
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Buffer(nil, maxDatabase)
	for sc.Scan() {
		line := strings.TrimSpace(sc.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		if col := strings.Split(line, ":"); len(col) >= fields && !f(col) {
			return
		}
	}
}

func findUser(passwd []byte, who string) (account, bool) {
	var found account
	number, numeric := id(who)
	best := 0 // a name wins over a number
	rows(passwd, 7, func(c []string) bool {
		uid, ok1 := id(c[2])
		gid, ok2 := id(c[3])
		if !ok1 || !ok2 || c[0] == "" {
			return true
		}
		rank := 0
		switch {
		case c[0] == who:
			rank = 2
		case numeric && uid == number:
			rank = 1
		}
		if rank > best {
			best = rank
			found = account{name: c[0], uid: uid, gid: gid, home: c[5], shell: c[6]}
		}
		return best < 2
	})
	return found, best > 0
}

func findGroup(groups []byte, who string) (int, bool) {
	gid, ok := id(who)
	rows(groups, 3, func(c []string) bool {
		if c[0] != who || who == "" {
			return true
		}
		if n, good := id(c[2]); good {
			gid, ok = n, true
			return false
		}
		return true
	})
	return gid, ok
}

func memberships(groups []byte, name string, gid int) []int {
	out := []int{gid}
	rows(groups, 4, func(c []string) bool {
		n, ok := id(c[2])
		if ok && len(out) < 256 && !slices.Contains(out, n) && slices.Contains(strings.Split(c[3], ","), name) {
			out = append(out, n)
		}
		return true
	})
	return out
}

func id(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 31)
	return int(n), err == nil
}

// as runs f with the effective rights of a, on a thread of its own. Real and
// saved ids stay root's, so that the user's processes cannot signal or trace
// the thread. It uses the plain system calls, because the library's change all
// threads; and setresuid rather than setfsuid, which gVisor does not have.
func (a account) as(f func() error) error {
	if os.Geteuid() != 0 || a.uid == 0 && a.gid == 0 && len(a.groups) <= 1 {
		return f()
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := a.become(); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func (a account) become() error {
	gids := make([]uint32, len(a.groups))
	for i, g := range a.groups {
		gids[i] = uint32(g)
	}
	if err := setgroupsThread(gids); err != nil {
		return err
	}
	const keep = ^uintptr(0)
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(a.gid), keep); e != 0 {
		return e
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(a.uid), keep); e != 0 {
		return e
	}
	return nil
}
