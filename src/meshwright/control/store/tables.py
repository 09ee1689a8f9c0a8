"""The tables of the service. Times are seconds of the wall clock (`*_s`), documents are JSON.

`migrations/` makes them; a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

# SQLite counts up only what it calls INTEGER.
_SEQ = BigInteger().with_variant(Integer, "sqlite")
_ID = String(64)

clusters = Table(
    "clusters",
    metadata,
    Column("seq", _SEQ, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("name", String(63), nullable=False, unique=True),
    Column("spec", JSON, nullable=False),
    Column("chips_per_node", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("message", Text, nullable=False),
    Column("figures", JSON, nullable=False),  # of its last self-test
    Column("created_s", Float, nullable=False),
    Column("updated_s", Float, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("cluster_id", _ID, ForeignKey("clusters.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("status", String(16), nullable=False),
    Column("health", String(16), nullable=False),
    Column("chips", JSON, nullable=False),  # health of each
    Column("links", JSON, nullable=False),  # health of each chip's
    Column("address", String(256), nullable=False),
    Column("firmware", String(64), nullable=False),
    Column("software", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Column("drained", Integer, nullable=False),  # 1: asked for by a person
    Column("replaced_s", Float),  # when the present machine came, if not with the cluster
    Column("seen_s", Float),  # when it was last seen
)

jobs = Table(
    "jobs",
    metadata,
    Column("seq", _SEQ, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("name", String(64), nullable=False),
    Column("cluster_id", _ID, nullable=False),
    Column("job", JSON, nullable=False),  # resolved job file
    Column("labels", JSON, nullable=False),
    Column("ranks", Integer, nullable=False),
    Column("spares", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("max_restarts", Integer, nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("message", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("restarts", Integer, nullable=False),
    Column("placement", JSON, nullable=False),  # [[node, chip], ...] ranks, then spares
    Column("handle", JSON),  # of the engine, for this attempt
    Column("events_read", BigInteger, nullable=False),  # bytes of events.jsonl in `events`
    Column("events_file", BigInteger),  # which file that was: one that begins anew is another
    Column("step", Integer, nullable=False),
    Column("loss", Float),
    Column("tokens_per_s", Float),
    Column("stop_asked_s", Float),
    Column("moving", Integer, nullable=False),  # 1: is to stop and be placed elsewhere
    Column("unknown_since_s", Float),
    Column("created_s", Float, nullable=False),
    Column("attempt_s", Float),  # when the present attempt was decided
    Column("running_s", Float),  # when all ranks were first seen ready
    Column("ended_s", Float),
    Index("jobs_by_cluster", "cluster_id", "status"),
)

operations = Table(
    "operations",
    metadata,
    Column("seq", _SEQ, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("cluster_id", _ID, nullable=False, index=True),
    Column("request", JSON, nullable=False),
    Column("status", String(16), nullable=False, index=True),
    Column("phase", String(32), nullable=False),
    Column("progress", Float, nullable=False),
    Column("error", Text, nullable=False),
    Column("figures", JSON, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("ended_s", Float),
)

operation_lines = Table(
    "operation_lines",
    metadata,
    Column("seq", _SEQ, primary_key=True, autoincrement=True),
    Column("operation_id", _ID, nullable=False, index=True),
    Column("ts", Float, nullable=False),
    Column("phase", String(32), nullable=False),
    Column("line", Text, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", _SEQ, primary_key=True, autoincrement=True),
    Column("ts", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("cluster_id", _ID),
    Column("job_id", _ID),
    Column("operation_id", _ID),
    Column("node", Integer),
    Column("chip", Integer),
    Column("data", JSON, nullable=False),
    Index("events_by_cluster", "cluster_id", "seq"),
    Index("events_by_job", "job_id", "seq"),
    Index("events_by_kind", "kind", "ts"),
    sqlite_autoincrement=True,  # a cursor must never meet a number again
)

faults = Table(
    "faults",
    metadata,
    Column("seq", _SEQ, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("cluster_id", _ID, nullable=False, index=True),
    Column("kind", String(32), nullable=False),
    Column("node", Integer, nullable=False),
    Column("chip", Integer),
    Column("severity", Float, nullable=False),
    Column("since_s", Float, nullable=False),
    Column("until_s", Float),
    Column("status", String(16), nullable=False),  # ASKED, ACTIVE, CLEARING, OVER, REFUSED
    Column("message", Text, nullable=False),
)

samples = Table(
    "samples",
    metadata,
    Column("cluster_id", _ID, primary_key=True),
    Column("grain_s", Integer, primary_key=True),  # 1, 60 or 3600
    Column("start_s", BigInteger, primary_key=True),
    Column("rows", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("samples_by_age", "grain_s", "start_s"),
)

requests = Table(
    "requests",
    metadata,
    Column("key", String(255), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("answer", JSON, nullable=False),
    Column("ts", Float, nullable=False, index=True),
)

leader = Table(
    "leader",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("holder", _ID, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("until_s", Float, nullable=False),
)

plans = Table(
    "plans",
    metadata,
    Column("seq", _SEQ, primary_key=True, autoincrement=True),
    Column("id", _ID, nullable=False, unique=True),
    Column("question", JSON, nullable=False),
    Column("plan", JSON, nullable=False),
    Column("created_s", Float, nullable=False),
)
