package template

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/space-platform/space/internal/clock"
	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
)

// Options of a Store.
type Options struct {
	// Dir holds the templates; only root may write there. It is made with mode 0700.
	Dir string
	// RunDir gets the mounts, below RunDir/templates; it should not survive a reboot.
	RunDir string
	// CacheDir keeps downloaded packages for the next build; "" for no cache.
	CacheDir string
	// Clock is clock.System when nil.
	Clock clock.Clock
	// Log is slog.Default() when nil.
	Log *slog.Logger
}

// Store keeps the templates of one host. Its methods may be called from several
// goroutines, and several processes may share one directory.
//
// Layout: images/<hex>/{template.json, image.squashfs, published},
// names/<name:tag>.json, tmp/<build>/, and lock files.
type Store struct {
	o      Options
	flight flight
	// starts counts the builds that really began, for tests.
	starts atomic.Int64

	mountMu sync.Mutex
	// checked holds what mountMu guards: the identity of each image file whose
	// checksum was right.
	checked map[string]stamp

	// Where the host's Debian mirrors are said; tests point elsewhere.
	sourcesFile, sourcesDir string
}

// record is what images/<hex>/template.json says.
type record struct {
	Info
	Format string `json:"format"` // "squashfs"
	// ImageSHA256 is the checksum of image.squashfs.
	ImageSHA256 string `json:"image_sha256"`
}

// pointer is what names/<name:tag>.json says.
type pointer struct {
	Digest  string    `json:"digest"`
	Recipe  string    `json:"recipe"` // digest of the recipe
	BuiltAt time.Time `json:"built_at"`
}

const (
	imageName     = "image.squashfs"
	recordName    = "template.json"
	publishedName = "published"
)

var (
	fpImageDone = failpoint.Name("template.build.image_done")
	fpRenamed   = failpoint.Name("template.commit.renamed")
)

// Open opens or makes a store, and removes what builds that died have left.
// Builds of other processes that still run are not disturbed.
func Open(o Options) (*Store, error) {
	if o.Clock == nil {
		o.Clock = clock.System{}
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if !filepath.IsAbs(o.Dir) || !filepath.IsAbs(o.RunDir) {
		return nil, fmt.Errorf("%w options: absolute directories are needed", ErrInvalid)
	}
	s := &Store{o: o, checked: map[string]stamp{}, sourcesFile: sourcesFile, sourcesDir: sourcesDir}
	for _, d := range []string{o.Dir, s.path("images"), s.path("names"), s.path("tmp"), s.path("locks")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("template: %w", err)
		}
	}
	if err := os.Chmod(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	if o.CacheDir != "" {
		if err := os.MkdirAll(o.CacheDir, 0o700); err != nil {
			return nil, fmt.Errorf("template: %w", err)
		}
	}
	return s, s.sweep()
}

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.o.Dir}, parts...)...)
}

func (s *Store) image(hex string) string { return s.path("images", hex, imageName) }

// List returns every template, by reference; those without a name come last.
func (s *Store) List() ([]Info, error) {
	names, err := os.ReadDir(s.path("names"))
	if err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	var out []Info
	named := map[string]bool{}
	for _, e := range names {
		ref, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue
		}
		info, err := s.Resolve(ref)
		if err != nil {
			s.skip(ref, err)
			continue
		}
		named[info.Digest] = true
		out = append(out, info)
	}
	images, err := os.ReadDir(s.path("images"))
	if err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	for _, e := range images {
		if named["sha256:"+e.Name()] {
			continue
		}
		info, err := s.Resolve("sha256:" + e.Name())
		if err != nil {
			s.skip(e.Name(), err)
			continue
		}
		out = append(out, info)
	}
	slices.SortStableFunc(out, func(a, b Info) int {
		if (a.Reference == "") != (b.Reference == "") {
			return strings.Compare(b.Reference, a.Reference)
		}
		return strings.Compare(a.Reference+" "+a.Digest, b.Reference+" "+b.Digest)
	})
	return out, nil
}

// skip notes that one template is left out of a list: it must not hide the others.
func (s *Store) skip(entry string, err error) {
	if !errors.Is(err, ErrNotFound) { // deleted while we looked
		s.o.Log.Warn("leaving out a template that cannot be read", "entry", entry, "error", err)
	}
}

