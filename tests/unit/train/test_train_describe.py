"""What the plan says a rank holds is what the trainer builds for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.models.spec import ModelSpec
from meshwright.plan.describe import describe_plan
from meshwright.plan.job import resolve_job
from meshwright.plan.layout import stage_layers
from meshwright.train.comm import Axis, Clock
from meshwright.train.nn.decoder import Decoder
from meshwright.train.parallel.tensor import apply_tensor_parallel

LLAMA = {"family": "llama", "kv_heads": 2, "ffn_hidden": 48}
GPT2 = {"family": "gpt2", "max_seq_len": 40}


def built_params(spec: ModelSpec, layers: range, tp: int) -> int:
    """Weights of a pipeline stage after it was cut for tensor parallelism."""
    with torch.device("meta"):
        model = Decoder(spec, layers)
    apply_tensor_parallel(model, Axis(tuple(range(tp)), 0, None, Clock()), sequence_parallel=True)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [LLAMA, GPT2])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_params_of_each_rank(family: dict[str, Any], tied: bool, tp: int, pp: int) -> None:
    shape = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 96, "tie_embeddings": tied}
    job = resolve_job(
        {
            "job": {"steps": 1},
            "model": {**shape, **family},
            "data": {"seq_len": 16, "global_batch": 2},
            "layout": {"tp": tp, "pp": pp, "dp_shard": 2},
            "cluster": {"ref": f"local:{2 * tp * pp}"},
        }
    )
    plan = describe_plan(job)
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(2 * tp * pp))
    for rank in plan["ranks"]:
        layers = stage_layers(4, pp)[rank["pp"]]
        assert rank["layers"] == (layers.start, layers.stop - 1)
        assert rank["params"] == -(-built_params(job.model, layers, tp) // 2)
        assert rank["holds"] == tuple(
            name for name, stage in (("embed", 0), ("head", pp - 1)) if rank["pp"] == stage
        )


def test_one_process_holds_the_model() -> None:
    job = resolve_job(
        {
            "job": {"steps": 1},
            "model": {"preset": "tiny"},
            "data": {"seq_len": 16, "global_batch": 1},
        }
    )
    plan = describe_plan(job)
    assert plan["ranks"][0]["params"] == plan["model_params"] == job.model.params
    assert plan["flops_per_token"] == job.model.flops_per_token(16)
