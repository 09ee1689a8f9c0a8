"""What is compiled, that it stays the same function, and that a CPU rank pays nothing for it.

The compiler is exercised without a GPU through a backend that makes no kernels.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from meshwright.models.spec import ModelSpec
from meshwright.plan.data_section import DataSection
from meshwright.plan.job import Job, JobSection, OptimizerSection
from meshwright.plan.layout import Layout
from meshwright.train import compiling
from meshwright.train.comm import Clock
from meshwright.train.compiling import compile_parts, wanted, whole_parts
from meshwright.train.mesh import build_mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.linear import Linear, WeightGradients
from meshwright.train.nn.passing import Pass
from meshwright.train.precision.apply import apply_precision
from meshwright.train.precision.fp8 import Fp8
from meshwright.train.precision.quantise import quantise
from meshwright.train.trainer import Trainer

# The compiler itself looks where it warns others not to look.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

DENSE: dict[str, Any] = {
    "family": "llama",
    "layers": 3,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 48,
    "vocab": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "gpt2": {
        "family": "gpt2",
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "vocab": 64,
        "max_seq_len": 16,
    },
    "moe": {
        **DENSE,
        "family": "qwen3_moe",
        "first_dense_layers": 1,
        "n_experts": 4,
        "top_k": 2,
        "expert_ffn_hidden": 32,
    },
    "mla": {
        **DENSE,
        "family": "deepseek_v3",
        "kv_heads": 4,
        "head_dim": 16,
        "v_head_dim": 8,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "n_experts": 4,
        "top_k": 2,
        "expert_ffn_hidden": 32,
        "n_shared_experts": 1,
        "gate": "sigmoid",
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half recomputed": {"recompute": "selective"},
    "recomputed": {"recompute": "full", "loss_chunk": 8},
    "offloaded": {"offload": "both"},
    "fp8": {"precision": "fp8"},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit  # raised by what is tested
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=limit):
        yield


def steps(model: dict[str, Any], layout: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of two steps of two micro-batches."""
    job = Job(
        job=JobSection(steps=2),
        model=ModelSpec(**model),
        data=DataSection(seq_len=16, global_batch=4),
        layout=Layout(micro_batch=2, **layout),
        optimizer=OptimizerSection(lr=1e-2),
    )
    trainer = Trainer(job, build_mesh(job.layout, 0, Clock()), torch.device("cpu"))
    trainer.initialise()
    tokens = torch.randint(0, 64, (2, 2, 17), generator=torch.Generator().manual_seed(0))
    found = []
    for step in range(2):
        agreed = trainer.gradients(tokens, step=step)
        trainer.update(step, agreed)
        found.append((agreed.loss, agreed.grad_norm))
    return found


@pytest.mark.parametrize(
    ("model", "layout"), [*(("llama", name) for name in LAYOUTS), ("mla", "plain")]
)
def test_a_compiled_trainer_takes_the_same_steps(
    model: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = steps(MODELS[model], LAYOUTS[layout])
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(compiling, "wanted", lambda *_: True)
    compiled = steps(MODELS[model], LAYOUTS[layout])
    assert counter.frame_count > 1  # a layer or a piece, and the loss
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(("model", "graphs"), [("llama", 1), ("gpt2", 1), ("moe", 2), ("mla", 2)])
def test_all_layers_of_a_kind_share_one_graph(model: str, graphs: int) -> None:
    decoder = Decoder(ModelSpec(**MODELS[model]))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    counter = CompileCounterWithBackend("eager")
    compile_parts(decoder, partial(torch.compile, backend=counter))
    order = torch.arange(16)
    decoder.reach(16, order.device)
    for _ in range(2):
        about = Pass(decoder.rope_at(order), order)
        decoder(torch.randint(0, 64, (2, 16)), about).sum().backward()
    assert counter.frame_count == graphs


def test_quantisation_is_not_compiled_anew_for_what_wants_gradients() -> None:
    counter = CompileCounterWithBackend("eager")
    fp8 = Fp8("row", quantise=torch.compile(quantise, backend=counter))
    x, w = torch.randn(16, 32), torch.randn(8, 32)
    with torch.no_grad():
        fp8.forward(x, w)
        versions = counter.frame_count
        fp8.forward(x.requires_grad_(), torch.nn.Parameter(w))
    assert counter.frame_count == versions


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", [["both"]] * 3),
        ("gpt2", [["both"]] * 2),
        ("moe", [["both"], ["attention"], ["attention"]]),
        ("mla", [["attention"]] * 3),
    ],
)
def test_what_is_compiled_whole(model: str, expected: list[list[str]]) -> None:
    decoder = Decoder(ModelSpec(**MODELS[model]))
    assert [list(whole_parts(block)) for block in decoder.blocks.values()] == expected


def test_what_has_effects_is_not_compiled_whole() -> None:
    def parts(decoder: Decoder) -> list[str]:
        return list(whole_parts(decoder.blocks[0]))

    recomputed, ring, late, fp8, split = (Decoder(ModelSpec(**DENSE)) for _ in range(5))
    recomputed.blocks[0].recompute = frozenset({"attention"})
    assert parts(recomputed) == ["attention", "feed_forward"]
    ring.blocks[0].attn.attend = lambda q, _k, _v, _documents, _scale: q
    assert parts(ring) == ["feed_forward"]
    for module in late.modules():
        if isinstance(module, Linear):
            module.later = WeightGradients()
    assert parts(late) == []
    apply_precision(fp8, Layout(precision="fp8"))
    assert parts(fp8) == []
    split.blocks[0].attn.enter = lambda x: x
    assert parts(split) == ["feed_forward"]


def test_nothing_is_compiled_on_a_cpu_or_against_the_layout() -> None:
    gpu = torch.device("cuda", 0)
    assert wanted(Layout(), gpu)
    assert not wanted(Layout(compile=False), gpu)
    assert not wanted(Layout(), torch.device("cpu"))


def test_a_cpu_rank_does_not_import_the_compiler() -> None:
    program = (
        "import sys, torch\n"
        "from meshwright.models.spec import ModelSpec\n"
        "from meshwright.plan.data_section import DataSection\n"
        "from meshwright.plan.job import Job, JobSection\n"
        "from meshwright.plan.layout import Layout\n"
        "from meshwright.train.comm import Clock\n"
        "from meshwright.train.mesh import build_mesh\n"
        "from meshwright.train.trainer import Trainer\n"
        f"model = ModelSpec(**{DENSE!r})\n"
        "job = Job(job=JobSection(steps=1), model=model,\n"
        "          data=DataSection(seq_len=16, global_batch=1))\n"
        "trainer = Trainer(job, build_mesh(Layout(), 0, Clock()), torch.device('cpu'))\n"
        "trainer.initialise()\n"
        "trainer.update(0, trainer.gradients(torch.zeros(1, 1, 17, dtype=torch.int64), step=0))\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
