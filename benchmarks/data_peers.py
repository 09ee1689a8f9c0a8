"""The same samples in the format of each library, and how each is told to read them.

A course is "tokens" (rows of `ROW` uint16 ids, read as int64 batches of `BATCH`) or "images" (PNG,
decoded by Pillow). Libraries are imported by name, for none is in the project's own environment.
"""

from __future__ import annotations

import importlib
import io
import sys
import tarfile
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from meshwright.data.feed import Feed
from meshwright.data.order import MixedRows, MixedSamples, plain_order
from meshwright.data.reader import BatchReader
from meshwright.data.samples import Sample, open_samples, pack, write_samples
from meshwright.data.share import Share
from meshwright.data.store import open_store, write_store
from meshwright.data.windows import Windows
from meshwright.train.dataset import TokenDataset
from meshwright.train.token_loader import TokenLoader

ROW = 2048
BATCH = 8
_SHUFFLE_BUFFER = 4096  # samples, of those libraries that shuffle by a buffer
_SHARD_ROWS = 2048

Samples = Sequence[bytes]
Batches = Iterator[Any]


@dataclass(frozen=True)
class Peer:
    """`prepare(folder, samples)` writes; `read(folder, shuffled, workers)` gives decoded batches,
    for ever or for an epoch; `resume(folder, samples)` a function that makes a reader which stands
    after so many samples, for peers that can; `load()` imports the library."""

    prepare: Callable[[Path, Samples], None]
    read: Callable[[Path, bool, int], Batches]
    resume: Callable[[Path, int], Callable[[], Batches]] | None = None
    load: Callable[[], object] = lambda: None


def decode(sample: bytes) -> npt.NDArray[np.integer]:
    """Pixels of a PNG, or ids."""
    if sample[:4] == b"\x89PNG":
        pillow = importlib.import_module("PIL.Image")
        return np.asarray(pillow.open(io.BytesIO(sample)).convert("RGB"))
    return np.frombuffer(sample, np.uint16).astype(np.int64)


def collate(samples: Sequence[Any]) -> torch.Tensor:
    """One tensor of decoded samples."""
    return torch.from_numpy(np.stack(samples))


class RawMemmap(Dataset[npt.NDArray[np.integer]]):
    """Rows of one flat file by number: what a plain script would do."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, "r").view(np.ndarray)

    def __len__(self) -> int:
        return self.tokens.size // ROW

    def __getitem__(self, index: int) -> npt.NDArray[np.integer]:
        return self.tokens[index * ROW : (index + 1) * ROW].astype(np.int64)


def write_raw(folder: Path, samples: Samples) -> None:
    """One flat file."""
    (folder / "raw.bin").write_bytes(b"".join(samples))


def read_raw_loop(folder: Path, shuffled: bool, _workers: int) -> Batches:
    """No loader at all: the bound."""
    rows = RawMemmap(folder / "raw.bin")
    order = np.random.default_rng(0).permutation(len(rows)) if shuffled else np.arange(len(rows))
    for start in range(0, len(rows) - BATCH + 1, BATCH):
        out = np.empty((BATCH, ROW), np.int64)
        for target, index in zip(out, order[start : start + BATCH].tolist(), strict=True):
            target[:] = rows.tokens[index * ROW : (index + 1) * ROW]
        yield torch.from_numpy(out)


def read_raw(folder: Path, shuffled: bool, workers: int) -> Batches:
    """PyTorch's loader over it."""
    rows = RawMemmap(folder / "raw.bin")
    yield from DataLoader(rows, BATCH, shuffle=shuffled, num_workers=workers, collate_fn=collate)


def write_ours(folder: Path, samples: Samples) -> None:
    """A token store of one document, or a sample shard."""
    if samples[0][:4] == b"\x89PNG":
        with write_samples(folder / "ours") as shard:
            for number, sample in enumerate(samples):
                shard.add(pack(Sample(str(number), "", {"png": sample})))
        return
    with write_store(folder / "ours", 65_000, 0) as store:
        store.add(np.frombuffer(b"".join(samples), np.uint16))
        store.end_document()


def our_rows(folder: Path) -> MixedRows:
    """One source."""
    windows = Windows(open_store(folder / "ours"), ROW)
    return MixedRows([windows], plain_order(len(windows), 0))


def read_ours(folder: Path, shuffled: bool, workers: int) -> Batches:
    """Tokens through our data set and PyTorch's loader, images by number; our order has no
    unshuffled kind, so that one reads windows one after another."""
    if (folder / "ours.bin").stat().st_size and not (folder / "raw.bin").exists():
        yield from _our_images(folder)
    elif not shuffled:
        windows = Windows(open_store(folder / "ours"), ROW)
        for start in range(0, len(windows) - BATCH + 1, BATCH):
            yield torch.from_numpy(windows.read(np.arange(start, start + BATCH)))
    else:
        dataset = TokenDataset(our_rows(folder), BATCH)
        for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
            yield batch.tokens


