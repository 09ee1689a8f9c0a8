"""The parallel recipe: how one rank's part of a model is put together, technique by technique."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.plan.activations import recompute_plan
from meshwright.plan.experts import initial
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.plan.schedule import stages_of
from meshwright.plan.stages import stage_layers
from meshwright.train.compiling import apply_compile, loss_for
from meshwright.train.loss import HeadLoss
from meshwright.train.mesh import Mesh
from meshwright.train.nn.boundary import stay
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.grouped import Grouped
from meshwright.train.nn.linear import Linear, WeightGradients
from meshwright.train.nn.moe import MoE
from meshwright.train.optim import MasterOptimizer
from meshwright.train.parallel.context import context_parallel_attend
from meshwright.train.parallel.data import DataParallel
from meshwright.train.parallel.expert import apply_expert_parallel
from meshwright.train.parallel.flat import Storage
from meshwright.train.parallel.pipeline import Feed, Pipeline
from meshwright.train.parallel.tensor import TensorParallel, apply_tensor_parallel, boundaries
from meshwright.train.precision.apply import COMPUTE_DTYPES, apply_precision
from meshwright.train.replacing import ExpertHome, Replacer
from meshwright.train.routing import Routing
from meshwright.train.saved import ActivationStore


@dataclass(frozen=True)
class Parts:
    """What a trainer drives."""

    stages: dict[int, Decoder]
    data: DataParallel
    pipeline: Pipeline
    optimizer: MasterOptimizer
    routing: Routing
    replacer: Replacer


def assemble(job: Job, mesh: Mesh, device: torch.device, end_of_text: int | None) -> Parts:
    """Build this rank's part of `job`'s model: cut by stage, tensor, context and expert, then
    choose arithmetic and what is recomputed, then flatten over data."""
    layout, later = job.layout, WeightGradients()
    stages = _stages(job, mesh)
    for model in stages.values():
        _apply_techniques(model, job, mesh, device, later)
    data = DataParallel(stages, mesh, _storage(layout, device), later)
    inside = end_of_text if job.data.inside_documents else None
    pipeline = Pipeline(
        stages,
        data,
        mesh,
        Feed(COMPUTE_DTYPES[layout.precision], device, inside),
        later,
        HeadLoss(mesh.tp, layout.loss_chunk, loss_for(layout, device)),
        ActivationStore(
            layout.offload in ("activations", "both"),
            weights=tuple(group.weights.buffer for group in data.groups),
        ),
    )
    optimizer = MasterOptimizer(data.groups, job.optimizer)
    routing = Routing(stages, job.model, mesh)
    replacer = Replacer(_expert_homes(routing, data, optimizer), mesh)
    return Parts(stages, data, pipeline, optimizer, routing, replacer)


def _stages(job: Job, mesh: Mesh) -> dict[int, Decoder]:
    layout = job.layout
    layers = stage_layers(job.model, layout, job.data.seq_len)
    last = layout.virtual_stages - 1
    with torch.device("meta"):
        return {
            stage: Decoder(job.model, layers[stage], first=stage == 0, last=stage == last)
            for stage in stages_of(mesh.at.pp, layout.schedule, layout.pp, layout.chunks)
        }


def _apply_techniques(
    model: Decoder, job: Job, mesh: Mesh, device: torch.device, later: WeightGradients
) -> None:
    """Everything that changes the layers of a stage; compilation comes last and sees the rest."""
    layout = job.layout
    tensor = TensorParallel(mesh.tp, layout.sequence_parallel, later)
    apply_tensor_parallel(model, tensor)
    _apply_context_parallel(model, mesh)
    _apply_expert_parallel(model, job, mesh, tensor)
    _move_router_state(model, device)
    apply_precision(model, layout)
    _apply_recompute(model, job)
    if layout.tp > 1 or layout.splits_backward:
        _put_off_weight_gradients(model, later)
    apply_compile(model, layout, device)


def _storage(layout: Layout, device: torch.device) -> Storage:
    offloaded = layout.offload in ("optimizer", "both")
    return Storage(
        dtype=COMPUTE_DTYPES[layout.precision],
        grad_dtype=COMPUTE_DTYPES[layout.grad_precision],
        zero=layout.zero_stage,
        device=device,
        home=torch.device("cpu") if offloaded else device,
    )


def _apply_context_parallel(model: Decoder, mesh: Mesh) -> None:
    if mesh.cp.size > 1:
        for block in model.blocks.values():
            block.attn.attend = context_parallel_attend(mesh.cp, mesh.layout.cp_method)


def _apply_expert_parallel(model: Decoder, job: Job, mesh: Mesh, tensor: TensorParallel) -> None:
    layout, ep = job.layout, mesh.experts.ep
    if job.model.n_experts:
        placement = initial(job.model.n_experts, layout.expert_replicas, ep.size)
        etp = mesh.tp if layout.etp > 1 else None
        inside = boundaries(tensor) if etp is not None else (stay, stay)
        apply_expert_parallel(model, ep, etp, mesh.sequence, placement, *inside)


def _move_router_state(model: Decoder, device: torch.device) -> None:
    """Routers have state from the beginning; weights come when they are flattened."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.move_state(device)


def _apply_recompute(model: Decoder, job: Job) -> None:
    plan = recompute_plan(job)
    for index, block in model.blocks.items():
        block.recompute = plan[index]


def _expert_homes(
    routing: Routing, data: DataParallel, optimizer: MasterOptimizer
) -> dict[int, ExpertHome]:
    """What moves when the experts of a layer do."""
    held = {
        group.slots[0].module: (group, (group.master, *moments))
        for group, moments in zip(data.groups, optimizer.moments, strict=True)
    }
    return {layer: ExpertHome(moe, *held[moe.experts]) for layer, moe in routing.layers.items()}


def _put_off_weight_gradients(model: Decoder, later: WeightGradients) -> None:
    """Linear layers and experts queue their weights' gradients."""
    for module in model.modules():
        if isinstance(module, Linear | Grouped):
            module.later = later
