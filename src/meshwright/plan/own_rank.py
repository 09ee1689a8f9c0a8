"""What one rank of our trainer is: sizes of its axes, what it has sent and computed so far."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from meshwright.models.spec import ModelSpec
from meshwright.plan.job import Job
from meshwright.plan.layout import Coordinates, Layout, coordinates, expert_grid
from meshwright.plan.own_tape import Block, Tape

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_UNDER_WAY = 2  # full gradients on their way; `train/parallel/accumulate.py`
Phase = Literal["forward", "backward", "recompute"]


@dataclass
class Sent:
    """Collectives of one kind on one axis; see `train/dryrun_axes.py`."""

    ranks: int
    count: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0


@dataclass
class Rank:
    """Sizes and counters of one rank. `phase` is the pass under way, `later` the weight gradients
    that are put off (key of the pass, what makes them)."""

    job: Job
    rank: int
    tape: Tape = field(default_factory=Tape)
    flops: Counter[str] = field(default_factory=Counter)
    sent: dict[tuple[str, str], Sent] = field(default_factory=dict)
    phase: Phase = "forward"
    key: object = None
    later: dict[object, list[Callable[[], None]]] = field(default_factory=dict)

    scatters: deque[tuple[tuple[Block, ...], Callable[[], None] | None]] = field(
        default_factory=deque
    )

    def __post_init__(self) -> None:
        layout = self.layout
        self.at: Coordinates = coordinates(layout, self.rank)
        self.size = BYTES[layout.precision]
        self.grad_size = BYTES[layout.grad_precision]
        self.sliced = layout.tp if layout.sequence_parallel else 1
        sharded = layout.zero_stage > 0
        lanes_tp = layout.tp if layout.tp > 1 and layout.etp != layout.tp else 1
        grid = expert_grid(layout)
        copies = layout.dp_shard * layout.cp
        self.axes = {
            "tp": layout.tp,
            "cp": layout.cp,
            "ep": layout.ep,
            "shards": copies if sharded else 1,
            "replicas": layout.dp_replicate * (1 if sharded else copies),
            "expert shards": grid.shards,
            "expert replicas": grid.replicas,
            "sequence": layout.cp * lanes_tp,
            "lanes": layout.dp * layout.cp * lanes_tp,
            "world": layout.world,
        }
        self.domain_replicas = layout.dp_replicate * (1 if sharded else layout.cp)
        self.ep_lane = self._lane() if self.spec.n_experts else (0, 0, 0)

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.job.model

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.job.layout

    def _lane(self) -> tuple[int, int, int]:
        """Place on the axes replicas, shards and ep of the experts."""
        layout, at = self.layout, self.at
        lanes_tp = 1 if layout.etp == layout.tp else layout.tp
        lane = (at.dp_replicate * layout.dp_shard + at.dp_shard) * layout.cp + at.cp
        lane = lane * lanes_tp + (at.tp if lanes_tp > 1 else 0)
        rest, ep = divmod(lane, layout.ep)
        replicas, shards = divmod(rest, expert_grid(layout).shards)
        return replicas, shards, ep

    def index(self, axis: str) -> int:
        """Place of this rank on `axis`, of those along which its shards are cut."""
        if self.axes[axis] == 1:
            return 0
        if axis == "expert shards":
            return self.ep_lane[1]
        return self.at.dp_shard * self.layout.cp + self.at.cp

    def say(self, axis: str, kind: str, n_bytes: int, *buffers: Block, size: int = 0) -> None:
        """One collective with `n_bytes` of payload, from and into `buffers`."""
        size = size or self.axes[axis]
        if size == 1:
            return
        entry = self.sent.setdefault((axis, kind), Sent(size))
        entry.count += 1
        entry.payload_bytes += n_bytes
        share = 1.0 if kind in ("send", "receive") else (size - 1) / size
        entry.wire_bytes += n_bytes * share * (2 if kind == "all_reduce" else 1)
        passing = axis in ("tp", "cp", "ep", "sequence")
        for block in buffers:
            if block.part in ("temporary", "travelling"):
                block.become("travelling" if passing else "communication")

    def count(self, flops: float) -> None:
        """Products of matrices in the phase under way."""
        self.flops[self.phase] += int(flops)

    def put_off(self, make: Callable[[], None]) -> None:
        """Queue a weight gradient for the pass under way."""
        self.later.setdefault(self.key, []).append(make)

    def flush(self, key: object) -> None:
        """Make the weight gradients of the pass `key`."""
        before = self.phase
        if before == "recompute":
            self.phase = "backward"
        for make in self.later.pop(key, ()):
            make()
        self.phase = before

    def overlap(self) -> None:
        """Weight gradients in the time of a collective."""
        if self.key is None:
            self.flush(None)

    def start_scatter(self, held: tuple[Block, ...], then: Callable[[], None] | None) -> None:
        """A full gradient is on its way, `held` with it; of two others at most."""
        self.scatters.append((held, then))
        while len(self.scatters) > _UNDER_WAY:
            self._end_scatter()

    def finish_scatters(self) -> None:
        """All have come."""
        while self.scatters:
            self._end_scatter()

    def _end_scatter(self) -> None:
        _, then = self.scatters.popleft()
        if then is not None:
            then()

    def new(self, n_bytes: float) -> Block:
        """A new temporary allocation."""
        return self.tape.block(int(n_bytes))

    def routed_rows(self, tokens: int) -> int:
        """Rows that `tokens` of this rank make for the experts."""
        spec, seq_len = self.spec, self.job.data.seq_len
        rows = tokens * spec.top_k
        if spec.capacity_factor:
            room = ceil(spec.capacity_factor * seq_len * spec.top_k / spec.n_experts)
            rows = min(rows, tokens * room * spec.n_experts // seq_len)
        return rows
