package template

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

// memory is a spool for tests.
type memory struct{ b []byte }

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	if need := int(off) + len(p); need > len(m.b) {
		m.b = append(m.b, make([]byte, need-len(m.b))...)
	}
	return copy(m.b[off:], p), nil
}

func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(m.b).ReadAt(p, off)
}

func all(string, kind) bool { return true }

type item struct {
	tar.Header
	content string
}

func dir(name string) item {
	return item{Header: tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}}
}
func file(name, content string) item {
	return item{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content: content}
}
func link(name, to string) item {
	return item{Header: tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}}
}
func symlink(name, to string) item {
	return item{Header: tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}}
}

func archive(t testing.TB, items ...item) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, i := range items {
		h := i.Header
		h.Size, h.Format = int64(len(i.content)), tar.FormatPAX
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, i.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func read(t testing.TB, b []byte, keep func(string, kind) bool) *tree {
	t.Helper()
	tr, err := readTree(bytes.NewReader(b), &memory{}, keep)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func digestOf(t testing.TB, tr *tree, c Config) string {
	t.Helper()
	d, err := tr.digest(c)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDigestIgnoresOrderTimesAndSpelling(t *testing.T) {
	one := archive(t, dir("./"), dir("./a/"), file("./a/f", "x"), link("./a/g", "./a/f"), symlink("./l", "a/f"))
	late := file("a/g", "x")
	late.ModTime = epoch.AddDate(3, 0, 0)
	late.Uname, late.Gname = "root", "wheel"
	two := archive(t, symlink("l", "a/f"), dir("a"), late, link(".//a/./f", "a/g"))
	if a, b := digestOf(t, read(t, one, all), Config{}), digestOf(t, read(t, two, all), Config{}); a != b {
		t.Fatalf("equal trees, digests %s and %s", a, b)
	}
	var w1, w2 bytes.Buffer
	if err := errors.Join(read(t, one, all).write(&w1), read(t, two, all).write(&w2)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(w1.Bytes(), w2.Bytes()) {
		t.Fatal("equal trees, other bytes")
	}
}

func TestDigestSeesEveryProperty(t *testing.T) {
	plain := func() []item { return []item{dir("d"), file("d/f", "content"), symlink("d/l", "f")} }
	base := digestOf(t, read(t, archive(t, plain()...), all), Config{User: "user"})
	seen := map[string]string{base: "the plain tree"}
	check := func(what string, d string) {
		t.Helper()
		if before, ok := seen[d]; ok {
			t.Errorf("%s has the digest of %s", what, before)
		}
		seen[d] = what
	}
	for what, change := range map[string]func(i []item) []item{
		"mode":      func(i []item) []item { i[1].Mode = 0o600; return i },
		"setuid":    func(i []item) []item { i[1].Mode = 0o4644; return i },
		"uid":       func(i []item) []item { i[1].Uid = 1; return i },
		"gid":       func(i []item) []item { i[1].Gid = 1; return i },
		"content":   func(i []item) []item { i[1].content = "Content"; return i },
		"name":      func(i []item) []item { i[1].Name = "d/g"; return i },
		"target":    func(i []item) []item { i[2].Linkname = "g"; return i },
		"dir mode":  func(i []item) []item { i[0].Mode = 0o700; return i },
		"more":      func(i []item) []item { return append(i, dir("e")) },
		"hard link": func(i []item) []item { return append(i, link("d/h", "d/f")) },
		"same file": func(i []item) []item { return append(i, file("d/h", "content")) },
		"xattr": func(i []item) []item {
			i[1].PAXRecords = map[string]string{"SCHILY.xattr.user.a": "b"}
			return i
		},
		"capability": func(i []item) []item {
			i[1].PAXRecords = map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02"}
			return i
		},
		"fifo":   func(i []item) []item { i[1].Typeflag, i[1].content = tar.TypeFifo, ""; return i },
		"device": func(i []item) []item { i[1].Typeflag, i[1].content = tar.TypeChar, ""; return i },
		"minor": func(i []item) []item {
			i[1].Typeflag, i[1].content, i[1].Devminor = tar.TypeChar, "", 3
			return i
		},
	} {
		check(what, digestOf(t, read(t, archive(t, change(plain())...), all), Config{User: "user"}))
	}
	tr := read(t, archive(t, plain()...), all)
	check("another user", digestOf(t, tr, Config{User: "root"}))
	check("an environment", digestOf(t, tr, Config{User: "user", Env: map[string]string{"A": "1"}}))
}

func TestDigestLeavesOutWhatOnlyTheHostMeans(t *testing.T) {
	f := file("f", "x")
	plain := digestOf(t, read(t, archive(t, f), all), Config{})
	f.PAXRecords = map[string]string{"SCHILY.xattr.system.posix_acl_access": "x", "SCHILY.xattr.security.selinux": "y"}
	if got := digestOf(t, read(t, archive(t, f), all), Config{}); got != plain {
		t.Fatal("labels of the building host are part of the digest")
	}
}

func TestReadTreeRefuses(t *testing.T) {
	owner := file("f", "")
	owner.Uid = idCount
	device := item{Header: tar.Header{Name: "n", Typeflag: tar.TypeBlock, Devmajor: 1 << 13}}
	xattrs := file("f", "")
	xattrs.PAXRecords = map[string]string{"SCHILY.xattr.user.a": strings.Repeat("x", maxXattrs)}
	for what, items := range map[string][]item{
		"parent":             {file("../f", "x")},
		"parent inside":      {dir("a"), file("a/../../f", "x")},
		"absolute":           {file("/etc/passwd", "x")},
		"absolute link":      {file("f", "x"), link("g", "/f")},
		"link out":           {file("f", "x"), link("g", "../f")},
		"link to nothing":    {link("g", "f")},
		"link to dir":        {dir("d"), link("g", "d")},
		"link to itself":     {link("g", "g")},
		"under a file":       {file("f", "x"), file("f/g", "x")},
		"under a symlink":    {symlink("s", "/etc"), file("s/passwd", "x")},
		"under nothing":      {file("d/f", "x")},
		"twice":              {file("f", "x"), file("f", "y")},
		"symlink, then file": {symlink("f", "/etc/passwd"), file("f", "y")},
		"root as a file":     {symlink(".", "/")},
		"long name":          {file(strings.Repeat("n", maxName+1), "x")},
		"long path":          {file(strings.Repeat("n/", maxPath/2+1)+"n", "x")},
		"foreign owner":      {owner},
		"device number":      {device},
		"many xattrs":        {xattrs},
		"unknown type":       {{Header: tar.Header{Name: "c", Typeflag: tar.TypeCont}}},
	} {
		t.Run(what, func(t *testing.T) {
			if _, err := readTree(bytes.NewReader(archive(t, items...)), &memory{}, all); !errors.Is(err, ErrInvalid) {
				t.Fatalf("error %v, want ErrInvalid", err)
			}
		})
	}
	t.Run("sparse file", func(t *testing.T) {
		h := tar.Header{Typeflag: tar.TypeReg, PAXRecords: map[string]string{"GNU.sparse.major": "1"}}
		if _, err := newInode(&h); err == nil {
			t.Fatal("a sparse file was accepted")
		}
	})
	t.Run("cut short", func(t *testing.T) {
		b := archive(t, file("f", strings.Repeat("x", 4096)))
		if _, err := readTree(bytes.NewReader(b[:2048]), &memory{}, all); err == nil {
			t.Fatal("a truncated stream was accepted")
		}
	})
}

func TestReadTreeRefusesTooManyEntries(t *testing.T) {
	// Every entry is the root again, which is allowed, so only the count can end it.
	one := archive(t, dir("./"))
	header := one[:len(one)-1024] // without the two blocks that end an archive
	_, err := readTree(&endless{block: header}, &memory{}, all)
	if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "entries") {
		t.Fatalf("error %v, want the bound of entries", err)
	}
}

// endless repeats block for ever.
type endless struct {
	block []byte
	at    int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.block[e.at:])
	e.at = (e.at + n) % len(e.block)
	return n, nil
}

func TestFilterDropsTracesOfABuild(t *testing.T) {
	keep := filter([]string{"/usr/share/man/*", "/usr/lib/python3.*/EXTERNALLY-MANAGED"})
	for p, want := range map[string]bool{
		"usr/bin/python3": true, "usr/share/man": true, "usr/share/man/man1/ls.1": false,
		"usr/share/manual": true, "usr/lib/python3.11/EXTERNALLY-MANAGED": false, "usr/lib/python3.11/os.py": true,
		"var/log/dpkg.log": false, "var/log": true, "var/cache/ldconfig/aux-cache": false, "etc/passwd-": false,
		"etc/passwd": true, "var/lib/dpkg/status-old": false, "var/lib/dpkg/status": true, "root/.cache/x": false,
		"dev/null": false, "run/lock": false, "tmp/x": false, "var/lib/apt/lists/x": false, "tmpfile": true,
	} {
		if keep(p, kindFile) != want {
			t.Errorf("%s: kept %t", p, !want)
		}
	}
	if !keep("var/log/apt", kindDir) || keep("usr/x", kindChar) {
		t.Error("directories of logs are kept, devices are not")
	}
}

// A further name survives when the first one is dropped.
func TestDroppedFirstNameLeavesTheContent(t *testing.T) {
	b := archive(t, dir("var"), dir("var/log"), file("var/log/a", "kept"), file("b0", "x"), link("c", "var/log/a"))
	tr := read(t, b, filter(nil))
	node := tr.nodes["c"]
	if node == nil || tr.nodes["var/log/a"] != nil {
		t.Fatalf("nodes %v", tr.nodes)
	}
	got := make([]byte, node.size)
	if _, err := tr.spool.ReadAt(got, node.offset); err != nil || string(got) != "kept" {
		t.Fatalf("content %q, error %v", got, err)
	}
}

func TestPutLaysFilesOver(t *testing.T) {
	tr := read(t, archive(t, dir("etc"), file("etc/hosts", "old"), symlink("etc/s", "x")), all)
	for _, f := range []File{
		{Path: "/etc/hosts", Content: "new", Mode: 0o644},
		{Path: "/a/b/c", Dir: true, Mode: 0o1777},
		{Path: "/etc/s", Content: "no link any more", Mode: 0o600, UID: 7, GID: 8},
		{Path: "/bin/sh", Target: "busybox"},
	} {
		if err := tr.put(f); err != nil {
			t.Fatal(err)
		}
	}
	if err := tr.check(); err != nil {
		t.Fatal(err)
	}
	if n := tr.nodes["etc/s"]; n.kind != kindFile || n.uid != 7 || n.gid != 8 || n.mode != 0o600 {
		t.Errorf("etc/s is %+v", n)
	}
	if n := tr.nodes["a/b/c"]; n.kind != kindDir || n.mode != 0o1777 || tr.nodes["a/b"].mode != 0o755 {
		t.Errorf("a/b/c is %+v", n)
	}
	if err := tr.put(File{Path: "/etc/hosts/x", Content: "y"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a file under a file: error %v", err)
	}
	if err := tr.put(File{Path: "/etc", Content: "y"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a file over a directory: error %v", err)
	}
}

// FuzzReadTree: whatever the stream is, reading ends without panic, and what is
// accepted stays inside the tree and survives its own canonical form.
func FuzzReadTree(f *testing.F) {
	f.Add(archive(f, dir("a"), file("a/f", "x"), link("a/g", "a/f"), symlink("l", "../../etc")))
	f.Add(archive(f, file("../f", "x")))
	caps := file("f", "x")
	caps.PAXRecords = map[string]string{"SCHILY.xattr.security.capability": "\x01\x00"}
	caps.Mode = 0o6755
	f.Add(archive(f, caps, item{Header: tar.Header{Name: "n", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		tr, err := readTree(bytes.NewReader(b), &memory{}, filter(nil))
		if err != nil {
			return
		}
		for p, node := range tr.nodes {
			if strings.HasPrefix(p, "/") || strings.Contains("/"+p+"/", "/../") || strings.Contains("/"+p+"/", "/./") {
				t.Fatalf("path %q accepted", p)
			}
			if node.uid > maxID || node.gid > maxID || node.mode > 0o7777 {
				t.Fatalf("%q: %+v accepted", p, node)
			}
		}
		var out bytes.Buffer
		if err := tr.write(&out); err != nil {
			t.Fatalf("an accepted tree cannot be written: %v", err)
		}
		again, err := readTree(bytes.NewReader(out.Bytes()), &memory{}, all)
		if err != nil {
			t.Fatalf("the canonical form is refused: %v", err)
		}
		if a, b := digestOf(t, tr, Config{}), digestOf(t, again, Config{}); a != b {
			t.Fatalf("digest %s became %s", a, b)
		}
	})
}
