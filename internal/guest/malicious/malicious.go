// Package malicious is a guest daemon that lies, for tests of everything that
// talks to one: it serves guestapi over the same transport and misbehaves in
// one selectable way. It is a fixture; nothing that ships imports it.
package malicious

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/channel"
)

// Behaviour is one way to lie.
type Behaviour string

// Lies of the HTTP layer. Whatever a behaviour does not concern is answered plausibly.
const (
	Honest          Behaviour = "honest" // plausible everywhere: output "hello", exit 0
	ExitFirst       Behaviour = "exit_before_output"
	OutputAfterExit Behaviour = "output_after_exit"
	TwoExits        Behaviour = "two_exits"
	AbsurdCode      Behaviour = "absurd_exit_code"
	SignalNoCode    Behaviour = "signal_with_code_0"
	UnknownCause    Behaviour = "unknown_exit_cause"
	HugeFrame       Behaviour = "huge_frame"
	UnknownFrame    Behaviour = "unknown_frame"
	Backwards       Behaviour = "offsets_backwards"
	Hole            Behaviour = "offsets_with_hole"
	WrongTotal      Behaviour = "exit_total_wrong"
	GapOverflow     Behaviour = "gap_overflow"
	KeepaliveFlood  Behaviour = "keepalive_flood"
	DribbleOutput   Behaviour = "slow_output" // one byte of a frame a second
	SilentOutput    Behaviour = "no_output"   // headers, then nothing
	BreakOff        Behaviour = "break_off"   // the stream ends without exit
	OtherID         Behaviour = "other_id"    // Process of another id
	BadOffsets      Behaviour = "bad_offsets" // Base > Next
	ExitedNoExit    Behaviour = "exited_without_exit"
	WrongNonce      Behaviour = "wrong_nonce"
	WrongVersion    Behaviour = "wrong_version"
	EndlessJSON     Behaviour = "endless_json"
	DeepJSON        Behaviour = "deep_json"
	NotJSON         Behaviour = "not_json"
	DribbleJSON     Behaviour = "slow_json"
	Silent          Behaviour = "silent" // never answers
	HugeHeader      Behaviour = "huge_header"
	EndlessHeader   Behaviour = "endless_header"
	NotHTTP         Behaviour = "not_http"
	Informational   Behaviour = "endless_1xx"
	UnknownCode     Behaviour = "unknown_error_code"
	NastyText       Behaviour = "nasty_error_text" // control characters, very long
	Redirect        Behaviour = "redirect"
	StdinBackwards  Behaviour = "stdin_accepts_less"
	DoubleIDs       Behaviour = "list_with_double_ids"
	LongList        Behaviour = "list_too_long"
	ShortFile       Behaviour = "file_shorter_than_said"
	BadFileMode     Behaviour = "bad_file_mode"
)

// HTTP lists every behaviour of the HTTP layer.
var HTTP = []Behaviour{
	Honest, ExitFirst, OutputAfterExit, TwoExits, AbsurdCode, SignalNoCode, UnknownCause, HugeFrame, UnknownFrame,
	Backwards, Hole, WrongTotal, GapOverflow, KeepaliveFlood, DribbleOutput, SilentOutput, BreakOff, OtherID, BadOffsets,
	ExitedNoExit, WrongNonce, WrongVersion, EndlessJSON, DeepJSON, NotJSON, DribbleJSON, Silent, HugeHeader, EndlessHeader,
	NotHTTP, Informational, UnknownCode, NastyText, Redirect, StdinBackwards, DoubleIDs, LongList, ShortFile, BadFileMode,
}

