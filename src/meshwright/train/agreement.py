"""Whether a chip keeps and computes what it should: a chip that errs says nothing by itself.

At every step, before the vote, while nothing has been overwritten:

- What lies in memory must not have changed since the last update. Each rank compares sums of its
  own, so a difference convicts it without anybody's word: weights before the vote, moments and
  gradients too right before the update, which is the first to use them.
- Ranks that hold the same (twins) must have come to the same. Of three and more the odd one is
  outvoted. Two that have other gradients compute them again: who then finds something else than
  before has erred. Of two that hold other states it cannot be told.

So what is found here is in nobody's weights yet. What twins cannot see is a gradient that was wrong
before it was added up, which all of them get; `rechecking.py` looks for chips that do that.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor

from meshwright.base.errors import RunError
from meshwright.train.fabric.group import FabricGroup
from meshwright.train.optim import Updated, learning_rate
from meshwright.train.trainer import Trainer

_WORD_BYTES = 8
_OTHER = "the state that it took over is not that of the rank that was lost"
_CHANGED = "its state changed in memory between two updates"


@dataclass(frozen=True)
class Finding:
    """`suspects` are ranks; `certain`: each of them is at fault. `redo`: it may be told by
    computing the step again; else what is not certain cannot be told at all."""

    step: int
    what: str
    suspects: tuple[int, ...]
    certain: bool
    redo: bool = False


def bits(tensors: Iterable[Tensor]) -> int:
    """A sum over the bits of all `tensors`, modulo 2**64 as a signed number: any one bit changes
    it. It takes as long as to read them."""
    return _wrapped(sum(int(part) for x in tensors for part in _word_sums(x)))


def state_bits(groups: Sequence[Updated], moments: Iterable[tuple[Tensor, Tensor]]) -> int:
    """`bits` of all masters and moments."""
    return bits(chain((group.master for group in groups), *moments))


def _wrapped(total: int) -> int:
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _word_sums(x: Tensor) -> list[Tensor]:
    data = x.detach().view(-1).view(torch.uint8)
    if data.data_ptr() % _WORD_BYTES or data.storage_offset() % _WORD_BYTES:
        data = data.clone()  # what it comes to does not depend on where it lies
    edge = data.numel() // _WORD_BYTES * _WORD_BYTES
    return [data[:edge].view(torch.int64).sum(), data[edge:].sum(dtype=torch.int64)]


def outvoted(values: Sequence[Hashable]) -> tuple[int, ...] | None:
    """Where `values` differs from what most of it is; None if there is no such most."""
    value, votes = Counter(values).most_common(1)[0]
    if 2 * votes <= len(values):
        return None
    return tuple(i for i, found in enumerate(values) if found != value)


def gather(group: FabricGroup, mine: Sequence[int]) -> list[tuple[int, ...]]:
    """What every rank of `group` has. Raises Interrupted."""
    everywhere = torch.empty(len(group.ranks), len(mine), dtype=torch.int64)
    group.all_gather(everywhere, torch.tensor([list(mine)])).wait()
    return [tuple(row) for row in everywhere.tolist()]


class Guard:
    """The checks of one rank; see `trainer.Guard` for when they are made.

    `twins` are the ranks that hold the same, this one among them; None: there are none. `tell`
    takes what was found, `halt` waits for a new table, which it raises.
    """

    def __init__(
        self,
        trainer: Trainer,
        twins: FabricGroup | None,
        tell: Callable[[Finding], object],
        halt: Callable[[], NoReturn],
        witness: Callable[[int, int], object] = lambda _applied, _total: None,
    ) -> None:
        """`witness` is told what the state comes to after so many steps."""
        self._trainer, self._twins, self._tell, self._halt = trainer, twins, tell, halt
        self._witness, self._witnessed = witness, -1
        self._expected: tuple[int, int] | None = None
        self._state: tuple[int, int] | None = None  # masters and moments after the last update
        self._grads: int | None = None  # at the last vote
        self._tried: tuple[int, int] | None = None  # the last step, and what its gradients were
        self._disputed = -1  # the last step that was done again because twins differed
        self.seconds, self.steps = 0.0, 0  # of own work, since last asked: whoever waits for its
        # twins here would else wait for them in the vote

    def before_vote(self, step: int) -> None:
        """See `trainer.Guard`."""
        start = time.perf_counter()
        self._hold_against(step)
        if self._state is None:
            self._state = self._sums_of_state()
        elif self._sum_of_masters() != self._state[0]:
            self._convict(step, _CHANGED)
        self._bear_witness(step)
        self._grads = self._sum_of_grads()
        same_step = self._tried is not None and self._tried[0] == step
        before = self._tried[1] if self._tried is not None and same_step else self._grads
        self._tried = step, self._grads
        self.seconds += time.perf_counter() - start
        self.steps += 1
        if self._twins is not None:
            self._compare(step, self._twins, (_wrapped(sum(self._state)), self._grads, before))

    def before_update(self, step: int) -> None:
        """See `trainer.Guard`."""
        start = time.perf_counter()
        self._hold_against(step)
        self.verify(step)
        if self._grads not in (None, self._sum_of_grads()):
            self._convict(step, "its gradients changed in memory after they were added up")
        self.seconds += time.perf_counter() - start

    def after_update(self) -> None:
        """See `trainer.Guard`."""
        start = time.perf_counter()
        self._state = self._sums_of_state()
        self._bear_witness(self._trainer.applied)
        self.seconds += time.perf_counter() - start

    def expect(self, applied: int, total: int) -> None:
        """The state that this rank was given has to come to `total` with so many steps in it."""
        self._expected = applied, total

    def check_given(self) -> None:
        """Have what was expected of a state compared before anybody gets it from here."""
        self._hold_against(self._trainer.applied)

    def _hold_against(self, applied: int) -> None:
        """Compare a state that was given, with so many steps in it, with what was told of it."""
        if self._expected is None:
            return
        (told, total), self._expected = self._expected, None
        self._state = self._sums_of_state()
        if told == applied and _wrapped(sum(self._state)) != total:
            self._convict(applied, _OTHER)

    def _bear_witness(self, applied: int) -> None:
        """Not of a rank with twins: they compare anyway, and one that errs may not know it yet."""
        if self._twins is not None:
            return
        if self._state is not None and self._witnessed != applied:
            self._witnessed = applied
            self._witness(applied, _wrapped(sum(self._state)))

    def verify(self, step: int) -> None:
        """That the state is as the last update left it. Raises RunError, after it was told."""
        self._hold_against(self._trainer.applied)
        if self._state not in (None, self._sums_of_state()):
            self._convict(step, _CHANGED)

    def take_cost(self) -> float:
        """Seconds of a step since it was last asked."""
        seconds = self.seconds / max(self.steps, 1)
        self.seconds, self.steps = 0.0, 0
        return seconds

    def _sums_of_state(self) -> tuple[int, int]:
        moments = bits(chain.from_iterable(self._trainer.optimizer.moments))
        return self._sum_of_masters(), moments

    def _sum_of_masters(self) -> int:
        return bits(group.master for group in self._trainer.data.groups)

    def _sum_of_grads(self) -> int:
        return bits(group.grad for group in self._trainer.data.groups)

    def _goes_by(self, step: int) -> int:
        """Of all that an update goes by besides numbers of the model."""
        trainer = self._trainer
        job = trainer.job
        rate = learning_rate(job.optimizer, step, job.job.steps)
        words = (step, rate, job.optimizer, trainer.optimizer.updates_done, trainer.loss_scale)
        return zlib.crc32(repr(words).encode())

    def _compare(self, step: int, twins: FabricGroup, sums: tuple[int, int, int]) -> None:
        rows = gather(twins, (self._goes_by(step), *sums, int(self._disputed == step)))
        names = ("settings", "states", "gradients")
        *columns, before, disputed = zip(*rows, strict=True)
        for name, found in zip(names, columns, strict=True):
            if (odd := outvoted(found)) == ():
                continue
            what = f"the {name} of ranks {list(twins.ranks)}, which hold the same, differ"
            if odd is None:
                self._dispute(step, what, twins, name == "gradients")
            self._outvote(step, what, twins, odd)
            return
        changed = tuple(
            i for i, (old, new) in enumerate(zip(before, columns[-1], strict=True)) if old != new
        )
        if any(disputed) and 0 < len(changed) < len(rows):
            what = "its gradients came out otherwise when they were computed again"
            self._outvote(step, what, twins, changed)

    def _outvote(self, step: int, what: str, twins: FabricGroup, odd: tuple[int, ...]) -> None:
        """The first of the others tells; then these wait in the vote, to which the odd one does not
        come."""
        me, others = twins.index, [i for i in range(len(twins.ranks)) if i not in odd]
        if me == others[0]:
            self._tell(Finding(step + 1, what, tuple(twins.ranks[i] for i in odd), certain=True))
        if me in odd:
            raise RunError(f"step {step + 1}: {what}: it is this rank that errs")

    def _dispute(self, step: int, what: str, twins: FabricGroup, of_gradients: bool) -> NoReturn:
        redo = of_gradients and self._disputed != step
        self._disputed = step
        self._tell(Finding(step + 1, what, twins.ranks, certain=False, redo=redo))
        self._halt()

    def _convict(self, step: int, what: str) -> NoReturn:
        self._tell(Finding(step + 1, what, (self._trainer.mesh.rank,), certain=True))
        raise RunError(f"step {step + 1}: {what}: this chip is not to be trusted")
