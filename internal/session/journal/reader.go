package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"strconv"
	"sync"
	"time"
)

// Event is one event as a reader sees it. Start and End are positions; End is
// the offset of the event's id.
type Event struct {
	Kind       Kind
	Start, End uint64
	At         time.Time
	// Data is valid until the reader's next call.
	Data []byte
}

// Reader follows a journal. It holds at most one window of memory, and none
// while it waits. Not safe for concurrent use.
type Reader struct {
	j   *Journal
	pos uint64
	seg *segment
	at  int64
	w   window
}

// From makes a reader of everything after position after. ErrBeyond when the
// journal has not come there.
func (j *Journal) From(after uint64) (*Reader, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, ErrClosed
	}
	if after > j.end {
		return nil, fmt.Errorf("%w: %d of %d", ErrBeyond, after, j.end)
	}
	return &Reader{j: j, pos: after}, nil
}

// Close releases the reader's file and memory. The reader may be used again.
func (r *Reader) Close() {
	r.w.release()
	if r.w.f != nil {
		_ = r.w.f.Close() // read only
	}
	r.w, r.seg = window{}, nil
}

// Position is the offset of the id of the last event.
func (r *Reader) Position() uint64 { return r.pos }

// Next waits for the next event and returns it; io.EOF after the final one,
// ErrClosed when the journal is erased or closed, ctx's error, or ErrCorrupt.
func (r *Reader) Next(ctx context.Context) (Event, error) {
	for {
		ev, ok, err := r.Ready()
		if err != nil || ok {
			return ev, err
		}
		if err := r.Wait(ctx); err != nil {
			return Event{}, err
		}
	}
}

// Wait returns when Ready has something to tell; it holds no memory meanwhile.
func (r *Reader) Wait(ctx context.Context) error {
	r.w.release()
	return r.j.wait(ctx, r.pos)
}

// Ready returns the next event when it is there already; it does not wait.
func (r *Reader) Ready() (Event, bool, error) {
	for {
		j := r.j
		j.mu.Lock()
		if j.closed {
			j.mu.Unlock()
			return Event{}, false, ErrClosed
		}
		if r.pos >= j.end {
			final := j.last.Final()
			j.mu.Unlock()
			if final {
				return Event{}, false, io.EOF
			}
			return Event{}, false, nil
		}
		if r.pos < j.first {
			ev := r.gap(j.first, "window")
			j.mu.Unlock()
			return ev, true, nil
		}
		i := sort.Search(len(j.segs), func(i int) bool { return j.segs[i].pos > r.pos }) - 1
		seg := j.segs[i]
		limit := seg.size
		j.mu.Unlock()

		if r.seg != seg {
			r.Close()
			f, err := os.Open(seg.path)
			if errors.Is(err, os.ErrNotExist) && r.dropped(seg) {
				continue
			}
			if err != nil {
				return Event{}, false, fmt.Errorf("journal: open segment: %w", err)
			}
			r.seg, r.at, r.w = seg, segmentHeaderSize, window{f: f}
		}
		r.w.limit = limit
		ev, err := r.record()
		if errors.Is(err, ErrCorrupt) {
			if next, ok := r.following(seg); ok {
				return r.gap(next, "damaged"), true, nil
			}
		}
		return ev, err == nil, err
	}
}

// record reads records until the one that holds the position.
func (r *Reader) record() (Event, error) {
	for {
		b, err := r.w.at(r.at, headerSize)
		if err != nil {
			return Event{}, r.damaged(err)
		}
		h, ok := parseHeader(b)
		if !ok || h.pos > r.pos {
			return Event{}, ErrCorrupt
		}
		if h.end <= r.pos {
			r.at += h.size()
			continue
		}
		if b, err = r.w.at(r.at, int(h.size())); err != nil {
			return Event{}, r.damaged(err)
		}
		if !whole(b) {
			return Event{}, ErrCorrupt
		}
		data, ok := h.open(b, r.j.aead)
		if !ok {
			return Event{}, ErrCorrupt
		}
		if h.kind.Output() {
			data = data[r.pos-h.pos:]
		}
		ev := Event{Kind: h.kind, Start: r.pos, End: h.end, At: time.Unix(0, h.nanos), Data: data}
		r.at += h.size()
		r.w.consumed(r.at)
		r.pos = h.end
		return ev, nil
	}
}

func (r *Reader) damaged(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrCorrupt
	}
	return fmt.Errorf("journal: read: %w", err)
}

// gap moves to position to and makes the event that says so.
func (r *Reader) gap(to uint64, reason string) Event {
	ev := Event{Kind: Gap, Start: r.pos, End: to, At: r.j.o.Now(), Data: GapData(reason, to-r.pos)}
	r.pos = to
	return ev
}

// GapData is the payload of a gap: why, and how much is missing at most (0:
// not known).
func GapData(reason string, missing uint64) []byte {
	return []byte(`{"reason":` + strconv.Quote(reason) + `,"missing":` + strconv.FormatUint(missing, 10) + `}`)
}

func (r *Reader) dropped(seg *segment) bool {
	r.j.mu.Lock()
	defer r.j.mu.Unlock()
	return r.j.closed || len(r.j.segs) == 0 || r.j.segs[0].pos > seg.pos
}

// following gives the position of the segment after seg.
func (r *Reader) following(seg *segment) (uint64, bool) {
	r.j.mu.Lock()
	defer r.j.mu.Unlock()
	for _, s := range r.j.segs {
		if s.pos > seg.pos {
			return s.pos, s.pos > r.pos
		}
	}
	return 0, false
}

// window is a piece of a file in memory.
type window struct {
	f     *os.File
	limit int64 // bytes of the file that may be read
	buf   []byte
	off   int64 // of buf[0] in the file
	dirty int64
}

// windowSize holds one record of the largest size and the next header.
const windowSize = maxRecord + 16<<10

var windows = sync.Pool{New: func() any { b := make([]byte, 0, windowSize); return &b }}

// at gives n bytes from offset at; io.ErrUnexpectedEOF when the file has not so many.
func (w *window) at(at int64, n int) ([]byte, error) {
	if n > windowSize || at+int64(n) > w.limit {
		return nil, io.ErrUnexpectedEOF
	}
	if w.buf != nil && at >= w.off && at+int64(n) <= w.off+int64(len(w.buf)) && at >= w.dirty {
		return w.buf[at-w.off : at-w.off+int64(n)], nil
	}
	if w.buf == nil {
		w.buf = *windows.Get().(*[]byte)
	}
	// Keep what is there already of the bytes from at on.
	have := 0
	if at >= w.off && at < w.off+int64(len(w.buf)) && at >= w.dirty {
		have = copy(w.buf[:cap(w.buf)], w.buf[at-w.off:])
	}
	want := int(min(int64(windowSize), w.limit-at))
	w.buf = w.buf[:want]
	w.off, w.dirty = at, 0
	if _, err := w.f.ReadAt(w.buf[have:], at+int64(have)); err != nil {
		w.buf = w.buf[:0]
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return w.buf[:n], nil
}

// consumed says that the bytes below at were decrypted in place.
func (w *window) consumed(at int64) { w.dirty = at }

// release gives the memory back.
func (w *window) release() {
	if w.buf != nil {
		b := w.buf[:0]
		windows.Put(&b)
		w.buf, w.off = nil, 0
	}
}