// Handler answers guestapi's paths with behaviour b.
func Handler(b Behaviour) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if b.everywhere(w, r) {
			return
		}
		id := ""
		if rest, ok := strings.CutPrefix(r.URL.Path, guestapi.PathProcesses+"/"); ok {
			id, _, _ = strings.Cut(rest, "/")
		}
		switch {
		case r.URL.Path == guestapi.PathHello:
			b.hello(w, r)
		case r.URL.Path == guestapi.PathProcesses && r.Method == http.MethodGet:
			b.list(w)
		case r.URL.Path == guestapi.PathProcesses:
			var s guestapi.Start
			_ = json.NewDecoder(r.Body).Decode(&s)
			b.process(w, s.ID)
		case strings.HasSuffix(r.URL.Path, "/output"):
			b.output(w, r)
		case strings.HasSuffix(r.URL.Path, "stdin"):
			n, _ := io.Copy(io.Discard, r.Body)
			reply := guestapi.StdinReply{}
			if b != StdinBackwards {
				_, _ = fmt.Sscan(r.URL.Query().Get("offset"), &reply.Accepted)
				reply.Accepted += uint64(n)
			}
			answer(w, 200, reply)
		case id != "" && r.URL.Path == guestapi.PathProcesses+"/"+id && r.Method == http.MethodGet:
			b.process(w, id)
		case r.URL.Path == guestapi.PathFiles && r.Method == http.MethodGet:
			b.file(w)
		default:
			_, _ = io.Copy(io.Discard, r.Body)
			answer(w, 200, struct{}{})
		}
	})
}

func answer(w http.ResponseWriter, status int, v any) {
	p, _ := json.Marshal(v)
	w.WriteHeader(status)
	_, _ = w.Write(p)
}

// everywhere is for lies that do not depend on the path.
func (b Behaviour) everywhere(w http.ResponseWriter, r *http.Request) bool {
	switch b {
	case EndlessJSON:
		_, _ = io.WriteString(w, `{"a":"`)
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, strings.Repeat("x", 32<<10)); err != nil {
				break
			}
		}
	case DeepJSON:
		_, _ = io.WriteString(w, `{"a":`+strings.Repeat("[", 500_000))
	case NotJSON:
		_, _ = io.WriteString(w, "\x00\xff<html>")
	case DribbleJSON:
		_, _ = io.WriteString(w, "{")
		for r.Context().Err() == nil {
			_, _ = io.WriteString(w, " ")
			_ = http.NewResponseController(w).Flush()
			pause(r.Context())
		}
	case Silent:
		<-r.Context().Done()
	case HugeHeader:
		w.Header().Set("X", strings.Repeat("x", 1<<20))
		answer(w, 200, struct{}{})
	case EndlessHeader, NotHTTP, Informational:
		b.raw(w)
	case UnknownCode:
		answer(w, 500, guestapi.Error{Code: "host_compromised", Message: "x"})
	case NastyText:
		answer(w, 500, guestapi.Error{Code: guestapi.CodeIO, Message: "\x1b[2J\r\nlevel=error\u202e" + strings.Repeat("y", 100_000)})
	case Redirect:
		http.Redirect(w, r, "http://169.254.169.254/latest/meta-data", http.StatusTemporaryRedirect)
	default:
		return false
	}
	return true
}

func (b Behaviour) raw(w http.ResponseWriter) {
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer func() { _ = c.Close() }()
	switch b {
	case NotHTTP:
		_, _ = io.WriteString(c, "SSH-2.0-guest\r\n"+strings.Repeat("\x00", 4096))
	case EndlessHeader:
		_, err = io.WriteString(c, "HTTP/1.1 200 OK\r\n")
		for err == nil {
			_, err = io.WriteString(c, "X: "+strings.Repeat("x", 1000)+"\r\n")
		}
	case Informational:
		for err == nil {
			_, err = io.WriteString(c, "HTTP/1.1 102 Processing\r\nX: "+strings.Repeat("x", 100)+"\r\n\r\n")
		}
	}
}

// pause is the pace of a slow one: its rhythm is what it is.
func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(50 * time.Millisecond):
	}
}

