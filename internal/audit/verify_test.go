package audit

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var at = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

// room signs as the host room does.
type room struct{ key ed25519.PrivateKey }

func (r room) SignHead(_ context.Context, chain string, seq uint64, hash []byte) (Head, error) {
	return Head{Chain: chain, Seq: seq, Hash: hash}.Signed(r.key, at), nil
}

func newRoom(seed byte) (room, ed25519.PublicKey) {
	k := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	return room{k}, k.Public().(ed25519.PublicKey)
}

func chain(t testing.TB, n int) []Record {
	t.Helper()
	var out []Record
	var prev Record
	for i := range n {
		r, err := Next("control", prev.Seq, prev.Hash, Entry{
			At: at.Add(time.Duration(i) * time.Second), Tenant: "a", Actor: "key1", Action: "sandbox.create",
			Target: fmt.Sprint("i", i), Request: "r", Detail: map[string]string{"name": "web", "n": fmt.Sprint(i)},
		})
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
		prev = r
	}
	return out
}

func heads(t testing.TB, records []Record, seqs ...int) []Head {
	t.Helper()
	signer, _ := newRoom(1)
	var out []Head
	for _, n := range seqs {
		h, err := signer.SignHead(t.Context(), records[n-1].Chain, records[n-1].Seq, records[n-1].Hash)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, h)
	}
	return out
}

func seq(records []Record) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		for _, r := range records {
			if !yield(r, nil) {
				return
			}
		}
	}
}

// rehash makes r and all after it sound again, as one who holds the database could.
func rehash(t testing.TB, records []Record, from int) {
	t.Helper()
	for i := from; i < len(records); i++ {
		var prev Record
		if i > 0 {
			prev = records[i-1]
		}
		r, err := Next(records[i].Chain, prev.Seq, prev.Hash, records[i].Entry)
		if err != nil {
			t.Fatal(err)
		}
		records[i] = r
	}
}

func TestVerifySound(t *testing.T) {
	_, key := newRoom(1)
	records := chain(t, 10)
	for _, signed := range [][]int{nil, {1}, {10}, {7, 3, 3, 10}} {
		rep, err := Verify("control", seq(records), heads(t, records, signed...), key)
		if err != nil {
			t.Fatalf("heads %v: %v", signed, err)
		}
		want := Report{Chain: "control", Records: 10, Hash: records[9].Hash, Heads: len(signed)}
		if len(signed) > 0 {
			want.Signed = uint64(slices.Max(signed))
		}
		if !reflect.DeepEqual(rep, want) {
			t.Errorf("report %+v, want %+v", rep, want)
		}
	}
	if rep, err := Verify("control", seq(nil), nil, nil); err != nil || rep.Records != 0 {
		t.Errorf("empty chain: %+v, %v", rep, err)
	}
}

