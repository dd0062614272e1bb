package host

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// PublicKeyFile is the name of the public key in the room's folder, as hex.
const PublicKeyFile = "audit.pub"

const keyFile = "audit.key"

// loadKey reads the signing key in dir, or makes it at the first start. It
// never makes a second one: a key that cannot be read is an error, because
// signatures of a new key would make everything signed before look forged.
func loadKey(dir string) (ed25519.PrivateKey, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("host: key: %w", err)
	}
	path := filepath.Join(dir, keyFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if b, err = makeKey(dir, path); err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, fmt.Errorf("host: key: %w", err)
	}
	seed, err := hex.DecodeString(strings.TrimSpace(string(b)))
	if err != nil || len(seed) != ed25519.SeedSize {
		return nil, fmt.Errorf("host: the signing key in %s is damaged: restore it from a backup", dir)
	}
	key := ed25519.NewKeyFromSeed(seed)
	pub := hex.EncodeToString(key.Public().(ed25519.PublicKey)) + "\n"
	if old, err := os.ReadFile(filepath.Join(dir, PublicKeyFile)); err != nil || string(old) != pub {
		if err := os.WriteFile(filepath.Join(dir, PublicKeyFile), []byte(pub), 0o644); err != nil {
			return nil, fmt.Errorf("host: key: %w", err)
		}
	}
	return key, nil
}

func makeKey(dir, path string) ([]byte, error) {
	seed := make([]byte, ed25519.SeedSize)
	_, _ = rand.Read(seed) // never fails (crypto/rand)
	text := []byte(hex.EncodeToString(seed) + "\n")
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("host: key: %w", err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil {
		var d *os.File
		if d, err = os.Open(dir); err == nil {
			err = errors.Join(d.Sync(), d.Close())
		}
	}
	if err != nil {
		return nil, fmt.Errorf("host: key: %w", err)
	}
	return text, nil
}
