"""The flat groups of a stage: which weights each has on a rank (`train/parallel/slots.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.plan.own_groups import Group, Weight
from meshwright.plan.own_rank import Rank

_INSIDE = ("q_norm", "k_norm", "router")


def stage_groups(
    rank: Rank, layers: range, first: bool, last: bool
) -> tuple[list[Group], list[list[Group]]]:
    """Groups of the tables, and of each layer: its dense weights, and its experts."""
    tables = [Group(rank, weights, "", early=False) for weights in _ends(rank, first, last)]
    of_layers = []
    for number in layers:
        groups = [Group(rank, list(_dense(rank, number)), "", early=True)]
        if rank.spec.is_moe(number):
            groups.append(Group(rank, list(_experts(rank, number)), "expert ", early=True))
        of_layers.append(groups)
    return tables, of_layers


def _ends(rank: Rank, first: bool, last: bool) -> Iterator[list[Weight]]:
    spec, layout = rank.spec, rank.layout
    table = spec.vocab // layout.tp * spec.hidden
    if first or (last and spec.tie_embeddings):
        tied = spec.tie_embeddings and layout.virtual_stages > 1
        yield [Weight("embed.weight", table, tied=tied)]
    rest = []
    if first and spec.family == "gpt2":
        rest.append(_weight(rank, "positions.weight", spec.max_seq_len * spec.hidden, True))
    if last:
        rest += _norm(rank, "norm", spec.hidden)
        if not spec.tie_embeddings:
            rest.append(Weight("head.weight", table))
    if rest:
        yield rest


def _weight(rank: Rank, key: str, numel: int, decay: bool) -> Weight:
    """A weight that every tp rank holds whole."""
    module = key.split(".")[-2]
    partial = rank.layout.tp > 1 and (rank.layout.sequence_parallel or module in _INSIDE)
    return Weight(key, numel, decay, partial)


def _norm(rank: Rank, key: str, width: int) -> list[Weight]:
    names = ("weight", "bias") if rank.spec.family == "gpt2" else ("weight",)
    return [_weight(rank, f"{key}.{name}", width, False) for name in names]


def _dense(rank: Rank, number: int) -> Iterator[Weight]:
    """A layer's weights but its routed experts, in the order of its modules."""
    spec, name = rank.spec, f"layers.{number}."
    yield from _norm(rank, f"{name}attn_norm", spec.hidden)
    attention = _latent if spec.latent_attention else _grouped
    yield from attention(rank, f"{name}attn.")
    yield from _norm(rank, f"{name}mlp_norm", spec.hidden)
    if spec.is_moe(number):
        router = f"{name}mlp.router.weight"
        yield _weight(rank, router, spec.n_experts * spec.hidden, True)
        width = spec.n_shared_experts * spec.expert_ffn_hidden
        if width:
            yield from _split(rank, f"{name}mlp.shared.", ("gate", "up", "down"), width)
    else:
        kinds = ("up", "down") if spec.family == "gpt2" else ("gate", "up", "down")
        yield from _split(rank, f"{name}mlp.", kinds, spec.ffn_hidden)


def _split(rank: Rank, name: str, kinds: tuple[str, ...], width: int) -> Iterator[Weight]:
    """Linear layers between `hidden` and `width`, cut over tp."""
    spec, tp = rank.spec, rank.layout.tp
    for kind in kinds:
        yield Weight(f"{name}{kind}.weight", spec.hidden * width // tp)
        if spec.family == "gpt2":
            out = kind == "down"
            key = f"{name}{kind}.bias"
            yield _weight(rank, key, spec.hidden, False) if out else Weight(key, width // tp, False)


def _grouped(rank: Rank, name: str) -> Iterator[Weight]:
    spec, tp = rank.spec, rank.layout.tp
    for key, width in (("wq", spec.query_dim), ("wk", spec.kv_dim), ("wv", spec.kv_dim)):
        yield Weight(f"{name}{key}.weight", spec.hidden * width // tp)
        if spec.family == "gpt2":
            yield Weight(f"{name}{key}.bias", width // tp, False)
    yield Weight(f"{name}wo.weight", spec.hidden * spec.query_dim // tp)
    if spec.family == "gpt2":
        yield _weight(rank, f"{name}wo.bias", spec.hidden, False)
    if spec.qk_norm:
        for key in ("q_norm", "k_norm"):
            yield _weight(rank, f"{name}{key}.weight", spec.head_dim, False)


def _latent(rank: Rank, name: str) -> Iterator[Weight]:
    spec, tp, h = rank.spec, rank.layout.tp, rank.spec.hidden
    if spec.q_lora_rank:
        yield _weight(rank, f"{name}wq_down.weight", h * spec.q_lora_rank, True)
        yield _weight(rank, f"{name}q_down_norm.weight", spec.q_lora_rank, False)
        yield Weight(f"{name}wq_up.weight", spec.q_lora_rank * spec.query_dim // tp)
    else:
        yield Weight(f"{name}wq.weight", h * spec.query_dim // tp)
    both = spec.kv_lora_rank + spec.rope_dim
    yield _weight(rank, f"{name}wkv_down.weight", h * both, True)
    yield _weight(rank, f"{name}kv_down_norm.weight", spec.kv_lora_rank, False)
    up = spec.heads * (spec.head_dim - spec.rope_dim) + spec.value_dim
    yield Weight(f"{name}wkv_up.weight", spec.kv_lora_rank * up // tp)
    yield Weight(f"{name}wo.weight", spec.value_dim * h // tp)


def _experts(rank: Rank, number: int) -> Iterator[Weight]:
    spec, layout = rank.spec, rank.layout
    places = (spec.n_experts + layout.expert_replicas) // layout.ep
    numel = places * spec.hidden * spec.expert_ffn_hidden // layout.etp
    for key in ("gate", "up", "down"):
        yield Weight(f"layers.{number}.mlp.experts.{key}", numel)
