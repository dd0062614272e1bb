package httpapi

import (
	"context"
	"net/http"

	"github.com/space-platform/space/api/spaceapi"
	"github.com/space-platform/space/internal/control"
	"github.com/space-platform/space/internal/session"
	"github.com/space-platform/space/internal/store"
)

// SessionRef is a session's id in a path.
type SessionRef struct {
	ID string `path:"id" maxLength:"64"`
}

func (s *server) attachOut(id string, t session.Token) spaceapi.Attach {
	return spaceapi.Attach{URL: s.DataURL + "/d/sessions/" + id, Token: t.Token, TokenID: t.ID, ExpiresAt: t.ExpiresAt}
}

func (s *server) sessions() {
	const tag = "sessions"
	type createIn struct {
		Ref
		Mutation
		Body spaceapi.CreateSession
	}
	route(s, "create-session", "POST", "/v1/sandboxes/{id}/sessions", tag, "Authorise one command; nothing runs until it is attached", http.StatusCreated,
		func(ctx context.Context, in *createIn) (*body[spaceapi.SessionCreated], error) {
			req, err := in.request(ctx, in.Body)
			if err != nil {
				return nil, err
			}
			se, tok, err := s.Control.CreateSession(ctx, principal(ctx), req, in.ID, sessionIn(in.Body))
			if err != nil {
				return nil, err
			}
			return &body[spaceapi.SessionCreated]{spaceapi.SessionCreated{Session: sessionOut(se), Attach: s.attachOut(string(se.ID), tok)}}, nil
		})

	type listIn struct {
		Ref
		Page
	}
	route(s, "list-sessions", "GET", "/v1/sandboxes/{id}/sessions", tag, "List the sessions of a sandbox, oldest first", http.StatusOK,
		func(ctx context.Context, in *listIn) (*body[spaceapi.List[spaceapi.Session]], error) {
			p, err := s.Control.ListSessions(ctx, principal(ctx), in.Ref.ID, in.Cursor, in.Limit)
			return answer(p, err, func(p store.Page[session.Session]) spaceapi.List[spaceapi.Session] { return listOut(p, sessionOut) })
		})

	route(s, "get-session", "GET", "/v1/sessions/{id}", tag, "Get a session", http.StatusOK,
		func(ctx context.Context, in *SessionRef) (*body[spaceapi.Session], error) {
			se, err := s.Control.GetSession(ctx, principal(ctx), in.ID)
			return answer(se, err, sessionOut)
		})

	type sessionMutation struct {
		SessionRef
		Mutation
	}
	route(s, "kill-session", "DELETE", "/v1/sessions/{id}", tag, "End the command's whole process tree", http.StatusOK,
		func(ctx context.Context, in *sessionMutation) (*body[spaceapi.Session], error) {
			req, err := in.request(ctx, nil)
			if err != nil {
				return nil, err
			}
			se, err := s.Control.KillSession(ctx, principal(ctx), req, in.ID)
			return answer(se, err, sessionOut)
		})

	type mintIn struct {
		SessionRef
		Mutation
		TTL int64 `query:"ttl_seconds" minimum:"0" maximum:"86400"`
	}
	route(s, "mint-attach-token", "POST", "/v1/sessions/{id}/tokens", tag, "Make a new attach token", http.StatusCreated,
		func(ctx context.Context, in *mintIn) (*body[spaceapi.Attach], error) {
			req, err := in.request(ctx, nil)
			if err != nil {
				return nil, err
			}
			t, err := s.Control.MintAttachToken(ctx, principal(ctx), req, in.ID, secondsIn(in.TTL))
			return answer(t, err, func(t session.Token) spaceapi.Attach { return s.attachOut(in.ID, t) })
		})
	route(s, "revoke-attach-tokens", "DELETE", "/v1/sessions/{id}/tokens", tag, "Revoke all attach tokens and cut their streams", http.StatusNoContent,
		func(ctx context.Context, in *sessionMutation) (*struct{}, error) {
			req, err := in.request(ctx, nil)
			if err != nil {
				return nil, err
			}
			return &struct{}{}, s.Control.RevokeAttachTokens(ctx, principal(ctx), req, in.ID)
		})

	type execIn struct {
		Ref
		Mutation
		Body spaceapi.Exec
	}
	route(s, "exec", "POST", "/v1/sandboxes/{id}/exec", tag, "Run a command and wait for its whole result", http.StatusOK,
		func(ctx context.Context, in *execIn) (*body[spaceapi.ExecResult], error) {
			req, err := in.request(ctx, in.Body)
			if err != nil {
				return nil, err
			}
			cmd := commandIn(in.Body.Command)
			cmd.Stdin = len(in.Body.StdinB64) > 0
			r, err := s.Control.Exec(ctx, principal(ctx), req, in.ID, control.Exec{Command: cmd, StdinData: in.Body.StdinB64, MaxOutput: in.Body.MaxOutputBytes})
			return answer(r, err, func(r session.ExecResult) spaceapi.ExecResult {
				return spaceapi.ExecResult{
					SessionID: string(r.Session), Exit: exitOut(r.Exit), GapBytes: r.GapBytes,
					Stdout: outputOut(r.Stdout, r.StdoutTruncated), Stderr: outputOut(r.Stderr, r.StderrTruncated),
				}
			})
		})

	type tokenIn struct {
		Ref
		Mutation
		Body spaceapi.MintToken
	}
	route(s, "mint-data-token", "POST", "/v1/sandboxes/{id}/tokens", tag, "Make a data token for a sandbox", http.StatusCreated,
		func(ctx context.Context, in *tokenIn) (*body[spaceapi.Token], error) {
			req, err := in.request(ctx, in.Body)
			if err != nil {
				return nil, err
			}
			t, err := s.Control.MintDataToken(ctx, principal(ctx), req, in.ID, in.Body.Scopes, secondsIn(in.Body.TTLSeconds))
			return answer(t, err, func(t session.Token) spaceapi.Token {
				return spaceapi.Token{ID: t.ID, Token: t.Token, Scopes: t.Scopes, ExpiresAt: t.ExpiresAt, URL: s.DataURL}
			})
		})
	type revokeIn struct {
		Ref
		Mutation
	}
	route(s, "revoke-data-tokens", "DELETE", "/v1/sandboxes/{id}/tokens", tag, "Revoke all data tokens of a sandbox and cut their streams", http.StatusNoContent,
		func(ctx context.Context, in *revokeIn) (*struct{}, error) {
			req, err := in.request(ctx, nil)
			if err != nil {
				return nil, err
			}
			return &struct{}{}, s.Control.RevokeDataTokens(ctx, principal(ctx), req, in.ID)
		})
}
