"""Which layers are run again to stay inside a budget, and that the bytes behind it are true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.base.errors import ConfigError
from meshwright.plan.activations import PARTS, Part, Parts, layer_bytes, part_costs, recompute_plan
from meshwright.plan.job import Job, resolve_job
from meshwright.plan.stages import stage_layers
from meshwright.train.nn.block import Block
from meshwright.train.nn.passing import Pass
from meshwright.train.nn.rope import rope_table

DENSE = {"family": "llama", "layers": 6, "hidden": 32, "heads": 4, "ffn_hidden": 80, "vocab": 64}
ROUTED = {
    **DENSE,
    "n_experts": 4,
    "top_k": 2,
    "expert_ffn_hidden": 24,
    "first_dense_layers": 2,
}
SEQ = 32


def job_of(model: dict[str, Any], gib: float = 0.0, **axes: Any) -> Job:
    recompute = {"recompute": "budget", "activation_gib": gib} if gib else {}
    return resolve_job(
        {
            "job": {"steps": 1},
            "model": model,
            "data": {"seq_len": SEQ, "global_batch": 8},
            "layout": {"micro_batch": 2, **recompute, **axes},
            "cluster": {"ref": f"local:{axes.get('pp', 1) * axes.get('tp', 1)}"},
        }
    )


def kept_gib(job: Job, plan: list[Parts], layers: list[int]) -> float:
    """What one micro-batch leaves in `layers` under `plan`."""
    costs = {i: part_costs(job.model, i, job.layout, SEQ) for i in layers}
    return sum(layer_bytes(costs[i], plan[i]) for i in layers) / 2**30


def flops_again(job: Job, plan: list[Parts]) -> float:
    return sum(
        part_costs(job.model, i, job.layout, SEQ)[part].flops
        for i, parts in enumerate(plan)
        for part in parts
    )


def span(model: dict[str, Any]) -> tuple[float, float]:
    """GiB of everything kept and of everything run again, on one rank."""
    job = job_of(model)
    everything: list[int] = list(range(job.model.layers))
    none, all_parts = frozenset[Part](), frozenset(PARTS)
    return (
        kept_gib(job, [none] * len(everything), everything),
        kept_gib(job, [all_parts] * len(everything), everything),
    )


@pytest.mark.parametrize("model", [DENSE, ROUTED])
def test_a_budget_is_respected_and_more_memory_never_costs_more_work(
    model: dict[str, Any],
) -> None:
    most, least = span(model)
    work = []
    for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        budget = (least + share * (most - least)) * (1 + 1e-9)
        job = job_of(model, budget)
        plan = recompute_plan(job)
        assert kept_gib(job, plan, list(range(6))) <= budget
        work.append(flops_again(job, plan))
    assert work[0] == 0
    assert work == sorted(work)
    assert set(recompute_plan(job_of(model, least * (1 + 1e-9)))) == {frozenset(PARTS)}


@pytest.mark.parametrize("model", [DENSE, ROUTED])
def test_a_budget_below_the_inputs_is_refused(model: dict[str, Any]) -> None:
    _, least = span(model)
    with pytest.raises(ConfigError, match=r"activation_gib.*still keeps.*or lower micro_batch"):
        job_of(model, least * 0.9)


def test_a_rank_with_fewer_micro_batches_in_flight_recomputes_less() -> None:
    """In 1F1B the first of two stages has two micro-batches in flight, the last one."""
    most, _ = span(DENSE)
    job = job_of(DENSE, most * 0.5, pp=2, stages=[3, 3])
    plan = recompute_plan(job)
    ranges = stage_layers(job.model, job.layout, SEQ)
    kept = [kept_gib(job, plan, list(stage)) for stage in ranges]
    assert 2 * kept[0] <= most * 0.5
    assert kept[1] <= most * 0.5
    assert sum(map(len, plan[:3])) > sum(map(len, plan[3:])) == 0


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"recompute": "none"}, frozenset()),
        ({"recompute": "selective", "recompute_parts": ["mlp"]}, frozenset({"mlp"})),
        ({"recompute": "full"}, frozenset(PARTS)),
    ],
)
def test_the_other_settings_treat_layers_alike(settings: dict[str, Any], parts: Parts) -> None:
    assert recompute_plan(job_of(DENSE, **settings)) == [parts] * 6


def _saved_bytes(job: Job, layer: int, parts: Parts) -> int:
    """Bytes of distinct memory, weights and tables apart, that a layer's forward pass leaves."""
    block, held = Block(job.model, layer), dict[int, int]()
    block.recompute = parts
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tables = rope_table(job.model, SEQ)
    stays = {x.untyped_storage().data_ptr() for x in (*block.parameters(), *tables)}

    def note(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in stays and x.is_floating_point():
            held[memory.data_ptr()] = memory.nbytes()
        return x

    x = torch.randn(job.layout.micro_batch, SEQ, job.model.hidden).requires_grad_()
    about = Pass(tables, torch.arange(SEQ))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = block(x, about)
    # What the layer gives is the next one's input, and counted there.
    held.pop(out.untyped_storage().data_ptr(), None)
    return sum(held.values())


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("parts", [frozenset(), frozenset({"attention"}), frozenset({"mlp"})])
def test_bytes_are_those_that_a_layer_leaves(layer: int, parts: Parts) -> None:
    job = job_of(ROUTED)
    predicted = layer_bytes(part_costs(job.model, layer, job.layout, SEQ), parts)
    assert predicted == pytest.approx(_saved_bytes(job, layer, parts), rel=0.2)
