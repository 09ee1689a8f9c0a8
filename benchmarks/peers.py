"""The trainers that are compared: each takes the same step with the same modules on two ranks.

A peer is a context manager that gives a `Step` and that its process never leaves. RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT are set as by torchrun. Every peer gets torch's fused AdamW; else its
defaults hold. Ours also agrees on the loss of all ranks in every step; the others' is summed up at
the end, outside the timing. A library is imported in its own function: the others run without it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from workload import Load, build_job, plain_adamw, plain_model, worker_context

from meshwright.plan.job import Job
from meshwright.plan.layout import Layout

Step = Callable[[int, Tensor], Tensor]
"""(number of the step, this rank's tokens [sequences, seq_len + 1]) -> its mean loss."""


@dataclass(frozen=True)
class Task:
    """What a rank is to train, and which rank it is."""

    load: Load
    steps: int
    rank: int
    world: int

    @property
    def sequences(self) -> int:
        """Sequences of one rank in one step."""
        return self.load.global_batch // self.world

    def job(self, dp_replicate: int = 1, dp_shard: int = 1) -> Job:
        """Our job: one micro-batch a step."""
        layout = Layout(dp_replicate=dp_replicate, dp_shard=dp_shard, micro_batch=self.sequences)
        return build_job(self.load, layout, self.steps)


Peer = Callable[[Task], AbstractContextManager[Step]]


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy in nats of the next token, forward only."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@contextmanager
def ours(task: Task, axis: str) -> Iterator[Step]:
    """Ours, with `axis` over all ranks."""
    from meshwright.train.trainer import Trainer
    from meshwright.train.worker import joined

    job = task.job(**{axis: task.world})
    port = int(os.environ["MASTER_PORT"])
    leads = task.rank == 0
    store_fd = socket.create_server(("127.0.0.1", port)).detach() if leads else None
    with joined(worker_context(task.rank, task.world, port, store_fd), job) as mesh:
        trainer = Trainer(job, mesh, torch.device("cpu"))
        trainer.initialise()

        def step(number: int, tokens: Tensor) -> Tensor:
            agreed = trainer.gradients(tokens[None])
            trainer.update(number, agreed)
            return torch.tensor(agreed.loss)

        yield step


@contextmanager
def torch_ddp(task: Task) -> Iterator[Step]:
    """DistributedDataParallel in a loop written by hand."""
    dist.init_process_group("gloo")
    job = task.job(task.world)
    model = nn.parallel.DistributedDataParallel(
        plain_model(job.model),
        gradient_as_bucket_view=True,  # saves a copy of every gradient
    )
    optimizer = plain_adamw(model.parameters(), job.optimizer)

    def step(_number: int, tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.grad_clip)
        optimizer.step()
        return loss.detach()

    yield step


@contextmanager
def accelerate_fsdp2(task: Task) -> Iterator[Step]:
    """Hugging Face Accelerate with FSDP2, every layer a unit of its own."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # Accelerate takes no notice of the plugin on a CPU and falls back to DDP without a word, though
    # its FSDP2 code runs there. These two attributes are what it sets elsewhere.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    job = task.job(task.world)
    model = plain_model(job.model)
    model, optimizer = accelerator.prepare(model, plain_adamw(model.parameters(), job.optimizer))
    if not issubclass(kind := type(model), FSDPModule):
        raise RuntimeError(f"Accelerate made a {kind.__name__}: nothing is sharded")

    def step(_number: int, tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, tokens)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), job.optimizer.grad_clip)
        optimizer.step()
        return loss.detach()

    yield step


@contextmanager
def deepspeed_zero(task: Task, stage: int) -> Iterator[Step]:
    """DeepSpeed's engine with ZeRO `stage`."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    job = task.job(task.world)
    model = plain_model(job.model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=plain_adamw(model.parameters(), job.optimizer),
        config={
            "train_micro_batch_size_per_gpu": task.sequences,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": job.optimizer.grad_clip,
            "zero_optimization": {"stage": stage},
        },
    )

    def step(_number: int, tokens: Tensor) -> Tensor:
        loss = mean_loss(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    yield step


def peers() -> Mapping[str, Peer]:
    """Every row of the table. The first is what the losses of the others are compared with."""
    return {
        "PyTorch DDP": torch_ddp,
        "Meshwright dp_replicate": partial(ours, axis="dp_replicate"),
        "DeepSpeed ZeRO-1": partial(deepspeed_zero, stage=1),
        "DeepSpeed ZeRO-2": partial(deepspeed_zero, stage=2),
        "Meshwright dp_shard": partial(ours, axis="dp_shard"),
        "Accelerate FSDP2": accelerate_fsdp2,
        "DeepSpeed ZeRO-3": partial(deepspeed_zero, stage=3),
    }
