"""Axes that talk to nobody and write down what would have been said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor

from meshwright.plan.layout import Layout
from meshwright.train.comm import Axis, Clock, Collective, Pending
from meshwright.train.mesh import Mesh, build_mesh

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"]


@dataclass
class Traffic:
    """Collectives of one kind on one axis. `payload_bytes` counts whole buffers (of an all-gather
    its result), `wire_bytes` what leaves this rank by a ring, or pairwise in an exchange; of a
    receive both are what arrives."""

    ranks: int
    count: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0


@dataclass
class Ledger:
    """All traffic of a rank by (axis, kind). `seen` is told of every tensor
    that travels, and on which axis."""

    traffic: dict[tuple[str, Kind], Traffic] = field(default_factory=dict)
    seen: Callable[[str, Tensor], None] = lambda _axis, _tensor: None

    def add(self, axis: str, kind: Kind, size: int, payload: Tensor, *others: Tensor) -> None:
        """One collective of `kind` over `size` ranks of `axis`."""
        n_bytes = payload.numel() * payload.element_size()
        entry = self.traffic.setdefault((axis, kind), Traffic(size))
        entry.count += 1
        entry.payload_bytes += n_bytes
        entry.wire_bytes += n_bytes * wire_share(kind, size)
        for tensor in (payload, *others):
            self.seen(axis, tensor)


def wire_share(kind: Kind, size: int) -> float:
    """Bytes that leave a rank for each byte of payload: 2 (n-1)/n for a ring's all-reduce, (n-1)/n
    where each rank sends or passes on all but its own n-th part, 1 between two ranks."""
    if kind in ("send", "receive"):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (size - 1) / size


@dataclass
class _Held:
    """What a library's handle of a collective does besides: it keeps the buffers alive."""

    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        """Over at once; the buffers may go."""
        self.tensors = ()


@dataclass(frozen=True)
class RecordingAxis(Axis):
    """An axis without peers: buffers stay as they are."""

    name: str
    ledger: Ledger

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """As that of `Axis`, whose exchange goes by its own name here."""
        scattering = replace(self, ledger=_Renamed(self.ledger))
        return Axis.start_reduce_scatter(scattering, out, x)

    def send(self, x: Tensor, index: int) -> Pending:
        """To nobody."""
        del index
        self.ledger.add(self.name, "send", self.size, x)
        return self._pending(x)

    def receive(self, out: Tensor, index: int) -> Pending:
        """From nobody."""
        del index
        self.ledger.add(self.name, "receive", self.size, out)
        return self._pending(out)

    def _start(self, collective: Collective, *args: Any) -> dist.Work | None:
        if self.size == 1:
            return None
        first, *rest = (x for x in args if isinstance(x, Tensor))
        kind = _kind(collective)
        if kind == "all_to_all":  # of what this rank sends, not of what it gets
            first, *rest = *rest, first
        self.ledger.add(self.name, kind, self.size, first, *rest)
        return cast(dist.Work, _Held((first, *rest)))

    def _pending(self, x: Tensor) -> Pending:
        return Pending(cast(dist.Work, _Held((x,))), self.clock)


class _Renamed(Ledger):
    """A ledger in which an exchange is the first half of a reduce-scatter."""

    def __init__(self, whole: Ledger) -> None:
        super().__init__(whole.traffic, whole.seen)

    def add(self, axis: str, kind: Kind, size: int, payload: Tensor, *others: Tensor) -> None:
        del kind
        super().add(axis, "reduce_scatter", size, payload, *others)


def _kind(collective: Collective) -> Kind:
    function = collective.func if isinstance(collective, partial) else collective
    if function is dist.all_reduce:
        return "all_reduce"
    return "all_to_all" if function is dist.all_to_all_single else "all_gather"


def recording_mesh(layout: Layout, rank: int, ledger: Ledger) -> Mesh:
    """The mesh of `rank` with axes that write into `ledger`, each by the name of its use."""
    mesh = build_mesh(layout, rank, Clock(), new_group=lambda _: None)

    def named(axis: Axis, name: str) -> Axis:
        return RecordingAxis(axis.ranks, axis.index, None, axis.clock, name, ledger)

    uses = ("tp", "cp", "shards", "replicas", "sequence", "lanes", "down", "up", "ends", "world")
    named_axes: dict[str, Any] = {use: named(getattr(mesh, use), use) for use in uses}
    experts = mesh.experts
    return replace(
        mesh,
        **named_axes,
        levels=(named(mesh.levels[0], "replicas inside"), named(mesh.levels[1], "replicas across")),
        experts=replace(
            experts,
            ep=named(experts.ep, "ep"),
            shards=named(experts.shards, "expert shards"),
            replicas=named(experts.replicas, "expert replicas"),
        ),
    )