func (b Behaviour) hello(w http.ResponseWriter, r *http.Request) {
	var h guestapi.Hello
	_ = json.NewDecoder(r.Body).Decode(&h)
	reply := guestapi.HelloReply{Version: guestapi.Version, Nonce: h.Nonce, BootEpoch: "epoch", Daemon: "evil\n\x1b", PID: 1}
	switch b {
	case WrongNonce:
		reply.Nonce = "another"
	case WrongVersion:
		reply.Version = 1 << 30
	}
	answer(w, 200, reply)
}

func (b Behaviour) describe(id string) guestapi.Process {
	p := guestapi.Process{ID: id, PID: 7, State: guestapi.ProcessRunning, StartedAt: time.Now()}
	switch b {
	case OtherID:
		p.ID = "another-sandboxes-session"
	case BadOffsets:
		p.Base, p.Next = 10, 5
	case ExitedNoExit:
		p.State = guestapi.ProcessExited
	case AbsurdCode:
		p.State, p.Exit = guestapi.ProcessExited, &guestapi.ExitStatus{Cause: guestapi.ExitExited, Code: math.MaxInt32}
	case UnknownCause:
		p.State, p.Exit = guestapi.ProcessExited, &guestapi.ExitStatus{Cause: "out_of_memory"}
	}
	return p
}

func (b Behaviour) process(w http.ResponseWriter, id string) { answer(w, 200, b.describe(id)) }

func (b Behaviour) list(w http.ResponseWriter) {
	l := guestapi.ProcessList{Processes: []guestapi.Process{b.describe("one")}}
	switch b {
	case DoubleIDs:
		l.Processes = append(l.Processes, b.describe("one"))
	case LongList:
		for i := range guestapi.MaxProcesses {
			l.Processes = append(l.Processes, guestapi.Process{ID: fmt.Sprint(i), PID: 1, State: guestapi.ProcessRunning})
		}
	}
	answer(w, 200, l)
}

func (b Behaviour) output(w http.ResponseWriter, r *http.Request) {
	f := guestapi.NewFrameWriter(w)
	flush := func() { _ = http.NewResponseController(w).Flush() }
	exit := guestapi.ExitStatus{Cause: guestapi.ExitExited}
	hello := func() { _ = f.Data(guestapi.FrameStdout, 0, []byte("hello")) }
	switch b {
	case ExitFirst:
		_ = f.Exit(5, exit)
		hello()
	case OutputAfterExit:
		hello()
		_ = f.Exit(5, exit)
		for r.Context().Err() == nil {
			if f.Data(guestapi.FrameStdout, 5, []byte(strings.Repeat("late", 8<<10))) != nil {
				return
			}
		}
	case TwoExits:
		hello()
		_ = f.Exit(5, exit)
		_ = f.Exit(5, guestapi.ExitStatus{Cause: guestapi.ExitExited, Code: 1})
	case AbsurdCode:
		hello()
		_ = f.Exit(5, guestapi.ExitStatus{Cause: guestapi.ExitExited, Code: -4711})
	case SignalNoCode:
		hello()
		_ = f.Exit(5, guestapi.ExitStatus{Cause: guestapi.ExitSignal, Signal: "SIGKILL"})
	case UnknownCause:
		hello()
		_ = f.Exit(5, guestapi.ExitStatus{Cause: "expired"})
	case HugeFrame:
		hdr := binary.BigEndian.AppendUint64([]byte{byte(guestapi.FrameStdout)}, 0)
		_, _ = w.Write(binary.BigEndian.AppendUint32(hdr, math.MaxUint32))
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	case UnknownFrame:
		_ = f.Raw(99, 0, []byte("hello"))
	case Backwards:
		hello()
		hello()
	case Hole:
		hello()
		_ = f.Data(guestapi.FrameStdout, 6, []byte("x"))
	case WrongTotal:
		hello()
		_ = f.Exit(4, exit)
	case GapOverflow:
		_ = f.Gap(0, math.MaxUint64)
	case KeepaliveFlood:
		for r.Context().Err() == nil {
			if f.Keepalive(0) != nil {
				return
			}
		}
	case DribbleOutput:
		hdr := binary.BigEndian.AppendUint64([]byte{byte(guestapi.FrameStdout)}, 0)
		for _, c := range append(binary.BigEndian.AppendUint32(hdr, 1000), make([]byte, 1000)...) {
			_, _ = w.Write([]byte{c})
			flush()
			if pause(r.Context()); r.Context().Err() != nil {
				return
			}
		}
	case SilentOutput:
		flush()
		<-r.Context().Done()
	case BreakOff:
		hello()
	default:
		hello()
		_ = f.Exit(5, exit)
	}
}

