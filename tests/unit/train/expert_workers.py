"""MoE layers on gloo ranks: what each rank does, and the same on one process."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.models.spec import ModelSpec
from meshwright.plan.experts import Placement, initial
from meshwright.train.comm import Axis, Clock
from meshwright.train.nn.moe import MoE
from meshwright.train.nn.passing import Pass
from meshwright.train.nn.router import Router
from meshwright.train.parallel.expert import apply_expert_parallel, move_experts, set_placement

TIMEOUT_S = 60
NAMES = ("gate", "up", "down")


@dataclass(frozen=True)
class Case:
    """One MoE step on `ep` x `etp` ranks. `cut`: what a rank of `ep` has of x [batch, seq, hidden]:
    whole sequences (`batch`), an early and a late part of each (`context`), a run of each
    (`slices`, as sequence parallelism), or everything on the first rank (`first`)."""

    ep: int = 1
    etp: int = 1
    cut: str = "batch"
    model: dict[str, Any] = field(default_factory=dict)
    placement: Placement | None = None
    moved_to: Placement | None = None
    unused: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    fault: str = ""

    @property
    def where(self) -> Placement:
        """The placement at the start."""
        return self.placement or initial(self.spec.n_experts, 0, self.ep)

    @property
    def spec(self) -> ModelSpec:
        """A tiny model; `model` overrides keys."""
        keys = {
            "family": "mixtral",
            "layers": 1,
            "hidden": 32,
            "heads": 2,
            "vocab": 64,
            "n_experts": 8,
            "top_k": 2,
            "expert_ffn_hidden": 16,
        }
        return ModelSpec.model_validate(keys | self.model)


BATCH, SEQ = 4, 8


def whole_layer(spec: ModelSpec) -> MoE:
    """The layer of one process, with weights of one seed."""
    draw = torch.Generator().manual_seed(1)
    moe = MoE(spec)
    for parameter in moe.parameters():
        parameter.data.normal_(std=0.2, generator=draw)
    return moe


def about(seq: int = 8, **keys: Any) -> Pass:
    """A training pass over whole sequences."""
    return Pass(rope=None, order=torch.arange(seq), **keys)


def router(**model: Any) -> Router:
    """The router of a tiny layer; `model` overrides keys."""
    return whole_layer(Case(model=model).spec).router


def batch(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """x [batch, seq, hidden] and the gradient of the loss with respect to the output."""
    draw = torch.Generator().manual_seed(2)
    shape = (BATCH, SEQ, spec.hidden)
    # Not centred, so that some experts get far more tokens than others.
    return torch.randn(shape, generator=draw) + 0.5, torch.randn(shape, generator=draw)


def order_of(seq: int, ranks: int, rank: int) -> Tensor:
    """Places of the early and the late part of a sequence that one of `ranks` has."""
    parts = torch.arange(seq).chunk(2 * ranks)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]))


def own_part(x: Tensor, case: Case, rank: int) -> tuple[Tensor, Pass]:
    """What rank `rank` of ep has of x, and the pass it belongs to."""
    order = torch.arange(x.shape[1])
    if case.cut == "batch":
        x = x.chunk(case.ep)[rank]
    elif case.cut == "slices":
        x = x.chunk(case.ep, dim=1)[rank]
    elif case.cut == "context":
        order = order_of(x.shape[1], case.ep, rank)
        x = x[:, order]
    elif case.cut == "first":
        x = x if rank == 0 else x[:0]
    return x, Pass(rope=None, order=order)


def step(moe: MoE, x: Tensor, grad: Tensor, about: Pass) -> dict[str, Tensor]:
    """Forward and backward; everything that may be compared."""
    x = x.clone().requires_grad_()
    out = moe(x, about)
    out.backward(grad)
    found = {f"grad.{name}": p.grad for name, p in moe.named_parameters()}
    assert x.grad is not None
    penalty = torch.zeros(()) if about.penalty is None else about.penalty
    state = {"out": out.detach(), "x": x.grad, "penalty": penalty, "counts": moe.router.counts}
    gradients = {name: g for name, g in found.items() if g is not None}
    assert len(gradients) == len(found)
    return state | gradients


def cast(moe: MoE, dtype: torch.dtype) -> MoE:
    """The parameters in `dtype`; the router's own state stays as it is."""
    for parameter in moe.parameters():
        parameter.data = parameter.data.to(dtype)
    return moe


def silence(moe: MoE, case: Case) -> None:
    """Keep tokens from the experts `unused`, and make the router's own state uneven."""
    moe.router.bias[list(case.unused)] = -1e3
    moe.router.load.copy_(torch.arange(1, moe.router.load.numel() + 1) / 36)


