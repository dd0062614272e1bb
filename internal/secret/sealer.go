package secret

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Errors of a Sealer. They never have content of what was to be opened.
var (
	// ErrSealed: the key is not the one that sealed it, the bytes were changed, or
	// they belong to another row.
	ErrSealed = errors.New("secret: cannot be opened")
	// ErrKeyFile: the key file is not one of ours, or others can read it.
	ErrKeyFile = errors.New("secret: bad key file")
)

const (
	keySize = 32
	// sealVersion begins every sealed text: 1 is AES-256-GCM with a random 24 byte
	// seed, of which key and nonce are derived. One key so can seal any number of
	// texts; a plain random 12 byte nonce would be limited to 2^32.
	sealVersion = 1
	seedSize    = 24
	overhead    = 1 + seedSize + 16
)

// Sealer seals tenant data at rest. Safe for concurrent use.
type Sealer struct {
	key [keySize]byte
}

// NewSealer makes a Sealer of a 32 byte key.
func NewSealer(key []byte) (*Sealer, error) {
	if len(key) != keySize {
		return nil, fmt.Errorf("secret: a key has %d bytes, not %d", keySize, len(key))
	}
	return &Sealer{key: [keySize]byte(key)}, nil
}

// OpenSealer reads the key file at path, or makes it (random, mode 0600, on the
// disk before anything is sealed with it) when it is missing. Whoever loses the
// file loses what was sealed.
func OpenSealer(path string) (*Sealer, error) {
	key, err := readKey(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = makeKey(path); err == nil {
			key, err = readKey(path)
		}
	}
	if err != nil {
		return nil, err
	}
	return NewSealer(key)
}

func readKey(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%w: its mode is %v, want a file of mode 0600", ErrKeyFile, info.Mode())
	}
	key, err := io.ReadAll(io.LimitReader(f, keySize+1))
	if err != nil {
		return nil, fmt.Errorf("secret: %w", err)
	}
	if len(key) != keySize {
		return nil, fmt.Errorf("%w: it does not have %d bytes", ErrKeyFile, keySize)
	}
	return key, nil
}

// makeKey writes beside and links: of two processes that start at once both find
// the same, complete key.
func makeKey(path string) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".key-*") // mode 0600
	if err != nil {
		return fmt.Errorf("secret: make key file: %w", err)
	}
	defer func() { err = errors.Join(err, os.Remove(f.Name())) }()
	key := make([]byte, keySize)
	_, _ = rand.Read(key) // never fails (crypto/rand)
	_, werr := f.Write(key)
	if err := errors.Join(werr, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("secret: write key file: %w", err)
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("secret: make key file: %w", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("secret: %w", err)
	}
	return errors.Join(d.Sync(), d.Close())
}

// Bind makes the associated data of a row, so that what was sealed for one
// tenant and id opens for no other. The kind names what it is ("env").
func Bind(kind, tenant, id string) []byte {
	var b []byte
	for _, s := range []string{kind, tenant, id} {
		b = binary.BigEndian.AppendUint64(b, uint64(len(s)))
		b = append(b, s...)
	}
	return b
}

// Seal gives plain sealed under aad (see Bind).
func (s *Sealer) Seal(plain, aad []byte) ([]byte, error) {
	out := make([]byte, 1+seedSize, overhead+len(plain))
	out[0] = sealVersion
	_, _ = rand.Read(out[1:]) // never fails (crypto/rand)
	gcm, nonce, err := s.aead(out[1 : 1+seedSize])
	if err != nil {
		return nil, err
	}
	return gcm.Seal(out, nonce, plain, aad), nil
}

// Open gives what was sealed, or ErrSealed.
func (s *Sealer) Open(sealed, aad []byte) ([]byte, error) {
	if len(sealed) < overhead || sealed[0] != sealVersion {
		return nil, ErrSealed
	}
	gcm, nonce, err := s.aead(sealed[1 : 1+seedSize])
	if err != nil {
		return nil, err
	}
	plain, err := gcm.Open(nil, nonce, sealed[1+seedSize:], aad)
	if err != nil {
		return nil, ErrSealed
	}
	return plain, nil
}

// Derive gives a 32 byte key for another purpose, such as hashing request
// bodies: it tells nothing of this one.
func (s *Sealer) Derive(purpose string) []byte {
	key, err := hkdf.Key(sha256.New, s.key[:], nil, "space-derive-1 "+purpose, keySize)
	if err != nil {
		panic(err) // only for a length that HKDF cannot give
	}
	return key
}

func (s *Sealer) aead(seed []byte) (cipher.AEAD, []byte, error) {
	derived, err := hkdf.Key(sha256.New, s.key[:], seed, "space-seal-1", keySize+12)
	if err != nil {
		return nil, nil, fmt.Errorf("secret: %w", err)
	}
	block, err := aes.NewCipher(derived[:keySize])
	if err != nil {
		return nil, nil, fmt.Errorf("secret: %w", err)
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		return nil, nil, fmt.Errorf("secret: %w", err)
	}
	return gcm, derived[keySize:], nil
}

// String keeps a Sealer from printing its key.
func (s *Sealer) String() string { return "secret.Sealer" }

// Format implements fmt.Formatter.
func (s *Sealer) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.String()) }