def read_our_loader(folder: Path, _shuffled: bool, workers: int) -> Batches:
    """Our own loader, with many batches in a message."""
    for batch in TokenLoader(TokenDataset(our_rows(folder), BATCH), workers):
        yield batch.tokens


def read_our_arrays(folder: Path, _shuffled: bool, _workers: int) -> Batches:
    """The reader as it is, without PyTorch's loader."""
    for batch in BatchReader(our_rows(folder), Share(BATCH)):
        yield torch.from_numpy(batch.content)


def read_our_feed(folder: Path, _shuffled: bool, _workers: int) -> Batches:
    """The reader behind our feed."""
    reader = BatchReader(our_rows(folder), Share(BATCH))
    with Feed(reader.read, lambda batch: batch.content.nbytes) as feed:
        for batch in feed:
            yield torch.from_numpy(batch.content)


def _our_images(folder: Path) -> Batches:
    shard = open_samples(folder / "ours")
    data = MixedSamples([shard], plain_order(len(shard), 0))
    for batch in BatchReader(data, Share(BATCH)):
        yield collate([decode(sample.fields["png"]) for sample in batch.content])


def resume_ours(folder: Path, at: int) -> Callable[[], Batches]:
    """From a state as a checkpoint holds it."""
    state = our_rows(folder).state(at)

    def resumed() -> Batches:
        reader = BatchReader(our_rows(folder), Share(BATCH))
        reader.load_state_dict(state)
        return (torch.from_numpy(batch.content) for batch in reader)

    return resumed


def write_mds(folder: Path, samples: Samples) -> None:
    """MosaicML's shards."""
    streaming = _streaming()
    with streaming.MDSWriter(out=str(folder / "mds"), columns={"x": "bytes"}) as out:
        for sample in samples:
            out.write({"x": sample})


def _mds(folder: Path, shuffled: bool) -> Any:
    streaming = _streaming()
    return streaming.StreamingDataset(local=str(folder / "mds"), shuffle=shuffled, batch_size=BATCH)


def read_mds(folder: Path, shuffled: bool, workers: int) -> Batches:
    """Its data set in PyTorch's loader."""
    yield from DataLoader(
        _mds(folder, shuffled),
        BATCH,
        num_workers=workers,
        collate_fn=lambda rows: collate([decode(row["x"]) for row in rows]),
    )


def resume_mds(folder: Path, at: int) -> Callable[[], Batches]:
    """By its own state."""
    state = _mds(folder, True).state_dict(at, from_beginning=True)

    def resumed() -> Batches:
        dataset = _mds(folder, True)
        dataset.load_state_dict(state)
        return iter(
            DataLoader(
                dataset, BATCH, collate_fn=lambda rows: collate([decode(row["x"]) for row in rows])
            )
        )

    return resumed


def _streaming() -> Any:
    """mosaicml-streaming imports torchvision for data sets that are not read here; the wheels of
    that do not fit a torch without CUDA, so names stand in for it."""
    if "torchvision" not in sys.modules:
        names = "torchvision", "torchvision.datasets", "torchvision.transforms"
        for name in (*names, "torchvision.transforms.functional"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
        sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
        sys.modules["torchvision.datasets"].CIFAR10 = object  # type: ignore[attr-defined]
        functional = sys.modules["torchvision.transforms.functional"]
        functional.to_tensor = None  # type: ignore[attr-defined]
    return importlib.import_module("streaming")


def write_lit(folder: Path, samples: Samples) -> None:
    """LitData's chunks, of tokens by its own loader for them."""
    cache = importlib.import_module("litdata.streaming.cache").Cache
    images = samples[0][:4] == b"\x89PNG"
    loader = None if images else _lit_tokens()
    out = cache(str(folder / "lit"), chunk_bytes=64 << 20, item_loader=loader)
    for number, sample in enumerate(samples):
        out[number] = sample if images else torch.from_numpy(decode(sample).astype(np.uint16))
    out.done()
    out.merge()


def _lit_tokens() -> Any:
    return importlib.import_module("litdata").TokensLoader(block_size=ROW)


def read_lit(folder: Path, shuffled: bool, workers: int) -> Batches:
    """Its data set in its loader."""
    lit = importlib.import_module("litdata")
    tokens = (folder / "raw.bin").exists()
    dataset = lit.StreamingDataset(
        str(folder / "lit"), shuffle=shuffled, item_loader=_lit_tokens() if tokens else None
    )
    yield from lit.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=workers, collate_fn=_lit_collate
    )