// Resolve finds a template by "name:tag", "name" or "sha256:<hex>". Errors:
// ErrNotFound, ErrInvalid. The Info of a digest has no reference.
func (s *Store) Resolve(ref string) (Info, error) {
	if digestPattern.MatchString(ref) {
		rec, err := s.record(ref)
		if err != nil {
			return Info{}, err
		}
		rec.Reference = ""
		return rec.Info, nil
	}
	name, tag, err := ParseReference(ref)
	if err != nil {
		return Info{}, fault.New(fault.Invalid, "template_invalid", "not a template name or digest: %.100q", ref).
			Do("use name:tag or sha256:<64 hex digits>").Wrap(err)
	}
	ref = name + ":" + tag
	p, err := s.pointer(ref)
	if err != nil {
		return Info{}, err
	}
	rec, err := s.record(p.Digest)
	if err != nil {
		return Info{}, err
	}
	rec.Reference, rec.BuiltAt = ref, p.BuiltAt
	return rec.Info, nil
}

func notFound(ref string) error {
	return fault.New(fault.NotFound, "template_not_found", "there is no template %.200s here", ref).
		Do("list what is here with `space templates`").Wrap(ErrNotFound)
}

func (s *Store) pointer(ref string) (pointer, error) {
	var p pointer
	err := readJSON(s.path("names", ref+".json"), &p)
	if errors.Is(err, fs.ErrNotExist) {
		return p, notFound(ref)
	}
	if err == nil && !digestPattern.MatchString(p.Digest) {
		err = fmt.Errorf("%w: bad digest in the record of %s", ErrCorrupt, ref)
	}
	return p, err
}

func (s *Store) record(digest string) (record, error) {
	var rec record
	err := readJSON(s.path("images", hexOf(digest), recordName), &rec)
	if errors.Is(err, fs.ErrNotExist) {
		return rec, notFound(digest)
	}
	if err == nil && (rec.Digest != digest || rec.Format != "squashfs") {
		err = fmt.Errorf("%w: record of %s is of something else", ErrCorrupt, digest)
	}
	return rec, err
}

func hexOf(digest string) string { return strings.TrimPrefix(digest, "sha256:") }

// Delete removes a template, its names and its mount. Sandboxes that run on it
// keep their view until they stop; callers must know that none starts again.
// An unknown digest is no error.
func (s *Store) Delete(digest string) error {
	if !digestPattern.MatchString(digest) {
		return fmt.Errorf("%w digest %.200q", ErrInvalid, digest)
	}
	if err := s.Unmount(digest); err != nil {
		return err
	}
	unlock, err := s.lock(context.Background(), s.path("locks", "commit"), nil)
	if err != nil {
		return err
	}
	defer unlock()
	names, err := filepath.Glob(s.path("names", "*.json"))
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	for _, n := range names {
		var p pointer
		if readJSON(n, &p) == nil && p.Digest == digest {
			if err := os.Remove(n); err != nil {
				return fmt.Errorf("template: %w", err)
			}
		}
	}
	if err := s.discard(s.path("images", hexOf(digest))); err != nil {
		return err
	}
	return errors.Join(syncDir(s.path("names")), syncDir(s.path("images")))
}

// discard removes a directory such that it is there whole or not at all.
func (s *Store) discard(dir string) error {
	grave := s.path("tmp", "gone-"+filepath.Base(dir)+fmt.Sprintf("-%d", s.o.Clock.Now().UnixNano()))
	err := os.Rename(dir, grave)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	if err := os.RemoveAll(grave); err != nil {
		return fmt.Errorf("template: %w", err)
	}
	return nil
}

// workspace makes a temporary directory that sweep leaves alone while this
// process lives, however it ends.
func (s *Store) workspace() (dir string, remove func(), err error) {
	unlock, err := s.lock(context.Background(), s.path("locks", "commit"), nil)
	if err != nil {
		return "", nil, err
	}
	defer unlock()
	dir, err = os.MkdirTemp(s.path("tmp"), "build-")
	if err != nil {
		return "", nil, fmt.Errorf("template: %w", err)
	}
	d, err := os.Open(dir)
	if err == nil {
		err = unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		return "", nil, fmt.Errorf("template: %w", err)
	}
	return dir, func() { _ = os.RemoveAll(dir); d.Close() }, nil
}

