package client

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"testing"

	"github.com/space-platform/space/api/spaceapi"
)

// FuzzScan: whatever a server sends, reading ends without a panic, typed fields
// are there where callers use them, and what is accepted is in order.
func FuzzScan(f *testing.F) {
	f.Add([]byte("id: 1.1\nevent: started\ndata: {\"pid\":7}\n\n: keepalive\n\nid: 1.3\nevent: stdout\ndata: {\"b64\":\"YWI=\"}\n\n"))
	f.Add([]byte("id: 1.1\r\nevent: exit\r\ndata: {\"cause\":\"exited\"}\r\n\r\n"))
	f.Add([]byte("event: interrupted\ndata: {\"code\":\"x\"}\n\n"))
	f.Add([]byte("event: gap\ndata: null\n\nevent: error\ndata: null\n\n"))
	f.Add([]byte("data\ndata:\n\nid\nevent\n\n:\n\n"))
	f.Add([]byte("id: 18446744073709551615.18446744073709551615\nevent: gap\ndata: {}\n\nid: 18446744073709551615.0\nevent: gap\ndata: {}\n\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		rd := bufio.NewReaderSize(bytes.NewReader(in), maxLine)
		last := ""
		for {
			ev, err := scan(rd, func() {})
			if err != nil {
				if !isFinal(err) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Fatalf("an error that is neither the end nor final: %v", err)
				}
				return
			}
			if (ev.Type == spaceapi.EventExit) != (ev.Exit != nil) || (ev.Type == spaceapi.EventGap) != (ev.Gap != nil) ||
				(ev.Type == spaceapi.EventError) != (ev.Ended != nil) || (ev.Type == spaceapi.EventStarted) != (ev.Started != nil) {
				t.Fatalf("%q has not its field", ev.Type)
			}
			_ = ev.Err()
			if ev.Type == eventInterrupted && ev.interruption() == nil {
				t.Fatal("an interruption that is none")
			}
			if ev.follows(last) != nil {
				continue
			}
			a, _ := parsePosition(last)
			b, _ := parsePosition(ev.ID)
			if last != "" && (b.epoch < a.epoch || b.epoch == a.epoch && b.offset < a.offset) {
				t.Fatalf("%s was taken after %s", ev.ID, last)
			}
			last = ev.ID
		}
	})
}
