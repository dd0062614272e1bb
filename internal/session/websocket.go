package session

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"math"
	"net/http"
	"strings"
	"sync"

	"github.com/coder/websocket"
	"github.com/space-platform/space/api/guestapi"
	"github.com/space-platform/space/internal/fault"
	"github.com/space-platform/space/internal/session/journal"
)

// maxMessage bounds a message from a WebSocket client.
const maxMessage = 256 << 10

// Close codes of our own (RFC 6455 leaves 4000 to 4999 to applications).
const (
	closeRevoked = 4001
	closeBroken  = 4002
)

// serveWebSocket attaches over a WebSocket; FramesType tells the messages. The
// origin was checked by httpguard.
func (m *Manager) serveWebSocket(w http.ResponseWriter, r *http.Request, c call) error {
	from, err := after(r)
	if err != nil {
		return err
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return fault.New(fault.Invalid, "websocket_expected", "this route takes WebSockets only").Do("use attach or events for plain HTTP")
	}
	s, err := m.Attach(r.Context(), c.g.Tenant, c.id, from)
	if err != nil {
		return err
	}
	defer s.Close()
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return nil // answered by Accept
	}
	defer func() { _ = conn.CloseNow() }()
	conn.SetReadLimit(maxMessage)
	ctx, stop := context.WithCancel(r.Context())
	defer stop()

	var mu sync.Mutex // one writer at a time
	write := func(b []byte) error {
		if len(b) == 0 {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.Limits.WriteTimeout)
		defer cancel()
		return conn.Write(wctx, websocket.MessageBinary, b)
	}
	// Ending a read's context drops the connection: a revocation must not do that
	// before it has said why.
	reading, drop := context.WithCancel(context.WithoutCancel(ctx))
	defer drop()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer stop() // the client is gone
		m.serveRequests(ctx, reading, conn, c, write)
	})
	err = m.copyEvents(ctx, s, binaryEncoder{}, write)
	switch why := context.Cause(c.g.Context()); {
	case err == nil:
		_ = conn.Close(websocket.StatusNormalClosure, "the session has ended")
	case fault.IsCode(why, errRevoked.Code):
		_ = conn.Close(closeRevoked, "the token was revoked")
	default:
		_ = conn.Close(closeBroken, "interrupted: attach again after your last event")
	}
	stop()
	drop()
	_ = conn.CloseNow()
	wg.Wait()
	return nil
}

// serveRequests does what the client asks, in order, until it goes.
func (m *Manager) serveRequests(ctx, reading context.Context, conn *websocket.Conn, c call, write func([]byte) error) {
	for {
		kind, msg, err := conn.Read(reading)
		if err != nil {
			return
		}
		var reply *StdinReply
		err = errBadMessage
		if kind == websocket.MessageBinary && len(msg) > 0 {
			reply, err = m.request(ctx, c, msg[0], msg[1:])
		}
		var out []byte
		switch {
		case err != nil:
			out = appendFrame(nil, frameProblem, journal.ID{}, problemJSON(fault.Of(err)))
		case reply != nil:
			b, err := json.Marshal(reply)
			if err != nil {
				return // two plain fields: cannot happen
			}
			out = appendFrame(nil, frameAccepted, journal.ID{}, b)
		}
		if err := write(out); err != nil {
			return
		}
	}
}

var errBadMessage = fault.New(fault.Invalid, "invalid_message", "the message is not a request").Do("send binary messages as documented for " + FramesType)

func (m *Manager) request(ctx context.Context, c call, kind byte, body []byte) (*StdinReply, error) {
	switch kind {
	case requestStdin:
		if len(body) < 8 {
			return nil, errBadMessage
		}
		at := binary.BigEndian.Uint64(body)
		offset := &at
		switch {
		case at == math.MaxUint64:
			offset = nil
		case at > math.MaxInt64:
			return nil, errBadMessage
		}
		r, err := m.Stdin(ctx, c.g.Tenant, c.id, offset, bytes.NewReader(body[8:]))
		return &r, err
	case requestCloseStdin:
		r, err := m.CloseStdin(ctx, c.g.Tenant, c.id)
		return &r, err
	case requestSignal:
		name, tree := strings.CutPrefix(string(body), "+")
		return nil, m.Signal(ctx, c.g.Tenant, c.id, name, tree)
	case requestResize:
		if len(body) != 4 {
			return nil, errBadMessage
		}
		return nil, m.Resize(ctx, c.g.Tenant, c.id, guestapi.Size{Rows: binary.BigEndian.Uint16(body), Cols: binary.BigEndian.Uint16(body[2:])})
	}
	return nil, errBadMessage
}
