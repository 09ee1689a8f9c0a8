"""Every schedule does all the work in a legal order, and takes the time that its paper says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.errors import ConfigError, MeshwrightError
from meshwright.plan.layout import V_SCHEDULES, Schedule
from meshwright.plan.schedule import Action, Kind, Orders, build, forwards_only, rank_of, stages_of
from meshwright.plan.timeline import Costs, Timeline, simulate

pp_sizes, batch_counts = st.integers(1, 6), st.integers(1, 18)
shapes: st.SearchStrategy[tuple[Schedule, int]] = st.sampled_from(
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zbv", 2),
        ("dualpipev", 2),
    ]
)
bounded = settings(deadline=None, max_examples=80)


def _faults(
    orders: Orders, schedule: Schedule, pp: int, chunks: int, micro_batches: int
) -> list[str]:
    """What is wrong with the orders of a training step; empty: each rank does all of its work, and
    nothing before its own earlier part."""
    found = []
    wanted = {(stage, m) for stage in range(pp * chunks) for m in range(micro_batches)}
    legal: list[list[Kind]] = [
        ["forward", "backward"],
        ["forward", "backward_input", "backward_weight"],
    ]
    for rank, order in enumerate(orders):
        done: dict[tuple[int, int], list[Kind]] = {}
        for action in order:
            done.setdefault((action.stage, action.micro_batch), []).append(action.kind)
        own = {where for where in wanted if rank_of(where[0], schedule, pp) == rank}
        found += [f"{rank} lacks {where}" for where in own - set(done)]
        found += [f"{rank} has {where}" for where in set(done) - own]
        found += [f"{rank} does {k} for {where}" for where, k in done.items() if k not in legal]
    return found


def _timed(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> Timeline:
    """Forward, input part and weight part of equal length, adding up to 3 s for a rank."""
    orders = build(schedule, pp, chunks, micro_batches)
    costs = Costs.even(pp * chunks, *(3 * [1 / chunks]))
    return simulate(orders, schedule, pp, costs)


@bounded
@given(shapes, pp_sizes, batch_counts)
def test_every_schedule_does_all_its_work_in_legal_order_and_never_waits_in_a_circle(
    shape: tuple[Schedule, int], pp: int, micro_batches: int
) -> None:
    schedule, chunks = shape
    orders = build(schedule, pp, chunks, micro_batches)
    assert _faults(orders, schedule, pp, chunks, micro_batches) == []
    timeline = simulate(orders, schedule, pp, Costs.even(pp * chunks, 1.0, 1.3, 0.6, hop_s=0.2))
    assert [[span.action for span in spans] for spans in timeline.spans] == orders


@bounded
@given(shapes, pp_sizes, batch_counts)
def test_an_evaluation_goes_through_every_stage_and_only_forward(
    shape: tuple[Schedule, int], pp: int, micro_batches: int
) -> None:
    schedule, chunks = shape
    orders = forwards_only(schedule, pp, chunks, micro_batches)
    for rank, order in enumerate(orders):
        stages = stages_of(rank, schedule, pp, chunks)
        assert sorted((a.stage, a.micro_batch) for a in order) == [
            (stage, m) for stage in stages for m in range(micro_batches)
        ]
        assert {action.kind for action in order} == {"forward"}
    makespan = simulate(orders, schedule, pp, Costs.even(pp * chunks)).makespan_s
    if schedule in V_SCHEDULES:  # the last rank works all the time, and its last output comes back
        assert makespan == 2 * micro_batches + 2 * (pp - 1)
    elif micro_batches % pp == 0:
        assert makespan == chunks * micro_batches + pp - 1


@bounded
@given(st.sampled_from(["gpipe", "1f1b"]), pp_sizes, batch_counts)
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_the_paper(
    schedule: Schedule, pp: int, micro_batches: int
) -> None:
    bubble = _timed(schedule, pp, 1, micro_batches).bubble
    assert bubble == pytest.approx((pp - 1) / (micro_batches + pp - 1))


@bounded
@given(pp_sizes, st.integers(2, 4), st.integers(1, 4))
def test_chunks_divide_the_bubble_of_interleaving(pp: int, chunks: int, rounds: int) -> None:
    micro_batches = rounds * pp
    bubble = _timed("interleaved", pp, chunks, micro_batches).bubble
    assert bubble == pytest.approx((pp - 1) / (chunks * micro_batches + pp - 1))


@bounded
@given(pp_sizes, st.integers(2, 4), batch_counts)
def test_interleaving_with_a_broken_last_round_is_no_slower_than_with_a_whole_one(
    pp: int, chunks: int, micro_batches: int
) -> None:
    whole = -(-micro_batches // pp) * pp
    broken = _timed("interleaved", pp, chunks, micro_batches)
    assert broken.makespan_s <= _timed("interleaved", pp, chunks, whole).makespan_s + 1e-9


@bounded
@given(st.integers(2, 6), st.integers(0, 10))
def test_zero_bubble_v_takes_the_least_time_possible(pp: int, more: int) -> None:
    """The last rank cannot begin before pp - 1 half forwards, and has 6 half actions of each."""
    micro_batches = 2 * pp + more
    timeline = _timed("zbv", pp, 2, micro_batches)
    assert timeline.makespan_s == pytest.approx((6 * micro_batches + pp - 1) / 2)
    assert timeline.bubble < 0.3 * _timed("1f1b", pp, 1, micro_batches).bubble


@bounded
@given(st.integers(2, 6), st.integers(0, 10), st.sampled_from(["zbv", "dualpipev"]))
def test_parts_of_other_lengths_and_hops_leave_a_v_far_ahead_of_1f1b(
    pp: int, more: int, schedule: Schedule
) -> None:
    micro_batches = 2 * pp + more
    orders = build(schedule, pp, 2, micro_batches)
    bubble = simulate(orders, schedule, pp, Costs.even(2 * pp, 1.0, 1.2, 0.8, 0.02)).bubble
    assert bubble < 0.5 * (pp - 1) / (micro_batches + pp - 1)


@bounded
@given(pp_sizes, batch_counts)
def test_memory_is_bounded(pp: int, micro_batches: int) -> None:
    one = _timed("1f1b", pp, 1, micro_batches).peak_in_flight
    assert one == [min(pp - rank, micro_batches) for rank in range(pp)]
    assert max(_timed("zbv", pp, 2, micro_batches).peak_in_flight) <= 2 * pp
    assert max(_timed("dualpipev", pp, 2, micro_batches).peak_in_flight) <= 2 * pp + 1
    assert _timed("gpipe", pp, 1, micro_batches).peak_in_flight == [micro_batches] * pp
    first = _timed("interleaved", pp, 3, micro_batches).peak_in_flight[0]
    assert first <= min(3 * micro_batches, 3 * pp + pp - 1)


@bounded
@given(st.integers(2, 6), st.integers(1, 18))
def test_dual_pipe_v_has_a_smaller_bubble_than_1f1b(pp: int, micro_batches: int) -> None:
    bubble = _timed("dualpipev", pp, 2, micro_batches).bubble
    plain = _timed("1f1b", pp, 1, micro_batches).bubble
    assert bubble < plain
    if micro_batches >= 2 * pp:
        assert bubble < 0.4 * plain


def test_dual_pipe_v_splits_a_backward_only_while_the_pipeline_fills_and_drains() -> None:
    pp, micro_batches = 4, 16
    for rank, order in enumerate(build("dualpipev", pp, 2, micro_batches)):
        split = [a for a in order if a.kind == "backward_input"]
        assert len(split) == 2 * (pp - rank - 1) + rank + 1
        ahead = order[: 2 * (pp - rank - 1)]
        assert ahead == [Action("forward", rank, m) for m in range(len(ahead))]
        assert [a.kind for a in order[-rank - 1 :]] == ["backward_weight"] * (rank + 1)


def test_a_v_goes_there_and_back_and_a_loop_round_and_round() -> None:
    v_schedules: list[Schedule] = ["zbv", "dualpipev"]
    for schedule in v_schedules:
        assert [rank_of(s, schedule, 3) for s in range(6)] == [0, 1, 2, 2, 1, 0]
        assert stages_of(1, schedule, 3, 2) == [1, 4]
    assert [rank_of(s, "interleaved", 3) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert stages_of(1, "interleaved", 3, 2) == [1, 4]


def test_one_rank_is_plain_accumulation() -> None:
    kinds: list[Kind] = ["forward", "backward"]
    assert build("1f1b", 1, 1, 2) == [[Action(kind, 0, m) for m in range(2) for kind in kinds]]


def test_a_hop_delays_each_neighbour_but_not_the_turn_of_a_v() -> None:
    orders = forwards_only("zbv", 2, 2, 1)
    timeline = simulate(orders, "zbv", 2, Costs.even(4, forward_s=1.0, hop_s=0.25))
    assert [span.start_s for spans in timeline.spans for span in spans] == [0.0, 3.5, 1.25, 2.25]
    assert timeline.idle_s == [2.5, 2.5] and timeline.makespan_s == 4.5


def test_a_slow_stage_sets_the_pace() -> None:
    """Rank 1 takes 4 s for each of 5 micro-batches, after 1 s and before 2 s of rank 0."""
    costs = Costs((1.0, 2.0), (1.0, 1.0), (1.0, 1.0))
    timeline = simulate(build("1f1b", 2, 1, 5), "1f1b", 2, costs)
    assert timeline.makespan_s == 1 + 5 * 4 + 2
    assert timeline.idle_s == [8.0, 3.0]


@pytest.mark.parametrize("shape", [("1f1b", 2), ("gpipe", 2), ("zbv", 1), ("dualpipev", 3)])
def test_chunks_that_a_schedule_does_not_have_are_refused(shape: tuple[Schedule, int]) -> None:
    with pytest.raises(ConfigError, match=r"^layout.vpp = \d: a rank of .* use interleaved"):
        build(shape[0], 2, shape[1], 4)


@bounded
@given(shapes, st.integers(2, 4), st.integers(2, 9), st.data())
def test_a_dropped_action_is_seen(
    shape: tuple[Schedule, int], pp: int, micro_batches: int, data: st.DataObject
) -> None:
    schedule, chunks = shape
    orders = build(schedule, pp, chunks, micro_batches)
    rank = data.draw(st.integers(0, pp - 1))
    dropped = orders[rank].pop(data.draw(st.integers(0, len(orders[rank]) - 1)))
    assert _faults(orders, schedule, pp, chunks, micro_batches)
    last = dropped.stage == (0 if dropped.kind != "forward" else -1)
    if dropped.kind != "backward_weight" and not last:
        with pytest.raises(MeshwrightError, match="waits for ever"):
            simulate(orders, schedule, pp, Costs.even(pp * chunks))


@bounded
@given(shapes, st.integers(2, 4), st.integers(2, 9), st.data())
def test_a_backward_swapped_with_its_forward_is_seen(
    shape: tuple[Schedule, int], pp: int, micro_batches: int, data: st.DataObject
) -> None:
    schedule, chunks = shape
    orders = build(schedule, pp, chunks, micro_batches)
    order = orders[data.draw(st.integers(0, pp - 1))]
    forward = data.draw(st.sampled_from([a for a in order if a.kind == "forward"]))
    first = order.index(forward)
    then = next(
        i
        for i, a in enumerate(order)
        if a.kind in ("backward", "backward_input")
        and (a.stage, a.micro_batch) == (forward.stage, forward.micro_batch)
    )
    order[first], order[then] = order[then], order[first]
    assert _faults(orders, schedule, pp, chunks, micro_batches)
    with pytest.raises(MeshwrightError, match="waits for ever"):
        simulate(orders, schedule, pp, Costs.even(pp * chunks))


def test_a_circle_of_two_ranks_is_seen_and_named() -> None:
    """The first rank waits for backward 0, the last for forward 1."""
    orders = build("1f1b", 2, 1, 2)
    orders[0][1], orders[0][2] = orders[0][2], orders[0][1]
    orders[1][1], orders[1][2] = orders[1][2], orders[1][1]
    assert _faults(orders, "1f1b", 2, 1, 2) == []
    with pytest.raises(MeshwrightError) as caught:
        simulate(orders, "1f1b", 2, Costs.even(2))
    assert "kind='backward', stage=0, micro_batch=0" in str(caught.value)
    assert "kind='forward', stage=1, micro_batch=1" in str(caught.value)


def test_an_action_on_the_wrong_rank_is_seen() -> None:
    orders = build("1f1b", 2, 1, 2)
    orders[0].append(orders[1].pop())
    assert "0 has (1, 1)" in _faults(orders, "1f1b", 2, 1, 2)
