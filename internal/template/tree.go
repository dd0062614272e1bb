package template

import (
	"archive/tar"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"path"
	"slices"
	"strings"
	"time"
)

// Bounds of a tree; a tar stream that passes one is refused.
const (
	maxEntries   = 400_000
	maxPath      = 4095
	maxName      = 255
	maxXattrs    = 64 << 10 // per entry, names and values
	maxTreeBytes = 4 << 30  // content of all files
	maxTarBytes  = maxTreeBytes + maxEntries*4096
	// maxID is the highest uid and gid that exists in a build's user namespace.
	maxID = idCount - 1
)

// epoch is the time of every file in every template: the day bookworm was
// released. Times are not part of a template.
var epoch = time.Date(2023, time.June, 10, 0, 0, 0, 0, time.UTC)

// kind is the type of an entry, as in the canonical form.
type kind byte

const (
	kindDir     kind = 'd'
	kindFile    kind = 'f'
	kindSymlink kind = 'l'
	kindChar    kind = 'c'
	kindBlock   kind = 'b'
	kindFifo    kind = 'p'
	kindLink    kind = 'h' // a further name of a file, in canonical form only
)

// inode is what one or, by hard links, several paths name.
type inode struct {
	kind         kind
	mode         uint32 // 0o7777
	uid, gid     int
	size, offset int64 // content: where it is in the spool
	sum          [sha256.Size]byte
	target       string
	major, minor int64
	xattrs       []xattr // sorted by name
}

type xattr struct{ name, value string }

// tree is a file system in memory; the content of its files is in a spool.
type tree struct {
	// nodes maps clean relative paths ("" is the root) to inodes.
	nodes map[string]*inode
	spool spool
	end   int64 // where the next content goes in the spool
}

// spool keeps the content of files; an unlinked temporary file in practice.
type spool interface {
	io.WriterAt
	io.ReaderAt
}

// readTree reads a hostile tar stream within the bounds above. What keep refuses
// is skipped, and so is the content of it. The error wraps ErrInvalid when the
// stream is at fault.
func readTree(r io.Reader, into spool, keep func(p string, k kind) bool) (*tree, error) {
	t := &tree{nodes: map[string]*inode{"": {kind: kindDir, mode: 0o755}}, spool: into}
	limited := &io.LimitedReader{R: r, N: maxTarBytes}
	tr := tar.NewReader(limited)
	// links are resolved at the end, because keep may skip a first name and not a second.
	skipped := map[string]*inode{}
	for n := 0; ; n++ {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			if limited.N <= 0 {
				return nil, fmt.Errorf("%w tree: stream above %d bytes", ErrInvalid, int64(maxTarBytes))
			}
			return nil, fmt.Errorf("%w tree: %w", ErrInvalid, err)
		}
		if n >= maxEntries {
			return nil, fmt.Errorf("%w tree: more than %d entries", ErrInvalid, maxEntries)
		}
		if err := t.add(h, tr, keep, skipped); err != nil {
			return nil, err
		}
	}
	return t, t.check()
}

func (t *tree) add(h *tar.Header, content io.Reader, keep func(string, kind) bool, skipped map[string]*inode) error {
	p, err := cleanPath(h.Name)
	if err != nil {
		return err
	}
	bad := func(what string) error { return fmt.Errorf("%w tree: %.300q: %s", ErrInvalid, p, what) }
	if _, twice := t.nodes[p]; twice && p != "" || skipped[p] != nil {
		return bad("named twice")
	}
	var node *inode
	if h.Typeflag == tar.TypeLink {
		to, err := cleanPath(h.Linkname)
		if err != nil {
			return err
		}
		if node = t.nodes[to]; node == nil {
			node = skipped[to]
		}
		if node == nil || node.kind != kindFile {
			return bad("hard link to what is not a file before it")
		}
	} else if node, err = newInode(h); err != nil {
		return bad(err.Error())
	}
	if p == "" {
		if node.kind != kindDir {
			return bad("the root is not a directory")
		}
		t.nodes[""] = node
		return nil
	}
	if !keep(p, node.kind) {
		skipped[p] = node
		// Its content may be needed by a further name that is kept.
	} else {
		t.nodes[p] = node
	}
	if node.kind == kindFile && h.Typeflag != tar.TypeLink {
		if h.Size < 0 || h.Size > maxTreeBytes-t.end {
			return bad("content of the tree above its bound")
		}
		return t.store(node, content)
	}
	return nil
}

