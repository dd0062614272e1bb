package journal

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

type tt interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

func open(t tt, o Options) *Journal {
	t.Helper()
	if o.Epoch == 0 {
		o.Epoch = 1
	}
	j, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func drain(t tt, r *Reader) []Event {
	t.Helper()
	var out []Event
	for {
		ev, ok, err := r.Ready()
		if errors.Is(err, io.EOF) || err == nil && !ok {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		ev.Data = bytes.Clone(ev.Data)
		out = append(out, ev)
	}
}

func TestReadAfterReopen(t *testing.T) {
	o := Options{Dir: filepath.Join(t.TempDir(), "j")}
	j := open(t, o)
	must(t, j.Append(Entry{Kind: Started, Data: []byte("{}")}, Entry{Kind: Stdout, Data: []byte("hello"), Guest: 5}))
	must(t, j.Append(Entry{Kind: Stderr, Data: []byte("oh"), Guest: 7}))
	must(t, j.Sync())
	j.Close()
	j = open(t, o)
	if s := j.State(); s.End != 8 || s.Guest != 7 || s.Last != Stderr || s.First != 0 {
		t.Fatalf("%+v", s)
	}
	must(t, j.Append(Entry{Kind: Exit, Data: []byte("bye")}))
	if err := j.Append(Entry{Kind: Stdout, Data: []byte("x")}); !errors.Is(err, ErrFinal) {
		t.Fatalf("append after exit: %v", err)
	}
	for after, want := range map[uint64]string{0: "started:{}@1 stdout:hello@6 stderr:oh@8 exit:bye@9", 3: "stdout:llo@6 stderr:oh@8 exit:bye@9",
		6: "stderr:oh@8 exit:bye@9", 8: "exit:bye@9", 9: ""} {
		r, err := j.From(after)
		must(t, err)
		var got []string
		for _, e := range drain(t, r) {
			got = append(got, fmt.Sprintf("%s:%s@%d", e.Kind, e.Data, e.End))
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("after %d: %q, want %q", after, s, want)
		}
		if _, err := r.Next(context.Background()); !errors.Is(err, io.EOF) {
			t.Errorf("after the final event: %v", err)
		}
		r.Close()
	}
	if _, err := j.From(10); !errors.Is(err, ErrBeyond) {
		t.Fatalf("beyond: %v", err)
	}
	info, err := os.Stat(o.Dir)
	must(t, err)
	if info.Mode().Perm() != 0o700 {
		t.Fatalf("directory mode %v", info.Mode())
	}
}

// What a program prints is not in the files in clear, and a journal under
// another key does not show it.
func TestSealedAtRest(t *testing.T) {
	o := Options{Dir: t.TempDir(), Key: [32]byte{1}}
	j := open(t, o)
	marker := []byte("the-tenant's-own-words-0123456789")
	must(t, j.Append(Entry{Kind: Stdout, Data: marker, Guest: uint64(len(marker))}))
	j.Close()
	files, err := filepath.Glob(filepath.Join(o.Dir, "*"))
	must(t, err)
	if len(files) != 1 {
		t.Fatal(files)
	}
	raw, err := os.ReadFile(files[0])
	must(t, err)
	if bytes.Contains(raw, marker[:16]) {
		t.Fatal("output lies on the disk in clear")
	}
	o.Key[0] = 2
	r, err := open(t, o).From(0)
	must(t, err)
	if _, _, err := r.Ready(); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("read under another key: %v", err)
	}
}

type account struct{ used, limit int64 }

func (a *account) Charge(n int64) error {
	if a.used+n > a.limit {
		return errors.New("full")
	}
	a.used += n
	return nil
}
func (a *account) Adopt(n int64)  { a.used += n }
func (a *account) Refund(n int64) { a.used -= n }

func TestBoundGivesGap(t *testing.T) {
	for name, o := range map[string]Options{
		"own bound": {MaxBytes: 64 << 10, SegmentBytes: 16 << 10},
		"account":   {MaxBytes: 1 << 30, SegmentBytes: 16 << 10, Account: &account{limit: 64 << 10}},
	} {
		t.Run(name, func(t *testing.T) {
			o.Dir = t.TempDir()
			j := open(t, o)
			slow, err := j.From(0)
			must(t, err)
			payload := bytes.Repeat([]byte("x"), 1000)
			for i := range 1000 {
				must(t, j.Append(Entry{Kind: Stdout, Data: payload, Guest: uint64(i+1) * 1000}))
			}
			var onDisk int64
			files, _ := filepath.Glob(filepath.Join(o.Dir, "*"))
			for _, f := range files {
				info, err := os.Stat(f)
				must(t, err)
				onDisk += info.Size()
			}
			s := j.State()
			if onDisk != s.Bytes || onDisk > 64<<10+16<<10+maxRecord {
				t.Fatalf("%d bytes on the disk, state says %d", onDisk, s.Bytes)
			}
			evs := drain(t, slow)
			if evs[0].Kind != Gap || evs[0].Start != 0 || evs[0].End != s.First || evs[1].Start != s.First {
				t.Fatalf("gap %+v, first %d", evs[0], s.First)
			}
			if evs[len(evs)-1].End != 1000*1000 {
				t.Fatalf("ends at %d", evs[len(evs)-1].End)
			}
			if a, ok := o.Account.(*account); ok {
				if a.used != s.Bytes {
					t.Fatalf("account %d, journal %d", a.used, s.Bytes)
				}
				must(t, j.Erase())
				if a.used != 0 {
					t.Fatalf("account after erase: %d", a.used)
				}
			}
		})
	}
}

func TestReadersWaitWithoutPolling(t *testing.T) {
	j := open(t, Options{Dir: t.TempDir()})
	var wg sync.WaitGroup
	sums := make([][32]byte, 4)
	for i := range sums {
		r, err := j.From(0)
		must(t, err)
		wg.Go(func() {
			defer r.Close()
			h := sha256.New()
			for {
				ev, err := r.Next(context.Background())
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Error(err)
					return
				}
				h.Write(ev.Data)
			}
			h.Sum(sums[i][:0])
		})
	}
	h := sha256.New()
	p := make([]byte, 40<<10)
	for i := range 200 {
		_, _ = rand.Read(p)
		n := 1 + i*len(p)/200
		h.Write(p[:n])
		must(t, j.Append(Entry{Kind: Stdout, Data: p[:n]}))
	}
	must(t, j.Append(Entry{Kind: Exit}))
	wg.Wait()
	var want [32]byte
	h.Sum(want[:0])
	for _, s := range sums {
		if s != want {
			t.Fatal("a reader saw other bytes")
		}
	}
}

