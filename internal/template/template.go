// Package template builds, keeps and mounts templates: immutable starting file
// systems with their runtime configuration, named "name:tag" and identified by
// digest.
//
// # Trust
//
// A template is made from signed Debian packages, but their maintainer scripts
// are programs, and so is mmdebstrap. Both run as an unprivileged host uid
// inside their own user, mount, PID, IPC, UTS and network namespaces, with the
// host's file system out of sight, and with no way out but a proxy of ours that
// serves the Debian mirrors of this host and nothing else (see confine.go and
// proxy.go). What comes back is one tar stream. It is hostile input: tree.go
// reads it with bounds, never as files of the host, into a canonical tree.
//
// # Digest
//
// The digest covers the canonical tree (sorted paths; type, mode, uid, gid,
// size, content hash, link target, device numbers, extended attributes; never
// times) and the configuration as JSON. The image on disk is a materialisation
// with a checksum of its own: a squashfs with fixed order and times, so that
// equal trees give equal bytes.
//
// # Durability
//
// A build works in a locked temporary directory and becomes visible by one
// rename after fsync. Open sweeps the directories of builds that died.
package template

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strings"
	"time"
)

// Errors of this package, to be tested with errors.Is.
var (
	// ErrNotFound: no template has this name or digest here.
	ErrNotFound = errors.New("template: not found")
	// ErrInvalid: a name, digest or recipe is malformed.
	ErrInvalid = errors.New("template: invalid")
	// ErrCorrupt: an image is not what its record says.
	ErrCorrupt = errors.New("template: corrupt")
	// ErrHost: this host lacks something a build or mount needs; the text says what.
	ErrHost = errors.New("template: host is not prepared")
)

// Config is the runtime configuration that belongs to a template.
type Config struct {
	// Env is added to every process of a sandbox.
	Env map[string]string `json:"env,omitempty"`
	// User is the name of the user that runs processes by default.
	User string `json:"user"`
	// WorkDir is where processes start by default; absolute.
	WorkDir string `json:"workdir"`
	// Shell runs command lines; absolute.
	Shell string `json:"shell"`
}

// File is one entry that a recipe puts over the tree: a directory (Dir), a
// symbolic link (Target) or a plain file with Content. It is written into the
// canonical tree, never by a program of the build.
type File struct {
	// Path is absolute and clean, in the template.
	Path    string      `json:"path"`
	Dir     bool        `json:"dir,omitempty"`
	Target  string      `json:"target,omitempty"`
	Content string      `json:"content,omitempty"`
	Mode    fs.FileMode `json:"mode,omitempty"` // permission and set-id bits as in chmod(1): 0o1777
	UID     int         `json:"uid,omitempty"`
	GID     int         `json:"gid,omitempty"`
}

// Recipe says how a template is built. Its own digest decides whether a
// template that exists is still the one that the recipe asks for.
type Recipe struct {
	Name string `json:"name"`
	Tag  string `json:"tag"`
	// Suite is the Debian release, such as "bookworm".
	Suite string `json:"suite"`
	// Variant is mmdebstrap's: "minbase", or "extract" to unpack the packages
	// without running anything of theirs.
	Variant  string   `json:"variant"`
	Packages []string `json:"packages"`
	// Setup is a shell script (sh -eu) that root runs in the tree, in the build's
	// namespaces, after the packages are configured.
	Setup string `json:"setup,omitempty"`
	// Drop holds patterns (path.Match, absolute) of what is left out, with all below.
	Drop   []string `json:"drop,omitempty"`
	Files  []File   `json:"files,omitempty"`
	Config Config   `json:"config"`
}

