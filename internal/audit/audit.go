// Package audit is the hash-chained record of who did what: entries, the chain
// function and its verification. Stores keep the rows; there is one chain per
// store (the control plane's, and one per node), and the heads of a chain are
// signed by the host room.
package audit

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Entry is one act, before it is chained. It never holds a secret: Detail has
// ids, names, sizes, codes.
type Entry struct {
	At     time.Time `json:"at"`
	Tenant string    `json:"tenant"`
	// Actor is a key id, "node", "reconciler" or "operator".
	Actor string `json:"actor"`
	// Action is "sandbox.create", "session.start", "session.exit", "key.revoke", …
	Action string `json:"action"`
	// Target is the id of what was acted on.
	Target string `json:"target"`
	// Request is the request id, when there was one.
	Request string            `json:"request,omitempty"`
	Detail  map[string]string `json:"detail,omitempty"`
}

// Record is a chained entry.
type Record struct {
	Chain string `json:"chain"`
	Seq   uint64 `json:"seq"` // 1-based, without holes
	Entry Entry  `json:"entry"`
	Prev  []byte `json:"prev"` // hash of Seq-1; 32 zero bytes for the first
	Hash  []byte `json:"hash"`
}

// Next chains e after the record with (seq, hash); seq 0 and a nil hash begin a chain.
func Next(chain string, seq uint64, hash []byte, e Entry) (Record, error) {
	if seq == 0 {
		hash = make([]byte, sha256.Size)
	}
	e = e.clean()
	r := Record{Chain: chain, Seq: seq + 1, Entry: e, Prev: hash}
	h, err := r.sum()
	if err != nil {
		return Record{}, err
	}
	r.Hash = h
	return r, nil
}

// clean gives e in the form that reads back from JSON unchanged: a hash over
// anything else could never be checked again. Broken UTF-8 becomes U+FFFD.
func (e Entry) clean() Entry {
	e.At = e.At.UTC().Truncate(time.Microsecond)
	for _, p := range []*string{&e.Tenant, &e.Actor, &e.Action, &e.Target, &e.Request} {
		*p = strings.ToValidUTF8(*p, "\ufffd")
	}
	if len(e.Detail) == 0 {
		e.Detail = nil
		return e
	}
	detail := make(map[string]string, len(e.Detail))
	for _, k := range slices.Sorted(maps.Keys(e.Detail)) { // in order: two keys may become one
		detail[strings.ToValidUTF8(k, "\ufffd")] = strings.ToValidUTF8(e.Detail[k], "\ufffd")
	}
	e.Detail = detail
	return e
}

func (r Record) sum() ([]byte, error) {
	body, err := json.Marshal(r.Entry) // map keys are sorted by encoding/json
	if err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	h := sha256.New()
	var n [8]byte
	for _, part := range [][]byte{[]byte("space-audit-1"), []byte(r.Chain), r.Prev, body} {
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		h.Write(n[:])
		h.Write(part)
	}
	binary.BigEndian.PutUint64(n[:], r.Seq)
	h.Write(n[:])
	return h.Sum(nil), nil
}
