"""What follows from where the ranks stand, and who is right when replicas disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.errors import RunError
from meshwright.train.gradients import Vote
from meshwright.train.recovery import Standing, settle

VOTE = Vote(loss=2.5, tokens=64, grad_norm=0.1, stop=False)
BEFORE = Standing(0, fresh=False, applied=7, agreed=(6, VOTE), evaluated=7)


def test_a_step_without_a_vote_is_repeated() -> None:
    reduced = replace(BEFORE, rank=1, reduced=7)
    found = settle([BEFORE, reduced, Standing(2, fresh=True)])
    assert (found.steps, found.late, found.fresh) == (7, (), (2,))
    assert not found.from_nothing


@pytest.mark.parametrize("applied", [7, 8], ids=["held", "applied"])
def test_a_step_that_anybody_has_voted_on_counts(applied: int) -> None:
    voted = replace(BEFORE, rank=1, applied=applied, reduced=7, agreed=(7, VOTE))
    found = settle([replace(BEFORE, reduced=7), voted, Standing(2, fresh=True)])
    assert found.steps == 8 and found.agreed == (7, VOTE)
    assert found.late == ((0, 1) if applied == 7 else (0,))


def test_who_lost_the_gradients_of_a_step_that_counts_ends_the_run() -> None:
    voted = replace(BEFORE, rank=1, applied=8, agreed=(7, VOTE))
    with pytest.raises(RunError, match="rank 0 stands at step 7 without the gradients"):
        settle([BEFORE, voted])


def test_what_follows_a_step_is_done_again_where_anybody_has_not() -> None:
    behind = replace(BEFORE, rank=1, evaluated=4, checked=3)
    found = settle([BEFORE, behind])
    assert (found.evaluated, found.checked) == (4, 0)


def test_who_goes_on_with_the_step_under_way() -> None:
    pair, other = frozenset({0, 1}), frozenset({2, 3})
    blocks = (pair, pair, other, other)
    whole = [replace(BEFORE, rank=rank, intact=True) for rank in range(4)]
    lost = [*whole[:3], Standing(3, fresh=True)]
    assert settle(lost, blocks).going_on == pair
    assert settle([replace(whole[0], intact=False), *lost[1:]], blocks).going_on == frozenset()
    assert settle(lost, blocks, lambda _: True).going_on == frozenset()  # evaluated at step 5
    done = [replace(one, evaluated=7, checked=7) for one in lost[:3]]
    assert settle([*done, lost[3]], blocks, lambda _: True).going_on == pair
    assert settle(lost).going_on == frozenset()


def test_without_any_state_it_is_a_start() -> None:
    found = settle([Standing(0, fresh=True, peak_flops=3.0), Standing(1, fresh=True)])
    assert found.from_nothing and found.peak_flops == 3.0


def test_a_standing_survives_the_way() -> None:
    standing = replace(BEFORE, reduced=6, keeps=(3, 4), peak_flops=0.1)
    assert Standing.from_bytes(standing.as_bytes()) == standing


def test_what_a_shadow_has_not_heard_of_does_not_make_others_do_it_again() -> None:
    shadow = replace(BEFORE, rank=1, evaluated=0, checked=0, second_hand=True)
    found = settle([BEFORE, shadow])
    assert (found.evaluated, found.checked) == (7, 0)