func TestWaitEndsWithContextAndClose(t *testing.T) {
	j := open(t, Options{Dir: t.TempDir()})
	r, err := j.From(0)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := r.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { _, err := r.Next(context.Background()); done <- err }()
	must(t, j.Erase())
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}

// A failed write counts for nothing and is tried again without harm.
func TestAppendAfterFailedWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "j")
	j := open(t, Options{Dir: dir})
	must(t, j.Append(Entry{Kind: Stdout, Data: []byte("a"), Guest: 1}))
	j.Rest()
	must(t, j.Sync())
	if !j.Rest() {
		t.Fatal("rest after sync")
	}
	seg := j.segs[0].path
	must(t, os.Rename(seg, seg+".away"))
	if err := j.Append(Entry{Kind: Stdout, Data: []byte("b"), Guest: 2}); err == nil {
		t.Fatal("no error")
	}
	must(t, os.Rename(seg+".away", seg))
	must(t, j.Append(Entry{Kind: Stdout, Data: []byte("b"), Guest: 2}))
	r, err := j.From(0)
	must(t, err)
	if evs := drain(t, r); len(evs) != 2 || string(evs[1].Data) != "b" {
		t.Fatalf("%+v", evs)
	}
}

func must(t tt, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The journal against a list of bytes: appends, resumed reads, drops, clean and
// torn reopenings in any order.
func TestJournalAgainstModel(t *testing.T) {
	root := t.TempDir()
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		o := Options{Dir: filepath.Join(root, fmt.Sprint(n)), SegmentBytes: 512, MaxBytes: rapid.SampledFrom([]int64{2048, 1 << 20}).Draw(t, "bound"),
			Now: func() time.Time { return time.Unix(1, 0) }, Verify: true}
		defer func() { _ = os.RemoveAll(o.Dir) }()
		j := open(t, o)
		var model []byte  // kind of each position, then its byte
		var starts []int  // model length at record starts
		kinds := []byte{} // kind per position
		check := func() {
			s := j.State()
			if s.End != uint64(len(model)) || s.Guest != uint64(len(model)) {
				t.Fatalf("end %d guest %d, model %d", s.End, s.Guest, len(model))
			}
			after := uint64(rapid.IntRange(0, len(model)).Draw(t, "after"))
			r, err := j.From(after)
			must(t, err)
			defer r.Close()
			at := after
			for _, ev := range drain(t, r) {
				if ev.Start != at {
					t.Fatalf("event starts at %d, want %d", ev.Start, at)
				}
				at = ev.End
				if ev.Kind == Gap {
					if ev.Start != after || ev.End != s.First || after >= s.First {
						t.Fatalf("gap %d-%d, first %d", ev.Start, ev.End, s.First)
					}
					continue
				}
				if !bytes.Equal(ev.Data, model[ev.Start:ev.End]) || kinds[ev.Start] != byte(ev.Kind) {
					t.Fatalf("wrong bytes at %d", ev.Start)
				}
			}
			if at != uint64(len(model)) {
				t.Fatalf("read ends at %d of %d", at, len(model))
			}
		}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "op") {
			case 0, 1:
				var batch []Entry
				for range rapid.IntRange(1, 4).Draw(t, "batch") {
					k := rapid.SampledFrom([]Kind{Stdout, Stderr}).Draw(t, "kind")
					data := rapid.SliceOfN(rapid.Byte(), 1, 300).Draw(t, "data")
					starts = append(starts, len(model))
					model = append(model, data...)
					kinds = append(kinds, bytes.Repeat([]byte{byte(k)}, len(data))...)
					batch = append(batch, Entry{Kind: k, Data: data, Guest: uint64(len(model))})
				}
				must(t, j.Append(batch...))
			case 2:
				must(t, j.Sync())
				j.Rest()
			case 3: // killed
				j.Close()
				j = open(t, o)
			case 4: // torn in the last segment
				j.Close()
				if len(j.segs) > 0 {
					last := j.segs[len(j.segs)-1]
					cut := rapid.Int64Range(0, last.size).Draw(t, "cut")
					must(t, os.Truncate(last.path, cut))
				}
				j = open(t, o)
				end := int(j.State().End)
				if len(j.segs) > 0 || end == 0 {
					ok := end == 0 || end == len(model)
					for _, s := range starts {
						ok = ok || s == end
					}
					if !ok {
						t.Fatalf("recovered to %d, which is not between records", end)
					}
				}
				if end == 0 { // all is gone: a new journal
					model, kinds, starts = nil, nil, nil
				}
				model, kinds = model[:end], kinds[:end]
			}
			check()
		}
		j.Close()
	})
}

