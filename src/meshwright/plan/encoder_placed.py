"""Where an encoder should stand: on chips of its own, or with the language model's first stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.plan.encoder import Resized, Split, encoder_question, splits
from meshwright.plan.encoders import Beside
from meshwright.plan.prediction import Prediction, layout_of, predict
from meshwright.plan.search import Found, search
from meshwright.plan.search_notation import write_layout
from meshwright.plan.search_question import Question


@dataclass(frozen=True)
class Colocated:
    """The encoder on the `chips` of the language model's first stage, which does both one after the
    other: a step is the sum. `language` and `encoder` name the layouts."""

    language: str
    encoder: str
    chips: int
    step_time_s: float
    tokens_per_s: float

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Placement:
    """Splits, the fastest first, and what colocation would be; None where it does not fit."""

    beside: Beside
    splits: tuple[Split, ...]
    colocated: Colocated | None

    @property
    def best(self) -> Split:
        """The fastest split."""
        return self.splits[0]

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        beside = self.beside
        return {
            "name": beside.name,
            "source": beside.encoder.source,
            "params": beside.encoder.spec.params,
            "frozen": beside.frozen,
            "images": beside.images,
            "image_tokens": beside.image_tokens,
            **self.best.document(),
            "colocated": self.colocated and self.colocated.document(),
            "tried": [
                {"encoder_chips": one.encoder.chips, "tokens_per_s": one.tokens_per_s}
                for one in self.splits
            ],
            "assumptions": list(assumptions(beside)),
        }


def place(question: Question, beside: Beside, resized: Resized) -> Placement:
    """The best split of the cluster of `question`, and how far colocation would be. `resized` and
    what is raised are as of `splits`."""
    found = splits(question, beside, resized)
    return Placement(beside, tuple(found), colocated(question, beside, resized))


def colocated(question: Question, beside: Beside, resized: Resized) -> Colocated | None:
    """The fastest sum of both on the whole cluster, over the numbers of stages of the language
    model. The encoder has the memory that is left in nine of ten runs of it."""
    found = search(question)
    best: Colocated | None = None
    for language in _candidates(question, found):
        if best and language.step_time_s >= best.step_time_s:
            break
        one = _with(question, beside, language, resized)
        if one and (best is None or one.step_time_s < best.step_time_s):
            best = one
    return best


def _candidates(question: Question, found: Found) -> Iterator[Prediction]:
    """Of each number of stages the fastest layout and the one that needs least memory; the fastest
    first."""
    stages = found.best.candidates.pp
    chosen: set[int] = set()
    for pp in np.unique(stages):
        (here,) = np.nonzero(stages == pp)
        chosen |= {int(here[0]), int(here[np.argmin(found.best.memory_bytes[here])])}
    for index in sorted(chosen):
        yield predict(question, layout_of(question, found.best.candidates, index))


def _with(
    question: Question, beside: Beside, language: Prediction, resized: Resized
) -> Colocated | None:
    """The encoder on the first stage of `language`, None where it does not fit there."""
    chips = question.cluster.chips // language.layout.pp
    asked = encoder_question(question, beside, chips, resized)
    left = question.cluster.chip.memory_bytes - language.memory_high_bytes
    if asked is None or left <= 0:
        return None
    smaller = replace(asked.cluster.chip, memory_bytes=left)
    there = search(asked.on(replace(asked.cluster, chip=smaller)), slack=1.0).best
    if not len(there):
        return None
    step_s = language.step_time_s + float(there.step_s[0])
    name = write_layout(there.candidates.layout(0))
    return Colocated(language.name, name, chips, step_s, question.tokens / step_s)


def assumptions(beside: Beside) -> tuple[str, ...]:
    """What a placement rests on, as lines."""
    projector = "language model" if beside.frozen else "encoder"
    return (
        *beside.notes,
        f"the encoder's shape: {beside.encoder.source or 'as given'}",
        "all items are as large, and evenly spread over sequences; no mask in the encoder",
        f"the projector stands with the {projector}; its arithmetic is not counted",
        "the encoder runs ahead: beside filling and draining, neither side waits for the other",
        "constants are fitted on language models; no published run of an encoder is among them",
    )
