"""Speeds that software reaches on chips, from their nameplates and from fitted constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from meshwright.catalog.hardware import Cluster, Level
from meshwright.plan.cost.collectives import Link, Network

Values = Mapping[str, float]


@dataclass(frozen=True)
class Rates:
    """Speeds that are reached and costs that are paid; each one value, or one per candidate.

    `*_flops` are FLOP/s, `memory_bytes_s` bytes/s of streaming kernels, `*_s` seconds.
    `product_moves` is how often a matrix product moves its operands through memory beyond what
    hides behind arithmetic. `moves` scales the bytes of element-wise kernels: 1 where each
    input is read once and each output written once. `kernel_s` is the gap between two kernels,
    `host_layer_s` what a host needs to start those of a layer's forward; a rank is never faster
    than its host. `*_hidden` are shares of a collective that compute can hide, `contention` what
    hiding one second of it costs.
    """

    product_flops: ArrayLike
    expert_flops: ArrayLike
    head_flops: ArrayLike
    attention_flops: ArrayLike
    memory_bytes_s: ArrayLike
    product_moves: ArrayLike
    moves: ArrayLike
    score_bytes: ArrayLike
    quantise_bytes: ArrayLike
    loss_bytes: ArrayLike
    kernel_s: ArrayLike
    host_layer_s: ArrayLike
    host_moe_s: ArrayLike
    host_jitter: ArrayLike
    host_norm: ArrayLike
    merges: ArrayLike
    gathers: ArrayLike
    gradient_bytes: ArrayLike
    gather_bytes: ArrayLike
    bucket_params: ArrayLike
    bucket_per_rank: ArrayLike
    optimizer_bytes: ArrayLike
    step_s: ArrayLike
    straggling: ArrayLike
    tp_hidden: ArrayLike
    cp_hidden: ArrayLike
    ep_hidden: ArrayLike
    dp_hidden: ArrayLike
    shard_hidden: ArrayLike
    hop_hidden: ArrayLike
    hop_whole: ArrayLike
    contention: ArrayLike
    network: Network

    @classmethod
    def gather(cls, every: Sequence[Self], which: ArrayLike) -> Self:
        """Rates of as many candidates: number `which[i]` of `every` for candidate i. All have as
        many levels in their network."""
        index = np.asarray(which)

        def column(values: list[Any]) -> Any:
            return np.array(values, float)[index]

        plain = [field.name for field in fields(cls) if field.name != "network"]
        links = [
            Link(*(column([getattr(level, f.name) for level in levels]) for f in fields(Link)))
            for levels in zip(*(one.network.links for one in every), strict=True)
        ]
        columns = {name: column([getattr(one, name) for one in every]) for name in plain}
        return cls(**columns, network=Network(tuple(links)))


@dataclass(frozen=True)
class Machine:
    """What the nameplates say of a cluster's chip and of its network, innermost level first."""

    chip: str
    peak_flops: Mapping[str, float]
    memory_bytes_s: float
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """The nameplates of `cluster`."""
        chip = cluster.chip
        return cls(chip.name, chip.peak_flops, chip.memory_bandwidth_bytes_s, cluster.levels)


@dataclass(frozen=True)
class Software:
    """What a framework can do, as far as it changes time.

    `style` is how far kernels are fused (eager, fused, te, compiled, xla, neuron), `attention` its
    kernel (unfused, flash1, flash: FlashAttention 2, te: cuDNN and FlashAttention 3). `merges`:
    a token travels once to each node that has experts for it, `gathers`: to all ranks of experts.
    `whole_hops`: every rank of a tp group sends all of an activation to the next stage, not its
    slice.
    """

    style: str
    attention: str = "te"
    fused_loss: bool = True
    tp_overlap: bool = False
    dp_overlap: bool = True
    pp_overlap: bool = True
    ep_overlap: bool = False
    whole_hops: bool = False
    merges: bool = True
    gathers: bool = False
    gradient_bytes: float = 4.0
    gather_bytes: float = 2.0
    bucket_params: float = 40e6
    bucket_per_rank: float = 1e6


