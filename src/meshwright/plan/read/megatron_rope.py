"""How Megatron-LM's arguments turn positions, stretched or not.

Defaults as in megatron/training/arguments.py of megatron-core 0.19.2; what --use-rope-scaling has
fixed as in core/models/common/embeddings/rotary_pos_embedding.py, YaRN's in MLATransformerConfig.
"""

from __future__ import annotations

from meshwright.plan.read.reading import Draft, Keys

# What Megatron fixes; it has no argument for these.
_LLAMA3 = {"rope_low_freq": 1.0, "rope_high_freq": 4.0, "rope_original_len": 8192}
_YARN = {"rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "rope_original_len": 4096}
# Ways to turn positions that ModelSpec has no word for, and their values that change nothing.
_OTHERS = (
    ("rotary-percent", 1.0),
    ("rotary-seq-len-interpolation-factor", 1.0),
    ("no-rope-freq", None),
)


def put_rope(keys: Keys, draft: Draft) -> None:
    """The base, and how far rotary positions are stretched; the family is known by now."""
    latent = draft.model.get("family") == "deepseek_v3"
    theta = keys.number("rotary-base", 10_000.0)
    draft.put("model.rope_theta", theta, _origin(keys, "rotary-base", theta))
    if latent:
        _put_yarn(keys, draft)
    elif keys.get("use-rope-scaling"):
        _put_llama3(keys, draft)
    _note_others(keys, draft, latent)


def _origin(keys: Keys, name: str, default: object) -> str:
    return f"--{name} {keys[name]}" if name in keys else f"--{name} {default} (default)"


def _put_llama3(keys: Keys, draft: Draft) -> None:
    name = "rope-scaling-factor"
    factor = keys.number(name, 8.0)
    draft.put("model.rope_scaling", "llama3", "--use-rope-scaling")
    draft.put("model.rope_factor", factor, _origin(keys, name, factor))
    for ours, fixed in _LLAMA3.items():
        draft.put(f"model.{ours}", fixed, "--use-rope-scaling")


def _put_yarn(keys: Keys, draft: Draft) -> None:
    """Latent attention is stretched unless told otherwise; by a factor of 1 nothing changes."""
    name = "rotary-scaling-factor"
    factor = keys.number(name, 1.0)
    kind = keys.one_of("rope-type", {"rope": "rope", "yarn": "yarn"}, "yarn")
    if kind == "rope" or factor == 1.0:
        return
    origin = "--rope-type yarn" if "rope-type" in keys else "--multi-latent-attention"
    draft.put("model.rope_scaling", "yarn", origin)
    draft.put("model.rope_factor", factor, _origin(keys, name, factor))
    for ours, fixed in _YARN.items():
        draft.put(f"model.{ours}", fixed, origin)
    for ours, name, default in (
        ("rope_mscale", "mscale", 1.0),
        ("rope_mscale_all_dim", "mscale-all-dim", 0.0),
    ):
        value = keys.number(name, default)
        draft.put(f"model.{ours}", value, _origin(keys, name, value))
    if draft.model["rope_mscale"] != 1.0 and not draft.model["rope_mscale_all_dim"]:
        draft.notes.append("--mscale without --mscale-all-dim is read as 1")


def _note_others(keys: Keys, draft: Draft, latent: bool) -> None:
    """What is not read stays among the unused, with a note that positions turn otherwise."""
    said = [name for name, plain in _OTHERS if name in keys.unused and not _is(keys, name, plain)]
    if latent and "use-rope-scaling" in keys.unused:
        said.append("use-rope-scaling")  # latent attention does not look at it
    if keys.get("position-embedding-type") == "yarn":
        said.append("position-embedding-type yarn")
    draft.notes += [f"--{name} is not read; positions turn as without it" for name in said]


def _is(keys: Keys, name: str, plain: float | None) -> bool:
    value = keys.unused[name]
    return plain is not None and str(value).strip() in (str(plain), f"{plain:g}")
