// Package journal is the output journal of one command session on the host's
// disk: an append-only, bounded, encrypted sequence of events that any number
// of readers follow at their own speed.
//
// # Positions
//
// Every byte of output takes one position, every other event takes one, and a
// gap takes as many as it says. The id of an event is the position after it.
//
// # Files
//
// A journal is a directory (0700) of segment files (0600), each named by the
// position it starts at and at most SegmentBytes (plus one record) long. A
// segment is a header and records; a record is a header with a checksum and the
// payload, sealed with AES-256-GCM under the session's key. A batch of records
// is one write. When the journal is over its bound the oldest segments go, and
// readers that had not come there see an explicit gap.
//
// # Crashes
//
// What Append returned for is in the page cache and survives the death of the
// process; Sync makes it survive the loss of power. Open cuts a torn tail. The
// offset of the guest's stream that a record ends at is part of the record, so
// that the writer goes on exactly where the journal ends, without a byte
// doubled or lost.
package journal

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// Limits of one journal.
const (
	MaxPayload          = 64 << 10 // bytes of one record's payload
	DefaultSegmentBytes = 1 << 20
	DefaultMaxBytes     = 64 << 20
)

// Errors of this package; wrapped.
var (
	// ErrBeyond: the position is after the end of the journal.
	ErrBeyond = errors.New("journal: position is beyond the end")
	// ErrFinal: the journal has its last event; nothing may follow it.
	ErrFinal = errors.New("journal: the last event is written")
	// ErrClosed: the journal was closed or erased.
	ErrClosed = errors.New("journal: closed")
	// ErrCorrupt: a record is damaged and nothing whole follows it.
	ErrCorrupt = errors.New("journal: damaged record")
)

// Account is charged for the bytes on the disk.
type Account interface {
	// Charge adds n bytes, or refuses.
	Charge(n int64) error
	// Adopt adds n bytes without asking.
	Adopt(n int64)
	// Refund takes n bytes back.
	Refund(n int64)
}

type free struct{}

func (free) Charge(int64) error { return nil }
func (free) Adopt(int64)        {}
func (free) Refund(int64)       {}

// Options of a journal. Only Dir and Key are needed.
type Options struct {
	Dir          string
	Key          [32]byte
	Epoch        uint64
	MaxBytes     int64 // bound on the disk; at least two segments are kept
	SegmentBytes int64
	Account      Account
	// Dirty is called (with no lock held) when there is something to Sync.
	Dirty func(*Journal)
	Now   func() time.Time
	// Verify checks every record at Open, not only the last segment's; what
	// follows the first damage is cut.
	Verify bool
}

// Journal of one session. Append, Sync and Erase are safe beside readers;
// Append has one caller at a time.
type Journal struct {
	o    Options
	aead cipher.AEAD

	wmu   sync.Mutex // serialises writers; held before mu
	file  *os.File   // the last segment, open for writing; nil until needed
	round uint32     // part of the nonce, new for every opening and after every failed write
	buf   []byte
	busy  bool // appended since the last Sync

	mu      sync.Mutex
	segs    []*segment // oldest first; never empty once something was appended
	bytes   int64
	first   uint64 // first position that is kept
	end     uint64
	guest   uint64
	last    Kind
	dirty   []*segment
	dirDirt bool
	placed  bool          // the directory's own place is durable
	wake    chan struct{} // closed at the next change
	waiters int
	closed  bool
}

type segment struct {
	path string
	pos  uint64
	size int64 // bytes that are whole; guarded by Journal.mu
}

// Open opens the journal in o.Dir and makes the directory when it is missing.
func Open(o Options) (*Journal, error) {
	if o.SegmentBytes <= 0 {
		o.SegmentBytes = DefaultSegmentBytes
	}
	if o.MaxBytes <= 0 {
		o.MaxBytes = DefaultMaxBytes
	}
	o.MaxBytes = max(o.MaxBytes, 2*o.SegmentBytes)
	if o.Account == nil {
		o.Account = free{}
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	block, err := aes.NewCipher(o.Key[:])
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	j := &Journal{o: o, aead: aead, round: newRound(), wake: make(chan struct{})}
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("journal: make directory: %w", err)
	}
	if err := j.recover(); err != nil {
		return nil, err
	}
	o.Account.Adopt(j.bytes)
	return j, nil
}

