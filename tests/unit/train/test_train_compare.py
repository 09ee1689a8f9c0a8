"""Comparing two traced runs, on traces made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.parts import Attempt
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import Store
from meshwright.train.compare import GRADIENTS, STATE, TRACE, Comparison, Limits, compare

Tensors = dict[str, list[float]]

GRADIENT: Tensors = {"gradient/a": [3.0, 4.0], "gradient/b": [1.0, 0.0]}
STATE_OF: Tensors = {
    f"{kind}/{name}": [1.0, 2.0] for kind in ("param", "adamw.m", "adamw.v") for name in ("a", "b")
}


def write(
    folder: Path,
    gradient: Tensors = GRADIENT,
    state: Tensors = STATE_OF,
    loss: float = 2.0,
    norm: float = 5.0,
    router: float = 0.1,
) -> Path:
    for name, tensors in ((GRADIENTS, gradient), (STATE, state)):
        root = folder / name
        pieces = {
            Piece.whole(key, (len(values),)): np.array(values, np.float32)
            for key, values in tensors.items()
        }
        store, attempt = Store.open(root, create=True), Attempt(0, "only", ranks=1)
        store.write_part(attempt, 0, pieces)
        store.commit(attempt, {})
    (folder / TRACE).write_text(
        json.dumps([{"loss": loss, "grad_norm": norm, "router_loss": router}])
    )
    return folder


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write(tmp_path / "reference")


def against(reference: Path, theirs: Path) -> Comparison:
    return compare(reference, theirs, Limits())


def test_the_same_is_equal(reference: Path, tmp_path: Path) -> None:
    found = against(reference, write(tmp_path / "same"))
    assert found.equal
    assert (found.loss_rel, found.grad_norm_rel, len(found.tensors)) == (0.0, 0.0, 8)
    assert found.as_json()["equal"] is True


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"loss": 2.0001}, "loss_rel"),
        ({"loss": math.nan}, "loss_rel"),
        ({"router": 0.2}, "loss_rel"),
        ({"norm": 5.0001}, "grad_norm_rel"),
        ({"gradient": {**GRADIENT, "gradient/a": [6.0, 8.0]}}, "gradient"),
        ({"gradient": {**GRADIENT, "gradient/a": [math.nan, 4.0]}}, "gradient"),
        ({"state": {**STATE_OF, "param/b": [1.01, 2.0]}}, "parameter"),
        ({"state": {**STATE_OF, "adamw.m/b": [1.01, 2.0]}}, "first moment"),
        ({"state": {**STATE_OF, "adamw.v/b": [1.01, 2.0]}}, "second moment"),
    ],
)
def test_each_kind_of_difference_is_found(
    reference: Path, tmp_path: Path, change: dict[str, object], what: str
) -> None:
    found = against(reference, write(tmp_path / "other", **change))  # type: ignore[arg-type]
    assert not found.equal
    if what.endswith("_rel"):
        assert getattr(found, what) > 1e-5
    else:
        assert [one.what for one in found.worst] == [what]


def test_a_factor_shows_its_face(reference: Path, tmp_path: Path) -> None:
    doubled = {**GRADIENT, "gradient/a": [6.0, 8.0]}
    found = against(reference, write(tmp_path / "other", gradient=doubled))
    assert found.worst[0].norm_ratio == pytest.approx(2.0)
    assert found.worst[0].name == "a"


def test_what_has_no_gradient_but_rounding_is_left_out(tmp_path: Path) -> None:
    noisy = write(tmp_path / "one", gradient={**GRADIENT, "gradient/b": [1e-9, 0.0]})
    other_state = {**STATE_OF, "param/b": [9.0, 9.0]}
    for number, small in enumerate(([0.0, -2e-9], [0.0, 0.0])):
        other = write(tmp_path / f"{number}", {**GRADIENT, "gradient/b": small}, other_state)
        for found in (against(noisy, other), against(other, noisy)):
            assert found.equal
            assert found.noise == ("b",)


@pytest.mark.parametrize("small", [[1e-9, 0.0], [0.0, 0.0]])
def test_a_gradient_that_only_one_run_has_is_no_rounding(
    tmp_path: Path, small: list[float]
) -> None:
    without = write(tmp_path / "one", gradient={**GRADIENT, "gradient/b": small})
    found = against(without, write(tmp_path / "two"))
    assert not found.equal
    assert found.worst[0].name == "b"


def test_a_tensor_that_only_one_run_has_is_refused(reference: Path, tmp_path: Path) -> None:
    more = write(tmp_path / "more", gradient={**GRADIENT, "gradient/c": [1.0]})
    for one, two in ((reference, more), (more, reference)):
        with pytest.raises(CheckpointError, match="gradient/c"):
            against(one, two)


def test_a_run_that_left_nothing_is_refused(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no trace"):
        against(reference, tmp_path / "nothing")