func (b Behaviour) file(w http.ResponseWriter) {
	w.Header().Set(guestapi.HeaderMode, "644")
	w.Header().Set(guestapi.HeaderModTime, "0")
	switch b {
	case BadFileMode:
		w.Header().Set(guestapi.HeaderMode, "777777")
	case ShortFile:
		w.Header().Set("Content-Length", "1000")
	}
	_, _ = io.WriteString(w, "hello")
}

// Link is a lie below HTTP: it has the connection to the host.
type Link string

// Lies of the connection.
const (
	WrongHello   Link = "wrong_hello"
	SilentHello  Link = "silent_hello"
	Garbage      Link = "garbage"       // after hello
	OpenStreams  Link = "opens_streams" // towards the host
	PingFlood    Link = "ping_flood"    // and reads no answer
	HugeMuxFrame Link = "huge_mux_frame"
	WindowFlood  Link = "window_update_flood"
	NoAccept     Link = "never_accepts" // streams stay unacknowledged
	StopReading  Link = "stops_reading" // accepts, answers nothing, reads nothing
)

// Links lists them.
var Links = []Link{WrongHello, SilentHello, Garbage, OpenStreams, PingFlood, HugeMuxFrame, WindowFlood, NoAccept, StopReading}

// Run misbehaves on conn until the host or ctx ends it.
func (l Link) Run(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	switch l {
	case WrongHello:
		_, _ = io.WriteString(conn, "SPACE-CHANNEL 9\n")
		_, _ = io.Copy(io.Discard, conn)
		return
	case SilentHello:
		<-ctx.Done()
		return
	}
	if _, err := channel.LineHello(conn); err != nil {
		return
	}
	send := func(typ byte, flags uint16, stream, length uint32) error {
		h := []byte{0, typ}
		h = binary.BigEndian.AppendUint16(h, flags)
		h = binary.BigEndian.AppendUint32(h, stream)
		_, err := conn.Write(binary.BigEndian.AppendUint32(h, length))
		return err
	}
	var err error
	switch l {
	case Garbage:
		_, _ = conn.Write([]byte(strings.Repeat("\xde\xad\xbe\xef", 4096)))
	case OpenStreams:
		for i := uint32(2); err == nil && i < 200_000; i += 2 {
			err = send(1, 1, i, 0)
		}
	case PingFlood:
		for i := uint32(0); err == nil; i++ {
			err = send(2, 1, 0, i)
		}
	case HugeMuxFrame:
		_ = send(0, 0, 1, math.MaxUint32)
	case WindowFlood:
		for err == nil {
			err = send(1, 0, 1, 1)
		}
	case NoAccept, StopReading:
		if l == StopReading {
			c := yamux.DefaultConfig()
			c.EnableKeepAlive = false
			c.LogOutput = io.Discard
			s, serr := yamux.Server(conn, c)
			if serr != nil {
				return
			}
			defer func() { _ = s.Close() }()
			for {
				st, aerr := s.Accept()
				if aerr != nil {
					return
				}
				_ = st // never read
			}
		}
		<-ctx.Done()
	}
	_, _ = io.Copy(io.Discard, conn)
}
