"""What a load does is told before, and strict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from states import Array, fresh, save

from meshwright.base.errors import CheckpointError
from meshwright.checkpoint.loading import Leave, LoadReport, load, load_report
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.reader import Reader

F4 = np.dtype("float32")


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """A commit of three tensors."""
    state: dict[str, Array] = {
        "param/a": np.arange(6, dtype=F4).reshape(2, 3),
        "param/b": np.arange(4, dtype="f8") + 0.1,
        "rng": np.arange(3, dtype="i8"),
    }
    store = fresh(tmp_path)
    return store.reader(save(store, 1, state))


WANTED = {"param/a": ((2, 3), F4), "param/b": ((4,), np.dtype("f8")), "rng": ((3,), "int64")}


def test_all_as_it_was_saved(reader: Reader) -> None:
    report = load_report(reader, WANTED)
    assert report == LoadReport(("param/a", "param/b", "rng"), {}, (), (), ())
    assert str(report) == "3 loaded"


def test_a_change_of_dtype_needs_a_word(reader: Reader) -> None:
    """pytorch#187138: a load that casts in silence."""
    wanted = {**WANTED, "param/b": ((4,), F4)}
    with pytest.raises(CheckpointError, match=r"param/b is float64, the model wants float32.*cast"):
        load_report(reader, wanted)
    with pytest.raises(CheckpointError, match="param/b is float64"):
        load_report(reader, wanted, Leave(cast=("param/a", "rng")))
    report = load_report(reader, wanted, Leave(cast=("param/*",)))
    assert report.cast == {"param/b": ("float64", "float32")}
    into = {
        Piece.whole("param/b", (4,)): np.zeros(4, F4),
        Piece.whole("rng", (3,)): np.zeros(3, "i8"),
    }
    load(reader, into, report)
    b, rng = into.values()
    assert b.tolist() == (np.arange(4) + 0.1).astype(F4).tolist()
    assert rng.tolist() == [0, 1, 2]


def test_missing_and_unexpected_are_refused(reader: Reader) -> None:
    with pytest.raises(CheckpointError, match=r'has no param/bb.*did you mean "param/b"'):
        load_report(reader, {"param/a": WANTED["param/a"], "param/bb": ((4,), F4)})
    some = {name: WANTED[name] for name in ("param/a", "param/b")}
    with pytest.raises(CheckpointError, match="has rng, which the model has not"):
        load_report(reader, some)
    with pytest.raises(CheckpointError, match=r"param/a has shape \(2, 3\), the model \(3, 2\)"):
        load_report(reader, {**WANTED, "param/a": ((3, 2), F4)})


def test_words_allow_what_they_name(reader: Reader) -> None:
    wanted = {"param/a": WANTED["param/a"], "param/new": ((5,), F4), "rng": ((9,), F4)}
    report = load_report(reader, wanted, Leave(missing=("param/new",), ignored=("rng", "param/b")))
    assert report == LoadReport(("param/a",), {}, ("param/new",), (), ("param/b", "rng"))
    assert str(report) == "1 loaded, 1 missing (param/new), 2 ignored (param/b, rng)"
    new = np.full(5, 7, F4)
    load(reader, {Piece.whole("param/new", (5,)): new}, report)
    assert new.tolist() == [7] * 5


def test_a_pattern_is_text_and_stars(reader: Reader) -> None:
    with pytest.raises(CheckpointError, match="rng"):
        some = {name: WANTED[name] for name in ("param/a", "param/b")}
        load_report(reader, some, Leave(ignored=("param/?", "r.g")))
