"""What our trainer costs on one rank: its step against a hand-written loop over the same modules.

Both sides live in one process and take the same steps in turn, the first of each pair alternating,
so whatever else the machine does falls on both. A ratio of 1.00 means that the layers of
parallelism cost nothing where there is none. Exits 1 if the two do not train the same model.
"""

from __future__ import annotations

import argparse
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import results
import torch
import torch.nn.functional as F
from torch import Tensor
from workload import Load, batches, build_job, plain_adamw, plain_model, worker_context

from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.train.trainer import Trainer
from meshwright.train.worker import joined

LOSS_TOLERANCE = 1e-5  # relative
_WARM_UP = 3  # pairs

Step = Callable[[int, Tensor], float]


@dataclass(frozen=True)
class Case:
    """A model and how its step is cut; micro-batches of `micro_batch` sequences."""

    model: str
    micro_batch: int
    accumulation: int
    seq_len: int = 256

    @property
    def load(self) -> Load:
        """The work of one step."""
        return Load(self.model, self.micro_batch * self.accumulation, self.seq_len)


@dataclass(frozen=True)
class Measured:
    """Times of each pair, and how far the losses were apart."""

    ours_s: list[float]
    plain_s: list[float]
    loss_rel: float

    @property
    def ratios(self) -> list[float]:
        """Ours / plain, pair by pair."""
        return [ours / plain for ours, plain in zip(self.ours_s, self.plain_s, strict=True)]


CASES = (
    Case("tiny", micro_batch=4, accumulation=1),
    Case("tiny", micro_batch=4, accumulation=4),
    Case("10m", micro_batch=1, accumulation=1),
    Case("10m", micro_batch=1, accumulation=4),
)


def our_step(trainer: Trainer) -> Step:
    """A step as `meshwright train` takes it."""

    def step(number: int, tokens: Tensor) -> float:
        agreed = trainer.gradients(tokens)
        trainer.update(number, agreed)
        return agreed.loss

    return step


def plain_step(job: Job) -> Step:
    """A step as one would write it by hand."""
    model = plain_model(job.model)
    optimizer = plain_adamw(model.parameters(), job.optimizer)

    def step(_number: int, tokens: Tensor) -> float:
        optimizer.zero_grad()
        total = torch.zeros(())
        for sequences in tokens:
            logits = model(sequences[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
            loss = loss / len(tokens)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.grad_clip)
        optimizer.step()
        return float(total)

    return step


def measure(case: Case, pairs: int, threads: int) -> Measured:
    """Take `pairs` steps with each side, after a warm-up."""
    steps = _WARM_UP + pairs
    job = build_job(case.load, Layout(micro_batch=case.micro_batch), steps)
    tokens = batches(case.load, steps).unflatten(1, (case.accumulation, case.micro_batch))
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = worker_context(0, 1, server.getsockname()[1], server.detach())
    with joined(context, job) as mesh:
        torch.set_num_threads(threads)
        trainer = Trainer(job, mesh, torch.device("cpu"))
        trainer.initialise()
        return take_turns(our_step(trainer), plain_step(job), tokens)


def take_turns(ours: Step, plain: Step, tokens: Tensor) -> Measured:
    """Step by step, ours first on even steps."""
    sides = {"ours": ours, "plain": plain}
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number, batch in enumerate(tokens):
        for name in sorted(sides, reverse=number % 2 == 1):
            start = time.perf_counter()
            losses[name].append(sides[name](number, batch))
            times[name].append(time.perf_counter() - start)
    apart = [abs(a - b) / b for a, b in zip(losses["ours"], losses["plain"], strict=True)]
    return Measured(times["ours"][_WARM_UP:], times["plain"][_WARM_UP:], max(apart))


def row(case: Case, found: Measured) -> list[str]:
    """One line of the table."""
    low, *_, high = statistics.quantiles(found.ratios, n=10)
    median = statistics.median
    return [
        f"{case.model}, {case.micro_batch} x {case.seq_len} tokens x {case.accumulation}",
        f"{median(found.plain_s) * 1e3:.1f}",
        f"{median(found.ours_s) * 1e3:.1f}",
        f"**{median(found.ratios):.3f}**",
        f"{low:.3f} to {high:.3f}",
        f"{found.loss_rel:.1e}",
    ]


def report(cases: dict[Case, Measured]) -> str:
    """The section of RESULTS.md."""
    facts = {
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "command": results.command(),
        "threads": str(torch.get_num_threads()),
        "load of the machine at the end": results.busy(),
    }
    header = ["step", "plain, ms", "ours, ms", "ours / plain", "10-90 %", "loss, rel"]
    body = (
        "One rank, fp32, AdamW, clipped: the median of the ratios of pairs of steps, and how far "
        "apart\nthe losses of the two sides were at worst.\n\n"
    )
    body += results.table(header, [row(case, found) for case, found in cases.items()])
    return results.section("One rank of ours against a plain PyTorch loop", facts, body)


def main() -> int:
    """Measure, print, and say whether the comparison was a fair one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=40, help="measured pairs of steps a case")
    parser.add_argument("--models", nargs="+", default=["tiny", "10m"], help="tiny, 10m")
    parser.add_argument("--threads", type=int, default=1, help="of either side")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    cases = {}
    for case in CASES:
        if case.model in options.models:
            cases[case] = measure(case, options.pairs, options.threads)
            print(*row(case, cases[case]), sep="  ", file=sys.stderr)
    text = report(cases)
    print(text)
    unequal = [case for case, found in cases.items() if not found.loss_rel <= LOSS_TOLERANCE]
    for case in unequal:
        print(f"{case}: the two sides do not train the same model", file=sys.stderr)
    if options.write and not unequal:
        results.write(text)
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