NETWORK_LEVELS = 3  # no network of the catalogue has more; shallower ones repeat their last


@dataclass(frozen=True)
class _Lookup:
    """Values by name and chip or style; one without its own takes that of what it is `like`, or of
    `any`."""

    values: Values
    like: Mapping[str, str]

    def __call__(self, name: str, key: str) -> float:
        own = f"{name}.{key}"
        if own in self.values:
            return self.values[own]
        return self(name, self.like[key]) if key in self.like else self.values[f"{name}.any"]


def rates(
    values: Values, like: Mapping[str, str], machine: Machine, software: Software, precision: str
) -> Rates:
    """Speeds of `software` on `machine`. A precision that the chip lacks runs as bf16."""
    get, style = _Lookup(values, like), software.style
    return Rates(
        **_chip_rates(values, get, machine, software, precision),
        **_hidden(values, get, software),
        moves=get("moves", style),
        score_bytes=values["score_bytes"] if software.attention == "unfused" else 0.0,
        loss_bytes=values["loss_bytes.fused" if software.fused_loss else "loss_bytes.eager"],
        kernel_s=values["kernel_s"],
        host_layer_s=get("host_layer_s", style),
        host_moe_s=get("host_moe_s", style),
        host_jitter=values["host_jitter"],
        host_norm=values["host_norm"],
        merges=float(software.merges),
        gathers=float(software.gathers),
        gradient_bytes=software.gradient_bytes,
        gather_bytes=software.gather_bytes,
        bucket_params=software.bucket_params,
        bucket_per_rank=software.bucket_per_rank,
        optimizer_bytes=values["optimizer_bytes"],
        step_s=get("step_s", style),
        straggling=values["straggling"],
        network=_network(values, machine, get("link", machine.chip)),
    )


def _chip_rates(
    values: Values, get: _Lookup, machine: Machine, software: Software, precision: str
) -> dict[str, float]:
    """What depends on the chip and on the precision of products."""
    chip, peak16 = machine.chip, machine.peak_flops["bf16"]
    low = precision in ("fp8", "fp4") and precision in machine.peak_flops
    name = {"fp8": "product8", "fp4": "product4"}[precision] if low else "product"
    reached = machine.peak_flops.get(precision, peak16) * get(name, chip)
    return {
        "product_flops": reached,
        "expert_flops": reached * get("grouped", software.style),
        "head_flops": peak16 * get("product", chip),
        "attention_flops": peak16 * get(f"attention.{software.attention}", chip),
        "memory_bytes_s": machine.memory_bytes_s * values["memory"],
        "product_moves": get("product_moves", chip),
        "quantise_bytes": values["quantise_bytes"] if low else 0.0,
    }


def _hidden(values: Values, get: _Lookup, software: Software) -> dict[str, float]:
    """What runs beside compute, and what that costs."""
    tensor = "tp_hidden.overlap" if software.tp_overlap else "tp_hidden.plain"
    return {
        "tp_hidden": values[tensor],
        "cp_hidden": values["cp_hidden"],
        "ep_hidden": values["ep_hidden"] if software.ep_overlap else 0.0,
        "dp_hidden": values["dp_hidden"] if software.dp_overlap else 0.0,
        "shard_hidden": get("shard_hidden", software.style),
        "hop_hidden": values["hop_hidden"] if software.pp_overlap else 0.0,
        "hop_whole": float(software.whole_hops),
        "contention": values["contention"],
    }


def _network(values: Values, machine: Machine, link: float) -> Network:
    """The levels of `machine` at the speed that collectives reach: `link` of the innermost one's
    nameplate, `network` of those outside."""
    levels = [*machine.levels, *[machine.levels[-1]] * NETWORK_LEVELS][:NETWORK_LEVELS]
    return Network(
        tuple(
            Link(
                size=level.size,
                bandwidth_bytes_s=level.bandwidth_bytes_s
                * (link if level is machine.levels[0] else values["network"]),
                latency_s=level.latency_s * values["latency"],
            )
            for level in levels
        )
    )
