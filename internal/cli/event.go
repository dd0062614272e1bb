package cli

import (
	"encoding/json"
	"unicode/utf8"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/client"
)

// eventLine is one event of a stream as --json prints it, one line each. Output
// is Text when it is valid UTF-8, else B64; other events have Data.
type eventLine struct {
	ID   string          `json:"id"`
	Type string          `json:"type"`
	Text *string         `json:"text,omitempty"`
	B64  []byte          `json:"b64,omitempty"`
	Data json.RawMessage `json:"data,omitempty"`
}

// line prints ev for programs, with the id to come back with (attach --after).
func (a *App) line(ev client.Event) error {
	l := eventLine{ID: ev.ID, Type: ev.Type, Data: ev.Raw}
	if ev.Type == spaceapi.EventStdout || ev.Type == spaceapi.EventStderr {
		l.Data = nil
		if utf8.Valid(ev.Data) {
			s := string(ev.Data)
			l.Text = &s
		} else {
			l.B64 = ev.Data
		}
	}
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	_, err = a.Stdout.Write(append(b, '\n'))
	return err
}
