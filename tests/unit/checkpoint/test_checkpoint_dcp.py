"""Exchange with torch.distributed.checkpoint: all ways round trip, and nothing runs by reading."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from meshwright.base.errors import CheckpointError, InputError
from meshwright.checkpoint.dcp import (
    CommitReader,
    CommitWriter,
    DcpFolder,
    exchange,
    export_dcp,
    import_dcp,
)
from meshwright.checkpoint.dcp.arrays import array_of, tensor_of
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.store import Store
from meshwright.checkpoint.stored import DamagedCommitError

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns that there are no ranks

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64")


def state(filled: bool) -> dict[str, Any]:
    ramp = torch.arange(15) * filled
    tensors = {name: ramp.reshape(5, 3).to(getattr(torch, name)) for name in DTYPES}
    return {
        "model": {**tensors, "scalar": ramp[7].clone(), "none": torch.zeros(0, 4)},
        "optim": [{"lr": 0.1 * filled, "betas": (0.9, 0.95) if filled else None}, ramp.clone()],
        "step": 12 * filled,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return all(map(same, a, b))
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and np.array_equal(array_of(a).view(np.uint8), array_of(b).view(np.uint8))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", create=True)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of plain DCP."""
    saver.save(state(True), checkpoint_id=tmp_path / "theirs")
    return tmp_path / "theirs"


def loaded(**source: Any) -> dict[str, Any]:
    into = state(False)
    loader.load(into, **source)
    return into


