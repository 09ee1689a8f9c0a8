"""Four ranks: saves and loads of a sharded state by 1 to 4 of them, every way with every other.

Started by test_checkpoint_dcp.py as `dcp_ranks.py FOLDER`, in a process of its own, since a process
that is forked must have no threads.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright.checkpoint.dcp import CommitReader, CommitWriter, export_dcp, import_dcp
from meshwright.checkpoint.store import Store

RANKS = 4
WHOLE = {
    "model.w": torch.arange(21.0).reshape(7, 3).sin(),  # 7 rows: no number of ranks but 1 divides
    "model.e": torch.arange(65.0).cos().bfloat16(),
    "model.ids": torch.arange(45).reshape(5, 9) * 7**12,
    "model.few": torch.tensor([1.5, -2.5], dtype=torch.float16),  # ranks 2 and 3 hold nothing
    "model.on": torch.tensor([[True], [False], [True]]),
}
DIMENSION = {"model.ids": 1}  # that is sharded; 0 for the others


def state(mesh: DeviceMesh, filled: bool) -> dict[str, Any]:
    """What a rank of the mesh holds; zeros if it is to be loaded into."""
    sharded: dict[str, Any] = {}
    for name, whole in WHOLE.items():
        values = whole if filled else torch.zeros_like(whole)
        shard = Shard(DIMENSION.get(name, 0))
        sharded[name] = distribute_tensor(values, mesh, [shard], src_data_rank=None)
    same = torch.tensor(3.25) if filled else torch.tensor(0.0)
    return {**sharded, "optim": {"count": same, "steps": [7 if filled else 0]}}


def check(loaded: dict[str, Any], where: str) -> None:
    for name, whole in WHOLE.items():
        held: DTensor = loaded[name]
        shard = Shard(DIMENSION.get(name, 0))
        expected = distribute_tensor(whole, held.device_mesh, [shard], src_data_rank=None)
        equal(held.to_local(), expected.to_local(), f"{where}: {name}")
    equal(loaded["optim"]["count"], torch.tensor(3.25), f"{where}: count")
    assert loaded["optim"]["steps"] == [7], where


def equal(found: Tensor, expected: Tensor, where: str) -> None:
    assert found.dtype == expected.dtype, where
    assert torch.equal(found, expected), f"{where}: {found} is not {expected}"


def main(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, RANKS + 1)}
    store = Store.open(folder / "store", create=rank == 0) if rank == 0 else None
    dist.barrier()
    store = store or Store.open(folder / "store")
    for n, mesh in meshes.items():
        if rank < n:
            group = mesh.get_group()
            full = state(mesh, filled=True)
            saver.save(
                full, storage_writer=CommitWriter(store, n, branch="ours"), process_group=group
            )
            saver.save(full, checkpoint_id=folder / f"theirs-{n}", process_group=group)
            assert rank or store.head("ours").step == n  # type: ignore[union-attr]
        dist.barrier()
    if rank == 0:
        for n, commit in zip(meshes, store.commits("ours"), strict=True):
            export_dcp(store.reader(commit), folder / f"exported-{n}")
            import_dcp(folder / f"theirs-{n}", store, n, "theirs")
    dist.barrier()
    for n in meshes:
        for m, mesh in meshes.items():
            if rank < m:
                where = f"saved by {n}, loaded by {m}"
                load(mesh, where, storage_reader=opened(store, "ours", n))
                if m == n % RANKS + 1:
                    load(mesh, f"{where}, theirs", storage_reader=opened(store, "theirs", n))
                    load(mesh, f"{where}, exported", checkpoint_id=folder / f"exported-{n}")
    dist.barrier()
    dist.destroy_process_group()


def opened(store: Store, branch: str, saved_by: int) -> CommitReader:
    return CommitReader(store.reader(store.commits(branch)[saved_by - 1]))


def load(mesh: DeviceMesh, where: str, **source: Any) -> None:
    loaded = state(mesh, filled=False)
    loader.load(loaded, process_group=mesh.get_group(), **source)
    check(loaded, where)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")  # torch is imported once
    ranks = [fork.Process(target=main, args=(Path(sys.argv[1]), r)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(sum(process.exitcode != 0 for process in ranks))
