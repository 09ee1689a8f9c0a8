"""Whether one layout is legal for a question: what the search leaves out is not priced either."""

from __future__ import annotations

from meshwright.base.errors import ConfigError
from meshwright.plan.combinations import check_schedule
from meshwright.plan.expert_rules import check_experts
from meshwright.plan.job import Job
from meshwright.plan.layout import Layout
from meshwright.plan.search_question import Question
from meshwright.plan.search_space import tensor_problem


def check_layout(question: Question, layout: Layout) -> None:
    """Refuse what no trainer can run on this model, whatever it would cost. Raises ConfigError."""
    _check_stages(question, layout)
    if reason := tensor_problem(question, layout.tp):
        raise ConfigError("layout.tp", layout.tp, reason.removeprefix("tp "))
    _check_sequence(question, layout)
    # Rules about experts look at the model and the layout of a job, at nothing else.
    check_experts(Job.model_construct(model=question.spec, layout=layout))


def _check_stages(question: Question, layout: Layout) -> None:
    check_schedule(layout)
    layers = question.spec.layers
    most = layers + 2 if question.framework.even_stages else layers  # embedding and head count too
    if layout.virtual_stages > most:
        key, value = ("pp", layout.pp) if layout.chunks == 1 else ("vpp", layout.vpp)
        fix = f"makes {layout.virtual_stages} stages, more than the {layers} layers of the model"
        raise ConfigError(f"layout.{key}", value, fix)


def _check_sequence(question: Question, layout: Layout) -> None:
    if question.seq_len % layout.sequence_split:
        fix = f"cuts {question.seq_len} tokens into {layout.sequence_split}; change tp or cp"
        fix += ", or add nosp" if layout.sequence_parallel else ""
        raise ConfigError("layout", layout.label, fix)
    heads = question.spec.heads // layout.tp
    if layout.cp_method == "ulysses" and heads % layout.cp:
        fix = f"does not divide the {heads} heads of a rank, which ulysses shares out; use ring"
        raise ConfigError("layout.cp", layout.cp, fix)