// TestVerifyTampered changes one thing at a time; the answer names what and where.
func TestVerifyTampered(t *testing.T) {
	_, key := newRoom(1)
	flip := func(b []byte) []byte { c := bytes.Clone(b); c[0] ^= 1; return c }
	field := func(change func(*Record)) func([]Record, []Head) ([]Record, []Head) {
		return func(r []Record, h []Head) ([]Record, []Head) { change(&r[4]); return r, h }
	}
	head := func(change func(*Head)) func([]Record, []Head) ([]Record, []Head) {
		return func(r []Record, h []Head) ([]Record, []Head) { change(&h[0]); return r, h }
	}
	for name, c := range map[string]struct {
		tamper func([]Record, []Head) ([]Record, []Head)
		kind   Kind
		seq    uint64
	}{
		"at":      {field(func(r *Record) { r.Entry.At = r.Entry.At.Add(time.Microsecond) }), Altered, 5},
		"tenant":  {field(func(r *Record) { r.Entry.Tenant = "b" }), Altered, 5},
		"actor":   {field(func(r *Record) { r.Entry.Actor = "key2" }), Altered, 5},
		"action":  {field(func(r *Record) { r.Entry.Action += "x" }), Altered, 5},
		"target":  {field(func(r *Record) { r.Entry.Target = "" }), Altered, 5},
		"request": {field(func(r *Record) { r.Entry.Request = "" }), Altered, 5},
		"detail":  {field(func(r *Record) { r.Entry.Detail = map[string]string{"name": "web"} }), Altered, 5},
		"prev":    {field(func(r *Record) { r.Prev = flip(r.Prev) }), Altered, 5},
		"hash":    {field(func(r *Record) { r.Hash = flip(r.Hash) }), Altered, 5},
		"no hash": {field(func(r *Record) { r.Hash = nil }), Altered, 5},
		"chain":   {field(func(r *Record) { r.Chain = "other" }), Foreign, 5},
		"prev and hash": {field(func(r *Record) {
			r.Prev = flip(r.Prev)
			r.Hash, _ = r.sum()
		}), Unlinked, 5},
		"altered and rehashed alone": {func(r []Record, h []Head) ([]Record, []Head) {
			r[4].Entry.Actor = "key2"
			r[4].Hash, _ = r[4].sum()
			return r, h
		}, Unlinked, 6},
		"seq up":   {field(func(r *Record) { r.Seq = 100 }), Missing, 5},
		"seq down": {field(func(r *Record) { r.Seq = 2 }), Reordered, 2},
		"seq zero": {field(func(r *Record) { r.Seq = 0 }), Reordered, 0},
		"removed":  {func(r []Record, h []Head) ([]Record, []Head) { return slices.Delete(r, 4, 5), h }, Missing, 5},
		"first removed": {func(r []Record, h []Head) ([]Record, []Head) {
			return r[1:], h
		}, Missing, 1},
		"swapped": {func(r []Record, h []Head) ([]Record, []Head) { r[4], r[5] = r[5], r[4]; return r, h }, Reordered, 6},
		"twice":   {func(r []Record, h []Head) ([]Record, []Head) { return slices.Insert(r, 5, r[4]), h }, Reordered, 5},
		"cut below a head": {func(r []Record, h []Head) ([]Record, []Head) {
			return r[:6], h
		}, Truncated, 7},
		"all gone": {func(_ []Record, h []Head) ([]Record, []Head) { return nil, h }, Truncated, 1},
		"rewritten as a whole": {func(r []Record, h []Head) ([]Record, []Head) {
			r[2].Entry.Actor = "somebody"
			rehash(t, r, 2)
			return r, h
		}, Rewritten, 4},
		"head hash":      {head(func(h *Head) { h.Hash = flip(h.Hash) }), Forged, 4},
		"head seq":       {head(func(h *Head) { h.Seq = 3 }), Forged, 3},
		"head time":      {head(func(h *Head) { h.At = h.At.Add(time.Second) }), Forged, 4},
		"head signature": {head(func(h *Head) { h.Signature = flip(h.Signature) }), Forged, 4},
		"head unsigned":  {head(func(h *Head) { h.Signature = nil }), Forged, 4},
		"head chain":     {head(func(h *Head) { h.Chain = "other" }), Foreign, 4},
		"head of another room": {func(r []Record, h []Head) ([]Record, []Head) {
			other, _ := newRoom(2)
			h[0], _ = other.SignHead(t.Context(), r[3].Chain, r[3].Seq, r[3].Hash)
			return r, h
		}, Forged, 4},
	} {
		t.Run(name, func(t *testing.T) {
			records := chain(t, 10)
			for i := range records {
				records[i].Entry.Detail = map[string]string{"name": "web", "n": fmt.Sprint(i)}
			}
			r, h := c.tamper(records, heads(t, records, 4, 8))
			_, err := Verify("control", seq(r), h, key)
			var b *Broken
			if !errors.As(err, &b) {
				t.Fatalf("not found: %v", err)
			}
			if b.Kind != c.kind || b.Seq != c.seq {
				t.Errorf("%v; want record %d %s", b, c.seq, c.kind)
			}
		})
	}
	records := chain(t, 3)
	if _, err := Verify("control", seq(records), heads(t, records, 2), nil); err == nil {
		t.Error("heads were accepted without a key to check them")
	}
	broken := errors.New("disk")
	_, err := Verify("control", func(yield func(Record, error) bool) {
		_ = yield(records[0], nil) && yield(Record{}, broken)
	}, nil, nil)
	if !errors.Is(err, broken) {
		t.Errorf("an error of the iterator: %v", err)
	}
}

