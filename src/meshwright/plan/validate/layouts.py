"""The layout, chip and precision of a published run, from the columns of its row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.plan.cost.candidates import (
    CORE,
    DUALPIPE,
    FULL,
    GPIPE,
    INTERLEAVED,
    NONE,
    ONE_F_ONE_B,
    ZB1P,
    ZB2P,
    ZBV,
    Candidates,
)  # fmt: skip
from meshwright.plan.cost.workload import Precision

if TYPE_CHECKING:
    from meshwright.plan.validate.rows import Source

Row = Mapping[str, str]

# Clusters of published runs that the catalogue does not have.
CLUSTERS = Path(__file__).with_name("clusters.toml")

LOW: tuple[Precision, ...] = ("fp4", "fp8", "fp16", "fp32")

# What sources call a chip, and the cluster of the catalogue (or of CLUSTERS) that has it, where the
# source says no more of its network. The first pattern that fits counts.
CHIPS = (
    (r"h100.*(96|95)gb", "h100-hbm2e"),
    (r"^h100", "h100"),
    (r"^h200", "h200"),
    (r"^h800", "h800"),
    (r"^a800", "a800"),
    (r"^a100.*pcie", "a100-pcie"),
    (r"^a100.*40gb", "a100-40"),
    (r"^a100", "a100"),
    (r"^v100", "v100"),
    (r"^gb300", "gb300"),
    (r"^gb200", "gb200"),
    (r"^b300", "b300"),
    (r"^b200", "b200"),
    (r"^mi355", "mi355x"),
    (r"^mi325", "mi325x"),
    (r"^mi300", "mi300x"),
    (r"^tpu ?v4", "tpu-v4"),
    (r"^tpu ?v5p", "tpu-v5p"),
    (r"^tpu ?v5e", "tpu-v5e"),
    (r"^tpu ?v6e", "tpu-v6e"),
    (r"^trainium1", "trn1"),
    (r"^trainium2", "trn2"),
    (r"^gaudi ?2", "gaudi2"),
    (r"^gaudi ?3", "gaudi3"),
)


def cluster_of(row: Row, source: Source) -> str:
    """The cluster that `row` ran on. Raises ValueError on a chip that nobody describes."""
    name = row["chip"]
    for pattern, cluster in CHIPS:
        if re.search(pattern, name.lower()):
            return source.clusters.get(cluster, cluster)
    raise ValueError(f"unknown chip {name or '(none)'}")


def precision_of(text: str, assumed: list[str]) -> Precision:
    """The precision of matrix products."""
    lowered = text.lower()
    for name in LOW:
        if name in lowered and "bf16+fp32" not in lowered:
            return name
    if "bf16" not in lowered:
        assumed.append("bf16")
    return "bf16"


def _axis(row: Row, name: str, default: int = 1) -> int:
    text = row.get(name, "")
    return int(float(text)) if text else default


def layout_of(row: Row, chips: int, batch: int, source: Source, assumed: list[str]) -> Candidates:
    """The layout of `row`. Raises ValueError with the reason where it is not stated or does not
    add up."""
    tp, pp = _axis(row, "tp", 0), _axis(row, "pp", 0)
    sharding = row.get("sharding", "").lower()
    if "offload" in sharding or "lora" in sharding:
        raise ValueError(f"no cost model for {row['sharding']}")
    sharded = bool(re.search(r"zero-?3|fsdp|hsdp", sharding))
    if (not tp or not pp) and not (sharded and chips):
        raise ValueError("layout is not stated (tp, pp)")
    tp, pp, cp = tp or 1, pp or 1, _axis(row, "cp")
    if chips % (tp * pp * cp):
        raise ValueError(f"tp {tp} x pp {pp} x cp {cp} does not divide {chips} chips")
    dp = chips // (tp * pp * cp)
    if row.get("dp") and _axis(row, "dp") != dp:
        raise ValueError(f"dp {row['dp']} x tp x pp x cp is not {chips} chips")
    micro = _micro_batch(row, batch, dp, assumed)
    replicate, shard, zero = _data_axes(row, dp, sharding)
    schedule, vpp = _schedule(row, pp, source, assumed)
    layers = _axis(row, "layers", 0)
    if vpp > 1 and pp * vpp > layers + 2:
        raise ValueError(f"pp {pp} x vpp {vpp} is more than {layers} layers")
    recompute, share = _recompute(row, source, assumed)
    ep = _axis(row, "ep")
    etp = _axis(row, "etp", 1 if ep > 1 else tp)
    return Candidates.of(
        1, dp_replicate=replicate, dp_shard=shard, tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep,
        etp=etp, zero=zero, micro_batch=micro, schedule=schedule, recompute=recompute,
        recompute_share=share, sp=_sequence_parallel(row, source, assumed),
        ulysses="ulysses" in sharding or "cp comm a2a" in row.get("notes", "").lower(),
    )  # fmt: skip


def _micro_batch(row: Row, batch: int, dp: int, assumed: list[str]) -> int:
    if batch % dp:
        raise ValueError(f"global batch {batch} is not a multiple of dp {dp}")
    micro = _axis(row, "micro_batch", 0)
    if not micro:
        if batch // dp == 1 or row.get("pp") not in ("", "1"):
            micro = 1
            assumed.append("micro_batch 1")
        else:
            raise ValueError("micro_batch is not stated")
    if batch // dp % micro:
        raise ValueError(f"micro_batch {micro} does not divide {batch // dp} sequences of a rank")
    return micro


def _data_axes(row: Row, dp: int, sharding: str) -> tuple[int, int, int]:
    """(Replicas, shards, ZeRO stage)."""
    zero = 3 if re.search(r"zero-?3|fsdp|hsdp", sharding) else 2 if "zero2" in sharding else 1
    if sharding in ("none", "ddp") or (dp == 1 and zero < 3):
        return dp, 1, 0
    # "FSDP2" alone is PyTorch's second FSDP, not a group of two; "FSDP 2" or a degree is a size.
    shards = re.search(r"(?:shard group|degree|fsdp(?!2\b)(?: group)?) ?(\d+)", sharding)
    noted = re.search(
        r"FSDP (?:group )?(\d+) x DP|zero1=(\d+)|HSDP \d+ x (\d+)", row.get("notes", "")
    )
    group = dp
    if shards and int(shards[1]) > 0:
        group = int(shards[1])
    elif noted:
        group = int(next(cell for cell in noted.groups() if cell))
    elif "hsdp" in sharding:
        group = 8
    group = group if 0 < group <= dp and dp % group == 0 else dp
    return dp // group, group, zero


def _schedule(row: Row, pp: int, source: Source, assumed: list[str]) -> tuple[int, int]:
    """(Code of the schedule, chunks of a rank)."""
    text, vpp = row.get("schedule", "").lower(), _axis(row, "vpp")
    if pp == 1:
        return ONE_F_ONE_B, 1
    for word, code in (
        ("2p", ZB2P),
        ("1p", ZB1P),
        ("zbv", ZBV),
        ("zb-v", ZBV),
        ("dualpipe", DUALPIPE),
    ):
        if word in text:
            return code, 1
    if "gpipe" in text:
        return GPIPE, 1
    layers = _axis(row, "layers", 0)
    if source.finest_chunks and not row.get("vpp") and layers % pp == 0:
        vpp = layers // pp
        assumed.append(f"vpp {vpp}")
    return (INTERLEAVED, vpp) if vpp > 1 else (ONE_F_ONE_B, 1)


def _recompute(row: Row, source: Source, assumed: list[str]) -> tuple[int, float]:
    text = row.get("recompute", "").lower()
    if not text:
        text = source.recompute or "none"
        assumed.append(f"recompute {text}")
    if text == "full":
        return FULL, 1.0
    if text == "minimal":
        return FULL, 0.5  # XLA keeps the inputs of the larger products
    if text == "none":
        return NONE, 1.0
    if source.framework in ("fsdp", "torchtitan", "kempnerforge"):
        return FULL, _recomputed_share(row)
    if "moe" in text.split(":")[-1].replace(" ", "").split(","):
        return FULL, 0.6
    return CORE, 1.0 if text == "selective" or "core_attn" in text else 0.0


def _recomputed_share(row: Row) -> float:
    """Share of the blocks that run again where a source says "selective": from the FLOPs that it
    counts with and without them (a ratio, not a speed), else every other block."""
    found = re.search(r"HFU ([\d.]+)%", row.get("notes", ""))
    if not found or not row.get("mfu_pct"):
        return 0.5
    more = float(found[1]) / float(row["mfu_pct"]) - 1.0
    return min(max(3.0 * more, 0.0), 1.0)


def _sequence_parallel(row: Row, source: Source, assumed: list[str]) -> bool:
    text = row.get("sequence_parallel", "")
    if text in ("yes", "no"):
        return text == "yes"
    if _axis(row, "tp") > 1:
        assumed.append("sequence parallelism")
    return source.framework not in ("megatron-2021", "megatron-deepspeed", "deepspeed")