def test_the_check_of_sameness_can_fail() -> None:
    assert same(state(True), state(True)) and not same(state(True), state(False))


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_share_the_bytes_of_tensors(name: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    array = array_of(tensor)
    assert array.dtype.name == name and array.shape == (6,)
    assert tensor_of(array).dtype == tensor.dtype
    assert torch.equal(tensor_of(array).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    turned = tensor_of(array_of(tensor.T)).view(torch.uint8)
    assert torch.equal(turned, tensor.T.contiguous().reshape(-1).view(torch.uint8))


def test_tensors_that_are_not_dense_are_refused() -> None:
    with pytest.raises(CheckpointError, match="make it dense first"):
        array_of(torch.eye(3).to_sparse())


def test_a_state_saved_by_dcp_to_a_store_loads(store: Store) -> None:
    writer = CommitWriter(store, 4, {"run": "a"})
    saver.save(state(True), storage_writer=writer)
    assert writer.commit == store.head() and writer.commit is not None
    reader = store.reader(writer.commit)
    assert reader.step == 4 and reader.meta["run"] == "a"
    assert reader.dtype("model.bfloat16").name == "bfloat16"
    assert same(loaded(storage_reader=CommitReader(reader)), state(True))


def test_a_folder_of_dcp_is_read_like_a_commit(theirs: Path) -> None:
    folder = DcpFolder(theirs)
    assert "step" in folder.objects and "step" not in folder.names
    assert folder.shape("model.int64") == (5, 3) and folder.dtype("model.bool") == "bool"
    assert np.array_equal(folder.read("model.int64"), np.arange(15).reshape(5, 3))
    piece = Piece("model.int32", (5, 3), (1, 1), (3, 2), 1, 5)  # rows 1..3, columns 1..2
    assert folder.read_piece(piece).tolist() == [5, 7, 8, 10]
    with pytest.raises(CheckpointError, match=r'did you mean "model\.int64"'):
        folder.read("model.int46")
    with pytest.raises(CheckpointError, match=r"has shape \(5, 3\), \(3, 5\) was asked for"):
        folder.read_piece(Piece.whole("model.int64", (3, 5)))


def test_a_folder_of_dcp_becomes_a_commit(theirs: Path, store: Store) -> None:
    commit = import_dcp(theirs, store, 9)
    assert commit.step == 9
    assert same(loaded(storage_reader=CommitReader(store.reader(commit))), state(True))


def test_a_commit_becomes_a_folder_that_plain_dcp_loads(
    theirs: Path, store: Store, tmp_path: Path
) -> None:
    reader = store.reader(import_dcp(theirs, store, 9))
    folder = export_dcp(reader, tmp_path / "out")
    assert same(loaded(checkpoint_id=folder), state(True))
    dcp_to_torch_save(folder, tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), state(True))
    assert not list(tmp_path.glob("*.tmp"))


def test_large_tensors_and_many_go_by_parts(
    theirs: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_PART_BYTES", 200)
    monkeypatch.setattr(exchange, "_CHUNK_BYTES", 30)
    commit = import_dcp(theirs, store, 9)
    assert commit.ranks > 5
    folder = export_dcp(store.reader(commit), tmp_path / "out")
    metadata = pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata
    assert len(metadata["model.int64"].chunks) == 5 and len(metadata["model.int8"].chunks) == 1
    assert same(loaded(checkpoint_id=folder), state(True))
    assert same(loaded(storage_reader=CommitReader(store.reader(commit))), state(True))
    assert np.array_equal(DcpFolder(folder).read("model.int64"), np.arange(15).reshape(5, 3))


def test_names_can_be_others_there(theirs: Path, store: Store, tmp_path: Path) -> None:
    reader = store.reader(import_dcp(theirs, store, 9))

    def weights(name: str) -> str | None:
        return name.replace("model.", "net/") if "int" in name else None

    held = DcpFolder(export_dcp(reader, tmp_path / "out", weights))
    assert held.names == sorted(f"net/{n}" for n in DTYPES if "int" in n)
    with pytest.raises(InputError, match="another is named x too"):
        export_dcp(reader, tmp_path / "other", lambda _: "x")
    with pytest.raises(InputError, match="exists; name a new folder"):
        export_dcp(reader, tmp_path / "out")


def test_a_load_that_would_change_the_dtype_is_refused(theirs: Path, store: Store) -> None:
    reader = CommitReader(store.reader(import_dcp(theirs, store, 9)))
    with pytest.raises(CheckpointException, match=r"float64, torch.float32 was asked"):
        loader.load({"model": {"float64": torch.zeros(5, 3)}}, storage_reader=reader)


def test_damage_is_found_by_a_load_through_dcp(theirs: Path, store: Store, tmp_path: Path) -> None:
    commit = import_dcp(theirs, store, 9)
    where = store.reader(commit).stored("model.int64")[0].chunks[0]
    path = tmp_path / "store" / "packs" / where.pack[:2] / where.pack
    content = bytearray(path.read_bytes())
    content[where.at + 3] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointException, match=r"model\.int64 is damaged: chunk 0"):
        loaded(storage_reader=CommitReader(store.reader(commit)))
    with pytest.raises(DamagedCommitError):
        export_dcp(store.reader(commit), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_nothing_runs_by_reading_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match=r"names \w+\.system, which DCP's own never does"):
        DcpFolder(tmp_path / "x")
    saver.save({"evil": Evil(), "w": torch.ones(2)}, checkpoint_id=tmp_path / "y")
    folder = DcpFolder(tmp_path / "y")
    assert folder.objects == ["evil"] and len(folder.read_object("evil")) > 0
    store = Store.open(tmp_path / "store", create=True)
    export_dcp(store.reader(import_dcp(tmp_path / "y", store, 1)), tmp_path / "z")
    assert not (tmp_path / "ran").exists()


def test_folders_that_are_none_of_dcp(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not written by DCP, or not to its end"):
        DcpFolder(tmp_path)
    whole = (theirs / ".metadata").read_bytes()
    for content, words in ((whole[:50], "cannot be read"), (pickle.dumps(1), "not the metadata")):
        (theirs / ".metadata").write_bytes(content)
        with pytest.raises(InputError, match=words):
            DcpFolder(theirs)


def test_a_file_of_dcp_that_is_torn_is_named(theirs: Path, store: Store) -> None:
    (file,) = theirs.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:4000])
    with pytest.raises(CheckpointError, match=r"theirs: \S+ cannot be read"):
        import_dcp(theirs, store, 1)
    assert store.head() is None


def test_a_folder_that_lacks_the_shard_of_a_rank_is_refused(theirs: Path) -> None:
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.int64"].size = torch.Size((6, 3))
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="15 of 18 elements are there"):
        DcpFolder(theirs).read("model.int64")


def test_shards_of_one_to_four_ranks_load_on_one_to_four(tmp_path: Path) -> None:
    """Ours, imported and exported, every way with every other, sizes that do not divide."""
    script = Path(__file__).with_name("dcp_ranks.py")
    ranks = subprocess.Popen(
        [sys.executable, script, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = ranks.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, said