func newRound() uint32 {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return binary.BigEndian.Uint32(b[:])
}

// State is where a journal stands.
type State struct {
	First uint64 // first position that is kept
	End   uint64 // position after the last event
	Guest uint64 // offset of the guest's stream after the last output
	Last  Kind   // kind of the last event; 0 when there is none
	Bytes int64  // on the disk
}

// Final reports whether the last event is there.
func (s State) Final() bool { return s.Last.Final() }

// State tells where the journal stands.
func (j *Journal) State() State {
	j.mu.Lock()
	defer j.mu.Unlock()
	return State{First: j.first, End: j.end, Guest: j.guest, Last: j.last, Bytes: j.bytes}
}

// Entry is what is appended.
type Entry struct {
	Kind Kind
	// Data is the payload, at most MaxPayload bytes; for output at least one.
	Data []byte
	// Guest is the offset of the guest's stream after this entry; less than that
	// of the entry before means the same.
	Guest uint64
	// Size is how many positions a Gap takes; 0 is 1. Others set none.
	Size uint64
}

func (e Entry) size() uint64 {
	switch {
	case e.Kind.Output():
		return uint64(len(e.Data))
	case e.Kind == Gap && e.Size > 1:
		return e.Size
	}
	return 1
}

// Append writes the entries in order and wakes the readers. All of them are
// written or, when it fails, none counts: the same entries may be tried again.
func (j *Journal) Append(entries ...Entry) error {
	j.wmu.Lock()
	defer j.wmu.Unlock()
	for len(entries) > 0 {
		n, err := j.append(entries, nil)
		if err != nil {
			return err
		}
		entries = entries[n:]
	}
	return nil
}

// Prepare makes the first segment, so that the first Append only writes. It
// does nothing once there is one.
func (j *Journal) Prepare() error {
	j.wmu.Lock()
	defer j.wmu.Unlock()
	j.mu.Lock()
	began := len(j.segs) > 0 || j.closed
	j.mu.Unlock()
	if began {
		return nil
	}
	seg := &segment{path: filepath.Join(j.o.Dir, segmentName(0))}
	j.buf = appendSegmentHeader(j.buf[:0], j.o.Epoch, 0, 0)
	n := int64(len(j.buf))
	if err := j.room(n, seg, true); err != nil {
		return err
	}
	if err := j.write(seg, 0, true); err != nil {
		j.o.Account.Refund(n)
		return err
	}
	j.mu.Lock()
	seg.size = n
	j.segs, j.bytes, j.dirDirt = append(j.segs, seg), n, true
	j.mu.Unlock()
	return nil
}

// Finish appends the final event in two steps: the record is written, then
// commit is told the position after it, and only when commit returns nil do
// readers see the event. So whatever commit makes durable is true before
// anybody reads it. When commit fails, the record stays: the next Open has it.
// ErrFinal when the final event is there already; commit is called all the same.
func (j *Journal) Finish(e Entry, commit func(end uint64) error) error {
	j.wmu.Lock()
	defer j.wmu.Unlock()
	_, err := j.append([]Entry{e}, commit)
	if errors.Is(err, ErrFinal) {
		return errors.Join(err, commit(j.State().End))
	}
	return err
}

