"""How the ranks of a new table that have no state get it, from whom the standings say."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.base.errors import RunError
from meshwright.plan.resilience import Keeping
from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup
from meshwright.train.keepers import Keeper, takes_from
from meshwright.train.loop import TrainLoop
from meshwright.train.parity import Parity
from meshwright.train.rebuild import help_rebuild, rebuild
from meshwright.train.recovery import (
    Given,
    Settled,
    Standing,
    give_state,
    state_tensors,
    state_words,
    take_state,
)


class Met(Exception):  # noqa: N818 (no error: also the way out of a step that is repeated)
    """What came of a meeting of all ranks: where each stands, and what follows from that."""

    def __init__(self, standings: Sequence[Standing], settled: Settled) -> None:
        super().__init__(f"step {settled.steps}")
        self.standings, self.settled = standings, settled

    def sources(self, keeping: Keeping) -> dict[int, int | None]:
        """Who can give each fresh rank its state."""
        kept = {one.rank: one.keeps for one in self.standings if not one.fresh}
        return {rank: keeping.source(rank, kept) for rank in self.settled.fresh}

    def must_start(self, keeping: Keeping, first_step: int) -> bool:
        """Whether all begin anew, with `first_step`: nobody has any state, or what is lost can be
        made again. Raises RunError if the state of a rank is lost for good."""
        if self.settled.from_nothing:
            return True
        lost = [rank for rank, source in self.sources(keeping).items() if source is None]
        if lost and self.settled.steps > first_step:
            raise RunError(
                f"rank {lost[0]} is lost, and with it everybody who kept its state; "
                "resume from the last checkpoint"
            )
        return bool(lost)

    def expected(self, rank: int) -> tuple[int, int] | None:
        """Steps in the state of a rank that was lost, and what it came to, as far as was told."""
        told = [one.seen for one in self.standings if one.seen is not None]
        return next(((applied, total) for of, applied, total in told if of == rank), None)

    def lacking(self, keeping: Keeping) -> list[tuple[int, int]]:
        """(ward, keeper) where the keeper has not the state of the ward."""
        return [
            (ward, keeper)
            for ward, keeper in keeping.keepers.items()
            if self.standings[keeper].fresh or ward not in self.standings[keeper].keeps
        ]


class Handing:
    """This rank's part in that the fresh ranks of the table at hand get their state, each from
    where `keeping` says that it is. `recovery` joins all ranks, `keeper` has what this rank holds
    of others."""

    def __init__(
        self, fabric: Fabric, recovery: FabricGroup, keeping: Keeping, keeper: Keeper | None
    ) -> None:
        self._fabric, self._recovery = fabric, recovery
        self._keeping, self._keeper = keeping, keeper

    def take(self, loop: TrainLoop, met: Met) -> None:
        """Have `loop`, which is new, get the state of this rank."""
        source = met.sources(self._keeping)[self._fabric.rank]
        assert source is not None
        if takes_from(self._keeping, self._fabric.rank, source):
            loop.said = take_state(loop.trainer, self._recovery, source)["said"]
        else:
            loop.said = rebuild(self._fabric, self._keeping, self._parity, loop)

    def give(self, loop: TrainLoop, met: Met) -> None:
        """Give it to those who are to have it from this rank."""
        for fresh, source in met.sources(self._keeping).items():
            assert source is not None
            if not takes_from(self._keeping, fresh, source):
                help_rebuild(self._fabric, self._keeping, fresh, self._parity, loop)
            elif source == self._fabric.rank:
                given = self._state_of(fresh, loop)
                give_state(self._recovery, fresh, given, {"said": loop.said})

    @property
    def _parity(self) -> Parity:
        assert isinstance(self._keeper, Parity)
        return self._keeper

    def _state_of(self, fresh: int, loop: TrainLoop) -> Given:
        """From its copy here, or because it equals this rank's own."""
        words = state_words(loop.trainer)
        kept = None if self._keeper is None else self._keeper.kept.get(fresh)
        if kept is not None and fresh not in self._keeping.twins[self._fabric.rank]:
            return Given(kept.state(), words, kept.router.counts)
        return Given(state_tensors(loop.trainer), words)
