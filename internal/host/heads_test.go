package host

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/space-platform/space/internal/audit"
)

// A peer that has taken over the unprivileged side can ask for signatures, and
// still has no other past signed: not at once, not after a restart of the room.
func TestHeadsAreSignedForwardsOnly(t *testing.T) {
	dir := t.TempDir()
	key, err := loadKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	pub := key.Public().(ed25519.PublicKey)
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	h, err := loadHeads(dir, key)
	if err != nil {
		t.Fatal(err)
	}
	hash := func(b byte) []byte { return bytes.Repeat([]byte{b}, 32) }
	first, err := h.sign(audit.Head{Chain: "control", Seq: 10, Hash: hash(1)}, now)
	if err != nil || !first.Check(pub) || !first.At.Equal(now) {
		t.Fatalf("first %+v %v", first, err)
	}
	for round := range 2 {
		again, err := h.sign(audit.Head{Chain: "control", Seq: 10, Hash: hash(1)}, now.Add(time.Hour))
		if err != nil || !again.At.Equal(now) {
			t.Errorf("round %d: the same head again %+v %v", round, again, err)
		}
		for _, want := range []audit.Head{
			{Chain: "control", Seq: 10, Hash: hash(2)},
			{Chain: "control", Seq: 9, Hash: hash(1)},
			{Chain: "control", Seq: 1, Hash: hash(3)},
		} {
			if got, err := h.sign(want, now); !errors.Is(err, audit.ErrSigned) {
				t.Errorf("round %d: signed %+v, %v", round, got, err)
			}
		}
		if h, err = loadHeads(dir, key); err != nil { // a restart
			t.Fatal(err)
		}
	}
	for _, bad := range []audit.Head{
		{Chain: "control", Hash: hash(1)}, {Chain: "control", Seq: 11, Hash: []byte("short")}, {Chain: "", Seq: 1, Hash: hash(1)},
		{Chain: "control\n", Seq: 11, Hash: hash(1)}, {Chain: "../x", Seq: 1, Hash: hash(1)},
	} {
		if _, err := h.sign(bad, now); !errors.Is(err, ErrRefused) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	for i := range maxChains - 1 {
		if _, err := h.sign(audit.Head{Chain: fmt.Sprintf("node:n%d", i), Seq: 1, Hash: hash(1)}, now); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.sign(audit.Head{Chain: "node:more", Seq: 1, Hash: hash(1)}, now); !errors.Is(err, ErrRefused) {
		t.Errorf("chains without bound: %v", err)
	}
	// A file that somebody else has written is not taken for ours.
	forged := audit.Head{Chain: "control", Seq: 1, Hash: hash(1)}.Signed(ed25519.NewKeyFromSeed(hash(9)), now)
	line := fmt.Sprintf(`{"chain":"control","seq":1,"hash":"AQ==","at":%q,"signature":"AQ=="}`+"\n", forged.At.Format(time.RFC3339))
	if err := os.WriteFile(filepath.Join(dir, HeadsFile), []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := loadHeads(dir, key); err == nil {
		t.Error("a forged head was believed")
	}
}
