"""What a training framework keeps in memory and how it shares it out: data (`framework.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.base.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Framework:
    """Semantics of one framework. Bytes are per parameter or per element unless a name says more.

    States: `weight_bytes` is the copy that layers compute with, `gradient_bytes` what gradients are
    summed in, `bf16_gradient_copy_bytes` a second copy where gradients of a bf16 model are summed
    elsewhere, `master_bytes` the copy that the optimizer updates, `optimizer_scale` how much of
    fp32 moments is kept, `fp8_cache_bytes` what FP8 layers keep beside the weight. `*_sharded_from`
    is the ZeRO stage that shares a state out.

    Activations that wait for the backward: `gated_tensors` and `plain_tensors` are how many tensors
    as wide as the feed-forward half a token leaves in it, `attention_extra` how many as wide as
    queries and keys beside q, k, v and the output, `norm_tensors` how many as wide as the model
    each half leaves (its input, its normed input), `expert_outputs` how many an expert's token
    leaves beside its input; `gathered_kept`: the input gathered over tp is kept too. `fp8_inputs`:
    FP8 products keep their input in one byte. `dropout`: masks are kept even if no dropout is set.

    Transients: `logit_bytes` of an element of the logits at their peak, `logit_compiled_bytes` if
    the loss is compiled and not in place, `logit_saved_bytes` of one that waits for its backward
    behind another; `scores_saved_bytes` and `scores_peak_bytes` of an attention score where
    attention is not flash; `wgrads`: weights of each shape stand once more as a 2-byte gradient
    that nobody reads, 1 or 0; `whole_weights` and `whole_gradients` are the layers that are whole
    at once though ZeRO shards them, `reduce_bytes` what a whole gradient takes, `bucket_bytes` the
    buckets of collectives outside the gradients.

    The vocabulary is padded to a multiple of `vocab_multiple` x tp and shared out by tp if
    `vocab_split`; layers are shared out evenly over stages if `even_stages`, else by cost.

    Outside tensors: `floor_bytes` of small tensors and work spaces; `slack` what the allocator
    reserves beyond what is allocated, as a share (median), `slack_sigma` its spread (of the
    logarithm of reserved over allocated); `context_bytes` of the driver; `communicator_bytes` of
    every group of ranks. `sigma` is the spread of the logarithm of measured over predicted.

    `overlaps_*`: whether collectives of that axis run beside compute. `gathers_tokens`: experts get
    their tokens by an all-gather, not by an all-to-all. `origin` says where the numbers come from,
    `fit` by how much the fitted ones miss.
    """

    name: str
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    bf16_gradient_copy_bytes: float = 0.0
    master_bytes: float = 4.0
    optimizer_scale: float = 1.0
    fp8_cache_bytes: float = 0.0
    optimizer_sharded_from: int = 1
    gradients_sharded_from: int = 2
    weights_sharded_from: int = 3
    gated_tensors: float = 3.0
    plain_tensors: float = 2.0
    attention_extra: float = 0.0
    norm_tensors: float = 2.0
    gathered_kept: bool = False
    expert_outputs: float = 0.0
    fp8_inputs: bool = False
    dropout: bool = False
    logit_bytes: float = 6.0
    logit_compiled_bytes: float = 10.0
    logit_saved_bytes: float = 4.0
    scores_saved_bytes: float = 2.0
    scores_peak_bytes: float = 4.0
    wgrads: float = 0.0
    whole_weights: float = 2.0
    whole_gradients: float = 1.0
    reduce_bytes: float = 4.0
    bucket_bytes: float = 0.0
    vocab_multiple: int = 128
    vocab_split: bool = True
    even_stages: bool = True
    floor_bytes: float = 0.3e9
    slack: float = 0.035
    slack_sigma: float = 0.06
    context_bytes: float = 0.5e9
    communicator_bytes: float = 0.1e9
    sigma: float = 0.15
    overlaps_tp: bool = False
    overlaps_dp: bool = True
    overlaps_pp: bool = True
    gathers_tokens: bool = False
    origin: str = "defaults of the memory model"
    fit: Mapping[str, float] = field(default_factory=dict, hash=False)


def framework(name: str) -> Framework:
    """The framework called `name`. Raises ConfigError on an unknown one."""
    if name not in _table():
        hint = did_you_mean(name, names()) or f"; known: {', '.join(names())}"
        raise ConfigError("framework", name, "no such framework" + hint)
    entry = _entry(name)
    if unknown := entry.keys() - {item.name for item in fields(Framework)}:
        raise ConfigError("framework", name, f"framework.toml has unknown keys {sorted(unknown)}")
    return Framework(name=name, **entry)


def names() -> list[str]:
    """All frameworks, in the order of the file."""
    return list(_table())


def _entry(name: str) -> dict[str, Any]:
    """The keys of `name` over those of the one that it is `like`; what was fitted is its own."""
    own = dict(_table()[name])
    base = _entry(own.pop("like")) if "like" in own else {}
    return {**{key: value for key, value in base.items() if key != "fit"}, **own}


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = files("meshwright.plan.cost").joinpath("framework.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
