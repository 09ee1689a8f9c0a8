"""Routed experts in Megatron-LM's arguments; defaults as in megatron-core 0.19.2."""

from __future__ import annotations

import re

from meshwright.plan.read.reading import Draft, Keys

_ROUTING = (
    ("routed_scaling", "moe-router-topk-scaling-factor"),
    ("capacity_factor", "moe-expert-capacity-factor"),
    ("z_loss", "moe-z-loss-coeff"),
)
_LOSSES = ("aux_loss", "seq_aux_loss")


def put_experts(keys: Keys, draft: Draft) -> None:
    """Everything of ModelSpec about experts that the arguments give."""
    put(keys, draft, "n_experts", "num-experts", keys.count("num-experts"))
    put(keys, draft, "top_k", "moe-router-topk", keys.count("moe-router-topk", 2))
    _put_widths(keys, draft)
    dense = dense_layers(keys)
    if dense is None:
        draft.problems["moe-layer-freq"] = "only the first layers can be dense here: ([0]*3+[1]*58)"
    put(keys, draft, "first_dense_layers", "moe-layer-freq", dense or 0)
    _put_gate(keys, draft)
    for ours, name in _ROUTING:
        if name in keys:
            put(keys, draft, ours, name, keys.number(name))
    _put_balance(keys, draft)


def put(keys: Keys, draft: Draft, ours: str, name: str, value: object) -> None:
    """Set `ours` of the model to `value`, which argument `name` gave, or Megatron's default."""
    origin = f"--{name} {keys[name]}" if name in keys else f"--{name} {value} (default)"
    draft.put(f"model.{ours}", value, origin)


def _put_widths(keys: Keys, draft: Draft) -> None:
    name = "moe-ffn-hidden-size"
    width = keys.count(name, draft.model.get("ffn_hidden"))
    put(keys, draft, "expert_ffn_hidden", name, width)
    name = "moe-shared-expert-intermediate-size"
    shared = keys.count(name, 0, least=0) or 0
    if shared and width:
        if shared % width:
            fix = f"shared experts are {width} wide here, as the routed ones; give a multiple"
            draft.problems[name] = fix
        put(keys, draft, "n_shared_experts", name, max(shared // width, 1))


def _put_gate(keys: Keys, draft: Draft) -> None:
    name = "moe-router-score-function"
    gate = keys.one_of(name, {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax")
    put(keys, draft, "gate", name, gate)
    # A softmax over the chosen experts adds up to 1, the share that they have of one over all does
    # not. Sigmoids are divided by their sum unless there is but one.
    name = "moe-router-pre-softmax"
    before = bool(keys.get(name))
    if gate == "sigmoid":
        draft.put("model.norm_top_k", draft.model["top_k"] > 1, "--moe-router-topk")
    else:
        draft.put("model.norm_top_k", not before, f"--{name}" if before else f"no --{name}")
    groups, chosen = keys.count("moe-router-num-groups"), keys.count("moe-router-group-topk")
    put(keys, draft, "expert_groups", "moe-router-num-groups", groups)
    put(keys, draft, "top_k_groups", "moe-router-group-topk", chosen)


def _put_balance(keys: Keys, draft: Draft) -> None:
    """A loss or several, each with its coefficient, and the bias that balances without one."""
    kind, weight = "moe-router-load-balancing-type", "moe-aux-loss-coeff"
    losses = words(keys.get(kind, "aux_loss"))
    weights = words(keys.get(weight, "0.0"))
    if len(losses) != len(weights) and not (len(losses) == 1 and losses[0] == "none"):
        fix = f"one for each of --{kind} {' '.join(losses)}; {len(losses)} of them"
        raise keys.wrong(weight, " ".join(weights), f"must be {fix}")
    for loss, value in zip(losses, weights, strict=False):
        if loss in _LOSSES and weight in keys:
            put(keys, draft, loss, weight, keys.as_number(weight, value))
        elif loss not in (*_LOSSES, "none"):
            draft.notes.append(f"--{kind} {loss} is not read; experts balance without it")
    rate = "moe-router-bias-update-rate"
    if rate in keys or keys.get("moe-router-enable-expert-bias"):
        put(keys, draft, "bias_update_rate", rate, keys.number(rate, 1e-3))


def words(value: object) -> list[str]:
    """Values of an argument that takes several: a list in YAML, words on a command line."""
    items = value if isinstance(value, list) else str(value).strip("[]").replace(",", " ").split()
    return [str(item) for item in items]


def dense_layers(keys: Keys) -> int | None:
    """Layers without experts at the start; None where experts come and go. The argument is 1, or a
    list of 0 and 1 by layer, written out or as in `([0]*3+[1]*58)`."""
    pattern = str(keys.get("moe-layer-freq", 1)).replace(" ", "").strip("()")
    if pattern == "1":
        return 0
    layers: list[str] = []
    for part in pattern.split("+"):
        match = re.fullmatch(r"\[((?:[01],?)+)\](?:\*(\d+))?", part)
        if match is None:
            return None
        layers += match[1].rstrip(",").split(",") * int(match[2] or 1)
    dense = layers.index("1") if "1" in layers else len(layers)
    return dense if "0" not in layers[dense:] else None