// Whatever lies in the last segment file: no panic, what was whole before the
// damage is read, and the journal can be written on.
func FuzzJournalRecover(f *testing.F) {
	valid := func() []byte {
		dir := f.TempDir()
		j := open(f, Options{Dir: dir})
		must(f, j.Append(Entry{Kind: Started, Data: []byte("{}")}, Entry{Kind: Stdout, Data: []byte("hello world"), Guest: 11},
			Entry{Kind: Gap, Data: GapData("overflow", 9), Guest: 20}, Entry{Kind: Exit, Data: []byte("{}")}))
		j.Close()
		b, err := os.ReadFile(filepath.Join(dir, segmentName(0)))
		must(f, err)
		return b
	}()
	f.Add(valid, 0, byte(0))
	f.Add(valid[:len(valid)-5], 0, byte(0))
	f.Add(valid, 60, byte(1))
	f.Add([]byte{}, 0, byte(0))
	f.Add(bytes.Repeat([]byte{0xff}, 300), 0, byte(0))
	f.Fuzz(func(t *testing.T, file []byte, at int, flip byte) {
		same := bytes.Equal(file, valid)
		file = bytes.Clone(file)
		if at >= 0 && at < len(file) {
			file[at] ^= flip
		}
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, segmentName(0)), file, 0o600))
		j, err := Open(Options{Dir: dir, Epoch: 1, Verify: true})
		must(t, err)
		defer j.Close()
		s := j.State()
		r, err := j.From(s.First)
		must(t, err)
		defer r.Close()
		pos := s.First
		for {
			ev, ok, err := r.Ready()
			if err != nil || !ok {
				break
			}
			if ev.Start != pos || ev.End <= ev.Start {
				t.Fatalf("event %d-%d after %d", ev.Start, ev.End, pos)
			}
			pos = ev.End
		}
		if same && (flip == 0 || at < 0 || at >= len(file)) && !s.Final() {
			t.Fatal("an undamaged journal was cut")
		}
		if same && flip != 0 && at >= 0 && at < len(file) && !(at >= 36 && at < segmentHeaderSize) && s.Final() {
			t.Fatalf("a damaged byte at %d was not noticed", at)
		}
		if !s.Final() {
			must(t, j.Append(Entry{Kind: Stdout, Data: []byte("on")}))
		}
	})
}

func FuzzParseEventID(f *testing.F) {
	for _, s := range []string{"1.0", "1.18446744073709551615", "", ".", "1.", "-1.2", "01.2", "1.2.3", "1.+2", "٣.1", "1.99999999999999999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, ok := ParseID(s)
		if ok && id.String() != s {
			t.Fatalf("%q parsed as %s", s, id)
		}
	})
}

func BenchmarkAppendAndRead(b *testing.B) {
	for _, size := range []int{64, 4 << 10, 64 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			j := open(b, Options{Dir: b.TempDir()})
			p := make([]byte, size)
			r, err := j.From(0)
			must(b, err)
			b.SetBytes(int64(size))
			for b.Loop() {
				must(b, j.Append(Entry{Kind: Stdout, Data: p}))
				if _, err := r.Next(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
