package cli

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
)

// TestEventLine: with --json every event is one line with its id; bytes that
// are not text stay bytes, and the end still becomes our exit code.
func TestEventLine(t *testing.T) {
	out, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	a := &App{Stdout: out, Stderr: out, JSON: true}
	exit := spaceapi.Exit{Cause: "exited", Code: 7}
	for i, ev := range []client.Event{
		{ID: "1.0", Type: spaceapi.EventStarted, Raw: json.RawMessage(`{"pid":9}`)},
		{ID: "1.6", Type: spaceapi.EventStdout, Data: []byte("a\nb\r\n\n")},
		{ID: "1.8", Type: spaceapi.EventStderr, Data: []byte{0xff, 0}},
		{ID: "1.8", Type: spaceapi.EventExit, Raw: json.RawMessage(`{"cause":"exited","code":7}`), Exit: &exit},
	} {
		done, err := a.show(ev)
		if done != (i == 3) {
			t.Errorf("event %d: done=%v", i, done)
		}
		if e, ok := err.(*ExitError); done && (!ok || e.Code != 7) {
			t.Errorf("the end gave %v, want exit code 7", err)
		}
	}
	b, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	want := `{"id":"1.0","type":"started","data":{"pid":9}}
{"id":"1.6","type":"stdout","text":"a\nb\r\n\n"}
{"id":"1.8","type":"stderr","b64":"/wA="}
{"id":"1.8","type":"exit","data":{"cause":"exited","code":7}}
`
	if string(b) != want {
		t.Errorf("got\n%swant\n%s", strings.TrimSpace(string(b)), want)
	}
}
