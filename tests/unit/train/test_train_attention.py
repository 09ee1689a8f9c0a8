"""Attention against its formula and against transformers, and what a slice of it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from meshwright.models.hf_config import to_config
from meshwright.models.spec import ModelSpec
from meshwright.ship.hf_weights import hf_weights
from meshwright.train.nn.attention import Attention, LatentAttention, attend_whole, build_attention
from meshwright.train.nn.linear import Linear
from meshwright.train.nn.passing import Pass
from meshwright.train.nn.rope import rope_table, rotate

SEQ_LEN = 10
SHAPE: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 4, "vocab": 64, "max_seq_len": SEQ_LEN}
LATENT = {
    "family": "deepseek_v3",
    "head_dim": 18,
    "qk_rope_head_dim": 8,
    "kv_lora_rank": 12,
    "v_head_dim": 6,
}
YARN = {"rope_scaling": "yarn", "rope_original_len": 16, "rope_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"family": "llama", "kv_heads": 2},
    "normed": {"family": "qwen3", "kv_heads": 2, "head_dim": 12},
    "latent": LATENT,
    "latent, queries too": {**LATENT, "q_lora_rank": 10},
    "latent, stretched": {**LATENT, **YARN, "rope_mscale": 1.0, "rope_mscale_all_dim": 0.8},
}


def model(kind: str) -> ModelSpec:
    return ModelSpec.model_validate({**SHAPE, **KINDS[kind]})


def build(spec: ModelSpec) -> Attention | LatentAttention:
    torch.manual_seed(0)
    attention = build_attention(spec)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(0.1, 0.3)
    return attention


def about(spec: ModelSpec, documents: Tensor | None = None) -> Pass:
    return Pass(rope_table(spec, SEQ_LEN), torch.arange(SEQ_LEN), documents)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, scale: float) -> Tensor:
    """One query at a time."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    group = q.shape[1] // k.shape[1]
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        seen = [j for j in range(i + 1) if documents[b, j] == documents[b, i]]
        scores = scale * (k[b, h // group, seen] @ q[b, h, i])
        out[b, h, i] = scores.softmax(0) @ v[b, h // group, seen]
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "value_dim"), [((4, 2), 6), ((4, 4), 3)])
def test_attention_is_its_formula(packed: bool, heads: tuple[int, int], value_dim: int) -> None:
    q, k = inputs(2, heads[0], 7, 6), inputs(2, heads[1], 7, 6)
    v = inputs(2, heads[1], 7, value_dim)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
    ours = attend_whole(q, k, v, documents if packed else None, 0.3)
    one = torch.zeros_like(documents)
    expected = attend_slowly(q, k, v, documents if packed else one, 0.3)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    other = attend_slowly(q, k, v, one if packed else documents, 0.3)
    assert (ours - other).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_only_earlier_ones_of_its_document(kind: str) -> None:
    """Trainer case 16: of two documents only the one that was changed changes."""
    spec = model(kind)
    attention = build(spec)
    documents = torch.tensor([[0] * 5 + [1] * 5])
    x = inputs(1, SEQ_LEN, spec.hidden)
    changed = x.clone()
    changed[0, 2] += 1
    for packed, differs in ((documents, range(2, 5)), (None, range(2, SEQ_LEN))):
        with torch.no_grad():
            pass_ = about(spec, packed)
            difference = (attention(changed, pass_) - attention(x, pass_)).abs().amax(-1)[0]
        assert [i for i, change in enumerate(difference.tolist()) if change > 1e-6] == [*differs]


def theirs(spec: ModelSpec, ours: nn.Module) -> Any:
    """The attention of transformers with the weights of ours."""
    raw = to_config(spec, 0)
    config = transformers.AutoConfig.for_model(**raw)
    config._attn_implementation = "eager"
    kind = DeepseekV3Attention if spec.latent_attention else Qwen3Attention
    attention = kind(config, 0).eval()
    held = dict(ours.named_parameters())
    weights = {}
    for weight in hf_weights(spec):
        if ".self_attn." in weight.hf_name:
            packed = weight.pack(lambda name: held[name.split(".attn.")[1]].detach().numpy())
            weights[weight.hf_name.split(".self_attn.")[1]] = torch.from_numpy(packed)
    attention.load_state_dict(weights)
    return attention


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grouped"])
def test_attention_is_that_of_transformers(kind: str) -> None:
    spec = model(kind)
    attention = build(spec)
    reference = theirs(spec, attention)
    x = inputs(2, SEQ_LEN, spec.hidden)
    tables = rope_table(spec, SEQ_LEN)
    mask = torch.full((SEQ_LEN, SEQ_LEN), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = reference(x, position_embeddings=[t[None] for t in tables], attention_mask=mask)
        ours = attention(x, about(spec))
        assert ours.std() > 0.2
        torch.testing.assert_close(ours, expected[0], atol=1e-5, rtol=1e-5)
        attention.scale *= 1.1
        assert (attention(x, about(spec)) - ours).abs().max() > 1e-3


def tp_slice(spec: ModelSpec, whole: nn.Module, index: int, size: int) -> Any:
    """`whole` with the heads of one tp rank."""
    part = build(spec)
    for name, module in part.named_modules():
        if isinstance(module, Linear) and not name.endswith("_down"):
            dim = 1 if name == "wo" else 0
            weight = whole.get_parameter(f"{name}.weight").chunk(size, dim)[index]
            module.weight = nn.Parameter(weight.detach().clone())
    return part


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_the_heads_add_up_to_the_whole(kind: str) -> None:
    spec = model(kind)
    whole = build(spec)
    x, pass_ = inputs(2, SEQ_LEN, spec.hidden), about(spec)
    with torch.no_grad():
        parts = [tp_slice(spec, whole, index, 2)(x, pass_) for index in range(2)]
        torch.testing.assert_close(parts[0] + parts[1], whole(x, pass_), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "width"), [("grouped", 32), ("latent", 32 + 20), ("latent, queries too", 10 + 20)]
)
def test_what_enters_the_split_region_is_small_and_enters_once(kind: str, width: int) -> None:
    """With latents, all of them (12 + 8 channels of keys and values) in one collective."""
    spec = model(kind)
    attention = build(spec)
    entered: list[int] = []

    def enter(x: Tensor) -> Tensor:
        entered.append(x.shape[-1])
        return x

    attention.enter = enter
    attention(inputs(1, SEQ_LEN, spec.hidden), about(spec))
    assert entered == [width]


def test_sequences_with_positions_of_their_own_rotate_by_them() -> None:
    cos, sin = rope_table(model("grouped"), 20)
    x = inputs(2, 3, SEQ_LEN, 8)
    places = torch.stack((torch.arange(SEQ_LEN), torch.arange(7, 7 + SEQ_LEN)))
    together = rotate(x, cos[places], sin[places])
    for one, place in enumerate(places):
        assert torch.equal(together[one], rotate(x[one : one + 1], cos[place], sin[place])[0])
    assert not torch.equal(together, rotate(x, cos[places[0]], sin[places[0]]))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": "none"},
        {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_len": 8192},
        {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_len": 4096},
        {
            "rope_scaling": "yarn",
            "rope_factor": 40.0,
            "rope_original_len": 4096,
            "rope_mscale": 1.0,
            "rope_mscale_all_dim": 0.7,
        },
    ],
    ids=["none", "llama3", "yarn", "yarn with mscale"],
)
def test_stretched_tables_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    """At positions where its fp32 phases are still right."""
    shape = {**SHAPE, "family": "llama", "head_dim": 64, "rope_theta": 500_000.0}
    spec = ModelSpec.model_validate({**shape, "max_seq_len": 131_072, **scaling})
    config = transformers.AutoConfig.for_model(**to_config(spec, 0))
    places = torch.arange(1000)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), places)
    ours = rope_table(spec, 1000)
    torch.testing.assert_close(ours[0], cos[0], atol=2e-4, rtol=0)
    torch.testing.assert_close(ours[1], sin[0], atol=2e-4, rtol=0)
    if spec.rope_scaling != "none":
        unscaled = rope_table(spec.model_copy(update={"rope_scaling": "none"}), 1000)
        assert (unscaled[0] - ours[0]).abs().max() > 0.1
