package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
)

// recover finds what is whole on the disk. Damage in the last segment (or, with
// Verify, in any) ends the journal there: the rest is cut. Files that are not
// ours to understand are removed: the directory is private to the journal.
func (j *Journal) recover() error {
	names, err := os.ReadDir(j.o.Dir)
	if err != nil {
		return fmt.Errorf("journal: read directory: %w", err)
	}
	for _, n := range names {
		path := filepath.Join(j.o.Dir, n.Name())
		pos, ok := parseSegmentName(n.Name())
		info, ierr := n.Info()
		if !ok || ierr != nil || !info.Mode().IsRegular() {
			if err := os.RemoveAll(path); err != nil {
				return fmt.Errorf("journal: remove foreign file: %w", err)
			}
			continue
		}
		j.segs = append(j.segs, &segment{path: path, pos: pos, size: info.Size()})
	}
	sort.Slice(j.segs, func(a, b int) bool { return j.segs[a].pos < j.segs[b].pos })

	from := 0
	if !j.o.Verify {
		from = max(len(j.segs)-1, 0)
	}
	for i := from; i < len(j.segs); i++ {
		s := j.segs[i]
		if i > from && (s.pos != j.end || j.last.Final()) {
			return j.cut(i) // a hole: what follows cannot be trusted to be all
		}
		r, err := scan(s, j.o.Epoch)
		if err != nil {
			return err
		}
		if r.size == 0 { // not even a header, or no record
			if !j.o.Verify && i == from && i > 0 {
				// The last file is empty: the one before is the last.
				if err := j.drop(i); err != nil {
					return err
				}
				from = i - 1
				i = from - 1
				continue
			}
			return j.cut(i)
		}
		torn := r.size < s.size
		if torn {
			if err := os.Truncate(s.path, r.size); err != nil {
				return fmt.Errorf("journal: cut torn tail: %w", err)
			}
			s.size = r.size
			j.dirty = append(j.dirty, s)
		}
		j.end, j.guest, j.last = r.end, r.guest, r.last
		if torn && i+1 < len(j.segs) {
			return j.cut(i + 1)
		}
	}
	j.sum()
	return nil
}

// cut removes the segments from i on.
func (j *Journal) cut(i int) error {
	for k := len(j.segs) - 1; k >= i; k-- {
		if err := j.drop(k); err != nil {
			return err
		}
	}
	j.sum()
	return nil
}

func (j *Journal) drop(i int) error {
	if err := os.Remove(j.segs[i].path); err != nil {
		return fmt.Errorf("journal: remove damaged segment: %w", err)
	}
	j.segs = j.segs[:i]
	j.dirDirt = true
	return nil
}

func (j *Journal) sum() {
	j.bytes = 0
	for _, s := range j.segs {
		j.bytes += s.size
	}
	if len(j.segs) == 0 {
		j.first, j.end, j.guest, j.last = 0, 0, 0, 0
		return
	}
	j.first = j.segs[0].pos
}

type scanned struct {
	size       int64 // of the whole prefix; 0 when it has no record
	end, guest uint64
	last       Kind
}

// scan reads records from the start of s until the first that is not whole. It
// holds one record in memory, whatever the file says.
func scan(s *segment, epoch uint64) (scanned, error) {
	f, err := os.Open(s.path)
	if err != nil {
		return scanned{}, fmt.Errorf("journal: open segment: %w", err)
	}
	defer func() { _ = f.Close() }() // read only
	w := window{f: f, limit: s.size}
	defer w.release()
	b, err := w.at(0, segmentHeaderSize)
	if err != nil {
		return scanned{}, notShort(err)
	}
	e, pos, guest, ok := parseSegmentHeader(b)
	if !ok || e != epoch || pos != s.pos {
		return scanned{}, nil
	}
	out := scanned{end: pos, guest: guest}
	at := int64(segmentHeaderSize)
	for !out.last.Final() {
		b, err := w.at(at, headerSize)
		if err != nil {
			return out, notShort(err)
		}
		h, ok := parseHeader(b)
		if !ok || h.pos != out.end || h.guest < out.guest {
			return out, nil
		}
		if b, err = w.at(at, int(h.size())); err != nil {
			return out, notShort(err)
		}
		if !whole(b) {
			return out, nil
		}
		at += h.size()
		out.size, out.end, out.guest, out.last = at, h.end, h.guest, h.kind
	}
	return out, nil
}

func notShort(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return fmt.Errorf("journal: read: %w", err)
}

// Peek tells the first position kept in dir without opening the journal; false
// when there is none.
func Peek(dir string) (uint64, bool) {
	names, err := os.ReadDir(dir) // sorted
	if err != nil {
		return 0, false
	}
	for _, n := range names {
		if pos, ok := parseSegmentName(n.Name()); ok {
			return pos, true
		}
	}
	return 0, false
}