// store copies content into the spool and sets where it is.
func (t *tree) store(node *inode, content io.Reader) error {
	sum := sha256.New()
	node.offset = t.end
	n, err := io.Copy(io.NewOffsetWriter(t.spool, t.end), io.TeeReader(io.LimitReader(content, maxTreeBytes-t.end+1), sum))
	if err != nil {
		return fmt.Errorf("template: reading tree: %w", err)
	}
	node.size = n
	t.end += n
	sum.Sum(node.sum[:0])
	return nil
}

func newInode(h *tar.Header) (*inode, error) {
	node := &inode{mode: uint32(h.Mode & 0o7777), uid: h.Uid, gid: h.Gid}
	if h.Uid < 0 || h.Uid > maxID || h.Gid < 0 || h.Gid > maxID {
		return nil, fmt.Errorf("owner %d:%d out of range", h.Uid, h.Gid)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		node.kind = kindDir
	case tar.TypeReg:
		node.kind = kindFile
	case tar.TypeSymlink:
		node.kind, node.mode, node.target = kindSymlink, 0o777, h.Linkname
		if h.Linkname == "" || len(h.Linkname) > maxPath || strings.ContainsRune(h.Linkname, 0) {
			return nil, fmt.Errorf("symbolic link with an impossible target")
		}
	case tar.TypeChar, tar.TypeBlock:
		node.kind = kindChar
		if h.Typeflag == tar.TypeBlock {
			node.kind = kindBlock
		}
		node.major, node.minor = h.Devmajor, h.Devminor
		if node.major < 0 || node.major >= 1<<12 || node.minor < 0 || node.minor >= 1<<20 {
			return nil, fmt.Errorf("device number out of range")
		}
	case tar.TypeFifo:
		node.kind = kindFifo
	default:
		return nil, fmt.Errorf("entry of unknown type %q", h.Typeflag)
	}
	total := 0
	for key, value := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			// A few bytes would become gigabytes; our tar writes none.
			return nil, fmt.Errorf("sparse file")
		}
		name, ok := strings.CutPrefix(key, "SCHILY.xattr.")
		// Others (POSIX ACLs, labels of a security module) mean something on the
		// building host only.
		if !ok || name != "security.capability" && !strings.HasPrefix(name, "user.") {
			continue
		}
		if len(name) > maxName || strings.ContainsAny(name, "=\x00") {
			return nil, fmt.Errorf("extended attribute with an impossible name")
		}
		if total += len(name) + len(value); total > maxXattrs {
			return nil, fmt.Errorf("extended attributes above %d bytes", maxXattrs)
		}
		node.xattrs = append(node.xattrs, xattr{name, value})
	}
	slices.SortFunc(node.xattrs, func(a, b xattr) int { return cmp.Compare(a.name, b.name) })
	return node, nil
}

// cleanPath gives the relative path of a tar name, refusing what leaves the tree.
func cleanPath(name string) (string, error) {
	bad := func(what string) (string, error) {
		return "", fmt.Errorf("%w tree: path %.300q: %s", ErrInvalid, name, what)
	}
	if len(name) > maxPath || name == "" {
		return bad("length")
	}
	if strings.HasPrefix(name, "/") {
		return bad("absolute")
	}
	if strings.ContainsRune(name, 0) {
		return bad("NUL")
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return bad("leaves the tree")
		case len(part) > maxName:
			return bad("name too long")
		default:
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "/"), nil
}

