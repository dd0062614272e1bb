-- +goose Up
CREATE TABLE node_machines (
    id              TEXT PRIMARY KEY,
    tenant          TEXT    NOT NULL,
    generation      INTEGER NOT NULL,
    desired         TEXT    NOT NULL,
    target          TEXT    NOT NULL,
    state           TEXT    NOT NULL,
    template_digest TEXT    NOT NULL,
    resources       TEXT    NOT NULL,
    policy          TEXT    NOT NULL,
    sealed_env      BLOB,
    deadline        INTEGER NOT NULL,
    made            INTEGER NOT NULL,
    boot_id         TEXT    NOT NULL,
    down            INTEGER NOT NULL,
    cause           TEXT    NOT NULL,
    reason          TEXT    NOT NULL,
    problem         TEXT,
    converged       INTEGER NOT NULL,
    steps           TEXT    NOT NULL,
    since           INTEGER NOT NULL,
    activity        INTEGER NOT NULL,
    created         INTEGER NOT NULL
) STRICT;

CREATE TABLE node_outcomes (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT    NOT NULL,
    tenant     TEXT    NOT NULL,
    generation INTEGER NOT NULL,
    state      TEXT    NOT NULL,
    trigger    TEXT    NOT NULL,
    problem    TEXT,
    at         INTEGER NOT NULL
) STRICT;
CREATE INDEX node_outcomes_id ON node_outcomes (id);

CREATE TABLE node_tombstones (
    id         TEXT PRIMARY KEY,
    tenant     TEXT    NOT NULL,
    generation INTEGER NOT NULL,
    deleted    INTEGER NOT NULL
) STRICT;
CREATE INDEX node_tombstones_deleted ON node_tombstones (deleted);

CREATE TABLE node_audit (
    seq    INTEGER PRIMARY KEY,
    chain  TEXT NOT NULL,
    tenant TEXT NOT NULL,
    entry  TEXT NOT NULL,
    prev   BLOB NOT NULL,
    hash   BLOB NOT NULL
) STRICT;
CREATE INDEX node_audit_tenant ON node_audit (tenant, seq);

-- +goose Down
DROP TABLE node_audit;
DROP TABLE node_tombstones;
DROP TABLE node_outcomes;
DROP TABLE node_machines;
