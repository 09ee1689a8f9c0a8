"""Seconds of one layer, and of the head, on one rank for one micro-batch: matrix products by their
shape, attention, and everything else by the bytes it moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.plan.cost.candidates import (
    ATTENTION,
    CORE,
    FULL,
    MLP,
    Candidates,
)
from meshwright.plan.cost.rates import Rates
from meshwright.plan.cost.shapes import Shapes

Floats = NDArray[np.float64]
# Tensor cores want heads of a multiple of 8 channels; bloom-101 and bloom-104 (heads of 108) take
# 1.4 times as long as their neighbours, which is 4 times in their scores.
UNALIGNED = 4.0


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward and of a backward (recomputation not included); `weight_s` is the part
    of the backward that makes weight gradients."""

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.weight_s + other.weight_s,
        )

    def times(self, factor: ArrayLike) -> Passes:
        """As often as `factor` says."""
        times = np.asarray(factor, float)
        return Passes(self.forward_s * times, self.backward_s * times, self.weight_s * times)


def product(
    rates: Rates, rows: ArrayLike, out: ArrayLike, inner: ArrayLike, **options: ArrayLike
) -> Passes:
    """A (rows x inner) by (inner x out) product and its two in the backward.

    Seconds = 2 m n k / speed + moved bytes / bandwidth x `product_moves` + the gap of a kernel: an
    additive roofline, in which small or thin matrices are slow because they have few FLOPs a byte.
    `speed` overrides the FLOP/s, `size` the bytes of an operand, `weights` counts how many matrices
    the rows are split over (grouped products read all of them).
    """
    m, n, k = (np.asarray(size, float) for size in (rows, out, inner))
    speed = np.asarray(options.get("speed", rates.product_flops), float)
    size = np.asarray(options.get("size", 2.0), float)
    weights = np.asarray(options.get("weights", 1.0), float)
    arithmetic = 2.0 * m * n * k / speed
    moved = size * (m * k + weights * k * n) + 2.0 * m * n
    moving = moved * np.asarray(rates.product_moves) / np.asarray(rates.memory_bytes_s)
    exists = (n > 0) & (k > 0)
    once = np.where(exists, arithmetic + moving + np.asarray(rates.kernel_s), 0.0)
    return Passes(once, 2.0 * once, once)


def streaming(rates: Rates, moved_bytes: ArrayLike, backward: float = 2.0) -> Passes:
    """Element-wise kernels that move so many bytes in the forward, `backward` times in the other
    direction."""
    seconds = np.asarray(moved_bytes, float) / np.asarray(rates.memory_bytes_s)
    return Passes(seconds, backward * seconds, np.zeros_like(seconds))


def rank_tokens(shapes: Shapes, c: Candidates) -> Floats:
    """Tokens of a micro-batch on one rank; the ranks of a tp group share them."""
    return np.asarray(c.micro_batch * np.asarray(shapes.seq_len) / c.cp, float)


def attention_half(shapes: Shapes, rates: Rates, c: Candidates) -> tuple[Passes, Passes]:
    """Projections and element-wise work of attention, and apart from it scores and their mixing."""
    tokens, size = rank_tokens(shapes, c), np.asarray(shapes.operand_bytes)
    hidden = np.asarray(shapes.hidden, float)
    inner = np.asarray(shapes.attention_out) / c.tp
    work = product(rates, tokens, np.asarray(shapes.qkv) / c.tp, hidden, size=size)
    work += product(rates, tokens, shapes.latent_down, hidden, size=size)
    work += product(
        rates, tokens, np.asarray(shapes.latent_q_out) / c.tp, shapes.latent_q, size=size
    )
    work += product(
        rates, tokens, np.asarray(shapes.latent_kv_out) / c.tp, shapes.latent_kv, size=size
    )
    work += product(rates, tokens, hidden, inner, size=size)
    whole = hidden / np.where(c.sequence_parallel, c.tp, 1)
    channels = 6.0 * whole + 2.0 * np.asarray(shapes.qkv) / c.tp
    work += streaming(rates, 2.0 * np.asarray(rates.moves) * tokens * channels)
    work += streaming(rates, np.asarray(rates.quantise_bytes) * tokens * (hidden + inner))
    return work, _scores(shapes, rates, c)


def _scores(shapes: Shapes, rates: Rates, c: Candidates) -> Passes:
    """Scores and mixing: 2 FLOPs a channel and pair of tokens, 2.5 times that in the backward of a
    flash kernel, which makes the scores again (arXiv 2205.14135); without one, `score_bytes` for
    each score that goes through memory."""
    tokens, length = rank_tokens(shapes, c), np.asarray(shapes.seq_len, float)
    flops = (
        2.0 * tokens * length * np.asarray(shapes.scores) / c.tp * np.asarray(shapes.score_share)
    )
    head = np.asarray(shapes.scores) / np.asarray(shapes.heads) / 2.0
    aligned = np.mod(head, 8.0) == 0.0
    narrow = np.sqrt(np.minimum(head / 128.0, 1.0))
    slow = np.where(aligned, 1.0, UNALIGNED) / narrow
    forward = flops / np.asarray(rates.attention_flops) * slow
    stored = np.asarray(rates.score_bytes) * tokens * length * np.asarray(shapes.heads) / c.tp
    passing = stored / np.asarray(rates.memory_bytes_s)
    flash = np.asarray(rates.score_bytes) == 0
    backward = np.where(flash, 2.5, 2.0) * forward + 1.5 * passing
    return Passes(forward + passing, backward, np.zeros_like(backward))


