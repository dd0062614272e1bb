package host

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/space-platform/space/internal/audit"
	"github.com/space-platform/space/internal/layout"
)

// HeadsFile is the name, in the room's folder, of the file with the last head of
// each chain. It is what the peer cannot reach: the heads that a peer keeps, and
// the records themselves, are in its own hands.
const HeadsFile = "audit-heads.jsonl"

// maxChains bounds the chains of one host: control's and the node's, with room
// for nodes that were renamed.
const maxChains = 16

var chainRE = regexp.MustCompile(`^[a-z][a-z0-9]{0,15}(:[a-zA-Z0-9._-]{1,63})?$`)

// heads signs the ends of chains, and only forwards: what was signed once cannot
// be signed again with another past, whoever asks. One head proves all records
// before it, so the last one of a chain is all that must be kept.
type heads struct {
	key  ed25519.PrivateKey
	path string

	mu   sync.Mutex
	last map[string]audit.Head // guarded by mu
}

func loadHeads(dir string, key ed25519.PrivateKey) (*heads, error) {
	h := &heads{key: key, path: filepath.Join(dir, HeadsFile), last: map[string]audit.Head{}}
	b, err := os.ReadFile(h.path)
	if errors.Is(err, fs.ErrNotExist) {
		return h, nil
	}
	if err != nil {
		return nil, fmt.Errorf("host: signed heads: %w", err)
	}
	all, err := audit.ReadHeads(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("host: signed heads: %w", err)
	}
	for _, x := range all {
		if !x.Check(key.Public().(ed25519.PublicKey)) {
			return nil, fmt.Errorf("host: a head in %s is not signed with the room's key: restore both from a backup", h.path)
		}
		h.last[x.Chain] = x
	}
	return h, nil
}

// sign signs want, durably remembered before anybody has the signature.
func (h *heads) sign(want audit.Head, now time.Time) (audit.Head, error) {
	if !chainRE.MatchString(want.Chain) || want.Seq == 0 || len(want.Hash) != sha256.Size {
		return audit.Head{}, fmt.Errorf("%w: not the end of a chain", ErrRefused)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	last, known := h.last[want.Chain]
	switch {
	case known && last.Seq == want.Seq && bytes.Equal(last.Hash, want.Hash):
		return last, nil
	case known && last.Seq >= want.Seq:
		return audit.Head{}, fmt.Errorf("%w (%s: signed up to %d)", audit.ErrSigned, want.Chain, last.Seq)
	case !known && len(h.last) >= maxChains:
		return audit.Head{}, fmt.Errorf("%w: there are %d chains", ErrRefused, len(h.last))
	}
	signed := want.Signed(h.key, now)
	h.last[want.Chain] = signed
	if err := h.save(); err != nil {
		delete(h.last, want.Chain)
		if known {
			h.last[want.Chain] = last
		}
		return audit.Head{}, err
	}
	return signed, nil
}

func (h *heads) save() error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, x := range slices.SortedFunc(maps.Values(h.last), func(a, b audit.Head) int { return strings.Compare(a.Chain, b.Chain) }) {
		if err := enc.Encode(x); err != nil {
			return fmt.Errorf("host: signed heads: %w", err)
		}
	}
	if err := layout.WriteFile(h.path, b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("host: signed heads: %w", err)
	}
	return nil
}
