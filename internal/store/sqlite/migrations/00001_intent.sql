-- +goose Up
-- Times are microseconds since 1970 in UTC; NULL is "not set". doc is the row's
-- JSON; the other columns are copies that queries and constraints need.

CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL
);

CREATE TABLE tenants (
    name       TEXT PRIMARY KEY,
    created_at BIGINT NOT NULL
);

CREATE TABLE sandboxes (
    id         TEXT PRIMARY KEY,
    tenant     TEXT NOT NULL REFERENCES tenants (name),
    name_hash  BLOB,           -- sha256 of the name: names may be any text of any length
    observed   TEXT NOT NULL,
    generation BIGINT NOT NULL,
    converged  BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,
    deleted_at BIGINT,
    revision   BIGINT NOT NULL,
    doc        TEXT NOT NULL
);
CREATE UNIQUE INDEX sandboxes_living_name ON sandboxes (tenant, name_hash) WHERE deleted_at IS NULL AND name_hash IS NOT NULL;
CREATE INDEX sandboxes_list         ON sandboxes (tenant, created_at, id);
CREATE INDEX sandboxes_list_living  ON sandboxes (tenant, created_at, id) WHERE deleted_at IS NULL;
CREATE INDEX sandboxes_state        ON sandboxes (tenant, observed, created_at, id);
CREATE INDEX sandboxes_state_living ON sandboxes (tenant, observed, created_at, id) WHERE deleted_at IS NULL;
CREATE INDEX sandboxes_living       ON sandboxes (id) WHERE deleted_at IS NULL;
CREATE INDEX sandboxes_counts       ON sandboxes (observed) WHERE deleted_at IS NULL;
CREATE INDEX sandboxes_unsettled    ON sandboxes (updated_at, id) WHERE generation > converged;
CREATE INDEX sandboxes_tombstones   ON sandboxes (deleted_at) WHERE deleted_at IS NOT NULL;

-- One row per metadata pair; pair is a hash of key and value.
CREATE TABLE labels (
    sandbox    TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    tenant     TEXT NOT NULL,
    pair       BLOB NOT NULL,
    living     SMALLINT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (sandbox, pair)
);
CREATE INDEX labels_list        ON labels (tenant, pair, created_at, sandbox);
CREATE INDEX labels_list_living ON labels (tenant, pair, created_at, sandbox) WHERE living = 1;

CREATE TABLE operations (
    id          TEXT PRIMARY KEY,
    tenant      TEXT NOT NULL REFERENCES tenants (name),
    sandbox     TEXT NOT NULL,
    final       SMALLINT NOT NULL,
    created_at  BIGINT NOT NULL,
    updated_at  BIGINT NOT NULL,
    deadline_at BIGINT,
    doc         TEXT NOT NULL
);
CREATE INDEX operations_list     ON operations (tenant, created_at, id);
CREATE INDEX operations_sandbox  ON operations (tenant, sandbox, created_at, id);
CREATE INDEX operations_open     ON operations (tenant, sandbox, created_at, id) WHERE final = 0;
CREATE INDEX operations_deadline ON operations (deadline_at, id) WHERE final = 0;
CREATE INDEX operations_final    ON operations (updated_at) WHERE final = 1;

-- digest is a hash of (principal, key, method, route).
CREATE TABLE idempotency (
    tenant     TEXT NOT NULL REFERENCES tenants (name),
    digest     BLOB NOT NULL,
    created_at BIGINT NOT NULL,
    doc        TEXT NOT NULL,
    PRIMARY KEY (tenant, digest)
);
CREATE INDEX idempotency_age ON idempotency (created_at);

CREATE TABLE keys (
    id           TEXT PRIMARY KEY,
    tenant       TEXT NOT NULL REFERENCES tenants (name),
    hash         BLOB NOT NULL,
    created_at   BIGINT NOT NULL,
    revoked_at   BIGINT,
    last_used_at BIGINT,
    doc          TEXT NOT NULL
);
CREATE UNIQUE INDEX keys_hash ON keys (hash);
CREATE INDEX keys_list ON keys (tenant, created_at, id);

CREATE TABLE audit (
    seq    BIGINT PRIMARY KEY,
    tenant TEXT NOT NULL,
    entry  TEXT NOT NULL,
    prev   BLOB NOT NULL,
    hash   BLOB NOT NULL
);
CREATE INDEX audit_list ON audit (tenant, seq);

-- One row: the end of the chain. Whoever appends holds it until commit.
CREATE TABLE audit_head (
    chain TEXT PRIMARY KEY,
    seq   BIGINT NOT NULL,
    hash  BLOB NOT NULL
);

-- +goose Down
DROP TABLE audit_head;
DROP TABLE audit;
DROP TABLE keys;
DROP TABLE idempotency;
DROP TABLE operations;
DROP TABLE labels;
DROP TABLE sandboxes;
DROP TABLE tenants;
DROP TABLE meta;
