"""What a job is to a simulated cluster: what a step takes and sends, how its loss falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.base.events import Metrics
from meshwright.catalog import Cluster, cluster
from meshwright.conduct.places import Shapes, resized
from meshwright.control.engines.simulation.dice import normal, uniform
from meshwright.plan.auto import question_of
from meshwright.plan.combinations import check_job
from meshwright.plan.job import Job
from meshwright.plan.prediction import predict
from meshwright.plan.search_traffic import traffic

ASSUMED_MFU = 0.35  # where the planner cannot tell
ASSUMED_COMM = 0.2  # share of a step, there
_SENT = ("tp", "cp", "ep", "shard", "p2p", "dp")  # parts of a predicted step on links
_MOST_SIZES = 16  # smaller sizes of a layout that are looked at
_SAVED_EVERY = 100  # steps, where the job leaves it to the trainer


@dataclass(frozen=True)
class Work:
    """One job. Seconds are of a step on nominal chips; bytes are of a chip, `link_bytes` sent in a
    step; `tensor` is the share of the computing time in which matrix units are busy; `labels` names
    the layout by its number of replicas."""

    steps: int
    seed: int
    world: int
    compute_s: float
    comm_s: float
    tensor: float
    mfu: float
    tokens: int
    memory_bytes: float
    link_bytes: float
    vocab: int
    params: float
    every: int
    eval_every: int
    survives: bool
    shrinks: bool
    stages: int
    inner: int
    labels: Mapping[int, str]
    lr: float
    min_lr: float
    warmup: int
    origin: str

    @property
    def step_s(self) -> float:
        """Of a step on nominal chips with all replicas."""
        return self.compute_s + self.comm_s

    @property
    def shapes(self) -> Shapes:
        """The sizes that its layout can run with."""
        return Shapes(self.stages, self.inner, tuple(sorted(self.labels)))

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "labels": {str(n): label for n, label in self.labels.items()}}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Work:
        """Of what `document` gave."""
        labels = {int(n): label for n, label in document["labels"].items()}
        return cls(**{**document, "labels": labels})


def work_of(job: Job, there: Cluster, instance: str) -> Work:
    """`job` on chips of the cluster `there`, by the planner where it knows such a layout."""
    layout, cost = job.layout, _cost(job, there, instance)
    every = job.checkpoint.every
    warmup = job.optimizer
    return Work(
        steps=job.job.steps,
        seed=job.job.seed,
        world=layout.world,
        **cost,
        tokens=job.data.seq_len * job.data.global_batch,
        vocab=job.model.vocab,
        params=float(job.model.params),
        every=_SAVED_EVERY if isinstance(every, str) else every,
        eval_every=job.job.eval_every,
        survives=job.resilience.survives,
        shrinks=job.resilience.on_no_spare == "shrink",
        stages=layout.pp,
        inner=layout.dp_shard * layout.cp * layout.tp,
        labels=_labels(job),
        lr=warmup.lr,
        min_lr=warmup.min_lr,
        warmup=warmup.warmup_steps,
    )


def _cost(job: Job, there: Cluster, instance: str) -> dict[str, Any]:
    layout, chip = job.layout, there.chip
    precision = layout.precision if layout.precision in chip.peak_flops else "bf16"
    flops = job.model.flops_per_token(job.data.seq_len) * job.data.seq_len * job.data.global_batch
    peak = chip.peak_flops.get(precision) or max(chip.peak_flops.values())
    try:
        question = question_of(job).on(cluster(f"{instance}:{layout.world}"))
        question = replace(question, precision=precision)
        found = predict(question, layout)
        sent = sum(one.bytes for one in traffic(question, layout).values())
    except ConfigError as error:
        step_s = max(1e-3, flops / layout.world / (peak * ASSUMED_MFU))
        return {
            "compute_s": step_s * (1 - ASSUMED_COMM),
            "comm_s": step_s * ASSUMED_COMM if layout.world > 1 else 0.0,
            "tensor": ASSUMED_MFU / (1 - ASSUMED_COMM),
            "mfu": flops / layout.world / step_s / peak,
            "memory_bytes": min(0.9 * chip.memory_bytes, 18.0 * job.model.params / layout.world),
            "link_bytes": 6.0 * job.model.params / layout.world,
            "origin": f"assumed: MFU {ASSUMED_MFU:g}, the planner has no figure ({error})",
        }
    comm_s = min(0.9 * found.step_time_s, sum(found.time_parts.get(name, 0.0) for name in _SENT))
    compute_s = found.step_time_s - comm_s
    return {
        "compute_s": compute_s,
        "comm_s": comm_s,
        "tensor": min(1.0, found.mfu * found.step_time_s / compute_s),
        "mfu": found.mfu,
        "memory_bytes": min(found.memory_bytes, 0.97 * chip.memory_bytes),
        "link_bytes": sent,
        "origin": found.origin,
    }


def _labels(job: Job) -> dict[int, str]:
    """Its own size, and smaller ones that it could go on with."""
    most = job.layout.dp_replicate
    found = {most: job.layout.label}
    if not job.resilience.survives:
        return found
    auto = job.resilience.model_copy(update={"redundancy": "auto"})
    for replicas in range(most - 1, max(0, most - 1 - _MOST_SIZES), -1):
        smaller = resized(job.model_copy(update={"resilience": auto}), replicas)
        try:
            check_job(smaller)
        except ConfigError:
            continue
        found[replicas] = smaller.layout.label
    return found


def metrics(work: Work, step: int, step_s: float, chips: int, spoiled: int | None) -> Metrics:
    """Those of one step, plausible and simulated: its loss is a power law of the steps with noise,
    from that of a uniform guess. `spoiled`: the step from which on wrong numbers were learnt."""
    noise = float(normal(work.seed, step, 1)[0])
    taken_s = step_s * (1.0 + 0.01 * float(uniform(work.seed, step, 2)[0]))
    slower = work.step_s * work.world / max(1, chips) / taken_s
    return Metrics(
        step=step,
        loss=loss(work, step) + 0.02 * noise + _spoilt(step, spoiled),
        tokens=work.tokens,
        tokens_per_s=work.tokens / taken_s,
        step_time_s=taken_s,
        mfu=work.mfu * slower,
        grad_norm=0.25 + 3.0 / math.sqrt(1.0 + step / 8.0) * (1.0 + 0.15 * abs(noise)),
        lr=rate(work, step),
        data_wait_s=0.002 * taken_s,
        comm_wait_s=min(taken_s, work.comm_s + max(0.0, taken_s - work.step_s) / 2),
        predicted_step_time_s=work.step_s,
    )


def loss(work: Work, step: int) -> float:
    """Nats for each token after `step` steps, without noise: power laws as of Kaplan et al.,
    arXiv 2001.08361, with a floor that falls with the size of the model."""
    guess = math.log(work.vocab)
    floor = min(0.6 * guess, 1.5 + math.pow(2e9 / max(work.params, 1e6), 0.08) * 0.4)
    bend = 20.0 * (1.0 + float(uniform(work.seed, 3)[0]))
    return float(floor + (guess - floor) * math.pow(1.0 + step / bend, -0.45))


def _spoilt(step: int, spoiled: int | None) -> float:
    return 0.0 if spoiled is None else 2.0 * (1.0 - math.exp(-max(0, step - spoiled) / 20.0))


def rate(work: Work, step: int) -> float:
    """Of learning: linear warm-up, then cosine, as the trainer does it."""
    if step <= work.warmup:
        return work.lr * step / max(1, work.warmup)
    along = (step - work.warmup) / max(1, work.steps - work.warmup)
    return work.min_lr + (work.lr - work.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))
