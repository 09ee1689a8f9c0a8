"""The pipeline of Megatron-LM's arguments: schedule, chunks of a rank, layers of each stage."""

from __future__ import annotations

import re

from meshwright.plan.read.reading import Draft, Keys

_VPP = "num-virtual-stages-per-pipeline-rank"
_PER_CHUNK = "num-layers-per-virtual-pipeline-stage"
_DRAWN = "pipeline-model-parallel-layout"
_FIRST, _LAST = (f"decoder-{end}-pipeline-num-layers" for end in ("first", "last"))


def put_pipeline(keys: Keys, draft: Draft) -> None:
    """Everything that the arguments say of a pipeline. Raises ConfigError naming argument and
    fix."""
    if draft.layout["pp"] == 1:
        return
    if _DRAWN in keys:
        _put_drawn(keys, draft)
        return
    vpp, name = _chunks(keys, draft)
    _put_chunks(draft, vpp, f"--{name} {keys[name]}" if name in keys else f"--{name} 1 (default)")
    _put_ends(keys, draft, vpp)


def _put_chunks(draft: Draft, vpp: int, origin: str) -> None:
    draft.put("layout.vpp", vpp, origin)
    draft.put("layout.schedule", "interleaved" if vpp > 1 else "1f1b", origin)


def _put_drawn(keys: Keys, draft: Draft) -> None:
    """`Et*3|(tt|)*6tL`: E the embedding, t a layer, L the loss, | between stages."""
    text, pp = str(keys[_DRAWN]), draft.layout["pp"]
    spread = text.replace(",", "").replace(" ", "")
    spread = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), spread)
    spread = re.sub(r"([^*])\*(\d+)", lambda m: m[1] * int(m[2]), spread)
    stages = [stage.count("t") for stage in spread.split("|")]
    if set(spread) - set("EtmL|"):
        raise keys.wrong(_DRAWN, text, "can be read where stages are drawn, as Et*3|t*4|t*3L")
    if len(stages) % pp:
        raise keys.wrong(_DRAWN, text, f"draws {len(stages)} stages; must be a multiple of {pp}")
    _put_chunks(draft, len(stages) // pp, f"--{_DRAWN} {text}")
    draft.put("layout.stages", stages, f"--{_DRAWN} {text}")


def _chunks(keys: Keys, draft: Draft) -> tuple[int, str]:
    """Chunks of a rank, and the argument that says so."""
    pp, layers = draft.layout["pp"], draft.model.get("layers")
    per_chunk = keys.count(_PER_CHUNK)
    if not per_chunk:
        return keys.count(_VPP, 1) or 1, _VPP
    if not layers or layers % (pp * per_chunk):
        fix = f"{pp} pipeline ranks x {per_chunk} layers do not divide {layers} layers"
        raise keys.wrong(_PER_CHUNK, per_chunk, fix)
    return layers // (pp * per_chunk), _PER_CHUNK


def _put_ends(keys: Keys, draft: Draft, vpp: int) -> None:
    """Other layers than the rest on the first or last pipeline rank, in equal chunks."""
    first, last = keys.count(_FIRST), keys.count(_LAST)
    if not (first or last) or "layers" not in draft.model:
        return
    middle = draft.layout["pp"] - bool(first) - bool(last)
    left = draft.model["layers"] - (first or 0) - (last or 0)
    name, value = (_FIRST, first) if first else (_LAST, last)
    if left < 0 or (left % middle if middle else left):
        raise keys.wrong(name, value, f"leaves {left} layers for {middle} equal stages")
    each = left // middle if middle else 0
    sizes = [size for size in (first, *[each] * middle, last) if size is not None]
    if any(size % vpp for size in sizes):
        raise keys.wrong(name, value, f"ranks have {sizes} layers, which {vpp} chunks do not cut")
    draft.put("layout.stages", [size // vpp for size in sizes] * vpp, f"--{name} {value}")
