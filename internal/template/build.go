package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/space-platform/space/internal/failpoint"
	"github.com/space-platform/space/internal/fault"
)

const (
	keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	// scratchBytes bounds what a build may write: unpacked tree and packages.
	scratchBytes = 3 << 30
	// neededMemory is what a build of base takes of the host's memory, with margin.
	neededMemory = 1 << 30
	// buildLimit ends a build that hangs, at a mirror that stalls for example.
	buildLimit = 30 * time.Minute
	// proxyAddr is in the build's own network namespace, where nobody else listens.
	proxyAddr = "127.0.0.1:3142"
)

var errTooLong = fmt.Errorf("it took longer than %v", buildLimit)

// Build makes the template of the recipe, or returns the one that this very
// recipe has made before. progress, which may be nil, gets a short text for each
// step. Builds of the same recipe at once, in this process or in others, are one
// build. When ctx ends, or on any error, nothing of the build is left.
//
// It needs root, and Debian's archive or the cache. Errors: ErrInvalid, ErrHost,
// a fault "template_build_failed" with the end of the build's output.
func (s *Store) Build(ctx context.Context, r Recipe, progress func(step string)) (Info, error) {
	return s.build(ctx, r, false, progress)
}

// Rebuild is Build, but makes the template anew from the packages of today. When
// their tree is the same, so are digest and image.
func (s *Store) Rebuild(ctx context.Context, r Recipe, progress func(step string)) (Info, error) {
	return s.build(ctx, r, true, progress)
}

func (s *Store) build(ctx context.Context, r Recipe, force bool, progress func(string)) (Info, error) {
	if err := r.Validate(); err != nil {
		return Info{}, fault.New(fault.Invalid, "template_invalid", "the recipe of template %.100q is not valid", r.Reference()).
			Because("%s", err.Error()).Wrap(err)
	}
	recipe, err := r.digest()
	if err != nil {
		return Info{}, err
	}
	key := fmt.Sprintf("%s %s %t", r.Reference(), recipe, force)
	return s.flight.do(ctx, key, progress, func(ctx context.Context, step func(string)) (Info, error) {
		unlock, err := s.lock(ctx, s.path("locks", r.Reference()), func() {
			step("waiting for another process that builds " + r.Reference())
		})
		if err != nil {
			return Info{}, err
		}
		defer unlock()
		if p, err := s.pointer(r.Reference()); err == nil && p.Recipe == recipe && !force {
			if info, err := s.Resolve(r.Reference()); err == nil {
				return info, nil
			}
		}
		return s.make(ctx, r, step)
	})
}

// hostReady says what is missing for a build.
func hostReady(toolPath string) error {
	lacks := func(what, remedy string) error {
		return fault.New(fault.Unavailable, "template_host_unprepared", "this host cannot build templates").
			Because("%s", what).Do("%s", remedy).Retry(false).Wrap(ErrHost)
	}
	if os.Geteuid() != 0 {
		return lacks("it takes root to make the build's namespaces", "run the host room as root")
	}
	for _, tool := range []string{"mmdebstrap", "tar2sqfs", "setpriv", "pivot_root"} {
		if !installed(tool, toolPath) {
			return lacks(tool+" is not installed", "run scripts/setup.sh, or install mmdebstrap, squashfs-tools-ng and util-linux")
		}
	}
	if _, err := os.Stat(keyring); err != nil {
		return lacks("the keys of the Debian archive are not installed", "install debian-archive-keyring")
	}
	if free := availableMemory(); free != 0 && free < neededMemory {
		return lacks(fmt.Sprintf("a build works in memory and needs %d MiB of it, %d MiB are available", neededMemory>>20, free>>20), "free memory, or build on another machine of the same architecture")
	}
	return nil
}

// installed reports whether a program is in one of the directories of path,
// which is the build's and not ours.
func installed(tool, path string) bool {
	for dir := range strings.SplitSeq(path, ":") {
		if st, err := os.Stat(filepath.Join(dir, tool)); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return true
		}
	}
	return false
}