// append writes as many entries as go into one segment, at least one.
func (j *Journal) append(entries []Entry, commit func(end uint64) error) (int, error) {
	j.mu.Lock()
	pos, guest, last, closed := j.end, j.guest, j.last, j.closed
	var seg *segment
	var at int64
	if len(j.segs) > 0 {
		seg = j.segs[len(j.segs)-1]
		at = seg.size
	}
	j.mu.Unlock()
	if closed {
		return 0, ErrClosed
	}
	if last.Final() {
		return 0, ErrFinal
	}
	fresh := seg == nil || at >= j.o.SegmentBytes
	j.buf = j.buf[:0]
	if fresh {
		seg, at = &segment{path: filepath.Join(j.o.Dir, segmentName(pos)), pos: pos}, 0
		j.buf = appendSegmentHeader(j.buf, j.o.Epoch, pos, guest)
	}
	now := j.o.Now().UnixNano()
	n := 0
	for _, e := range entries {
		if err := e.check(); err != nil {
			return 0, err
		}
		if n > 0 && (last.Final() || at+int64(len(j.buf)) >= j.o.SegmentBytes) {
			break
		}
		guest = max(guest, e.Guest) // events that are not output may leave it out
		h := header{kind: e.Kind, pos: pos, end: pos + e.size(), guest: guest, nanos: now, round: j.round, length: uint32(len(e.Data))}
		j.buf = h.seal(j.buf, j.aead, e.Data)
		pos, last = h.end, e.Kind
		n++
	}
	if err := j.room(int64(len(j.buf)), seg, fresh); err != nil {
		return 0, err
	}
	if err := j.write(seg, at, fresh); err != nil {
		j.o.Account.Refund(int64(len(j.buf)))
		j.round = newRound() // what is written here next is other text
		return 0, err
	}
	if commit != nil {
		if err := commit(pos); err != nil {
			return 0, err
		}
	}
	j.mu.Lock()
	if fresh {
		j.segs = append(j.segs, seg)
		j.dirDirt = true
	}
	if len(j.dirty) == 0 || j.dirty[len(j.dirty)-1] != seg {
		j.dirty = append(j.dirty, seg)
	}
	seg.size = at + int64(len(j.buf))
	j.bytes += int64(len(j.buf))
	j.end, j.guest, j.last = pos, guest, last
	j.notify()
	j.mu.Unlock()
	first := !j.busy
	j.busy = true
	if first && j.o.Dirty != nil {
		j.o.Dirty(j)
	}
	if cap(j.buf) > 256<<10 {
		j.buf = nil
	}
	return n, nil
}

func (e Entry) check() error {
	switch {
	case !e.Kind.Valid(), len(e.Data) > MaxPayload, e.Kind.Output() && len(e.Data) == 0, e.Kind != Gap && e.Size != 0:
		return fmt.Errorf("journal: bad entry %s of %d bytes", e.Kind, len(e.Data))
	}
	return nil
}

// notify wakes the readers; the caller holds mu.
func (j *Journal) notify() {
	if j.waiters > 0 {
		close(j.wake)
		j.wake = make(chan struct{})
		j.waiters = 0
	}
}

// room charges n bytes and drops old segments until the bound holds. What is
// written to is never dropped, so that a journal may pass its bound and its
// account by one segment.
func (j *Journal) room(n int64, writing *segment, fresh bool) error {
	charged := false
	for {
		if !charged {
			charged = j.o.Account.Charge(n) == nil
		}
		j.mu.Lock()
		over := j.bytes+n > j.o.MaxBytes
		droppable := len(j.segs) > 1 || len(j.segs) == 1 && fresh
		if (over || !charged) && droppable && j.segs[0] != writing {
			old := j.dropOldest()
			j.mu.Unlock()
			j.unlink(old)
			continue
		}
		j.mu.Unlock()
		if !charged {
			j.o.Account.Adopt(n)
		}
		return nil
	}
}

// dropOldest forgets the oldest segment; the caller holds mu and unlinks it.
func (j *Journal) dropOldest() *segment {
	old := j.segs[0]
	j.segs = j.segs[1:]
	j.bytes -= old.size
	j.first = j.end
	if len(j.segs) > 0 {
		j.first = j.segs[0].pos
	}
	for i, s := range j.dirty {
		if s == old {
			j.dirty = append(j.dirty[:i], j.dirty[i+1:]...)
			break
		}
	}
	return old
}

func (j *Journal) unlink(old *segment) {
	_ = os.Remove(old.path) // gone already is as good; a failure shows at the next Open, which charges it
	j.o.Account.Refund(old.size)
}

// Shrink drops up to n bytes of the oldest segments, never the last one, and
// tells how many it dropped.
func (j *Journal) Shrink(n int64) int64 {
	var dropped int64
	for dropped < n {
		j.mu.Lock()
		if len(j.segs) < 2 || j.closed {
			j.mu.Unlock()
			break
		}
		old := j.dropOldest()
		j.mu.Unlock()
		j.unlink(old)
		dropped += old.size
	}
	return dropped
}

