"""What `combinations.py` refuses about experts: where they can live, and what may move them."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from meshwright.base.errors import ConfigError
from meshwright.plan.layout import Layout, expert_lanes

if TYPE_CHECKING:
    from meshwright.plan.job import Job

_NEED_EXPERTS = (("ep", 1), ("etp", 1), ("expert_replicas", 0), ("rebalance_above", 0))


def check_experts(job: Job) -> None:
    """Refuse what cannot run, naming both options and the way out. Raises ConfigError."""
    if job.model.n_experts:
        _check_widths(job)
        _check_places(job)
        _check_moves(job.layout)
        _check_copies(job.layout)
        return
    for key, plain in _NEED_EXPERTS:
        value = getattr(job.layout, key)
        if value != plain:
            raise ConfigError(
                f"layout.{key}",
                value,
                f"needs experts, but model.n_experts = 0; leave {key} out or set n_experts",
            )


def _check_widths(job: Job) -> None:
    model, layout = job.model, job.layout
    if layout.etp not in (1, layout.tp):
        raise ConfigError(
            "layout.etp",
            layout.etp,
            f"takes the ranks of layout.tp = {layout.tp}: all or none; set etp = {layout.tp} or 1",
        )
    if model.expert_ffn_hidden % layout.etp:
        raise ConfigError(
            "layout.etp",
            layout.etp,
            f"does not divide model.expert_ffn_hidden = {model.expert_ffn_hidden}; set etp = 1",
        )
    if layout.tp > 1 and layout.etp == 1 and not layout.sp:
        raise ConfigError(
            "layout.sp",
            layout.sp,
            f"with layout.tp = {layout.tp} and etp = 1 each rank routes its own slice of the "
            f"sequence; set sp = true or etp = {layout.tp}",
        )


def _check_places(job: Job) -> None:
    model, layout = job.model, job.layout
    lanes = expert_lanes(layout)
    ranks = layout.dp_replicate * lanes
    if ranks % layout.ep or (lanes % layout.ep and layout.ep % lanes):
        fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and gcd(n, lanes) in (n, lanes)]
        axes = "dp_replicate x dp_shard x cp" + ("" if layout.etp == layout.tp else " x tp")
        raise ConfigError(
            "layout.ep",
            layout.ep,
            f"cannot be cut out of the {ranks} ranks of a stage that share experts "
            f"(layout.{axes}); it takes {', '.join(map(str, fits))}",
        )
    if (model.n_experts + layout.expert_replicas) % layout.ep:
        places = f"model.n_experts = {model.n_experts}"
        if layout.expert_replicas:
            places += f" and layout.expert_replicas = {layout.expert_replicas} together"
        raise ConfigError(
            "layout.ep",
            layout.ep,
            f"does not divide {places}; it takes "
            f"{divisor_words(model.n_experts + layout.expert_replicas)}",
        )


def _check_moves(layout: Layout) -> None:
    above = layout.rebalance_above
    if above == 0:
        return
    if not above >= 1:
        raise ConfigError(
            "layout.rebalance_above",
            above,
            "is a max / mean, which is never below 1; use 1.2, say, or 0 for never",
        )
    if layout.ep == 1:
        raise ConfigError(
            "layout.rebalance_above",
            above,
            "moves experts among ranks, but layout.ep = 1; raise ep or leave rebalance_above out",
        )
    if layout.offload in ("optimizer", "both"):
        raise ConfigError(
            "layout.rebalance_above",
            above,
            f"sends masters and moments from chip to chip, but layout.offload = {layout.offload!r} "
            "keeps them on the host; leave rebalance_above out, or set offload = 'activations' or "
            "'none'",
        )


def _check_copies(layout: Layout) -> None:
    if layout.expert_replicas and not layout.rebalance_above:
        raise ConfigError(
            "layout.expert_replicas",
            layout.expert_replicas,
            "is for experts that turn out hot, but layout.rebalance_above = 0 never looks; "
            "set rebalance_above = 1.2, say, or leave expert_replicas out",
        )
    if layout.rebalance_above and layout.grad_compression in ("fp8", "int8"):
        raise ConfigError(
            "layout.rebalance_above",
            layout.rebalance_above,
            f"and layout.grad_compression = {layout.grad_compression!r} contradict: its "
            "rounding depends on where an expert lies; set grad_compression = 'bf16' or "
            "'none', or leave rebalance_above out",
        )


def divisor_words(size: int) -> str:
    """The divisors of `size` up to 64, as text."""
    return ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