func (s *Store) make(ctx context.Context, r Recipe, step func(string)) (Info, error) {
	if err := hostReady(toolPath); err != nil {
		return Info{}, err
	}
	s.starts.Add(1)
	ctx, cancel := context.WithTimeoutCause(ctx, buildLimit, errTooLong)
	defer cancel()
	work, remove, err := s.workspace()
	if err != nil {
		return Info{}, err
	}
	defer remove()

	content, err := os.CreateTemp(work, "content-")
	if err != nil {
		return Info{}, fmt.Errorf("template: %w", err)
	}
	defer content.Close()
	if err := os.Remove(content.Name()); err != nil {
		return Info{}, fmt.Errorf("template: %w", err)
	}

	step("installing packages of Debian " + r.Suite)
	t, err := s.bootstrap(ctx, r, content, step)
	if err != nil {
		return Info{}, failed(ctx, r, err)
	}
	for _, f := range r.Files {
		if err := t.put(f); err != nil {
			return Info{}, failed(ctx, r, err)
		}
	}
	if err := t.check(); err != nil {
		return Info{}, failed(ctx, r, err)
	}
	digest, err := t.digest(r.Config)
	if err != nil {
		return Info{}, err
	}
	step("packing the image")
	sum, size, err := pack(ctx, t, filepath.Join(work, imageName))
	if err != nil {
		return Info{}, failed(ctx, r, err)
	}
	if err := failpoint.Hit(ctx, fpImageDone); err != nil {
		return Info{}, err
	}
	rec := record{
		Info: Info{
			Reference: r.Reference(), Digest: digest, SizeBytes: size, TreeBytes: t.size(),
			Config: r.Config, BuiltAt: s.o.Clock.Now().UTC(),
		},
		Format: "squashfs", ImageSHA256: sum,
	}
	step("storing " + digest)
	return s.commit(ctx, r, rec, work)
}

// failed makes an error that users understand; what ended from outside stays as it is.
func failed(ctx context.Context, r Recipe, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, errTooLong) {
		err = cause
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrHost) {
		return err
	}
	return fault.New(fault.Unavailable, "template_build_failed", "template %s could not be built", r.Reference()).
		Because("%s", err.Error()).
		Do("check that the Debian mirror answers and that all packages exist in %s; nothing was left behind, so try again", r.Suite).
		Retry(true).Wrap(err)
}

// bootstrap runs mmdebstrap confined and reads the tree that it makes.
func (s *Store) bootstrap(ctx context.Context, r Recipe, content spool, step func(string)) (*tree, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sources := hostSources(r.Suite, s.sourcesFile, s.sourcesDir)
	if len(sources) == 0 {
		return nil, fmt.Errorf("%w: no Debian mirror of %s is known: name one in %s", ErrHost, r.Suite, s.sourcesDir)
	}
	if s.o.CacheDir != "" {
		pruneCache(s.o.CacheDir, s.o.Clock.Now(), false)
	}
	way := newProxy(sources, s.o.CacheDir, hostProxy(ctx))

	out, in := io.Pipe()
	var t *tree
	read := make(chan error, 1)
	go func() {
		var err error
		t, err = readTree(out, content, filter(r.Drop))
		if err == nil {
			// What follows the end of the archive is padding; take it off the pipe.
			_, err = io.Copy(io.Discard, io.LimitReader(out, 1<<20))
		}
		if err != nil {
			cancel(err)
		}
		out.CloseWithError(errors.Join(err, io.ErrClosedPipe))
		read <- err
	}()

	err := command{
		args:    mmdebstrap(r, sources),
		env:     []string{"SPACE_SETUP=" + r.Setup, "DEBIAN_FRONTEND=noninteractive", "PYTHONHASHSEED=0"},
		stdout:  in,
		scratch: scratchBytes,
		line: func(l string) {
			if said := spoken(l); said != "" {
				step(said)
			}
		},
		ready: func(pid int) error {
			return inNetwork(pid, func() error {
				if err := loopbackUp(); err != nil {
					return err
				}
				l, err := net.Listen("tcp4", proxyAddr)
				if err != nil {
					return fmt.Errorf("proxy of a build: %w", err)
				}
				go way.serve(ctx, l)
				return nil
			})
		},
	}.run(ctx)
	in.CloseWithError(err) // nil means io.EOF
	readErr := <-read
	if cause := context.Cause(ctx); cause != nil && errors.Is(readErr, cause) {
		return nil, cause
	}
	if err != nil {
		if way.cached.Load() > 0 {
			// A spoilt file in the cache would fail every build from now on.
			pruneCache(s.o.CacheDir, s.o.Clock.Now(), true)
		}
		return nil, err
	}
	return t, readErr
}