// Info describes a template in a Store.
type Info struct {
	// Reference is "name:tag"; empty for one that no name points to any more.
	Reference string `json:"reference,omitempty"`
	// Digest is "sha256:<hex>" of tree and configuration.
	Digest string `json:"digest"`
	// SizeBytes is the size of the image on disk.
	SizeBytes int64 `json:"size_bytes"`
	// TreeBytes is the sum of the sizes of the files in it.
	TreeBytes int64     `json:"tree_bytes"`
	Config    Config    `json:"config"`
	BuiltAt   time.Time `json:"built_at"`
}

var (
	namePattern    = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
	digestPattern  = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	suitePattern   = regexp.MustCompile(`^[a-z]{1,32}$`)
	packagePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{1,127}$`)
)

// ParseReference splits "name:tag"; a missing tag means "latest".
func ParseReference(ref string) (name, tag string, err error) {
	name, tag, found := strings.Cut(ref, ":")
	if !found {
		tag = "latest"
	}
	// "sha256:..." is a digest, or a mistyped one, never a name.
	if !namePattern.MatchString(name) || !namePattern.MatchString(tag) || name == "sha256" {
		return "", "", fmt.Errorf("%w reference %.200q: want name:tag, each of a-z, 0-9, '.', '_', '-', at most 63", ErrInvalid, ref)
	}
	return name, tag, nil
}

// Reference is "name:tag".
func (r Recipe) Reference() string { return r.Name + ":" + r.Tag }

// Validate says what is wrong with a recipe, wrapping ErrInvalid.
func (r Recipe) Validate() error {
	if _, _, err := ParseReference(r.Reference()); err != nil {
		return err
	}
	switch {
	case !suitePattern.MatchString(r.Suite):
		return fmt.Errorf("%w suite %.200q", ErrInvalid, r.Suite)
	case r.Variant != "minbase" && r.Variant != "extract":
		return fmt.Errorf("%w variant %.200q: want minbase or extract", ErrInvalid, r.Variant)
	case r.Variant == "extract" && r.Setup != "":
		return fmt.Errorf("%w recipe: a setup script needs variant minbase", ErrInvalid)
	case len(r.Setup) > 64<<10:
		return fmt.Errorf("%w recipe: setup script above 64 KiB", ErrInvalid)
	case strings.ContainsRune(r.Setup, 0):
		return fmt.Errorf("%w recipe: NUL in setup script", ErrInvalid)
	}
	for _, p := range r.Packages {
		if !packagePattern.MatchString(p) {
			return fmt.Errorf("%w package name %.200q", ErrInvalid, p)
		}
	}
	for _, d := range r.Drop {
		if _, err := path.Match(d, "/"); err != nil || !strings.HasPrefix(d, "/") {
			return fmt.Errorf("%w drop pattern %.200q", ErrInvalid, d)
		}
	}
	for _, f := range r.Files {
		if !strings.HasPrefix(f.Path, "/") || path.Clean(f.Path) != f.Path || f.Path == "/" || strings.ContainsRune(f.Path+f.Target, 0) {
			return fmt.Errorf("%w file path %.200q: want an absolute, clean path", ErrInvalid, f.Path)
		}
		if f.Mode&^0o7777 != 0 || f.UID < 0 || f.UID > maxID || f.GID < 0 || f.GID > maxID {
			return fmt.Errorf("%w file %.200q: mode or owner out of range", ErrInvalid, f.Path)
		}
	}
	c := r.Config
	if c.User == "" || !strings.HasPrefix(c.WorkDir, "/") || !strings.HasPrefix(c.Shell, "/") {
		return fmt.Errorf("%w configuration: user, absolute workdir and absolute shell are needed", ErrInvalid)
	}
	return nil
}

// digest identifies the recipe, and the way of this package to follow it.
func (r Recipe) digest() (string, error) {
	b, err := json.Marshal(struct {
		Recipe  Recipe `json:"recipe"`
		Builder string `json:"builder"`
	}{r, builderVersion})
	if err != nil {
		return "", fmt.Errorf("template: recipe of %s: %w", r.Reference(), err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// builderVersion changes whenever the same recipe would give another tree.
const builderVersion = "1"
