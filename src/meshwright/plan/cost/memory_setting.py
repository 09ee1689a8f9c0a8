"""What the parts of the memory model share: the question, one pipeline rank, derived columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.cost.candidates import Candidates, Floats
from meshwright.plan.cost.framework import Framework
from meshwright.plan.cost.memory_shape import MemoryShape, memory_shape
from meshwright.plan.cost.workload import Workload


@dataclass(frozen=True)
class Setting:
    """A workload as the memory model sees it. `imbalance` is the load of the fullest expert rank
    over the mean; `optimizer_bytes` of a parameter, its master copy aside. A model that is not
    `trained` has no gradients, no master copy, no optimizer, and nothing waits for a backward."""

    shape: MemoryShape
    framework: Framework
    seq_len: int
    global_batch: int
    precision: str
    optimizer_bytes: float = 8.0
    flash: bool = True
    imbalance: float = 1.0
    trained: bool = True

    @property
    def element_bytes(self) -> float:
        """Bytes of an activation."""
        return 4.0 if self.precision == "fp32" else 2.0

    def micro_batches(self, c: Candidates) -> Floats:
        """Micro-batches of a step on one rank, at least one."""
        return np.maximum(c.micro_batches(self.global_batch), 1.0)

    def tokens(self, c: Candidates) -> Floats:
        """Tokens of a micro-batch between the blocks of a layer, before sequence parallelism."""
        return c.micro_batch * self.seq_len / c.cp

    def vocab(self, c: Candidates) -> Floats:
        """Rows of the vocabulary on a tp rank, padded as the framework pads them."""
        parts = c.tp if self.framework.vocab_split else np.ones_like(c.tp)
        multiple = self.framework.vocab_multiple * parts
        return np.ceil(self.shape.vocab / multiple) * multiple / parts

    def layer_weights(self, c: Candidates, moe: bool) -> tuple[Floats, Floats]:
        """(Weights of a layer outside its experts, of its experts) on one rank."""
        kind = self.shape.moe if moe else self.shape.dense
        held = self.shape.n_experts / (c.ep * c.etp)
        return kind.split / c.tp + kind.whole, kind.expert * held


def setting_of(work: Workload) -> Setting:
    """The setting of `work`."""
    return Setting(
        shape=memory_shape(work.spec, work.framework, work.precision),
        framework=work.framework,
        seq_len=work.seq_len,
        global_batch=work.global_batch,
        precision=work.precision,
        optimizer_bytes=work.optimizer_bytes,
        flash=work.flash_attention,
        imbalance=work.imbalance,
        trained=work.trained,
    )


def sequence_parts(c: Candidates) -> Floats:
    """Parts into which sequence parallelism cuts what stands between blocks."""
    return np.where(c.sequence_parallel, c.tp, 1).astype(np.float64)


def lane_tokens(s: Setting, c: Candidates) -> Floats:
    """Tokens that reach the experts of a rank if all experts are as busy, each counted once for
    every expert that it goes to. With etp = tp the ranks of a tp group share tokens and experts."""
    return s.tokens(c) / np.where(c.etp == c.tp, 1, c.tp) * s.shape.top_k
