"""Layouts in one word each way: `tp8,pp16,vpp8,dp8,zero1,mbs1,full`."""

from __future__ import annotations

import re
from typing import Any, get_args

from meshwright.base.config import parse
from meshwright.base.errors import ConfigError, did_you_mean
from meshwright.plan.layout import Layout, Schedule

_SIZES = {
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "vpp": "vpp",
    "ep": "ep",
    "etp": "etp",
    "zero": "zero",
    "mbs": "micro_batch",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "fsdp": "dp_shard",
    "dp": "dp",
}
_WORDS: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in get_args(Schedule)},
    "none": {"recompute": "none"},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "attention": {"recompute": "selective", "recompute_parts": ["attention"]},
    "mlp": {"recompute": "selective", "recompute_parts": ["mlp"]},
    "ulysses": {"cp_method": "ulysses"},
    "ring": {"cp_method": "ring"},
    "nosp": {"sp": False},
}
KNOWN = "tp pp vpp cp ep etp dp replicate shard fsdp zero mbs, each with a number, and " + " ".join(
    _WORDS
)


def parse_layout(text: str, chips: int, precision: str = "bf16") -> Layout:
    """The layout that `text` says, as in `tp8,pp4,cp2,zero1,mbs1,full`.

    `dp` (left out: what is left of `chips`) is shared out by ZeRO unless zero0; without a stage,
    `fsdp` is ZeRO-3 and all else ZeRO-1. Raises ConfigError on a word that it does not know.
    """
    keys: dict[str, Any] = {}
    words = [word for word in re.split(r"[,\s]+", text.strip().lower()) if word]
    for word in words:
        meaning = _meaning(word, text)
        if keys.keys() & meaning.keys():
            raise ConfigError("layout", text, f"{word!r} contradicts or repeats a word before it")
        keys |= meaning
    fixed = keys.get("tp", 1) * keys.get("pp", 1) * keys.get("cp", 1)
    fsdp = any(word.startswith("fsdp") for word in words)
    if keys.get("vpp", 1) > 1:
        keys.setdefault("schedule", "interleaved")
    _data_axes(keys, chips, fixed, text, 3 if fsdp else 1)
    layout = parse(Layout, {**keys, "precision": layout_precision(precision)}, "layout")
    if layout.world != chips:
        fix = f"its axes multiply to {layout.world} chips, not {chips}; mend them or leave dp out"
        raise ConfigError("layout", text, fix)
    return layout


def _meaning(word: str, text: str) -> dict[str, Any]:
    if word in _WORDS:
        return _WORDS[word]
    match = re.fullmatch(r"([a-z]+)[=:]?(\d+)", word)
    if match and match[1] in _SIZES:
        return {_SIZES[match[1]]: int(match[2])}
    hint = did_you_mean(match[1] if match else word, [*_SIZES, *_WORDS]) or f"; known: {KNOWN}"
    raise ConfigError("layout", text, f"{word!r} means nothing here" + hint)


def _data_axes(keys: dict[str, Any], chips: int, fixed: int, text: str, stage: int) -> None:
    """Fill in dp_replicate, dp_shard and zero."""
    both = "dp" in keys and keys.keys() & {"dp_replicate", "dp_shard"}
    if both or chips % max(fixed, 1):
        fix = "names dp twice" if both else f"tp x pp x cp = {fixed} does not divide {chips} chips"
        raise ConfigError("layout", text, fix)
    dp = keys.pop("dp", chips // max(fixed, 1))
    cp = keys.get("cp", 1)
    if "dp_shard" in keys:
        keys.setdefault("dp_replicate", max(dp // max(keys["dp_shard"], 1), 1))
    elif keys.get("zero", 1) == 0:
        keys.setdefault("dp_replicate", dp)
    else:
        keys["dp_shard"] = dp // max(keys.get("dp_replicate", 1), 1) or 1
    if keys.get("dp_shard", 1) * cp > 1:
        keys.setdefault("zero", stage)
    else:
        keys["zero"] = 0 if keys.get("zero", 0) in (0, 1) else keys["zero"]


def layout_precision(precision: str) -> str:
    """The precision of a layout: fp4 is one of frameworks that we cannot name there."""
    return "fp8" if precision == "fp4" else precision


def write_layout(layout: Layout) -> str:
    """`layout` as `parse_layout` reads it."""
    words = [f"tp{layout.tp}", f"pp{layout.pp}"]
    words += [f"vpp{layout.vpp}"] if layout.vpp > 1 else []
    words += [f"cp{layout.cp}"] if layout.cp > 1 else []
    words += ["ulysses"] if layout.cp > 1 and layout.cp_method == "ulysses" else []
    words += [f"ep{layout.ep}"] if layout.ep > 1 else []
    words += [f"etp{layout.etp}"] if layout.etp > 1 else []
    if layout.dp_replicate > 1 and layout.zero_stage:
        words += [f"replicate{layout.dp_replicate}", f"shard{layout.dp_shard}"]
    else:
        words.append(f"dp{layout.dp}")
    words += [f"zero{layout.zero_stage}", f"mbs{layout.micro_batch}"]
    plain = "1f1b" if layout.vpp == 1 else "interleaved"
    words += [layout.schedule] if layout.schedule != plain else []
    parts = layout.recompute_parts if layout.recompute == "selective" else []
    words += ["full" if len(set(parts)) == 2 else parts[0]] if parts else []
    words += ["full"] if layout.recompute == "full" else []
    words += ["nosp"] if layout.tp > 1 and not layout.sp else []
    return ",".join(words)
