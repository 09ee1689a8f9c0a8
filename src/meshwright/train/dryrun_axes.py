"""Axes that talk to nobody and write down what would have been said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from meshwright.plan.layout import Layout
from meshwright.train.comm import Axis, Clock, Pending, Work
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
class RecordingGroup:
    """A group without peers: buffers stay as they are."""

    name: str
    size: int
    ledger: Ledger

    def all_reduce(self, x: Tensor, largest: bool = False) -> Work:
        """With nobody."""
        del largest
        return self._note("all_reduce", x)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """With nobody."""
        return self._note("all_gather", out, x)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: list[int] | None, in_rows: list[int] | None
    ) -> Work:
        """With nobody; what counts is what this rank sends, not what it gets."""
        del out_rows, in_rows
        return self._note("all_to_all", x, out)

    def send(self, x: Tensor, index: int) -> Work:
        """To nobody."""
        del index
        return self._note("send", x)

    def receive(self, out: Tensor, index: int) -> Work:
        """From nobody."""
        del index
        return self._note("receive", out)

    def _note(self, kind: Kind, *tensors: Tensor) -> Work:
        self.ledger.add(self.name, kind, self.size, *tensors)
        return _Held(tensors)


@dataclass(frozen=True)
class RecordingAxis(Axis):
    """An axis on a recording group."""

    group: RecordingGroup

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Pending:
        """As that of `Axis`, whose exchange goes by its own name here."""
        group = replace(self.group, ledger=_Renamed(self.group.ledger))
        return Axis.start_reduce_scatter(replace(self, group=group), out, x)


class _Renamed(Ledger):
    """A ledger in which an exchange is the first half of a reduce-scatter."""

    def __init__(self, whole: Ledger) -> None:
        super().__init__(whole.traffic, whole.seen)

    def add(self, axis: str, kind: Kind, size: int, payload: Tensor, *others: Tensor) -> None:
        del kind
        super().add(axis, "reduce_scatter", size, payload, *others)


def recording_mesh(layout: Layout, rank: int, ledger: Ledger) -> Mesh:
    """The mesh of `rank` with axes that write into `ledger`, each by the name of its use."""
    mesh = build_mesh(layout, rank, Clock(), new_group=lambda _: None)

    def named(axis: Axis, name: str) -> Axis:
        group = RecordingGroup(name, axis.size, ledger)
        return RecordingAxis(axis.ranks, axis.index, group, axis.clock)

    uses = ("tp", "cp", "shards", "replicas", "sequence", "lanes", "down", "up", "ends", "world")
    named_axes: dict[str, Any] = {use: named(getattr(mesh, use), use) for use in uses}
    experts = mesh.experts
    return replace(
        mesh,
        **named_axes,
        parts=named(mesh.parts, "tp"),
        levels=(named(mesh.levels[0], "replicas inside"), named(mesh.levels[1], "replicas across")),
        experts=replace(
            experts,
            ep=named(experts.ep, "ep"),
            shards=named(experts.shards, "expert shards"),
            replicas=named(experts.replicas, "expert replicas"),
        ),
    )
