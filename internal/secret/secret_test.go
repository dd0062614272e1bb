package secret

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const planted = "hunter2-planted"

func TestValueNeverPrints(t *testing.T) {
	v := New(planted)
	type holder struct {
		Public Value
		hidden Value
		List   []Value
		Map    map[string]Value
		Ptr    *Value
	}
	h := holder{v, v, []Value{v}, map[string]Value{"k": v}, &v}
	var all strings.Builder
	for _, x := range []any{v, &v, h, &h, h.List, h.Map, []any{v}, map[Value]int{v: 1}, fmt.Errorf("wrap %v", v)} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%T", "%t", "%p", "%20v", "%b"} {
			fmt.Fprintf(&all, verb+"\n", x)
		}
		fmt.Fprintln(&all, x)
		if b, err := json.Marshal(x); err == nil {
			all.Write(b)
		}
		for _, h := range []slog.Handler{slog.NewTextHandler(&all, nil), slog.NewJSONHandler(&all, nil)} {
			slog.New(h).Info("message", "value", x, slog.Group("g", "value", x))
		}
	}
	for _, form := range []string{planted, fmt.Sprintf("%x", planted), fmt.Sprintf("%X", planted), fmt.Sprint([]byte(planted))} {
		if strings.Contains(all.String(), form) {
			t.Errorf("a secret was printed as %q in:\n%s", form, all.String())
		}
	}
	if !strings.Contains(all.String(), Redacted) {
		t.Error("nothing says that something was redacted")
	}
	if v.Reveal() != planted {
		t.Errorf("Reveal gives %q", v.Reveal())
	}
}

func TestValueDecodes(t *testing.T) {
	var in struct{ A, B Value }
	if err := json.Unmarshal([]byte(`{"A":"`+planted+`"}`), &in); err != nil {
		t.Fatal(err)
	}
	if in.A.Reveal() != planted || !in.B.IsZero() || in.A.IsZero() {
		t.Errorf("decoded %q and %q", in.A.Reveal(), in.B.Reveal())
	}
	if !in.A.Equal(New(planted)) || in.A.Equal(New(planted+"x")) || in.A.Equal(Value{}) || !(Value{}).Equal(New("")) {
		t.Error("Equal is wrong")
	}
}

func TestSealer(t *testing.T) {
	s, err := OpenSealer(filepath.Join(t.TempDir(), "key"))
	if err != nil {
		t.Fatal(err)
	}
	aad := Bind("env", "a", "i1")
	for _, plain := range [][]byte{nil, []byte("x"), bytes.Repeat([]byte(planted), 1000)} {
		sealed, err := s.Seal(plain, aad)
		if err != nil {
			t.Fatal(err)
		}
		if len(plain) > 8 && bytes.Contains(sealed, plain[:8]) {
			t.Error("the plain text is in the sealed one")
		}
		again, err := s.Seal(plain, aad)
		if err != nil || bytes.Equal(again, sealed) {
			t.Errorf("sealing twice gives the same bytes (%v)", err)
		}
		got, err := s.Open(sealed, aad)
		if err != nil || !bytes.Equal(got, plain) {
			t.Errorf("opened %d bytes, %v; want %d", len(got), err, len(plain))
		}
		for i := 0; i < len(sealed); i += 1 + len(sealed)/200 {
			bad := bytes.Clone(sealed)
			bad[i] ^= 0x80
			if _, err := s.Open(bad, aad); !errors.Is(err, ErrSealed) {
				t.Errorf("byte %d changed: %v", i, err)
			}
		}
		for n := 0; n < len(sealed); n += 1 + len(sealed)/200 {
			if _, err := s.Open(sealed[:n], aad); !errors.Is(err, ErrSealed) {
				t.Errorf("cut to %d: %v", n, err)
			}
		}
		for _, other := range [][]byte{Bind("env", "b", "i1"), Bind("env", "a", "i2"), Bind("env", "ai", "1"), Bind("x", "a", "i1"), nil} {
			if _, err := s.Open(sealed, other); !errors.Is(err, ErrSealed) {
				t.Errorf("opened for another row: %v", err)
			}
		}
	}
	other, err := NewSealer(bytes.Repeat([]byte{1}, 32))
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := s.Seal([]byte(planted), aad)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Open(sealed, aad); !errors.Is(err, ErrSealed) || strings.Contains(err.Error(), planted) {
		t.Errorf("opened with another key: %v", err)
	}
	if out := fmt.Sprintf("%v %+v %#v %x", s, s, s, s); strings.Contains(out, fmt.Sprintf("%x", s.key)) || strings.Contains(out, fmt.Sprint(s.key)) {
		t.Errorf("a sealer prints its key: %s", out)
	}
	if bytes.Equal(s.Derive("a"), s.Derive("b")) || bytes.Equal(s.Derive("a"), s.key[:]) || !bytes.Equal(s.Derive("a"), s.Derive("a")) {
		t.Error("derived keys must be stable and differ by purpose")
	}
}

func TestKeyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	sealers := make([]*Sealer, 8)
	var wg sync.WaitGroup
	for i := range sealers { // many starts at once agree on one key
		wg.Go(func() {
			var err error
			if sealers[i], err = OpenSealer(path); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, s := range sealers {
		if s == nil || s.key != sealers[0].key {
			t.Fatal("two starts have two keys")
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("%d files, want the key alone (%v)", len(left), err)
	}
	for _, spoil := range []func() error{
		func() error { return os.Chmod(path, 0o640) },
		func() error { return errors.Join(os.Chmod(path, 0o600), os.Truncate(path, 31)) },
		func() error { return os.Truncate(path, 33) },
		func() error { return os.Truncate(path, 0) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenSealer(path); !errors.Is(err, ErrKeyFile) {
			t.Errorf("a bad key file: %v", err)
		}
	}
}

func FuzzOpen(f *testing.F) {
	s, err := NewSealer(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		f.Fatal(err)
	}
	// Sealed once: every process of a fuzzing run must know the same one.
	good, err := hex.DecodeString("01f5df2093661048e36fd5dc51af337a98ec4e4647ded3c54aa5b96c2ffaef941bc8d43404c3cdf084a2")
	if err != nil {
		f.Fatal(err)
	}
	if got, err := s.Open(good, []byte("aad")); err != nil || string(got) != "x" {
		f.Fatalf("%q, %v", got, err)
	}
	f.Add(good, []byte("aad"))
	f.Add([]byte{}, []byte{})
	f.Add(good[:len(good)-1], []byte("aad"))
	f.Add(append(bytes.Clone(good), 0), []byte("aad"))
	f.Fuzz(func(t *testing.T, sealed, aad []byte) {
		got, err := s.Open(sealed, aad)
		if err == nil && (!bytes.Equal(sealed, good) || !bytes.Equal(aad, []byte("aad")) || string(got) != "x") {
			t.Fatalf("opened what was never sealed: %q", got)
		}
	})
}
