package audit

import (
	"bytes"
	"cmp"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"slices"
)

// Kind is what is wrong with a chain.
type Kind string

// The kinds.
const (
	// Altered: the record's own hash does not fit its content.
	Altered Kind = "altered"
	// Unlinked: the record is sound in itself but does not continue the one before.
	Unlinked Kind = "unlinked"
	// Missing: there is no record with this number, though later ones exist.
	Missing Kind = "missing"
	// Reordered: the record stands in another place than its number says, or twice.
	Reordered Kind = "reordered"
	// Foreign: the record or head is of another chain.
	Foreign Kind = "foreign"
	// Truncated: the chain ends below a signed head.
	Truncated Kind = "truncated"
	// Rewritten: the chain is sound in itself, but is not the one that was signed.
	Rewritten Kind = "rewritten"
	// Forged: the signature of a head is not the room's.
	Forged Kind = "forged"
)

// Broken is the first fault found in a chain.
type Broken struct {
	Kind Kind
	Seq  uint64 // of the record or head that is at fault
	What string
}

// Error implements error.
func (b *Broken) Error() string {
	return fmt.Sprintf("audit: record %d is %s: %s", b.Seq, b.Kind, b.What)
}

// Report says what a verification has proven.
type Report struct {
	Chain   string `json:"chain"`
	Records uint64 `json:"records"` // all of them sound
	Hash    []byte `json:"hash"`    // of the last one
	// Signed is the highest number that a head covers: up to it, not even who
	// holds the database can have changed anything. The rest is only linked.
	Signed uint64 `json:"signed"`
	Heads  int    `json:"heads"`
}

// Verify walks a chain from its first record and checks every hash, every link,
// that no number is missing, and that it runs through every signed head. The
// error is a *Broken where the chain is at fault, and what the iterator gave
// otherwise. Without heads (and then without a key) Signed is 0: whoever could
// rewrite the whole chain could also make it sound.
func Verify(chain string, records iter.Seq2[Record, error], heads []Head, key ed25519.PublicKey) (Report, error) {
	rep := Report{Chain: chain, Heads: len(heads)}
	heads, err := checkHeads(chain, heads, key)
	if err != nil {
		return rep, err
	}
	last := make([]byte, sha256.Size)
	for r, err := range records {
		if err != nil {
			return rep, err
		}
		if b := r.check(chain, rep.Records+1, last); b != nil {
			if b.Kind == Missing && appearsLater(records, b.Seq) {
				b = &Broken{Reordered, r.Seq, fmt.Sprintf("it stands where record %d belongs", b.Seq)}
			}
			return rep, b
		}
		rep.Records, last = r.Seq, r.Hash
		for len(heads) > 0 && heads[0].Seq == r.Seq {
			if !bytes.Equal(heads[0].Hash, r.Hash) {
				return rep, &Broken{Rewritten, r.Seq, fmt.Sprintf("the head signed at %s has another hash", heads[0].At.UTC().Format("2006-01-02T15:04:05Z"))}
			}
			rep.Signed = r.Seq
			heads = heads[1:]
		}
	}
	rep.Hash = last
	if len(heads) > 0 {
		return rep, &Broken{Truncated, rep.Records + 1, fmt.Sprintf("the chain ends at %d, a head was signed at %d", rep.Records, heads[len(heads)-1].Seq)}
	}
	return rep, nil
}

// check judges r as the record that must have number seq and continue prev.
func (r Record) check(chain string, seq uint64, prev []byte) *Broken {
	switch {
	case r.Chain != chain:
		return &Broken{Foreign, r.Seq, fmt.Sprintf("it belongs to chain %q", r.Chain)}
	case r.Seq < seq:
		return &Broken{Reordered, r.Seq, fmt.Sprintf("it stands where record %d belongs", seq)}
	case r.Seq > seq:
		return &Broken{Missing, seq, fmt.Sprintf("record %d follows record %d", r.Seq, seq-1)}
	}
	sum, err := r.sum()
	switch {
	case err != nil:
		return &Broken{Altered, r.Seq, "its content cannot have been written by us"}
	case !bytes.Equal(sum, r.Hash):
		return &Broken{Altered, r.Seq, "its hash does not fit its content"}
	case !bytes.Equal(r.Prev, prev):
		return &Broken{Unlinked, r.Seq, "it does not continue the record before it"}
	}
	return nil
}

// appearsLater walks again to tell a hole from a swap; only a broken chain pays.
func appearsLater(records iter.Seq2[Record, error], seq uint64) bool {
	passed := false
	for r, err := range records {
		if err != nil {
			return false
		}
		if passed && r.Seq == seq {
			return true
		}
		passed = passed || r.Seq > seq
	}
	return false
}

// checkHeads checks chain and signature of each and sorts them by number.
func checkHeads(chain string, heads []Head, key ed25519.PublicKey) ([]Head, error) {
	if len(heads) == 0 {
		return nil, nil
	}
	if len(key) != ed25519.PublicKeySize {
		return nil, errors.New("audit: signed heads cannot be checked without the room's public key")
	}
	for _, h := range heads {
		if h.Chain != chain {
			return nil, &Broken{Foreign, h.Seq, fmt.Sprintf("its head belongs to chain %q", h.Chain)}
		}
		if !h.Check(key) {
			return nil, &Broken{Forged, h.Seq, "the signature of its head is not the room's"}
		}
	}
	return slices.SortedStableFunc(slices.Values(heads), func(a, b Head) int { return cmp.Compare(a.Seq, b.Seq) }), nil
}