// spoken turns what mmdebstrap says into a step for users; "" for the rest, which
// any program of the build may have written.
func spoken(line string) string {
	for said, step := range map[string]string{
		"I: running apt-get update":   "reading package lists",
		"I: downloading packages":     "downloading packages",
		"I: extracting archives":      "unpacking the essential packages",
		"I: installing essential":     "configuring the essential packages",
		"I: installing remaining":     "installing the other packages",
		"I: running --customize-hook": "setting up users and files",
		"I: cleaning package lists":   "clearing up",
		"I: creating tarball":         "reading the tree",
	} {
		if strings.HasPrefix(line, said) {
			return step
		}
	}
	return ""
}

// mmdebstrap gives the command line. Packages are verified by apt against
// Debian's keys; there is no option in it to do without.
func mmdebstrap(r Recipe, sources []source) []string {
	args := []string{
		"mmdebstrap", "--mode=root", "--format=tar", "--variant=" + r.Variant,
		`--aptopt=Acquire::http::Proxy "http://` + proxyAddr + `"`,
		`--aptopt=Acquire::https::Proxy "http://` + proxyAddr + `"`,
		`--aptopt=Acquire::Languages "none"`,
		`--aptopt=Acquire::Retries "3"`,
		// There is no user _apt in the namespace, and all of it is unprivileged.
		`--aptopt=APT::Sandbox::User "root"`,
		"--dpkgopt=path-exclude=/usr/share/man/*",
		"--dpkgopt=path-exclude=/usr/share/info/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*",
		"--dpkgopt=path-exclude=/usr/share/doc/*",
		"--dpkgopt=path-include=/usr/share/doc/*/copyright",
	}
	if len(r.Packages) > 0 {
		args = append(args, "--include="+strings.Join(r.Packages, ","))
	}
	if r.Setup != "" {
		args = append(args, `--customize-hook=chroot "$1" /bin/sh -eu -c "$SPACE_SETUP"`)
	}
	args = append(args, r.Suite, "-")
	for _, s := range sources {
		args = append(args, fmt.Sprintf("deb [signed-by=%s] %s %s %s", keyring, s.uri, s.suite, s.components))
	}
	return args
}

// pack writes the canonical tree as a squashfs image, with the packer confined
// as a build is, and gives the image's checksum and size.
func pack(ctx context.Context, t *tree, path string) (sum string, size int64, err error) {
	image, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return "", 0, fmt.Errorf("template: %w", err)
	}
	defer image.Close()
	out, in := io.Pipe()
	written := make(chan error, 1)
	go func() {
		err := t.write(in)
		in.CloseWithError(err)
		written <- err
	}()
	err = command{
		args: []string{"/bin/sh", "-euc",
			"tar2sqfs -q -s -c zstd -X level=9 -j 4 /tmp/image >&2 && cat /tmp/image"},
		stdin: out, stdout: image, scratch: scratchBytes,
	}.run(ctx)
	out.CloseWithError(io.ErrClosedPipe)
	if writeErr := <-written; err == nil {
		err = writeErr
	}
	if err != nil {
		return "", 0, err
	}
	if err := image.Sync(); err != nil {
		return "", 0, fmt.Errorf("template: %w", err)
	}
	return hashFile(image)
}

// hashFile reads f from its start.
func hashFile(f *os.File) (sum string, size int64, err error) {
	h := sha256.New()
	size, err = io.Copy(h, io.NewSectionReader(f, 0, 1<<62))
	if err != nil {
		return "", 0, fmt.Errorf("template: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), size, nil
}