// sweep removes what dead builds have left: their directories, images that were
// never published, names of images that are gone.
func (s *Store) sweep() error {
	unlock, err := s.lock(context.Background(), s.path("locks", "commit"), nil)
	if err != nil {
		return err
	}
	defer unlock()
	entries, err := os.ReadDir(s.path("tmp"))
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	for _, e := range entries {
		dir := s.path("tmp", e.Name())
		if d, err := os.Open(dir); err == nil {
			alive := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
			d.Close()
			if alive {
				continue
			}
		}
		s.o.Log.Info("removing what a dead template build left", "entry", e.Name())
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("template: %w", err)
		}
	}
	images, err := os.ReadDir(s.path("images"))
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	for _, e := range images {
		if _, err := os.Lstat(s.path("images", e.Name(), publishedName)); errors.Is(err, fs.ErrNotExist) {
			s.o.Log.Info("removing a template that was never published", "digest", e.Name())
			if err := s.discard(s.path("images", e.Name())); err != nil {
				return err
			}
		}
	}
	names, err := os.ReadDir(s.path("names"))
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	for _, e := range names {
		ref, ok := strings.CutSuffix(e.Name(), ".json")
		if ok {
			p, err := s.pointer(ref)
			if err == nil {
				_, err = s.record(p.Digest)
			}
			ok = !errors.Is(err, ErrNotFound)
		}
		if !ok {
			s.o.Log.Info("removing a template name without a template", "entry", e.Name())
			if err := os.Remove(s.path("names", e.Name())); err != nil {
				return fmt.Errorf("template: %w", err)
			}
		}
	}
	return nil
}

// commit publishes what is in work as the template of rec under r's name.
func (s *Store) commit(ctx context.Context, r Recipe, rec record, work string) (Info, error) {
	recipe, err := r.digest()
	if err != nil {
		return Info{}, err
	}
	if err := writeJSON(filepath.Join(work, recordName), rec); err != nil {
		return Info{}, err
	}
	if err := syncDir(work); err != nil {
		return Info{}, fmt.Errorf("template: %w", err)
	}
	unlock, err := s.lock(ctx, s.path("locks", "commit"), nil)
	if err != nil {
		return Info{}, err
	}
	defer unlock()

	home := s.path("images", hexOf(rec.Digest))
	if old, err := s.record(rec.Digest); err == nil && s.intact(old) {
		// The same tree was there: what is published never changes, even if
		// another version of our tools packs it otherwise.
		rec = old
	} else {
		if err := s.discard(home); err != nil {
			return Info{}, err
		}
		if err := os.Rename(work, home); err != nil {
			return Info{}, fmt.Errorf("template: %w", err)
		}
		if err := syncDir(s.path("images")); err != nil {
			return Info{}, fmt.Errorf("template: %w", err)
		}
	}
	if err := failpoint.Hit(ctx, fpRenamed); err != nil {
		return Info{}, errors.Join(err, s.unpublish(home))
	}
	p := pointer{Digest: rec.Digest, Recipe: recipe, BuiltAt: s.o.Clock.Now().UTC()}
	if err := writeJSON(filepath.Join(home, publishedName), struct{}{}); err != nil {
		return Info{}, errors.Join(err, s.unpublish(home))
	}
	if err := errors.Join(writeJSON(s.path("names", r.Reference()+".json"), p), syncDir(home)); err != nil {
		return Info{}, fmt.Errorf("template: %w", err)
	}
	rec.Reference, rec.BuiltAt = r.Reference(), p.BuiltAt
	return rec.Info, nil
}

// unpublish removes an image directory unless it was published before.
func (s *Store) unpublish(home string) error {
	if _, err := os.Lstat(filepath.Join(home, publishedName)); errors.Is(err, fs.ErrNotExist) {
		return s.discard(home)
	}
	return nil
}

// lock takes an exclusive lock between processes; the kernel frees it when the
// process dies. wait is called once when another process holds it.
func (s *Store) lock(ctx context.Context, path string, wait func()) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	for first := true; ; first = false {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("template: lock: %w", err)
		}
		if first && wait != nil {
			wait()
		}
		// flock has no call that ends with a context, so ask again soon.
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-s.o.Clock.After(50 * time.Millisecond):
		}
	}
}

const maxJSON = 1 << 20

func readJSON(path string, into any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxJSON))
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrCorrupt, filepath.Base(path), err)
	}
	return nil
}

// writeJSON replaces path at once and durably.
func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("template: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("template: %w", err)
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
