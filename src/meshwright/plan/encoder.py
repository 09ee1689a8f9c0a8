"""An encoder on chips of its own beside a language model.

Both work at the same time on different micro-batches, as two stages of a pipeline: a step takes as
long as the slowest of the language model, the encoder, what travels between them, and reading; and
the encoder's time of one micro-batch more, in which the language model waits for its first
embeddings and the encoder for its last gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from meshwright.base.errors import ConfigError
from meshwright.catalog import Cluster
from meshwright.plan.cost.candidates import Floats
from meshwright.plan.cost.collectives import send_s
from meshwright.plan.cost.data import read_seconds
from meshwright.plan.cost.layer import ELEMENT_BYTES
from meshwright.plan.cost.oom import BALANCED
from meshwright.plan.cost.step import rates_of, step_time
from meshwright.plan.encoders import Beside
from meshwright.plan.limits import limit
from meshwright.plan.prediction import Prediction, layout_of, micro_batches, predict
from meshwright.plan.search import Found, search
from meshwright.plan.search_question import LARGEST_MICRO_BATCH, Question

MICRO_TOKENS = 32_768  # of an encoder's micro-batch at most: its items are short
ONCE = ("bubble", "dp", "optimizer", "overhead", "data")  # of a step, not of a micro-batch

TITLES = {
    "language": "the language model",
    "encoder": "the encoder",
    "transfer": "traffic between both",
    "data": "reading samples",
}

Resized = Callable[[int], Cluster | None]


@dataclass(frozen=True)
class Side:
    """One of both: what is asked of it, and its best layout."""

    question: Question
    best: Prediction

    @property
    def chips(self) -> int:
        """Chips that it stands on."""
        return self.question.cluster.chips

    @property
    def busy_s(self) -> float:
        """Seconds of a step that do not wait for storage."""
        return self.best.step_time_s - self.best.time_parts["data"]

    @property
    def lanes(self) -> int:
        """Chips of one stage of its pipeline: those that send to the other side, or receive."""
        return self.chips // self.best.layout.pp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return micro_batches(self.question, self.best.layout)

    def document(self, step_s: float) -> dict[str, Any]:
        """As plain JSON; `busy` and `mfu` are shares of a step of `step_s` seconds."""
        return {
            "chips": self.chips,
            "busy": self.busy_s / step_s,
            "mfu": self.question.flops_per_chip / step_s / self.question.peak_flops,
            "best": self.best.document(),
        }


@dataclass(frozen=True)
class Split:
    """Both on chips of their own. `terms` are seconds by the keys of `TITLES`, of which the longest
    counts; `fill_s` are those of filling and draining."""

    language: Side
    encoder: Side
    terms: dict[str, float]
    fill_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return max(self.terms.values()) + self.fill_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the language model."""
        return self.language.question.tokens / self.step_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """What four of five runs lie between: the wider of both sides."""
        sides = (self.language.best, self.encoder.best)
        low = min(side.step_time_low_s / side.step_time_s for side in sides)
        high = max(side.step_time_high_s / side.step_time_s for side in sides)
        return self.step_s * low, self.step_s * high

    @property
    def bound(self) -> str:
        """What a step waits for, in a line."""
        shares = [f"{TITLES[name]} {s / self.step_s:.1%}" for name, s in self.terms.items()]
        shares.append(f"filling and draining {self.fill_s / self.step_s:.1%}")
        return f"{TITLES[max(self.terms, key=self.terms.__getitem__)]} ({', '.join(shares)})"

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        chips = self.language.chips + self.encoder.chips
        low, high = self.interval_s
        return {
            "chips": chips,
            "share": self.encoder.chips / chips,
            "step_time_s": self.step_s,
            "step_time_low_s": low,
            "step_time_high_s": high,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_chip": self.tokens_per_s / chips,
            "terms_s": self.terms,
            "fill_s": self.fill_s,
            "bound": self.bound,
            "language": self.language.document(self.step_s),
            "encoder": self.encoder.document(self.step_s),
        }


def splits(question: Question, beside: Beside, resized: Resized) -> list[Split]:
    """Splits of the cluster of `question`, the fastest first. The encoder gets half of the nodes, a
    quarter, ..., one node, as long as it alone does not take longer than the best split so far.

    `resized` gives the cluster with another number of chips, None where it cannot have that many.
    Raises ConfigError, one line, where no split has legal layouts that fit for both.
    """
    found: list[Split] = []
    for chips in sizes(question.cluster):
        asked = encoder_question(question, beside, chips, resized)
        encoders = search(asked) if asked else None
        if encoders is None or not len(encoders.best):
            continue
        if found and encoders.best.step_s[0] >= min(split.step_s for split in found):
            break
        language = _side(_on(question, question.cluster.chips - chips, resized))
        if language is not None:
            pair = _encoder_for(language, encoders)
            found.append(_split(question.cluster, beside, language, *pair))
    if not found:
        raise _nothing(question, beside, resized)
    return sorted(found, key=lambda split: split.step_s)


