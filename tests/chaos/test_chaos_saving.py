"""Members that die while the last step is saved, and while each step is saved as a change."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from test_chaos_members import STEPS, Ended, Stage, stage, tokens  # noqa: F401 # fixtures

from meshwright.checkpoint.store import Store
from meshwright.train.saving import Due, Saver

FAULTS = [
    {"member": 1, "step": 3, "phase": "backward"},
    {"member": 0, "step": 7, "phase": "optimizer"},
]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", [Store.write_part, Store.commit], ids=lambda x: x.__name__)
def test_a_loss_while_all_but_the_last_save_is_done(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    own_number: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    where: Callable[..., Any],
    victim: int,
) -> None:
    """The others have nothing left to do but to wait for it, and must hear of the takeover."""
    if (where, victim) == (Store.commit, 1):
        pytest.skip("the first rank alone commits")
    here, plain = stage("two")

    def mortal(self: Store, attempt: Any, *args: Any, **more: Any) -> Any:
        if attempt.step == STEPS and own_number() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return where(self, attempt, *args, **more)

    monkeypatch.setattr(Store, where.__name__, mortal)
    ended, orchestra = here.play(spares=1)
    assert ended == plain
    assert len(orchestra.takeovers) == 1


def test_changes_survive_losses(
    stage: Callable[[str], tuple[Stage, Ended]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, plain = stage("two")
    votes = Saver.asks

    def asks(self: Saver, step: int) -> Due:
        """Steps wait for storage here, lest all changes are left out."""
        while self._opened is not None and self._opened.is_writing:
            time.sleep(0.002)
        return votes(self, step)

    monkeypatch.setattr(Saver, "asks", asks)
    often = {**here.args["job"]["checkpoint"], "deltas": True, "keep": 30}
    changing = replace(here, args={**here.args, "job": {**here.args["job"], "checkpoint": often}})
    ended, orchestra = changing.play(FAULTS, spares=2)
    assert ended == plain
    assert len(orchestra.takeovers) == 2
    store = Store.open(orchestra.logs / "checkpoints")
    assert max(commit.depth for commit in store.commits()) > 0
    assert len(ended.checkpoints) > 2
