-- +goose Up
CREATE TABLE session_sessions (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    id             TEXT    NOT NULL UNIQUE,
    tenant         TEXT    NOT NULL,
    sandbox        TEXT    NOT NULL,
    principal      TEXT    NOT NULL,
    request        TEXT    NOT NULL DEFAULT '',
    idempotency    BLOB,             -- keyed hash of the key; the key itself is not kept
    body_hash      BLOB,             -- keyed hash of the caller's hash of the body
    state          TEXT    NOT NULL CHECK (state IN ('created', 'starting', 'running', 'exited', 'lost', 'expired')),
    epoch          INTEGER NOT NULL DEFAULT 1,
    command        BLOB    NOT NULL, -- sealed JSON
    data_key       BLOB    NOT NULL, -- sealed key of the journal
    guest_boot     TEXT    NOT NULL DEFAULT '',
    host_boot      TEXT    NOT NULL DEFAULT '',
    created_at     INTEGER NOT NULL, -- Unix microseconds, as all times here
    started_at     INTEGER,
    ended_at       INTEGER,
    paused_at      INTEGER,
    paused_micros  INTEGER NOT NULL DEFAULT 0,
    pid            INTEGER NOT NULL DEFAULT 0,
    stdin_offset   INTEGER NOT NULL DEFAULT 0,
    last_offset    INTEGER NOT NULL DEFAULT 0,
    exit           BLOB              -- sealed JSON
) STRICT;
CREATE UNIQUE INDEX session_idempotency ON session_sessions (tenant, principal, idempotency) WHERE idempotency IS NOT NULL;
CREATE INDEX session_of_sandbox ON session_sessions (tenant, sandbox, seq);
CREATE INDEX session_created ON session_sessions (created_at) WHERE state = 'created';
CREATE INDEX session_open ON session_sessions (sandbox) WHERE state IN ('starting', 'running');
CREATE INDEX session_ended ON session_sessions (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE session_tokens (
    id         TEXT    NOT NULL PRIMARY KEY,
    kind       TEXT    NOT NULL CHECK (kind IN ('attach', 'data')),
    hash       BLOB    NOT NULL UNIQUE,
    tenant     TEXT    NOT NULL,
    sandbox    TEXT    NOT NULL,
    session    TEXT,
    principal  TEXT    NOT NULL,
    scopes     TEXT    NOT NULL DEFAULT '',
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT;
CREATE INDEX session_tokens_of_session ON session_tokens (session) WHERE session IS NOT NULL;
CREATE INDEX session_tokens_of_sandbox ON session_tokens (sandbox);
CREATE INDEX session_tokens_of_principal ON session_tokens (principal);
CREATE INDEX session_tokens_expiry ON session_tokens (expires_at);

-- +goose Down
DROP TABLE session_tokens;
DROP TABLE session_sessions;
