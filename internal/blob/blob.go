// Package blob holds the programs that the space binary carries inside itself:
// the guest daemon ("space-guest") and the gVisor runtime ("runsc").
//
// `make build` puts them in place, compressed. A program that was built without
// them compiles and runs, and gets ErrAbsent when it asks for one.
package blob

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// The names of the blobs.
const (
	Guest = "space-guest"
	Runsc = "runsc"
)

// maxSize bounds one unpacked blob, in bytes.
const maxSize = 512 << 20

// ErrAbsent says that this program was built without the blob.
var ErrAbsent = errors.New("blob is not embedded: build with `make build`")

//go:embed files
var embedded embed.FS

var files = mustSub(embedded)

func mustSub(fsys fs.FS) fs.FS {
	sub, err := fs.Sub(fsys, "files")
	if err != nil {
		panic(err)
	}
	return sub
}

// Open returns the unpacked content of the blob. Reading fails when the content
// is not what Digest says; nobody should act on what was read before io.EOF.
func Open(name string) (io.ReadCloser, error) { return open(files, name) }

// Digest returns the SHA-256 of the unpacked blob, in lower-case hexadecimal.
func Digest(name string) (string, error) { return digest(files, name) }

// Extract makes the blob available as dir/<digest>/<name>, with mode 0555, and
// returns that path. A file that is there already is used only when its content
// has the right checksum, and is replaced otherwise. Extract is atomic: others
// see no file or the whole file, and it may run in several processes at once.
// dir must be writable by trusted users only.
func Extract(dir, name string) (string, error) { return extract(files, dir, name) }

func digest(fsys fs.FS, name string) (string, error) {
	if !valid(name) {
		return "", fmt.Errorf("blob %q: invalid name", name)
	}
	b, err := fs.ReadFile(fsys, name+".sha256")
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("blob %s: %w", name, ErrAbsent)
	}
	if err != nil {
		return "", fmt.Errorf("blob %s: %w", name, err)
	}
	sum := strings.TrimSpace(string(b))
	if raw, err := hex.DecodeString(sum); err != nil || len(raw) != sha256.Size || sum != strings.ToLower(sum) {
		return "", fmt.Errorf("blob %s: bad checksum file", name)
	}
	return sum, nil
}

func valid(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\\\x00")
}

func open(fsys fs.FS, name string) (io.ReadCloser, error) {
	sum, err := digest(fsys, name)
	if err != nil {
		return nil, err
	}
	packed, err := fs.ReadFile(fsys, name+".gz")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("blob %s: %w", name, ErrAbsent)
	}
	if err != nil {
		return nil, fmt.Errorf("blob %s: %w", name, err)
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("blob %s: %w", name, err)
	}
	return &verified{name: name, want: sum, src: z, hash: sha256.New()}, nil
}

// verified passes content on and turns a wrong checksum into an error in place
// of io.EOF.
type verified struct {
	name, want string
	src        *gzip.Reader
	hash       hash.Hash
	n          int64
}

func (v *verified) Read(p []byte) (int, error) {
	n, err := v.src.Read(p)
	v.hash.Write(p[:n])
	v.n += int64(n)
	if v.n > maxSize {
		return n, fmt.Errorf("blob %s: larger than %d bytes", v.name, maxSize)
	}
	if err == io.EOF {
		if got := hex.EncodeToString(v.hash.Sum(nil)); got != v.want {
			return n, fmt.Errorf("blob %s: checksum is %s, want %s", v.name, got, v.want)
		}
	}
	return n, err
}

func (v *verified) Close() error { return v.src.Close() }

func extract(fsys fs.FS, dir, name string) (string, error) {
	sum, err := digest(fsys, name)
	if err != nil {
		return "", err
	}
	home := filepath.Join(dir, sum)
	path := filepath.Join(home, name)
	if same(path, sum) {
		return path, nil
	}
	src, err := open(fsys, name)
	if err != nil {
		return "", err
	}
	defer src.Close()
	if err := os.MkdirAll(home, 0o755); err != nil {
		return "", fmt.Errorf("blob %s: %w", name, err)
	}
	tmp, err := os.CreateTemp(home, "."+name+".*")
	if err != nil {
		return "", fmt.Errorf("blob %s: %w", name, err)
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	if _, err := io.Copy(tmp, src); err != nil {
		return "", fmt.Errorf("blob %s: %w", name, err)
	}
	if err := errors.Join(tmp.Chmod(0o555), tmp.Sync(), tmp.Close()); err != nil {
		return "", fmt.Errorf("blob %s: %w", name, err)
	}
	// A directory in the way would make the rename fail for ever.
	if st, err := os.Lstat(path); err == nil && st.IsDir() {
		if err := os.RemoveAll(path); err != nil {
			return "", fmt.Errorf("blob %s: %w", name, err)
		}
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return "", fmt.Errorf("blob %s: %w", name, err)
	}
	return path, syncDir(home)
}

// same reports whether path is a plain executable file with that checksum.
func same(path, sum string) bool {
	st, err := os.Lstat(path)
	if err != nil || !st.Mode().IsRegular() || st.Mode().Perm() != 0o555 || st.Size() > maxSize {
		return false
	}
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return false
	}
	return hex.EncodeToString(h.Sum(nil)) == sum
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
