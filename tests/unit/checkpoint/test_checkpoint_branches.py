"""Branches, tags, the log, differences and lineage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import TWO, adam_state, as_bytes, fresh, read_all, relative, save, steps, write

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.commits import Commit
from meshwright.checkpoint.lineage import Stretch, TensorDiff
from meshwright.checkpoint.store import Store


def test_a_branch_goes_its_own_way(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, second = save(store, 1), save(store, 2)
    store.start_branch("trial", first)
    assert store.head("trial") == first
    other = save(store, 2, adam_state(20), branch="trial")
    assert (steps(store), steps(store, "trial")) == ([1, 2], [1, 2])
    assert (other.parent, store.head(), store.branches()) == (first.id, second, ["main", "trial"])
    with pytest.raises(CheckpointError, match="branch trial is there already"):
        store.start_branch("trial", second)


def test_a_branch_can_begin_with_a_relative_commit(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first = save(store, 1, encoding=None)
    save(store, 2)
    store.start_branch("trial", first)
    commit = save(
        store, 2, adam_state(9), branch="trial", encoding=relative(2, 8 << 20), base=adam_state(1)
    )
    assert commit.depth == 1
    assert read_all(store.reader(commit)) == as_bytes(adam_state(9))


def test_a_rollback_goes_on_from_before_and_fences_what_was_left(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, _, third = (save(store, step) for step in (1, 2, 3))
    running = write(store, 4, adam_state(4), parent=third)
    store.rollback(first)
    assert store.head() == first
    with pytest.raises(CheckpointError, match="was rolled back"):
        store.commit(running, {})
    again = save(store, 2, adam_state(20))
    assert again.parent == first.id
    assert store.commits() == [first, again]
    store.rollback(third)  # what was left is still there
    assert steps(store) == [1, 2, 3]
    with pytest.raises(CheckpointError, match=r'no branch mane.*did you mean "main"'):
        store.rollback(first, "mane")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["save", "roll", "branch"]), st.integers(0, 99)), max_size=12
    )
)
def test_lines_are_what_a_list_would_be(
    tmp_path_factory: pytest.TempPathFactory, doings: list[tuple[str, int]]
) -> None:
    store = fresh(tmp_path_factory.mktemp("store"))
    every = [save(store, 0, {})]
    lines: dict[str, list[Commit]] = {"main": [every[0]]}
    for number, (what, which) in enumerate(doings, 1):
        branch = sorted(lines)[which % len(lines)]
        target = every[which % len(every)]
        line_of_target = next(
            (ln[: ln.index(target) + 1] for ln in lines.values() if target in ln), None
        )
        match what:
            case "save":
                every.append(save(store, number, {}, branch=branch))
                lines[branch] = [*lines[branch], every[-1]]
            case "roll" if line_of_target is not None:
                store.rollback(target, branch)
                lines[branch] = line_of_target
            case "branch" if line_of_target is not None:
                store.start_branch(f"b{number}", target)
                lines[f"b{number}"] = line_of_target
    for branch, line in lines.items():
        assert store.commits(branch) == line
        assert store.head(branch) == line[-1]


def test_tags_name_and_never_move(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, second = save(store, 1), save(store, 2)
    store.tag("best", first)
    store.tag("best", first)
    with pytest.raises(CheckpointError, match=r"tag best is of commit .* never moves"):
        store.tag("best", second)
    assert store.tags() == {"best": first.id}
    store.untag("best")
    store.untag("best")
    assert store.tags() == {}


def test_a_commit_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, second = save(store, 10), save(store, 20)
    store.start_branch("trial", first)
    other = save(store, 20, adam_state(5), branch="trial")
    store.tag("best", first)
    for word in ("best", "10", "main@10", "trial@10", first.id, first.id[:12]):
        assert store.find(word) == first
    assert store.find("main") == second
    assert store.find("trial") == store.find("trial@20") == other
    with pytest.raises(CheckpointError, match=f"20 is more than one commit.*{second.id}"):
        store.find("20")
    for word, said in (
        ("30", "no commit"),
        ("mein", 'did you mean "main"'),
        ("nowhere@10", "no branch nowhere"),
        ("abcdef0123456789", "no commit"),
    ):
        with pytest.raises(CheckpointError, match=said):
            store.find(word)


def test_the_log_tells_everything(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, second = save(store, 1), save(store, 2)
    store.verify(first)
    store.mark_bad(second, "the loss went up")
    store.tag("best", first)
    store.rollback(first)
    told = [(e.kind, e.seq, e.on_line, bool(e.verified_ns), e.bad, e.tags) for e in store.log()]
    assert told == [
        ("rollback", 3, False, False, False, ()),
        ("commit", 2, False, False, True, ()),
        ("commit", 1, True, True, False, ("best",)),
    ]
    assert [entry.to.id for entry in store.log() if entry.to] == [first.id]
    assert store.log("none") == []


def test_what_is_marked_bad_is_passed_over_until_it_is_verified(tmp_path: Path) -> None:
    store = fresh(tmp_path)
    first, second = save(store, 1), save(store, 2)
    store.mark_bad(second, "spike")
    assert store.commits() == [first]
    third = save(store, 3)
    assert third.parent == first.id
    store.verify(second)
    assert steps(store) == [1, 2, 3]


def test_a_difference_says_which_tensors_moved_and_by_how_much(tmp_path: Path) -> None:
    store, rng = fresh(tmp_path), np.random.default_rng(0)
    old = {
        "same": rng.standard_normal(30),
        "moved": np.full(10, 3.0),
        "gone": np.zeros(1),
        "shape": np.zeros(2),
        "whole": np.arange(4),
    }
    new = {
        "same": old["same"],
        "moved": old["moved"].copy(),
        "new": np.zeros(1),
        "shape": np.zeros(3),
        "whole": np.arange(4) + 2,
    }
    new["moved"][7] = 6.0
    a, b = save(store, 1, old), save(store, 2, new, TWO)
    assert store.diff(a, a) == []
    found = {one.name: one for one in store.diff(a, b)}
    assert found["gone"].kind == "removed"
    assert found["new"].kind == "added"
    assert found["shape"].kind == "other shape"
    assert found["moved"] == TensorDiff("moved", "changed", 1, 10, 3.0, (9.0 / 90.0) ** 0.5)
    assert (found["whole"].changed, found["whole"].largest) == (4, 2.0)
    assert set(found) == {"gone", "new", "shape", "moved", "whole"}


def position(samples: int, data: str = "f", **drawn: int) -> dict[str, object]:
    return {"data_position": samples, "data": {"sample": samples, "data": data}, "drawn": drawn}


def test_lineage_says_which_samples_made_a_commit(tmp_path: Path) -> None:
    store = fresh(tmp_path)

    def at(step: int, meta: dict[str, object], branch: str = "main") -> Commit:
        return save(store, step, {}, meta=meta, branch=branch)

    at(10, position(80, a=60, b=20))
    second = at(20, position(160, a=120, b=40))
    at(30, position(240, a=180, b=60))
    store.start_branch("other-data", second)
    last = at(30, position(240, "g", a=150, c=50), "other-data")
    assert store.lineage(store.find("main")) == [
        Stretch(0, 30, 0, 240, "f", {"a": (0, 180), "b": (0, 60)})
    ]
    assert store.lineage(last) == [
        Stretch(0, 20, 0, 160, "f", {"a": (0, 120), "b": (0, 40)}),
        Stretch(20, 30, 160, 240, "g", {"a": (120, 150), "c": (0, 50)}),
    ]
    assert Store.open(tmp_path).lineage(save(store, 40, {}, meta={})) == store.lineage(
        store.find("main@30")
    )