def sizes(cluster: Cluster) -> list[int]:
    """Chips that an encoder may get: whole nodes, doubled up to half of the cluster; most first."""
    node = cluster.chips_per_node
    doubled = (node << power for power in range(cluster.nodes.bit_length()))
    return [chips for chips in doubled if 2 * chips <= cluster.chips][::-1]


def encoder_question(
    question: Question, beside: Beside, chips: int, resized: Resized
) -> Question | None:
    """What is asked of the encoder: a sequence is an item, a batch all items of a step."""
    cluster, tokens = resized(chips), beside.encoder.tokens
    if cluster is None:
        return None
    return replace(
        question,
        spec=beside.encoder.spec,
        cluster=cluster,
        seq_len=tokens,
        global_batch=question.global_batch * beside.images,
        imbalance=BALANCED,
        notes=(),
        causal=False,
        trained=not beside.frozen,
        sample_bytes=beside.image_bytes,
        largest_micro_batch=max(LARGEST_MICRO_BATCH, MICRO_TOKENS // tokens),
    )


def transfer_s(cluster: Cluster, beside: Beside, language: Side, encoder: Side) -> float:
    """Seconds of a step's embeddings one way and their gradients the other, in 16 bits, over the
    level of the network of `cluster` that joins both. As many chips send at the same time as the
    smaller of the two facing stages has. A frozen encoder sends its own channels, and nothing comes
    back."""
    question = language.question
    width = beside.image_tokens * question.spec.hidden
    if beside.frozen:
        width = beside.encoder.tokens * beside.encoder.hidden
    size = question.global_batch * beside.images * width * ELEMENT_BYTES
    network = rates_of(question.work, cluster, question.constants).network
    lanes = min(language.lanes, encoder.lanes)
    once = float(send_s(network, cluster.chips, size / lanes))
    return once if beside.frozen else 2.0 * once


def fill_s(
    parts: Mapping[str, Floats], counts: Floats, stages: ArrayLike, wanted: ArrayLike
) -> Floats:
    """Seconds in which the items of one micro-batch of the language model pass all stages of an
    encoder, forward and backward. `parts` and `counts` are those of encoders' steps and their
    micro-batches, `wanted` the micro-batches of the language model. Of each but the first one more
    step of that pipeline passes."""
    steady = [part for name, part in parts.items() if name not in ONCE]
    each = sum(steady, np.zeros_like(counts)) / counts
    return np.asarray(each * (np.ceil(counts / np.asarray(wanted)) + np.asarray(stages) - 1.0))


def _encoder_for(language: Side, found: Found) -> tuple[Side, float]:
    """Of the encoder's fast layouts the one with the shortest step of both, and its seconds of
    filling: where the language model is slower anyway, smaller micro-batches fill sooner."""
    question, c = found.question, found.best.candidates
    time = step_time(question.work, question.cluster, c, question.constants)
    counts = c.micro_batches(question.global_batch)
    filling = fill_s(time.parts, counts, c.pp, language.micro_batches)
    best = int(np.argmin(np.maximum(time.step_s, language.busy_s) + filling))
    side = Side(question, predict(question, layout_of(question, c, best)))
    return side, float(filling[best])


def _split(
    cluster: Cluster, beside: Beside, language: Side, encoder: Side, filling_s: float
) -> Split:
    reading = (read_seconds(one.question.work, one.question.cluster) for one in (language, encoder))
    terms = {
        "language": language.busy_s,
        "encoder": encoder.busy_s,
        "transfer": transfer_s(cluster, beside, language, encoder),
        "data": max(reading),
    }
    return Split(language, encoder, terms, filling_s)


def _on(question: Question, chips: int, resized: Resized) -> Question | None:
    cluster = resized(chips)
    return None if cluster is None else question.on(cluster)


def _side(question: Question | None) -> Side | None:
    """The fastest layout, None where nothing is legal and fits."""
    if question is None:
        return None
    found = search(question, slack=1.0)
    if not len(found.best):
        return None
    return Side(question, predict(question, layout_of(question, found.best.candidates, 0)))


def _nothing(question: Question, beside: Beside, resized: Resized) -> ConfigError:
    """Why there is no split: the cluster is one node, or what stops the encoder, else the language
    model, on half of the chips."""
    cluster = question.cluster
    every = sizes(cluster)
    if not every:
        fix = (
            f"is one node; an encoder on its own chips needs 2, {2 * cluster.chips_per_node} chips"
        )
        return ConfigError("cluster", cluster.name, fix)
    asked = encoder_question(question, beside, every[0], resized)
    if asked is not None and not len((there := search(asked, slack=1.0)).best):
        fix = f"does not fit on {every[0]} chips of its own: {limit(asked, there)}"
        return ConfigError("encoder", beside.name, fix)
    rest = _on(question, cluster.chips - every[0], resized)
    why = "no such number of chips" if rest is None else limit(rest, search(rest, slack=1.0))
    fix = f"leaves too few chips beside an encoder on {every[0]} of them: {why}"
    return ConfigError("cluster", cluster.name, fix)
