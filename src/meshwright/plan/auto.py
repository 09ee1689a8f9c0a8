"""`layout = "auto"` of a job file: the fastest layout that the trainer accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.base.errors import ConfigError
from meshwright.catalog import cluster
from meshwright.plan.combinations import check_job
from meshwright.plan.cost.constants import Constants
from meshwright.plan.cost.framework import framework
from meshwright.plan.cost.oom import BALANCED, NATURAL
from meshwright.plan.layout import Layout
from meshwright.plan.limits import refusal
from meshwright.plan.prediction import layout_of
from meshwright.plan.search import search
from meshwright.plan.search_question import Question

if TYPE_CHECKING:
    from meshwright.plan.job import Job


def question_of(job: Job, constants: Constants | None = None) -> Question:
    """The question that `job` asks of our own trainer; its layout gives the precision only."""
    return Question(
        spec=job.model,
        cluster=cluster(job.cluster.ref),
        framework=framework("meshwright"),
        seq_len=job.data.seq_len,
        global_batch=job.data.global_batch,
        precision=job.layout.precision,
        imbalance=NATURAL if job.model.n_experts else BALANCED,
        constants=constants or Constants.shipped(),
    )


def best_layout(
    job: Job,
    constants: Constants | None = None,
    check: Callable[[Job], object] = check_job,
) -> Layout:
    """The fastest layout for `job` on its cluster, whatever `job.layout` says; `check` refuses what
    the trainer cannot run. Raises ConfigError if nothing fits, with the reason."""
    question = question_of(job, constants)
    found = search(question)
    refused: ConfigError | None = None
    for index in range(len(found.best)):
        layout = layout_of(question, found.best.candidates, index)
        try:
            check(job.model_copy(update={"layout": layout}))
        except ConfigError as error:
            refused = refused or error
            continue
        return layout
    if refused:
        raise refused
    raise refusal(question, found, lambda chips: cluster(f"local:{chips}")).error(question)
