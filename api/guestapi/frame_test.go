package guestapi

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
)

func stream(t testing.TB, f func(w *FrameWriter)) []byte {
	t.Helper()
	var b bytes.Buffer
	f(NewFrameWriter(&b))
	return b.Bytes()
}

func good(w *FrameWriter) {
	_ = w.Gap(5, 10)
	_ = w.Data(FrameStdout, 15, []byte("hello"))
	_ = w.Keepalive(20)
	_ = w.Data(FrameStderr, 20, bytes.Repeat([]byte("x"), MaxFramePayload))
	_ = w.Exit(20+MaxFramePayload, ExitStatus{Cause: ExitSignal, Code: 137, Signal: "SIGKILL"})
}

func TestFrameRoundTrip(t *testing.T) {
	r := NewFrameReader(bytes.NewReader(append(stream(t, good), "late bytes"...)), 5)
	var types []FrameType
	for {
		f, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		types = append(types, f.Type)
		if f.Type == FrameExit && (f.Exit.Code != 137 || f.Exit.Signal != "SIGKILL") {
			t.Fatalf("exit %+v", f.Exit)
		}
		if f.Type == FrameStdout && string(f.Payload) != "hello" {
			t.Fatalf("payload %q", f.Payload)
		}
	}
	if len(types) != 5 || types[4] != FrameExit {
		t.Fatalf("types %v", types)
	}
	if r.Offset() != 20+MaxFramePayload {
		t.Fatalf("offset %d", r.Offset())
	}
}

func TestFrameReaderRefuses(t *testing.T) {
	huge := make([]byte, frameHeader)
	huge[0] = byte(FrameStdout)
	binary.BigEndian.PutUint32(huge[9:], math.MaxUint32)
	for name, b := range map[string][]byte{
		"type 0":           stream(t, func(w *FrameWriter) { _ = w.Raw(0, 0, nil) }),
		"type 6":           stream(t, func(w *FrameWriter) { _ = w.Raw(6, 0, []byte("x")) }),
		"huge":             huge,
		"too long":         stream(t, func(w *FrameWriter) { _ = w.Raw(FrameStdout, 0, make([]byte, MaxFramePayload+1)) }),
		"empty data":       stream(t, func(w *FrameWriter) { _ = w.Raw(FrameStdout, 0, nil) }),
		"hole":             stream(t, func(w *FrameWriter) { _ = w.Data(FrameStdout, 1, []byte("x")) }),
		"backwards":        stream(t, func(w *FrameWriter) { _ = w.Data(1, 0, []byte("xy")); _ = w.Data(1, 1, []byte("x")) }),
		"keepalive loaded": stream(t, func(w *FrameWriter) { _ = w.Raw(FrameKeepalive, 0, []byte("x")) }),
		"gap short":        stream(t, func(w *FrameWriter) { _ = w.Raw(FrameGap, 0, []byte("x")) }),
		"gap zero":         stream(t, func(w *FrameWriter) { _ = w.Gap(0, 0) }),
		"gap wraps":        stream(t, func(w *FrameWriter) { _ = w.Gap(0, math.MaxUint64) }),
		"gap to the brim":  stream(t, func(w *FrameWriter) { _ = w.Gap(0, math.MaxInt64); _ = w.Data(1, math.MaxInt64, []byte("x")) }),
		"exit code":        stream(t, func(w *FrameWriter) { _ = w.Exit(0, ExitStatus{Cause: ExitExited, Code: 4711}) }),
		"exit negative":    stream(t, func(w *FrameWriter) { _ = w.Exit(0, ExitStatus{Cause: ExitExited, Code: -1}) }),
		"exit cause":       stream(t, func(w *FrameWriter) { _ = w.Exit(0, ExitStatus{Cause: "success"}) }),
		"signal, code 0":   stream(t, func(w *FrameWriter) { _ = w.Exit(0, ExitStatus{Cause: ExitSignal, Signal: "SIGKILL"}) }),
		"exit total":       stream(t, func(w *FrameWriter) { _ = w.Exit(9, ExitStatus{Cause: ExitExited}) }),
		"exit not JSON":    stream(t, func(w *FrameWriter) { _ = w.Raw(FrameExit, 0, []byte("{]")) }),
		"exit long":        stream(t, func(w *FrameWriter) { _ = w.Raw(FrameExit, 0, []byte(strings.Repeat(" ", maxExit+1))) }),
	} {
		r := NewFrameReader(bytes.NewReader(b), 0)
		var err error
		for err == nil {
			_, err = r.Next()
		}
		if !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
		if _, again := r.Next(); !errors.Is(again, ErrProtocol) {
			t.Errorf("%s: the error does not stay: %v", name, again)
		}
	}
}

func TestFrameReaderBrokenStream(t *testing.T) {
	b := stream(t, func(w *FrameWriter) {
		_ = w.Data(1, 0, []byte("abc"))
		_ = w.Exit(3, ExitStatus{Cause: ExitExited})
	})
	for n := range b {
		r := NewFrameReader(bytes.NewReader(b[:n]), 0)
		var err error
		for err == nil {
			_, err = r.Next()
		}
		if err != io.ErrUnexpectedEOF {
			t.Fatalf("cut at %d: %v", n, err)
		}
	}
}

func TestSignalNames(t *testing.T) {
	for in, want := range map[string]int{"SIGTERM": 15, "term": 15, "9": 9, "SIG40": 40, "": 0, "0": 0, "65": 0, "-9": 0, "SIG": 0, "NOPE": 0} {
		if got := SignalNumber(in); got != want {
			t.Errorf("%q: %d, want %d", in, got, want)
		}
	}
	for n := 1; n <= maxSignal; n++ {
		if SignalNumber(SignalName(n)) != n {
			t.Errorf("%d: %s", n, SignalName(n))
		}
	}
}

func FuzzFrameReader(f *testing.F) {
	f.Add(stream(f, good), uint64(5))
	f.Add(stream(f, func(w *FrameWriter) { _ = w.Gap(0, math.MaxInt64) }), uint64(0))
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255}, uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, from uint64) {
		r := NewFrameReader(bytes.NewReader(b), from)
		at := from
		for {
			fr, err := r.Next()
			if err != nil {
				if err != io.EOF && err != io.ErrUnexpectedEOF && !errors.Is(err, ErrProtocol) {
					t.Fatalf("untyped error %v", err)
				}
				return
			}
			if fr.Offset != at || fr.End() < at || len(fr.Payload) > MaxFramePayload {
				t.Fatalf("frame %+v after %d", fr.Type, at)
			}
			at = fr.End()
		}
	})
}
