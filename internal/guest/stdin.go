package guest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/space-platform/space/api/guestapi"
)

const (
	stdinWait    = 5 * time.Second
	maxStdinWait = time.Minute
)

// stdinAhead is the body of a refused offset: both shapes at once.
type stdinAhead struct {
	guestapi.StdinReply
	guestapi.Error
}

func (p *process) stdinReply() guestapi.StdinReply {
	p.mu.Lock()
	defer p.mu.Unlock()
	return guestapi.StdinReply{Accepted: p.stdinOffset, Closed: p.stdinClosed}
}

func (s *Server) handleStdin(w http.ResponseWriter, r *http.Request, p *process) error {
	offset, err := strconv.ParseUint(r.URL.Query().Get("offset"), 10, 63)
	if err != nil {
		return refuse(400, guestapi.CodeInvalid, "offset is not a number")
	}
	wait := stdinWait
	if q := r.URL.Query().Get("wait"); q != "" {
		if wait, err = time.ParseDuration(q); err != nil || wait < 0 || wait > maxStdinWait {
			return refuse(400, guestapi.CodeInvalid, "wait is not a duration up to %s", maxStdinWait)
		}
	}
	// The body is taken whole before anything is written: a caller that breaks
	// off leaves no half-known state, and the wait is for the process alone.
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, guestapi.MaxStdinChunk))
	if err != nil {
		var big *http.MaxBytesError
		if errors.As(err, &big) {
			return refuse(413, guestapi.CodeInvalid, "more than %d bytes", guestapi.MaxStdinChunk)
		}
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	if !p.lockStdin(ctx) {
		return reply(w, http.StatusOK, p.stdinReply())
	}
	defer func() { <-p.stdin }()
	at := p.stdinReply()
	if offset > at.Accepted {
		return reply(w, http.StatusConflict, stdinAhead{at, guestapi.Error{
			Code: guestapi.CodeStdinAhead, Message: "stdin is accepted up to " + strconv.FormatUint(at.Accepted, 10),
		}})
	}
	if !at.Closed {
		body = body[min(at.Accepted-offset, uint64(len(body))):]
		p.write(ctx, body)
	}
	return reply(w, http.StatusOK, p.stdinReply())
}

// write gives body to the process until it is through, ctx ends, or the process
// reads no more.
func (p *process) write(ctx context.Context, body []byte) {
	f := p.ends.stdin
	_ = f.SetWriteDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	if !p.running() {
		_ = f.SetWriteDeadline(time.Unix(1, 0))
	}
	for len(body) > 0 {
		n, err := f.Write(body[:min(len(body), readChunk)])
		p.mu.Lock()
		p.stdinOffset += uint64(n)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			p.stdinClosed = true
		}
		p.mu.Unlock()
		if err != nil {
			return
		}
		body = body[n:]
	}
}

// eot is what a terminal reads as the end of input at the start of a line.
const eot = "\x04"

func (s *Server) handleCloseStdin(w http.ResponseWriter, r *http.Request, p *process) error {
	ctx, cancel := context.WithTimeout(r.Context(), stdinWait)
	defer cancel()
	if !p.lockStdin(ctx) {
		return refuse(409, guestapi.CodeInvalid, "another stdin call is still waiting for the process")
	}
	defer func() { <-p.stdin }()
	if at := p.stdinReply(); !at.Closed {
		if p.ends.tty != nil {
			_ = p.ends.stdin.SetWriteDeadline(time.Now().Add(time.Second))
			_, _ = io.WriteString(p.ends.stdin, eot)
		} else {
			_ = p.ends.stdin.Close()
		}
		p.mu.Lock()
		p.stdinClosed = true
		p.mu.Unlock()
	}
	return reply(w, http.StatusOK, p.stdinReply())
}
