"""Who saves and restores: each as its documents say, on a CPU, with what it caches kept.

`save` returns when training may go on, `fence` when the state may change again, `wait` when the
save is as durable as the peer makes it.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import checkpoint_model as shape
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

State = dict[str, Tensor]


class Peer:
    """Saves `state`, whose tensors change in place, to `folder`. `at_once`: whether the last save
    was copied before training went on, where there is a choice."""

    at_once = False

    def __init__(self, folder: Path, state: State) -> None:
        self.folder, self.state = folder, state

    def save(self, step: int) -> None:
        """Begin to save."""
        raise NotImplementedError

    def fence(self) -> None:
        """Until the state may change."""

    def wait(self) -> None:
        """Until it is saved."""

    def prune(self) -> None:
        """Remove all saves but the newest, where each stands for itself."""
        folders = sorted(self.folder.glob("step-*"))
        for old in folders[:-1]:
            shutil.rmtree(old)

    def close(self) -> None:
        """Let go of threads and processes."""

    def load(self) -> None:
        """Fill `state` from the newest save."""
        raise NotImplementedError

    def path(self, step: int) -> str:
        """Where a step goes."""
        return str(self.folder / f"step-{step:06d}")

    @property
    def newest(self) -> str:
        """Where the newest step is."""
        return str(max(self.folder.glob("step-*")))


class Dcp(Peer):
    """torch.distributed.checkpoint, of one process."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

        self._saver, self._loader = state_dict_saver, state_dict_loader

    def save(self, step: int) -> None:
        """As the base class."""
        self._saver.save(self.state, checkpoint_id=self.path(step), no_dist=True)

    def load(self) -> None:
        """As the base class."""
        self._loader.load(self.state, checkpoint_id=self.newest, no_dist=True)


class DcpAsync(Dcp):
    """The same by a thread, its copy of the state kept for the next."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._saved: Future[Any] | None = None

    def save(self, step: int) -> None:
        """As the base class."""
        path = self.path(step)
        saved = self._saver.async_save(
            self.state, checkpoint_id=path, async_stager=self._stager, no_dist=True
        )
        assert isinstance(saved, Future)
        self._saved = saved

    def wait(self) -> None:
        """As the base class."""
        assert self._saved
        self._saved.result()


class TorchCheckpointing(Peer):
    """Its manager, asynchronous. Direct input and output, its default, fails on ext4 (EINVAL)."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_async_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(config)
        self._saved: Any = None

    def save(self, step: int) -> None:
        """As the base class."""
        self._saved = self._manager.save(self.path(step), {"state": self.state})

    def fence(self) -> None:
        """Its lock is for just this."""
        with self._manager.lock():
            pass

    def wait(self) -> None:
        """As the base class."""
        self._saved.result()

    def close(self) -> None:
        """As the base class."""
        self._manager.close()

    def load(self) -> None:
        """As the base class."""
        self._manager.load(self.newest, into={"state": self.state})


class Moonclip(Peer):
    """Its manager for tensors with names, asynchronous, as it comes."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from moonclip import CheckpointManager

        self._manager = CheckpointManager(str(folder), world_size=1, rank=0)

    def save(self, step: int) -> None:
        """As the base class."""
        self._manager.save_raw(step, dict(self.state))

    def wait(self) -> None:
        """As the base class."""
        self._manager.flush()

    def prune(self) -> None:
        """Saves rest on each other."""

    def load(self) -> None:
        """As the base class."""
        newest = self._manager.list_snapshots()[-1]
        found = self._manager.load_tensors(newest["id"], list(self.state))
        for name, tensor in self.state.items():
            flat = torch.frombuffer(found[name], dtype=torch.float32)
            tensor.copy_(flat.view(tensor.shape))


class Elements:
    """A tensor's memory, as Background asks for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._flat: NDArray[Any] = tensor.numpy().ravel()
        self.dtype = self._flat.dtype

    def copy_to(self, out: NDArray[Any], start: int) -> None:
        """Elements from `start` on."""
        np.copyto(out, self._flat[start : start + len(out)])


class Ours(Peer):
    """Meshwright's store, written in the background: a whole commit, then updates to it."""

    updates, codec = True, "planes"

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder, state)
        from meshwright.checkpoint.background import Background
        from meshwright.checkpoint.committing import Committing
        from meshwright.checkpoint.pieces import Piece
        from meshwright.checkpoint.store import MAIN, Store

        self._store = Store.open(folder, create=True)
        pieces = {name: Piece.whole(name, tuple(tensor.shape)) for name, tensor in state.items()}
        self._sources = {piece: Elements(state[name]) for name, piece in pieces.items()}
        self._flat = {piece: state[name].numpy().ravel() for name, piece in pieces.items()}
        committing = Committing(self._store, MAIN, deadline_s=60.0)
        self._background = Background(self._store, MAIN, 0, committing=committing)
        self._saved = 0

    def save(self, step: int) -> None:
        """As the base class."""
        from meshwright.checkpoint.codec import Update
        from meshwright.checkpoint.parts import Attempt
        from meshwright.checkpoint.writing import Encoding

        update = Update(shape.LR, *shape.BETAS, shape.EPS, shape.DECAY, step)
        later = self.updates and self._saved > 0
        encoding = Encoding(self.codec, update=(lambda _: update) if later else None)
        attempt = Attempt(step, f"step-{step}", 1)
        self.at_once = self._saved % 2 == 0  # both are measured
        self._background.save(
            attempt, self._sources, encoding, keep_base=self.updates, overlap=not self.at_once
        )
        self._saved += 1

    def fence(self) -> None:
        """As the base class."""
        self._background.fence()

    def wait(self) -> None:
        """As the base class."""
        self._background.wait()
        for outcome in self._background.take_outcomes():
            if outcome.error:
                raise RuntimeError(outcome.error)

    def prune(self) -> None:
        """Saves rest on each other, and on parts of older ones."""

    def load(self) -> None:
        """As the base class."""
        head = self._store.head()
        assert head
        self._store.reader(head).fill(self._flat)


class OursWhole(Ours):
    """Each save a whole commit, compressed."""

    updates = False


class OursRaw(OursWhole):
    """Each save a whole commit, as it is."""

    codec = "raw"


PEERS: dict[str, type[Peer]] = {
    "DCP": Dcp,
    "DCP, asynchronous": DcpAsync,
    "torch_checkpointing": TorchCheckpointing,
    "moonclip": Moonclip,
    "Meshwright, updates": Ours,
    "Meshwright, whole commits": OursWhole,
    "Meshwright, whole commits, raw": OursRaw,
}
