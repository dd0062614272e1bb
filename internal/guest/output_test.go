package guest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/api/guestapi"
)

type piece struct {
	typ guestapi.FrameType
	b   byte
}

// The buffer against a model: every byte kept is the right one of the right
// stream, and memory stays near the window.
func TestOutputModel(t *testing.T) {
	for _, drop := range []bool{false, true} {
		for seed := range uint64(30) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			o := newOutput(4<<10, drop)
			var all []piece
			s := map[guestapi.FrameType]*source{1: {typ: 1, left: -1}, 2: {typ: 2, left: -1}}
			var fd [2]int
			if err := unix.Pipe2(fd[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			for range 400 {
				typ := guestapi.FrameType(1 + rnd.IntN(2))
				data := make([]byte, 1+rnd.IntN(1+rnd.IntN(3000)))
				for i := range data {
					data[i] = byte(rnd.Uint32())
				}
				if _, err := unix.Write(fd[1], data); err != nil {
					t.Fatal(err)
				}
				for len(data) > 0 {
					n, full, err := o.read(fd[0], s[typ])
					if err != nil {
						t.Fatal(err)
					}
					if full {
						if drop {
							t.Fatal("drop is never full")
						}
						if !o.ack(o.base + 1 + rnd.Uint64N(o.next-o.base)) {
							t.Fatal("ack refused")
						}
						continue
					}
					for _, b := range data[:n] {
						all = append(all, piece{typ, b})
					}
					data = data[n:]
				}
				if o.next-o.base > uint64(o.window) || len(o.segs) > o.maxSegs() {
					t.Fatalf("%d bytes, %d segments", o.next-o.base, len(o.segs))
				}
				held := 0
				for _, c := range o.chunks {
					held += cap(c)
				}
				if held > o.window+2*readChunk {
					t.Fatalf("holds %d bytes for a window of %d", held, o.window)
				}
				verify(t, o, all, rnd)
			}
			_ = unix.Close(fd[0])
			_ = unix.Close(fd[1])
			if o.ack(o.next+1) || !o.ack(o.next) || o.chunks != nil {
				t.Fatal("the end")
			}
		}
	}
}

func verify(t *testing.T, o *output, all []piece, rnd *rand.Rand) {
	t.Helper()
	pos := o.base
	if o.next > o.base {
		pos += rnd.Uint64N(o.next - o.base)
	}
	buf := make([]byte, 1+rnd.IntN(5000))
	for pos < o.next {
		l := o.at(pos, buf)
		if l.n == 0 {
			t.Fatalf("nothing at %d of %d..%d", pos, o.base, o.next)
		}
		for i, b := range buf[:l.n] {
			if want := all[pos+uint64(i)]; want.b != b || want.typ != l.typ {
				t.Fatalf("offset %d differs", pos+uint64(i))
			}
		}
		pos += uint64(l.n)
	}
	if o.base > 0 {
		if l := o.at(o.base-1, buf); l.typ != guestapi.FrameGap || l.base != o.base {
			t.Fatalf("below base: %+v", l)
		}
	}
	if l := o.at(o.next, buf); l.wait == nil {
		t.Fatalf("at the end: %+v", l)
	}
}

func TestOutputOneByteStreamsAreBounded(t *testing.T) {
	o := newOutput(64<<10, false)
	for i := 0; o.room(guestapi.FrameType(1+i%2)) > 0; i++ {
		o.add(guestapi.FrameType(1+i%2), []byte("x"))
		if i > 64<<10 {
			t.Fatal("no bound")
		}
	}
	if len(o.segs) != o.maxSegs() {
		t.Fatal(len(o.segs))
	}
	if !o.ack(1) || o.room(1) == 0 && o.room(2) == 0 {
		t.Fatal("acknowledgement does not help")
	}
}

func TestLookup(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(root+"/etc", 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(root+"/etc/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("passwd", "root:x:0:0:root:/root:/bin/bash\n#c\nbroken\nuser:x:1000:1000:,,,:/home/user:/bin/zsh\n2000:x:5:6::/five:\nbad:x:-1:0::/:\n")
	put("group", "root:x:0:\nsudo:x:27:other,user\nuser:x:1000:\ndocker:x:99:user\nnot:x:98:user2,userx\n")
	for who, want := range map[string]account{
		"":          {"root", 0, 0, []int{0}, "/root", "/bin/bash"},
		"user":      {"user", 1000, 1000, []int{1000, 27, 99}, "/home/user", "/bin/zsh"},
		"1000":      {"user", 1000, 1000, []int{1000, 27, 99}, "/home/user", "/bin/zsh"},
		"user:sudo": {"user", 1000, 27, []int{27}, "/home/user", "/bin/zsh"},
		"1234:55":   {"1234", 1234, 55, []int{55}, "/", "/bin/sh"},
		"1234":      {"1234", 1234, 1234, []int{1234}, "/", "/bin/sh"},
		"2000":      {"2000", 5, 6, []int{6}, "/five", "/bin/sh"}, // a name wins over a number
	} {
		got, err := lookup(root, who)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%q: %+v %v", who, got, err)
		}
	}
	for _, who := range []string{"nobody", "bad", "-1", "user:nogroup", "user:", ":1", "4294967296", "user\n"} {
		if a, err := lookup(root, who); err == nil {
			t.Errorf("%q: %+v", who, a)
		}
	}
	// Whatever /etc/passwd is, the daemon does not hang and knows root.
	if err := os.Remove(root + "/etc/passwd"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(root+"/etc/passwd", 0o666); err != nil {
		t.Fatal(err)
	}
	if a, err := lookup(root, "root"); err != nil || a.uid != 0 {
		t.Fatal(a, err)
	}
}

func FuzzAccounts(f *testing.F) {
	f.Add([]byte("root:x:0:0:root:/root:/bin/bash\n"), []byte("g:x:1:root\n"), "root")
	f.Add([]byte(":::::::\n"), []byte(":::"), "0")
	f.Fuzz(func(t *testing.T, passwd, group []byte, who string) {
		a, ok := findUser(passwd, who)
		if ok && (a.uid < 0 || a.gid < 0 || a.name == "") {
			t.Fatalf("%+v", a)
		}
		if g := memberships(group, who, 7); len(g) > 256 || !slices.Contains(g, 7) {
			t.Fatal(g)
		}
		if gid, ok := findGroup(group, who); ok && gid < 0 {
			t.Fatal(gid)
		}
	})
}

func FuzzStat(f *testing.F) {
	f.Add([]byte("12 (a) b) S 1 12 12 0 -1"))
	f.Add([]byte("12 () Z"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if task, ok := parseStat(5, b); ok && task.pid != 5 {
			t.Fatal(task)
		}
	})
}

func TestParseStat(t *testing.T) {
	got, ok := parseStat(12, []byte("12 (evil) Z 1 2 3) S 7 8 9 0 -1 4194560"))
	if !ok || got != (task{pid: 12, ppid: 7, sid: 9}) {
		t.Fatal(got, ok)
	}
}

func TestEnvironLayers(t *testing.T) {
	a := account{name: "u", home: "/h", shell: "/s"}
	env, err := environ(a, "id", true, map[string]string{"A": "1", "B": "1", marker: "forged"}, map[string]string{"B": "2", "TERM": "dumb"})
	if err != nil {
		t.Fatal(err)
	}
	want := "SPACE_SESSION_ID=id A=1 B=2 HOME=/h LANG=C.UTF-8 LOGNAME=u PATH=" + basePath + " SHELL=/s TERM=dumb USER=u"
	if got := strings.Join(env, " "); got != want {
		t.Fatal(got)
	}
	for _, bad := range []map[string]string{{"": "x"}, {"a=b": "x"}, {"a": "x\x00y"}, {"a\x00": ""}} {
		if _, err := environ(a, "id", false, bad); err == nil {
			t.Fatal(bad)
		}
	}
}

func TestEviction(t *testing.T) {
	s := New(Options{Processes: 2})
	ended := func(id string, acked bool) {
		p := &process{id: id, out: newOutput(100, false)}
		p.out.add(guestapi.FrameStdout, []byte("x"))
		if acked {
			p.out.ack(1)
		}
		p.out.publish(guestapi.ExitStatus{Cause: guestapi.ExitExited})
		s.processes[id] = &slot{p: p}
	}
	ended("unread", false)
	ended("read", true)
	if !s.evict() || s.processes["read"] != nil || s.processes["unread"] == nil {
		t.Fatal("the one whose output is acknowledged goes")
	}
	if s.evict() {
		t.Fatal("unread output was thrown away")
	}
	s.processes["starting"] = &slot{ready: make(chan struct{})}
	if _, err := s.start(guestapi.Start{ID: "more"}); err == nil || !strings.HasPrefix(err.Error(), guestapi.CodeTooManyProcesses) {
		t.Fatal(err)
	}
}