def _lit_collate(rows: Sequence[Any]) -> torch.Tensor:
    if isinstance(rows[0], torch.Tensor):
        return torch.stack(list(rows)).long()
    return collate([decode(bytes(row)) for row in rows])


def write_tar(folder: Path, samples: Samples) -> None:
    """Shards of WebDataset."""
    for first in range(0, len(samples), _SHARD_ROWS):
        with tarfile.open(folder / f"wds-{first // _SHARD_ROWS:04}.tar", "w") as archive:
            for number, sample in enumerate(samples[first : first + _SHARD_ROWS], first):
                info = tarfile.TarInfo(f"{number:08}.bin")
                info.size = len(sample)
                archive.addfile(info, io.BytesIO(sample))


def read_tar(folder: Path, shuffled: bool, workers: int) -> Batches:
    """Its pipeline in its loader."""
    wds = importlib.import_module("webdataset")
    shards = [str(path) for path in sorted(folder.glob("wds-*.tar"))]
    data = wds.WebDataset(shards, shardshuffle=len(shards) if shuffled else False)
    data = data.shuffle(_SHUFFLE_BUFFER) if shuffled else data
    data = data.to_tuple("bin").map(lambda row: decode(row[0])).batched(BATCH, collation_fn=collate)
    yield from wds.WebLoader(data, batch_size=None, num_workers=workers)


def write_hf(folder: Path, samples: Samples) -> None:
    """Arrow files of Hugging Face."""
    hf = importlib.import_module("datasets")
    images = samples[0][:4] == b"\x89PNG"
    rows = {"x": list(samples)} if images else {"x": [decode(s).astype(np.uint16) for s in samples]}
    hf.Dataset.from_dict(rows).save_to_disk(str(folder / "hf"))


def read_hf(folder: Path, shuffled: bool, workers: int) -> Batches:
    """Its map-style data set in PyTorch's loader: a true shuffle."""
    data = _hf(folder)
    yield from DataLoader(
        data, BATCH, shuffle=shuffled, num_workers=workers, collate_fn=_hf_collate
    )


def read_hf_stream(folder: Path, shuffled: bool, workers: int) -> Batches:
    """Its iterable one, which shuffles by a buffer."""
    data = _hf(folder).to_iterable_dataset(num_shards=8)
    data = data.shuffle(seed=0, buffer_size=_SHUFFLE_BUFFER) if shuffled else data
    yield from DataLoader(data, BATCH, num_workers=workers, collate_fn=_hf_collate)


def resume_hf_stream(folder: Path, at: int) -> Callable[[], Batches]:
    """By its own state, which shuffling loses samples of; unshuffled here, so that it holds."""
    data = _hf(folder).to_iterable_dataset(num_shards=8)
    reading = iter(data)
    for _ in range(at):
        next(reading)
    state = data.state_dict()

    def resumed() -> Batches:
        again: IterableDataset[Any] = _hf(folder).to_iterable_dataset(num_shards=8)
        again.load_state_dict(state)  # type: ignore[attr-defined]
        return iter(DataLoader(again, BATCH, collate_fn=_hf_collate))

    return resumed


def _hf(folder: Path) -> Any:
    return (
        importlib.import_module("datasets").load_from_disk(str(folder / "hf")).with_format("numpy")
    )


def _hf_collate(rows: Sequence[Any]) -> torch.Tensor:
    first = rows[0]["x"]
    if isinstance(first, bytes):
        return collate([decode(row["x"]) for row in rows])
    return collate([row["x"].astype(np.int64) for row in rows])


def peers() -> dict[str, Peer]:
    """By name; those with "tokens" in it have no images."""
    return {
        "raw memmap, no loader (tokens)": Peer(write_raw, read_raw_loop),
        "torch DataLoader over a memmap (tokens)": Peer(write_raw, read_raw),
        "Meshwright, in torch's DataLoader": Peer(write_ours, read_ours, resume_ours),
        "Meshwright, its own loader (tokens)": Peer(write_ours, read_our_loader),
        "Meshwright, numpy iterator (tokens)": Peer(write_ours, read_our_arrays),
        "Meshwright, behind its feed (tokens)": Peer(write_ours, read_our_feed),
        "mosaicml-streaming": Peer(write_mds, read_mds, resume_mds, _streaming),
        "LitData": Peer(write_lit, read_lit, load=_import("litdata")),
        "WebDataset": Peer(write_tar, read_tar, load=_import("webdataset")),
        "HF datasets, map": Peer(write_hf, read_hf, load=_import("datasets")),
        "HF datasets, iterable": Peer(
            write_hf, read_hf_stream, resume_hf_stream, _import("datasets")
        ),
    }


def _import(name: str) -> Callable[[], object]:
    return lambda: importlib.import_module(name)