def dense_half(shapes: Shapes, rates: Rates, c: Candidates) -> Passes:
    """The feed-forward half of a layer without experts."""
    return _feed_forward(shapes, rates, c, np.asarray(shapes.ffn, float) / c.tp)


def _feed_forward(shapes: Shapes, rates: Rates, c: Candidates, width: Floats) -> Passes:
    tokens, size = rank_tokens(shapes, c), np.asarray(shapes.operand_bytes)
    hidden, matrices = np.asarray(shapes.hidden, float), np.asarray(shapes.ffn_matrices, float)
    work = product(rates, tokens, (matrices - 1) * width, hidden, size=size)
    work += product(rates, tokens, hidden, width, size=size)
    whole = hidden / np.where(c.sequence_parallel, c.tp, 1)
    channels = np.where(width > 0, 6.0 * whole, 0.0) + matrices * width
    work += streaming(rates, 2.0 * np.asarray(rates.moves) * tokens * channels)
    quantised = np.where(width > 0, hidden + width, 0.0)
    return work + streaming(rates, np.asarray(rates.quantise_bytes) * tokens * quantised)


def routed_half(shapes: Shapes, rates: Rates, c: Candidates) -> Passes:
    """The feed-forward half of a layer with experts: router, permutations, grouped products of the
    fullest rank, shared experts."""
    tokens, hidden = rank_tokens(shapes, c), np.asarray(shapes.hidden, float)
    width = np.asarray(shapes.expert_ffn, float) / c.etp
    matrices, size = np.asarray(shapes.ffn_matrices, float), np.asarray(shapes.operand_bytes)
    local = np.maximum(np.asarray(shapes.experts, float) / c.ep, 1.0)
    lanes = np.where(c.etp == c.tp, 1, c.tp)
    routed = tokens / lanes * np.asarray(shapes.top_k) * np.asarray(shapes.imbalance)
    grouped = {"speed": rates.expert_flops, "size": size, "weights": local}
    work = product(rates, routed, (matrices - 1) * width, hidden, **grouped)
    work += product(rates, routed, hidden, width, **grouped)
    work += product(rates, tokens / lanes, shapes.experts, hidden)
    moved = 8.0 * hidden + matrices * width
    work += streaming(rates, 2.0 * np.asarray(rates.moves) * routed * moved)
    work += streaming(rates, np.asarray(rates.quantise_bytes) * routed * (hidden + width))
    return work + _feed_forward(shapes, rates, c, np.asarray(shapes.shared_ffn, float) / c.tp)


@dataclass(frozen=True)
class LayerTimes:
    """One layer: its passes, and what recomputation adds to the backward."""

    passes: Passes
    again_s: Floats


def layer_times(shapes: Shapes, rates: Rates, c: Candidates) -> LayerTimes:
    """The mean layer of a model: dense and routed ones as often as each occurs."""
    half, scores = attention_half(shapes, rates, c)
    share = np.asarray(shapes.moe_layers, float) / np.asarray(shapes.layers, float)
    feed = dense_half(shapes, rates, c).times(1.0 - share)
    if np.any(share > 0):
        feed += routed_half(shapes, rates, c).times(share)
    again = np.where(c.recompute == CORE, scores.forward_s, 0.0)
    both = half.forward_s + scores.forward_s
    again = np.where((c.recompute == ATTENTION) | (c.recompute == FULL), both, again)
    again = again + np.where((c.recompute == MLP) | (c.recompute == FULL), feed.forward_s, 0.0)
    return LayerTimes(half + scores + feed, again * c.recompute_share)


def host_seconds(shapes: Shapes, rates: Rates, c: Candidates) -> tuple[Floats, Floats]:
    """What a host needs to start the kernels of a forward of a layer's attention half, and of its
    feed-forward half. Ranks of a tp group wait for the slowest of their hosts at every collective.
    """
    share = np.asarray(shapes.moe_layers, float) / np.asarray(shapes.layers, float)
    half = np.asarray(rates.host_layer_s) / 2.0
    routed = np.maximum(np.asarray(rates.host_moe_s) - half, 0.0)
    jitter = 1.0 + np.asarray(rates.host_jitter) * (c.tp - 1) / 7.0
    feed = half * (1.0 - share) + routed * share
    return np.asarray(half * jitter), np.asarray(feed * jitter)


def beside_host(chip_s: Floats, host_s: Floats, norm: ArrayLike) -> Floats:
    """Seconds of a pass that the chip needs `chip_s` for and its host `host_s`: hardly more than
    the longer one where they differ much, but where they are alike some kernels wait for the host
    and others for the chip (a p-norm; vTrain's table of small layers)."""
    power = np.asarray(norm, float)
    larger = np.maximum(chip_s, host_s)
    smaller = np.minimum(chip_s, host_s)
    ratio = smaller / np.maximum(larger, 1e-12)
    return np.asarray(larger * (1.0 + ratio**power) ** (1.0 / power))


def head_times(shapes: Shapes, rates: Rates, c: Candidates) -> Passes:
    """Final norm, logits and loss of a micro-batch."""
    tokens, width = rank_tokens(shapes, c), np.asarray(shapes.vocab, float) / c.tp
    work = product(rates, tokens, width, shapes.hidden, speed=rates.head_flops)
    return work + streaming(rates, np.asarray(rates.loss_bytes) * tokens * width, backward=1.0)


def embedding_times(shapes: Shapes, rates: Rates, c: Candidates) -> Passes:
    """Look-up, and the sum of its gradients (see LOOKUP_FLOPS_PER_CHANNEL of plan/stages.py)."""
    tokens = rank_tokens(shapes, c)
    return streaming(rates, 4.0 * tokens * np.asarray(shapes.hidden, float), backward=1.5)
