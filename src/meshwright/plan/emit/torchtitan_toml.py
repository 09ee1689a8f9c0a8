"""torchtitan up to 0.2.2, the last release that reads TOML; keys as in its job_config.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.plan.emit.abilities import Abilities, refuse
from meshwright.plan.emit.plan import Emitted, Plan
from meshwright.plan.emit.text import heading, toml, torchrun
from meshwright.plan.emit.torchtitan import LIMITED, WRITTEN, batch, flavor_of, notes, parallelism
from meshwright.plan.emit.torchtitan import check_combinations as check_both

ABILITIES = Abilities(
    framework="torchtitan-toml",
    title="torchtitan 0.2",
    written=WRITTEN,
    limited={
        **LIMITED,
        "sp": (True,),
        "fp8_scaling": ("tensor", "row", "block"),
    },
    left_out={},
)

_FLOAT8 = {"tensor": "tensorwise", "row": "rowwise"}


def write(plan: Plan) -> Emitted:
    """`train.toml`."""
    check_both(plan)
    module, flavor = flavor_of(plan.spec)
    if module == "qwen3" and plan.layout.pp > 1:
        fix = "torchtitan 0.2 has no pipeline for qwen3; set pp = 1, or write it for torchtitan 0.3"
        raise refuse("pp", plan.layout.pp, fix)
    if plan.layout.dp_replicate not in (1, plan.layout.world) and not plan.layout.zero_stage:
        fix = (
            "torchtitan 0.2 combines whole replicas with no other axis; set dp_shard > 1, or write "
            "it for torchtitan 0.3"
        )
        raise refuse("dp_replicate", plan.layout.dp_replicate, fix)
    if plan.steps < 2:
        raise ConfigError("job.steps", plan.steps, "torchtitan's schedule needs at least 2 steps")
    text = toml(_tables(plan, module, flavor), heading(plan, "torchtitan 0.2"))
    what = "-m torchtitan.train --job.config_file train.toml"
    return Emitted({"train.toml": text}, torchrun(plan, what), notes(plan))


def _tables(plan: Plan, module: str, flavor: str) -> Mapping[str, Mapping[str, Any]]:
    layout = plan.layout
    model: dict[str, Any] = {"name": module, "flavor": flavor}
    model["hf_assets_path"] = f"./assets/hf/{flavor}"
    tables: dict[str, dict[str, Any]] = {
        "job": {"description": plan.name, "dump_folder": "./outputs"},
        "model": model,
        "optimizer": {"name": "AdamW", "lr": plan.lr},
        "lr_scheduler": {"warmup_steps": plan.warmup, "decay_type": "cosine"},
        "training": _training(plan),
        "parallelism": parallelism(plan, "output"),
        "activation_checkpoint": _recompute(plan),
        "compile": {"enable": layout.compile},
    }
    if plan.spec.n_experts and layout.ep > 1:
        tables["parallelism"]["expert_tensor_parallel_degree"] = layout.etp
    if layout.precision == "fp8" and layout.fp8_scaling == "block":
        model["converters"] = ["quantize.linear.mx"]
        tables["quantize.linear.mx"] = {"filter_fqns": ["output"]}
    elif layout.precision == "fp8":
        model["converters"] = ["quantize.linear.float8"]
        recipe = _FLOAT8[layout.fp8_scaling]
        tables["quantize.linear.float8"] = {"recipe_name": recipe, "filter_fqns": ["output"]}
    return tables


def _training(plan: Plan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "dataset": "c4",
        **batch(plan),
        "seq_len": plan.seq_len,
        "max_norm": 1.0,
        "steps": plan.steps,
        "enable_cpu_offload": layout.offload == "optimizer",
        "mixed_precision_param": "float32" if layout.precision == "fp32" else "bfloat16",
    }


def _recompute(plan: Plan) -> dict[str, Any]:
    mode = plan.layout.recompute
    return {"mode": mode, **({"selective_ac_option": "op"} if mode == "selective" else {})}