func TestNextReadsBack(t *testing.T) {
	e := Entry{At: at.In(time.FixedZone("x", 3600)).Add(5), Actor: "\xff\x00<", Detail: map[string]string{"a\xff": "b\xff", "a\xfe": "c"}}
	r, err := Next("c", 0, []byte("ignored"), e)
	if err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	if err := WriteRecords(&file, seq([]Record{r})); err != nil {
		t.Fatal(err)
	}
	rep, err := Verify("c", ReadRecords(bytes.NewReader(file.Bytes())), nil, nil)
	if err != nil || rep.Records != 1 {
		t.Errorf("what was read back does not verify: %+v, %v", rep, err)
	}
}

func TestHeadsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "heads")
	records := chain(t, 5)
	want := heads(t, records, 1, 3, 5)
	for i, h := range want {
		if err := AppendHead(path, h); err != nil {
			t.Fatal(err)
		}
		if i == 1 { // a crash in the middle of a line
			f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.WriteString(`{"chain":"` + strings.Repeat("x", 9000)); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := ReadHeads(bytes.NewReader(b))
		if err != nil || !reflect.DeepEqual(got, want[:i+1]) {
			t.Fatalf("after %d: %+v, %v", i+1, got, err)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	for _, bad := range []string{"x\n", "{}{}\n", `{"chain":1}` + "\n", `{"unknown":1}` + "\n", "\n", `{"seq":-1}` + "\n", strings.Repeat("a", maxLine+1) + "\n"} {
		if h, err := ReadHeads(strings.NewReader(bad)); err == nil {
			t.Errorf("%.20q was read as %+v", bad, h)
		}
	}
}

// FuzzVerify: no export makes Verify fail in any other way than by saying so, and
// what it accepts is a chain that Next would have made.
func FuzzVerify(f *testing.F) {
	_, key := newRoom(1)
	records := chain(f, 4)
	var file, signed bytes.Buffer
	if err := WriteRecords(&file, seq(records)); err != nil {
		f.Fatal(err)
	}
	for _, h := range heads(f, records, 2, 4) {
		if err := json.NewEncoder(&signed).Encode(h); err != nil {
			f.Fatal(err)
		}
	}
	f.Add(file.Bytes(), signed.Bytes())
	f.Add(file.Bytes()[:file.Len()/2], signed.Bytes())
	f.Add(bytes.Replace(file.Bytes(), []byte("web"), []byte("wec"), 1), []byte{})
	f.Add([]byte("{}\n"), []byte("{}\n"))
	f.Add([]byte("null\n[]\n"), []byte("null\n"))
	f.Fuzz(func(t *testing.T, export, headFile []byte) {
		h, err := ReadHeads(bytes.NewReader(headFile))
		if err != nil {
			h = nil
		}
		rep, err := Verify("control", ReadRecords(bytes.NewReader(export)), h, key)
		if err != nil {
			return
		}
		var prev Record
		for r, err := range ReadRecords(bytes.NewReader(export)) {
			if err != nil {
				t.Fatal(err)
			}
			again, err := Next("control", prev.Seq, prev.Hash, r.Entry)
			if err != nil || again.Seq != r.Seq || !bytes.Equal(again.Hash, r.Hash) {
				t.Fatalf("accepted %+v, which is no chain", r)
			}
			prev = r
		}
		if rep.Records != prev.Seq || (len(h) > 0 && rep.Signed == 0) {
			t.Fatalf("report %+v, last record %d, %d heads", rep, prev.Seq, len(h))
		}
	})
}
