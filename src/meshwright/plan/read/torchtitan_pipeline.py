"""The pipeline of torchtitan's TOML: schedule, chunks of a rank, layers of each stage.

Stages are cut as `generate_llm_fqn_per_model_part` of torchtitan 0.2.2 cuts them.
"""

from __future__ import annotations

from typing import Any

from meshwright.plan.layout import V_SCHEDULES
from meshwright.plan.read.reading import Draft, Keys

_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved",
    "LoopedBFS": "interleaved",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
_PREFIX = "parallelism.pipeline_parallel_"
_PARTS = "parallelism.module_fqns_per_model_part"
_PER_STAGE = f"{_PREFIX}layers_per_stage"
# What first and last stage have besides layers, counted in layers.
_ENDS = (f"{_PREFIX}first_stage_less_layers", f"{_PREFIX}last_stage_less_layers")


def put_pipeline(keys: Keys, draft: Draft) -> None:
    """Everything that the file says of a pipeline. Raises ConfigError naming key and fix."""
    if draft.layout["pp"] == 1:
        return
    key = f"{_PREFIX}schedule"
    schedule = keys.one_of(key, _SCHEDULES, "1f1b")
    said = repr(keys[key]) if key in keys else "'1F1B' (default)"
    draft.put("layout.schedule", schedule, f"{key} = {said}")
    if str(keys.get(key)).lower() in ("interleavedzerobubble", "loopedbfs"):
        draft.notes.append(f"{key} = {keys[key]!r} read as Interleaved1F1B")
    first, last = (keys.count(end, 1, least=0) or 0 for end in _ENDS)
    parts = _parts(keys)
    stages = len(parts) if parts else _count(keys, draft, schedule, first + last)
    if schedule == "interleaved":
        key = _PARTS if parts else _PER_STAGE
        said = f"{stages} parts" if parts else repr(keys.get(key))
        draft.put("layout.vpp", stages // draft.layout["pp"], f"{key} = {said}")
    if parts:
        draft.put("layout.stages", parts, _PARTS)
    elif "layers" in draft.model:
        sizes = _sizes(keys, draft.model["layers"], stages, first, last)
        draft.put("layout.stages", sizes, f"{_ENDS[0]} = {first}, {_ENDS[1]} = {last}")


def _parts(keys: Keys) -> list[int]:
    """Layers of each part of the model where the file lists its modules."""
    raw: Any = keys.get(_PARTS) or []
    if not isinstance(raw, list) or not all(isinstance(part, list) for part in raw):
        raise keys.wrong(_PARTS, raw, 'must be lists of modules, as [["tok_embeddings"], ["norm"]]')
    return [sum(str(name).startswith("layers.") for name in part) for part in raw]


def _count(keys: Keys, draft: Draft, schedule: str, ends: int) -> int:
    """Stages in all: one on a rank, two in a looped schedule, or from the layers of a stage."""
    pp: int = draft.layout["pp"]
    per_stage, layers = keys.count(_PER_STAGE), draft.model.get("layers")
    single = schedule in ("1f1b", "gpipe")
    if not per_stage or not layers:
        return pp if single else 2 * pp
    stages: int = -(-(layers + ends) // per_stage)
    wanted = f"{pp}" if single else f"2 x {pp}"
    wanted += " or a higher multiple" if schedule == "interleaved" else ""
    chunks = stages // pp
    if stages % pp or (chunks != 1 if single else chunks < 2):
        fix = f"makes {stages} stages of {layers} layers and {ends} for the ends; must be {wanted}"
        raise keys.wrong(_PER_STAGE, per_stage, fix)
    if schedule in V_SCHEDULES and chunks != 2:
        fix = f"makes {stages} stages, and {schedule} has 2 x {pp}"
        raise keys.wrong(_PER_STAGE, per_stage, fix)
    return stages


def _sizes(keys: Keys, layers: int, stages: int, first: int, last: int) -> list[int]:
    """Even shares of layers and ends, the larger ones first; then the ends' part is taken off."""
    least, larger = divmod(layers + first + last, stages)
    for key, end in zip(_ENDS, (first, last), strict=True):
        if end > least:
            raise keys.wrong(key, end, f"is above the {least} layers that a stage has at least")
    sizes = [least + (stage < larger) for stage in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return sizes
