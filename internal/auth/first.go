package auth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/space-platform/space/internal/secret"
	"github.com/space-platform/space/internal/store"
	"github.com/space-platform/space/internal/tenant"
)

// FirstKeyFile is the name of the file with the admin key.
const FirstKeyFile = "admin.key"

// First is the answer of FirstKey.
type First struct {
	Path string
	// New: the key was made now. Only then Key is set, to be shown once.
	New bool
	Key secret.Value
}

// FirstKey sees to it that the default tenant has an admin key: where there is no
// valid one it makes one and writes it to dir/admin.key (mode 0600). An operator
// who has taken the file away keeps the keys there are; one who has revoked
// every admin key gets a new one at the next start.
func (a *Authenticator) FirstKey(ctx context.Context, dir string) (First, error) {
	first := First{Path: filepath.Join(dir, FirstKeyFile)}
	t, err := a.c.Store.System().EnsureTenant(ctx, tenant.Default)
	if err != nil {
		return first, fmt.Errorf("auth: first key: %w", err)
	}
	has, err := a.hasAdmin(ctx, t)
	if err != nil || has {
		return first, err
	}
	now := a.c.Clock.Now().UTC()
	value := generate()
	h := a.hash(value.Reveal())
	k := store.Key{Tenant: t, ID: newKeyID(), Name: "first admin key", Hash: h[:], Scopes: []string{string(Admin)}, CreatedAt: now, CreatedBy: "operator"}
	// The file first: after a crash in between, the file has a key that nobody
	// knows, and the next start makes another. The other way round nobody would
	// have the key.
	if err := writeKey(first.Path, value); err != nil {
		return first, err
	}
	err = a.c.Store.Mutate(ctx, t, func(tx store.Tx) error { return a.insert(tx, k, Wish{}, "operator", now) })
	if err != nil {
		return first, fmt.Errorf("auth: first key: %w", err)
	}
	first.New, first.Key = true, value
	return first, nil
}

// hasAdmin reports whether t has a valid key with every scope that never ends by itself.
func (a *Authenticator) hasAdmin(ctx context.Context, t tenant.ID) (bool, error) {
	cursor := ""
	for {
		p, err := a.c.Store.Keys(ctx, t, cursor, 1000)
		if err != nil {
			return false, fmt.Errorf("auth: first key: %w", err)
		}
		for _, k := range p.Items {
			if slices.Contains(k.Scopes, string(Admin)) && k.RevokedAt.IsZero() && k.ExpiresAt.IsZero() {
				return true, nil
			}
		}
		if cursor = p.Next; cursor == "" {
			return false, nil
		}
	}
}

func writeKey(path string, v secret.Value) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".admin-*") // mode 0600
	if err != nil {
		return fmt.Errorf("auth: write first key: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, werr := io.WriteString(f, v.Reveal()+"\n")
	if err := errors.Join(werr, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("auth: write first key: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("auth: write first key: %w", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("auth: %w", err)
	}
	return errors.Join(d.Sync(), d.Close())
}

// ReadKeyFile reads a key file that FirstKey wrote.
func ReadKeyFile(path string) (secret.Value, error) {
	f, err := os.Open(path)
	if err != nil {
		return secret.Value{}, fmt.Errorf("auth: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	info, err := f.Stat()
	if err != nil {
		return secret.Value{}, fmt.Errorf("auth: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return secret.Value{}, fmt.Errorf("auth: %s may be read by others (mode %v): %w", FirstKeyFile, info.Mode().Perm(), fs.ErrPermission)
	}
	b, err := io.ReadAll(io.LimitReader(f, 256))
	if err != nil {
		return secret.Value{}, fmt.Errorf("auth: %w", err)
	}
	s := strings.TrimSpace(string(b))
	if !keyRE.MatchString(s) {
		return secret.Value{}, fmt.Errorf("auth: %s does not hold a key", FirstKeyFile)
	}
	return secret.New(s), nil
}