func (j *Journal) write(seg *segment, at int64, fresh bool) error {
	if fresh && j.file != nil {
		_ = j.file.Close() // Sync opens it again
		j.file = nil
	}
	if j.file == nil {
		flags := os.O_RDWR
		if fresh {
			flags |= os.O_CREATE | os.O_TRUNC
		}
		f, err := os.OpenFile(seg.path, flags, 0o600)
		if err != nil {
			return fmt.Errorf("journal: open segment: %w", err)
		}
		j.file = f
	}
	if _, err := j.file.WriteAt(j.buf, at); err != nil {
		_ = j.file.Close() // the next try opens it anew
		j.file = nil
		return fmt.Errorf("journal: write: %w", err)
	}
	return nil
}

// Sync makes everything appended so far survive the loss of power.
func (j *Journal) Sync() error {
	j.wmu.Lock()
	j.busy = false
	file := j.file
	var current *segment
	j.mu.Lock()
	dirty, dir := j.dirty, j.dirDirt
	j.dirty, j.dirDirt = nil, false
	parents := dir && !j.placed
	j.placed = j.placed || dir
	if file != nil && len(j.segs) > 0 {
		current = j.segs[len(j.segs)-1]
	}
	closed := j.closed
	j.mu.Unlock()
	j.wmu.Unlock()
	if closed {
		return nil
	}
	var errs []error
	for _, s := range dirty {
		if s == current {
			if err := file.Sync(); err == nil || !errors.Is(err, os.ErrClosed) {
				errs = append(errs, err)
				continue
			}
		}
		errs = append(errs, syncPath(s.path))
	}
	if dir {
		errs = append(errs, syncPath(j.o.Dir))
	}
	if parents { // the directory was new: so may its parent be
		up := filepath.Dir(j.o.Dir)
		errs = append(errs, syncPath(up), syncPath(filepath.Dir(up)))
	}
	if err := errors.Join(errs...); err != nil {
		j.mu.Lock()
		j.placed = j.placed && !parents
		j.dirty = append(dirty, j.dirty...)
		j.dirDirt = j.dirDirt || dir
		j.mu.Unlock()
		return fmt.Errorf("journal: sync: %w", err)
	}
	return nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil // dropped or erased meanwhile
	}
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Rest closes the descriptor and frees the buffer when nothing was appended
// since the last Sync; the next Append opens it again. It tells whether it did.
func (j *Journal) Rest() bool {
	j.wmu.Lock()
	defer j.wmu.Unlock()
	if j.busy {
		return false
	}
	if j.file != nil {
		_ = j.file.Close() // synced
		j.file = nil
	}
	j.buf = nil
	return true
}

// Disown ends the charging: the caller answers for the bytes, which are
// returned, from now on.
func (j *Journal) Disown() int64 {
	j.wmu.Lock()
	defer j.wmu.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.o.Account = free{}
	return j.bytes
}

// Close ends the readers with ErrClosed and releases descriptors and the
// account; the files stay.
func (j *Journal) Close() { j.shut() }

func (j *Journal) shut() []*segment {
	j.wmu.Lock()
	defer j.wmu.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil
	}
	j.closed = true
	if j.file != nil {
		_ = j.file.Close() // nothing to lose: writes are done
		j.file = nil
	}
	j.buf = nil
	j.o.Account.Refund(j.bytes)
	j.waiters = 1
	j.notify()
	return j.segs
}

// Erase closes the journal and removes its directory.
func (j *Journal) Erase() error {
	j.shut()
	return Erase(j.o.Dir)
}

// Erase removes the journal directory dir; one that is not there is no error.
func Erase(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("journal: erase: %w", err)
	}
	return nil
}

// wait returns when the journal has more than pos, or is closed.
func (j *Journal) wait(ctx context.Context, pos uint64) error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return ErrClosed
	}
	if j.end != pos {
		j.mu.Unlock()
		return nil
	}
	j.waiters++
	wake := j.wake
	j.mu.Unlock()
	select {
	case <-wake:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
