package audit

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"time"
)

// Signer signs the ends of chains with ed25519; the host room is one. A signer
// remembers what it signed last of each chain and signs only what lies beyond:
// who can ask for signatures still cannot have another past signed.
type Signer interface {
	// SignHead signs that record seq of chain has this hash. Asked again for the
	// same one it gives the head it has. Error: ErrSigned.
	SignHead(ctx context.Context, chain string, seq uint64, hash []byte) (Head, error)
}

// ErrSigned: the signer has signed another record with this number, or a later one.
var ErrSigned = errors.New("audit: the chain was signed further than this, or with another record: records were lost, replaced, or an older state was brought back")

// Head is the end of a chain at some time, signed by the host room.
type Head struct {
	Chain     string    `json:"chain"`
	Seq       uint64    `json:"seq"`
	Hash      []byte    `json:"hash"`
	At        time.Time `json:"at"` // when it was signed; whole microseconds
	Signature []byte    `json:"signature"`
}

// Digest is what is signed: every field but the signature, under a name of its
// own, so that no other thing the room signs can pass for a head.
func (h Head) Digest() [32]byte {
	s := sha256.New()
	var n [8]byte
	for _, part := range [][]byte{[]byte("space-audit-head-1"), []byte(h.Chain), h.Hash} {
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		s.Write(n[:])
		s.Write(part)
	}
	for _, v := range []uint64{h.Seq, uint64(h.At.UnixMicro())} {
		binary.BigEndian.PutUint64(n[:], v)
		s.Write(n[:])
	}
	return [32]byte(s.Sum(nil))
}

// Signed completes h with the time and the signature of key.
func (h Head) Signed(key ed25519.PrivateKey, at time.Time) Head {
	h.At = at.UTC().Truncate(time.Microsecond)
	d := h.Digest()
	h.Signature = ed25519.Sign(key, d[:])
	return h
}

// Check reports whether h was signed with the private half of key.
func (h Head) Check(key ed25519.PublicKey) bool {
	d := h.Digest()
	return h.Seq > 0 && ed25519.Verify(key, d[:], h.Signature)
}

// The files of heads and of exported records are JSON lines: one object and a
// newline each. A last line without a newline is one whose writing was cut off:
// nobody was told that it exists.
const maxLine = 1 << 20

// AppendHead adds h to the file of signed heads at path (made with mode 0600)
// and returns when it is on the disk.
func AppendHead(path string, h Head) (err error) {
	line, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("audit: open signed heads: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	end, err := lastNewline(f)
	if err != nil {
		return fmt.Errorf("audit: read signed heads: %w", err)
	}
	if err := f.Truncate(end); err != nil {
		return fmt.Errorf("audit: cut signed heads: %w", err)
	}
	if _, err := f.WriteAt(append(line, '\n'), end); err != nil {
		return fmt.Errorf("audit: write signed head: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("audit: sync signed heads: %w", err)
	}
	if end > 0 {
		return nil
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// lastNewline gives the offset after the last newline; 0 when there is none.
func lastNewline(f *os.File) (int64, error) {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, err
	}
	buf := make([]byte, 4096)
	for end > 0 {
		n := min(int64(len(buf)), end)
		if _, err := f.ReadAt(buf[:n], end-n); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(buf[:n], '\n'); i >= 0 {
			return end - n + int64(i) + 1, nil
		}
		end -= n
	}
	return 0, nil
}

// ReadHeads reads a file of signed heads. It checks the form only: see Verify.
func ReadHeads(r io.Reader) ([]Head, error) {
	var out []Head
	for line, err := range lines(r) {
		if err != nil {
			return nil, err
		}
		var h Head
		if err := strict(line, &h); err != nil {
			return nil, fmt.Errorf("audit: line %d of the signed heads: %w", len(out)+1, err)
		}
		out = append(out, h)
	}
	return out, nil
}

// WriteRecords exports records as JSON lines.
func WriteRecords(w io.Writer, records iter.Seq2[Record, error]) error {
	enc := json.NewEncoder(w)
	for r, err := range records {
		if err != nil {
			return err
		}
		if err := enc.Encode(r); err != nil {
			return fmt.Errorf("audit: export: %w", err)
		}
	}
	return nil
}

// ReadRecords reads an export. It can be walked again only when r can seek.
func ReadRecords(r io.Reader) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		if s, ok := r.(io.Seeker); ok {
			if _, err := s.Seek(0, io.SeekStart); err != nil {
				yield(Record{}, fmt.Errorf("audit: %w", err))
				return
			}
		}
		n := 0
		for line, err := range lines(r) {
			n++
			var rec Record
			if err == nil {
				if err = strict(line, &rec); err != nil {
					err = fmt.Errorf("audit: line %d of the records: %w", n, err)
				}
			}
			if !yield(rec, err) || err != nil {
				return
			}
		}
	}
}

// Pages makes an iterator of a store's paged walk (store.System.AuditAll); it
// can be walked again.
func Pages(next func(from uint64) ([]Record, error)) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		for from := uint64(1); ; {
			part, err := next(from)
			if err != nil {
				yield(Record{}, err)
				return
			}
			if len(part) == 0 {
				return
			}
			for _, r := range part {
				if !yield(r, nil) {
					return
				}
			}
			// A store walks in the order of numbers, so this always moves on.
			from = max(from, part[len(part)-1].Seq) + 1
		}
	}
}

// lines gives the complete lines of r.
func lines(r io.Reader) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		sc := bufio.NewScanner(r)
		sc.Buffer(make([]byte, 0, 4096), maxLine)
		sc.Split(func(data []byte, atEOF bool) (int, []byte, error) {
			if i := bytes.IndexByte(data, '\n'); i >= 0 {
				return i + 1, data[:i], nil
			}
			if atEOF {
				return len(data), nil, nil
			}
			return 0, nil, nil
		})
		for sc.Scan() {
			if !yield(sc.Bytes(), nil) {
				return
			}
		}
		if err := sc.Err(); err != nil {
			yield(nil, fmt.Errorf("audit: %w", err))
		}
	}
}

// strict decodes exactly one object of exactly the known fields.
func strict(line []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one object")
	}
	return nil
}