def on_one_process(case: Case) -> dict[str, Tensor]:
    """The reference."""
    moe = cast(whole_layer(case.spec), case.dtype)
    silence(moe, case)
    x, grad = (t.to(case.dtype) for t in batch(case.spec))
    return step(moe, x, grad, Pass(rope=None, order=torch.arange(SEQ)))


def rank_step(case: Case, rank: int) -> dict[str, Tensor]:
    """One rank's share of the same step."""
    moe, (ep, etp, sequence) = whole_layer(case.spec), _axes(case, rank)
    weights = {name: getattr(moe.experts, name).data for name in NAMES}
    ends = partial(_through, _CopyIn, etp), partial(_through, _AddUp, etp)
    widths = etp if case.etp > 1 else None
    apply_expert_parallel(moe, ep, widths, sequence, case.where, *ends)
    held = list(case.where.on(ep.index))
    for name, whole in weights.items():
        dim = 2 if name == "down" else 1
        part = whole[held].chunk(case.etp, dim=dim)[etp.index]
        getattr(moe.experts, name).data = part.clone()
    silence(moe, case)
    cast(moe, case.dtype)
    _move(moe, ep, case)
    _break(moe, case)
    x, grad = (t.to(case.dtype) for t in batch(case.spec))
    x, about = own_part(x, case, ep.index)
    return step(moe, x, own_part(grad, case, ep.index)[0], about)


def _axes(case: Case, rank: int) -> tuple[Axis, Axis, Axis]:
    clock = Clock()
    grid = torch.arange(case.ep * case.etp).view(case.ep, case.etp)

    def join(rows: Tensor, index: int) -> Axis:
        mine = Axis((rank,), 0, None, clock)
        for ranks in rows.tolist():
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if rank in ranks:
                mine = Axis(tuple(ranks), index, group, clock)
        return mine

    ep = join(grid.t(), rank // case.etp)
    etp = join(grid, rank % case.etp)
    alone = Axis((rank,), 0, None, clock)
    return ep, etp, ep if case.cut in ("slices", "context") else alone


def _move(moe: MoE, ep: Axis, case: Case) -> None:
    if case.moved_to is None:
        return
    for name in NAMES:
        parameter = getattr(moe.experts, name)
        parameter.data = move_experts(ep, case.where, case.moved_to, parameter.data)
    set_placement(moe, ep, case.moved_to)


def _break(moe: MoE, case: Case) -> None:
    if case.fault == "gradient times ep":
        moe.experts.merge = lambda grad: grad * case.ep
    elif case.fault == "penalty not divided":
        moe.router.copies = 1
    elif case.fault == "sequence loss of own part":
        moe.router.sequence = None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        ctx.tp.all_reduce(grad)
        return grad, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        total = x.clone()
        tp.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _through(function: Any, tp: Axis, x: Tensor) -> Tensor:
    out: Tensor = function.apply(x, tp)
    return out


def on_ranks(cases: list[Case], folder: Path) -> list[dict[str, Tensor]]:
    """Run all `cases`, which need equally many ranks, and put each one's parts together."""
    world = cases[0].ep * cases[0].etp
    assert all(case.ep * case.etp == world for case in cases)
    # A clean process forks the ranks: it has torch already, and no threads.
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["expert_workers"])
    ranks = [start.Process(target=_rank, args=(cases, folder, r, world)) for r in range(world)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(TIMEOUT_S)
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * world
    results = [torch.load(folder / f"{rank}.pt") for rank in range(world)]
    parts = [[result[i] for result in results] for i in range(len(cases))]
    return [put_together(case, found) for case, found in zip(cases, parts, strict=True)]


def _rank(cases: list[Case], folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    torch.save([rank_step(case, rank) for case in cases], folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def put_together(case: Case, ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of all ranks as one process would have them, as the trainer adds them up."""
    firsts = ranks[:: case.etp]  # of ranks that have the same tokens, one
    where = case.moved_to or case.where
    whole = {name: _join_tokens(case, [r[name] for r in firsts]) for name in ("out", "x")}
    whole["counts"] = _sum([r["counts"] for r in firsts])
    for name in ("penalty", "grad.router.weight"):
        whole[name] = _sum([r[name] for r in ranks])
    for name in NAMES:
        key, dim = f"grad.experts.{name}", 2 if name == "down" else 1
        slices = [torch.cat([r[key] for r in ranks[i :: case.etp]]) for i in range(case.etp)]
        places = torch.cat(slices, dim)
        whole[key] = places[[held[0] for held in where.places]]
    return whole


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _join_tokens(case: Case, parts: list[Tensor]) -> Tensor:
    if case.cut in ("batch", "first"):
        return torch.cat(parts)
    joined = torch.cat(parts, dim=1)
    order = torch.cat([order_of(SEQ, case.ep, rank) for rank in range(case.ep)])
    return joined[:, order.argsort()] if case.cut == "context" else joined
