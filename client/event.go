package client

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/space-platform/space/api/spaceapi"
)

// Event is one event of a session's stream.
type Event struct {
	// ID is "epoch.offset": the position after the event.
	ID   string
	Type string // one of spaceapi.Event*; others are to be ignored
	// Data is the bytes of stdout and stderr events.
	Data []byte
	// One of these is set on events of that type.
	Started *spaceapi.Started
	Gap     *spaceapi.Gap
	Exit    *spaceapi.Exit
	Ended   *spaceapi.Ended // of an error event
	// Raw is the JSON of every event that is not output.
	Raw json.RawMessage
}

// Err gives what an error event says, nil for other events. The code of a
// command that could not be started is the reason's own (not_found, bad_cwd, …).
func (e Event) Err() error {
	if e.Ended == nil {
		return nil
	}
	p := spaceapi.Problem{Code: e.Ended.Code, Detail: e.Ended.Message, Cause: e.Ended.Exit.Reason}
	if p.Code == "start_failed" {
		if code, why, ok := strings.Cut(p.Cause, ": "); ok {
			p.Code, p.Cause = code, why
		}
	}
	return &Error{p}
}

const (
	// maxLine bounds a line of a stream: above the longest that a server sends, the
	// 64 KiB of one event in base64.
	maxLine = 256 << 10
	// maxData bounds the data of one event.
	maxData = 1 << 20
	// eventInterrupted tells why a stream is cut that can be opened again. It has
	// no id and is not given to callers.
	eventInterrupted = "interrupted"
)

var errStreamBroken = errors.New("client: the server does not keep to the event stream format")

// scan reads one event; beat is called for each line, keepalives too. What a
// hostile server sends is bounded in memory; an endless event is bounded by beat's
// caller in time only if it also stops.
func scan(rd *bufio.Reader, beat func()) (ev Event, err error) {
	var data []byte
	size := 0
	for {
		line, err := rd.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			return Event{}, errFinal{fmt.Errorf("%w: a line of more than %d bytes", errStreamBroken, maxLine)}
		}
		if err != nil {
			return Event{}, err
		}
		beat()
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			if ev.Type == "" && data == nil {
				size = 0
				continue // a keepalive's end
			}
			return ev, ev.parse(data)
		}
		if size += len(line); size > maxData {
			return Event{}, errFinal{fmt.Errorf("%w: an event of more than %d bytes", errStreamBroken, maxData)}
		}
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(field) {
		case "id":
			ev.ID = string(value)
		case "event":
			ev.Type = string(value)
		case "data":
			if data != nil {
				data = append(data, '\n')
			}
			data = append(data, value...)
		}
	}
}

func (e *Event) parse(data []byte) error {
	var into any
	switch e.Type {
	case spaceapi.EventStdout, spaceapi.EventStderr:
		var d spaceapi.Chunk
		if err := json.Unmarshal(data, &d); err != nil {
			return errFinal{fmt.Errorf("%w: data of %s: %w", errStreamBroken, e.Type, err)}
		}
		e.Data = d.B64
		return nil
	case spaceapi.EventStarted:
		e.Started = &spaceapi.Started{}
		into = e.Started
	case spaceapi.EventGap:
		e.Gap = &spaceapi.Gap{}
		into = e.Gap
	case spaceapi.EventExit:
		e.Exit = &spaceapi.Exit{}
		into = e.Exit
	case spaceapi.EventError:
		e.Ended = &spaceapi.Ended{}
		into = e.Ended
	default:
		into = new(json.RawMessage) // it must be JSON, whatever it means
	}
	e.Raw = data
	if err := json.Unmarshal(data, into); err != nil {
		return errFinal{fmt.Errorf("%w: data of %.20q: %w", errStreamBroken, e.Type, err)}
	}
	return nil
}

// position is an event id in numbers.
type position struct{ epoch, offset uint64 }

func parsePosition(id string) (p position, ok bool) {
	a, b, found := strings.Cut(id, ".")
	var e1, e2 error
	p.epoch, e1 = strconv.ParseUint(a, 10, 64)
	p.offset, e2 = strconv.ParseUint(b, 10, 64)
	return p, found && e1 == nil && e2 == nil
}

// follows checks that ev continues after the event with id last: nothing twice,
// and nothing left out unless a gap says so.
func (e Event) follows(last string) error {
	at, ok := parsePosition(e.ID)
	if !ok {
		return fmt.Errorf("%w: %.40q is no event id", errStreamBroken, e.ID)
	}
	was, _ := parsePosition(last) // "" is the beginning
	size := uint64(1)
	if e.Type == spaceapi.EventStdout || e.Type == spaceapi.EventStderr {
		size = uint64(len(e.Data))
	}
	switch {
	case last != "" && at.epoch < was.epoch, at.epoch == was.epoch && at.offset <= was.offset && size > 0:
		return fmt.Errorf("%w: event %s came after %s", errStreamBroken, e.ID, last)
	case e.Type == spaceapi.EventGap, e.Type == spaceapi.EventRewound, last != "" && at.epoch != was.epoch:
		return nil
	case at.offset-was.offset != size:
		return fmt.Errorf("%w: between %q and %s something is missing without a gap", errStreamBroken, last, e.ID)
	}
	return nil
}
