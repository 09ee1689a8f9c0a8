"""What a worker of `meshwright train` is given, and how it opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.opening import StoreAt, read_commit
from meshwright.checkpoint.reader import Reader
from meshwright.data.held_out import open_held_out
from meshwright.data.order import MixedRows
from meshwright.data.rows import Checks, check_goes_on, open_rows
from meshwright.data.tolerance import BadSamples
from meshwright.plan.job import Job
from meshwright.train.loop import RunInputs
from meshwright.train.state import load_state
from meshwright.train.trainer import Trainer


@dataclass(frozen=True)
class TrainArgs:
    """What `worker.main` needs, as plain values. The prefixes of the stores to train and to
    evaluate on are one, or one for each source, None for a source without anything held out.
    `checkpoints` are the fields of a `StoreAt`, `attempt` names this incarnation among its parts,
    `resume_from` is a commit as `STORE#ID` or None, `end_of_text` the token that ends a document,
    `predicted_step_time_s` the planner's; `faults` are those that a drill has armed (see
    `faults.Fault`), `replay` is for trials (see `feeding.StepFeed`), `plan` is what
    commits keep of it, `begun` the number of the last record of the branch, `made_with` what else
    commits bind: the code, and which data these are."""

    job: dict[str, Any]
    train_prefix: str | Sequence[str]
    held_out_prefix: str | Sequence[str | None]
    checkpoints: Mapping[str, str]
    attempt: str
    resume_from: str | None
    baselines: dict[str, float]
    end_of_text: int
    predicted_step_time_s: float | None = None
    faults: Sequence[dict[str, Any]] = ()
    replay: int | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    begun: int | None = None
    made_with: Mapping[str, Any] = field(default_factory=dict)


def open_inputs(args: TrainArgs, job: Job, peak_flops: float) -> RunInputs:
    """The data of `job`, and where its checkpoints go. Raises DataError if the run would go on with
    other data than it began with."""
    counted = BadSamples(allowed=None)  # by the loop, over all ranks
    rows = open_samples(args.train_prefix, job, args.end_of_text, counted)
    if (reader := begins_from(args)) is not None:
        check_goes_on(rows, reader.meta, reader.step * job.data.global_batch)
    aside = (
        [args.held_out_prefix] if isinstance(args.held_out_prefix, str) else args.held_out_prefix
    )
    return RunInputs(
        train=rows,
        held_out=open_held_out(
            [None if prefix is None else Path(prefix) for prefix in aside],
            job.data.seq_len,
            rows.order.mixture,
            job.data.reading(job.cluster.processes),
        ),
        checkpoints=StoreAt(**args.checkpoints),
        attempt=args.attempt,
        baselines=args.baselines,
        peak_flops=peak_flops,
        predicted_step_time_s=args.predicted_step_time_s,
        replay=args.replay,
        plan=args.plan,
        begun=args.begun,
        made_with=args.made_with,
    )


def open_samples(
    prefix: str | Sequence[str],
    job: Job,
    end_of_text: int | None = None,
    bad: BadSamples | None = None,
) -> MixedRows:
    """The training samples of `job` from the token store at `prefix`, or one for each source. What
    is wrong with them is told to `bad`; without it, reading them raises DataError."""
    return open_rows(
        [Path(one) for one in ([prefix] if isinstance(prefix, str) else prefix)],
        job.data,
        job.job.seed,
        end_of_text,
        job.data.reading(job.cluster.processes),
        Checks(job.model.vocab, bad or BadSamples()),
    )


def start(trainer: Trainer, args: TrainArgs) -> int:
    """Give `trainer` its first weights, or those of a checkpoint; the step to go on with."""
    if (reader := begins_from(args)) is not None:
        return load_state(trainer, reader)
    trainer.initialise()
    return 0


def begins_from(args: TrainArgs) -> Reader | None:
    """The commit that a run begins from, None for one that draws its own weights."""
    if args.resume_from is None:
        return None
    return read_commit(args.resume_from, args.checkpoints["encrypt"])


def first_step(args: TrainArgs) -> int:
    """The step that `start` goes on with."""
    reader = begins_from(args)
    return 0 if reader is None else reader.step
