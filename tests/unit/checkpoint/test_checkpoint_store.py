"""Publishing, listing, retaining and refusing commits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.base.errors import CheckpointError, ConfigError
from meshwright.checkpoint.pieces import FloatArray, Piece
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.store import begin, commit, commits, latest, retain, write_rank

SHAPE = (6, 4)
NAMES = ("param/layers.0.attn.wq.weight", "adamw.m/layers.0.attn.wq.weight")


def rows(name: str, rank: int) -> Piece:
    """Rank 0 holds the first three rows, rank 1 the others."""
    return Piece(name, SHAPE, (3 * rank, 0), (3, 4), 0, 12)


def full(step: int) -> FloatArray:
    return (np.arange(24, dtype=np.float32) + step).reshape(SHAPE)


def write(root: Path, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    tmp = begin(root, step)
    for rank in ranks:
        data = full(step)[3 * rank : 3 * rank + 3].ravel()
        write_rank(tmp, rank, {rows(name, rank): data for name in NAMES})


def save(root: Path, step: int) -> Path:
    write(root, step)
    return commit(root, step, {"seed": 7, "sample": step * 8}, 2).path


def steps(root: Path) -> list[int]:
    return [one.step for one in commits(root)]


def test_round_trip_with_meta(tmp_path: Path) -> None:
    folder = save(tmp_path, 100)
    assert folder == tmp_path / "step-000100"
    reader = Reader(folder)
    assert reader.step == 100
    assert reader.meta == {"seed": 7, "sample": 800}
    assert reader.names == sorted(NAMES)
    for name in NAMES:
        assert reader.shape(name) == SHAPE
        assert reader.read(name).tobytes() == full(100).tobytes()


def test_commits_are_ordered_by_step_and_latest_is_derived(tmp_path: Path) -> None:
    assert commits(tmp_path / "none") == []
    assert latest(tmp_path) is None
    for step in (5, 1_000_000, 30):
        save(tmp_path, step)
    (tmp_path / "step-notes").mkdir()
    assert steps(tmp_path) == [5, 30, 1_000_000]
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.step == 1_000_000


def test_an_unpublished_step_is_invisible(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write(tmp_path, 2)
    assert steps(tmp_path) == [1]


def test_a_rank_that_wrote_nothing_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1, ranks=(0,))
    with pytest.raises(CheckpointError, match=r"1 of 2 ranks .*rank-00001\.safetensors"):
        commit(tmp_path, 1, {}, 2)
    assert steps(tmp_path) == []


def test_what_a_dead_larger_world_left_is_never_mixed_in(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors does not belong"):
        commit(tmp_path, 1, {}, 1)
    tmp = begin(tmp_path, 1)
    assert list(tmp.iterdir()) == []


def test_a_torn_rank_file_is_not_committed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = tmp_path / "step-000001.tmp" / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors: torn"):
        commit(tmp_path, 1, {}, 2)
    assert steps(tmp_path) == []


def test_replicated_elements_are_not_committed(tmp_path: Path) -> None:
    tmp = begin(tmp_path, 1)
    for rank in (0, 1):
        write_rank(tmp, rank, {rows("w", 0): np.zeros(12, np.float32)})
    with pytest.raises(CheckpointError, match=r"w: .* hold the same elements"):
        commit(tmp_path, 1, {}, 2)
    assert steps(tmp_path) == []


def test_a_committed_step_is_never_overwritten(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    for attempt in (lambda: begin(tmp_path, 1), lambda: commit(tmp_path, 1, {}, 2)):
        with pytest.raises(CheckpointError, match="step 1 is committed"):
            attempt()
    assert Reader(folder).read(NAMES[0]).tobytes() == full(1).tobytes()


@pytest.mark.parametrize(
    "data", [np.zeros(11, np.float32), np.zeros((3, 4), np.float32), np.zeros(12, np.float64)]
)
def test_data_that_does_not_fit_its_piece_is_refused(tmp_path: Path, data: FloatArray) -> None:
    tmp = begin(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"float32 of shape \(12,\)"):
        write_rank(tmp, 0, {rows("w", 0): data})
    assert list(tmp.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.*cannot be written"):
        write_rank(tmp_path / "gone", 0, {rows("w", 0): np.zeros(12, np.float32)})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        begin(tmp_path / "file", 1)


def test_retain_keeps_the_newest_and_clears_what_is_stale(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-000003.tmp").mkdir()
    write(tmp_path, 5)
    assert [one.step for one in retain(tmp_path, 2)] == [1, 2]
    assert steps(tmp_path) == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-000003",
        "step-000004",
        "step-000005.tmp",
    ]
    assert retain(tmp_path, 9) == []
    assert Reader(tmp_path / "step-000004").read(NAMES[0]).tobytes() == full(4).tobytes()


def test_retain_never_deletes_everything(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"checkpoint\.keep = 0"):
        retain(tmp_path, 0)
    assert steps(tmp_path) == [1]


def test_a_truncated_or_missing_file_is_found_before_anything_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    path = folder / "rank-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"rank-00001.*{len(whole) - 1} bytes.*delete"):
        Reader(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001.*No such file.*delete"):
        Reader(folder)


def test_a_file_of_the_right_size_with_a_broken_header_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    path = folder / "rank-00000.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: param/.*delete"):
        Reader(folder).read(NAMES[0])


def test_only_files_that_hold_the_elements_are_opened(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    path = folder / "rank-00001.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    first_rows = Piece(NAMES[0], SHAPE, (0, 1), (3, 2), 1, 5)
    read = Reader(folder).read_piece(first_rows)
    assert read.tolist() == full(1)[0:3, 1:3].ravel()[1:5].tolist()


def test_a_wrong_name_or_shape_says_what_the_commit_holds(tmp_path: Path) -> None:
    reader = Reader(save(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r'did you mean "param/layers\.0\.attn\.wq\.weight"'):
        reader.read("param/layers.0.attn.wk.weight")
    with pytest.raises(CheckpointError, match=r"has shape \(6, 4\), \(4, 6\) was asked for"):
        reader.read_piece(Piece.whole(NAMES[0], (4, 6)))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, 1)
    (folder / "commit.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"commit\.json: cannot be read"):
        Reader(folder)


def test_a_newer_format_and_an_empty_folder_are_told_apart(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    record = json.loads((folder / "commit.json").read_text())
    (folder / "commit.json").write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(CheckpointError, match="format 2, this version reads format 1"):
        Reader(folder)
    with pytest.raises(CheckpointError, match="no commit here"):
        Reader(tmp_path)