// check makes sure that every entry lies in a directory of the tree.
func (t *tree) check() error {
	for p := range t.nodes {
		if p == "" {
			continue
		}
		if up := t.nodes[parent(p)]; up == nil || up.kind != kindDir {
			return fmt.Errorf("%w tree: %.300q is not in a directory of the tree", ErrInvalid, p)
		}
	}
	return nil
}

func parent(p string) string {
	if i := strings.LastIndexByte(p, '/'); i >= 0 {
		return p[:i]
	}
	return ""
}

// put lays a recipe's file over the tree, with the directories it needs. What it
// replaces is removed, except that a directory over a directory changes owner
// and mode only.
func (t *tree) put(f File) error {
	p := strings.TrimPrefix(f.Path, "/")
	for up := parent(p); ; up = parent(up) {
		switch node := t.nodes[up]; {
		case node == nil:
			t.nodes[up] = &inode{kind: kindDir, mode: 0o755}
		case node.kind != kindDir:
			return fmt.Errorf("%w recipe: %s lies under %q, which is no directory", ErrInvalid, f.Path, "/"+up)
		}
		if up == "" {
			break
		}
	}
	node := &inode{kind: kindFile, mode: uint32(f.Mode), uid: f.UID, gid: f.GID}
	old := t.nodes[p]
	switch {
	case f.Dir:
		node.kind = kindDir
	case f.Target != "":
		node.kind, node.mode, node.target = kindSymlink, 0o777, f.Target
	}
	if old != nil && old.kind == kindDir && node.kind != kindDir {
		return fmt.Errorf("%w recipe: %s is a directory", ErrInvalid, f.Path)
	}
	t.nodes[p] = node
	if node.kind == kindFile {
		return t.store(node, strings.NewReader(f.Content))
	}
	return nil
}

// named is one path of the canonical form.
type named struct {
	path string
	node *inode
	// first is the first path of the same file when path is a further name of it.
	first string
}

// canonical lists all paths in order of their bytes; of the names of one file
// the first stands for it and the others are links to it.
func (t *tree) canonical() []named {
	list := make([]named, 0, len(t.nodes))
	for p, node := range t.nodes {
		list = append(list, named{path: p, node: node})
	}
	slices.SortFunc(list, func(a, b named) int { return cmp.Compare(a.path, b.path) })
	first := map[*inode]string{}
	for i, e := range list {
		if e.node.kind != kindFile {
			continue
		}
		if f, seen := first[e.node]; seen {
			list[i].first = f
		} else {
			first[e.node] = e.path
		}
	}
	return list
}

// size is the sum of the sizes of the files.
func (t *tree) size() int64 {
	var sum int64
	for _, e := range t.canonical() {
		if e.node.kind == kindFile && e.first == "" {
			sum += e.node.size
		}
	}
	return sum
}

