"""One case of `gpu.py` with our trainer: a line of JSON for each step."""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Iterator

import torch
from gpu_case import Case
from torch import Tensor
from workload import worker_context

from meshwright.plan.data_section import DataSection
from meshwright.plan.job import Job, JobSection, OptimizerSection
from meshwright.plan.layout import Layout
from meshwright.train.device import pick_device, synchronise
from meshwright.train.trainer import Trainer
from meshwright.train.worker import joined


def job_of(case: Case) -> Job:
    """Our job for `case`, its learning rate constant as the peer has it."""
    return Job(
        job=JobSection(steps=case.steps),
        model=case.model,
        data=DataSection(seq_len=case.seq_len, global_batch=case.batch),
        layout=Layout(micro_batch=case.batch, precision=case.precision),
        optimizer=OptimizerSection(lr=case.lr, min_lr=case.lr),
    )


def batches(case: Case) -> Iterator[Tensor]:
    """Random tokens [1, batch, seq_len + 1], as many as there are steps."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(case.steps):
        yield torch.randint(case.vocab, (1, case.batch, case.seq_len + 1), generator=draw)


def train(case: Case, device: torch.device) -> Iterator[dict[str, float]]:
    """Take the steps; each with its loss, seconds and the memory it needed at most."""
    job = job_of(case)
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = worker_context(0, 1, server.getsockname()[1], server.detach())
    with joined(context, job) as mesh:
        trainer = Trainer(job, mesh, device)
        trainer.initialise()
        for step, tokens in enumerate(batches(case)):
            synchronise(device)
            start = time.perf_counter()
            agreed = trainer.gradients(tokens, step=step)
            trainer.update(step, agreed)
            synchronise(device)
            step_s = time.perf_counter() - start
            yield {"loss": agreed.loss, "step_s": step_s, "memory_gib": _peak_gib(device)}


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else 0.0


def main() -> None:
    """Train the case given as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", type=json.loads)
    case = Case(**parser.parse_args().case)
    for step in train(case, pick_device(0, 1)):
        print(json.dumps(step), flush=True)


if __name__ == "__main__":
    main()
