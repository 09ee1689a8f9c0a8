"""The wire format of a run: what a worker is told, what it says, and what a run directory holds.

The trainer writes these messages, the conductor stores them, the report and the live view read
them. It is all that those parts share.

A worker writes one JSON object per line, at most `MAX_LINE_BYTES` long so that lines of several
workers on one pipe never mix (POSIX guarantees it up to PIPE_BUF = 4096). The conductor sorts them:
`METRICS` go to `metrics.jsonl`, `PROGRESS` is kept in memory only (who is at which step), all other
kinds go to `events.jsonl` with `seq`, `run` and `incarnation` added.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_LINE_BYTES = 4096


class Kind(StrEnum):
    """Kinds of message. `*` marks those that the conductor itself writes."""

    RUN_STARTED = "run_started"  # * world, layout, resumed_from (step) or null
    RANK_READY = "rank_ready"  # rank; groups are joined, the first step is about to begin
    PROGRESS = "progress"  # rank, step: this rank begins step `step` (memory only)
    METRICS = "metrics"  # one per step, keys of `Metrics` (goes to metrics.jsonl)
    RANK_PROFILE = "rank_profile"  # keys of `RankProfile`: where this rank's time went
    EXPERT_LOAD = "expert_load"  # keys of `ExpertLoad`: who got how many tokens in one layer
    EXPERTS_MOVED = "experts_moved"  # step, layer, moved (experts), before, after (chip_imbalance)
    STEP_SKIPPED = "step_skipped"  # step, loss_scale (the next): fp16 gradients overflowed
    BAD_SAMPLE = "bad_sample"  # step, sample, what (is wrong with it); of the rank that read it
    BAD_SAMPLES = "bad_samples"  # step, bad (left out of this step), total (of the run so far)
    EVALUATED = "evaluated"  # step, loss, tokens, bigram_loss, unigram_loss
    # step, path, commit (id), save_s (to the commit), blocked_s (of training); of the first rank
    # bytes and stored_bytes; changes (commits of single steps since the last one told of);
    # verified_step and verified_age_s of the newest commit that was read again, as a rehearsal
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    CHECKPOINT_FAILED = "checkpoint_failed"  # step, error; training goes on
    RANK_LOST = "rank_lost"  # * rank, step, pid, signal or exit_code, log
    RUN_INTERRUPTED = "run_interrupted"  # * step: stopped on request, state saved
    RUN_FINISHED = "run_finished"  # * step, wall_s
    RUN_FAILED = "run_failed"  # * error
    MODEL_EXPORTED = "model_exported"  # * path
    MEMBER_UP = "member_up"  # member, addresses: its listener is open (memory only)
    SPARE_READY = "spare_ready"  # member: it could take over now
    EXECUTING = "executing"  # member, epoch, step: runs again after a new table (memory only)
    HELD = "held"  # member, epoch, step, error: has saved for another layout (memory only)
    TAKEOVER_DONE = "takeover_done"  # * epoch, ranks, cause, detected_s, takeover_s, step
    RESIZED = "resized"  # * epoch, step, before, after (labels of layouts), resize_s
    LINK = "link"  # member, peers: figures of its streams over a network (memory only)
    # kind_of, bytes (held for others); of a step: seconds, wire_bytes and check_seconds
    REDUNDANCY = "redundancy"
    HANG = "hang"  # * rank, member, step, phase, stalled_s
    STRAGGLER = "straggler"  # * rank, member, busy_ratio (to the median of its like)
    CORRUPT = "corrupt"  # step, what, suspects (ranks), members, certain, redo (see agreement.py)
    QUARANTINED = "quarantined"  # * node, member and rank (null: the whole node), step, cause
    NODE_BACK = "node_back"  # * node: its agent is there again after it was lost
    FALSE_ALARM = "false_alarm"  # * rank, member, step, what: a verdict that proved wrong
    ALERT = "alert"  # * what, node: seen once, nothing was done about it
    ADVICE = "advice"  # advice (one line); of the conductor, or of a rank, which names itself


@dataclass(frozen=True)
class Metrics:
    """One line of `metrics.jsonl`; times over the step as the reporting rank saw them."""

    step: int
    loss: float
    tokens: int  # valid target tokens of the global batch
    tokens_per_s: float  # over all ranks
    step_time_s: float
    mfu: float
    grad_norm: float  # before clipping, over all parameters
    lr: float
    data_wait_s: float
    comm_wait_s: float
    predicted_step_time_s: float | None
    router_loss: float = 0.0  # what the routers of a mixture of experts add to the loss


@dataclass(frozen=True)
class RankProfile:
    """Where the time of one rank went in `steps` steps that end with `step`; sums, in seconds."""

    rank: int
    step: int
    steps: int
    wall_s: float
    compute_s: float
    comm_wait_s: float
    data_wait_s: float
    optimizer_s: float
    grad_wire_bytes: float = 0.0  # sent by compressed reductions of gradients
    grad_plain_bytes: float = 0.0  # what they would have sent in fp32


@dataclass(frozen=True)
class ExpertLoad:
    """Tokens of one step by expert in one layer; imbalances are max / mean.

    `chip_imbalance` is that of the chips that share the experts as they are placed; `counts` is
    left out (empty) where there are more than 256 experts.
    """

    step: int
    layer: int
    imbalance: float
    chip_imbalance: float
    hottest: int  # the expert with the most tokens
    counts: tuple[int, ...]


@dataclass(frozen=True)
class WorkerContext:
    """What the launcher tells a worker it has forked."""

    rank: int
    world: int
    store_port: int  # TCP port on loopback of the rendezvous store
    store_fd: int | None  # the listening socket, on rank 0 only: it hosts the store
    event_fd: int  # where messages go
    args: dict[str, Any] = field(default_factory=dict)  # for the entry point; plain JSON
    member: int = -1  # number of this process, once and for ever; -1: as its rank
    orders_fd: int | None = None  # where tables come from; None: the run does not survive a loss
    pulse_fd: int | None = None  # memory shared with the agent (base/pulse.py)
    secret: str = ""  # of the run: peers prove that they know it
    hosts: tuple[str, ...] = ()  # addresses of this machine on networks that peers may be on


@dataclass(frozen=True)
class EventWriter:
    """Writes messages of one worker to its pipe."""

    fd: int
    rank: int

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Write one message. Raises ValueError if it is longer than `MAX_LINE_BYTES`."""
        message = {"ts": time.time(), "kind": kind, "rank": self.rank, **fields}
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"message {kind} has {len(line)} bytes, limit {MAX_LINE_BYTES}")
        os.write(self.fd, line)