// digest is "sha256:<hex>" of the canonical tree and the configuration.
func (t *tree) digest(c Config) (string, error) {
	conf, err := json.Marshal(c) // maps are written in order of their keys
	if err != nil {
		return "", fmt.Errorf("template: configuration: %w", err)
	}
	h := sha256.New()
	f := frames{h}
	f.text("space template 1")
	f.text(string(conf))
	for _, e := range t.canonical() {
		k := e.node.kind
		if e.first != "" {
			k = kindLink
		}
		f.text(string(rune(k)))
		f.text(e.path)
		if k == kindLink {
			f.text(e.first)
			continue
		}
		f.number(int64(e.node.mode))
		f.number(int64(e.node.uid))
		f.number(int64(e.node.gid))
		f.number(e.node.size)
		if k == kindFile {
			f.text(string(e.node.sum[:]))
		}
		f.text(e.node.target)
		f.number(e.node.major)
		f.number(e.node.minor)
		f.number(int64(len(e.node.xattrs)))
		for _, x := range e.node.xattrs {
			f.text(x.name)
			f.text(x.value)
		}
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

// frames writes values so that no two lists of values give the same bytes.
type frames struct{ h hash.Hash }

func (f frames) number(n int64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(n))
	f.h.Write(b[:])
}

func (f frames) text(s string) {
	f.number(int64(len(s)))
	io.WriteString(f.h, s)
}

// write writes the canonical tree as a tar stream: equal trees, equal bytes.
func (t *tree) write(w io.Writer) error {
	tw := tar.NewWriter(w)
	for _, e := range t.canonical() {
		h := &tar.Header{
			Format: tar.FormatPAX, Name: "./" + e.path, ModTime: epoch,
			Mode: int64(e.node.mode), Uid: e.node.uid, Gid: e.node.gid,
		}
		switch e.node.kind {
		case kindDir:
			h.Typeflag = tar.TypeDir
			h.Name = "./" + e.path + "/"
			if e.path == "" {
				h.Name = "./"
			}
		case kindFile:
			h.Typeflag, h.Size = tar.TypeReg, e.node.size
			if e.first != "" {
				h.Typeflag, h.Size, h.Linkname = tar.TypeLink, 0, "./"+e.first
			}
		case kindSymlink:
			h.Typeflag, h.Linkname = tar.TypeSymlink, e.node.target
		case kindChar, kindBlock:
			h.Typeflag = tar.TypeChar
			if e.node.kind == kindBlock {
				h.Typeflag = tar.TypeBlock
			}
			h.Devmajor, h.Devminor = e.node.major, e.node.minor
		case kindFifo:
			h.Typeflag = tar.TypeFifo
		}
		if e.first == "" && len(e.node.xattrs) > 0 {
			h.PAXRecords = map[string]string{}
			for _, x := range e.node.xattrs {
				h.PAXRecords["SCHILY.xattr."+x.name] = x.value
			}
		}
		if err := tw.WriteHeader(h); err != nil {
			return fmt.Errorf("template: writing %.300q: %w", e.path, err)
		}
		if h.Typeflag == tar.TypeReg && h.Size > 0 {
			if _, err := io.Copy(tw, io.NewSectionReader(t.spool, e.node.offset, e.node.size)); err != nil {
				return fmt.Errorf("template: writing %.300q: %w", e.path, err)
			}
		}
	}
	return tw.Close()
}

// filter gives the keep function of a recipe: its own patterns, and whatever
// differs from build to build or is only the trace of one.
func filter(drop []string) func(p string, k kind) bool {
	return func(p string, k kind) bool {
		abs := "/" + p
		switch {
		case below(abs, "/dev", "/proc", "/sys", "/run", "/tmp", "/var/tmp", "/var/lib/apt/lists"):
			return false
		case k != kindDir && below(abs, "/var/log", "/var/cache"):
			return false
		case slices.Contains(traces, abs) || below(abs, traces...):
			return false
		case below(abs, "/var/lib/dpkg", "/var/cache/debconf") && strings.HasSuffix(abs, "-old"):
			return false
		case k == kindChar || k == kindBlock:
			return false // machines have a /dev of their own
		}
		for _, pattern := range drop {
			for at := abs; at != "/"; at = path.Dir(at) {
				if ok, _ := path.Match(pattern, at); ok {
					return false
				}
			}
		}
		return true
	}
}

var traces = []string{
	"/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-", "/etc/subuid-", "/etc/subgid-",
	"/etc/.pwd.lock", "/etc/apt/apt.conf.d/99mmdebstrap", "/etc/apt/sources.list",
	"/etc/apt/sources.list.d/0000main.list", "/etc/apt/sources.list.d/0001main.list",
	"/var/lib/systemd/random-seed", "/var/lib/apt/extended_states.tmp",
	"/root/.cache", "/var/lib/dpkg/lock", "/var/lib/dpkg/lock-frontend",
}

func below(p string, dirs ...string) bool {
	for _, d := range dirs {
		if strings.HasPrefix(p, d) && len(p) > len(d) && p[len(d)] == '/' {
			return true
		}
	}
	return false
}
